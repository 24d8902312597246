package run

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
)

// Info is what a handler may want to know about the run it executes.
type Info struct {
	ID             uuid.UUID       // the same at every attempt: an idempotency key for systems outside
	Type           string          //
	Attempt        int             // 1 at the first charged start
	MaxAttempts    int             // the last attempt that will be made, as the policy of the type is by now
	LeaseNo        int64           // grows with every lease: a fencing number for systems outside
	IdempotencyKey string          // empty: none was given
	Tenant         string          // whose it is; steps have that of their process; empty: nobody's in particular
	Metadata       json.RawMessage // nil: none was given
	StartedAt      time.Time       // when the lease was taken, by the database's clock
	Worker         string          // name of the worker process

	// Of a step of a process; zero for all other runs.
	Instance    uuid.UUID // the instance of the process
	BusinessKey string    // of the instance; empty: it has none
	Node        string    // the step's node, with /item for an element of a list, and /undo for what undoes it
}

type infoKey struct{}

// NewContext returns a context that carries info. The worker calls it; tests of handlers
// may, too.
func NewContext(ctx context.Context, info Info) context.Context {
	return context.WithValue(ctx, infoKey{}, info)
}

// FromContext returns the Info of the run that the handler with this context executes.
// Outside of a handler it returns the zero Info.
func FromContext(ctx context.Context) Info {
	info, _ := ctx.Value(infoKey{}).(Info)
	return info
}
