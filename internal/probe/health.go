package probe

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// A Health knows whether a process does its work. The process is ready if each activity that it watches has
// succeeded recently enough. The first activity is always a change of the database. It stops succeeding if the
// server is away, or if the server or the session is read-only, or if a right is missing, and for any other
// cause that we do not foresee.
type Health struct {
	signs []sign

	mu       sync.Mutex
	obstacle error // why the process cannot work yet; nil: it can
	stopping bool
}

type sign struct {
	what   string
	within time.Duration
	last   func() time.Time
}

// NewHealth returns the Health of a process that is starting. The process is ready after Waiting(nil), while
// lastWrite returns a time less than within ago.
func NewHealth(within time.Duration, lastWrite func() time.Time) *Health {
	h := &Health{obstacle: errors.New("starting")}
	h.Watch("change of the database", within, lastWrite)
	return h
}

// Watch adds an activity that must have succeeded within a time as well. Call it before Ready.
func (h *Health) Watch(what string, within time.Duration, last func() time.Time) {
	h.signs = append(h.signs, sign{what, within, last})
}

// Waiting notes what the process waits for before it can work; nil means nothing.
func (h *Health) Waiting(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.obstacle = err; err != nil {
		h.obstacle = fmt.Errorf("waiting for the database: %w", err)
	}
}

// Stop notes that the process was told to end. From then on it is not ready.
func (h *Health) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopping = true
}

// Ready returns nil while the process does its work, and otherwise the reason why not.
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
