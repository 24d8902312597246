package lease

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Poller leases due runs. Its cost depends on what it leases and not on what else is in
// the table: it knows the lanes, all open runs of one (suspect, type, priority), walks them
// from the highest priority down, and locks rows in due order until it has enough.
//
// It remembers where it stopped in each lane and goes on from there, because an old
// snapshot keeps the index entries of runs leased long ago. Rows may still turn up behind
// that position (a transaction that committed late), so a tenth of the time, and whenever
// a poll comes back short, it looks from the start. Lanes are found the same way.
//
// A Poller belongs to one goroutine. DB, Prefixes, Worker and Terms must be set.
type Poller struct {
	DB       run.DB
	Prefixes []string               // literal, each ends with a dot
	Worker   string                 // stored in leased_by, for people
	Terms    func(typ string) Terms // consulted for each lane of each poll
	Steps    bool                   // also lease steps of process graphs

	lanes     map[lane]*position
	discovery budget
	lookBack  budget
	busy      bool        // the last poll brought as many as were asked for
	inDoubt   []uuid.UUID // tokens of leases whose answer was lost
}

type lane struct {
	suspect  bool
	typ      string
	priority int
}

// A position is where a lane's last leased row stood.
type position struct {
	runAt   time.Time
	id      uuid.UUID
	head    time.Time // run_at of the lane's first row when it was discovered
	dueFrom time.Time // when that row is due, by this process's clock
}

// A budget bounds what looking from the start may cost: at most a tenth of the time. While
// nothing was found (idle) a cheap look is always allowed, while there is plenty (busy) a
// look every few milliseconds is enough.
type budget struct {
	cost time.Duration
	end  time.Time
}

const (
	cheap     = 2 * time.Millisecond
	busyPause = 25 * time.Millisecond
)

// wait returns how long until the next look is allowed.
func (b budget) wait(now time.Time, busy bool) time.Duration {
	pause := 9 * b.cost
	switch {
	case busy:
		pause = max(pause, busyPause)
	case b.cost <= cheap:
		return 0
	}
	return max(pause-now.Sub(b.end), 0)
}

func spent(start time.Time) budget {
	end := time.Now()
	return budget{cost: end.Sub(start), end: end}
}

// Never is the wait that Acquire returns when it knows of nothing to come.
const Never = time.Duration(1<<63 - 1)

// Acquire leases up to n due runs, of those at most suspects that are suspect, in order of
// priority, then of the time they became due. wait is after how long the next call may
// find more: 0 at once, Never if nothing is known. An error means that no lease was taken,
// or that its answer was lost: then the next call gives these leases back first, with no
// attempt charged.
func (p *Poller) Acquire(ctx context.Context, n, suspects int) (leases []Lease, wait time.Duration, err error) {
	if err := p.settleDoubts(ctx); err != nil {
		return nil, 0, err
	}
	start := time.Now()
	unseen := p.discovery.wait(start, p.busy)
	if unseen == 0 {
		if err := p.discover(ctx); err != nil {
			return nil, 0, err
		}
		p.discovery = spent(start)
		unseen = Never
	}
	start = time.Now()
	behind := p.lookBack.wait(start, p.busy)
	chosen, skipped := p.choose(n, suspects, start, behind == 0)
	p.busy = false
	if len(chosen) == 0 {
		return nil, min(unseen, p.nextDue(start)), nil
	}
	leases, err = p.take(ctx, chosen, n)
	if err != nil {
		return nil, 0, err
	}
	if behind == 0 {
		p.lookBack = spent(start)
		behind = Never
	}
	p.remember(chosen, leases, n)
	p.busy = len(leases) == n
	if p.busy || skipped && len(leases) > 0 {
		return leases, 0, nil
	}
	return leases, min(unseen, behind, p.nextDue(start)), nil
}

// nextDue returns how long it is until the first of the lanes that are not due yet is.
func (p *Poller) nextDue(now time.Time) time.Duration {
	next := Never
	for _, at := range p.lanes {
		if d := at.dueFrom.Sub(now); d > 0 {
			next = min(next, d)
		}
	}
	return next
}

// A request is one lane of one poll.
type request struct {
	lane
	Terms
	from *position
	most int
}

// choose picks the lanes that may have due rows, in the order in which they are served.
// Where a type has only limited room, or a suspect may be alone, just the first of its
// lanes takes part, and skipped tells that there were others.
func (p *Poller) choose(n, suspects int, now time.Time, fromStart bool) (chosen []request, skipped bool) {
	var due []lane
	for l, at := range p.lanes {
		if !now.Before(at.dueFrom) && (!l.suspect || suspects > 0) {
			due = append(due, l)
		}
	}
	slices.SortFunc(due, func(a, b lane) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority),
			p.lanes[a].head.Compare(p.lanes[b].head),
			cmp.Compare(a.typ, b.typ), compareBool(a.suspect, b.suspect))
	})
	limited := map[string]bool{}
	for _, l := range due {
		r := request{lane: l, Terms: p.Terms(l.typ), from: &position{}, most: n}
		if !fromStart {
			r.from = p.lanes[l]
		}
		var limits []string
		if l.suspect {
			limits, r.most = append(limits, "suspects"), min(n, suspects)
		}
		if r.Room >= 0 {
			limits, r.most = append(limits, "group "+r.Group), min(r.most, r.Room)
		}
		if r.most == 0 {
			continue
		}
		if slices.ContainsFunc(limits, func(name string) bool { return limited[name] }) {
			skipped = true
			continue
		}
		for _, name := range limits {
			limited[name] = true
		}
		chosen = append(chosen, r)
	}
	return chosen, skipped
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// remember moves the positions behind what was leased, and forgets lanes that had less
// than was asked for: the next discovery brings them back if there is more.
func (p *Poller) remember(chosen []request, leases []Lease, n int) {
	got := map[lane]int{}
	for _, l := range leases {
		key := lane{l.Suspect, l.Type, l.Priority}
		got[key]++
		at := p.lanes[key]
		if at == nil {
			continue
		}
		if c := l.runAt.Compare(at.runAt); c > 0 || c == 0 && bytes.Compare(l.ID[:], at.id[:]) > 0 {
			at.runAt, at.id = l.runAt, l.ID
		}
		at.head = at.runAt
	}
	if len(leases) == n {
		return // lanes further down were not reached
	}
	for _, r := range chosen {
		if got[r.lane] < r.most && r.from.runAt.IsZero() {
			delete(p.lanes, r.lane)
		}
	}
}

// settleDoubts gives back leases whose answer was lost.
func (p *Poller) settleDoubts(ctx context.Context) error {
	for len(p.inDoubt) > 0 {
		if err := giveBack(ctx, p.DB, p.inDoubt[0], p.Worker); err != nil {
			return err
		}
		p.inDoubt = p.inDoubt[1:]
	}
	return nil
}
