package worker

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// policy returns the policy of a type, as last read.
func (w *Worker) policy(typ string) lease.Policy {
	var all lease.Policies
	if known := w.policies.Load(); known != nil {
		all = *known
	}
	return all.Of(typ)
}

// firstPolicies reads the policies unless they were read before. The first poll needs them; later tend reads
// them.
func (w *Worker) firstPolicies(ctx context.Context) error {
	if w.policies.Load() != nil {
		return nil
	}
	return w.readPolicies(ctx)
}

// readPolicies reads the policies.
func (w *Worker) readPolicies(ctx context.Context) error {
	all, err := lease.Read(ctx, w.db)
	if err == nil {
		w.policies.Store(&all)
	}
	return err
}

// most returns how many attempts the job's run has, by the present policies and its handler's options. written
// is the number to write into the row of a run that follows its policy; 0 means that the row has it already.
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
			w.complain("cannot ask a hook for the pause before the next attempt; the policy's pause applies", "err", err)
			continue
		}
		own = b
	}
	return own
}

// askBackoff calls a hook's Backoff. It turns a panic into an error, so that a hook cannot end the process.
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

// backoffTimeout bounds a call of a hook's Backoff, since the job holds a slot meanwhile.
const backoffTimeout = 2 * time.Second

// tooLate returns an error if the policy's deadline is over and the run must not be started any more.
func (w *Worker) tooLate(j *job) error {
	limit := w.deadline(j)
	if limit == 0 || j.StartedAt.Sub(j.Enqueued) < limit {
		return nil
	}
	return technical(settling.CodeTooLate, fmt.Errorf("the policy allows a start within %s after the run was enqueued, and that time is over", limit))
}

// left returns how long from now the run may still be started. lasting means that there is no limit.
func (w *Worker) left(j *job) (left time.Duration, lasting bool) {
	limit := w.deadline(j)
	if limit == 0 {
		return 0, true
	}
	return max(limit-max(j.StartedAt.Sub(j.Enqueued), 0)-time.Since(j.Taken), 0), false
}

// deadline returns how long after it was enqueued the run may be started; 0 means no limit.
func (w *Worker) deadline(j *job) time.Duration {
	if j.Enqueued.IsZero() {
		return 0
	}
	return w.policy(j.Type).Deadline
}
