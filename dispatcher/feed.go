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
	batchesAtOnce = 2  // the next batch is read while one is published
	lanesAtOnce   = 16 // most lanes of a claim; four claims, of one dispatcher or of several, cover all 64
	maxRejections = 3  // rejections after which an event is parked
	suspicious    = 3  // aggregates that fail, with nothing acknowledged since, before the sink is blamed instead
	refusing      = 10 // aggregates that are rejected, with nothing acknowledged since, before the sink is blamed instead
	probe         = 10 // most events of a batch while the sink is suspect

	floorEvery  = 500 * time.Millisecond  // between raises of the floors: every poll skips the finished events above a floor
	keepEvery   = 5 * time.Second         // between measurements of the lag
	seenEvery   = 2500 * time.Millisecond // between records that the sink is served
	seenAgain   = time.Second             // the same after a failure
	seenTimeout = 3 * time.Second
	askEvery    = 10 * time.Second // between checks whether another dispatcher has paused the sink
	sweepEvery  = 30 * time.Second // between repairs of lanes and ids: 300 times as long as a repair takes, at least this
	sweepRarely = 10 * time.Minute // and at most this
	rightEvery  = 5 * time.Second  // between repairs while floors cannot be raised
	quietFor    = time.Minute      // between warnings in the log about trouble

	patience = time.Second // for one statement that marks events
)

// pauses is the backoff for a sink that accepts nothing.
var pauses = run.Backoff{Base: 500 * time.Millisecond, Cap: 30 * time.Second}

// A feed publishes to one sink at its own pace, independent of other sinks.
type feed struct {
	*Dispatcher
	target Target
	limit  *rate.Limiter // nil: no limit

	quiet bool // the last claim seems to have left nothing; only run uses it

	mu       sync.Mutex
	failing  map[uuid.UUID]bool // aggregates that failed since the last acknowledgement
	rejected map[uuid.UUID]bool // aggregates that were rejected since the last acknowledgement
	downs    int                // pauses since the last acknowledgement
	away     bool               // the sink was paused, and its return is not recorded yet
	asked    time.Time          // when the database was last asked whether the sink is paused
	told     time.Time          // when complain last logged a warning
	marking  marking

	apart    sync.WaitGroup // markApart and back, beside the next batch
	unmarked unmarked
}

func newFeed(d *Dispatcher, t Target) *feed {
	f := &feed{Dispatcher: d, target: t, failing: map[uuid.UUID]bool{}, rejected: map[uuid.UUID]bool{}, unmarked: unmarked{events: map[int64]*dealtWith{}}}
	if t.Rate > 0 {
		f.limit = rate.NewLimiter(rate.Limit(t.Rate), max(1, min(d.config.Batch, int(t.Rate))))
	}
	return f
}

// run claims and publishes until ctx ends. Running batches may then continue until sending ends.
func (f *feed) run(ctx, sending context.Context) {
	var publishing sync.WaitGroup
	defer f.apart.Wait()
	defer publishing.Wait()
	slots := make(chan struct{}, batchesAtOnce)
	var polls pacer
	for {
		select {
		case <-ctx.Done():
			return
		case slots <- struct{}{}:
		}
		begun := time.Now()
		// The claim does not use ctx: if its statement were cancelled, it might be committed all the same, and block
		// its lanes.
		claim, err := f.look(ctx, sending)
		took := time.Since(begun)
		rest := polls.rest(took)
		if err == nil && claim.Lanes > 0 {
			f.config.Observe.Polled(f.target.Name, len(claim.Rows), took, nil)
			if ctx.Err() != nil {
				f.mark(sending, claim, nil) // gives the lanes back
				return
			}
			publishing.Go(func() {
				defer func() { <-slots }()
				f.publish(sending, claim, begun)
			})
			continue
		}
		<-slots
		f.config.Observe.Polled(f.target.Name, 0, took, err)
		pause := max(f.config.PollInterval, rest)
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

// look claims due events. If the last claim seems to have left nothing, it first asks whether any event is open, which
// is cheaper than a claim.
func (f *feed) look(ctx, sending context.Context) (*delivery.Claim, error) {
	if f.quiet {
		if open, err := delivery.Open(ctx, f.config.Pool, f.target.Name); err != nil || !open {
			return &delivery.Claim{}, err
		}
	}
	claim, err := delivery.Acquire(sending, f.config.Pool, f.target.Name, f.name, f.limits())
	f.quiet = err == nil && !claim.Full
	return claim, err
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// limits returns the bounds of the next batch. They are small while the sink is suspect.
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

// suspect reports whether the sink is to blame for failures: so many aggregates failed since the last acknowledgement.
func (f *feed) suspect() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.failing) >= suspicious
}

// publish publishes the events of a claim and marks them.
func (f *feed) publish(ctx context.Context, claim *delivery.Claim, claimed time.Time) {
	begun := time.Now()
	// Nothing is sent in the last third of a claim: once it has expired, another dispatcher may publish its events.
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
			f.log.Warn("an event exceeds the size limit; it is parked", "event", row.ID, "reason", row.Refused, "sink", f.target.Name)
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
			f.log.Error("a sink panicked", "sink", f.target.Name, "panic", fmt.Sprintf("%T", p), "stack", string(debug.Stack()))
			errs = slices.Repeat([]error{Unavailable(errors.New("the sink panicked"), 0)}, len(rows))
		}
	}()
	if f.limit != nil {
		if err := f.limit.WaitN(ctx, len(rows)); err != nil {
			sleep(ctx, time.Second) // the claim would end before the limit lets this batch through
			return slices.Repeat([]error{ErrNotTried}, len(rows))
		}
	}
	if errs = f.target.Sink.Publish(ctx, events); len(errs) != len(rows) {
		f.log.Error("a sink returned a wrong number of errors", "sink", f.target.Name, "events", len(rows), "answers", len(errs))
		return slices.Repeat([]error{Unavailable(errors.New("the sink returned a wrong number of errors"), 0)}, len(rows))
	}
	return errs
}

// judge converts the errors of Publish to outcomes, and pauses the sink if it accepts nothing. Events without an
// outcome stay as they were.
func (f *feed) judge(rows []delivery.Row, errs []error, took time.Duration) (outcomes []delivery.Outcome) {
	suspect, refuses := f.note(rows, errs)
	var down *unavailable
	delivered, failed, parked := 0, 0, 0
	for k, err := range errs {
		switch {
		case errors.Is(err, ErrNotTried), errors.As(err, &down):
			continue // not charged to the event
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
		// The reasons may quote the sink's answer, so they are not logged: they stay in the database.
		f.log.Warn("events parked; why: SELECT * FROM outbox_delivery WHERE parked_at IS NOT NULL", "sink", f.target.Name, "events", parked)
	}
	switch {
	case down != nil:
		f.leaveAlone(down, down.after)
	case refuses:
		f.complain("sink rejects every event; trying again; why: SELECT last_error FROM outbox_delivery")
	case suspect && delivered == 0:
		f.leaveAlone(first(errs), 0)
	case delivered > 0:
		o.Down(f.target.Name, false)
		f.apart.Go(f.back)
	}
	return outcomes
}

// note counts the aggregates that failed, and those that were rejected, since the last acknowledgement. suspect says
// that so many failed that the sink is to blame; refuses says the same of rejections. A sink that refuses is not
// paused: events that it accepts may stand behind events that it rejects.
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

// outcome returns the outcome of an event that was sent, given the error of Publish.
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
	case r != nil: // the sink's fault: the rejection does not count, but the backoff grows
		o.Attempt = max(row.Attempt, min(o.Attempt, f.config.MaxAttempts/2))
	case suspect:
		o.Attempt = row.Attempt // it is the sink's fault
	default:
		o.Park = o.Attempt >= f.config.MaxAttempts
	}
	return o
}

// first returns the first error other than ErrNotTried, or ErrNotTried if there is none.
func first(errs []error) error {
	for _, err := range errs {
		if err != nil && !errors.Is(err, ErrNotTried) {
			return err
		}
	}
	return ErrNotTried
}

// leaveAlone pauses the sink for all dispatchers, for after or for the backoff, whichever is longer.
func (f *feed) leaveAlone(reason error, after time.Duration) {
	f.mu.Lock()
	pause := max(after, pauses.Delay(f.downs))
	f.downs++
	f.away = true
	f.mu.Unlock()
	f.config.Observe.Down(f.target.Name, true)
	if said := (*unavailable)(nil); errors.As(reason, &said) {
		f.complain("sink takes nothing; trying again", "after", pause, "err", firstLine(reason.Error()))
	} else { // the reason may quote the sink's answer, and so a payload: it stays in the database
		f.complain("sink takes nothing; trying again; why: SELECT last_error FROM outbox_sink", "after", pause)
	}
	ctx, done := context.WithTimeout(context.Background(), 5*time.Second)
	defer done()
	if err := delivery.Pause(ctx, f.config.Pool, f.target.Name, pause, firstLine(reason.Error())); err != nil {
		f.complain("cannot record that a sink is paused", "err", err)
	}
}

// back records that the sink accepts events again, if this or another dispatcher has paused it.
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
		f.away = true // to be recorded later
		f.mu.Unlock()
		f.complain("cannot record that a sink is back", "err", err)
	} else if was {
		f.log.Info("sink takes events again", "sink", f.target.Name, "after", down.Round(time.Second))
	}
}

// mark records outcomes and gives the lanes of the claim back. If one statement cannot do that, markApart continues in
// the background, while the next batch is published.
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

// markApart records the outcomes that can be recorded, and remembers the rest. If the database is unavailable it
// retries for as long as a claim lasts.
func (f *feed) markApart(ctx context.Context, claim *delivery.Claim, outcomes []delivery.Outcome) {
	stopping := ctx
	ctx, done := context.WithTimeout(context.WithoutCancel(ctx), f.config.Claim)
	defer done()
	// When the dispatcher stops, it waits 5 s for the database at most, not as long as a claim lasts.
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
			f.complain("cannot mark events; the next owner of their lanes may publish them again", "events", len(outcomes), "state", rest.State, "err", err)
			return
		}
		sleep(ctx, run.Backoff{Base: 50 * time.Millisecond, Cap: 2 * time.Second}.Delay(n))
	}
}

// tell logs which events could not be marked. It does not log the database's message, which may quote a payload.
func (f *feed) tell(rest delivery.Rest) {
	for _, r := range rest.Refused {
		f.log.Warn("the database refuses to mark an event; it is parked; why: SELECT last_error FROM outbox_delivery", "event", r.ID, "state", r.State, "sink", f.target.Name)
	}
	if n := len(rest.Refused); n > 0 {
		f.config.Observe.Parked(f.target.Name, n)
	}
	if open := slices.Concat(rest.Open, rest.Lanes); len(open) > 0 && rest.Fault == nil {
		f.complain("some events cannot be marked now: they are locked, or the database refuses; trying again", "events", len(open), "event", open[0].ID, "state", rest.State)
	}
}

// appear records every 2.5 s that the sink is served, until ctx ends.
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

// keep raises floors, repairs lanes and ids, and measures the lag, until ctx ends. Lanes and ids are repaired at the time
// sweep at the earliest. A slow statement is not repeated at once, and does not make the others rare: where another sink
// has a million events to get, a repair takes seconds, and floors have to rise all the same.
func (f *feed) keep(ctx context.Context, sweep time.Time) {
	var measure, swept time.Time
	var floors, lags pacer
	// The first raise is delayed: it locks lanes, and the first poll would skip these, and see too few aggregates to tell
	// whether the sink is to blame.
	for wait := floorEvery; ; {
		if sleep(ctx, wait); ctx.Err() != nil {
			return
		}
		begun := time.Now()
		err := delivery.RaiseFloors(ctx, f.config.Pool, f.target.Name)
		f.order(ctx, err)
		wait = floorEvery + floors.rest(time.Since(begun))
		damaged := fault.Of(err) == fault.Halve // a damaged lane may refuse to be raised
		if damaged && begun.Sub(swept) > rightEvery || begun.After(sweep) {
			sweep = f.setRight(ctx)
			swept = time.Now()
		}
		if from := time.Now(); from.After(measure) {
			if lag, err := delivery.LagOf(ctx, f.config.Pool, f.target.Name); err == nil {
				f.config.Observe.Lag(f.target.Name, lag.Open, lag.Parked, lag.Oldest)
			}
			measure = time.Now().Add(max(keepEvery, lags.rest(time.Since(from))))
		}
	}
}

// setRight repairs lanes and ids, logs what was repaired, and returns when to do so again.
func (f *feed) setRight(ctx context.Context) (again time.Time) {
	begun := time.Now()
	did, err := delivery.SetRight(ctx, f.config.Pool, f.target.Name)
	if f.order(ctx, err); did != "" {
		f.log.Warn("the outbox was set right", "did", did, "sink", f.target.Name)
	}
	least := sweepEvery
	if err != nil {
		least = rightEvery
	}
	return time.Now().Add(min(max(least, 300*time.Since(begun)), sweepRarely))
}

// order logs an error of the outbox's housekeeping, unless ctx has ended, and reports whether err is nil.
func (f *feed) order(ctx context.Context, err error) bool {
	if err != nil && ctx.Err() == nil {
		f.complain("housekeeping of the outbox fails; trying again", "err", err)
	}
	return err == nil
}

// complain logs a warning, at most once a minute for a sink; more than that is logged at debug level. Errors are
// logged without text that may quote a row.
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

// firstLine returns the first line of an error's text, at most 1000 bytes, as text that Postgres can store.
func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	text = strings.ToValidUTF8(text[:min(len(text), 1000)], "")
	return strings.ReplaceAll(text, "\x00", "")
}
