package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Hook takes part in settle transactions, a batch at a time. It is how process graphs
// advance when their steps are settled. What a hook is about is settled in a transaction; a
// batch that fails is split until the guilty settlement stands alone. Then a success that
// the database refuses for its data becomes a failure (code result_rejected); after any
// other error the same settlement is tried again, and in the end kept for later, with any worker's hooks.
// Before that, hooks that are about steps of processes are tried with steps of type workflow.control.v1,
// in a transaction that is rolled back.
type Hook struct {
	// Concerns tells which runs the hook is about; the other functions see no others, and
	// batches without any are settled as if there were no hook. Nil: all.
	Concerns func(*lease.Lease) bool
	// Begin is called at the beginning of a settle transaction, with what is about to be settled.
	// What it queues is sent before, in one round trip with the settling: it locks what comes
	// before runs in the lock order, instance → join → token → run → outbox, and may read what is
	// needed later. Such statements find rows by their keys: where the worker's own are prepared, so are
	// they, with plans that are kept.
	//
	// An error with a lease.SettleError in it names the run that is the cause, so that the others
	// are settled without it at once; after any other they are found by halving the batch.
	//
	// The function that it returns is called after the runs are settled, with those that were:
	// a lease that was lost does not reach it. Nil: nothing is left to be done. After effects, which
	// may have changed what was read, Begin is called again before it.
	Begin func(first *pgx.Batch, batch []lease.Settlement) (Act, error)
	// Tend is called every second, beside all else, for what the hook has to look after. Its ctx ends
	// after some seconds. Nil: nothing.
	Tend func(ctx context.Context) error
}

// Act is what a hook does in a settle transaction once the runs are settled.
type Act = func(ctx context.Context, tx pgx.Tx, settled []lease.Settlement) error

func (h Hook) concerns(l *lease.Lease) bool { return h.Concerns == nil || h.Concerns(l) }

// of returns those of a batch that the hook is about.
func (h Hook) of(batch []lease.Settlement) (concerned []lease.Settlement) {
	for _, s := range batch {
		if h.concerns(&s.Lease) {
			concerned = append(concerned, s)
		}
	}
	return concerned
}

// A hookError is trouble in a hook, and not with the connection.
type hookError struct {
	hook int // its place in Config.Hooks
	err  error
}

func (e *hookError) Error() string { return "hook: " + e.err.Error() }
func (e *hookError) Unwrap() error { return e.err }

// begin calls the hook's Begin.
func (h Hook) begin(place int, tx pgx.Tx, first *pgx.Batch, batch []lease.Settlement) (act Act, err error) {
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
func act(ctx context.Context, place int, tx pgx.Tx, do Act, settled []lease.Settlement) error {
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

// An Observer is told what a worker does. Nil functions are skipped. They are called from
// several goroutines and must return quickly.
type Observer struct {
	Polled    func(leased int, took time.Duration, err error)           // each look for work
	Finished  func(typ string, verdict run.Verdict, took time.Duration) // each handler that returned
	Settled   func(typ string, verdict run.Verdict)                     // each outcome recorded
	SettleRun func(batch int, took time.Duration, err error)            // each settle statement or transaction
	Refused   func(typ string)                                          // each outcome refused: the lease was lost
	Lost      func(typ string, cause error)                             // each handler whose context ended with a cause
	Extended  func(leases int, took time.Duration, err error)           // each heartbeat
	Reclaimed func(again, exhausted int)                                // expired leases taken back
	Stuck     func(handlers int)                                        // handlers that ignore the end of their context
	SetAside  func(typ string)                                          // each run that the database refuses to have leased, settled or taken back
	Fault     func(statement string, failing bool)                      // every ten seconds: a statement fails for every row, or does so no more
	Stalled   func(types int)                                           // every ten seconds: types that are due, could be leased, and are not
}
