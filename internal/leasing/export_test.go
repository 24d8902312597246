package leasing

import (
	"time"

	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// never is a budget that is used up for the rest of the test.
func never() budget { return budget{cost: time.Hour, end: time.Now()} }

// Discover makes the next Acquire look for lanes from the start.
func (p *Poller) Discover() { p.discovery = budget{} }

// DontDiscover makes Acquire go on from where it is for the rest of the test.
func (p *Poller) DontDiscover() { p.discovery = never() }

// DontLookBack makes Reclaim go on from where it is for the rest of the test.
func (r *Reclaimer) DontLookBack() { r.whole = never() }

// Later makes the last looks lie further back.
func (r *Reclaimer) Later(d time.Duration) {
	for i := range r.looks {
		r.looks[i].at = r.looks[i].at.Add(-d)
	}
}

// LookedBack makes the last look from the beginning one that ended so long ago and took so long.
func (r *Reclaimer) LookedBack(ago, took time.Duration) {
	r.whole = budget{cost: took, end: time.Now().Add(-ago)}
}

// LookBack makes the next Reclaim start from the oldest lease.
func (r *Reclaimer) LookBack() { r.whole = budget{} }

// Lost is what tells doubts.
var Lost = lost

// Sure is how long a request is in doubt at least.
const Sure = sure

// Age makes all doubts so much older.
func (d *Doubts) Age(by time.Duration) {
	for _, one := range d.all {
		one.sent, one.until = one.sent.Add(-by), one.until.Add(-by)
	}
}

// DoubtAgain makes the next Acquire look at once for leases whose answers were lost.
func (p *Poller) DoubtAgain() {
	for _, one := range p.Doubts.all {
		one.next = time.Time{}
	}
}

// StopWaiting makes the next Acquire look for suspects again.
func (p *Poller) StopWaiting() { p.waiting = time.Time{} }

// RefusedForLong makes the last refusal of each lane the last of many.
func (p *Poller) RefusedForLong() {
	for _, at := range p.lanes {
		at.failures.Age(2 * fault.Patience)
	}
}
