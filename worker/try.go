package worker

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// Try calls the handler of a type as a worker would, in a test: with its middleware, and a context from which it
// learns info. What it wants done with its success is done in tx: its effects, then its events. Roll tx back to
// leave nothing. There is no run: nothing is stored, leased, settled or tried again, and a panic is not caught.
//
// payload is encoded by encoding/json. info.Type chooses the handler; a zero info.ID is drawn, a zero
// info.Attempt is 1. Try returns the handler's result, or its error, which run.IsPermanent, run.Delay and run.Code
// tell about; or that of an effect.
func Try(ctx context.Context, tx pgx.Tx, mux *Mux, info run.Info, payload any) (json.RawMessage, error) {
	e := mux.lookup(info.Type)
	if e == nil {
		return nil, fmt.Errorf("worker: no handler for type %q is registered", info.Type)
	}
	text, err := json.Marshal(payload)
	if err != nil {
		return nil, fmt.Errorf("worker: encode payload: %w", err)
	}
	if info.ID == uuid.Nil {
		info.ID = uuid.New()
	}
	info.Attempt = max(info.Attempt, 1)
	wants := &extras{lease: &leasing.Lease{Info: info}} // its token is that of no lease
	result, err := e.handler(context.WithValue(run.NewContext(ctx, info), extrasKey{}, wants), text)
	wants.close()
	if err != nil {
		return nil, err
	}
	for _, effect := range wants.effects {
		if err := effect(tx); err != nil {
			return nil, err
		}
	}
	return result, outbox.Append(ctx, tx, wants.events...)
}
