package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/run"
)

// An effectError is an error that counts as the handler's: it comes from an effect, and is no passing trouble
// of the database.
type effectError struct{ err error }

func (e *effectError) Error() string { return e.err.Error() }
func (e *effectError) Unwrap() error { return e.err }

// A brokenError is an effect's error after which the connection was gone. Its text stays out of the log,
// because it is the user's.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return "effect: the connection broke" }
func (e *brokenError) Unwrap() error { return e.err }

// afterthought is how long an effect may continue after its connection was cut. Then it is abandoned.
const afterthought = time.Second

// applyAll calls a job's effects. It first restores the user's lock_timeout and planner settings, so that
// effects may wait for locks as long as they like.
func (w *Worker) applyAll(ctx context.Context, tx pgx.Tx, j *job) error {
	if len(j.extras.effects) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout TO DEFAULT; `+session.Unset, pgx.QueryExecModeSimpleProtocol); err != nil {
		return err
	}
	for _, effect := range j.extras.effects {
		if err := w.apply(ctx, tx, effect); err != nil {
			return err
		}
	}
	return nil
}

// apply calls one effect, and cuts the connection if the effect continues after ctx has ended. An effect that
// ends the transaction, or leaves it aborted, is an error.
func (w *Worker) apply(ctx context.Context, tx pgx.Tx, effect func(pgx.Tx) error) error {
	conn := tx.Conn()
	cut := context.AfterFunc(ctx, func() { _ = conn.PgConn().Conn().Close() })
	err := w.perform(ctx, tx, effect)
	cut()
	// Compare with the clock, since the server's own limit may end a statement before the timer of ctx has
	// fired.
	deadline, limited := ctx.Deadline()
	var pg *pgconn.PgError
	switch {
	case limited && !time.Now().Before(deadline), errors.As(err, &pg) && pg.Code == pgerrcode.IdleInTransactionSessionTimeout:
		return &effectError{errors.New("effect: the settle transaction took too long, or was left idle for longer than the lease")}
	case err != nil && pg != nil && (passing(pg.Code) || outdated(pg)):
		return fmt.Errorf("effect: %w", err) // settled again with the same outcome; no attempt is charged
	case conn.IsClosed() && !pgconn.Timeout(err):
		return &brokenError{err} // settled again too
	case err != nil:
		return &effectError{fmt.Errorf("effect: %w", err)}
	}
	switch conn.PgConn().TxStatus() {
	case 'E':
		return &effectError{errors.New("effect: a statement failed and its error was ignored; the transaction is aborted")}
	case 'I':
		return &effectError{errors.New("effect: it ended the settle transaction, which only the worker may end")}
	}
	return nil
}

// perform calls an effect in a goroutine of its own, so that an effect that calls runtime.Goexit or never
// returns cannot end or block the settling. An abandoned effect counts as stuck.
func (w *Worker) perform(ctx context.Context, tx pgx.Tx, effect func(pgx.Tx) error) error {
	open := &openTx{Tx: tx}
	done := make(chan error, 1)
	go func() {
		err := errors.New("it ended its goroutine (runtime.Goexit)")
		defer func() {
			if p := recover(); p != nil {
				err = &run.PanicError{Value: p, Stack: debug.Stack()}
			}
			done <- err
		}()
		err = effect(open)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(afterthought):
	}
	open.closed.Store(true)
	w.jobs.abandon(done)
	return context.Cause(ctx)
}

// An openTx is the transaction as an effect sees it. The effect cannot end it, and cannot use it once it is
// abandoned.
type openTx struct {
	pgx.Tx
	closed atomic.Bool
}

var errNotYours = errors.New("worker: the settle transaction is ended by the worker; return an error to roll it back")

func (*openTx) Commit(context.Context) error   { return errNotYours }
func (*openTx) Rollback(context.Context) error { return errNotYours }

func (t *openTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	if t.closed.Load() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	return t.Tx.Exec(ctx, query, args...)
}

func (t *openTx) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	if t.closed.Load() {
		return nil, pgx.ErrTxClosed
	}
	return t.Tx.Query(ctx, query, args...)
}

// outdated reports whether a prepared statement is unusable. The next try prepares it anew.
func outdated(err *pgconn.PgError) bool {
	return session.Lost(err) || err.Code == pgerrcode.FeatureNotSupported && err.Routine == "RevalidateCachedQuery" // its table was altered
}

// passing reports whether an SQLSTATE in an effect is trouble of the database that has nothing to do with the
// effect. Timeouts are not included, because they would be repeated without end.
func passing(code string) bool {
	switch code[:min(2, len(code))] {
	case "08", "40", "53", "58":
		return true
	}
	return strings.HasPrefix(code, "57P")
}
