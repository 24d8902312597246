package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	batchSettlers  = 2                     // goroutines that settle many outcomes at a time
	settlePatience = 20 * time.Millisecond // how long one of them waits for the other
	settleGather   = 10 * time.Millisecond // how long a batch waits for more outcomes while runs that are leased ahead wait for slots
	settleBytes    = 4 << 20               // a batch with this many bytes of results is full, so that it can be settled within settleTimeout
	soloSettlers   = 4                     // outcomes settled alone at the same time
	soloLookers    = 2                     // checks at the same time whether a row is locked
	quickRetry     = time.Second           // the longest pause while the database is in trouble
	slowRetry      = 5 * time.Second       // the longest pause while no outcome at all can be recorded
	enoughRefusals = 5                     // refusals of one outcome before it is kept
	refusalSpan    = time.Minute           // the longest time between two refusals that are counted together
)

// settleBatches settles outcomes in batches until ctx ends.
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

// collect adds to first the other outcomes that wait to be settled. While the other settler is busy it waits
// for its turn, but for settlePatience at most: a few large batches at a time cost less than many small ones. For the
// same reason it then waits for half a batch, for settleGather at most, while runs that were leased ahead wait for slots:
// no slot is empty meanwhile. turn reports whether it took the token w.settling. The caller gives that back once the
// batch is settled.
func (w *Worker) collect(first *job) (batch []*job, turn bool) {
	batch = []*job{first}
	size := len(first.outcome.Result)
	patience := time.NewTimer(settlePatience)
	defer patience.Stop()
	more, turns := w.settles, w.settling // a nil channel is never ready
	for {
		if len(batch) == w.config.Batch || size >= settleBytes {
			more = nil
		}
		select {
		case j := <-more:
			batch, size = append(batch, j), size+len(j.outcome.Result)
			continue
		default:
		}
		if turn && (more == nil || len(batch) >= w.config.Batch/2 || !w.jobs.haveMore()) {
			return batch, true
		}
		select {
		case j := <-more:
			batch, size = append(batch, j), size+len(j.outcome.Result)
		case turns <- struct{}{}:
			turn, turns = true, nil // loop once more for outcomes that arrived meanwhile
			patience.Reset(settleGather)
		case <-patience.C:
			return batch, turn
		}
	}
}

// settle records the outcomes of a batch; the settle transaction itself is in commit.go. It tries the whole batch again
// while the database is out of reach, and after a deadlock. If the database or a hook refuses the batch, settle halves
// it until the refused outcome is alone and delays no other. An outcome that a hook names as the cause is taken out at
// once.
func (w *Worker) settle(ctx context.Context, batch []*job) {
	for pause := retries(); len(batch) > 0; sleep(ctx, pause.NextBackOff()) {
		err := w.try(ctx, batch)
		switch {
		case err == nil || ctx.Err() != nil:
			return // after the end of ctx the leases expire, and others take them back
		case whole(err, batch[0].lasting) && (len(batch) > 1 || unreachable(err)):
			w.complain("cannot settle; trying again", "runs", len(batch), "err", err)
			continue
		case len(batch) == 1:
			w.toSolos(ctx, batch[0])
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
				w.settle(ctx, rest) // without a pause
				return
			}
		}
		w.settle(ctx, batch[:len(batch)/2])
		w.settle(ctx, batch[len(batch)/2:])
		return
	}
}

// toSolos leaves an outcome to settleAlone. The run is not set aside in workflow_set_aside by this: that is so only
// once its outcome is kept.
func (w *Worker) toSolos(ctx context.Context, j *job) {
	select {
	case w.solos <- j:
	case <-ctx.Done():
	}
}

// withoutNamed sets aside the outcomes that a hook names as the cause of err, and returns the rest.
func (w *Worker) withoutNamed(ctx context.Context, batch []*job, err error) (rest []*job) {
	var named *leasing.SettleError
	if !errors.As(err, &named) {
		return batch
	}
	for _, j := range batch {
		if j.ID == named.Run || slices.Contains(named.Others, j.ID) {
			w.toSolos(ctx, j)
		} else {
			rest = append(rest, j)
		}
	}
	return rest
}

// withoutLocked sets aside the outcomes whose rows another session has locked, and returns the rest.
func (w *Worker) withoutLocked(ctx context.Context, batch []*job) (rest []*job) {
	locked := w.locked(ctx, batch)
	for _, j := range batch {
		if locked[j.ID] {
			w.toSolos(ctx, j)
		} else {
			rest = append(rest, j)
		}
	}
	return rest
}

// locked returns the runs of batch whose rows another session has locked. It does not wait. It returns nil if
// the query fails.
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

// barred reports whether another session has locked the row of an outcome. looks limits how many ask at a time,
// since many at once would take all connections.
func (w *Worker) barred(ctx context.Context, j *job, looks chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case looks <- struct{}{}:
	}
	defer func() { <-looks }()
	return len(w.locked(ctx, []*job{j})) > 0
}

// settleSolos settles outcomes that must not share a transaction, until ctx ends. Each gets a goroutine, so
// that one that has to be repeated delays no other.
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

// settleAlone records one outcome. An error that is the handler's fault becomes the run's failure. After any
// other error the outcome is tried again, and no attempt is charged. An outcome that is refused time and again,
// while others are not, is kept for later.
func (w *Worker) settleAlone(ctx context.Context, j *job, turns, looks chan struct{}) {
	var r refusals
	var sure sureness
	for pause, again := retries(), false; ; again = true {
		// Waiting for a locked row takes no turn: otherwise the waiting outcomes could use up all turns.
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
			w.logger(&j.Lease).Info("outcome dropped", "cause", run.ErrLost) // its effects may have failed because of that
			w.jobs.remove(j)
			return
		}
		// If the process was frozen, or the server did not hear from it, the server may have ended the
		// transaction in the middle of an effect. That is not the effect's fault.
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
			} // unknown: counted below; keep stores nothing before a control has succeeded
		}
		// If a plain failure of the run is refused too, the values that the handler returned are not the cause.
		if !frozen && (effect != nil || failedByHook(err) != nil || refusesValue(err) && w.tryFailure(ctx, j) == nil) && w.blame(j, err) {
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

// refusals counts the tries of one outcome that failed with an error of its own. Time in outages and behind
// locks does not count.
type refusals struct {
	n    int
	last time.Time
}

// count counts the error of a try, and reports whether it counts.
func (r *refusals) count(j *job, err error) bool {
	if code(err) == pgerrcode.LockNotAvailable || transient(err) && !j.lasting {
		return false
	}
	if time.Since(r.last) > refusalSpan {
		r.n = 0
	}
	r.n, r.last = r.n+1, time.Now()
	return true
}

// failedByHook returns the error with which a hook fails the run, or nil.
func failedByHook(err error) error {
	var named *leasing.SettleError
	if errors.As(err, &named) && run.IsPermanent(named.Err) {
		return named.Err
	}
	return nil
}

// blame replaces the outcome after an error that is the run's own. A success becomes a failure if an effect
// failed, a hook fails the run, or the database refuses the result. A failure whose description cannot be
// stored gets another description. blame reports whether there is a new outcome to try.
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

// An offer is an outcome as it was before it was replaced because the database seemed to object to its values.
type offer struct {
	outcome settling.Outcome
	effects []func(pgx.Tx) error
	events  []outbox.Event
	refused bool // the replacement was refused too, so the values were not the cause
}

// offer remembers the outcome, unless one is remembered already.
func (j *job) offer() {
	if j.offered == nil {
		j.offered = &offer{outcome: j.outcome, effects: j.extras.effects, events: j.extras.events}
	}
}

// unblame restores the outcome once its replacement is refused too: then its values are not the cause.
func (j *job) unblame() {
	if o := j.offered; o != nil && !o.refused {
		o.refused = true
		j.outcome, j.extras.effects, j.extras.events = o.outcome, o.effects, o.events
	}
}

// try records the outcomes of a batch once, and frees their slots if that succeeds.
func (w *Worker) try(ctx context.Context, batch []*job) error {
	w.prolong(ctx, batch)
	start := time.Now()
	lost, left, err := w.commit(ctx, batch)
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
		w.prolong(ctx, batch) // a pause or tries of other halves follow, and a heartbeat may come too late
		return err
	}
	w.settled(batch, lost, left)
	return nil
}

// trulyLost returns the outcomes of lost that were not recorded by an earlier try whose answer was lost.
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

// A fence identifies one lease. The run's id alone does not: a run may be lost and leased again while its old
// outcome waits, and then both outcomes are in one batch.
type fence struct{ run, token uuid.UUID }

func fenceOf(o settling.Outcome) fence { return fence{o.ID, o.Token} }

func fences(outcomes []settling.Outcome) map[fence]bool {
	set := make(map[fence]bool, len(outcomes))
	for _, o := range outcomes {
		set[fenceOf(o)] = true
	}
	return set
}

// settled frees the slots of a settled batch, and logs and counts the outcomes. left is as commit returned it.
func (w *Worker) settled(batch []*job, lost []settling.Outcome, left bool) {
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
			w.config.Observe.Settled(j.Type, string(j.outcome.Verdict))
		}
	}
	for i, h := range w.engine.hooks {
		if slices.ContainsFunc(batch, func(j *job) bool { return !gone[fenceOf(j.outcome)] && h.IsAbout(&j.Lease) }) {
			w.hooked[i].now()
			if left {
				w.rouse() // poll without waiting for a notification
			}
		}
	}
}

// logFailure logs a failed attempt. The error's text may quote the payload, so it is only stored with the run
// (last_error), unless Config.LogErrors is set.
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
