package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	// obey is how long handlers may take to return after shutdown has ended their contexts.
	obey = time.Second
	// lastCalls is how long recording the last outcomes may take.
	lastCalls = 10 * time.Second
	// doubtPause is the pause between two tries to give back leases in doubt.
	doubtPause = 100 * time.Millisecond
	// doubtTimeout bounds one such try, since another connection may do better.
	doubtTimeout = 2 * time.Second
)

// drain lets handlers finish, then ends their contexts, and then releases the leases that are left. Meanwhile
// it gives back leases in doubt (see leasing.Doubts). grace is the rest of the grace period.
func (w *Worker) drain(grace time.Duration) {
	var doubts sync.WaitGroup
	doubts.Go(func() { w.settleDoubts(grace) })
	if n := w.jobs.count(); n > 0 {
		w.config.Logger.Info("worker stops: waiting for handlers", "running", n, "grace", w.config.ShutdownGrace)
	}
	if !w.empty(grace, w.hurry) {
		for _, j := range w.jobs.all() {
			w.jobs.end(j, run.ErrShutdown)
		}
		if !w.empty(obey, nil) {
			w.handBack()
		}
		w.empty(lastCalls, nil)
	}
	doubts.Wait()
	w.settleDoubts(obey) // of commits that carried steps on, and whose answers were lost meanwhile
	w.config.Logger.Info("worker stopped", "worker", w.name)
}

// settleDoubts gives back leases in doubt until there are none, or until a second (obey) after the grace period. After
// StopNow it continues for one more second: Doubts.Settle looks for a lease once a second, so each is looked for once
// more.
func (w *Worker) settleDoubts(grace time.Duration) {
	ctx, done := context.WithTimeout(context.Background(), grace+obey)
	defer done()
	for hurry := w.hurry; w.doubts.Left() > 0 && ctx.Err() == nil; {
		call, over := context.WithTimeout(ctx, doubtTimeout)
		if err := w.doubts.Settle(call, w.db, w.name); err != nil {
			w.note(err)
		}
		over()
		if w.doubts.Left() == 0 {
			break
		}
		select {
		case <-hurry:
			hurry = nil
			ctx, done = context.WithTimeout(ctx, time.Second+doubtPause)
			defer done()
		case <-time.After(doubtPause):
		}
	}
	if n := w.doubts.Left(); n > 0 {
		w.config.Logger.Warn("answers to requests for leases are lost; if these requests have taken leases, the leases will expire", "requests", n)
	}
}

// handBack releases the leases of handlers that still run. What these return later is dropped.
func (w *Worker) handBack() {
	enough := time.After(lastCalls)
	for _, j := range w.jobs.all() {
		if !w.jobs.leave(j) {
			continue // has returned, and is being settled
		}
		w.logger(&j.Lease).Warn("handler did not stop in time; its run is handed back")
		released := &job{Lease: j.Lease, entry: j.entry, done: true,
			outcome: settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release}}
		released.ctx, released.cancel = context.WithCancelCause(context.Background())
		w.jobs.add(released)
		select {
		case w.settles <- released:
		case <-enough:
			return // the database is out of reach, so the leases expire
		}
	}
}

// letGo releases runs whose success could not be recorded in time, because a row was locked or an effect did
// not end. A release charges no attempt, while an expired lease would. Failures, exhausted runs and runs that
// are executed elsewhere are not released: their leases expire.
func (w *Worker) letGo(ctx context.Context) {
	var outcomes []settling.Outcome
	for _, j := range w.jobs.all() {
		if j.Exhausted || j.outcome.Failure != nil || j.outcome.Verdict == settling.HandOn {
			continue
		}
		outcomes = append(outcomes, settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release})
	}
	if len(outcomes) == 0 {
		return
	}
	call, done := context.WithTimeout(context.WithoutCancel(ctx), obey)
	defer done()
	_, err := settling.Settle(call, w.db, w.name, outcomes)
	if err != nil && code(err) != "" && len(outcomes) > 1 { // perhaps one of them is refused
		err = nil
		for i := range outcomes {
			_, problem := settling.Settle(call, w.db, w.name, outcomes[i:i+1])
			err = errors.Join(err, problem)
		}
	}
	w.config.Logger.Warn("runs could not be settled before the worker stopped", "runs", len(outcomes), "handed_back", err == nil)
}

// empty waits until no lease is held, for d at most or until hurry is closed. It reports whether no lease is
// held.
func (w *Worker) empty(d time.Duration, hurry <-chan struct{}) bool {
	timeout := time.NewTimer(d)
	defer timeout.Stop()
	for w.jobs.count() > 0 {
		select {
		case <-timeout.C:
			return false
		case <-hurry:
			return false
		case <-w.jobs.freed:
		}
	}
	return true
}
