package leasing_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// unlimited returns terms that restrict nothing.
func unlimited(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Room: -1} }

func newPoller(db run.DB, prefixes ...string) *leasing.Poller {
	return &leasing.Poller{DB: db, Prefixes: prefixes, Worker: "w1", Terms: unlimited}
}

// acquire leases up to n runs, with room for any number of suspects.
func acquire(t *testing.T, p *leasing.Poller, n int) []leasing.Lease {
	t.Helper()
	leases, _, err := p.Acquire(t.Context(), n, n)
	if err != nil {
		t.Fatal(err)
	}
	return leases
}

// one leases the only due run.
func one(t *testing.T, p *leasing.Poller) leasing.Lease {
	t.Helper()
	p.Discover()
	leases := acquire(t, p, 2)
	if len(leases) != 1 {
		t.Fatalf("leased %d runs, want 1", len(leases))
	}
	return leases[0]
}

func exec(t *testing.T, db run.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](t *testing.T, db run.DB, sql string, args ...any) T {
	t.Helper()
	rows, _ := db.Query(t.Context(), sql, args...)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// add enqueues a run that has been due for the given time.
func add(t *testing.T, db run.DB, typ string, priority int, due time.Duration) uuid.UUID {
	t.Helper()
	return query[uuid.UUID](t, db, `
		INSERT INTO workflow_run (type, priority, run_at)
		VALUES ($1, $2, now() - $3::interval)
		RETURNING id`, typ, priority, due)
}

// addMany enqueues n runs, the first due an hour ago and each a millisecond after the last.
func addMany(t *testing.T, db run.DB, n int, typ string, priority int) {
	t.Helper()
	exec(t, db, `
		INSERT INTO workflow_run (type, priority, run_at)
		SELECT $2, $3, now() - interval '1 hour' + g * interval '1 ms'
		FROM generate_series(1, $1) AS g`, n, typ, priority)
}

func read(t *testing.T, db run.DB, id uuid.UUID) *run.Run {
	t.Helper()
	r, err := run.Read(t.Context(), db, id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// begin starts a transaction on a connection of its own. It is rolled back when t ends.
func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tx
}

func commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func settle(t *testing.T, db run.DB, leases ...leasing.Lease) {
	t.Helper()
	outcomes := make([]settling.Outcome, len(leases))
	for i, l := range leases {
		outcomes[i] = settling.Outcome{ID: l.ID, Token: l.Token, Verdict: settling.Succeed}
	}
	refused, err := settling.Settle(t.Context(), db, "w1", outcomes)
	if err != nil || len(refused) > 0 {
		t.Fatalf("settle: refused %d, %v", len(refused), err)
	}
}

// settledServer waits until the server has been up long enough for leases to be taken back.
func settledServer(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	pgtest.Await(t, "the server has been up for two seconds", func() bool {
		return query[bool](t, pool, "SELECT pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'")
	})
	return pool
}

// types lists the leases' types in order.
func types(leases []leasing.Lease) (list []string) {
	for _, l := range leases {
		list = append(list, l.Type)
	}
	return list
}

// names lists type and priority of the leases in order.
func names(leases []leasing.Lease) (list []string) {
	for _, l := range leases {
		list = append(list, fmt.Sprint(l.Type, " ", l.Priority))
	}
	return list
}

// byHand executes a statement past the guards, as the owner may.
func byHand(t *testing.T, db *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	tx := begin(t, db)
	exec(t, tx, `SET LOCAL workflow.override = 'a test needs it'`)
	exec(t, tx, sql, args...)
	commit(t, tx)
}
