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
	MaxAttempts    int             // number of the last attempt, by the present policy of the type
	LeaseNo        int64           // grows with every lease: a fencing number for systems outside
	IdempotencyKey string          // empty: none
	Tenant         string          // tenant of the run; of a step, that of its process; empty: none
	Metadata       json.RawMessage // nil: none
	StartedAt      time.Time       // when the lease was taken, by the database's clock
	Worker         string          // name of the worker process

	// These are set for steps of processes, and zero for all other runs.
	Instance    uuid.UUID // the process instance
	BusinessKey string    // key of the instance; empty: none
	Node        string    // the step's node, with /item for an element of a list, and /undo for an undo step
}

type infoKey struct{}

// NewContext returns a context that carries info. The worker calls it. Tests of handlers may
// call it too.
func NewContext(ctx context.Context, info Info) context.Context {
	return context.WithValue(ctx, infoKey{}, info)
}

// FromContext returns the Info of the run that a handler executes, from the handler's context.
// For any other context it returns the zero Info.
func FromContext(ctx context.Context) Info {
	info, _ := ctx.Value(infoKey{}).(Info)
	return info
}
