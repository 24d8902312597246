package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// ErrNoRun means that the context does not come from a worker's handler, or that the handler has returned.
var ErrNoRun = errors.New("worker: the context belongs to no run")

// extras holds what a handler wants done in the settle transaction of its run.
type extras struct {
	mu      sync.Mutex
	closed  bool // the handler has returned: nothing more is added, and the rest may be read without mu
	effects []func(pgx.Tx) error
	events  []outbox.Event
	lease   *leasing.Lease // see Token
	worker  *Worker        // nil in Try
}

func (x *extras) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
}

// drop forgets the effects and events. Call close first.
func (x *extras) drop() { x.effects, x.events = nil, nil }

type extrasKey struct{}

func extrasOf(ctx context.Context) (*extras, error) {
	x, ok := ctx.Value(extrasKey{}).(*extras)
	if !ok {
		return nil, ErrNoRun
	}
	return x, nil
}

// InSettle registers effect, which the worker calls in the transaction that records the run's success. Its
// writes, the result and the events commit together, and only if the lease still holds. effect is not called if
// the handler fails. An error of effect counts as the handler's.
//
// effect may be called again if the transaction has to be repeated, after a deadlock or a lost connection. So
// it must not keep state of its own. It must not end the transaction. The transaction lasts a minute at most.
//
// InSettle returns ErrNoRun outside of a handler.
func InSettle(ctx context.Context, effect func(pgx.Tx) error) error {
	x, err := extrasOf(ctx)
	if err != nil {
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return ErrNoRun
	}
	x.effects = append(x.effects, effect)
	return nil
}

// Emit appends an event to the outbox in the transaction that records the run's success. If the handler fails,
// the event is dropped. A zero Aggregate means the run. The payload is encoded at once. Emit returns ErrNoRun
// outside of a handler, or an error if the payload cannot be encoded.
func Emit(ctx context.Context, event outbox.Event) error {
	x, err := extrasOf(ctx)
	if err != nil {
		return err
	}
	payload, err := json.Marshal(event.Payload)
	if err != nil {
		return fmt.Errorf("encode payload of event %q: %w", event.Type, err)
	}
	event.Payload = json.RawMessage(payload)
	if event.Aggregate == uuid.Nil {
		event.Aggregate = run.FromContext(ctx).ID
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return ErrNoRun
	}
	x.events = append(x.events, event)
	return nil
}
