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
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A hookError is trouble in a hook, and not with the connection.
type hookError struct {
	hook int // its place in Config.hooks
	err  error
}

func (e *hookError) Error() string { return "hook: " + e.err.Error() }
func (e *hookError) Unwrap() error { return e.err }

// begin calls a hook's Begin.
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

// act calls what a hook's Begin has returned, which must not leave the transaction aborted.
func act(ctx context.Context, place int, tx pgx.Tx, do hook.Act, settled []leasing.Settlement) error {
	if do == nil || len(settled) == 0 {
		return nil
	}
	return inHook(place, tx, func() error {
		if err := do(ctx, tx, settled); err != nil {
			return err
		}
		if tx.Conn().PgConn().TxStatus() == 'E' {
			return errors.New("it left the transaction aborted")
		}
		return nil
	})
}

// inHook calls a hook's code: what goes wrong there is its trouble, unless the connection is gone.
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

// A Backlog is how much of a prefix is due and not leased yet, of what is not paused.
type Backlog struct {
	Prefix  string
	Due     int64         // counted up to ten thousand, shared among types and priorities, but to a thousand of each
	AtLeast bool          // there may be more
	Oldest  time.Duration // for how long the first of them has been due; 0: none is
}

// An Observer is told what a worker does. Nil functions are skipped. They are called from
// several goroutines and must return quickly.
type Observer struct {
	Polled    func(leased int, took time.Duration, err error)                // each poll
	Finished  func(typ string, verdict settling.Verdict, took time.Duration) // each handler that returned
	Settled   func(typ string, verdict settling.Verdict)                     // each outcome recorded
	SettleRun func(batch int, took time.Duration, err error)                 // each settle statement or transaction
	Refused   func(typ string)                                               // each outcome refused: the lease was lost
	Lost      func(typ string, cause error)                                  // each handler whose context ended with a cause
	Extended  func(leases int, took time.Duration, err error)                // each heartbeat
	Reclaimed func(again, exhausted int)                                     // expired leases taken back
	Stuck     func(handlers int)                                             // handlers that ignore the end of their context
	SetAside  func(typ string)                                               // each run that the database refuses to have leased, settled or taken back
	Fault     func(statement string, failing bool)                           // every ten seconds: a statement fails for every row, or does so no more
	Breakers  func(open []string)                                            // when it changes: the types whose breaker is open
	Stalled   func(types int)                                                // every ten seconds: types that are due, could be leased, and are not
	Elsewhere func(runs int)                                                 // every ten seconds: runs of the worker's prefixes that go on elsewhere, whoever has handed them on
	Backlog   func(due []Backlog)                                            // every ten seconds: how much of each of the worker's prefixes is due
}
