package main

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/simple-workflow/simple-workflow/worker"
)

// patience is how long a worker may be without a successful poll at the least before it
// counts as not ready.
const patience = 5 * time.Second

// A health knows whether the worker does its work.
type health struct {
	worker      *worker.Worker
	concurrency int
	poll        time.Duration // the longest time between polls
	heartbeat   time.Duration // the longest time between heartbeats

	answered atomic.Int64 // when the database last did what it was asked, in Unix nanoseconds
	mu       sync.Mutex
	obstacle error // why no polls can be expected; nil: they can
	stopping bool  // and that stays the obstacle
}

func newHealth(c config) *health {
	return &health{
		concurrency: c.Concurrency.Value,
		poll:        c.PollInterval.Value,
		heartbeat:   max(c.Heartbeat.Value, c.Lease.Value/3),
		obstacle:    errors.New("starting"),
	}
}

// waiting notes what the program waits for before it can work; nil for nothing.
func (h *health) waiting(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopping {
		return
	}
	if err != nil {
		err = fmt.Errorf("waiting for the database: %w", err)
	}
	h.obstacle = err
}

func (h *health) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.obstacle, h.stopping = errors.New("stopping"), true
}

// ready returns nil if polls succeed, or if there is no room for more runs and what is
// running is kept alive.
func (h *health) ready() error {
	h.mu.Lock()
	obstacle := h.obstacle
	h.mu.Unlock()
	if obstacle != nil {
		return obstacle
	}
	limit, last := max(3*h.poll, patience), h.worker.LastPoll()
	if !last.IsZero() && time.Since(last) < limit {
		return nil
	}
	if h.worker.InFlight() >= h.concurrency && time.Since(time.Unix(0, h.answered.Load())) < limit+2*h.heartbeat {
		return nil
	}
	if last.IsZero() {
		return errors.New("no look for work has succeeded yet")
	}
	return fmt.Errorf("no look for work has succeeded for %s", time.Since(last).Round(time.Second))
}

// observe returns o, extended to note when the database answers.
func (h *health) observe(o worker.Observer) worker.Observer {
	note := func(err error) {
		if err == nil {
			h.answered.Store(time.Now().UnixNano())
		}
	}
	polled, settled, extended := o.Polled, o.SettleRun, o.Extended
	o.Polled = func(leased int, took time.Duration, err error) { note(err); polled(leased, took, err) }
	o.SettleRun = func(batch int, took time.Duration, err error) { note(err); settled(batch, took, err) }
	o.Extended = func(leases int, took time.Duration, err error) { note(err); extended(leases, took, err) }
	return o
}
