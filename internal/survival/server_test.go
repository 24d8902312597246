package survival

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// The server is stopped, killed and started again under load. Everything that was acknowledged stays, every run ends,
// each effect is there once, and no run is charged for a handler that lived through it.
func TestServerGoesAway(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{Durable: true})
	url := server.URL("postgres")
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	if err := sql.Up(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close(t.Context())
	pool := connect(t, url)
	start(t, url, "one")
	start(t, url, "two")
	effects(t, pool, 600, 100)
	for i, away := range []func(){server.Kill, func() { server.StopMode(pgserver.Immediate) }, func() { server.StopMode(pgserver.Fast) }} {
		want := 100 * (i + 1)
		pgtest.Await(t, "some runs to succeed", func() bool {
			var n int
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`).Scan(&n)
			return err == nil && n >= want
		})
		away()
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		pool.Reset() // its connections are broken
		back := time.Now()
		before := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`)
		pgtest.Await(t, "the first settle after the restart", func() bool {
			return number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) > before
		})
		if took := time.Since(back); took > 5*time.Second {
			t.Errorf("the first settle came %s after the server was back, want at most 5s", took)
		}
	}
	settled(t, pool)
	check(t, pool)
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`); n != 600 {
		t.Errorf("%d runs succeeded, want 600", n)
	}
	if n := number(t, pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`); n > 0 {
		t.Errorf("%d runs were charged for the server's absence, want 0", n)
	}
}
