package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	batchSettlers = 2           // settle many outcomes at a time
	soloSettlers  = 4           // settle one outcome at a time, with its effects
	effectTimeout = time.Minute // the most a settle transaction with effects may take
)

// settleBatches settles outcomes, as many at a time as have gathered, until ctx ends.
func (w *Worker) settleBatches(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case first := <-w.settles:
			batch := []*job{first}
			for full := false; !full && len(batch) < w.config.Batch; {
				select {
				case j := <-w.settles:
					batch = append(batch, j)
				default:
					full = true
				}
			}
			w.settle(ctx, batch)
		}
	}
}

// settleSolos settles outcomes that bring effects until ctx ends.
func (w *Worker) settleSolos(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-w.solos:
			w.settle(ctx, []*job{j})
		}
	}
}

// settle records the outcomes of a batch. What the database cannot take at the moment is
// repeated until it can, with the same outcomes and charged to nobody; what it will never
// take is searched for by halving the batch.
func (w *Worker) settle(ctx context.Context, batch []*job) {
	failures := retries()
	unsure := false // an earlier try may have been committed
	for {
		start := time.Now()
		lost, err := w.commit(ctx, batch)
		if w.config.Observe.SettleRun != nil {
			w.config.Observe.SettleRun(len(batch), time.Since(start), err)
		}
		var effect *effectError
		switch {
		case err == nil && unsure && len(lost) > 0:
			// Refused now, but perhaps because the earlier try had gone through.
			if lost, err = w.trulyLost(ctx, lost); err != nil {
				break
			}
			fallthrough
		case err == nil:
			w.settled(batch, lost)
			return
		case errors.As(err, &effect):
			w.rejudge(ctx, batch[0], effect.err)
			return
		case !transient(err) && refusesValue(err) && len(batch) > 1:
			w.settle(ctx, batch[:len(batch)/2])
			w.settle(ctx, batch[len(batch)/2:])
			return
		case !transient(err) && refusesValue(err) && batch[0].outcome.Verdict == run.Succeed:
			w.rejudge(ctx, batch[0], rejected(fmt.Errorf("the database refuses the result: %w", sanitized(err))))
			return
		}
		if ctx.Err() != nil {
			return // the leases expire, and others take over
		}
		unsure = true
		w.note(err)
		w.config.Logger.Warn("cannot settle; trying again", "runs", len(batch), "err", sanitized(err))
		sleep(ctx, failures.NextBackOff())
	}
}

// rejudge settles a job whose outcome could not be recorded because of err, as though the
// handler had returned err.
func (w *Worker) rejudge(ctx context.Context, j *job, err error) {
	j.outcome = w.judge(j, nil, err, nil)
	j.extras.effects, j.extras.events = nil, nil
	w.settle(ctx, []*job{j})
}

// commit records a batch in one statement, or in one transaction where hooks, effects or
// events take part. It is the one place in which a worker opens a transaction. lost are
// those whose lease is no longer ours.
func (w *Worker) commit(ctx context.Context, batch []*job) (lost []run.Outcome, err error) {
	ctx, done := context.WithTimeout(ctx, callTimeout)
	defer done()
	outcomes := make([]run.Outcome, len(batch))
	simple := len(w.config.Hooks) == 0
	for i, j := range batch {
		outcomes[i] = j.outcome
		simple = simple && len(j.extras.effects) == 0 && len(j.extras.events) == 0
	}
	if simple {
		return run.Settle(ctx, w.db, w.name, outcomes)
	}
	if len(batch[0].extras.effects) > 0 {
		// Effects are the user's own statements: they may take their time.
		long, done := context.WithTimeout(context.WithoutCancel(ctx), effectTimeout)
		defer done()
		ctx = long
	}
	err = pgx.BeginFunc(ctx, w.db, func(tx pgx.Tx) error {
		lost, err = w.record(ctx, tx, batch, outcomes)
		return err
	})
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		err = &effectError{errors.New("the effects left the settle transaction aborted")}
	}
	return lost, err
}

// record is what a settle transaction consists of: lock, settle, effects, act, announce.
func (w *Worker) record(ctx context.Context, tx pgx.Tx, batch []*job, outcomes []run.Outcome) (lost []run.Outcome, err error) {
	settlements := make([]Settlement, len(batch))
	for i, j := range batch {
		settlements[i] = Settlement{Lease: j.Lease, Outcome: j.outcome}
	}
	for _, h := range w.config.Hooks {
		if h.Lock != nil {
			if err := h.Lock(ctx, tx, settlements); err != nil {
				return nil, err
			}
		}
	}
	if lost, err = run.Settle(ctx, tx, w.name, outcomes); err != nil {
		return nil, err
	}
	gone := map[uuid.UUID]bool{}
	for _, o := range lost {
		gone[o.ID] = true
	}
	kept := settlements[:0:0]
	var events []outbox.Event
	for i, j := range batch {
		if gone[j.ID] {
			continue
		}
		kept = append(kept, settlements[i])
		if j.outcome.Verdict != run.Succeed {
			continue
		}
		events = append(events, j.extras.events...)
		for _, effect := range j.extras.effects {
			if err := apply(tx, effect); err != nil {
				return nil, err
			}
		}
	}
	for _, h := range w.config.Hooks {
		if h.Act != nil && len(kept) > 0 {
			if err := h.Act(ctx, tx, kept); err != nil {
				return nil, err
			}
		}
	}
	return lost, outbox.Append(ctx, tx, events...)
}

// trulyLost returns those of lost that no earlier, unanswered try has recorded.
func (w *Worker) trulyLost(ctx context.Context, lost []run.Outcome) ([]run.Outcome, error) {
	ctx, done := context.WithTimeout(ctx, callTimeout)
	defer done()
	recorded, err := run.Recorded(ctx, w.db, lost)
	if err != nil {
		return nil, err
	}
	var truly []run.Outcome
	for _, o := range lost {
		if !recorded[o.ID] {
			truly = append(truly, o)
		}
	}
	return truly, nil
}

// settled frees the slots of a batch and tells what became of it.
func (w *Worker) settled(batch []*job, lost []run.Outcome) {
	gone := map[uuid.UUID]bool{}
	for _, o := range lost {
		gone[o.ID] = true
	}
	for _, j := range batch {
		j.cancel(nil)
		w.jobs.remove(j)
		switch {
		case gone[j.ID]:
			w.logger(&j.Lease).Info("stale settle refused: the lease was lost", "verdict", j.outcome.Verdict)
			if w.config.Observe.Refused != nil {
				w.config.Observe.Refused(j.Type)
			}
			continue
		case j.outcome.Failure != nil:
			w.logFailure(j)
		}
		if w.config.Observe.Settled != nil {
			w.config.Observe.Settled(j.Type, j.outcome.Verdict)
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
	if j.outcome.Verdict == run.Fail {
		log.Warn("run failed")
		return
	}
	log.Warn("attempt failed; trying again", "delay", j.outcome.Delay)
}
