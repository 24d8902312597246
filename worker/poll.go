package worker

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	// callTimeout bounds every statement of the worker: a stalled connection is given up.
	callTimeout = 10 * time.Second
	// firstPause is the first pause after a poll that found nothing; each is twice the last.
	firstPause = 20 * time.Millisecond
	// gather is how long a poll waits for more slots to become free, so that many short runs
	// do not cause a statement each.
	gather = 5 * time.Millisecond
)

// poll leases due runs and starts their handlers until ctx ends.
func (w *Worker) poll(ctx context.Context) {
	poller := &leasing.Poller{DB: w.db, Prefixes: w.config.Prefixes, Worker: w.name, Terms: w.terms, Steps: w.steps(), SetAside: w.tellAside, Doubts: &w.doubts,
		NoBreaker: w.noBreaker, Open: w.outages.open, Outages: w.learnOutages}
	failures := retries()
	pause := firstPause
	for w.awaitRoom(ctx) {
		w.lastTurn.now()
		free, suspects, held := w.jobs.room(w.config.Concurrency)
		poller.Suspects = held
		leases, wait, err := w.lease(ctx, poller, min(free, w.config.Batch), suspects)
		if ctx.Err() != nil && len(leases) == 0 {
			return
		}
		if err != nil {
			w.note(err)
			w.complain("cannot look for work; trying again", "err", err)
			sleep(ctx, failures.NextBackOff())
			continue
		}
		failures.Reset()
		for i := range leases {
			w.start(&leases[i])
		}
		if len(leases) > 0 {
			pause = firstPause
		}
		if wait <= 0 {
			continue
		}
		if len(leases) == 0 {
			pause = min(2*pause, w.config.PollInterval)
		}
		// What is due may belong to types that have no room, or be suspects that wait for their
		// turn: then it can be leased as soon as a slot is free.
		var freed <-chan struct{}
		if held.Watched || w.config.Mux.limited() {
			freed = w.jobs.freed
		}
		if w.idle(ctx, min(wait, pause), freed) {
			poller.Hurry()
		}
	}
}

// lingering returns a context for a call that leases: an answer that comes within the grace period after ctx
// has ended is still ours to handle. What comes later is in doubt.
func (w *Worker) lingering(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	call, done := context.WithTimeout(context.WithoutCancel(ctx), limit)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(w.config.ShutdownGrace, done) })
	return call, func() { stop(); done() }
}

// lease is one poll.
func (w *Worker) lease(ctx context.Context, poller *leasing.Poller, n, suspects int) ([]leasing.Lease, time.Duration, error) {
	// Not longer than leases last: what an answer that comes late brings would be lost already.
	call, done := w.lingering(ctx, min(callTimeout, w.shortestLease()/2))
	defer done()
	start := time.Now()
	var leases []leasing.Lease
	var wait time.Duration
	err := w.readPolicies(call)
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

// awaitRoom waits until some slots are free, and a moment longer until many are. It reports
// false when ctx has ended.
func (w *Worker) awaitRoom(ctx context.Context) bool {
	many := min(w.config.Batch, max(w.config.Concurrency/4, 1))
	var waited <-chan time.Time
	for {
		if ctx.Err() != nil {
			return false
		}
		switch free, _, _ := w.jobs.room(w.config.Concurrency); {
		case free >= many:
			return true
		case free > 0 && waited == nil:
			waited = time.After(gather)
		}
		turn := time.After(time.Second) // the watchdog wants to see the loop turn
		select {
		case <-ctx.Done():
			return false
		case <-waited:
			return true
		case <-w.jobs.freed:
		case <-turn:
			w.lastTurn.now()
		}
	}
}

// idle waits for d, a wake-up, a value of freed, or the end of ctx. It reports a wake-up.
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

// retries paces attempts at a database that does not answer: from 50 ms to a second or so,
// without end.
func retries() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithMaxInterval(time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}
