package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// Attempts sets how many attempts runs with the default max_attempts have, in place of the shipped policy. Workers
// that already run apply it within a second.
func Attempts(t testing.TB, db interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
}, n int) {
	t.Helper()
	if _, err := db.Exec(t.Context(), `SELECT workflow_set_policy('*', attempts => $1)`, n); err != nil {
		t.Fatal(err)
	}
}
