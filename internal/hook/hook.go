// Package hook defines how an engine of processes takes part in the work of a worker. Package graph has the
// only engine. The package is internal so that both sides can change together.
package hook

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// An Engine is what a worker needs from an engine of processes.
type Engine struct {
	Prefix   string             // prefix of the engine's own types
	Handlers map[string]Handler // handlers of these types
	Hook     Hook
}

// A Handler executes a run of one of the engine's own types, like worker.Handler.
type Handler = func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)

// A Hook takes part in settle transactions. It is how process graphs advance when their steps are settled. The
// runs of a batch that the hook concerns are settled in one transaction.
//
// If the batch fails, it is halved until the settlement at fault is alone. A success that the database refuses
// because of its values then becomes a failure (code result_rejected). After any other error the same
// settlement is tried again, and in the end it is kept, to be settled later with the hooks of any worker.
// Before the outcome of a step is kept, the worker checks that the hooks can move any process at all: it settles
// steps of type workflow.control.v1 in a transaction that it rolls back.
type Hook struct {
	// Concerns reports whether the hook concerns a run. The other functions get only such runs, and a batch
	// without any is settled as if there were no hook. Nil means that it concerns all runs.
	Concerns func(*leasing.Lease) bool
	// Begin is called at the beginning of a settle transaction, with the settlements about to be recorded. The
	// statements that it queues are sent before the settling, in the same round trip. They lock what comes
	// before runs in the lock order (instance → join → token → run → outbox), and may read what is needed
	// later. They must find rows by their keys: where the worker prepares its statements, these are prepared
	// too, and their plans are kept.
	//
	// A leasing.SettleError in the returned error names the run that is the cause. The worker then settles the
	// other runs at once without it. After any other error it finds the cause by halving the batch. If the
	// SettleError's Err is marked with run.Permanent, a success of that run becomes a failure with Err, and is
	// not tried again.
	//
	// The returned Act is called after the runs are settled, with those that were; it does not get runs whose
	// leases were lost. A nil Act does nothing. Effects may change what Begin has read, so after them Begin is
	// called again, before the Act.
	Begin func(first *pgx.Batch, batch []leasing.Settlement) (Act, error)
	// Backoff returns the pauses between the attempts of a run whose attempt failed. own are the pauses by its
	// policy and its handler's options. They apply if Backoff is nil, returns an error or takes longer than two
	// seconds.
	Backoff func(ctx context.Context, l *leasing.Lease, own run.Backoff) (run.Backoff, error)
	// Tend is called about once a second while something is set aside or owed to a process (leasing.Look.Aside),
	// or may be: the look has failed. Its ctx ends after 5 s. Nil: there is nothing to do then.
	Tend func(ctx context.Context) error
}

// Act is what a hook does in a settle transaction once the runs are settled. It may give the next steps to the carrier,
// which may be nil. If it stores other runs, it calls the carrier's Leave.
type Act = func(ctx context.Context, tx pgx.Tx, settled []leasing.Settlement, carrier *leasing.Carrier) error

// IsAbout reports whether the hook concerns a run.
func (h *Hook) IsAbout(l *leasing.Lease) bool { return h.Concerns == nil || h.Concerns(l) }

// Of returns the settlements of a batch that the hook concerns.
func (h *Hook) Of(batch []leasing.Settlement) (concerned []leasing.Settlement) {
	for i := range batch {
		if h.IsAbout(&batch[i].Lease) {
			concerned = append(concerned, batch[i])
		}
	}
	return concerned
}
