package dispatcher

import (
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	mostUnmarked = 10_000          // with so many nothing more is sent: if this process dies they are sent again
	forgottenFor = time.Minute     // after this time without a look that finds it, somebody else has marked it
	failuresFor  = 5 * time.Minute // or somebody else has the lane, and cannot mark it either
)

// paces are how long an event that could not be marked is left alone.
var paces = run.Backoff{Base: 100 * time.Millisecond, Cap: 3 * time.Second}

// unmarked remembers events of a sink whose outcomes could not be recorded, because somebody has locked
// their rows, say: what the sink has acknowledged is not sent again for that, by this process. It is
// marked when a later look finds it.
type unmarked struct {
	mu     sync.Mutex
	events map[int64]*dealtWith
}

type dealtWith struct {
	outcome   delivery.Outcome
	aggregate uuid.UUID
	round     int64
	tries     int
	due       time.Time // not read before

	failures fault.Series // of marking it
	lasting  bool         // they have lasted for so long that any may be the event's
}

// failed reports whether the event has to be sent again. Until then its aggregate waits.
func (e *dealtWith) failed() bool {
	return !e.outcome.Delivered && !e.outcome.Park && !e.outcome.Unwanted
}

// remember keeps outcomes of some rows.
func (u *unmarked) remember(rows []delivery.Row, outcomes []delivery.Outcome) {
	u.mu.Lock()
	defer u.mu.Unlock()
	row := make(map[int64]*delivery.Row, len(rows))
	for k := range rows {
		row[rows[k].ID] = &rows[k]
	}
	for _, o := range outcomes {
		e := u.events[o.ID]
		if e == nil {
			e = &dealtWith{}
			u.events[o.ID] = e
		}
		e.outcome, e.aggregate, e.round = o, row[o.ID].Aggregate, row[o.ID].Round
		pause := paces.Delay(e.tries)
		if e.failed() {
			pause = max(pause, o.Again)
		}
		e.tries++
		e.due = time.Now().Add(pause)
	}
}

// kept notes which error has kept outcomes from being recorded; nil: somebody's lock, or what goes for all events.
func (u *unmarked) kept(outcomes []delivery.Outcome, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, o := range outcomes {
		if e := u.events[o.ID]; e != nil {
			_, e.lasting = e.failures.Of(err)
		}
	}
}

// lasting reports whether one of outcomes was kept from being recorded by errors for so long that any of them may be about an event.
func (u *unmarked) lasting(outcomes []delivery.Outcome) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(outcomes, func(o delivery.Outcome) bool { e := u.events[o.ID]; return e != nil && e.lasting })
}

// forget lets go of what has been recorded.
func (u *unmarked) forget(outcomes []delivery.Outcome) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.events) == 0 {
		return
	}
	for _, o := range outcomes {
		delete(u.events, o.ID)
	}
}

// known returns what became of a row that was dealt with before, unless it was replayed since or has
// to be sent again.
func (u *unmarked) known(row delivery.Row) (delivery.Outcome, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	e := u.events[row.ID]
	switch {
	case e == nil:
		return delivery.Outcome{}, false
	case e.round != row.Round:
		delete(u.events, row.ID)
		return delivery.Outcome{}, false
	}
	return e.outcome, !e.failed()
}

// waiting returns what is not to be read yet.
func (u *unmarked) waiting() (events []int64, aggregates []uuid.UUID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for id, e := range u.events {
		switch since := time.Since(e.due); {
		case since > forgottenFor && (e.failures == fault.Series{} || since > failuresFor):
			delete(u.events, id)
		case since > 0:
		case e.failed():
			aggregates = append(aggregates, e.aggregate)
		default:
			events = append(events, id)
		}
	}
	return events, aggregates
}

// full reports whether there are too many.
func (u *unmarked) full() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.events) >= mostUnmarked
}
