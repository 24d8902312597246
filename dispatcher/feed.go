package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"golang.org/x/time/rate"

	"github.com/simple-workflow/simple-workflow/internal/clock"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	batchesAtOnce = 2  // while one is published the next is read
	lanesAtOnce   = 16 // of 64: four claims share the work, of one dispatcher or of several
	maxRejections = 3  // an event that was refused so often is parked
	suspicious    = 3  // aggregates that fail one after the other: the sink is to blame, not they
	refusing      = 10 // aggregates that are rejected one after the other: likewise
	probe         = 10 // events tried of a sink that is to blame

	floorEvery  = 500 * time.Millisecond // what is done above a floor is passed over by each look
	keepEvery   = 5 * time.Second
	seenEvery   = 2500 * time.Millisecond
	seenAgain   = time.Second // after a try that has failed
	seenTimeout = 3 * time.Second
	askEvery    = 10 * time.Second // between two looks whether another dispatcher has left the sink alone
	sweepEvery  = 30 * time.Second // and the more rarely, the longer it takes:
	sweepRarely = 10 * time.Minute
	rightEvery  = 5 * time.Second // while floors cannot be raised
	quietFor    = time.Minute     // between two log lines about the same trouble

	patience = time.Second // with a statement that marks
)

// pauses are how long a sink that takes nothing is left alone.
var pauses = run.Backoff{Base: 500 * time.Millisecond, Cap: 30 * time.Second}

// A feed publishes to one sink, at its own pace: what happens to another does not concern it.
type feed struct {
	*Dispatcher
	target Target
	limit  *rate.Limiter // nil: none

	mu       sync.Mutex
	failing  map[uuid.UUID]bool // aggregates that have failed since something was acknowledged
	rejected map[uuid.UUID]bool // likewise
	downs    int                // pauses since then
	away     bool               // it was left alone, and it is not noted yet that it is back
	asked    time.Time          // when that was last looked for
	told     time.Time
	marking  marking

	apart    sync.WaitGroup // marking what could not be marked in one statement
	unmarked unmarked
}

func newFeed(d *Dispatcher, t Target) *feed {
	f := &feed{Dispatcher: d, target: t, failing: map[uuid.UUID]bool{}, rejected: map[uuid.UUID]bool{}, unmarked: unmarked{events: map[int64]*dealtWith{}}}
	if t.Rate > 0 {
		f.limit = rate.NewLimiter(rate.Limit(t.Rate), max(1, min(d.config.Batch, int(t.Rate))))
	}
	return f
}

// run claims and publishes until ctx ends; what is being published then may go on until sending
// ends.
func (f *feed) run(ctx, sending context.Context) {
	var publishing sync.WaitGroup
	defer f.apart.Wait()
	defer publishing.Wait()
	slots := make(chan struct{}, batchesAtOnce)
	quiet := false // the last look has found nothing
	for {
		select {
		case <-ctx.Done():
			return
		case slots <- struct{}{}:
		}
		begun := time.Now()
		// Not ctx: a claim that was cut short may have been made, and holds up its lanes.
		claim, err := f.look(ctx, sending, quiet)
		if quiet = err == nil && claim.Lanes == 0; err == nil && !quiet {
			f.config.Observe.Polled(f.target.Name, len(claim.Rows), time.Since(begun), nil)
			if ctx.Err() != nil {
				f.mark(sending, claim, nil) // gives it back
				return
			}
			publishing.Go(func() {
				defer func() { <-slots }()
				f.publish(sending, claim, begun)
			})
			continue
		}
		<-slots
		f.config.Observe.Polled(f.target.Name, 0, time.Since(begun), err)
		pause := max(f.config.PollInterval, 10*time.Since(begun)) // a look that takes long is not repeated at once
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			f.complain("cannot look for events; trying again", "err", err)
			pause = max(pause, time.Second)
		}
		sleep(ctx, pause)
	}
}

// look claims what is due. While all is quiet it asks first whether anything is open at all, which
// costs less.
func (f *feed) look(ctx, sending context.Context, quiet bool) (*delivery.Claim, error) {
	if quiet {
		if open, err := delivery.Open(ctx, f.config.Pool, f.target.Name); err != nil || !open {
			return &delivery.Claim{}, err
		}
	}
	return delivery.Acquire(sending, f.config.Pool, f.target.Name, f.name, f.limits())
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// limits bounds the next batch.
func (f *feed) limits() delivery.Limits {
	l := delivery.Limits{Events: f.config.Batch, Bytes: f.config.BatchBytes, Lanes: lanesAtOnce, Length: f.config.Claim}
	if f.limit != nil {
		l.Events = min(l.Events, f.limit.Burst())
	}
	if f.suspect() {
		l.Events, l.Lanes = probe, min(lanesAtOnce, probe)
	}
	l.Lanes = min(l.Lanes, l.Events)
	l.Except, l.Apart = f.unmarked.waiting()
	return l
}

// suspect reports whether so many aggregates have failed, and nothing else was acknowledged, that
// the sink must be to blame.
func (f *feed) suspect() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.failing) >= suspicious
}

// publish publishes what was claimed, and marks it.
func (f *feed) publish(ctx context.Context, claim *delivery.Claim, claimed time.Time) {
	begun := time.Now()
	// A claim that has run out is somebody else's: nothing is sent in its last third.
	sending, done := context.WithDeadline(ctx, claimed.Add(f.config.Claim*2/3))
	defer done()
	sending = clock.With(sending, claim.Ahead)
	var wanted []delivery.Row
	var outcomes []delivery.Outcome
	full := f.unmarked.full()
	for _, row := range claim.Rows {
		if o, ok := f.unmarked.known(row); ok {
			outcomes = append(outcomes, o)
		} else if !row.Wanted {
			outcomes = append(outcomes, delivery.Outcome{ID: row.ID, Unwanted: true})
		} else if row.Refused != "" {
			outcomes = append(outcomes, delivery.Outcome{ID: row.ID, Attempt: row.Attempt + 1, Rejected: row.Rejected, Park: true, Reason: row.Refused})
			f.config.Observe.Parked(f.target.Name, 1)
			f.log.Warn("an event is larger than any may be; it is parked", "event", row.ID, "reason", row.Refused, "sink", f.target.Name)
		} else if !full {
			wanted = append(wanted, row)
		}
	}
	if full {
		defer sleep(ctx, time.Second)
	}
	if len(wanted) > 0 {
		errs := f.send(sending, wanted)
		outcomes = append(outcomes, f.judge(wanted, errs, time.Since(begun))...)
	}
	f.mark(ctx, claim, outcomes)
}

func (f *feed) send(ctx context.Context, rows []delivery.Row) (errs []error) {
	events := make([]event.Event, len(rows))
	for k, row := range rows {
		events[k] = toEvent(row, f.config.Source)
	}
	defer func() {
		if p := recover(); p != nil {
			f.log.Error("a sink panicked", "sink", f.target.Name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			errs = all(len(rows), Unavailable(errors.New("the sink panicked"), 0))
		}
	}()
	if f.limit != nil {
		if err := f.limit.WaitN(ctx, len(rows)); err != nil {
			sleep(ctx, time.Second) // the claim ends before it is this batch's turn
			return all(len(rows), ErrNotTried)
		}
	}
	if errs = f.target.Sink.Publish(ctx, events); len(errs) != len(rows) {
		f.log.Error("a sink answered for another number of events", "sink", f.target.Name, "events", len(rows), "answers", len(errs))
		return all(len(rows), Unavailable(errors.New("the sink answered for another number of events"), 0))
	}
	return errs
}

func all(n int, err error) []error {
	errs := make([]error, n)
	for k := range errs {
		errs[k] = err
	}
	return errs
}

// judge turns the sink's answers into outcomes, and leaves the sink alone for a while if it takes
// nothing.
func (f *feed) judge(rows []delivery.Row, errs []error, took time.Duration) (outcomes []delivery.Outcome) {
	suspect, refuses := f.note(rows, errs)
	var down *unavailable
	delivered, failed, parked := 0, 0, 0
	for k, err := range errs {
		switch {
		case errors.Is(err, ErrNotTried), errors.As(err, &down):
			continue // charged to no event
		case err == nil:
			delivered++
		default:
			failed++
		}
		o := f.outcome(rows[k], err, suspect, refuses)
		if o.Park {
			parked++
		}
		outcomes = append(outcomes, o)
	}
	o := f.config.Observe
	o.Published(f.target.Name, delivered, took)
	if failed > 0 {
		o.Failed(f.target.Name, failed)
	}
	if parked > 0 {
		o.Parked(f.target.Name, parked)
		// The reasons may quote what the sink has answered: they stay in the database.
		f.log.Warn("events parked; why: SELECT * FROM outbox_delivery WHERE parked_at IS NOT NULL", "sink", f.target.Name, "events", parked)
	}
	switch {
	case down != nil:
		f.leaveAlone(down, down.after)
	case refuses:
		f.complain("sink rejects whatever it is sent; trying again; why: SELECT last_error FROM outbox_delivery")
	case suspect && delivered == 0:
		f.leaveAlone(first(errs), 0)
	case delivered > 0:
		o.Down(f.target.Name, false)
		f.apart.Go(f.back)
	}
	return outcomes
}

// note keeps count of the aggregates that have failed, and of those that were rejected, since
// something was acknowledged, and reports whether they are so many that the sink must be to blame. One
// that refuses is not left alone: what it takes may be behind what it does not.
func (f *feed) note(rows []delivery.Row, errs []error) (suspect, refuses bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.Contains(errs, nil) {
		clear(f.failing)
		clear(f.rejected)
		f.downs = 0
		return false, false
	}
	for k, err := range errs {
		var r *rejection
		var u *unavailable
		switch {
		case errors.Is(err, ErrNotTried), errors.As(err, &u):
		case errors.As(err, &r):
			if !r.final && len(f.rejected) < refusing {
				f.rejected[rows[k].Aggregate] = true
			}
		case len(f.failing) < suspicious:
			f.failing[rows[k].Aggregate] = true
		}
	}
	return len(f.failing) >= suspicious, len(f.rejected) >= refusing
}

// outcome is what an answer means for an event that was tried.
func (f *feed) outcome(row delivery.Row, err error, suspect, refuses bool) delivery.Outcome {
	o := delivery.Outcome{ID: row.ID, Delivered: err == nil, Attempt: row.Attempt + 1, Rejected: row.Rejected}
	if err == nil {
		return o
	}
	o.Reason, o.Again = firstLine(err.Error()), f.config.Backoff.Delay(row.Attempt)
	var r *rejection
	switch {
	case errors.As(err, &r) && (r.final || !refuses):
		o.Rejected++
		o.Park = r.final || o.Rejected >= maxRejections
	case r != nil: // the sink's fault, but it is tried ever less often
		o.Attempt = max(row.Attempt, min(o.Attempt, f.config.MaxAttempts/2))
	case suspect:
		o.Attempt = row.Attempt // it is the sink's fault
	default:
		o.Park = o.Attempt >= f.config.MaxAttempts
	}
	return o
}

// first returns the first error that says something.
func first(errs []error) error {
	for _, err := range errs {
		if err != nil && !errors.Is(err, ErrNotTried) {
			return err
		}
	}
	return ErrNotTried
}

// leaveAlone keeps all dispatchers from trying the sink for a while.
func (f *feed) leaveAlone(reason error, after time.Duration) {
	f.mu.Lock()
	pause := max(after, pauses.Delay(f.downs))
	f.downs++
	f.away = true
	f.mu.Unlock()
	f.config.Observe.Down(f.target.Name, true)
	if said := (*unavailable)(nil); errors.As(reason, &said) {
		f.complain("sink takes nothing; trying again", "after", pause, "err", firstLine(reason.Error()))
	} else { // the reason may quote what the sink has answered, and so a payload: it stays in the database
		f.complain("sink takes nothing; trying again; why: SELECT last_error FROM outbox_sink", "after", pause)
	}
	ctx, done := context.WithTimeout(context.Background(), 5*time.Second)
	defer done()
	if err := delivery.Pause(ctx, f.config.Pool, f.target.Name, pause, firstLine(reason.Error())); err != nil {
		f.complain("cannot note that a sink is left alone", "err", err)
	}
}

// back notes that the sink takes what it gets, if this or another dispatcher has found that it did not.
func (f *feed) back() {
	f.mu.Lock()
	ask := f.away || time.Since(f.asked) >= askEvery
	if ask {
		f.away, f.asked = false, time.Now()
	}
	f.mu.Unlock()
	if !ask {
		return
	}
	ctx, done := context.WithTimeout(context.Background(), 5*time.Second)
	defer done()
	down, was, err := delivery.Back(ctx, f.config.Pool, f.target.Name)
	if err != nil {
		f.mu.Lock()
		f.away = true // it is to be noted later
		f.mu.Unlock()
		f.complain("cannot note that a sink is back", "err", err)
	} else if was {
		f.log.Info("sink takes events again", "sink", f.target.Name, "after", down.Round(time.Second))
	}
}

// mark records what was found out, and gives the lanes back. What it takes longer with holds up nobody
// else: the next batch is published meanwhile.
func (f *feed) mark(ctx context.Context, claim *delivery.Claim, outcomes []delivery.Outcome) {
	soon, done := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer done()
	recorded, err := delivery.Mark(soon, f.config.Pool, claim, outcomes)
	if err != nil {
		f.apart.Go(func() { f.markApart(ctx, claim, outcomes) })
		return
	}
	f.marked(ctx)
	if recorded < len(outcomes) {
		f.complain("a claim was lost; its events are published again", "recorded", recorded, "of", len(outcomes))
		return
	}
	f.unmarked.forget(outcomes)
}

// markApart records what can be recorded, and remembers the rest. If the database is away it tries
// again until the claim runs out.
func (f *feed) markApart(ctx context.Context, claim *delivery.Claim, outcomes []delivery.Outcome) {
	stopping := ctx
	ctx, done := context.WithTimeout(context.WithoutCancel(ctx), f.config.Claim)
	defer done()
	// Who is to stop does not wait for a database for as long as a claim lasts.
	defer context.AfterFunc(stopping, func() { time.AfterFunc(5*time.Second, done) })()
	for n := 0; ; n++ {
		f.unmarked.remember(claim.Rows, outcomes)
		claim.AnyState = f.unmarked.lasting(outcomes)
		rest, err := delivery.MarkApart(ctx, f.config.Pool, claim, outcomes, patience<<min(n, 4))
		f.unmarked.kept(rest.Lanes, err)
		f.unmarked.kept(rest.Open, nil)
		f.tell(rest)
		if rest.Fault != nil {
			f.faulty(ctx, rest.Fault)
		}
		open := slices.Concat(rest.Lanes, rest.Open)
		f.unmarked.forget(slices.DeleteFunc(outcomes, func(o delivery.Outcome) bool {
			return slices.ContainsFunc(open, func(other delivery.Outcome) bool { return other.ID == o.ID })
		}))
		if outcomes = rest.Lanes; !rest.Claimed {
			return
		}
		if ctx.Err() != nil {
			f.complain("cannot mark events; who has their lanes next may publish them again", "events", len(outcomes), "state", rest.State, "err", err)
			return
		}
		sleep(ctx, run.Backoff{Base: 50 * time.Millisecond, Cap: 2 * time.Second}.Delay(n))
	}
}

// tell says in the log what could not be marked, and never why: that may quote a payload.
func (f *feed) tell(rest delivery.Rest) {
	for _, r := range rest.Refused {
		f.log.Warn("the database refuses to mark an event; it is parked; why: SELECT last_error FROM outbox_delivery", "event", r.ID, "state", r.State, "sink", f.target.Name)
	}
	if n := len(rest.Refused); n > 0 {
		f.config.Observe.Parked(f.target.Name, n)
	}
	if open := slices.Concat(rest.Open, rest.Lanes); len(open) > 0 && rest.Fault == nil {
		f.complain("some events cannot be marked now: locked, or the database refuses; trying again", "events", len(open), "event", open[0].ID, "state", rest.State)
	}
}

// appear says that the sink is served, until ctx ends.
func (f *feed) appear(ctx context.Context) {
	for ctx.Err() == nil {
		call, done := context.WithTimeout(ctx, seenTimeout)
		good := f.order(call, delivery.Seen(call, f.config.Pool, f.target.Name, f.target.Types))
		done()
		if !good {
			sleep(ctx, seenAgain)
			continue
		}
		now := time.Now()
		f.wrote.Store(&now)
		sleep(ctx, seenEvery)
	}
}

// keep raises floors, sets right what is wrong with lanes and ids, and measures, until ctx ends.
func (f *feed) keep(ctx context.Context) {
	var kept, swept, sweep time.Time
	// Not at once: the first look would pass over lanes that are locked for it, and see too little to tell
	// whether the sink is to blame.
	for sleep(ctx, floorEvery); ctx.Err() == nil; sleep(ctx, floorEvery) {
		begun := time.Now()
		err := delivery.RaiseFloors(ctx, f.config.Pool, f.target.Name)
		f.order(ctx, err)
		damaged := fault.Of(err) == fault.Halve // a damaged lane may refuse to be raised
		if damaged && begun.Sub(swept) > rightEvery || begun.After(sweep) {
			from := time.Now()
			f.setRight(ctx)
			swept = time.Now()
			sweep = swept.Add(min(max(sweepEvery, 300*swept.Sub(from)), sweepRarely))
		}
		if time.Since(kept) > keepEvery {
			kept = time.Now()
			if lag, err := delivery.LagOf(ctx, f.config.Pool, f.target.Name); err == nil {
				f.config.Observe.Lag(f.target.Name, lag)
			}
		}
		sleep(ctx, 10*time.Since(begun)) // what takes long is not repeated at once
	}
}

func (f *feed) setRight(ctx context.Context) {
	did, err := delivery.SetRight(ctx, f.config.Pool, f.target.Name)
	if f.order(ctx, err); did != "" {
		f.log.Warn("the outbox is set right", "did", did, "sink", f.target.Name)
	}
}

// order complains of an error of what keeps order, and reports whether there was none.
func (f *feed) order(ctx context.Context, err error) bool {
	if err != nil && ctx.Err() == nil {
		f.complain("cannot keep order in the outbox; trying again", "err", err)
	}
	return err == nil
}

// complain logs trouble, but not each time.
func (f *feed) complain(message string, args ...any) {
	args = append(slices.Clone(args), "sink", f.target.Name)
	for i, a := range args {
		if err, ok := a.(error); ok {
			args[i] = fault.Loggable(err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.told) < quietFor {
		f.log.Debug(message, args...)
		return
	}
	f.told = time.Now()
	f.log.Warn(message, args...)
}

// firstLine keeps an error's text fit for a line, and for Postgres.
func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	text = strings.ToValidUTF8(text[:min(len(text), 1000)], "")
	return strings.ReplaceAll(text, "\x00", "")
}
