package pgtest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// patience is long, so that a slow or busy machine does not make a test fail. A test that passes does not wait for
// it.
const patience = 5 * time.Minute

// Await returns when cond is true, and fails t if that takes more than five
// minutes. The text says what was waited for, as in "the run succeeds".
func Await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	awaitFor(t, patience, what, cond)
}

func awaitFor(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	if !poll(limit, cond) {
		t.Fatalf("waited %v in vain: %s", limit, what)
	}
}

// Blocked returns when at least n sessions of the pool's database wait for a lock, and fails t if that takes longer
// than Await waits. It uses a connection of its own, so the pool may be exhausted.
func Blocked(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	Await(t, fmt.Sprintf("%d sessions wait for a lock", n), func() bool {
		var blocked int
		err := conn.QueryRow(ctx, `
			SELECT count(*)
			FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&blocked)
		if err != nil {
			t.Fatal(err)
		}
		return blocked >= n
	})
}

// poll reports whether cond became true within limit. It calls cond at once, then every few milliseconds, then less
// often: the longer it has waited, the less a delay matters, and calling cond takes time from what is waited for.
func poll(limit time.Duration, cond func() bool) bool {
	begun := time.Now()
	for !cond() {
		passed := time.Since(begun)
		if passed > limit {
			return false
		}
		time.Sleep(min(max(passed/20, 3*time.Millisecond), 50*time.Millisecond))
	}
	return true
}
