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

// apply calls one effect. It may not end the transaction, nor leave it aborted.
func apply(tx pgx.Tx, effect func(pgx.Tx) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &effectError{&run.PanicError{Value: p, Stack: debug.Stack()}}
		}
	}()
	err = effect(openTx{tx})
	var pg *pgconn.PgError
	switch {
	case err != nil && (tx.Conn().IsClosed() && !pgconn.Timeout(err) || errors.As(err, &pg) && passing(pg.Code)):
		return fmt.Errorf("effect: %w", err) // the same again, charged to nobody
	case err != nil:
		return &effectError{fmt.Errorf("effect: %w", err)}
	case tx.Conn().PgConn().TxStatus() == 'E':
		return &effectError{errors.New("effect: a statement failed and its error was ignored; the transaction is aborted")}
	}
	return nil
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
