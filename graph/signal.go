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
	Reached  int `json:"reached"`   // tokens that got the signal
	SetAside int `json:"set_aside"` // tokens whose rows refused the signal; they get it later: see the view process_unreachable
}

const (
	signalBatch = 1000                  // tokens in one transaction, at most
	signalPause = 5 * time.Second       // the longest pause between two batches
	signalTries = 3                     // batches that fail without progress before the run stays or is put off
	signalSoon  = 10 * time.Millisecond // the shortest pause between two batches

	mostStaying = 4               // runs that may keep their slots while the database refuses the signal for every token
	longestStay = 5 * time.Minute // without progress; less than the time limit of a run
)

// signal delivers a signal to the tokens that waited for it when this run first executed. It delivers in batches, each
// in its own transaction, which also records the progress. A handler that is started again continues from there.
//
// If the database refuses the signal for every token, the handler stays and tries again, because the number of times
// that a run may be put off (run.Again) is limited. At most mostStaying such runs stay; the others are put off, for 5 s
// at first, so that their slots are free for other work.
func (e *Engine) signal(ctx context.Context, p signalPayload) (Signalled, error) {
	if err := named(p.Name); err != nil {
		return Signalled{}, run.Permanent(err)
	}
	info := run.FromContext(ctx)
	var (
		most     fault.Ration
		failures fault.Series
		anyCode  bool // an error of any SQLSTATE is taken to be about a token, because errors have lasted for too long
		one      bool // the same, because a batch of one token fails
		refusals int  // since the last progress
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
		} // otherwise nothing changed: all remaining waits are locked
		if refusals >= signalTries && !staying {
			staying = e.stay()
		}
		if refusals >= signalTries && !staying || time.Since(since) > longestStay {
			return Signalled{}, run.Again(signalPause << min(info.LeaseNo/100, 10)) // longer pauses, or it would reach the limit of run.Again within hours
		}
		select {
		case <-ctx.Done():
			return Signalled{}, context.Cause(ctx)
		case <-time.After(pause):
		}
		pause = min(2*pause, signalPause)
	}
}

// stay reports whether one more signal run may keep its slot while the database refuses the signal for every token, and
// counts it if so.
func (e *Engine) stay() bool {
	if e.staying.Add(1) <= mostStaying {
		return true
	}
	e.staying.Add(-1)
	return false
}

// given is the progress of a signal after one batch.
type given struct {
	Signalled      // in all batches so far
	waiting   int  // waits of this batch that were skipped because they are locked
	finished  bool // no token is left
	// refused: the statement failed for a control, too, so no token is to blame. over: the run is not leased any more.
	refused, over bool
}

// give delivers a signal to a batch of at most most tokens.
func (e *Engine) give(ctx context.Context, signal uuid.UUID, most int, anyCode bool) (g given, err error) {
	err = pgx.BeginTxFunc(ctx, e.pool, pgx.TxOptions{BeginQuery: `begin isolation level read committed; SET LOCAL statement_timeout = '20s'; SET LOCAL idle_in_transaction_session_timeout = '20s'`}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT reached, set_aside, waiting, finished, refused, over FROM process_signal_v1($1, $2, $3)`, unprepared, signal, most, anyCode).
			Scan(&g.Reached, &g.SetAside, &g.waiting, &g.finished, &g.refused, &g.over)
	})
	if err != nil {
		return given{}, err // the commit may have failed after the query answered: then nothing of the answer is true
	}
	return g, nil
}

// tend delivers signals that are owed to tokens that refused them before, when the next try is due. It also opens and
// resolves the incidents that report rows which are set aside; that part stops after 1 s, to continue at the next call.
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
