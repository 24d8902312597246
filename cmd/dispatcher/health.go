package main

import (
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/probe"
)

// looks remembers when the outbox was last looked at for each sink. A sink that is down is no reason for
// a dispatcher not to be ready: another would not reach it either.
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

// observe returns o, extended to note looks that succeed.
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

// newHealth returns what tells whether the dispatcher does its work.
func newHealth(s *settings, lastWrite func() time.Time, looks *looks) *probe.Health {
	h := probe.NewHealth(s.ReadyWithin.Value, lastWrite)
	for _, t := range s.targets {
		// What is being published may take as long as a claim.
		h.Watch("look for events of sink "+t.Name, s.ReadyWithin.Value+s.Claim.Value, func() time.Time { return looks.at(t.Name) })
	}
	return h
}
