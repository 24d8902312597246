package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
)

const (
	// settleTimeout bounds one try to settle, so that a locked row does not delay the other outcomes for long.
	// A try may take a third of the shortest lease at most, because no heartbeat can extend the leases
	// meanwhile.
	settleTimeout = 3 * time.Second
	// lockTimeout bounds the wait for a row lock in a settle transaction. Effects are exempt.
	lockTimeout = time.Second
	// rollbackTimeout bounds a rollback. If it takes longer, the connection is closed.
	rollbackTimeout = 500 * time.Millisecond
	// effectTimeout bounds a settle transaction with effects.
	effectTimeout = time.Minute
)

// commit records a batch: in one statement, or in one transaction if hooks, effects or events take part. lost
// are the outcomes whose leases are no longer ours. left reports whether runs wait for a poll that hooks have
// enqueued, or that are to be tried again.
func (w *Worker) commit(ctx context.Context, batch []*job) (lost []settling.Outcome, left bool, err error) {
	if batch[0].outcome.Verdict == settling.HandOn { // settled alone
		lost, err = w.handOn(ctx, batch[0])
		return lost, true, err
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
	if effects { // the user's statements may take longer
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
		lost, err = settling.Settle(ctx, w.db, w.name, outcomes)
		return lost, true, err
	}
	recorded, carrier := false, w.carry(batch)
	transact := w.transactAtOnce
	if effects {
		transact = w.transact
	}
	err = transact(ctx, bounded(limit, idle), func(tx pgx.Tx) error {
		lost, err = w.record(ctx, tx, batch, outcomes, carrier.leases())
		recorded = err == nil
		return err
	})
	w.carried(ctx, carrier, recorded, err)
	if recorded && effects && (refused(err) || errors.Is(err, pgx.ErrTxCommitRollback)) {
		err = &effectError{err} // a deferred constraint, for example
	}
	again := slices.ContainsFunc(outcomes, func(o settling.Outcome) bool { return o.Verdict != settling.Succeed && o.Verdict != settling.Fail })
	return lost, again || carrier.leases().Left(), err
}

// transact calls f in a transaction that start begins, and commits unless f returns an error.
func (w *Worker) transact(ctx context.Context, start []string, f func(pgx.Tx) error) error {
	tx, err := w.db.BeginTx(ctx, pgx.TxOptions{BeginQuery: strings.Join(start, "; ")})
	if err != nil {
		return err
	}
	return finish(ctx, tx, f)
}

// finish calls f in a transaction, and ends that. It rolls back even after ctx has ended, because a connection left
// inside a transaction could only be closed.
func finish(ctx context.Context, tx pgx.Tx, f func(pgx.Tx) error) error {
	defer func() {
		call, done := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer done()
		_ = tx.Rollback(call) // does nothing after a commit
	}()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// concerned reports whether a hook concerns any run of the batch.
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

// bounded returns statements that begin a transaction which the server ends when this process no longer can. A
// process frozen inside a transaction would keep its rows locked, and nobody could take its leases back. The
// transaction is READ COMMITTED whatever the default, because after a wait for a lock it must see what the
// holder of the lock has written.
func bounded(statement, idle time.Duration) []string {
	set := func(name string, limit time.Duration) string {
		return fmt.Sprintf(`SET LOCAL %s = %d`, name, limit.Milliseconds())
	}
	return []string{`begin isolation level read committed`,
		set("statement_timeout", statement), set("idle_in_transaction_session_timeout", idle), set("lock_timeout", min(lockTimeout, statement/2))}
}

// record runs the steps of a settle transaction: what hooks queue, the settling, effects, what hooks do after
// it, events. With a carrier, hooks may store further runs as leased.
func (w *Worker) record(ctx context.Context, tx pgx.Tx, batch []*job, outcomes []settling.Outcome, carrier *leasing.Carrier) (lost []settling.Outcome, err error) {
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
		session.Planned(tx.Conn(), first) // a hook's statements are planned with their values, since nothing is known of them
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
	if effects { // effects may have changed what the hooks read, so the hooks start over
		again := &pgx.Batch{}
		if acts, err = w.begin(tx, again, kept); err != nil {
			return nil, err
		}
		if err := tx.SendBatch(ctx, again).Close(); err != nil {
			return nil, err
		}
	}
	for i, h := range w.engine.hooks {
		if err := act(ctx, i, tx, acts[i], h.Of(kept), carrier); err != nil {
			return nil, err
		}
	}
	if err := outbox.Append(ctx, tx, events...); err != nil {
		return lost, &eventError{err}
	}
	return lost, nil
}

// An eventError is an error of appending the events that handlers have emitted.
type eventError struct{ err error }

func (e *eventError) Error() string { return e.err.Error() }
func (e *eventError) Unwrap() error { return e.err }

// begin calls Begin of all hooks, and returns what each hook does after the settling.
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
