package protocol

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// lease takes an event for what it tells of who holds what, and for how long.
func (r *Replay) lease(e Event) {
	h := &r.run.held
	began := e.Became.Status == "leased" && (e.Was.Status != "leased" || e.Became.LeaseNo != e.Was.LeaseNo)
	ended := e.Was.Status == "leased" && (e.Became.Status != "leased" || began)
	if ended && !h.from.IsZero() {
		h.to = e.At
		if !e.Was.LeaseUntil.IsZero() && e.Was.LeaseUntil.Before(h.to) {
			h.to = e.Was.LeaseUntil // its holder has let it go by then
		}
		// One whose answer was lost took no slot, and its handler was never started. Nor was that of an exhausted run.
		if e.Op != "give back" && !e.Was.Uncharged && h.to.After(h.from) {
			if r.workers == nil {
				r.workers = map[string][]interval{}
			}
			r.workers[e.Was.LeasedBy] = append(r.workers[e.Was.LeasedBy], *h)
		}
		*h = interval{}
	}
	if began {
		*h = interval{run: e.Run, from: e.At, suspect: e.Became.Suspect, last: e.Became.Attempt == e.Became.Most}
	}
}

// Verdicts ends the replay, and returns what it has come to.
func (r *Replay) Verdicts() Verdicts {
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
	r.workers = nil
	return r.verdict
}

// tooMany finds the moment when a worker holds more leases than it has slots, if there is one.
func (r *Replay) tooMany(worker string, leases []interval) {
	ends := make([]time.Time, 0, len(leases))
	for _, l := range leases {
		ends = append(ends, l.to)
	}
	slices.SortFunc(ends, time.Time.Compare)
	over := 0
	for i, l := range leases {
		for !ends[over].After(l.from) {
			over++
		}
		if held := i + 1 - over; held > r.Slots {
			r.refuse(l.run, fmt.Sprintf("with it %s held %d leases, and has %d slots", worker, held, r.Slots))
			return
		}
	}
}

// together finds suspects that were leased beside one at its last attempt, while the first of the two was watched.
func (r *Replay) together(worker string, leases []interval) {
	leases = slices.DeleteFunc(slices.Clone(leases), func(l interval) bool { return !l.suspect })
	for i, l := range leases {
		for _, m := range leases[i+1:] {
			apart := m.from.Sub(l.from)
			if apart >= r.Watch {
				break
			}
			if l.to.After(m.from) && (l.last || m.last) {
				r.refuse(m.run, fmt.Sprintf("a suspect, it was leased by %s %s after suspect %s, and one of them was at its last attempt", worker, apart, l.run))
				break
			}
		}
	}
}

func (r *Replay) refuse(run uuid.UUID, what string) {
	r.verdict.Wrong = append(r.verdict.Wrong, Wrong{Run: run, What: what})
}
