package leasing

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/run"
)

// An outage is the state of a type whose runs have met an outage since its last success.
type outage struct {
	open  bool      // the breaker is open: only probes are leased
	probe time.Time // when the next probe is due, by this process's clock
}

const (
	probePause = time.Second            // between two tries for a probe of one type
	probeEvery = 100 * time.Millisecond // between any two tries, so that other runs are leased however many types need probes
)

// met replaces the known outages by those that a discovery has found. start is when the discovery began.
func (p *Poller) met(h head, start time.Time) {
	before := p.outages
	p.outages = make(map[string]*outage, len(h.Outages))
	if p.wereOpen == nil {
		p.wereOpen = map[string]time.Time{}
	}
	for i, typ := range h.Outages {
		o := &outage{open: h.ProbesIn[i] >= 0, probe: start.Add(time.Duration(min(h.ProbesIn[i], 3600) * float64(time.Second)))}
		if was := before[typ]; was != nil && was.probe.After(o.probe) && was.probe.Before(start.Add(probePause)) {
			o.probe = was.probe // a probe was just tried
		}
		p.outages[typ] = o
		if p.isOpen(typ) && p.Terms(typ).Grace > 0 {
			p.wereOpen[typ] = start
		}
	}
	if p.Outages != nil {
		all := make(map[string]bool, len(p.outages))
		for typ, o := range p.outages {
			all[typ] = o.open && !p.noBreaker(typ)
		}
		p.Outages(all)
	}
}

// isOpen reports whether the breaker of a type is open, so that only probes of it are leased.
func (p *Poller) isOpen(typ string) bool {
	o := p.outages[typ]
	return (o != nil && o.open || p.Open != nil && p.Open(typ)) && !p.noBreaker(typ)
}

func (p *Poller) noBreaker(typ string) bool { return p.NoBreaker != nil && p.NoBreaker(typ) }

// inGrace reports whether runs of a type are left to other workers for now. They are while the breaker of the type is
// open, and for the length of the grace after the breaker has closed or a pause of the type has ended. Such runs may
// have been due for long only because no worker was allowed to lease them.
func (p *Poller) inGrace(typ string, grace time.Duration) bool {
	if grace <= 0 {
		return false
	}
	last := p.wereOpen[typ]
	for prefix, at := range p.werePaused {
		if at.After(last) && naming.Covers(prefix, typ) {
			last = at
		}
	}
	return p.isOpen(typ) || time.Since(last) < grace
}

// mayProbe reports whether this process may lease runs of a type as probes once one is due.
func (p *Poller) mayProbe(typ string, terms Terms) bool {
	return p.isOpen(typ) && !p.isPaused(typ) && terms.Room != 0 && !p.inGrace(typ, terms.Grace)
}

// probe leases one run of a type whose breaker is open, if a probe is due. The database decides that: it lets one
// probe of a type be leased at a time, for all workers together. The lanes of the type are tried in random order, so
// that a run that always meets the outage does not keep runs of another priority from being tried.
func (p *Poller) probe(ctx context.Context, suspects int) ([]Lease, error) {
	now := time.Now()
	if len(p.outages) == 0 || now.Sub(p.probed) < probeEvery {
		return nil, nil
	}
	for _, typ := range slices.SortedFunc(maps.Keys(p.outages), func(a, b string) int { return p.outages[a].probe.Compare(p.outages[b].probe) }) {
		if now.Before(p.outages[typ].probe) {
			break
		}
		chosen := p.chooseProbe(typ, suspects)
		if len(chosen) == 0 {
			continue
		}
		p.probed, p.outages[typ].probe = now, now.Add(probePause)
		rand.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
		leases, _, err := p.take(ctx, chosen, ask{n: 1, suspects: suspects})
		if len(leases) > 0 {
			p.outages[typ].probe = now.Add(probeEvery) // soon, because a run that is past its policy's deadline is no probe, and another probe is due
		}
		p.remember(leases)
		return leases, err
	}
	return nil, nil
}

// chooseProbe picks the lanes that may have due runs, of a type whose breaker is open.
func (p *Poller) chooseProbe(typ string, suspects int) (chosen []request) {
	terms := p.Terms(typ)
	if !p.mayProbe(typ, terms) {
		return nil
	}
	terms.Room = 1
	now := time.Now()
	for l, at := range p.lanes {
		if l.typ == typ && !at.dueFrom.IsZero() && !now.Before(at.dueFrom) && (!l.suspect || suspects > 0) {
			chosen = append(chosen, request{lane: l, Terms: terms, from: at, probe: true})
		}
	}
	return chosen
}

// nextProbe returns how long it is until the first probe is due, among the types that may have a due run.
func (p *Poller) nextProbe(now time.Time) time.Duration {
	next := Never
	for l, at := range p.lanes {
		if o := p.outages[l.typ]; o != nil && !at.dueFrom.IsZero() && !now.Before(at.dueFrom) && p.mayProbe(l.typ, p.Terms(l.typ)) {
			next = min(next, max(o.probe.Sub(now), probeEvery))
		}
	}
	return next
}

// Met records that runs of a type have met an outage, and how many times since their last success. over means that a
// run has succeeded, which ends the outage recorded before. Met returns whether the breaker of the type is open. It is
// not part of a settle, because only pauses depend on it.
func Met(ctx context.Context, db run.DB, typ string, over bool, times int, runs []uuid.UUID, code string) (open bool, err error) {
	rows, _ := db.Query(ctx, `SELECT workflow_outage_v1($1, $2, $3, $4, $5)`, typ, over, times, runs, code)
	if open, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil {
		return false, fmt.Errorf("report an outage of %s: %w", typ, err)
	}
	return open, nil
}
