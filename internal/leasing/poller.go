package leasing

import (
	"bytes"
	"cmp"
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Poller leases due runs. Its cost depends on what it leases and not on what else is in
// the table: it knows the lanes, all open runs of one (suspect, type, priority), walks them
// from the highest priority down, and locks rows in due order until it has enough.
//
// It remembers how far it has come in each lane and goes on from there, because an old
// snapshot keeps the index entries of runs leased long ago. Discovery finds each lane's
// first open run anew: lanes that were unknown, and runs behind the remembered position,
// put there by a transaction that committed late. It may cost a twentieth of the time.
//
// A Poller belongs to one goroutine. DB, Prefixes, Worker and Terms must be set.
type Poller struct {
	DB       run.DB
	Prefixes []string               // literal, each ends with a dot
	Worker   string                 // stored in leased_by, for people
	Terms    func(typ string) Terms // consulted for each lane of each poll
	Steps    bool                   // also lease steps of process graphs

	Suspects Suspects // that this process holds; to be set before each Acquire

	SetAside func([]Aside) // told of runs that are set aside; may be nil
	Doubts   *Doubts       // requests whose answers were lost; nil: of its own

	NoBreaker func(typ string) bool // whether the breaker of a type counts for nothing; may be nil
	Open      func(typ string) bool // whether the caller was told that the breaker of a type is open: discovery may come seconds later; may be nil
	Outages   func(map[string]bool) // told, by each discovery, of the types whose runs have met an outage since the last success, and of each whether its breaker is open; may be nil

	paused     []string // prefixes and types, as discovery found them
	outages    map[string]*outage
	wereOpen   map[string]time.Time // types with a grace whose breaker was open, and when that was seen last
	werePaused map[string]time.Time // prefixes and types, and when they were last seen so
	probed     time.Time            // when a probe was last tried
	lanes      map[lane]*position
	failing    bool         // some lanes may have failures
	most       fault.Ration // as many are leased at a time, as it fails with more; 0: any number
	tried      int          // how many runs were tried after the last lease, which was refused; 0: it was not
	hurry      bool         // try the known lanes before discovery
	discovery  budget
	busy       bool      // the last poll brought as many as were asked for
	alone      bool      // the last suspect that was leased was alone
	kept       time.Time // when one was last held that is kept alone
	waiting    time.Time // until when suspects are left alone: none of those that are due could be leased
}

type lane struct {
	suspect  bool
	typ      string
	priority int
}

// A position is where to go on in a lane: no open run before it is known.
type position struct {
	runAt   time.Time
	id      uuid.UUID
	dueFrom time.Time // when the lane's first run is due, by this process's clock; zero: there is none
	seen    time.Time // when an open run was last known

	failures fault.Series // of leases from lanes among which it was
	lasting  bool         // they have lasted for long: any SQLSTATE may be an answer about a run of this lane
}

const (
	// memory is how long the position in a lane without open runs is kept. A run enqueued
	// there meanwhile is found without discovery.
	memory = time.Minute
	// slack is how late a transaction may commit for its run to be found in such a lane.
	slack = time.Minute
)

// A budget bounds what looking from the start may cost: at most a twentieth of the time. While
// nothing was found (idle) a cheap look is always allowed, while there is plenty (busy) a
// look every tenth of a second is enough. A look that takes seconds may take more than that.
type budget struct {
	cost time.Duration
	end  time.Time
}

const (
	cheap     = 2 * time.Millisecond
	busyPause = 100 * time.Millisecond
	longest   = 10 * time.Second // a stalled look must not stop the next for long

	watchPause = 500 * time.Millisecond // while suspects wait for those that are watched

	// othersTurn is how long, after a suspect was kept alone, the others are not made to wait for the next such one.
	othersTurn = time.Minute
)

// wait returns how long until the next look is allowed.
func (b budget) wait(now time.Time, busy bool) time.Duration {
	pause := min(19*b.cost, longest)
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

// Acquire leases up to n due runs, at most suspects of them suspect.
//
// Runs are leased by priority, then by the time they became due. Among lanes of equal priority, the lane
// with the oldest due run is emptied first. Acquire looks in the lanes that it knows. It finds new
// lanes by discovery, which it puts off after Hurry and while there is plenty of work.
//
// A suspect with one attempt left is leased with no other suspect beside it. If that attempt was given back,
// because the run was not alone when its process died, it is leased only while the worker holds no other.
//
// wait is how long to sleep before the next call: 0 means call again at once, Never means that nothing is
// known to become due. An error means that no lease was taken, or that the answer was lost. In the second
// case later calls give those leases back, and no attempt is charged.
func (p *Poller) Acquire(ctx context.Context, n, suspects int) (leases []Lease, wait time.Duration, err error) {
	if p.Doubts == nil {
		p.Doubts = &Doubts{}
	}
	if err := p.Doubts.Settle(ctx, p.DB, p.Worker); err != nil {
		return nil, 0, err
	}
	suspects = p.mayLease(suspects)
	if leases, err := p.hurried(ctx, n, suspects); err != nil || len(leases) > 0 {
		return leases, 0, err
	}
	start := time.Now()
	wait = p.discovery.wait(start, p.busy)
	discovered := wait == 0
	if discovered {
		err := p.discover(ctx)
		if err == nil || len(p.lanes) > 0 { // one that takes too long must not keep known lanes from being served
			p.discovery = spent(start)
		}
		if err != nil {
			return nil, 0, err
		}
		wait = Never
	}
	if leases, err = p.probe(ctx, suspects); err != nil || len(leases) > 0 {
		return leases, 0, err
	}
	chosen := p.choose(n, suspects, discovered)
	p.busy = false
	if len(chosen) == 0 {
		return nil, min(wait, p.nextDue()), nil
	}
	leases, due, err := p.take(ctx, chosen, n, suspects)
	if err != nil {
		return nil, 0, err
	}
	p.remember(leases)
	p.busy = due == n
	switch {
	case due > 0 && len(leases) == 0: // they wait for those that are watched, and must not keep others from being found
		p.busy, p.waiting = false, time.Now().Add(watchPause)
		return nil, 0, nil
	case p.busy || due > len(leases):
		return leases, 0, nil
	case discovered && due == 0:
		p.discovery = spent(start) // what it found was not there to be leased: count both
	}
	return leases, min(wait, p.nextDue()), nil
}

// mayLease returns how many suspects may be leased now, of so many that the caller has room for.
func (p *Poller) mayLease(suspects int) int {
	if p.Suspects.Alone {
		p.kept = time.Now()
		return 0
	}
	if time.Now().Before(p.waiting) {
		return 0
	}
	return suspects
}

// hurried leases from the lanes that are known, if Hurry has asked for that.
func (p *Poller) hurried(ctx context.Context, n, suspects int) ([]Lease, error) {
	if !p.hurry {
		return nil, nil
	}
	p.hurry = false
	chosen := p.choose(n, suspects, false)
	if len(chosen) == 0 {
		return nil, nil
	}
	leases, _, err := p.take(ctx, chosen, n, suspects)
	if err != nil || len(leases) > 0 {
		p.remember(leases)
	}
	return leases, err
}

// Hurry makes the next Acquire try the lanes it knows before discovery, which takes as long again. Call it when a new run is
// announced.
func (p *Poller) Hurry() { p.hurry = true }

// nextDue returns how long it is until the first of the lanes that are not due yet is.
func (p *Poller) nextDue() time.Duration {
	next := Never
	now := time.Now()
	if d := p.waiting.Sub(now); d > 0 {
		next = d
	}
	for _, at := range p.lanes {
		if d := at.dueFrom.Sub(now); d > 0 {
			next = min(next, d)
		}
	}
	return min(next, p.nextProbe(now))
}

// remember moves the positions to the last of the runs that were leased.
func (p *Poller) remember(leases []Lease) {
	now := time.Now()
	for _, l := range leases {
		at := p.lanes[lane{l.Suspect, l.Type, l.Priority}]
		if at == nil {
			continue
		}
		at.seen = now
		if cmp.Or(l.runAt.Compare(at.runAt), bytes.Compare(l.ID[:], at.id[:])) > 0 {
			at.runAt, at.id = l.runAt, l.ID
		}
	}
}
