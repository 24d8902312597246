package worker

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	// outagePause is the longest pause before a run that was given back is due again, unless its handler asks
	// for a longer one. By then the service that it needs may be back.
	outagePause = 30 * time.Second
	// sparedMost is the least number of times that a run may be given back for outages. After that its attempts
	// are charged, so that a run that always reports an outage ends.
	sparedMost = 100
	// outageGather is how long outages and successes are gathered before they are reported to the database.
	outageGather  = 50 * time.Millisecond
	outageTimeout = 2 * time.Second
	outageRetry   = time.Second // the pause after a failed report
	enoughRuns    = 3           // as many runs as workflow_outage_v1 needs to open a breaker
)

// outages holds the outages that runs of this process have met. They are reported to the database apart from
// all other work. A report may be lost: the next run meets the outage again.
type outages struct {
	mu    sync.Mutex
	known map[string]bool // types with an outage since their last success, as the database has them; true: the breaker is open
	heard map[string]*heard
	some  chan struct{} // signalled when heard is not empty
	quiet atomic.Bool   // known and heard are empty, so a success need not take mu
}

// heard is what has not been reported yet of a type.
type heard struct {
	over  bool // a success, before the outages counted here
	times int
	runs  []uuid.UUID // different runs, at most enoughRuns
	code  string
}

// met notes that a run has met an outage.
func (o *outages) met(typ string, id uuid.UUID, code string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.of(typ)
	h.times, h.code = h.times+1, code
	if len(h.runs) < enoughRuns && !slices.Contains(h.runs, id) {
		h.runs = append(h.runs, id)
	}
}

// over notes that a run of a type has succeeded.
func (o *outages) over(typ string) {
	if o.quiet.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	_, known := o.known[typ]
	if !known && o.heard[typ] == nil {
		return
	}
	*o.of(typ) = heard{over: true}
}

// of returns the heard entry of a type, and wakes tellOutages. The caller holds mu.
func (o *outages) of(typ string) *heard {
	h := o.heard[typ]
	if h == nil {
		h = &heard{}
		o.heard[typ] = h
	}
	o.quiet.Store(false)
	poke(o.some)
	return h
}

// take removes and returns what is to be reported.
func (o *outages) take() map[string]*heard {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.heard
	o.heard = map[string]*heard{}
	for typ, h := range all {
		if _, known := o.known[typ]; h.times == 0 && !known {
			delete(all, typ) // the outage ended before it was reported
		}
	}
	o.quiet.Store(len(o.known) == 0)
	return all
}

// putBack notes a success again whose report failed, unless something newer was heard of the type: this may be
// the last success of its type. An outage need not be noted again, since the next run meets it.
func (o *outages) putBack(typ string, h *heard) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if h.over && o.heard[typ] == nil {
		*o.of(typ) = heard{over: true}
	}
}

// learn replaces what is known, and returns the open breakers and whether they changed.
func (o *outages) learn(change func(known map[string]bool) map[string]bool) (open []string, changed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := openOf(o.known)
	o.known = change(o.known)
	o.quiet.Store(len(o.known) == 0 && len(o.heard) == 0)
	open = openOf(o.known)
	return open, !slices.Equal(before, open)
}

func openOf(known map[string]bool) (open []string) {
	for typ, is := range known {
		if is {
			open = append(open, typ)
		}
	}
	slices.Sort(open)
	return open
}

func (o *outages) open(typ string) bool {
	if o.quiet.Load() {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.known[typ]
}

// noBreaker reports whether a policy turns off the breaker of a type.
func (w *Worker) noBreaker(typ string) bool { return w.policy(typ).Breaker == lease.BreakerOff }

// meetsOutage reports whether an error says that a service which the job's type needs is out of reach. An
// attempt that its time limit ended says nothing about that, and the engine's own types need no service.
func (w *Worker) meetsOutage(j *job, err, cause error) bool {
	return run.IsUnavailable(err) && !isPanic(err) && !errors.Is(cause, run.ErrDeadline) && !strings.HasPrefix(j.Type, naming.Engine) && !w.noBreaker(j.Type)
}

// spared reports whether an attempt that met an outage is given back. It is while the breaker of its type is
// open, unless attempts of the run were given back too often: that is how many of its leases were neither
// charged nor put off. A run that may be started only once is never given back, since a service that answers
// 503 may have done the work all the same.
func (w *Worker) spared(j *job) bool {
	most, _ := w.most(j)
	return most > 1 && w.outages.open(j.Type) && j.LeaseNo-int64(j.Attempt)-int64(j.Postponed) < int64(max(most, sparedMost))
}

// givenBack returns the outcome of an attempt that met an outage and is not charged.
func (w *Worker) givenBack(j *job, err error, delay time.Duration, delayed bool) settling.Outcome {
	if !delayed {
		delay = min(w.backoff(j).Delay(j.Attempt-1), outagePause)
	}
	if left, lasting := w.left(j); !lasting {
		delay = min(delay, left) // then its policy's deadline fails it
	}
	return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release, Failure: settling.NewFailure(err, j.Info), Delay: delay}
}

// tellOutages reports outages and successes to the database until ctx ends.
func (w *Worker) tellOutages(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.outages.some:
		}
		sleep(ctx, outageGather)
		for typ, h := range w.outages.take() {
			call, done := context.WithTimeout(ctx, outageTimeout)
			open, err := leasing.Met(call, w.db, typ, h.over, h.times, h.runs, h.code)
			done()
			if err != nil {
				if ctx.Err() == nil {
					w.complain("cannot report an outage or its end; it will be reported again", "type", typ, "err", err)
				}
				w.outages.putBack(typ, h)
				sleep(ctx, outageRetry)
				continue
			}
			w.changeOutages(func(known map[string]bool) map[string]bool {
				all := maps.Clone(known)
				if all == nil {
					all = map[string]bool{}
				}
				if delete(all, typ); h.times > 0 {
					all[typ] = open
				}
				return all
			})
			if h.over {
				w.rouse() // all runs of the type may be leased now
			}
		}
	}
}

// learnOutages takes over the outages that discovery found in the database.
func (w *Worker) learnOutages(found map[string]bool) {
	w.changeOutages(func(map[string]bool) map[string]bool { return found })
}

func (w *Worker) changeOutages(change func(known map[string]bool) map[string]bool) {
	open, changed := w.outages.learn(change)
	if !changed {
		return
	}
	w.config.Logger.Warn("breakers have opened or closed; of a type with an open breaker one run at a time is started, as a probe: see workflowctl show breakers", "open", open)
	if w.config.Observe.Breakers != nil {
		w.config.Observe.Breakers(open)
	}
}
