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

// Whose error it is that an outcome is refused alone.
const (
	ofStatement = iota // the statement's: it goes through for no other either
	unknown            // nobody could be asked
	unsure             // it goes through for another, now; whether it is refused for this one still the next try tells
	ofOutcome
)

// A sureness is what is known of one outcome that is refused.
type sureness struct {
	failed     time.Time // when it was last refused
	controlled bool      // since then the statement went through for another
}

// whose tells whose error err is, which has refused an outcome alone, and notes in s what is known now.
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

// control returns nil if what an outcome is refused by goes through for a control. For the statement that settles, that is a run which is made for
// this, and for its events another one. For a hook's statements see hookWorks.
func (w *Worker) control(ctx context.Context, j *job, err error, failed time.Time) error {
	if errors.As(err, new(*leasing.SettleError)) {
		return nil // the hook says itself that it is this one
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
		return errors.New("no run that is made for this can be settled")
	case len(j.extras.events) > 0:
		return w.tryEvent(call, j)
	}
	return nil
}

// hookWorks returns nil if a hook's statements go through for a control: another outcome that was recorded with the hook since then,
// a plain failure of this run, or, for a step, steps that are made for this.
func (w *Worker) hookWorks(ctx context.Context, j *job, hook *hookError, since time.Time) error {
	switch {
	case !since.IsZero() && w.hooked[hook.hook].time().After(since):
		return nil
	case j.Step != uuid.Nil:
		return w.stepsWork(ctx)
	}
	return w.tryFailure(ctx, j)
}

// tryEvent returns nil if another event could be appended with the run's outcome. It is tried, and undone.
func (w *Worker) tryEvent(ctx context.Context, j *job) error {
	return undone(w.transact(ctx, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if err := outbox.Append(ctx, tx, outbox.Event{Aggregate: j.ID, Type: "workflow.control", Payload: struct{}{}}); err != nil {
			return err
		}
		return errUndone
	}))
}

// tryFailure returns nil if a plain failure of the run could be recorded instead of its outcome. It is tried, and undone.
func (w *Worker) tryFailure(ctx context.Context, j *job) error {
	failure := settling.NewFailure(rejected(errUndone), j.Info)
	other := &job{Lease: j.Lease, outcome: settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Fail, Failure: failure}}
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	return undone(w.transact(call, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if _, err := w.record(call, tx, []*job{other}, []settling.Outcome{other.outcome}); err != nil {
			return err
		}
		return tried(call, tx)
	}))
}

// errUndone rolls a transaction back that was only to be tried.
var errUndone = errors.New("tried, and undone")

// tried ends a transaction that is to be undone: what is deferred would be refused at its commit.
func tried(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
		return err
	}
	return errUndone
}

// undone returns nil for what has gone through, and was undone.
func undone(err error) error {
	if errors.Is(err, errUndone) {
		return nil
	}
	return err
}
