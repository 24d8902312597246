// Package hook is how an engine of processes takes part in the work of a worker. It is internal: package graph has the one engine that there
// is, and both may change together.
package hook

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// An Engine is what a worker needs of an engine of processes.
type Engine struct {
	Prefix   string             // of its own types
	Handlers map[string]Handler // of these, by type
	Hook     Hook
}

// A Handler executes a run of one of the engine's own types, as worker.Handler does.
type Handler = func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)

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
	Concerns func(*leasing.Lease) bool
	// Begin is called at the beginning of a settle transaction, with what is about to be settled.
	// What it queues is sent before, in one round trip with the settling: it locks what comes
	// before runs in the lock order, instance → join → token → run → outbox, and may read what is
	// needed later. Such statements find rows by their keys: where the worker's own are prepared, so are
	// they, with plans that are kept.
	//
	// An error with a leasing.SettleError in it names the run that is the cause, so that the others
	// are settled without it at once; after any other they are found by halving the batch. If it is marked with run.Permanent, too,
	// a success of that run becomes a failure with this error, and is not tried again.
	//
	// The function that it returns is called after the runs are settled, with those that were:
	// a lease that was lost does not reach it. Nil: nothing is left to be done. After effects, which
	// may have changed what was read, Begin is called again before it.
	Begin func(first *pgx.Batch, batch []leasing.Settlement) (Act, error)
	// Backoff returns the pauses between the attempts of a run whose attempt has failed; own is what its policy and its
	// handler's options say. After an error, and after two seconds, it is own. Nil: it is own.
	Backoff func(ctx context.Context, l *leasing.Lease, own run.Backoff) (run.Backoff, error)
	// Tend is called every second, beside all else, for what the hook has to look after. Its ctx ends
	// after some seconds. Nil: nothing.
	Tend func(ctx context.Context) error
}

// Act is what a hook does in a settle transaction once the runs are settled.
type Act = func(ctx context.Context, tx pgx.Tx, settled []leasing.Settlement) error

// IsAbout reports whether the hook is about a run.
func (h *Hook) IsAbout(l *leasing.Lease) bool { return h.Concerns == nil || h.Concerns(l) }

// Of returns those of a batch that the hook is about.
func (h *Hook) Of(batch []leasing.Settlement) (concerned []leasing.Settlement) {
	for i := range batch {
		if h.IsAbout(&batch[i].Lease) {
			concerned = append(concerned, batch[i])
		}
	}
	return concerned
}
