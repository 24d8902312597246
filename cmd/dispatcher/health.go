package main

import (
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/probe"
)

// looks records when the outbox was last polled for each sink. Readiness depends on the polls, not on the sinks: a
// sink that is down for this dispatcher is down for any other, too.
type looks struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (l *looks) note(sink string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[sink] = time.Now()
}

func (l *looks) at(sink string) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last[sink]
}

// observe returns o, extended to record polls that succeed.
func (l *looks) observe(o dispatcher.Observer) dispatcher.Observer {
	polled := o.Polled
	o.Polled = func(sink string, events int, took time.Duration, err error) {
		if err == nil {
			l.note(sink)
		}
		polled(sink, events, took, err)
	}
	return o
}

// newHealth returns the readiness check: the database accepts writes, and every sink's events are polled.
func newHealth(s *settings, lastWrite func() time.Time, looks *looks) *probe.Health {
	h := probe.NewHealth(s.ReadyWithin.Value, lastWrite)
	for _, t := range s.targets {
		// Publishing may delay the next poll by as long as a claim lasts.
		h.Watch("look for events of sink "+t.Name, s.ReadyWithin.Value+s.Claim.Value, func() time.Time { return looks.at(t.Name) })
	}
	return h
}
