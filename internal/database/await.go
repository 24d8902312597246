package database

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
)

// remindEvery is the time between two log entries about the same wait.
const remindEvery = 10 * time.Second

// A Waiter waits for a database.
type Waiter struct {
	Config   *pgx.ConnConfig
	Log      *slog.Logger
	FailFast bool            // give up at the first error
	Waiting  func(err error) // called with the reason of each wait; may be nil
}

// Await returns once the engine can work with the database. It waits, with backoff, while there is an error
// that may pass. It returns a *FatalError at once, and ctx's error when ctx ends.
func (w *Waiter) Await(ctx context.Context) (Facts, error) {
	pause := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(200*time.Millisecond),
		backoff.WithMaxInterval(5*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
	var told time.Time
	for {
		facts, err := w.try(ctx)
		if err == nil {
			return facts, nil
		}
		if ctx.Err() != nil {
			return facts, ctx.Err()
		}
		var final *FatalError
		if w.FailFast || errors.As(err, &final) {
			return facts, err
		}
		if w.Waiting != nil {
			w.Waiting(err)
		}
		if time.Since(told) >= remindEvery {
			told = time.Now()
			w.Log.Warn("waiting for the database", "err", err)
		}
		select {
		case <-ctx.Done():
			return facts, ctx.Err()
		case <-time.After(pause.NextBackOff()):
		}
	}
}

func (w *Waiter) try(ctx context.Context) (Facts, error) {
	ctx, done := context.WithTimeout(ctx, 2*connectTimeout)
	defer done()
	return Inspect(ctx, w.Config)
}
