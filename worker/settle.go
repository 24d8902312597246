package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	batchSettlers  = 2                     // settle many outcomes at a time
	settlePatience = 20 * time.Millisecond // how long one waits for the other
	settleBytes    = 4 << 20               // of results, after which a batch is full: it has settleTimeout
	soloSettlers   = 4                     // settle one outcome at a time
	soloLookers    = 2                     // look whether the row of one is locked
	quickRetry     = time.Second           // the longest pause while the database is in trouble
	slowRetry      = 5 * time.Second       // the longest pause while no outcome at all can be recorded
	enoughRefusals = 5                     // of one outcome, before it is kept
	refusalSpan    = time.Minute           // the longest time between two that are counted together
)

// settleBatches settles outcomes, many at a time, until ctx ends.
func (w *Worker) settleBatches(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case first := <-w.settles:
			batch, turn := w.collect(first)
			w.settle(ctx, batch)
			if turn {
				<-w.settling
			}
		}
	}
}

// collect adds to first what else is there to be settled. While the other settler is at work
// it waits for its turn, but not for long: few large batches cost less than many small ones at
// a time. turn means that it took the token w.settling, to be given back once the batch is
// settled.
func (w *Worker) collect(first *job) (batch []*job, turn bool) {
	batch = []*job{first}
	size := len(first.outcome.Result)
	patience := time.NewTimer(settlePatience)
	defer patience.Stop()
	more := w.settles
	for {
		if len(batch) == w.config.Batch || size >= settleBytes {
			more = nil // a nil channel is never ready
		}
		select {
		case j := <-more:
			batch, size = append(batch, j), size+len(j.outcome.Result)
			continue
		default:
		}
		if turn {
			return batch, true
		}
		select {
		case j := <-more:
			batch, size = append(batch, j), size+len(j.outcome.Result)
		case w.settling <- struct{}{}:
			turn = true // once more around: what came in meanwhile
		case <-patience.C:
			return batch, false
		}
	}
}

// settle records the outcomes of a batch. While the database is out of reach, or two were in each other's way, it tries again.
// If the database or a hook refuses the batch, it is halved until the guilty outcome stands
// alone, which then keeps nobody else waiting. One that a hook names is taken out at once.
func (w *Worker) settle(ctx context.Context, batch []*job) {
	for pause := retries(); len(batch) > 0; sleep(ctx, pause.NextBackOff()) {
		err := w.try(ctx, batch)
		switch {
		case err == nil || ctx.Err() != nil:
			return // at the end of ctx leases expire, and others take over
		case whole(err, batch[0].lasting) && (len(batch) > 1 || unreachable(err)):
			w.complain("cannot settle; trying again", "runs", len(batch), "err", err)
			continue
		case len(batch) == 1:
			w.setAside(ctx, batch[0])
			return
		case tooLong(err):
			if rest := w.withoutLocked(ctx, batch); len(rest) < len(batch) {
				batch = rest
				continue
			}
		case crowded(err):
			sleep(ctx, pause.NextBackOff())
		case !transient(err):
			if rest := w.withoutNamed(ctx, batch, err); len(rest) < len(batch) {
				w.settle(ctx, rest) // at once
				return
			}
		}
		w.settle(ctx, batch[:len(batch)/2])
		w.settle(ctx, batch[len(batch)/2:])
		return
	}
}

// setAside leaves one outcome to settleAlone.
func (w *Worker) setAside(ctx context.Context, j *job) {
	select {
	case w.solos <- j:
	case <-ctx.Done():
	}
}

// withoutNamed sets the outcomes aside that a hook calls the cause of an error, and returns the rest.
func (w *Worker) withoutNamed(ctx context.Context, batch []*job, err error) (rest []*job) {
	var named *leasing.SettleError
	if !errors.As(err, &named) {
		return batch
	}
	for _, j := range batch {
		if j.ID == named.Run || slices.Contains(named.Others, j.ID) {
			w.setAside(ctx, j)
		} else {
			rest = append(rest, j)
		}
	}
	return rest
}

// withoutLocked sets those aside whose rows somebody has locked, and returns the rest.
func (w *Worker) withoutLocked(ctx context.Context, batch []*job) (rest []*job) {
	locked := w.locked(ctx, batch)
	for _, j := range batch {
		if locked[j.ID] {
			w.setAside(ctx, j)
		} else {
			rest = append(rest, j)
		}
	}
	return rest
}

// locked returns the runs among batch whose rows somebody has locked. It does not wait, and
// returns none if it cannot tell.
func (w *Worker) locked(ctx context.Context, batch []*job) map[uuid.UUID]bool {
	all := make([]uuid.UUID, len(batch))
	for i, j := range batch {
		all[i] = j.ID
	}
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	rows, _ := w.db.Query(call, `SELECT * FROM workflow_locked_v1($1)`, all)
	found, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil
	}
	locked := make(map[uuid.UUID]bool, len(found))
	for _, id := range found {
		locked[id] = true
	}
	return locked
}

// barred reports whether somebody has locked the row of an outcome. Few ask at a time: as many as there are outcomes would take all connections.
func (w *Worker) barred(ctx context.Context, j *job, looks chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case looks <- struct{}{}:
	}
	defer func() { <-looks }()
	return len(w.locked(ctx, []*job{j})) > 0
}

// settleSolos settles outcomes that must not share a transaction until ctx ends. Each has a
// goroutine, so that one which has to be repeated keeps no other waiting.
func (w *Worker) settleSolos(ctx context.Context) {
	var solos sync.WaitGroup
	defer solos.Wait()
	turns, looks := make(chan struct{}, soloSettlers), make(chan struct{}, soloLookers)
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-w.solos:
			solos.Go(func() { w.settleAlone(ctx, j, turns, looks) })
		}
	}
}

// settleAlone records one outcome. What is the handler's fault becomes its failure; all other trouble is charged to
// nobody, and tried again; but an outcome that is refused time and again, while others are not, is kept for later.
func (w *Worker) settleAlone(ctx context.Context, j *job, turns, looks chan struct{}) {
	var r refusals
	var sure sureness
	for pause, again := retries(), false; ; again = true {
		// Who waits for a row that is locked does so without a turn, or others would have none.
		for (again || len(j.extras.effects) == 0) && w.barred(ctx, j, looks) {
			j.trouble, j.lasting = fault.Series{}, false
			w.jobs.lock(j, true)
			sleep(ctx, pause.NextBackOff())
		}
		w.jobs.lock(j, false)
		select {
		case <-ctx.Done():
			return
		case turns <- struct{}{}:
		}
		begun := time.Now()
		err := w.try(ctx, []*job{j})
		<-turns
		if err == nil || ctx.Err() != nil {
			return
		}
		var effect *effectError
		if errors.As(err, &effect) && errors.Is(context.Cause(j.ctx), run.ErrLost) {
			w.logger(&j.Lease).Info("outcome dropped", "cause", run.ErrLost) // and with it what its effects made of that
			w.jobs.remove(j)
			return
		}
		// In the middle of an effect the server may have ended a transaction of a process that stood
		// still, or that it did not hear: that is not the effect's fault.
		frozen := effect != nil && (w.stoodStill(begun) || w.unheard.time().After(begun))
		if !frozen && effect == nil && code(err) != "" && refused(err) {
			switch w.whose(ctx, j, err, &sure) {
			case ofStatement:
				w.jobs.park(j)
				w.note(&fault.Error{Statement: "settle", Err: err})
				pause.MaxInterval = quickRetry
				sleep(ctx, pause.NextBackOff())
				continue
			case unsure:
				continue
			} // unknown: it is put aside in time, and nothing is kept before a control has gone through
		}
		if !frozen && (effect != nil || failedByHook(err) != nil || refusesValue(err) && w.tryFailure(ctx, j) == nil) && w.blame(j, err) { // or it is not what the handler returned that is refused
			sure = sureness{}
			continue
		}
		pause.MaxInterval = quickRetry
		if !frozen && r.count(j, err) {
			w.jobs.park(j)
			j.unblame()
			if r.n >= enoughRefusals {
				if w.keep(ctx, j, err) {
					return
				}
				pause.MaxInterval = slowRetry
			}
		}
		w.complain("cannot settle; trying again", "runs", 1, "err", err)
		sleep(ctx, pause.NextBackOff())
	}
}

// refusals counts the tries of one outcome in which the error was its own. Time in outages and behind locks does not count.
type refusals struct {
	n    int
	last time.Time
}

// count reports whether an error of a try counts.
func (r *refusals) count(j *job, err error) bool {
	if code(err) == "55P03" || transient(err) && !j.lasting { // 55P03: lock_not_available
		return false
	}
	if time.Since(r.last) > refusalSpan {
		r.n = 0
	}
	r.n, r.last = r.n+1, time.Now()
	return true
}

// failedByHook returns the error with which a hook has a run fail; nil: none has.
func failedByHook(err error) error {
	var named *leasing.SettleError
	if errors.As(err, &named) && run.IsPermanent(named.Err) {
		return named.Err
	}
	return nil
}

// blame turns a success that cannot be recorded for the handler's own fault, or that a hook refuses, into a failure,
// and a failure whose description cannot be stored into one that says so. It reports whether
// there is something new to be tried.
func (w *Worker) blame(j *job, err error) bool {
	var effect *effectError
	value := refusesValue(err) && (j.offered == nil || !j.offered.refused)
	switch {
	case j.outcome.Failure != nil && value && !j.plainly:
		j.offer()
		j.plainly = true
		j.outcome.Failure = settling.NewFailure(rejected(errors.New("the description of the failure could not be stored")), j.Info)
		return true
	case j.outcome.Verdict != settling.Succeed:
		return false
	case errors.As(err, &effect):
		err = effect.err
	case failedByHook(err) != nil:
		err = failedByHook(err)
	case value:
		j.offer()
		err = rejected(fmt.Errorf("the database refuses the result: %w", sanitized(err)))
	default:
		return false
	}
	j.outcome = w.judge(j, nil, err, context.Cause(j.ctx))
	j.extras.drop()
	return true
}

// An offer is an outcome before it was changed because the database seemed to object to what is to be stored.
type offer struct {
	outcome settling.Outcome
	effects []func(pgx.Tx) error
	events  []outbox.Event
	refused bool // the changed one was refused as well: it was not for that
}

// offer remembers the outcome as it is, if it has not been changed yet.
func (j *job) offer() {
	if j.offered == nil {
		j.offered = &offer{outcome: j.outcome, effects: j.extras.effects, events: j.extras.events}
	}
}

// unblame makes the outcome again what it was, once what was made of it is refused, too: then what is stored does not matter.
func (j *job) unblame() {
	if o := j.offered; o != nil && !o.refused {
		o.refused = true
		j.outcome, j.extras.effects, j.extras.events = o.outcome, o.effects, o.events
	}
}

// try records the outcomes of a batch once, and then frees their slots.
func (w *Worker) try(ctx context.Context, batch []*job) error {
	w.prolong(ctx, batch)
	start := time.Now()
	lost, err := w.commit(ctx, batch)
	if w.config.Observe.SettleRun != nil {
		w.config.Observe.SettleRun(len(batch), time.Since(start), err)
	}
	if err == nil {
		lost, err = w.trulyLost(ctx, batch, lost)
	}
	if err != nil {
		for _, j := range batch {
			j.unsure = true
			_, j.lasting = j.trouble.Of(err)
		}
		w.jobs.failed(batch, err)
		w.note(err)
		w.prolong(ctx, batch) // a pause follows, or tries of the batch's other half: a heartbeat may come too late
		return err
	}
	w.settled(batch, lost)
	return nil
}

// trulyLost returns those of lost that no earlier, unanswered try has recorded.
func (w *Worker) trulyLost(ctx context.Context, batch []*job, lost []settling.Outcome) ([]settling.Outcome, error) {
	refused := fences(lost)
	unsure := false
	for _, j := range batch {
		unsure = unsure || j.unsure && refused[fenceOf(j.outcome)]
	}
	if !unsure {
		return lost, nil
	}
	ctx, done := context.WithTimeout(ctx, callTimeout)
	defer done()
	found, err := settling.Recorded(ctx, w.db, lost)
	if err != nil {
		return nil, err
	}
	recorded := fences(found)
	var truly []settling.Outcome
	for _, o := range lost {
		if !recorded[fenceOf(o)] {
			truly = append(truly, o)
		}
	}
	return truly, nil
}

// A fence tells one lease from all others. The run alone does not: it may have been lost and
// leased again while the old outcome waited, and then both are in one batch.
type fence struct{ run, token uuid.UUID }

func fenceOf(o settling.Outcome) fence { return fence{o.ID, o.Token} }

func fences(outcomes []settling.Outcome) map[fence]bool {
	set := make(map[fence]bool, len(outcomes))
	for _, o := range outcomes {
		set[fenceOf(o)] = true
	}
	return set
}

// settled frees the slots of a batch and tells what became of it.
func (w *Worker) settled(batch []*job, lost []settling.Outcome) {
	gone := fences(lost)
	for _, j := range batch {
		j.cancel(nil)
		w.jobs.remove(j)
		switch {
		case gone[fenceOf(j.outcome)]:
			w.logger(&j.Lease).Info("stale settle refused: the lease was lost", "verdict", j.outcome.Verdict)
			if w.config.Observe.Refused != nil {
				w.config.Observe.Refused(j.Type)
			}
			continue
		case j.outcome.Failure != nil:
			w.logFailure(j)
		}
		w.tally.settled(j.Type, j.outcome.Verdict, j.took)
		if w.config.Observe.Settled != nil {
			w.config.Observe.Settled(j.Type, j.outcome.Verdict)
		}
	}
	for i, h := range w.engine.hooks {
		if slices.ContainsFunc(batch, func(j *job) bool { return !gone[fenceOf(j.outcome)] && h.IsAbout(&j.Lease) }) {
			w.hooked[i].now()
			w.rouse() // what a hook has enqueued, most likely the next steps, does not wait for word of it
		}
	}
}

// logFailure tells of a failed attempt. The error's text may quote the payload, so it stays
// in the database (last_error) unless the configuration wants it in the log.
func (w *Worker) logFailure(j *job) {
	log := w.logger(&j.Lease).With("code", j.outcome.Failure.Code)
	if w.config.LogErrors {
		log = log.With("err", j.outcome.Failure.Message)
	}
	if j.outcome.Verdict == settling.Fail {
		log.Warn("run failed")
		return
	}
	log.Warn("attempt failed; trying again", "delay", j.outcome.Delay)
}
