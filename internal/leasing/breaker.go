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

// An outage is that of a type whose runs have met one since the last success.
type outage struct {
	open  bool      // the breaker of the type: nothing but probes is leased
	probe time.Time // when the next one is due, by this process's clock
}

const (
	probePause = time.Second            // between two tries for a probe of a type
	probeEvery = 100 * time.Millisecond // between any two: however many types there are, the others are leased meanwhile
)

// met takes over which types meet an outage, as discovery, begun at start, has found it.
func (p *Poller) met(h head, start time.Time) {
	before := p.outages
	p.outages = make(map[string]*outage, len(h.Outages))
	if p.wereOpen == nil {
		p.wereOpen = map[string]time.Time{}
	}
	for i, typ := range h.Outages {
		o := &outage{open: h.ProbesIn[i] >= 0, probe: start.Add(time.Duration(min(h.ProbesIn[i], 3600) * float64(time.Second)))}
		if was := before[typ]; was != nil && was.probe.After(o.probe) && was.probe.Before(start.Add(probePause)) {
			o.probe = was.probe // it was just tried
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

// isOpen reports whether nothing but probes is leased of the type.
func (p *Poller) isOpen(typ string) bool {
	o := p.outages[typ]
	return (o != nil && o.open || p.Open != nil && p.Open(typ)) && !p.noBreaker(typ)
}

func (p *Poller) noBreaker(typ string) bool { return p.NoBreaker != nil && p.NoBreaker(typ) }

// inGrace reports whether runs of a type are left to others, for its breaker is open, or it was or they were paused within their grace: they have been due for so
// long since nobody was to lease them.
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

// mayProbe reports whether runs of a type may be leased here as probes, whenever one is due.
func (p *Poller) mayProbe(typ string, terms Terms) bool {
	return p.isOpen(typ) && !p.isPaused(typ) && terms.Room != 0 && !p.inGrace(typ, terms.Grace)
}

// probe leases one run of a type whose breaker is open, if a probe is due. Whether one is, the database decides: it takes one of a type at a time,
// whoever asks. The lanes of the type take turns at random, so that a run that always meets an outage keeps none of another priority from being tried.
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
		leases, _, err := p.take(ctx, chosen, 1, suspects)
		if len(leases) > 0 {
			p.outages[typ].probe = now.Add(probeEvery) // if it comes too late by its policy, it is none, and the next is due
		}
		p.remember(leases)
		return leases, err
	}
	return nil, nil
}

// chooseProbe picks the lanes of a type whose breaker is open that may have due runs.
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

// nextProbe returns how long it is until the first probe is due of which there may be a run.
func (p *Poller) nextProbe(now time.Time) time.Duration {
	next := Never
	for l, at := range p.lanes {
		if o := p.outages[l.typ]; o != nil && !at.dueFrom.IsZero() && !now.Before(at.dueFrom) && p.mayProbe(l.typ, p.Terms(l.typ)) {
			next = min(next, max(o.probe.Sub(now), probeEvery))
		}
	}
	return next
}

// Met records that runs of a type have met an outage, so many times since their last success; over says that there was a
// success. It returns whether the breaker of the type is open. It is no part of a settle: nothing but pauses depends on it.
func Met(ctx context.Context, db run.DB, typ string, over bool, times int, runs []uuid.UUID, code string) (open bool, err error) {
	rows, _ := db.Query(ctx, `SELECT workflow_outage_v1($1, $2, $3, $4, $5)`, typ, over, times, runs, code)
	if open, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil {
		return false, fmt.Errorf("tell of an outage of %s: %w", typ, err)
	}
	return open, nil
}
