package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// A hookError is an error in a hook that is not an error of the connection.
type hookError struct {
	hook int // index in engine.hooks
	err  error
}

func (e *hookError) Error() string { return "hook: " + e.err.Error() }
func (e *hookError) Unwrap() error { return e.err }

// begin calls a hook's Begin, and marks the errors of the statements that it queues as the hook's.
func begin(h hook.Hook, place int, tx pgx.Tx, first *pgx.Batch, batch []leasing.Settlement) (act hook.Act, err error) {
	if h.Begin == nil || len(batch) == 0 {
		return nil, nil
	}
	queued := first.Len()
	err = inHook(place, tx, func() (err error) {
		act, err = h.Begin(first, batch)
		return err
	})
	for _, q := range first.QueuedQueries[queued:] {
		answered := q.Fn
		if answered == nil {
			answered = func(results pgx.BatchResults) error { _, err := results.Exec(); return err }
		}
		q.Fn = func(results pgx.BatchResults) error {
			return inHook(place, tx, func() error { return answered(results) })
		}
	}
	return act, err
}

// act calls the function that a hook's Begin returned. It is an error if that leaves the transaction aborted.
func act(ctx context.Context, place int, tx pgx.Tx, do hook.Act, settled []leasing.Settlement, carrier *leasing.Carrier) error {
	if do == nil || len(settled) == 0 {
		return nil
	}
	return inHook(place, tx, func() error {
		if err := do(ctx, tx, settled, carrier); err != nil {
			return err
		}
		if tx.Conn().PgConn().TxStatus() == 'E' {
			return errors.New("it left the transaction aborted")
		}
		return nil
	})
}

// inHook calls a hook's code. It wraps errors and panics in a hookError, except an error after which the
// connection is gone.
func inHook(place int, tx pgx.Tx, do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &hookError{place, fmt.Errorf("%w\n%s", &run.PanicError{Value: p}, debug.Stack())}
		}
	}()
	if err = do(); err == nil || tx.Conn().IsClosed() {
		return err
	}
	return &hookError{place, err}
}

// A Backlog counts the due runs of a prefix that are not leased yet. Paused types are left out.
type Backlog struct {
	Prefix  string
	Due     int64         // up to 10,000 are counted, divided among lanes (types and priorities), but at least 1000 of each
	AtLeast bool          // Due is a lower bound
	Oldest  time.Duration // for how long the oldest has been due; 0: none is
}

// An Observer is told what a worker does. Nil functions are skipped. The functions are called from several
// goroutines and must return quickly. A verdict is what becomes of the run: succeeded, failed, retried, postponed,
// released or elsewhere, as in the history.
type Observer struct {
	Polled    func(leased int, took time.Duration, err error)      // each poll
	Carried   func(leased int)                                     // each settle transaction that has leased the next steps of processes for this worker
	Finished  func(typ string, verdict string, took time.Duration) // each handler that returned
	Settled   func(typ string, verdict string)                     // each outcome recorded
	SettleRun func(batch int, took time.Duration, err error)       // each settle statement or transaction
	Refused   func(typ string)                                     // each outcome refused: the lease was lost
	Lost      func(typ string, cause error)                        // each handler whose context ended with a cause
	Extended  func(leases int, took time.Duration, err error)      // each heartbeat
	Reclaimed func(again, exhausted int)                           // expired leases taken back
	Stuck     func(handlers int)                                   // handlers that ignore the end of their context
	SetAside  func(typ string)                                     // each run that the database refuses to have leased, extended, settled or taken back
	Fault     func(statement string, failing bool)                 // every 10 s: a statement fails for every row, or no longer does
	Breakers  func(open []string)                                  // the types whose breaker is open, whenever that changes
	Stalled   func(types int)                                      // every 10 s: types with due runs that could be leased and are not
	Elsewhere func(runs int)                                       // every 10 s: runs of the worker's prefixes that are executed elsewhere, handed on by any worker
	Backlog   func(due []Backlog)                                  // every 10 s: how many runs of each of the worker's prefixes are due
}
