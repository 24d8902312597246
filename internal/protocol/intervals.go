package protocol

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// An interval is a lease.
type interval struct {
	run           uuid.UUID
	worker        string
	from, to      time.Time // to: it ended, or expired
	until         time.Time // when it expires, as it is known last
	known         time.Time // when its holder last did something with it; zero: never
	suspect, last bool
	solo          bool // its last attempt was given back once
	uncharged     bool // that of an exhausted run, or one whose handler was never started: it takes no slot
	kept          bool // its outcome was refused, and kept: then it is nobody's
}

// A span is a time in which settling has failed. What is refused waits without a slot, and beside as much of it as it
// has slots a worker leases on.
type span struct{ from, to time.Time }

// lately is how long settling may have failed before that is told, and what waits for it may wait once it goes through again.
const lately = 15 * time.Second

// underWay is how long a heartbeat may be under way: until it is carried out its worker may have given the lease up.
const underWay = 3 * time.Second

// endless is later than any trace.
var endless = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// lease takes an event for what it tells of who holds what, and for how long.
func (r *Replay) lease(e Event) {
	h := &r.run.held
	began := e.Became.Status == "leased" && (e.Was.Status != "leased" || e.Became.LeaseNo != e.Was.LeaseNo)
	ended := e.Was.Status == "leased" && (e.Became.Status != "leased" || began)
	switch {
	case e.Op == "keep" || e.Op == "settle" && e.Became.SettledBy == e.Was.LeasedBy:
		h.known = e.At
	case e.Op == "extend" && e.At.Add(-underWay).After(h.from):
		h.known = e.At.Add(-underWay)
	}
	if ended || e.Op == "keep" {
		h.kept, h.uncharged = e.Op == "keep", h.uncharged || e.Op == "give back"
		r.ended(e.At)
	}
	switch { // as long as it is a suspect
	case !e.Became.Suspect:
		r.run.spared = false
	case e.Op == "take back" && e.Became.Attempt < e.Was.Attempt:
		r.run.spared = true
	}
	if began {
		*h = interval{run: e.Run, worker: e.Became.LeasedBy, from: e.At, uncharged: e.Became.Uncharged, suspect: e.Became.Suspect, last: e.Became.Attempt == e.Became.Most, solo: r.run.spared}
	}
	h.until = e.Became.LeaseUntil
}

// ended takes the lease of the run, if it has one, for one that was over then, or when it expired.
func (r *Replay) ended(at time.Time) {
	h := r.run.held
	r.run.held = interval{}
	if h.from.IsZero() || h.uncharged {
		return
	}
	h.to = at
	if !h.until.IsZero() && h.until.Before(at) {
		h.to = h.until
	}
	if r.workers == nil {
		r.workers = map[string][]interval{}
	}
	r.workers[h.worker] = append(r.workers[h.worker], h)
}

// failing reports whether settling failed for a worker with these leases.
func (r *Replay) failing(leases []interval, at time.Time) bool {
	within := func(s span) bool { return !at.Before(s.from) && !at.After(s.to) }
	return slices.ContainsFunc(r.faults, within) ||
		slices.ContainsFunc(leases, func(l interval) bool { return l.kept && within(span{l.from, l.to.Add(lately)}) })
}

// Verdicts ends the replay, and returns what it has come to.
func (r *Replay) Verdicts() Verdicts {
	if r.run != nil {
		r.ended(endless)
	}
	for _, worker := range slices.Sorted(maps.Keys(r.workers)) {
		leases := r.workers[worker]
		slices.SortFunc(leases, func(a, b interval) int { return a.from.Compare(b.from) })
		if r.Slots > 0 {
			r.tooMany(worker, leases)
		}
		if r.Watch > 0 {
			r.together(worker, leases)
		}
	}
	r.workers, r.run = nil, nil
	return r.verdict
}

// tooMany finds the moment when a worker held more leases than it has slots, if there is one; than twice as many, where settling failed. What counts is from the lease to the last time
// that the worker did something with it: when an answer was lost, or a lease was given up, the database does not know.
func (r *Replay) tooMany(worker string, leases []interval) {
	leases = slices.DeleteFunc(slices.Clone(leases), func(l interval) bool { return !l.known.After(l.from) })
	ends := make([]time.Time, 0, len(leases))
	for _, l := range leases {
		ends = append(ends, l.known)
	}
	slices.SortFunc(ends, time.Time.Compare)
	over := 0
	for i, l := range leases {
		for !ends[over].After(l.from) {
			over++
		}
		if held := i + 1 - over; held > r.Slots && (held > 2*r.Slots || !r.failing(leases, l.from)) {
			first := slices.IndexFunc(leases, func(other interval) bool { return other.known.After(l.from) }) // of those it held, the one leased first
			r.refuse(Crowded, l.run, fmt.Sprintf("with it %s held %d leases, and has %d slots; that of run %s for %s, and for %s more", worker, held, r.Slots,
				leases[first].run, l.from.Sub(leases[first].from), leases[first].known.Sub(l.from)))
			return
		}
	}
}

// together finds suspects that were leased beside one at its last attempt, while the first of the two was watched; and
// those that were beside one that is kept alone until it ends, at any time when the worker is sure to have had both.
func (r *Replay) together(worker string, leases []interval) {
	leases = slices.DeleteFunc(slices.Clone(leases), func(l interval) bool { return !l.suspect })
	for i, l := range leases {
		for _, m := range leases[i+1:] {
			apart := m.from.Sub(l.from)
			if apart >= r.Watch {
				break
			}
			if l.to.After(m.from) && (l.last || m.last) {
				r.refuse(Together, m.run, fmt.Sprintf("a suspect, it was leased by %s %s after suspect %s, and one of them was at its last attempt", worker, apart, l.run))
				break
			}
		}
		if !l.solo || !l.last {
			continue
		}
		for k, m := range leases {
			later := l.from
			if m.from.After(later) {
				later = m.from
			}
			if k != i && m.known.After(l.from) && l.known.After(m.from) && !r.failing(leases, later) { // whose handler has returned does no harm
				r.refuse(Together, l.run, fmt.Sprintf("its last attempt had been given back to it, and %s had suspect %s beside it", worker, m.run))
				break
			}
		}
	}
}

func (r *Replay) refuse(kind Kind, run uuid.UUID, what string) {
	r.verdict.Wrong = append(r.verdict.Wrong, Wrong{Kind: kind, Run: run, What: what})
}
