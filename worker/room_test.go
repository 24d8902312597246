package worker

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// suspects reports the suspects that a worker holds: suspects whose handlers run, even when they are no longer watched
// (suspectHold); handlers that still run although their leases are over; suspects at their last attempt; and a suspect
// that must be alone. It does not report a run that is not a suspect, or one that is exhausted.
func TestSuspectsHeld(t *testing.T) {
	held := func(change func(*job)) *job {
		j := &job{Lease: leasing.Lease{Info: run.Info{ID: uuid.New(), Attempt: 2, MaxAttempts: 2}, Token: uuid.New(), Suspect: true, Taken: time.Now().Add(-time.Minute)}, row: 2, begun: true}
		j.cancel = func(error) {}
		change(j)
		return j
	}
	past := time.Now().Add(-time.Minute)
	for _, c := range []struct {
		name   string
		change func(*job)
		want   leasing.Suspects // Last aside, which must be the job if last is true
		last   bool

		received time.Time // when the lease's answer arrived; the request was sent a minute ago
	}{
		{"at its last attempt", func(*job) {}, leasing.Suspects{Running: true}, true, past},
		{"watched", func(*job) {}, leasing.Suspects{Running: true, Watched: true}, true, time.Now()},
		{"with attempts left", func(j *job) { j.Attempt = 1 }, leasing.Suspects{Running: true}, false, past},
		{"kept alone", func(j *job) { j.Alone = true }, leasing.Suspects{Running: true, Alone: true}, true, past},
		{"unsettled, with its handler over", func(j *job) { j.Alone, j.unsettled, j.done = true, true, true }, leasing.Suspects{}, true, past},
		{"no suspect", func(j *job) { j.Suspect = false }, leasing.Suspects{}, false, past},
		{"exhausted", func(j *job) { j.Exhausted = true }, leasing.Suspects{}, false, past},
	} {
		s := withSlots(10)
		j := held(c.change)
		s.add(j)
		j.received = c.received
		_, got := s.suspects()
		if got.Running != c.want.Running || got.Watched != c.want.Watched || got.Alone != c.want.Alone || (len(got.Last) == 1 && got.Last[0].Token == j.Token) != c.last {
			t.Errorf("%s: %+v", c.name, got)
		}
	}

	s := withSlots(10)
	j := held(func(*job) {})
	s.add(j)
	s.leave(j)
	if _, got := s.suspects(); !got.Strays || got.Running || len(got.Last) > 0 {
		t.Errorf("a handler that goes on without its lease: %+v", got)
	}
	s.returned(j)
	if _, got := s.suspects(); got.Strays {
		t.Errorf("after it has returned: %+v", got)
	}
	again := held(func(n *job) { n.ID = j.ID })
	s.add(j)
	j.done, j.left = false, false
	s.add(again)
	s.remove(again)
	if _, got := s.suspects(); !got.Strays {
		t.Error("the handler of an earlier lease of the same run is forgotten")
	}
}

func withSlots(n int) *jobs { return &jobs{line: line{slots: n}, freed: make(chan struct{}, 1)} }

// A worker that records outcomes too slowly leases no more runs of their types until it has caught up, and
// continues with other types. Outcomes that wait for a locked row, or that are refused, stop no type.
func TestLateOutcomesStopTheirTypes(t *testing.T) {
	const slots = 80
	slow, other := &entry{pattern: "slow."}, &entry{pattern: "other."}
	for _, c := range []struct {
		name   string
		late   int
		change func(*job)
		behind bool
	}{
		{"an eighth", slots / 8, func(*job) {}, false},
		{"more than that", slots/8 + 1, func(*job) {}, true},
		{"not for long", slots / 2, func(j *job) { j.doneAt = time.Now() }, false},
		{"handlers are at work", slots / 2, func(j *job) { j.done = false }, false},
		{"rows are locked", slots / 2, func(j *job) { j.locked = true }, false},
		{"the database has answered", slots / 2, func(j *job) { j.answered = true }, false},
		{"they are unsettled", slots / 2, func(j *job) { j.unsettled = true }, false},
	} {
		s := withSlots(slots)
		for range c.late {
			j := &job{Lease: leasing.Lease{Info: run.Info{ID: uuid.New()}, Length: time.Minute}, entry: slow, done: true, doneAt: time.Now().Add(-30 * time.Second)}
			c.change(j)
			s.add(j)
		}
		if s.suspects(); s.space().direct == 0 {
			t.Errorf("%s: there is no room for any run", c.name)
		}
		if s.isBehind(slow) != c.behind {
			t.Errorf("%s: more of the type may be leased: %t, want %t", c.name, !s.isBehind(slow), !c.behind)
		}
		if s.isBehind(other) {
			t.Errorf("%s: no more of another type may be leased", c.name)
		}
		for _, j := range s.all() {
			s.remove(j)
		}
		if s.suspects(); s.isBehind(slow) {
			t.Errorf("%s: it has caught up, and still no more of the type may be leased", c.name)
		}
	}
}

// The terms of a type whose outcomes are late leave no room for it. The terms of other types are unchanged.
func TestTermsWhileOutcomesAreLate(t *testing.T) {
	mux := NewMux()
	for _, typ := range []string{"slow.a.v1", "other.a.v1"} {
		Handle(mux, run.Task[struct{}](typ), func(context.Context, struct{}) (struct{}, error) { return struct{}{}, nil }, Options{Concurrency: 50})
	}
	w := &Worker{config: Config{Mux: mux, Lease: time.Minute}, jobs: jobs{line: line{slots: 100}, freed: make(chan struct{}, 1)}}
	for range 20 {
		w.jobs.add(&job{Lease: leasing.Lease{Info: run.Info{ID: uuid.New()}, Length: time.Minute}, entry: w.lookup("slow.a.v1"), done: true, doneAt: time.Now().Add(-30 * time.Second)})
	}
	w.jobs.suspects()
	if room := w.terms("slow.a.v1").Room; room != 0 {
		t.Errorf("there is room for %d more, want none", room)
	}
	if room := w.terms("other.a.v1").Room; room != 50 {
		t.Errorf("there is room for %d of another type, want 50", room)
	}
}

// A call that succeeds after its context has ended does not count as a change that the database accepted,
// because a server that waits for a standby at commit answers a cancellation as if the commit had succeeded.
func TestNoSignOfLifeFromAnEndedCall(t *testing.T) {
	w := &Worker{}
	ended, end := context.WithCancel(t.Context())
	end()
	if w.hasWritten(ended); !w.LastWrite().IsZero() {
		t.Error("it counts")
	}
	if w.hasWritten(t.Context()); w.LastWrite().IsZero() {
		t.Error("one that is in time does not count")
	}
}
