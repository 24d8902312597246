package leasing

import (
	"time"

	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// never is a budget that is used up for the rest of the test.
func never() budget { return budget{cost: time.Hour, end: time.Now()} }

// Discover makes the next Acquire look for lanes from the start.
func (p *Poller) Discover() { p.discovery = budget{} }

// DontDiscover makes Acquire continue from its positions for the rest of the test.
func (p *Poller) DontDiscover() { p.discovery = never() }

// DontLookBack makes Reclaim continue from its position for the rest of the test.
func (r *Reclaimer) DontLookBack() { r.whole = never() }

// Later moves the last looks further into the past.
func (r *Reclaimer) Later(d time.Duration) {
	for i := range r.looks {
		r.looks[i].at = r.looks[i].at.Add(-d)
	}
}

// LookedBack pretends that the last look from the beginning ended ago before now and lasted took.
func (r *Reclaimer) LookedBack(ago, took time.Duration) {
	r.whole = budget{cost: took, end: time.Now().Add(-ago)}
}

// LookBack makes the next Reclaim look from the beginning.
func (r *Reclaimer) LookBack() { r.whole = budget{} }

// Lost reports whether a request with this error is in doubt.
var Lost = lost

// Sure is the shortest time that a request is in doubt.
const Sure = sure

// Age makes all doubts older.
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

// StopWaiting makes the next Acquire lease suspects again.
func (p *Poller) StopWaiting() { p.waiting = time.Time{} }

// RefusedForLong makes each lane that has failed have failed for longer than fault.Patience.
func (p *Poller) RefusedForLong() {
	for _, at := range p.lanes {
		at.failures.Age(2 * fault.Patience)
	}
}
