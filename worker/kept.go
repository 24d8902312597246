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
	keptPause = 500 * time.Millisecond // with the second of a look, outcomes reported from elsewhere are settled within 2 s
	keptMost  = 10 * time.Second
	keptBatch = 100
)

// keep stores the outcome of a job that is refused alone time and again, so that any worker may settle it
// later. After that the job's slot is free, and its lease is not extended any more. keep reports false if no
// outcome at all could be recorded, in which case this run is not the cause, or if it could not find that out.
func (w *Worker) keep(ctx context.Context, j *job, cause error) bool {
	if j.outcome.Verdict == settling.HandOn {
		return false // a run that is handed on has no outcome yet
	}
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	if err := w.othersGoThrough(call, j, cause); err != nil {
		w.complain("no outcome of this kind can be settled; trying again", "type", j.Type, "err", err)
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

// othersGoThrough returns an error if no outcome of the job's kind could be settled: because this worker's role
// may not settle, because no step of a process can be settled, or because the hook that refuses this outcome
// refuses others too. leasing.Keep checks whether the database lets any run be settled.
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

// stepsWork returns nil if steps made for this could be settled. It rolls back.
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
		if _, err := w.record(ctx, tx, batch, outcomes, nil); err != nil {
			return err
		}
		return tried(ctx, tx)
	}))
	if err != nil {
		return fmt.Errorf("settle steps made as a control: %w", err)
	}
	return nil
}

// settleKept settles kept outcomes that are due for another try, until ctx ends, whenever any has a value: look
// gives it one. Any worker may have executed the runs.
func (w *Worker) settleKept(ctx context.Context, any chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-any:
		}
		start := time.Now()
		due, err := leasing.ToSettle(ctx, w.db, w.config.Prefixes, w.steps(), keptBatch)
		took := time.Since(start)
		if err != nil && ctx.Err() == nil {
			w.note(err)
			w.complain("cannot look for outcomes that are kept; trying again", "err", err)
		}
		if w.settleAllKept(ctx, due) {
			poke(any) // others that were refused for the same reason are due now
			continue
		}
		sleep(ctx, max(keptPause, min(20*took, keptMost)))
	}
}

// settleAllKept settles kept outcomes, and reports whether any was settled.
func (w *Worker) settleAllKept(ctx context.Context, due []leasing.Kept) (any bool) {
	var jobs []*job
	for _, k := range due {
		j := &job{Lease: k.Lease, entry: w.lookup(k.Type), outcome: k.Outcome, done: true, kept: &k}
		if j.row = k.MaxAttempts; k.Verdict == settling.TryAgain && k.Told == nil {
			_, j.outcome.Most = w.most(j)
			if j.Follows && j.Attempt >= cmp.Or(j.outcome.Most, j.row) { // the policy was lowered meanwhile; the retry that was decided is still made
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

// settleManyKept settles a batch without effects. A batch that is refused is halved until the refused outcome
// is alone.
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

// settleOneKept tries to settle one kept outcome, and reports whether it was settled.
func (w *Worker) settleOneKept(ctx context.Context, j *job) bool {
	err := w.recordKept(ctx, []*job{j})
	if failedByHook(err) != nil && w.blame(j, err) {
		err = w.recordKept(ctx, []*job{j})
	}
	if err == nil || ctx.Err() != nil {
		return err == nil
	}
	w.complain("a kept outcome is still refused", "run", j.ID, "err", err)
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	if transient(err) || w.othersGoThrough(call, j, err) != nil {
		w.note(err)
	} else if err := leasing.RefusedAgain(call, w.db, *j.kept, err); err != nil {
		w.complain("cannot record that a kept outcome is refused again", "err", err)
	}
	return false
}

// recordKept records kept outcomes like any others, hooks included. The effects of a kept outcome are lost. So
// an outcome with effects comes alone, and is only tried and rolled back: if it could be recorded, its lease is
// left to be taken back.
func (w *Worker) recordKept(ctx context.Context, batch []*job) (err error) {
	ctx, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	start := time.Now()
	all := make([]leasing.Kept, len(batch))
	for i, j := range batch {
		all[i] = *j.kept
	}
	var still []*job // those that no other worker has settled meanwhile
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
		if lost, err = w.record(ctx, tx, still, outcomes, nil); err == nil && still[0].kept.Effects {
			return tried(ctx, tx)
		}
		return err
	})
	if w.config.Observe.SettleRun != nil && !errors.Is(err, errUndone) {
		w.config.Observe.SettleRun(len(batch), time.Since(start), err)
	}
	switch {
	case errors.Is(err, errUndone):
		w.logger(&batch[0].Lease).Info("a kept outcome could be recorded, but its effects are lost; its lease will be taken back")
		_, err = leasing.Over(ctx, w.db, all)
	case err == nil:
		w.settled(still, lost, true)
	}
	return err
}

// A packedEvent is an event as stored in workflow_kept.
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
