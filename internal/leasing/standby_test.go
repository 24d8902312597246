package leasing_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/sql"
)

// Leases whose commit still waits for a standby when the call ends are in doubt, although the server answers with
// success, because a failover would lose them.
func TestLeaseThatNoStandbyHas(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Options{Durable: true})
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	session.Prepare(config)
	session.Spare(config.ConnConfig)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := sql.Up(t.Context(), conn.Conn()); err != nil {
		t.Fatal(err)
	}
	conn.Release()
	exec(t, pool, `INSERT INTO workflow_run (type) VALUES ('test.a.v1')`)
	exec(t, pool, `ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	pgtest.Await(t, "the setting to be read", func() (set bool) {
		return pool.QueryRow(t.Context(), `SELECT current_setting('synchronous_standby_names') = 'nobody'`).Scan(&set) == nil && set
	})
	p := &leasing.Poller{DB: pool, Prefixes: []string{"test."}, Worker: "w", Doubts: &leasing.Doubts{},
		Terms: func(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Room: -1} }}
	ctx, done := context.WithTimeout(t.Context(), 5*time.Second)
	defer done()
	leases, _, err := p.Acquire(ctx, 10, 1)
	if err == nil || len(leases) > 0 || p.Doubts.Left() != 1 {
		t.Fatalf("%d leases, %d requests in doubt, error %v; want none, one and some error", len(leases), p.Doubts.Left(), err)
	}
	exec(t, pool, `ALTER SYSTEM RESET synchronous_standby_names`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	pgtest.Await(t, "the run to be given back and leased", func() bool {
		leases, _, err := p.Acquire(t.Context(), 10, 1)
		return err == nil && len(leases) == 1 && leases[0].Attempt == 1
	})
}
