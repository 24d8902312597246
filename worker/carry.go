package worker

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	// lookEvery is the time between two discoveries while the worker carries steps on, which needs no polls. They find
	// what is paused, and what is due with a higher priority.
	lookEvery = 100 * time.Millisecond
	// longestUnseen is how long after the last discovery steps are still carried on. Discoveries that take long are rarer
	// than lookEvery.
	longestUnseen = time.Second
)

// A carrier carries processes on from the outcomes of one batch. promised is what its steps take up.
type carrier struct {
	leasing.Carrier
	promised promise
}

// carry returns the carrier of a try to settle, or nil if no steps may be carried on. Only first tries carry steps on: if
// the database refuses a step that is stored as leased, the outcomes must be recorded all the same. Nor do transactions
// with effects, which may take a minute.
func (w *Worker) carry(batch []*job) *carrier {
	if !w.steps() || w.lastLook.ago() > longestUnseen || slices.ContainsFunc(batch, func(j *job) bool { return j.unsure || len(j.extras.effects) > 0 }) {
		return nil
	}
	c := &carrier{Carrier: leasing.Carrier{Worker: w.name, Group: w.group(), Terms: w.carries}}
	c.Keep = func(bytes int, quick bool) (ahead, ok bool) { return w.jobs.keep(&c.promised, bytes, quick) }
	return c
}

// leases returns the carrier for hooks. It is nil if no steps may be carried on.
func (c *carrier) leases() *leasing.Carrier {
	if c == nil {
		return nil
	}
	return &c.Carrier
}

// carries returns the terms under which the worker takes the next step of a process. false: it is left to a poll, of this
// worker or another, because the worker does not cover its type, has no handler for it or limits how many it holds, or
// because the type is paused or its breaker is open, or runs of a higher priority are due.
func (w *Worker) carries(typ string, priority int) (leasing.Terms, bool) {
	covered := slices.ContainsFunc(w.config.Prefixes, func(prefix string) bool { return strings.HasPrefix(typ, prefix) })
	if !covered || w.lookup(typ) == nil || w.isPaused(typ) || w.outages.open(typ) || w.jobs.passes(priority) {
		return leasing.Terms{}, false
	}
	terms := w.terms(typ)
	return terms, terms.Room < 0
}

// carried puts the steps that a settle transaction has stored in line, if its commit is known. stored reports whether the
// commit was asked for at all.
func (w *Worker) carried(ctx context.Context, c *carrier, stored bool, err error) {
	if c == nil {
		return
	}
	switch {
	case err == nil && ctx.Err() == nil && !slices.ContainsFunc(c.Leases, isOld):
		if len(c.Leases) > 0 {
			w.carrying.Store(true)
			w.tally.leased(c.Leases)
			if w.config.Observe.Carried != nil {
				w.config.Observe.Carried(len(c.Leases))
			}
			w.start(c.Leases)
		}
	case stored:
		c.InDoubt(err, &w.doubts)
		w.rouse() // to give them back
	}
	w.jobs.fulfil(c.promised)
}

// isOld reports whether half of a lease is over.
func isOld(l leasing.Lease) bool { return time.Since(l.Taken) > l.Length/2 }

// mustLook reports whether a poll is due although no run may be leased: for a discovery, because steps were carried on
// since the last or runs that are leased ahead wait, or to give back leases in doubt.
func (w *Worker) mustLook() bool {
	return min(w.lastSeek.ago(), w.lastLook.ago()) > lookEvery && (w.carrying.Load() || w.doubts.Left() > 0 || w.jobs.haveMore())
}

// share says which part of its free room the next poll leaves to settle transactions, see promise: half of it if steps
// were carried on since the last poll, and an eighth if they may be.
func (w *Worker) share(carrying bool) int {
	switch {
	case carrying:
		return 2
	case w.steps():
		return 8
	}
	return 0
}

// group is how many leases ahead share a token.
func (w *Worker) group() int { return max(w.config.Concurrency/2, 1) }
