package pgtest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	patience = 20 * time.Second
	interval = 3 * time.Millisecond
)

// Await returns when cond is true, and fails t if that takes more than twenty
// seconds. The text says what was waited for, as in "the run succeeds".
func Await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	AwaitFor(t, patience, what, cond)
}

// AwaitFor is Await with a limit of its own.
func AwaitFor(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	if !poll(limit, cond) {
		t.Fatalf("waited %v in vain: %s", limit, what)
	}
}

// Blocked returns when at least n sessions of the pool's database wait for a
// lock, and fails t if that takes more than twenty seconds. It looks through a
// connection of its own, so the pool may be exhausted.
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

// poll reports whether cond became true within limit. It is asked at least
// once.
func poll(limit time.Duration, cond func() bool) bool {
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			return false
		}
		<-tick.C
	}
	return true
}
