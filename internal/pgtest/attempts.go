package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// Attempts has runs that say nothing be tried n times, in place of what is shipped. Workers that run already have it a second later.
func Attempts(t testing.TB, db interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
}, n int) {
	t.Helper()
	if _, err := db.Exec(t.Context(), `SELECT workflow_set_policy('*', attempts => $1)`, n); err != nil {
		t.Fatal(err)
	}
}
