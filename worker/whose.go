package worker

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// Whose error it is that an outcome is refused alone.
const (
	ofStatement = iota // the statement's: it goes through for no other either
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
	works, controlled := w.works(ctx, j, err, s.failed), s.controlled
	s.failed, s.controlled = time.Now(), works
	switch {
	case !works:
		return ofStatement
	case !controlled:
		return unsure
	}
	return ofOutcome
}

// works reports whether what an outcome is refused by goes through for a control. For the statement that settles, that is a run which is made for
// this, and for its events another one. For a hook's statements it is another outcome that was recorded with hooks since failed, or a plain failure of this run; for a step, steps that are made for this.
func (w *Worker) works(ctx context.Context, j *job, err error, failed time.Time) bool {
	if errors.As(err, new(*lease.SettleError)) {
		return true // the hook says itself that it is this one
	}
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	if !errors.As(err, new(*hookError)) {
		works, problem := lease.Works(call, w.db, "settle")
		return works && problem == nil && (len(j.extras.events) == 0 || w.appends(call, j))
	}
	if !failed.IsZero() && w.hooked.time().After(failed) {
		return true
	}
	if j.Step == uuid.Nil {
		return w.failable(call, j)
	}
	return w.othersGoThrough(call, &j.Lease) == nil
}

// appends reports whether another event could be appended with the run's outcome. It is tried, and undone.
func (w *Worker) appends(ctx context.Context, j *job) bool {
	problem := pgx.BeginTxFunc(ctx, w.db, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if err := outbox.Append(ctx, tx, outbox.Event{Aggregate: j.ID, Type: "workflow.control", Payload: struct{}{}}); err != nil {
			return err
		}
		return errUndone
	})
	return errors.Is(problem, errUndone)
}

// failable reports whether a plain failure of the run could be recorded instead of its outcome. It is tried, and undone.
func (w *Worker) failable(ctx context.Context, j *job) bool {
	call, done := context.WithTimeout(ctx, settleTimeout)
	defer done()
	failure := run.NewFailure(rejected(errUndone), j.Info)
	other := &job{Lease: j.Lease, outcome: run.Outcome{ID: j.ID, Token: j.Token, Verdict: run.Fail, Failure: failure}}
	problem := pgx.BeginTxFunc(call, w.db, bounded(settleTimeout, settleTimeout), func(tx pgx.Tx) error {
		if _, err := w.record(call, tx, []*job{other}, []run.Outcome{other.outcome}); err != nil {
			return err
		}
		return tried(call, tx)
	})
	return errors.Is(problem, errUndone)
}
