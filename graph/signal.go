package graph

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/fault"
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
	signalSoon  = 10 * time.Millisecond

	mostStaying = 4               // runs that keep their slots while they are refused to all
	longestStay = 5 * time.Minute // without any progress: less than a run may take
)

// signal gives a signal to those who waited when it was taken up: in batches, each in a transaction of its own, which keeps how
// far it has come. So whoever is started once more goes on from there.
//
// While it is refused to all its run stays, because how often it may be put off is counted. Of many such runs some stay, and the
// others are put off, so that their slots are free; at first for five seconds.
func (e *Engine) signal(ctx context.Context, p signalPayload) (Signalled, error) {
	if err := named(p.Name); err != nil {
		return Signalled{}, run.Permanent(err)
	}
	info := run.FromContext(ctx)
	var (
		most     fault.Ration
		failures fault.Series
		anyCode  bool // whatever the SQLSTATE is, it is an answer about a token
		one      bool // likewise, since it fails with one token
		refusals int  // since there was progress
		before   given
		staying  bool
		since    = time.Now()
		pause    = signalSoon
	)
	defer func() {
		if staying {
			e.staying.Add(-1)
		}
	}()
	for {
		n := most.Of(signalBatch)
		g, err := e.give(ctx, info.ID, n, anyCode || one)
		switch first := fault.Of(err); {
		case ctx.Err() != nil:
			return Signalled{}, context.Cause(ctx)
		case g.over:
			return Signalled{}, errors.New("graph: the run is not leased any more")
		case g.finished:
			return g.Signalled, nil
		case g.refused || first == fault.Halve:
			refusals++
		case err != nil:
			if _, lasting := failures.Of(err); lasting {
				anyCode = true
			}
			if one = first == fault.Fewer && n == 1; first == fault.Fewer && n > 1 {
				most.Less(n)
			}
		case g != before:
			before, refusals, one, since, pause = g, 0, false, time.Now(), signalSoon
			failures.Of(nil)
			most.Through()
			continue
		} // else all that are left are locked
		if refusals >= signalTries && !staying {
			staying = e.stay()
		}
		if refusals >= signalTries && !staying || time.Since(since) > longestStay {
			return Signalled{}, run.Again(signalPause << min(info.LeaseNo/100, 10)) // or it would be put off too often within hours
		}
		select {
		case <-ctx.Done():
			return Signalled{}, context.Cause(ctx)
		case <-time.After(pause):
		}
		pause = min(2*pause, signalPause)
	}
}

// stay reports whether one more run may stay while it is refused to all.
func (e *Engine) stay() bool {
	if e.staying.Add(1) <= mostStaying {
		return true
	}
	e.staying.Add(-1)
	return false
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
	err = pgx.BeginTxFunc(ctx, e.pool, pgx.TxOptions{BeginQuery: `begin isolation level read committed; SET LOCAL statement_timeout = '20s'; SET LOCAL idle_in_transaction_session_timeout = '20s'`}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT reached, set_aside, waiting, finished, refused, over FROM process_signal_v1($1, $2, $3)`, unprepared, signal, most, anyCode).
			Scan(&g.Reached, &g.SetAside, &g.waiting, &g.finished, &g.refused, &g.over)
	})
	if err != nil {
		return given{}, err // what was answered before a commit that failed has not happened
	}
	return g, nil
}

// tend gives signals to those who could not take them before, when it is time, and opens and ends incidents of what is set aside.
func (e *Engine) tend(ctx context.Context) error {
	_, err := e.pool.Exec(ctx, `SELECT process_try_again_v1()`, unprepared)
	for until := time.Now().Add(time.Second); ; {
		var told int
		problem := e.pool.QueryRow(ctx, `SELECT process_incidents_v1()`, unprepared).Scan(&told)
		if problem != nil || told == 0 || time.Now().After(until) {
			return errors.Join(err, problem)
		}
	}
}
