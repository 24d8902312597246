package worker

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// A slot is a handler that runs, and a worker has Config.Concurrency of them. It holds more leases than that, so that no
// slot is empty during the next poll. These wait in line:
//
//	leased ahead ──ask──▶ asked ──answered──▶ ready ──take──▶ in a slot
//	leased to begin at once ───────────────────▲
//
// If the process dies, a run that is asked or ready is charged an attempt although it has not begun. There are never more
// of these than slots. A run that is leased ahead is not charged, see leasing.Begin.
const (
	// horizon is for how much time a worker leases ahead, at the rate at which its handlers return. It covers a poll and
	// a settle. Runs of types whose handlers take longer on average are not leased ahead.
	horizon = 50 * time.Millisecond
	// longestWait is how long a run may wait in line. Then it is given back, because another worker may have a slot.
	longestWait = time.Second
	// mostAhead and mostBytes bound the runs in line, and the payloads that the next poll may lease ahead.
	mostAhead = 3000
	mostBytes = 16 << 20
	// enoughCalls is how many handlers of a type must have returned before it may count as quick.
	enoughCalls = 10
)

// A stage says where in the line a job is.
type stage byte

const (
	inSlot stage = iota // or past it, or it needs none
	leasedAhead
	asked
	ready
)

// line is who waits for a slot, and who has one. It is part of jobs, and guarded by its mu.
type line struct {
	slots     int      // how many there are
	working   []*job   // those that have a slot
	waiting   int      // how many are leasedAhead
	charged   int      // how many are asked or ready
	marked    int      // how many of the charged were leased ahead
	promised  promise  // what the poll and the settle transactions under way may lease
	bytes     int      // of the payloads of all that wait
	groups    []*group // of those that are leasedAhead, in the order in which they came
	ready     queue    // the jobs that may begin
	entered   int      // how many have come into ready
	reserved  int      // how much of what may be charged is left to runs that may not be leased ahead
	noneDue   bool     // no runs are due that may be leased ahead
	mixed     bool     // other runs are due, too, or were not long ago
	counted   int      // what busyLocked has returned for keep, and when
	countedAt time.Time
	top       int             // the highest priority of the runs that are due
	barred    time.Time       // until then nothing is leased ahead
	refuses   func(*job) bool // of a job that comes into line: it may not begin, and must be given back; may be nil
	closed    bool            // nothing begins any more
	pace      pace            // at which handlers return
	markable  chan struct{}   // signalled when there may be a group to ask for
}

// A group is the runs that one statement has leased ahead with the same token.
type group struct {
	token    uuid.UUID
	priority int // the highest
	jobs     []*job
}

// A promise is what a statement under way may lease. Until fulfil is called, it counts as leased: the server may have done
// so already.
type promise struct {
	direct int // runs to begin at once; they count as charged
	ahead  int // runs ahead of their handlers
	bytes  int // of payload of those ahead
}

func (p *promise) add(other promise, times int) {
	p.direct += times * other.direct
	p.ahead += times * other.ahead
	p.bytes += times * other.bytes
}

// promise returns how many runs a poll may lease, at most most in all. share is how much of the free room it leaves to
// settle transactions, which need some meanwhile to carry steps on: one part in so many, 0 for none.
func (s *jobs) promise(most, share int) (space, promise) {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := s.pollLocked()
	if share > 0 {
		free.direct -= min(max(free.direct/share, 1), max(free.direct-1, 0))
		free.ahead -= free.ahead / share
	}
	free.direct = min(free.direct, most)
	free.ahead = min(free.ahead, most-free.direct)
	p := promise{direct: free.direct, ahead: free.ahead}
	s.promised.add(p, 1)
	return free, p
}

// keep promises room for a step with a payload of this size, which a settle transaction stores as leased. If it is of a
// quick type, the room may be for a lease ahead. There is room for four times as many of these as for what polls lease: one
// settle transaction may bring hundreds, and steps of instances under way go before the start of further instances. p is
// what is promised to the transaction so far.
func (s *jobs) keep(p *promise, bytes int, quick bool) (ahead, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Sub(s.countedAt) > time.Millisecond { // a transaction may store thousands of steps
		s.counted, s.countedAt = s.busyLocked(now), now
	}
	free := s.spaceLocked(now, s.counted)
	one := promise{direct: 1}
	switch {
	case s.closed:
		return false, false
	case free.direct > 0 && !(quick && (free.behind || s.reserved > 0)): // what is left then is for other runs
	case quick && free.steps > 0 && free.bytes >= bytes:
		one = promise{ahead: 1, bytes: bytes}
	default:
		return false, false
	}
	p.add(one, 1)
	s.promised.add(one, 1)
	return one.ahead > 0, true
}

// fulfil ends a promise, once what the statement has leased is in line.
func (s *jobs) fulfil(p promise) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.promised.add(p, -1)
	s.signalMarkable()
}

// enter adds the jobs of one statement. It returns those that may not begin, because the worker
// stops, or because refuses says so.
func (s *jobs) enter(all []*job) (late []*job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	groups := map[uuid.UUID]*group{}
	for _, j := range all {
		s.addLocked(j)
		switch {
		case s.closed, s.refuses != nil && s.refuses(j):
			s.withdrawLocked(j)
			late = append(late, j)
		case !j.Ahead():
			s.move(j, ready)
		default:
			g := groups[j.Token]
			if g == nil {
				g = &group{token: j.Token, priority: j.Priority}
				groups[j.Token], s.groups = g, append(s.groups, g)
			}
			g.priority = max(g.priority, j.Priority)
			g.jobs = append(g.jobs, j)
			s.move(j, leasedAhead)
		}
	}
	s.signalMarkable()
	return late
}

// move notes that a job is at another stage.
func (s *jobs) move(j *job, to stage) {
	count := func(at stage, n int) {
		switch at {
		case leasedAhead:
			s.waiting += n
		case asked, ready:
			s.charged += n
			if j.Ahead() {
				s.marked += n
			}
		}
		if at != inSlot {
			s.bytes += n * len(j.Payload)
		}
	}
	count(j.stage, -1)
	count(to, 1)
	j.stage = to
	if to == ready {
		s.entered++
		heap.Push(&s.ready, queued{j, s.entered})
	}
}

// ask returns the groups whose runs may be begun next, those of the highest priority first. Their runs count as charged
// from now on. The caller asks leasing.Begin, and calls answered.
func (s *jobs) ask() (asking []*group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	room := min(s.slots-s.charged-s.promised.direct, s.slots-s.reserved-s.marked)
	for !s.closed && len(s.groups) > 0 {
		best := 0
		for i, g := range s.groups {
			if g.priority > s.groups[best].priority {
				best = i
			}
		}
		g := s.groups[best]
		g.jobs = slices.DeleteFunc(g.jobs, func(j *job) bool { return j.stage != leasedAhead })
		if len(g.jobs) > room {
			break
		}
		s.groups = slices.Delete(s.groups, best, best+1)
		if len(g.jobs) == 0 {
			continue
		}
		room -= len(g.jobs)
		for _, j := range g.jobs {
			s.move(j, asked)
		}
		asking = append(asking, g)
	}
	return asking
}

// answered makes the runs of the groups that may begin ready. It returns the jobs of the other groups, which must be
// given back.
func (s *jobs) answered(groups []*group, begun map[uuid.UUID]bool) (refused []*job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range groups {
		for _, j := range g.jobs {
			switch {
			case j.stage != asked: // withdrawn meanwhile
			case begun[g.token]:
				s.move(j, ready)
			default:
				s.withdrawLocked(j)
				refused = append(refused, j)
			}
		}
	}
	return refused
}

// someOf returns some runs of an asked group that should still be leased.
func (s *jobs) someOf(g *group) (some []uuid.UUID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range g.jobs {
		if j.stage == asked && len(some) < 3 {
			some = append(some, j.ID)
		}
	}
	return some
}

// take returns the next job that may begin, and gives it a slot. It returns nil if there is no such job or no slot.
func (s *jobs) take() *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.working) >= s.slots {
		return nil
	}
	for len(s.ready) > 0 {
		j := heap.Pop(&s.ready).(queued).job
		if j.stage != ready { // withdrawn
			continue
		}
		now := time.Now()
		if now.Sub(j.extended) >= j.Length { // this process was frozen, and others may have the run
			s.endLocked(j, run.ErrLost)
			continue
		}
		s.move(j, inSlot)
		j.slotted, j.place, j.began = true, len(s.working), now
		s.working = append(s.working, j)
		s.signalMarkable()
		return j
	}
	return nil
}

// vacate takes the slot from a job, if it has one.
func (s *jobs) vacate(j *job) {
	if !j.slotted {
		return
	}
	j.slotted = false
	last := s.working[len(s.working)-1]
	s.working[j.place], last.place = last, j.place
	s.working = s.working[:len(s.working)-1]
	s.signal()
	s.signalMarkable()
}

// withdraw takes jobs out of the line for which out reports true, and returns them. They must be given back.
func (s *jobs) withdraw(out func(*job) bool) (all []*job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting+s.charged == 0 {
		return nil
	}
	for _, j := range s.byID {
		if j.stage != inSlot && out(j) {
			s.withdrawLocked(j)
			all = append(all, j)
		}
	}
	return all
}

func (s *jobs) withdrawLocked(j *job) {
	s.move(j, inSlot)
	j.done, j.doneAt = true, time.Now()
	s.signalMarkable()
}

// shut lets nothing begin any more.
func (s *jobs) shut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// bar stops leasing ahead for a while.
func (s *jobs) bar(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.barred = time.Now().Add(d)
}

// due notes what is due. If runs are that may not be leased ahead, slots are left to them.
func (s *jobs) due(due leasing.Due) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noneDue, s.mixed, s.top = !due.Ahead, due.Mixed, due.Top
	if s.reserved = 0; due.Others {
		s.reserved = s.slots / 2
	}
}

// passes reports whether runs with a higher priority than this one are due.
func (s *jobs) passes(priority int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return priority < s.top
}

// haveMore reports whether runs that are leased ahead wait in line.
func (s *jobs) haveMore() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting > 0
}

// A space is how many runs the next poll may lease.
type space struct {
	direct int  // to begin at once
	ahead  int  // ahead of their handlers
	steps  int  // the same, for steps that a settle transaction stores
	bytes  int  // of payload of those ahead
	many   int  // how many are worth a poll
	behind bool // runs that were leased ahead wait: further ones of their types must not pass them
	mixed  bool // there are other runs, too
}

// space returns how many runs a poll may lease.
//
// A slot whose handler will probably return soon counts as free: it will be, when the answer to a poll has come.
// Outcomes that are not recorded yet need no slot, but beyond a horizon's worth of them, and beyond as many as there
// are slots, each takes one.
func (s *jobs) space() space {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pollLocked()
}

func (s *jobs) pollLocked() space {
	now := time.Now()
	free := s.spaceLocked(now, s.busyLocked(now))
	if s.noneDue {
		free.ahead = 0
	}
	if free.mixed = s.mixed; free.behind && !free.mixed {
		free.direct = 0 // it would be kept from those that wait, and nothing could use it
	}
	return free
}

// busyLocked returns how many slots have handlers that will probably not return soon.
func (s *jobs) busyLocked(now time.Time) (n int) {
	for _, j := range s.working {
		if !s.endsSoon(j, now) {
			n++
		}
	}
	return n
}

// spaceLocked returns the space if busy is the result of busyLocked.
func (s *jobs) spaceLocked(now time.Time, busy int) space {
	limit := min(int(s.pace.rate(now, len(s.working) == 0)*horizon.Seconds()), mostAhead)
	outcomes := len(s.byID) - len(s.working) - s.waiting - s.charged - min(s.parked, s.slots)
	tooMany := max(outcomes-max(s.slots, limit), 0)
	taken := s.charged + s.promised.direct + tooMany + busy
	free := space{direct: max(s.slots-taken, 0), bytes: max(mostBytes-s.bytes-s.promised.bytes, 0), many: max((s.slots+limit)/4, 1), behind: s.waiting > 0}
	if free.behind { // the other half of what may be charged is theirs
		free.direct = min(free.direct, max(s.slots-s.slots/2-(s.charged-s.marked)-s.promised.direct, 0))
	}
	if !s.closed && free.bytes > 0 && now.After(s.barred) {
		inLine := s.waiting + s.charged + s.promised.direct + s.promised.ahead
		steps := min(4*limit, mostAhead)
		free.steps = max(steps-inLine-max(outcomes-max(s.slots, steps), 0), 0)
		if tooMany == 0 {
			free.ahead = max(limit-inLine, 0)
		}
	}
	return free
}

func (s *jobs) signalMarkable() {
	if len(s.groups) == 0 {
		return
	}
	poke(s.markable)
}

// A kind is what is known of the runs of an entry.
type kind struct {
	held  int           // leases
	calls int           // handlers that have returned, up to enoughCalls
	mean  time.Duration // of what they took, recent ones more
}

func (k *kind) took(d time.Duration) {
	if k.calls == 0 {
		k.mean = d
	}
	k.calls = min(k.calls+1, enoughCalls)
	k.mean += (d - k.mean) / 32
}

// kindOf returns what is known of an entry.
func (s *jobs) kindOf(e *entry) *kind {
	k := s.kinds[e]
	if k == nil {
		k = &kind{}
		s.kinds[e] = k
	}
	return k
}

// isQuick reports whether handlers of an entry return within the horizon.
func (s *jobs) isQuick(e *entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isQuickLocked(e)
}

func (s *jobs) isQuickLocked(e *entry) bool {
	k := s.kinds[e]
	return e != nil && k != nil && k.calls == enoughCalls && k.mean <= horizon
}

// endsSoon reports whether a handler will probably return within the horizon: it has run for as long as those of its
// entry do on average, give or take the horizon. Of handlers that take longer than some horizons the average says little.
func (s *jobs) endsSoon(j *job, now time.Time) bool {
	k := s.kinds[j.entry]
	if j.entry == nil || k == nil || k.calls < enoughCalls || k.mean > 4*horizon {
		return false
	}
	left := k.mean - now.Sub(j.began)
	return -horizon <= left && left <= horizon
}

// pace measures how many handlers return in a second, while there are any.
type pace struct {
	since        time.Time
	n            int
	last, before float64
	returned     time.Time // when the last of them did
}

const (
	// paceSpan is over which time is counted.
	paceSpan = 25 * time.Millisecond
	// paceRests is for how long the pace stays what it was while no handler runs. The outcomes of all of them are being
	// recorded, perhaps, and the steps that they lead to need room.
	paceRests = 250 * time.Millisecond
)

// rate returns the greater of the last two measurements. idle: no handler runs.
func (p *pace) rate(now time.Time, idle bool) float64 {
	if idle && p.n == 0 {
		p.since = now
		if now.Sub(p.returned) > paceRests {
			p.last, p.before = 0, 0
		}
	}
	if d := now.Sub(p.since); d >= paceSpan {
		p.before, p.last = p.last, float64(p.n)/d.Seconds()
		p.since, p.n = now, 0
	}
	return max(p.last, p.before)
}

// A queue is the jobs that may begin, by priority and then in the order in which they came.
type queue []queued

type queued struct {
	job   *job
	order int
}

func (q queue) Len() int { return len(q) }
func (q queue) Less(a, b int) bool {
	return cmp.Or(cmp.Compare(q[b].job.Priority, q[a].job.Priority), cmp.Compare(q[a].order, q[b].order)) < 0
}
func (q queue) Swap(a, b int) { q[a], q[b] = q[b], q[a] }
func (q *queue) Push(one any) { *q = append(*q, one.(queued)) }
func (q *queue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}
