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

// A Poller leases due runs. Its cost depends on how many runs it leases, not on what else is in
// the table. A lane is all open runs of one (suspect, type, priority), a range of an index. The
// Poller knows the lanes. It walks them from the highest priority down, and locks rows in due
// order until it has enough.
//
// It remembers its position in each lane and continues from there, because an old snapshot
// keeps the index entries of runs that were leased long ago. Rows may appear behind that
// position, when a transaction commits late. So discovery finds each lane's first open run
// again, and lanes that are new. Discovery takes at most a twentieth of the time.
//
// A Poller belongs to one goroutine. DB, Prefixes, Worker and Terms must be set.
type Poller struct {
	DB       run.DB
	Prefixes []string               // literal, each ends with a dot
	Worker   string                 // stored in leased_by, for people
	Terms    func(typ string) Terms // called for each lane at each poll
	Steps    bool                   // also lease steps of processes

	Suspects Suspects // what this process holds; the caller sets it before each Acquire

	Ahead Ahead // how many more runs of quick types may be leased; the caller sets it before each Acquire

	SetAside func([]Aside)  // called with the runs that were set aside; may be nil
	Paused   func([]string) // called by each discovery with the prefixes and types that are paused; may be nil
	Doubts   *Doubts        // requests whose answers were lost; nil: the Poller makes its own

	// NoBreaker reports whether to ignore the breaker of a type. It may be nil.
	NoBreaker func(typ string) bool
	// Open reports whether the caller knows already that the breaker of a type is open. Discovery may find that out
	// seconds later. It may be nil.
	Open func(typ string) bool
	// Outages is called by each discovery with the types whose runs have met an outage since their last success, and
	// with whether the breaker of each is open. It may be nil.
	Outages func(map[string]bool)

	paused     []string // prefixes and types, as discovery found them
	outages    map[string]*outage
	wereOpen   map[string]time.Time // types with a grace, and when their breaker was last seen open
	werePaused map[string]time.Time // prefixes and types, and when they were last seen paused
	probed     time.Time            // when a probe was last tried
	lanes      map[lane]*position
	failing    bool         // some lanes may have failures
	most       fault.Ration // how many runs are leased at a time, because more have failed; 0: any number
	tried      int          // how many runs were tried after the last lease was refused; 0: it was not refused
	hurry      bool         // try the known lanes before discovery
	discovery  budget
	busy       bool      // the last poll leased as many runs as were asked for
	drained    bool      // all that the last discovery found due was leased
	owed       error     // of a second statement of the last poll, which had leases to return; the next poll returns it
	alone      bool      // the suspect leased last was at its last attempt, so the others go first now
	kept       time.Time // when this process last held a suspect that is kept alone
	waiting    time.Time // until when no suspect is leased, because none of the due ones could be
}

// A lane is all open runs with the same suspect, type and priority: one range of workflow_run_lane_idx, in the order in
// which they are due. A poll reads each lane on its own, so that runs of one lane do not hide those of another.
type lane struct {
	suspect  bool
	typ      string
	priority int
}

// A position is where the next poll continues in a lane. No open run before it is known.
type position struct {
	runAt   time.Time
	id      uuid.UUID
	dueFrom time.Time // when the lane's first run may be leased, by this process's clock; zero: it has no open run
	seen    time.Time // when the lane was last known to have an open run
	wasDue  time.Time // when discovery last found a due run in it

	failures fault.Series // of leases that included this lane
	lasting  bool         // the failures have lasted for fault.Patience: any SQLSTATE may be an answer about a run of this lane
}

const (
	// memory is how long the position in a lane without open runs is kept. A run that is enqueued
	// there meanwhile is found without discovery.
	memory = time.Minute
	// slack is how far before the present the position of a new lane starts if none of its runs is
	// due yet. A run whose transaction commits this late is still found without discovery.
	slack = time.Minute
)

// A budget bounds the cost of looks from the start to a twentieth of the time. A look that takes
// seconds may exceed this, because no pause is longer than longest. While the Poller is idle, a
// cheap look is always allowed. While it is busy, one look every tenth of a second is enough.
type budget struct {
	cost time.Duration
	end  time.Time
}

const (
	cheap     = 2 * time.Millisecond
	busyPause = 100 * time.Millisecond
	longest   = 10 * time.Second // longest pause: a look that stalls must not delay the next one for long

	roomPause = 5 * time.Millisecond // until the next try, if there was no room for runs of some lanes

	watchPause = 500 * time.Millisecond // between two tries while due suspects wait for those that are watched

	// othersTurn is how long after one suspect was kept alone the other suspects need not wait for the next one that is.
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

// Never is the wait that Acquire returns when it knows of no run that will become due.
const Never = time.Duration(1<<63 - 1)

// Acquire leases up to n due runs, at most suspects of them suspect, and up to Ahead.Runs further ones ahead of their
// handlers.
//
// Runs are leased by priority, then by the time they became due. Among lanes of equal priority, the lane with the
// oldest due run is emptied first. Acquire looks in the lanes that it knows. It finds new lanes by discovery, which it
// puts off after Hurry and while there is plenty of work.
//
// A suspect with one attempt left is leased alone, and only while no other suspect is watched. If that attempt was
// given back, because the run was not alone when its process died, it is leased only while the worker holds no other.
//
// wait is how long to sleep before the next call: 0 means call again at once, Never means that nothing is known to
// become due. An error means that no lease was taken, or that the answer was lost. In the second case later calls give
// those leases back, and no attempt is charged.
func (p *Poller) Acquire(ctx context.Context, n, suspects int) (leases []Lease, wait time.Duration, err error) {
	if p.Doubts == nil {
		p.Doubts = &Doubts{}
	}
	if err := cmp.Or(p.Doubts.Settle(ctx, p.DB, p.Worker), p.owed); err != nil {
		p.owed = nil
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
		if err == nil || len(p.lanes) > 0 { // a discovery that takes too long must not keep known lanes from being served
			p.discovery = spent(start)
		}
		if err != nil {
			return nil, 0, err
		}
		wait = Never
	}
	if n > 0 {
		if leases, err = p.probe(ctx, suspects); err != nil || len(leases) > 0 {
			return leases, 0, err
		}
	}
	chosen := p.choose(n+p.Ahead.Runs, suspects, discovered)
	p.busy = false
	if len(chosen) == 0 {
		return nil, min(wait, p.nextDue()), nil
	}
	leases, due, full, err := p.fill(ctx, chosen, n, suspects)
	if err != nil {
		return nil, 0, err
	}
	p.remember(leases)
	p.busy = full
	asked := p.asksAll(chosen, n)
	p.drained = p.drained || asked && !full && due <= len(leases)
	switch {
	case due > 0 && len(leases) == 0: // due suspects wait for those that are watched, and must not keep other runs from being found
		p.busy, p.waiting = false, time.Now().Add(watchPause)
		return nil, 0, nil
	case p.busy || due > len(leases):
		return leases, 0, nil
	case discovered && due == 0:
		p.discovery = spent(start) // nothing that it found could be leased: charge both statements to the budget
	}
	if !asked {
		wait = min(wait, roomPause)
	}
	return leases, min(wait, p.nextDue()), nil
}

// mayLease returns how many suspects may be leased now, if the caller has room for this many.
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

// hurried leases from the known lanes if Hurry was called.
func (p *Poller) hurried(ctx context.Context, n, suspects int) ([]Lease, error) {
	if !p.hurry {
		return nil, nil
	}
	p.hurry = false
	chosen := p.choose(n+p.Ahead.Runs, suspects, false)
	if len(chosen) == 0 {
		return nil, nil
	}
	leases, due, full, err := p.fill(ctx, chosen, n, suspects)
	if err == nil {
		p.remember(leases)
		p.drained = p.drained || p.asksAll(chosen, n) && !full && due <= len(leases)
	}
	return leases, err
}

// Hurry makes the next Acquire try the lanes that it knows before discovery, which would double the time. Call it when
// a new run is announced.
func (p *Poller) Hurry() { p.hurry = true }

// nextDue returns the time until a further lane becomes due, a probe is due, or suspects may be leased again, whichever
// comes first.
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

// remember moves the position of each lane to the last run that was leased from it.
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
