package dispatcher

import (
	"context"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
)

const (
	faultTold  = time.Minute      // between log lines that say that no event can be marked
	faultNoted = 10 * time.Second // between writes of the same to workflow_fault
	faultSure  = time.Second      // how long marking has to fail before it is reported
)

// A marking is whether events can be marked. Guarded by feed.mu.
type marking struct {
	failing       time.Time // since when marking fails for every event; zero: it works
	logged, noted time.Time // when that was last reported
}

// marked records that the events of a claim were marked, and clears a reported fault.
func (f *feed) marked(ctx context.Context) {
	f.mu.Lock()
	over := !f.marking.noted.IsZero()
	f.marking.failing, f.marking.noted = time.Time{}, time.Time{}
	f.mu.Unlock()
	if over {
		f.tellFault(ctx, nil)
	}
}

// faulty reports that no event can be marked, and the database's error: in the log at most once a minute, and in
// workflow_fault at most every 10 s.
func (f *feed) faulty(ctx context.Context, err error) {
	now := time.Now()
	f.mu.Lock()
	m := &f.marking
	if m.failing.IsZero() {
		m.failing = now
	}
	since, sure := m.failing, now.Sub(m.failing) >= faultSure
	tell, note := sure && now.Sub(m.logged) >= faultTold, sure && now.Sub(m.noted) >= faultNoted
	if tell {
		m.logged = now
	}
	if note {
		m.noted = now
	}
	f.mu.Unlock()
	if tell { // without the message, which may quote an event
		f.log.Error("no event can be marked; none is parked for that; trying again: see workflowctl doctor", "sink", f.target.Name, "sqlstate", fault.State(err), "since", since.Round(time.Second))
	}
	if note {
		f.tellFault(ctx, err)
	}
}

func (f *feed) tellFault(ctx context.Context, err error) {
	f.config.Observe.Fault(f.target.Name, err != nil)
	call, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer done()
	if problem := delivery.TellFault(call, f.config.Pool, err); problem != nil {
		f.complain("cannot note that no event can be marked", "state", fault.State(problem))
	}
}
