package worker

import (
	"context"
	"encoding/json"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// idle returns a worker that does not run, with a few handlers.
func idle(t *testing.T) *Worker {
	t.Helper()
	handler := func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil }
	w := &Worker{config: Config{Prefixes: []string{"mail.", "other."}, Mux: NewMux(), Concurrency: 4, Logger: slog.New(slog.DiscardHandler)}}
	w.config.Mux.HandleRaw("mail.", handler)
	w.config.Mux.HandleRaw("mail.limited.v1", handler, Options{Concurrency: 2})
	w.outages.heard = map[string]*heard{}
	w.jobs.line, w.jobs.freed = newCrowd(4).s.line, make(chan struct{}, 1)
	w.jobs.refuses = w.mustWait
	w.jobs.top = math.MinInt
	w.learnPauses(nil)
	return w
}

// A worker carries a process on only with steps that it may lease: it covers their type, has a handler for it, does not
// limit how many it holds, knows of no pause and no open breaker, and of no due runs of a higher priority.
func TestCarries(t *testing.T) {
	w := idle(t)
	for _, test := range []struct {
		what, typ string
		before    func()
		want      bool
	}{
		{"any step", "mail.a.v1", nil, true},
		{"a prefix that it does not cover", "bill.a.v1", nil, false},
		{"no handler", "other.a.v1", nil, false},
		{"a limited type", "mail.limited.v1", nil, false},
		{"runs with this priority are due", "mail.a.v1", func() { w.jobs.due(leasing.Due{Top: 5}) }, true},
		{"runs with a higher priority are due", "mail.a.v1", func() { w.jobs.due(leasing.Due{Top: 6}) }, false},
		{"nothing is due", "mail.a.v1", func() { w.jobs.due(leasing.Due{Top: math.MinInt}) }, true},
		{"a pause of another type", "mail.a.v1", func() { w.learnPauses([]string{"mail.b.v1"}) }, true},
		{"a pause of its prefix", "mail.a.v1", func() { w.learnPauses([]string{"mail."}) }, false},
		{"the pause is over", "mail.a.v1", func() { w.learnPauses(nil) }, true},
		{"an open breaker", "mail.a.v1", func() { w.learnOutages(map[string]bool{"mail.a.v1": true}) }, false},
	} {
		if test.before != nil {
			test.before()
		}
		if _, got := w.carries(test.typ, 5); got != test.want {
			t.Errorf("%s: carried on %v, want %v", test.what, got, test.want)
		}
	}
}

// Nothing is carried on once the last discovery is too long ago, and by a batch that has failed before.
func TestCarryNeedsALook(t *testing.T) {
	w := idle(t)
	w.config.Processes = noProcesses{}
	batch := []*job{{}, {}}
	if w.carry(batch) == nil {
		t.Fatal("no carrier right after a discovery")
	}
	batch[1].unsure = true
	if w.carry(batch) != nil {
		t.Error("a batch that has failed is carried on")
	}
	w.lastLook.after.Add(-int64(longestUnseen))
	if w.carry(batch[:1]) != nil {
		t.Error("carried on long after the last discovery")
	}
}

type noProcesses struct{ Processes }

// A step that comes into line after the worker has learned that its type is paused, or after the worker has begun to
// stop, is given back.
func TestCarriedTooLate(t *testing.T) {
	w, c := idle(t), newCrowd(4)
	one := func(typ string) *job {
		j := c.jobs(1, 4, 0)[0]
		j.Type = typ
		return j
	}
	w.jobs.mu.Lock()
	w.paused.Store(&[]string{"mail.a.v1"})
	w.jobs.mu.Unlock()
	if late := w.jobs.enter([]*job{one("mail.a.v1"), one("mail.b.v1")}); len(late) != 1 || late[0].Type != "mail.a.v1" || w.jobs.charged != 1 {
		t.Errorf("%d were refused, %d are in line; want the one that is paused refused", len(late), w.jobs.charged)
	}
	w.jobs.shut()
	var p promise
	if _, ok := w.jobs.keep(&p, 1, true); ok || p != (promise{}) {
		t.Error("room is kept for a step although the worker stops")
	}
	if late := w.jobs.enter([]*job{one("mail.b.v1")}); len(late) != 1 {
		t.Error("a step may begin although the worker stops")
	}
}

// A poll leaves some room to settle transactions, and these keep no more than there is.
func TestRoomForSteps(t *testing.T) {
	s := newCrowd(16).s
	free, poll := s.promise(1000, 8)
	if free.direct != 14 || poll.direct != 14 {
		t.Errorf("the poll may lease %d, want 14 of 16", free.direct)
	}
	var p promise
	for range 3 {
		s.keep(&p, 1, false)
	}
	if p.direct != 2 || s.promised.direct != 16 {
		t.Errorf("%d steps were carried on while a poll may lease 14 runs, want 2", p.direct)
	}
	s.fulfil(poll)
	if ahead, ok := s.keep(&p, 1, false); !ok || ahead || p.direct != 3 {
		t.Error("no room although the poll has ended")
	}
	s.fulfil(p)
	if s.promised != (promise{}) {
		t.Errorf("%+v is still promised", s.promised)
	}
	if free, _ := newCrowd(1).s.promise(1000, 2); free.direct != 1 {
		t.Error("the only slot is not for polls")
	}
}

// While runs that were leased ahead wait, or others are due, steps of quick types are leased ahead, too. A group has the
// highest priority of its runs, whatever their order.
func TestQuickStepsDoNotPass(t *testing.T) {
	c := newCrowd(8)
	c.s.pace.last, c.s.pace.since, c.s.pace.returned = 10_000, time.Now().Add(time.Hour), time.Now()
	var p promise
	if ahead, ok := c.s.keep(&p, 1, true); !ok || ahead {
		t.Error("a step does not begin at once although nothing waits")
	}
	all := append(c.jobs(1, 8, 0), c.jobs(1, 8, 9)...)
	all[1].Token = all[0].Token
	c.s.enter(all)
	if g := c.s.groups[0]; g.priority != 9 {
		t.Errorf("the group has priority %d, want 9", g.priority)
	}
	if ahead, ok := c.s.keep(&p, 1, true); !ok || !ahead {
		t.Error("a quick step passes runs that were leased ahead")
	}
	if ahead, ok := c.s.keep(&p, 1, false); !ok || ahead {
		t.Error("a step of another type has no slot")
	}
	c.s.withdraw(func(*job) bool { return true })
	c.s.due(leasing.Due{Others: true})
	if ahead, ok := c.s.keep(&p, 1, true); !ok || !ahead {
		t.Error("a quick step takes a slot that is left to others")
	}
}
