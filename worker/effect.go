package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/run"
)

// An effectError is an error that counts as the handler's, because it comes from an effect
// and is not the database's passing trouble.
type effectError struct{ err error }

func (e *effectError) Error() string { return e.err.Error() }
func (e *effectError) Unwrap() error { return e.err }

// A brokenError is an effect's error after which the connection was gone. Its text stays
// out of the log: it is the user's.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return "effect: the connection broke" }
func (e *brokenError) Unwrap() error { return e.err }

// apply calls one effect, and cuts the connection if it goes on after ctx has ended. The
// effect may not end the transaction, nor leave it aborted.
func apply(ctx context.Context, tx pgx.Tx, effect func(pgx.Tx) error) error {
	conn := tx.Conn()
	cut := context.AfterFunc(ctx, func() { _ = conn.PgConn().Conn().Close() })
	err := perform(tx, effect)
	cut()
	var pg *pgconn.PgError
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &effectError{errors.New("effect: the settle transaction took too long")}
	case err != nil && errors.As(err, &pg) && passing(pg.Code):
		return fmt.Errorf("effect: %w", err) // the same again, charged to nobody
	case conn.IsClosed() && !pgconn.Timeout(err):
		return &brokenError{err} // likewise
	case err != nil:
		return &effectError{fmt.Errorf("effect: %w", err)}
	}
	switch conn.PgConn().TxStatus() {
	case 'E':
		return &effectError{errors.New("effect: a statement failed and its error was ignored; the transaction is aborted")}
	case 'I':
		return &effectError{errors.New("effect: it ended the settle transaction, which is the worker's to end")}
	}
	return nil
}

// perform calls an effect in a goroutine of its own, so that not even runtime.Goexit in it
// ends the settling.
func perform(tx pgx.Tx, effect func(pgx.Tx) error) error {
	err := errors.New("it ended its goroutine (runtime.Goexit)")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = &run.PanicError{Value: p, Stack: debug.Stack()}
			}
		}()
		err = effect(openTx{tx})
	}()
	<-done
	return err
}

// An openTx is a transaction that an effect cannot end.
type openTx struct{ pgx.Tx }

var errNotYours = errors.New("worker: the settle transaction is ended by the worker; return an error to roll it back")

func (openTx) Commit(context.Context) error   { return errNotYours }
func (openTx) Rollback(context.Context) error { return errNotYours }

// passing reports whether an error code in an effect is trouble of the database's that has
// nothing to do with the effect. Timeouts are not: they would repeat without end.
func passing(code string) bool {
	switch code[:min(2, len(code))] {
	case "08", "40", "53", "58":
		return true
	}
	return strings.HasPrefix(code, "57P")
}
