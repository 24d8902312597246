package dispatcher

import (
	"context"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
)

const (
	faultTold  = time.Minute      // between two lines in the log about marking that fails for every event
	faultNoted = 10 * time.Second // and two notes about it in the database
	faultSure  = time.Second      // it has to fail for so long to be told of
)

// A marking is how marking goes. Guarded by feed.mu.
type marking struct {
	failing       time.Time // since when it fails for every event; zero: it does not
	logged, noted time.Time // when that was last told
}

// marked notes that a claim could be marked.
func (f *feed) marked(ctx context.Context) {
	f.mu.Lock()
	over := !f.marking.noted.IsZero()
	f.marking.failing, f.marking.noted = time.Time{}, time.Time{}
	f.mu.Unlock()
	if over {
		f.tellFault(ctx, nil)
	}
}

// faulty tells that no event can be marked, with what the database says: in the log once a minute, and in workflow_fault.
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
	if tell { // the words may quote an event
		f.log.Error("no event can be marked; none is parked for it, and it is tried again: see workflowctl doctor", "sink", f.target.Name, "sqlstate", fault.State(err), "since", since.Round(time.Second))
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
