package graph

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/run"
)

// Signalled is the result of a run that sends a signal.
type Signalled struct {
	Reached  int `json:"reached"`   // tokens that it was given to
	SetAside int `json:"set_aside"` // tokens that cannot take it, and are owed it: see process_unreachable
}

const (
	signalBatch = 1000            // tokens, in one transaction
	signalPause = 5 * time.Second // the longest one
	signalTries = 3               // in one go, while it is refused to all
	// patience is how long trouble that passes by itself, by its code, is believed to do so.
	patience = time.Minute
)

// signal gives a signal to those who waited when it was taken up: in batches, each in a transaction of its own, which keeps how
// far it has come. So whoever is started once more goes on from there.
func (e *Engine) signal(ctx context.Context, p SignalPayload) (Signalled, error) {
	if err := named(p.Name); err != nil {
		return Signalled{}, err
	}
	id := run.FromContext(ctx).ID
	most, refusals, before := signalBatch, 0, given{}
	var trouble time.Time // since when
	for pause := 10 * time.Millisecond; ; {
		g, err := e.give(ctx, id, most, !trouble.IsZero() && time.Since(trouble) > patience)
		switch {
		case ctx.Err() != nil:
			return Signalled{}, context.Cause(ctx)
		case g.over:
			return Signalled{}, errors.New("graph: the run is not leased any more")
		case g.finished:
			return g.Signalled, nil
		case g.refused || err != nil && !passes(err):
			if refusals++; refusals >= signalTries {
				return Signalled{}, run.Again(signalPause) // and others have the slot
			}
		case err != nil:
			if trouble.IsZero() {
				trouble = time.Now()
			}
			if tooMuch(err) && most > 1 {
				most /= 2
			}
		case g != before:
			before, trouble = g, time.Time{}
			continue
		} // else all that are left are locked
		select {
		case <-ctx.Done():
			return Signalled{}, context.Cause(ctx)
		case <-time.After(pause):
		}
		pause = min(2*pause, signalPause)
	}
}

// given is what came of one batch.
type given struct {
	Signalled          // so far
	waiting       int  // were passed over: somebody has them locked
	finished      bool // nobody is left
	refused, over bool
}

// give gives a signal to a batch of those who wait for it.
func (e *Engine) give(ctx context.Context, signal uuid.UUID, most int, anyCode bool) (g given, err error) {
	err = pgx.BeginTxFunc(ctx, e.pool, pgx.TxOptions{BeginQuery: `begin; SET LOCAL statement_timeout = '20s'; SET LOCAL idle_in_transaction_session_timeout = '20s'`}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT reached, set_aside, waiting, finished, refused, over FROM process_signal_v1($1, $2, $3)`, unprepared, signal, most, anyCode).
			Scan(&g.Reached, &g.SetAside, &g.waiting, &g.finished, &g.refused, &g.over)
	})
	return g, err
}

// passes reports whether trouble may pass by itself: the connection, the server, a lock, the time. All else is refused.
func passes(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return true
	}
	switch pg.Code[:min(2, len(pg.Code))] {
	case "08", "25", "40", "53", "57", "58":
		return true
	}
	return pg.Code == "55P03"
}

// tooMuch reports whether fewer at a time may do.
func tooMuch(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return false
	}
	switch pg.Code {
	case "53200", "53400", "57014", "25P03", "25P04":
		return true
	}
	return false
}

// Tend gives signals to those who could not take them before, when it is time. Call it every second.
func (e *Engine) Tend(ctx context.Context) error {
	_, err := e.pool.Exec(ctx, `SELECT process_try_again_v1()`, unprepared)
	return err
}
