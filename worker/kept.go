package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
)

const (
	firstKeptLook = time.Second // after the worker's start: somebody may have mended what refused, and started it for that
	keptEvery     = time.Second // who completes a run that goes on elsewhere is promised two
	keptMost      = 10 * time.Second
	keptBatch     = 100
)

// keep stores the outcome of a job that is refused alone, time and again, so that any worker may settle it later. Then it is
// this one's business no more: its slot is free, its lease is not extended. It reports false if no outcome at all could be
// recorded, which is no fault of this run's, or if it is not known.
func (w *Worker) keep(ctx context.Context, j *job, cause error) bool {
	if j.outcome.Verdict == settling.HandOn {
		return false // it is none yet
	}
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	if err := w.othersGoThrough(call, j, cause); err != nil {
		w.complain("no outcome of its kind can be settled; trying again", "type", j.Type, "err", err)
		return false
	}
	events, err := packed(j.extras.events)
	kept := false
	if err == nil {
		k := leasing.Kept{Settlement: leasing.Settlement{Lease: j.Lease, Outcome: j.outcome}, Events: events, Effects: len(j.extras.effects) > 0}
		k.Worker = w.name
		kept, err = leasing.Keep(call, w.db, k, cause)
	}
	if err != nil && ctx.Err() == nil {
		w.note(err)
		w.complain("cannot keep an outcome that is refused; trying again", "err", err)
	}
	if !kept {
		return false
	}
	w.logger(&j.Lease).Error("outcome refused time and again; it is kept, and settled once nothing refuses it: see workflow_unleasable", "sqlstate", code(cause))
	if w.config.Observe.SetAside != nil {
		w.config.Observe.SetAside(j.Type)
	}
	j.cancel(nil)
	w.jobs.remove(j)
	return true
}

// othersGoThrough returns an error if nothing like the outcome of a job could be settled: this worker may not settle at all, or
// no step of a process, or the hook that refuses it refuses others, too. leasing.Keep looks whether the database lets any run be settled.
func (w *Worker) othersGoThrough(ctx context.Context, j *job, cause error) error {
	var hook *hookError
	if err := leasing.CanSettle(ctx, w.db, w.name); err != nil {
		return err
	} else if j.Step != uuid.Nil {
		return w.stepsWork(ctx)
	} else if errors.As(cause, &hook) && !errors.As(cause, new(*leasing.SettleError)) && w.jobs.othersRefusedBy(hook, j) {
		return w.hookWorks(ctx, j, hook, time.Now().Add(-refusalSpan))
	}
	return nil
}

// stepsWork returns nil if steps could be settled that are made for this.
func (w *Worker) stepsWork(ctx context.Context) error {
	err := undone(w.transact(ctx, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		controls, err := leasing.Controls(ctx, tx)
		if err != nil {
			return err
		}
		batch, outcomes := make([]*job, len(controls)), make([]settling.Outcome, len(controls))
		for i, l := range controls {
			outcomes[i] = settling.Outcome{ID: l.ID, Token: l.Token, Verdict: settling.Succeed}
			batch[i] = &job{Lease: l, outcome: outcomes[i]}
		}
		if _, err := w.record(ctx, tx, batch, outcomes); err != nil {
			return err
		}
		return tried(ctx, tx)
	}))
	if err != nil {
		return fmt.Errorf("settle steps that were made for this: %w", err)
	}
	return nil
}

// settleKept settles what is kept once it is time to try it again, until ctx ends. Whose handlers it was does not matter.
func (w *Worker) settleKept(ctx context.Context) {
	for sleep(ctx, firstKeptLook); ctx.Err() == nil; {
		start := time.Now()
		due, err := leasing.ToSettle(ctx, w.db, w.config.Prefixes, w.steps(), keptBatch)
		took := time.Since(start)
		if err != nil && ctx.Err() == nil {
			w.note(err)
			w.complain("cannot look for outcomes that are kept; trying again", "err", err)
		}
		if !w.settleAllKept(ctx, due) { // else more are due, if they were refused for the same reason
			sleep(ctx, max(keptEvery, min(20*took, keptMost)))
		}
	}
}

// settleAllKept settles outcomes that are kept, and reports whether any is settled.
func (w *Worker) settleAllKept(ctx context.Context, due []leasing.Kept) (any bool) {
	var jobs []*job
	for _, k := range due {
		j := &job{Lease: k.Lease, entry: w.lookup(k.Type), outcome: k.Outcome, done: true, kept: &k}
		if j.row = k.MaxAttempts; k.Verdict == settling.TryAgain && k.Told == nil {
			_, j.outcome.Most = w.most(j)
			if j.Follows && j.Attempt >= cmp.Or(j.outcome.Most, j.row) { // the policy has been lowered: it was to be tried again, and is, once
				j.outcome.Most = j.Attempt + 1
			}
		}
		if k.Told != nil {
			j.outcome = w.judge(j, nil, saidElsewhere(k.Told), nil)
		}
		j.ctx, j.cancel = context.WithCancelCause(context.Background())
		defer j.cancel(nil)
		switch err := unpack(k.Events, &j.extras.events); {
		case err != nil:
			w.complain("cannot settle what is kept", "run", j.ID, "err", err)
		case k.Effects:
			any = w.settleOneKept(ctx, j) || any
		default:
			jobs = append(jobs, j)
		}
	}
	return w.settleManyKept(ctx, jobs) || any
}

// settleManyKept settles a batch without effects. If that is refused, it is halved until the guilty outcome stands alone.
func (w *Worker) settleManyKept(ctx context.Context, batch []*job) bool {
	switch {
	case len(batch) == 0 || ctx.Err() != nil:
		return false
	case len(batch) == 1:
		return w.settleOneKept(ctx, batch[0])
	}
	switch err := w.recordKept(ctx, batch); {
	case err == nil:
		return true
	case unreachable(err): // they stay due
		w.note(err)
		return false
	}
	first := w.settleManyKept(ctx, batch[:len(batch)/2])
	return w.settleManyKept(ctx, batch[len(batch)/2:]) || first
}

// settleOneKept tries to settle an outcome that is kept, and reports whether that is done.
func (w *Worker) settleOneKept(ctx context.Context, j *job) bool {
	err := w.recordKept(ctx, []*job{j})
	if failedByHook(err) != nil && w.blame(j, err) {
		err = w.recordKept(ctx, []*job{j})
	}
	if err == nil || ctx.Err() != nil {
		return err == nil
	}
	w.complain("an outcome that is kept is refused still", "run", j.ID, "err", err)
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	if transient(err) || w.othersGoThrough(call, j, err) != nil {
		w.note(err)
	} else if err := leasing.RefusedAgain(call, w.db, *j.kept, err); err != nil {
		w.complain("cannot tell that an outcome is refused", "err", err)
	}
	return false
}

// recordKept records outcomes that are kept as any others, hooks included. One with effects, which are lost, comes alone, and is only
// tried: if that goes through, the lease is left to those who take leases back.
func (w *Worker) recordKept(ctx context.Context, batch []*job) (err error) {
	ctx, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	start := time.Now()
	all := make([]leasing.Kept, len(batch))
	for i, j := range batch {
		all[i] = *j.kept
	}
	var still []*job // those that nobody has settled meanwhile
	var lost []settling.Outcome
	err = w.transact(ctx, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		were, err := leasing.Over(ctx, tx, all)
		if err != nil {
			return err
		}
		still = slices.DeleteFunc(slices.Clone(batch), func(j *job) bool {
			return !slices.ContainsFunc(were, func(k leasing.Kept) bool { return k.Outcome.ID == j.ID })
		})
		outcomes := make([]settling.Outcome, len(still))
		for i, j := range still {
			outcomes[i] = j.outcome
		}
		if len(still) == 0 {
			return nil
		}
		if lost, err = w.record(ctx, tx, still, outcomes); err == nil && still[0].kept.Effects {
			return tried(ctx, tx)
		}
		return err
	})
	if w.config.Observe.SettleRun != nil && !errors.Is(err, errUndone) {
		w.config.Observe.SettleRun(len(batch), time.Since(start), err)
	}
	switch {
	case errors.Is(err, errUndone):
		w.logger(&batch[0].Lease).Info("an outcome could be recorded; as its effects are lost, its lease is taken back")
		_, err = leasing.Over(ctx, w.db, all)
	case err == nil:
		w.settled(still, lost)
	}
	return err
}

// A packedEvent is an event as it is kept.
type packedEvent struct {
	ID        uuid.UUID         `json:"id"`
	Aggregate uuid.UUID         `json:"aggregate"`
	Type      string            `json:"type"`
	Payload   json.RawMessage   `json:"payload"`
	Headers   map[string]string `json:"headers,omitempty"`
}

func packed(events []outbox.Event) (json.RawMessage, error) {
	if len(events) == 0 {
		return nil, nil
	}
	all := make([]packedEvent, len(events))
	for i, e := range events {
		payload, err := json.Marshal(e.Payload)
		if err != nil {
			return nil, fmt.Errorf("encode payload of event %q: %w", e.Type, err)
		}
		all[i] = packedEvent{e.ID, e.Aggregate, e.Type, payload, e.Headers}
	}
	return json.Marshal(all)
}

func unpack(text json.RawMessage, events *[]outbox.Event) error {
	if text == nil {
		return nil
	}
	var all []packedEvent
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("read events that are kept: %w", err)
	}
	for _, e := range all {
		*events = append(*events, outbox.Event{ID: e.ID, Aggregate: e.Aggregate, Type: e.Type, Payload: e.Payload, Headers: e.Headers})
	}
	return nil
}
