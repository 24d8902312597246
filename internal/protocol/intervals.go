package protocol

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// An interval is the time of a lease.
type interval struct {
	run           uuid.UUID
	worker        string
	from, to      time.Time // when it ended, or expired
	until         time.Time // when it expires, as last known
	known         time.Time // when its holder last used it; zero: never
	suspect, last bool
	solo          bool // its last attempt was given back once
	uncharged     bool // the lease of an exhausted run, one whose handler was never started, or one ahead that may not begin yet: it costs no attempt
	kept          bool // its outcome was refused, and kept: nobody holds it any more
}

// A span is a time in which settling failed. Refused outcomes wait without a slot, and a worker continues to lease
// while it has as many of them as slots.
type span struct{ from, to time.Time }

// lately is how long settling may have failed before the trace shows it, and how long outcomes may wait after
// settling works again.
const lately = 15 * time.Second

// underWay is how long a heartbeat may be under way. Its worker may have given up the lease before the heartbeat is
// executed.
const underWay = 3 * time.Second

// endless is later than any trace.
var endless = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// lease records what an event says about who holds the run, and for how long.
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
	switch { // while it is a suspect
	case !e.Became.Suspect:
		r.run.spared = false
	case e.Op == "take back" && e.Became.Attempt < e.Was.Attempt && e.Was.Suspect:
		r.run.spared = true
	}
	switch {
	case began:
		*h = interval{run: e.Run, worker: e.Became.LeasedBy, from: e.At, uncharged: e.Became.Uncharged || e.Became.isAhead(), suspect: e.Became.Suspect, last: e.Became.Attempt == e.Became.Most, solo: r.run.spared}
	case e.Op == "begin" && e.Became.Token == e.Kept:
		h.from, h.uncharged = e.At, false
	}
	h.until = e.Became.LeaseUntil
}

// ended ends the lease of the run, if it has one, at the given time, or when it expired if that is earlier.
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

// failing reports whether settling failed at that time for a worker with these leases.
func (r *Replay) failing(leases []interval, at time.Time) bool {
	within := func(s span) bool { return !at.Before(s.from) && !at.After(s.to) }
	return slices.ContainsFunc(r.faults, within) ||
		slices.ContainsFunc(leases, func(l interval) bool { return l.kept && within(span{l.from, l.to.Add(lately)}) })
}

// Verdicts ends the replay and returns the results.
func (r *Replay) Verdicts() Verdicts {
	if r.run != nil {
		r.ended(endless)
	}
	for _, worker := range slices.Sorted(maps.Keys(r.workers)) {
		leases := r.workers[worker]
		slices.SortFunc(leases, func(a, b interval) int { return a.from.Compare(b.from) })
		if r.Most > 0 {
			r.tooMany(worker, leases)
		}
		if r.Watch > 0 {
			r.together(worker, leases)
		}
	}
	r.workers, r.run = nil, nil
	return r.verdict
}

// tooMany finds the first moment when a worker held more leases than it may, or more than twice as many while settling
// failed. A lease counts from its start to the last time that the worker used it: when an answer was lost or
// a lease was given up, the database does not know.
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
		if held := i + 1 - over; held > r.Most && (held > 2*r.Most || !r.failing(leases, l.from)) {
			first := slices.IndexFunc(leases, func(other interval) bool { return other.known.After(l.from) }) // of the leases held then, the oldest one
			r.refuse(Crowded, l.run, fmt.Sprintf("with it %s held %d leases, and may hold %d; that of run %s for %s, and for %s more", worker, held, r.Most,
				leases[first].run, l.from.Sub(leases[first].from), leases[first].known.Sub(l.from)))
			return
		}
	}
}

// together finds suspects that were leased beside a suspect at its last attempt while the first of the two was
// watched. It also finds suspects that were held beside one that is kept alone until it ends, at any time when the
// worker is certain to have held both.
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
			if k != i && m.known.After(l.from) && l.known.After(m.from) && !r.failing(leases, later) { // a run whose handler has returned does no harm
				r.refuse(Together, l.run, fmt.Sprintf("its last attempt had been given back to it, and %s had suspect %s beside it", worker, m.run))
				break
			}
		}
	}
}

func (r *Replay) refuse(kind Kind, run uuid.UUID, what string) {
	r.verdict.Wrong = append(r.verdict.Wrong, Wrong{Kind: kind, Run: run, What: what})
}
