package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// start makes jobs of leases, and puts them in line. A run without attempts left needs no slot, because no handler is
// called for it.
func (w *Worker) start(leases []leasing.Lease) {
	var inLine []*job
	for _, l := range leases {
		j := &job{Lease: l, entry: w.lookup(l.Type), confirmed: l.Taken, extended: l.Taken}
		j.ctx, j.cancel = context.WithCancelCause(context.Background())
		j.row = j.MaxAttempts
		j.MaxAttempts, _ = w.most(j)
		switch {
		case time.Since(j.Taken) < j.Length && j.Exhausted:
			w.jobs.add(j)
			go w.execute(j)
		case time.Since(j.Taken) < j.Length:
			inLine = append(inLine, j)
		case !j.Exhausted:
			// The lease has run out: this process was frozen, or the answer came late. The handler is not started. If
			// nobody else has leased the run, this gives it back.
			j.done, j.doneAt = true, time.Now()
			w.jobs.add(j)
			w.giveBack([]*job{j})
		}
	}
	w.giveBack(w.jobs.enter(inLine))
	w.dispatch()
}

// dispatch starts as many handlers as there are slots and runs that may begin.
func (w *Worker) dispatch() {
	for j := w.jobs.take(); j != nil; j = w.jobs.take() {
		go w.work(j)
	}
}

// work executes a job, and then those that are next in line.
func (w *Worker) work(j *job) {
	defer w.dispatch() // also if a handler has ended this goroutine
	for ; j != nil; j = w.jobs.take() {
		w.execute(j)
	}
}

// execute calls the job's handler and passes its outcome on to be settled, even after a panic or
// runtime.Goexit.
func (w *Worker) execute(j *job) {
	if j.limit() > 0 {
		// From now on, but not beyond the end of the lease, which counts from Taken.
		left := min(j.limit(), j.Timeout-reportTime-time.Since(j.Taken))
		limit := time.AfterFunc(left, func() { w.jobs.end(j, run.ErrDeadline) })
		defer limit.Stop()
	}
	start := time.Now()
	var result json.RawMessage
	err := errors.New("the handler ended its goroutine (runtime.Goexit)")
	defer func() {
		if p := recover(); p != nil {
			err = &run.PanicError{Value: p, Stack: debug.Stack()}
		}
		w.finish(j, result, err, time.Since(start))
	}()
	result, err = w.call(j)
}

// call runs the handler. It returns an error instead if there is no handler, no attempt left, or the deadline
// is over.
func (w *Worker) call(j *job) (json.RawMessage, error) {
	switch {
	case j.Exhausted, j.Suspect && j.Attempt > j.MaxAttempts:
		return nil, technical(settling.CodeExpired,
			fmt.Errorf("lease_expired: all %d attempts are used up, and the last one did not report back", j.MaxAttempts))
	case j.entry == nil:
		return nil, technical(settling.CodeNoHandler, errors.New(settling.CodeNoHandler))
	}
	if late := w.tooLate(j); late != nil {
		return nil, late
	}
	if j.Suspect {
		w.jobs.begin(j)
	}
	j.extras.lease, j.extras.worker = &j.Lease, w
	ctx := context.WithValue(run.NewContext(j.ctx, j.Info), extrasKey{}, &j.extras)
	return j.entry.handler(ctx, j.Payload)
}

// finish passes the outcome to the settlers, unless it is not this worker's to settle any more.
func (w *Worker) finish(j *job, result json.RawMessage, err error, took time.Duration) {
	left := w.jobs.returned(j)
	cause := context.Cause(j.ctx)
	j.extras.close()
	if cause != nil && w.config.Observe.Lost != nil {
		w.config.Observe.Lost(j.Type, cause)
	}
	if left || errors.Is(cause, run.ErrCancelled) || errors.Is(cause, run.ErrLost) && err != nil && !handsOn(err) {
		w.logger(&j.Lease).Info("outcome dropped", "cause", cause)
		w.jobs.remove(j)
		return
	}
	// A result is offered even if the lease seems lost, and so is a run that is handed on. The fence decides.
	j.outcome = w.judge(j, result, err, cause)
	j.took = took
	if w.config.Observe.Finished != nil {
		w.config.Observe.Finished(j.Type, string(j.outcome.Verdict), took)
	}
	if j.outcome.Verdict == settling.Succeed || j.outcome.Verdict == settling.HandOn { // a service that accepts a run is up
		w.outages.over(j.Type)
	}
	if j.outcome.Verdict != settling.Succeed {
		j.extras.drop()
	}
	if len(j.extras.effects) > 0 || j.outcome.Verdict == settling.HandOn {
		w.solos <- j
		return
	}
	w.settles <- j
}
