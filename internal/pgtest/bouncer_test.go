//go:build pooler

package pgtest_test

import (
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Through a bouncer many clients share few connections, and the query mode of New's pool works.
func TestBouncer(t *testing.T) {
	direct := pgtest.New(t)
	config, err := pgxpool.ParseConfig(pgtest.Bouncer(t, direct.Config().ConnString()))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 30
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	exec1(t, pool, "CREATE TABLE used (pid int)")

	var group sync.WaitGroup
	for range 60 {
		group.Go(func() {
			_, err := pool.Exec(t.Context(), "INSERT INTO used SELECT pg_backend_pid() FROM generate_series(1, $1)", 2)
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if n := query[int](t, direct, "SELECT count(*) FROM used"); n != 120 {
		t.Errorf("%d rows, want 120", n)
	}
	if n := query[int](t, direct, "SELECT count(DISTINCT pid) FROM used"); n > 10 {
		t.Errorf("%d connections to the server, want at most 10", n)
	}
}

// A bouncer that ended unexpectedly is available again at the same address.
func TestBouncerComesBack(t *testing.T) {
	url := pgtest.Bouncer(t, pgtest.URL(t))
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.Database = "pgbouncer" // its console
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	console, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = console.Exec(t.Context(), "SHUTDOWN")
	_ = console.Close(t.Context())
	pgtest.Await(t, "the bouncer to be back", func() bool {
		conn, err := pgx.Connect(t.Context(), url)
		return err == nil && conn.Close(t.Context()) == nil
	})
}

// A bouncer ends with its test.
func TestBouncerEnds(t *testing.T) {
	var url string
	t.Run("user", func(t *testing.T) { url = pgtest.Bouncer(t, pgtest.URL(t)) })
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Error("the bouncer still answers")
	}
}
