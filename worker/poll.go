package worker

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	// callTimeout bounds every statement of the worker, in case its connection has stalled.
	callTimeout = 10 * time.Second
	// firstPause is the pause after the first poll that finds nothing. Each further pause is twice as long.
	firstPause = 20 * time.Millisecond
	// gather is how long a poll waits for more slots to become free, so that many short runs do not cost one
	// statement each.
	gather = 5 * time.Millisecond
	// lookAgain is how long a poll that waits for slots does not look at them again: many may become free meanwhile.
	lookAgain = time.Millisecond
)

// poll leases due runs and starts their handlers until ctx ends.
func (w *Worker) poll(ctx context.Context) {
	poller := &leasing.Poller{DB: w.db, Prefixes: w.config.Prefixes, Worker: w.name, Terms: w.terms, Steps: w.steps(), SetAside: w.tellAside, Doubts: &w.doubts, Paused: w.learnPauses,
		NoBreaker: w.noBreaker, Open: w.outages.open, Outages: w.learnOutages}
	failures := retries()
	pause := firstPause
	for w.awaitRoom(ctx) {
		w.lastTurn.now()
		w.lastSeek.now()
		suspects, held := w.jobs.suspects()
		carrying := w.carrying.Swap(false)
		free, promised := w.jobs.promise(w.config.Batch, w.share(carrying))
		room := free.direct
		poller.Suspects = held
		poller.Ahead = leasing.Ahead{Runs: free.ahead, Bytes: free.bytes, Group: w.group(), Behind: free.behind}
		leases, wait, err := w.lease(ctx, poller, room, min(suspects, room))
		if ctx.Err() != nil && len(leases) == 0 {
			return
		}
		if err != nil {
			w.note(err)
			w.complain("cannot look for work; trying again", "err", err)
			w.jobs.fulfil(promised)
			sleep(ctx, failures.NextBackOff())
			continue
		}
		failures.Reset()
		w.jobs.due(poller.Due())
		w.start(leases)
		w.jobs.fulfil(promised)
		if len(leases) > 0 {
			pause = firstPause
		}
		if wait <= 0 {
			continue
		}
		if len(leases) == 0 {
			pause = min(2*pause, w.config.PollInterval)
		}
		// The due runs may belong to types without room, or be suspects that wait for their turn. Then they can
		// be leased as soon as a slot is free. A poll that had no room because all that is due waits in line left
		// none out.
		var freed <-chan struct{}
		if held.Watched || room == 0 && (free.mixed || !free.behind) || w.config.Mux.limited() {
			freed = w.jobs.freed
		}
		if carrying || w.carrying.Load() || w.doubts.Left() > 0 {
			pause = min(pause, lookEvery)
		}
		if w.idle(ctx, min(wait, pause), freed) {
			poller.Hurry()
		}
	}
}

// lingering returns a context for a call that takes leases. The call continues for the grace period after ctx
// has ended, since the worker can still handle leases that arrive then. Leases whose answer comes later are in
// doubt.
func (w *Worker) lingering(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	call, done := context.WithTimeout(context.WithoutCancel(ctx), limit)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(w.config.ShutdownGrace, done) })
	return call, func() { stop(); done() }
}

// lease polls once.
func (w *Worker) lease(ctx context.Context, poller *leasing.Poller, n, suspects int) ([]leasing.Lease, time.Duration, error) {
	// A call may take half of the shortest lease at most, because leases in a later answer would soon be lost.
	call, done := w.lingering(ctx, min(callTimeout, w.shortestLease()/2))
	defer done()
	start := time.Now()
	var leases []leasing.Lease
	var wait time.Duration
	err := w.firstPolicies(call)
	if err == nil {
		leases, wait, err = poller.Acquire(call, n, suspects)
	}
	if err == nil {
		w.lastPoll.now()
		if len(leases) > 0 {
			w.tally.leased(leases)
			w.hasWritten(call)
		}
	}
	if w.config.Observe.Polled != nil {
		w.config.Observe.Polled(len(leases), time.Since(start), err)
	}
	return leases, wait, err
}

// awaitRoom waits until some slots are free, and a moment longer until many are. It reports false once ctx has
// ended.
func (w *Worker) awaitRoom(ctx context.Context) bool {
	var waited <-chan time.Time
	for {
		if ctx.Err() != nil {
			return false
		}
		switch free := w.jobs.space(); {
		case free.direct+free.ahead >= min(free.many, w.config.Batch):
			return true
		case free.direct+free.ahead > 0:
			if waited == nil {
				waited = time.After(gather)
			}
		default:
			w.lastFull.now()
		}
		if w.mustLook() {
			return true
		}
		turn := time.After(lookEvery) // so that watch sees the loop turn, and for mustLook
		select {
		case <-ctx.Done():
			return false
		case <-waited:
			return true
		case <-w.jobs.freed:
			sleep(ctx, lookAgain)
		case <-turn:
			w.lastTurn.now()
		}
	}
}

// idle waits for d, a wake-up, a value on freed, or the end of ctx. It reports whether there was a wake-up.
func (w *Worker) idle(ctx context.Context, d time.Duration, freed <-chan struct{}) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-w.wake:
		return true
	case <-freed:
	case <-timer.C:
	}
	return false
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// retries returns the pauses between tries at a database that does not answer: 50 ms at first, a second at
// most, without end.
func retries() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithMaxInterval(time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}
