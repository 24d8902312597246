package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// patience is how long a dispatcher may be without a look at the outbox before it counts as not
// ready. A sink that is down is no reason: another dispatcher would not reach it either.
const patience = 15 * time.Second

// A health knows whether the dispatcher looks for events.
type health struct {
	claim time.Duration

	mu       sync.Mutex
	obstacle error // why nothing can be expected; nil: it can
	ending   bool
	looked   map[string]time.Time // by sink
}

func newHealth(s *settings) *health {
	h := &health{claim: s.Claim.Value, obstacle: errors.New("starting"), looked: map[string]time.Time{}}
	for _, t := range s.targets {
		h.looked[t.Name] = time.Now()
	}
	return h
}

// waiting notes what the program waits for before it can work; nil for nothing.
func (h *health) waiting(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.obstacle = err; err != nil {
		h.obstacle = fmt.Errorf("waiting for the database: %w", err)
		return
	}
	for sink := range h.looked {
		h.looked[sink] = time.Now()
	}
}

// stopping notes that the program is told to end.
func (h *health) stopping() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ending = true
}

func (h *health) ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ending {
		return errors.New("stopping")
	}
	if h.obstacle != nil {
		return h.obstacle
	}
	for sink, at := range h.looked {
		if d := time.Since(at); d > patience+h.claim { // what is being published may take as long as a claim
			return fmt.Errorf("no look for events of sink %s has succeeded for %s", sink, d.Round(time.Second))
		}
	}
	return nil
}

// observe returns o, extended to note looks that succeed.
func (h *health) observe(o dispatcher.Observer) dispatcher.Observer {
	polled := o.Polled
	o.Polled = func(sink string, events int, took time.Duration, err error) {
		if err == nil {
			h.mu.Lock()
			h.looked[sink] = time.Now()
			h.mu.Unlock()
		}
		polled(sink, events, took, err)
	}
	return o
}
