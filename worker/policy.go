package worker

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// policy returns what the policies say of a type by now.
func (w *Worker) policy(typ string) lease.Policy {
	var all lease.Policies
	if known := w.policies.Load(); known != nil {
		all = *known
	}
	return all.Of(typ)
}

// readPolicies reads the policies, unless they are known: the first poll needs them.
func (w *Worker) readPolicies(ctx context.Context) error {
	if w.policies.Load() != nil {
		return nil
	}
	all, err := lease.Read(ctx, w.db)
	if err == nil {
		w.policies.Store(&all)
	}
	return err
}

// tendRuns has runs that are set aside tried again, and reads the policies. Each is done even if the other has failed.
func (w *Worker) tendRuns(ctx context.Context) error {
	failed := leasing.TryAgain(ctx, w.db)
	alone, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second) // TryAgain may have used up all the time there was
	defer done()
	all, err := lease.Read(alone, w.db)
	if err == nil {
		w.policies.Store(&all)
	}
	return cmp.Or(failed, err)
}

// most returns how many attempts the job's run has, as its policy and its handler's options are by now, and what is to be
// written into the row of one that follows its policy; 0: it stands there.
func (w *Worker) most(j *job) (most, written int) {
	most = j.MaxAttempts
	if j.Follows {
		if most = max(w.policy(j.Type).Attempts, j.Attempt); most != j.row { // never less than it was charged already
			written = most
		}
	}
	if j.entry != nil && j.entry.options.MaxAttempts > 0 {
		most = min(most, j.entry.options.MaxAttempts)
	}
	return most, written
}

// backoff returns the pauses between the attempts of the job's run.
func (w *Worker) backoff(j *job) run.Backoff {
	own := w.config.Backoff
	if j.entry != nil && j.entry.options.Backoff != (run.Backoff{}) {
		own = j.entry.options.Backoff
	}
	own = w.policy(j.Type).Backoff(own)
	for _, h := range w.engine.hooks {
		if h.Backoff == nil || !h.IsAbout(&j.Lease) {
			continue
		}
		b, err := askBackoff(h, j, own)
		if err != nil {
			w.complain("cannot ask a hook for the pause before the next attempt; it is that of the policy", "err", err)
			continue
		}
		own = b
	}
	return own
}

// askBackoff asks a hook, which must not end the process.
func askBackoff(h hook.Hook, j *job, own run.Backoff) (b run.Backoff, err error) {
	ctx, done := context.WithTimeout(context.Background(), backoffTimeout)
	defer done()
	defer func() {
		if p := recover(); p != nil {
			err = &run.PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	return h.Backoff(ctx, &j.Lease, own)
}

// backoffTimeout bounds what a hook may take to say how long a pause is: a slot waits for it.
const backoffTimeout = 2 * time.Second

// tooLate returns an error if the run is not to be started any more.
func (w *Worker) tooLate(j *job) error {
	limit := w.deadline(j)
	if limit == 0 || j.StartedAt.Sub(j.Enqueued) < limit {
		return nil
	}
	return technical(settling.CodeTooLate, fmt.Errorf("the policy lets it start within %s after it was enqueued, and that is over", limit))
}

// left returns how long it is from now until the run may not be started any more; lasting: there is no such end.
func (w *Worker) left(j *job) (left time.Duration, lasting bool) {
	limit := w.deadline(j)
	if limit == 0 {
		return 0, true
	}
	return max(limit-max(j.StartedAt.Sub(j.Enqueued), 0)-time.Since(j.Taken), 0), false
}

// deadline returns how long after it was enqueued the run may be started; 0: without end.
func (w *Worker) deadline(j *job) time.Duration {
	if j.Enqueued.IsZero() {
		return 0
	}
	return w.policy(j.Type).Deadline
}
