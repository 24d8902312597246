package leasing

import (
	"cmp"
	"slices"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/column"
)

// A request is one lane of one poll.
type request struct {
	lane
	Terms
	from  *position
	probe bool // the type's breaker is open, and the run to be leased is a probe
}

// choose picks the lanes that may have due runs, in the order in which they are served. With discovered,
// these are the lanes in which discovery has just found due runs; without it, all known lanes. Types whose
// breaker is open are left to probe.
func (p *Poller) choose(n, suspects int, discovered bool) []request {
	var chosen []request
	now := time.Now()
	for l, at := range p.lanes {
		if discovered && (at.dueFrom.IsZero() || now.Before(at.dueFrom)) || l.suspect && suspects <= 0 || p.isPaused(l.typ) || p.isOpen(l.typ) {
			continue
		}
		r := request{lane: l, Terms: p.Terms(l.typ), from: at}
		r.Quick = r.Quick && r.Room < 0
		if p.inGrace(l.typ, r.Grace) {
			continue
		}
		if r.Room < 0 || r.Room > n {
			r.Room = n
		}
		if r.Room > 0 {
			chosen = append(chosen, r)
		}
	}
	slices.SortFunc(chosen, func(a, b request) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), a.from.runAt.Compare(b.from.runAt),
			cmp.Compare(a.typ, b.typ), compareBool(a.suspect, b.suspect))
	})
	return chosen
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

// laneColumns returns the lanes as arguments of the statement that leases up to n runs. A group is passed
// only with a room below n: otherwise its lanes cannot exceed their room.
func laneColumns(chosen []request, n int) []any {
	return append(append([]any{column.Of(chosen, func(r request) bool { return r.suspect })}, placeColumns(chosen)...),
		column.Of(chosen, func(r request) int { return r.Room }),
		column.Of(chosen, func(r request) *string {
			if r.Room < n {
				return &r.Group
			}
			return nil
		}),
		column.Of(chosen, func(r request) *int {
			if r.Limit <= 0 {
				return nil
			}
			return &r.Limit
		}))
}

// placeColumns returns where the lanes are and begin, as arguments of the statements that lease.
func placeColumns(chosen []request) []any {
	return []any{
		column.Of(chosen, func(r request) string { return r.typ }),
		column.Of(chosen, func(r request) int { return r.priority }),
		column.Of(chosen, func(r request) time.Time { return r.from.runAt }),
		column.Of(chosen, func(r request) [16]byte { return r.from.id }),
		column.Of(chosen, func(r request) float64 { return r.Grace.Seconds() }),
	}
}

// termColumns returns the terms of each type among the lanes as further arguments.
func termColumns(chosen []request) []any {
	types := eachType(chosen)
	return []any{
		column.Of(types, func(r request) string { return r.typ }),
		column.Of(types, func(r request) float64 { return r.Length.Seconds() }),
		column.Of(types, func(r request) *float64 {
			if r.Timeout <= 0 {
				return nil
			}
			seconds := r.Timeout.Seconds()
			return &seconds
		}),
	}
}

// besideColumns returns further arguments: which suspects this process holds already. A suspect that is leased now would
// execute beside them.
func (p *Poller) besideColumns() []any {
	return []any{
		column.Of(p.Suspects.Last, func(h Held) [16]byte { return h.ID }),
		column.Of(p.Suspects.Last, func(h Held) [16]byte { return h.Token }),
		p.Suspects.Running,
		p.Suspects.Strays,
		time.Since(p.kept) < othersTurn,
	}
}

// eachType returns the first request of each type. All requests of a type have the same terms.
func eachType(chosen []request) (types []request) {
	known := make(map[string]bool, len(chosen))
	for _, r := range chosen {
		if !known[r.typ] {
			known[r.typ] = true
			types = append(types, r)
		}
	}
	return types
}
