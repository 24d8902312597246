package probe

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// A Health knows whether a process does its work. It is ready if each thing it watches has succeeded within its
// time; the first is always that the database took a change. A server that is away or read-only, a session
// that is, a right that is missing: all of them show there, and whatever is behind the next cause, too.
type Health struct {
	signs []sign

	mu       sync.Mutex
	obstacle error // why nothing can be expected; nil: it can
	stopping bool
}

type sign struct {
	what   string
	within time.Duration
	last   func() time.Time
}

// NewHealth returns the Health of a process that starts. It will be ready when Waiting(nil) has been
// called, and lastWrite then tells of a change that the database took within that time.
func NewHealth(within time.Duration, lastWrite func() time.Time) *Health {
	h := &Health{obstacle: errors.New("starting")}
	h.Watch("change of the database", within, lastWrite)
	return h
}

// Watch adds what must have succeeded within a time, too. It is called before the health is asked for.
func (h *Health) Watch(what string, within time.Duration, last func() time.Time) {
	h.signs = append(h.signs, sign{what, within, last})
}

// Waiting notes what the process waits for before it can work; nil for nothing.
func (h *Health) Waiting(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.obstacle = err; err != nil {
		h.obstacle = fmt.Errorf("waiting for the database: %w", err)
	}
}

// Stop notes that the process is told to end: it is not ready any more.
func (h *Health) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopping = true
}

// Ready returns nil while the process does its work, and otherwise the reason.
func (h *Health) Ready() error {
	h.mu.Lock()
	obstacle, stopping := h.obstacle, h.stopping
	h.mu.Unlock()
	if stopping {
		return errors.New("stopping")
	}
	if obstacle != nil {
		return obstacle
	}
	for _, s := range h.signs {
		switch at := s.last(); {
		case at.IsZero():
			return fmt.Errorf("no %s has succeeded yet", s.what)
		case time.Since(at) > s.within:
			return fmt.Errorf("no %s has succeeded for %s", s.what, time.Since(at).Round(time.Second))
		}
	}
	return nil
}
