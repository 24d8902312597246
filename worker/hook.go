package worker

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Settlement is a leased run together with what is to be recorded about it.
type Settlement struct {
	lease.Lease
	run.Outcome
}

// A Hook takes part in settle transactions, a batch at a time. It is how process graphs
// advance when their steps are settled. With any hook, every settle is a transaction; a
// batch that fails is split until the guilty settlement stands alone.
type Hook struct {
	// Lock is called before the runs are settled, to lock what comes before runs in the lock
	// order: instance → join → token → run → outbox.
	Lock func(ctx context.Context, tx pgx.Tx, batch []Settlement) error
	// Act is called after the runs are settled, with those that were: a lease that was lost
	// does not reach it.
	Act func(ctx context.Context, tx pgx.Tx, batch []Settlement) error
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
