package worker

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
)

// Answers of whose.
const (
	ofStatement = iota // the statement's: it fails for a control too
	unknown            // the control could not be tried
	unsure             // it works for a control now; the next try shows whether this outcome is still refused
	ofOutcome
)

// A sureness is what is known so far about one refused outcome.
type sureness struct {
	failed     time.Time // when it was last refused
	controlled bool      // the control succeeded after that
}

// whose decides whose error err is, with which an outcome was refused while it was alone in its batch. It
// updates s.
func (w *Worker) whose(ctx context.Context, j *job, err error, s *sureness) int {
	problem, controlled := w.control(ctx, j, err, s.failed), s.controlled
	s.failed, s.controlled = time.Now(), problem == nil
	switch {
	case problem != nil && transient(problem):
		w.note(problem)
		return unknown
	case problem != nil:
		return ofStatement
	case !controlled:
		return unsure
	}
	return ofOutcome
}

// control returns nil if the refused statement succeeds for a control. For the settling the control is a run
// made for this, and for events another event. For a hook see hookWorks.
func (w *Worker) control(ctx context.Context, j *job, err error, failed time.Time) error {
	if errors.As(err, new(*leasing.SettleError)) {
		return nil // the hook itself blames this run
	}
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	var hook *hookError
	if errors.As(err, &hook) {
		return w.hookWorks(call, j, hook, failed)
	}
	works, problem := leasing.Works(call, w.db, "settle")
	switch {
	case problem != nil:
		return problem
	case !works:
		return errors.New("no run made as a control can be settled")
	case len(j.extras.events) > 0:
		return w.tryEvent(call, j)
	}
	return nil
}

// hookWorks returns nil if a hook's statements succeed for a control. That is another outcome recorded with the
// hook since the given time; or, for a step, steps made for this; or, for any other run, a plain failure of the
// same run.
func (w *Worker) hookWorks(ctx context.Context, j *job, hook *hookError, since time.Time) error {
	switch {
	case !since.IsZero() && w.hooked[hook.hook].time().After(since):
		return nil
	case j.Step != uuid.Nil:
		return w.stepsWork(ctx)
	}
	return w.tryFailure(ctx, j)
}

// tryEvent returns nil if another event could be appended for the run. It rolls back.
func (w *Worker) tryEvent(ctx context.Context, j *job) error {
	return undone(w.transact(ctx, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if err := outbox.Append(ctx, tx, outbox.Event{Aggregate: j.ID, Type: "workflow.control", Payload: struct{}{}}); err != nil {
			return err
		}
		return errUndone
	}))
}

// tryFailure returns nil if a plain failure of the run could be recorded instead of its outcome. It rolls back.
func (w *Worker) tryFailure(ctx context.Context, j *job) error {
	failure := settling.NewFailure(rejected(errUndone), j.Info)
	other := &job{Lease: j.Lease, outcome: settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Fail, Failure: failure}}
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	return undone(w.transact(call, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if _, err := w.record(call, tx, []*job{other}, []settling.Outcome{other.outcome}, nil); err != nil {
			return err
		}
		return tried(call, tx)
	}))
}

// errUndone rolls back a transaction that succeeded and was only a try.
var errUndone = errors.New("tried, and undone")

// tried ends a transaction that is only a try. It checks deferred constraints first, as a commit would.
func tried(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
		return err
	}
	return errUndone
}

// undone returns nil for a try that succeeded and was rolled back.
func undone(err error) error {
	if errors.Is(err, errUndone) {
		return nil
	}
	return err
}
