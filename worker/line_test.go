package worker

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A crowd makes jobs for a line.
type crowd struct {
	s     *jobs
	entry *entry
}

func newCrowd(slots int) *crowd {
	s := withSlots(slots)
	s.markable = make(chan struct{}, 1)
	return &crowd{s, &entry{}}
}

// jobs returns n jobs with a token of the given UUID version.
func (c *crowd) jobs(n int, version byte, priority int) (all []*job) {
	token := uuid.New()
	token[6] = token[6]&0x0f | version<<4
	for range n {
		j := &job{Lease: leasing.Lease{Info: run.Info{ID: uuid.New()}, Token: token, Priority: priority, Length: time.Minute, Payload: []byte("12345")}, entry: c.entry, extended: time.Now()}
		j.ctx, j.cancel = context.WithCancelCause(context.Background())
		all = append(all, j)
	}
	return all
}

func allBegin(groups []*group) map[uuid.UUID]bool {
	begun := map[uuid.UUID]bool{}
	for _, g := range groups {
		begun[g.token] = true
	}
	return begun
}

// Whatever happens in the line, no more handlers run than there are slots, no more runs are charged without having begun than
// there are slots, nothing that was leased ahead begins before its mark is known, and in the end nothing is left.
func TestLine(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		slots := 1 + random.IntN(6)
		c := newCrowd(slots)
		s := c.s
		var asking []*group
		running := map[*job]bool{}
		marked := map[uuid.UUID]bool{}
		var poll *promise      // of the poll under way; nil: there is none
		var settles []*promise // of the settle transactions under way
		check := func() {
			t.Helper()
			waiting, charged, bytes := 0, 0, 0
			for _, j := range s.byID {
				switch j.stage {
				case leasedAhead:
					waiting++
				case asked, ready:
					charged++
				}
				if j.stage != inSlot {
					bytes += len(j.Payload)
				}
			}
			if waiting != s.waiting || charged != s.charged || bytes != s.bytes || len(s.working) != len(running) {
				t.Fatalf("seed %d: counted %d, %d, %d, %d; there are %d, %d, %d, %d", seed, s.waiting, s.charged, s.bytes, len(s.working), waiting, charged, bytes, len(running))
			}
			for _, p := range append(slices.Clone(settles), poll) {
				if p != nil {
					charged += p.direct
				}
			}
			if charged > slots || len(running) > slots {
				t.Fatalf("seed %d: %d charged or about to be, %d running, with %d slots", seed, charged, len(running), slots)
			}
		}
		for range 300 {
			switch random.IntN(11) {
			case 0: // a poll begins, and its answer comes later
				if poll == nil {
					_, p := s.promise(random.IntN(slots+1), random.IntN(3))
					poll = &p
				} else {
					all := c.jobs(random.IntN(poll.direct+1), 4, random.IntN(3))
					for range random.IntN(4) {
						all = append(all, c.jobs(1+random.IntN(max(slots/2, 1)), 8, random.IntN(3))...)
					}
					s.enter(all)
					s.fulfil(*poll)
					poll = nil
				}
			case 9: // a settle transaction decides on a next step
				if len(settles) < 2 {
					settles = append(settles, &promise{})
				}
				s.keep(settles[random.IntN(len(settles))], 10, random.IntN(2) == 0)
			case 10: // it is committed, or not
				if len(settles) > 0 {
					p := settles[0]
					settles = settles[1:]
					if random.IntN(3) > 0 {
						s.enter(append(c.jobs(p.direct, 4, random.IntN(3)), c.jobs(p.ahead, 8, random.IntN(3))...))
					}
					s.fulfil(*p)
				}
			case 1:
				if random.IntN(2) == 0 { // take-backs bring runs without attempts, or none
					s.enter(nil)
				}
				if asking == nil {
					asking = s.ask()
				}
			case 2:
				begun := allBegin(asking)
				for _, g := range asking {
					if random.IntN(4) == 0 {
						delete(begun, g.token)
					}
					marked[g.token] = begun[g.token]
				}
				for _, j := range s.answered(asking, begun) {
					s.remove(j)
				}
				asking = nil
			case 3, 4, 5:
				if j := s.take(); j != nil {
					if j.Ahead() && !marked[j.Token] {
						t.Fatalf("seed %d: one that was leased ahead begins without a mark", seed)
					}
					running[j] = true
				}
			case 6, 7:
				for j := range running {
					delete(running, j)
					s.returned(j)
					s.remove(j)
					break
				}
			case 8:
				switch random.IntN(4) {
				case 0:
					for _, j := range s.withdraw(func(*job) bool { return random.IntN(3) == 0 }) {
						s.remove(j)
					}
				case 1:
					for _, j := range s.byID { // the lease of one is lost
						s.end(j, run.ErrLost)
						if running[j] && s.leave(j) {
							delete(running, j)
						}
						break
					}
				case 2:
					s.due(leasing.Due{Ahead: random.IntN(2) == 0, Others: random.IntN(2) == 0, Mixed: random.IntN(2) == 0})
				}
			}
			check()
		}
		s.shut()
		for _, j := range s.withdraw(func(*job) bool { return true }) {
			s.remove(j)
		}
		if s.answered(asking, allBegin(asking)); s.take() != nil || s.ask() != nil {
			t.Fatalf("seed %d: something begins after the worker was told to stop", seed)
		}
		for j := range running {
			s.returned(j)
			s.remove(j)
		}
		if len(s.byID)+s.waiting+s.charged+s.bytes+len(s.working) != 0 {
			t.Fatalf("seed %d: %d jobs are left, %d, %d, %d, %d", seed, len(s.byID), s.waiting, s.charged, s.bytes, len(s.working))
		}
	}
}

// A run of higher priority passes those that wait: among groups to be begun, and among runs that may begin.
func TestPriorityInLine(t *testing.T) {
	c := newCrowd(4)
	c.s.enter(c.jobs(2, 8, 0))
	c.s.enter(c.jobs(2, 8, 0))
	c.s.enter(c.jobs(1, 8, 7))
	c.s.enter(c.jobs(1, 4, 3))
	groups := c.s.ask()
	c.s.answered(groups, allBegin(groups))
	var order []int
	for j := c.s.take(); j != nil; j = c.s.take() {
		order = append(order, j.Priority)
	}
	if want := []int{7, 3, 0, 0}; !slices.Equal(order, want) {
		t.Errorf("began by priorities %v, want %v", order, want)
	}
}

// While runs are due that may not be leased ahead, marks leave half of the slots to them.
func TestReserve(t *testing.T) {
	c := newCrowd(4)
	for range 3 {
		c.s.enter(c.jobs(2, 8, 0))
	}
	c.s.due(leasing.Due{Ahead: true, Others: true, Mixed: true})
	if n := len(c.s.ask()); n != 1 || c.s.space().direct != 2 {
		t.Errorf("%d groups are begun and %d slots free, want 1 and 2", n, c.s.space().direct)
	}
	c.s.due(leasing.Due{Ahead: true, Others: false})
	if n := len(c.s.ask()); n != 1 || c.s.space().direct != 0 {
		t.Errorf("then %d groups are begun and %d slots free, want 1 and none", n, c.s.space().direct)
	}
}

// A type counts as quick once ten of its handlers have returned within the horizon on average, and no longer once they take longer.
// A slot counts as free soon only while its handler has run for as long as its type's do on average, give or take the horizon.
func TestQuick(t *testing.T) {
	c := newCrowd(2)
	call := func(took time.Duration) {
		c.s.enter(c.jobs(1, 4, 0))
		j := c.s.take()
		j.began = j.began.Add(-took)
		c.s.returned(j)
		c.s.remove(j)
	}
	for range enoughCalls - 1 {
		call(time.Millisecond)
	}
	if c.s.isQuick(c.entry) {
		t.Error("quick after too few calls")
	}
	call(time.Millisecond)
	if !c.s.isQuick(c.entry) || c.s.isQuick(nil) {
		t.Error("not quick, or quick without a handler")
	}
	c.s.enter(c.jobs(2, 4, 0))
	first, second := c.s.take(), c.s.take()
	if n := c.s.space().direct; n != 2 {
		t.Errorf("%d slots will be free soon, want both", n)
	}
	first.began = first.began.Add(-3 * horizon)
	if n := c.s.space().direct; n != 1 {
		t.Errorf("%d slots will be free soon, want the one whose handler has just begun", n)
	}
	for _, j := range []*job{first, second} {
		c.s.returned(j)
		c.s.remove(j)
	}
	for range 12 {
		call(4*horizon - time.Millisecond)
	}
	if c.s.isQuick(c.entry) {
		t.Error("still quick although its handlers take 200 ms")
	}
	for range 300 {
		call(4*horizon - time.Millisecond)
	}
	c.s.enter(c.jobs(1, 4, 0))
	slow := c.s.take()
	for after, want := range map[time.Duration]int{0: 1, 2 * horizon: 1, 3*horizon + horizon/2: 2, 4*horizon + horizon/2: 2, 6 * horizon: 1} {
		slow.began = time.Now().Add(-after)
		if n := c.s.space().direct; n != want {
			t.Errorf("after %s of 200 ms: %d slots will be free soon, want %d", after, n, want)
		}
	}
}

// As many runs are leased ahead as handlers return in the horizon, and none while too many outcomes wait to be recorded, or
// while the payloads in line are too large.
func TestSpaceAhead(t *testing.T) {
	c := newCrowd(100)
	if n := c.s.space().ahead; n != 0 {
		t.Errorf("%d ahead before any handler has returned", n)
	}
	pace := func(rate float64) {
		c.s.pace.last, c.s.pace.since, c.s.pace.returned = rate, time.Now().Add(time.Hour), time.Now()
	}
	pace(10_000)
	if n := c.s.space().ahead; n != 500 {
		t.Errorf("%d ahead at 10,000 a second, want 500", n)
	}
	c.s.due(leasing.Due{Ahead: false, Others: true})
	if n := c.s.space().ahead; n != 0 {
		t.Errorf("%d ahead although none are due, so that polls find nothing", n)
	}
	c.s.due(leasing.Due{Ahead: true, Others: false})
	pace(1e9)
	if n := c.s.space().ahead; n != mostAhead {
		t.Errorf("%d ahead at any rate, want %d", n, mostAhead)
	}
	pace(10_000)
	c.s.enter(c.jobs(200, 8, 0))
	if n := c.s.space().ahead; n != 300 {
		t.Errorf("%d ahead of 500, want 300", n)
	}
	c.s.bytes += mostBytes
	if n := c.s.space().ahead; n != 0 {
		t.Errorf("%d ahead although payloads are too large", n)
	}
	c.s.bytes -= mostBytes
	for range 501 {
		j := c.jobs(1, 4, 0)[0]
		j.done = true
		c.s.add(j)
	}
	for mixed, direct := range map[bool]int{false: 0, true: 50} {
		c.s.due(leasing.Due{Ahead: true, Mixed: mixed})
		if free := c.s.space(); free.ahead != 0 || free.direct != direct {
			t.Errorf("%d ahead and %d slots while 501 outcomes wait, and runs that are leased ahead, with others: %t; want none and %d", free.ahead, free.direct, mixed, direct)
		}
	}
}

// The pace is the greater of the last two spans, and falls to nothing once no handler returns.
func TestPace(t *testing.T) {
	start := time.Now()
	p := pace{since: start}
	p.n = 250
	if r := p.rate(start.Add(paceSpan), false); r != 10_000 {
		t.Errorf("rate %g, want 10,000", r)
	}
	if r := p.rate(start.Add(2*paceSpan), false); r != 10_000 {
		t.Errorf("rate %g after a span without any, want 10,000 still", r)
	}
	if r := p.rate(start.Add(3*paceSpan), false); r != 0 {
		t.Errorf("rate %g after two, want 0", r)
	}
}

// While no handler runs, the pace stays what it was for a while, and then it is nothing.
func TestPaceRests(t *testing.T) {
	start := time.Now()
	p := pace{since: start, returned: start}
	p.n = 250
	for at := paceSpan; at <= paceRests; at += paceSpan {
		if r := p.rate(start.Add(at), true); r != 10_000 {
			t.Fatalf("rate %g %s after the last handler, want 10,000 still", r, at)
		}
	}
	if r := p.rate(start.Add(paceRests+1), true); r != 0 {
		t.Errorf("rate %g in the end, want 0", r)
	}
	p.n, p.returned = 250, start.Add(paceRests+paceSpan)
	if r := p.rate(start.Add(paceRests+paceSpan+1), true); r < 9_999 || r > 10_000 {
		t.Errorf("rate %g, want that of the last span, without the time before it", r)
	}
}

// A run whose lease has ended while it waited does not begin: the process was frozen, and another worker may have the run.
func TestLateLeasesDoNotBegin(t *testing.T) {
	c := newCrowd(2)
	all := c.jobs(2, 4, 0)
	c.s.enter(all)
	all[0].extended = time.Now().Add(-all[0].Length)
	if j := c.s.take(); j != all[1] || c.s.take() != nil {
		t.Error("one begins although its lease has ended")
	}
	if context.Cause(all[0].ctx) != run.ErrLost || c.s.byID[all[0].ID] != nil || c.s.charged != 0 {
		t.Errorf("it is still held: %v, %d charged", context.Cause(all[0].ctx), c.s.charged)
	}
}

// Suspects may be leased while all slots are taken by handlers that return soon, as others may.
func TestSuspectsBesideAFlood(t *testing.T) {
	c := newCrowd(2)
	for range enoughCalls {
		c.s.enter(c.jobs(1, 4, 0))
		j := c.s.take()
		c.s.returned(j)
		c.s.remove(j)
	}
	c.s.enter(c.jobs(2, 4, 0))
	c.s.take()
	c.s.take()
	if n, _ := c.s.suspects(); n != 1 || c.s.space().direct != 2 {
		t.Errorf("%d suspects and %d others may be leased, want 1 and 2", n, c.s.space().direct)
	}
}

// Runs that were leased ahead have half of what may be charged where there are others, too, and otherwise all of it. Runs
// that are given back are no late outcomes.
func TestLeasedAheadHasItsShare(t *testing.T) {
	c := newCrowd(8)
	c.s.enter(c.jobs(4, 8, 0))
	if free := c.s.space(); free.direct != 0 || !free.behind {
		t.Errorf("%d may be leased to begin at once, want none where there are no others", free.direct)
	}
	c.s.due(leasing.Due{Ahead: true, Mixed: true})
	if free := c.s.space(); free.direct != 4 || !free.behind {
		t.Errorf("%d may be leased to begin at once, want half of the slots", free.direct)
	}
	c.s.enter(c.jobs(4, 4, 0))
	if groups := c.s.ask(); len(groups) != 1 {
		t.Error("the group waits for room behind those that were leased later")
	}
	out := c.s.withdraw(func(*job) bool { return true })
	if c.s.suspects(); len(out) != 8 || c.s.isBehind(c.entry) {
		t.Errorf("%d are given back, and the type is stopped: %v", len(out), c.s.isBehind(c.entry))
	}
}

// While runs that are leased ahead wait, the worker looks for what is paused and for what goes before them, every tenth of
// a second, although it may lease nothing.
func TestLooksWhileRunsWait(t *testing.T) {
	c := newCrowd(4)
	w := &Worker{}
	w.jobs.line = c.s.line
	look := func(what string, want bool) {
		t.Helper()
		if got := w.mustLook(); got != want {
			t.Errorf("%s: it must look: %v", what, got)
		}
	}
	look("nothing waits", false)
	w.jobs.byID = c.s.byID
	w.jobs.enter(c.jobs(2, 8, 0))
	look("runs wait", true)
	w.lastSeek.now()
	look("it has just looked", false)
}

// Once the worker has looked and found a type paused, no run of it begins that waits: leased ahead, asked for or ready. They are given
// back. Runs of other types stay in line.
func TestPausedRunsDoNotBegin(t *testing.T) {
	c := newCrowd(4)
	w := &Worker{settles: make(chan *job, 100)}
	w.jobs.line, w.jobs.freed = c.s.line, c.s.freed
	of := func(typ string, all []*job) []*job {
		for _, j := range all {
			j.Type = typ
		}
		return all
	}
	w.jobs.enter(of("mail.a.v1", c.jobs(1, 4, 0)))
	w.jobs.enter(of("mail.b.v1", c.jobs(2, 8, 0)))
	asking := w.jobs.ask()
	w.jobs.enter(of("mail.a.v1", c.jobs(2, 8, 0)))
	w.jobs.enter(of("other.a.v1", c.jobs(1, 4, 0)))
	w.learnPauses([]string{"mail.a.v1", "mail.b."})
	w.learnPauses([]string{"mail."})
	w.giveBack(w.jobs.answered(asking, allBegin(asking)))
	var began []string
	for j := w.jobs.take(); j != nil; j = w.jobs.take() {
		began = append(began, j.Type)
	}
	if !slices.Equal(began, []string{"other.a.v1"}) || len(w.jobs.ask()) != 0 {
		t.Errorf("began: %v, want the run of the type that is not paused", began)
	}
	if len(w.settles) != 5 {
		t.Errorf("%d are given back, want 5", len(w.settles))
	}
	for range len(w.settles) {
		if j := <-w.settles; j.outcome.Verdict != settling.Release || j.outcome.Token != j.Token {
			t.Errorf("given back as %+v", j.outcome)
		}
	}
}
