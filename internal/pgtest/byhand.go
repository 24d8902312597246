package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
)

// ByHand executes a statement as the owner who overrides the guards: the statement is executed, and recorded in
// workflow_override. CHECKs and foreign keys still hold.
func ByHand(t testing.TB, db interface {
	Begin(context.Context) (pgx.Tx, error)
}, statement string, args ...any) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL workflow.override = 'a test needs it'`); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), statement, args...)
		return err
	})
	if err != nil {
		t.Fatalf("%.200s: %v", statement, err)
	}
}
