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
// the database refuses for its data becomes a failure (code result_rejected), and after any
// other error the same settlement is tried again, ever more slowly, while its lease lasts.
type Hook struct {
	// Concerns tells which runs the hook is about; the other functions see no others, and
	// batches without any are settled as if there were no hook. Nil: all.
	Concerns func(*lease.Lease) bool
	// Lock is called before the runs are settled, to lock what comes before runs in the lock
	// order: instance → join → token → run → outbox.
	Lock func(ctx context.Context, tx pgx.Tx, batch []lease.Settlement) error
	// Act is called after the runs are settled, with those that were: a lease that was lost
	// does not reach it.
	Act func(ctx context.Context, tx pgx.Tx, batch []lease.Settlement) error
}

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
type hookError struct{ err error }

func (e *hookError) Error() string { return "hook: " + e.err.Error() }
func (e *hookError) Unwrap() error { return e.err }

// call calls one step of the hook, which must not leave the transaction aborted.
func (h Hook) call(ctx context.Context, step func(context.Context, pgx.Tx, []lease.Settlement) error, tx pgx.Tx, batch []lease.Settlement) (err error) {
	if step == nil || len(batch) == 0 {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			err = &hookError{fmt.Errorf("%w\n%s", &run.PanicError{Value: p}, debug.Stack())}
		}
	}()
	switch err := step(ctx, tx, batch); {
	case err == nil && tx.Conn().PgConn().TxStatus() == 'E':
		return &hookError{errors.New("it left the transaction aborted")}
	case err == nil || tx.Conn().IsClosed():
		return err
	default:
		return &hookError{err}
	}
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
}
