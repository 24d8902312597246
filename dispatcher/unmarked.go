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
	mostUnmarked = 10_000          // with so many, nothing more is sent: all are sent again if this process dies
	forgottenFor = time.Minute     // an event that was not read for so long was marked by another dispatcher
	failuresFor  = 5 * time.Minute // the same if the database refused to mark it: another dispatcher may hold its lane, and be refused as well
)

// paces is the backoff between attempts to mark an event.
var paces = run.Backoff{Base: 100 * time.Millisecond, Cap: 3 * time.Second}

// unmarked remembers events of a sink whose outcomes could not be recorded, for example because their rows are
// locked. So this process does not send again what the sink has acknowledged: it marks such an event
// when a later poll reads it again.
type unmarked struct {
	mu     sync.Mutex
	events map[int64]*dealtWith
}

type dealtWith struct {
	outcome   delivery.Outcome
	aggregate uuid.UUID
	round     int64
	tries     int
	due       time.Time // the event is not read before this time

	failures fault.Series // of marking it
	lasting  bool         // they have lasted longer than fault.Patience: any SQLSTATE may be the event's fault
}

// failed reports whether the event has to be sent again. If so, its aggregate waits until then.
func (e *dealtWith) failed() bool {
	return !e.outcome.Delivered && !e.outcome.Park && !e.outcome.Unwanted
}

// remember stores outcomes of some of rows, and sets when each may be read again.
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

// kept notes the error that kept outcomes from being recorded. It is nil if the rows are locked, or if
// no event can be marked.
func (u *unmarked) kept(outcomes []delivery.Outcome, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, o := range outcomes {
		if e := u.events[o.ID]; e != nil {
			_, e.lasting = e.failures.Of(err)
		}
	}
}

// lasting reports whether errors have kept one of outcomes from being recorded for longer than fault.Patience. From
// then on an error of any SQLSTATE may be about an event.
func (u *unmarked) lasting(outcomes []delivery.Outcome) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(outcomes, func(o delivery.Outcome) bool { e := u.events[o.ID]; return e != nil && e.lasting })
}

// forget drops outcomes that have been recorded.
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

// known returns the remembered outcome of a row, and true. It returns false if there is none, if the event was
// replayed since, or if it has to be sent again.
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

// waiting returns the events, and the aggregates with all their events, that are not to be read yet.
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

// full reports whether so many events are remembered that no more may be sent.
func (u *unmarked) full() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.events) >= mostUnmarked
}
