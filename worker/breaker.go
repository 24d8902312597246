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
	// outagePause is the longest until a run that was given back is due again, unless its handler says more: then what it
	// needs may be back.
	outagePause = 30 * time.Second
	// sparedMost is how often at the least a run is given back for outages. One that has met more is charged again, so that what always says so ends.
	sparedMost = 100
	// outageGather is how long what was heard is gathered before it is told.
	outageGather  = 50 * time.Millisecond
	outageTimeout = 2 * time.Second
	outageRetry   = time.Second // after what could not be told
	enoughRuns    = 3           // as workflow_outage_v1 counts them
)

// outages are what runs of this process have met. That is told to the database beside all else, and whatever is lost of it is met again.
type outages struct {
	mu    sync.Mutex
	known map[string]bool // types with an outage since the last success, and whether the breaker is open, as the database has it
	heard map[string]*heard
	some  chan struct{} // something was heard
	quiet atomic.Bool   // nothing is known, and nothing was heard: a success need not look
}

// heard is what has not been told yet of a type.
type heard struct {
	over  bool // a success, before all else
	times int
	runs  []uuid.UUID // different ones, as many as matter
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

// over notes a success of a type.
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

// of returns what was heard of a type, and has it told.
func (o *outages) of(typ string) *heard {
	h := o.heard[typ]
	if h == nil {
		h = &heard{}
		o.heard[typ] = h
	}
	o.quiet.Store(false)
	select {
	case o.some <- struct{}{}:
	default:
	}
	return h
}

// take returns what is to be told.
func (o *outages) take() map[string]*heard {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.heard
	o.heard = map[string]*heard{}
	for typ, h := range all {
		if _, known := o.known[typ]; h.times == 0 && !known {
			delete(all, typ) // an outage that was over before anybody was told of it
		}
	}
	o.quiet.Store(len(o.known) == 0)
	return all
}

// putBack has a success told again that could not be told, unless more was heard meanwhile: it may be the last one of its type. An outage is met again.
func (o *outages) putBack(typ string, h *heard) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if h.over && o.heard[typ] == nil {
		*o.of(typ) = heard{over: true}
	}
}

// learn takes over what is known by now, and returns which breakers are open if that has changed.
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

// noBreaker reports whether the policies have no breaker for a type.
func (w *Worker) noBreaker(typ string) bool { return w.policy(typ).Breaker == lease.BreakerOff }

// meetsOutage reports whether an error says that what the job's type needs is out of reach. What the time limit has ended says nothing, and
// the engine's own types need nothing.
func (w *Worker) meetsOutage(j *job, err, cause error) bool {
	return run.IsUnavailable(err) && !isPanic(err) && !errors.Is(cause, run.ErrDeadline) && !strings.HasPrefix(j.Type, naming.Engine) && !w.noBreaker(j.Type)
}

// spared reports whether an attempt that has met an outage is given back: while the breaker of the type is open. What was leased, and neither charged nor put off, was
// given back before. What may be started once is not: whoever says 503 may have done something all the same.
func (w *Worker) spared(j *job) bool {
	most, _ := w.most(j)
	return most > 1 && w.outages.open(j.Type) && j.LeaseNo-int64(j.Attempt)-int64(j.Postponed) < int64(max(most, sparedMost))
}

// givenBack is the outcome of an attempt that has met an outage and is not charged.
func (w *Worker) givenBack(j *job, err error, delay time.Duration, delayed bool) settling.Outcome {
	if !delayed {
		delay = min(w.backoff(j).Delay(j.Attempt-1), outagePause)
	}
	if left, lasting := w.left(j); !lasting {
		delay = min(delay, left) // then it fails
	}
	return settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release, Failure: settling.NewFailure(err, j.Info), Delay: delay}
}

// tellOutages tells the database of what runs have met until ctx ends.
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
					w.complain("cannot tell of an outage, or that it is over; it is told again, or met again", "type", typ, "err", err)
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
				w.rouse() // all of its runs may be leased now
			}
		}
	}
}

// learnOutages takes over what discovery has found.
func (w *Worker) learnOutages(found map[string]bool) {
	w.changeOutages(func(map[string]bool) map[string]bool { return found })
}

func (w *Worker) changeOutages(change func(known map[string]bool) map[string]bool) {
	open, changed := w.outages.learn(change)
	if !changed {
		return
	}
	w.config.Logger.Warn("breakers have opened or closed: of the types that are open one run at a time is started, as a probe; see workflowctl show breakers", "open", open)
	if w.config.Observe.Breakers != nil {
		w.config.Observe.Breakers(open)
	}
}
