package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
)

const (
	// settleTimeout bounds a try to settle: a row that somebody has locked does not keep the
	// others waiting for long. A third of their lease is the most: meanwhile no heartbeat can
	// extend them.
	settleTimeout = 3 * time.Second
	// lockTimeout bounds the wait for a row in a settle transaction, effects aside.
	lockTimeout = time.Second
	// rollbackTimeout bounds a rollback. The connection is closed if it takes longer.
	rollbackTimeout = 500 * time.Millisecond
	// effectTimeout is the most a settle transaction with effects may take.
	effectTimeout = time.Minute
)

// commit records a batch in one statement, or in one transaction where hooks, effects or
// events take part. Transactions are opened here, and for what is kept (kept.go). lost are
// those whose lease is no longer ours.
func (w *Worker) commit(ctx context.Context, batch []*job) (lost []settling.Outcome, err error) {
	if batch[0].outcome.Verdict == settling.HandOn { // it comes alone
		return w.handOn(ctx, batch[0])
	}
	outcomes := make([]settling.Outcome, len(batch))
	plain, effects := !w.concerned(batch), false
	for i, j := range batch {
		outcomes[i] = j.outcome
		effects = effects || len(j.extras.effects) > 0
		plain = plain && !effects && len(j.extras.events) == 0
	}
	limit := settleTimeout
	for _, j := range batch {
		limit = min(limit, j.Length/3)
	}
	idle := limit
	if effects { // the user's own statements may take their time
		limit, idle = w.effectTimeout, min(w.effectTimeout, batch[0].Length)
	}
	ctx, done := context.WithTimeout(ctx, limit)
	defer done()
	defer func() {
		if err == nil && len(lost) < len(batch) {
			w.hasWritten(ctx)
		}
	}()
	if plain {
		return settling.Settle(ctx, w.db, w.name, outcomes)
	}
	recorded := false
	err = w.transact(ctx, bounded(limit, idle), func(tx pgx.Tx) error {
		lost, err = w.record(ctx, tx, batch, outcomes)
		recorded = err == nil
		return err
	})
	if recorded && effects && (refused(err) || errors.Is(err, pgx.ErrTxCommitRollback)) {
		err = &effectError{err} // a deferred constraint, say
	}
	return lost, err
}

// transact calls f within a transaction, and commits that unless f returns an error. It rolls back after ctx has
// ended, too: a connection that is left within a transaction could only be closed.
func (w *Worker) transact(ctx context.Context, options pgx.TxOptions, f func(pgx.Tx) error) error {
	tx, err := w.db.BeginTx(ctx, options)
	if err != nil {
		return err
	}
	defer func() {
		call, done := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer done()
		_ = tx.Rollback(call) // after a commit it does nothing
	}()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// concerned reports whether a hook is about any of the batch.
func (w *Worker) concerned(batch []*job) bool {
	for _, h := range w.engine.hooks {
		for _, j := range batch {
			if h.IsAbout(&j.Lease) {
				return true
			}
		}
	}
	return false
}

// bounded has the server end the transaction if this process no longer can: frozen in the
// middle of it, it would keep its rows locked, and nobody could take its leases back. What two transactions
// agree on by locks, the one that has waited has to see: so it is READ COMMITTED, whatever the default is.
func bounded(statement, idle time.Duration) pgx.TxOptions {
	return pgx.TxOptions{BeginQuery: fmt.Sprintf(`begin isolation level read committed; SET LOCAL statement_timeout = %d; SET LOCAL idle_in_transaction_session_timeout = %d; SET LOCAL lock_timeout = %d`,
		statement.Milliseconds(), idle.Milliseconds(), min(lockTimeout, statement/2).Milliseconds())}
}

// record is what a settle transaction consists of: lock, settle, effects, act, announce.
func (w *Worker) record(ctx context.Context, tx pgx.Tx, batch []*job, outcomes []settling.Outcome) (lost []settling.Outcome, err error) {
	settlements := make([]leasing.Settlement, len(batch))
	for i, j := range batch {
		settlements[i] = leasing.Settlement{Lease: j.Lease, Outcome: j.outcome}
	}
	first := &pgx.Batch{}
	acts, err := w.begin(tx, first, settlements)
	if err != nil {
		return nil, err
	}
	if err := settling.Queue(first, w.name, outcomes, &lost); err != nil {
		return nil, err
	}
	if slices.ContainsFunc(acts, func(a hook.Act) bool { return a != nil }) {
		session.Planned(tx.Conn(), first) // nothing is known of their statements
	}
	if err := tx.SendBatch(ctx, first).Close(); err != nil {
		return nil, err
	}
	gone := fences(lost)
	kept := settlements[:0:0]
	var events []outbox.Event
	effects := false
	for i, j := range batch {
		if gone[fenceOf(j.outcome)] {
			continue
		}
		kept = append(kept, settlements[i])
		events = append(events, j.extras.events...)
		effects = effects || len(j.extras.effects) > 0
		if err := w.applyAll(ctx, tx, j); err != nil {
			return nil, err
		}
	}
	if effects { // what hooks have read, effects may have changed: they begin again
		again := &pgx.Batch{}
		if acts, err = w.begin(tx, again, kept); err != nil {
			return nil, err
		}
		if err := tx.SendBatch(ctx, again).Close(); err != nil {
			return nil, err
		}
	}
	for i, h := range w.engine.hooks {
		if err := act(ctx, i, tx, acts[i], h.Of(kept)); err != nil {
			return nil, err
		}
	}
	if err := outbox.Append(ctx, tx, events...); err != nil {
		return lost, &eventError{err}
	}
	return lost, nil
}

// An eventError is the database's answer to events that handlers have emitted.
type eventError struct{ err error }

func (e *eventError) Error() string { return e.err.Error() }
func (e *eventError) Unwrap() error { return e.err }

// begin has hooks queue what comes first, and returns what each does afterwards.
func (w *Worker) begin(tx pgx.Tx, first *pgx.Batch, settlements []leasing.Settlement) ([]hook.Act, error) {
	acts := make([]hook.Act, len(w.engine.hooks))
	for i, h := range w.engine.hooks {
		var err error
		if acts[i], err = begin(h, i, tx, first, h.Of(settlements)); err != nil {
			return nil, err
		}
	}
	return acts, nil
}
