package worker_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A worker removes old rows of its prefixes, and of no others, unless that is turned off. It can do so with a
// role that is bound to these prefixes.
func TestRetention(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	left := func(typ string) (n int) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE type = $1`, typ).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, typ := range []string{"test.a.v1", "other.a.v1"} {
		execute(t, pool, `INSERT INTO workflow_run (type) VALUES ('`+typ+`')`)
	}
	execute(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	_, stop := work(t, pool, worker.NewMux(), func(c *worker.Config) { c.Retention = worker.Retention{Off: true, Finished: time.Hour} })
	pgtest.Await(t, "a worker that has it off to be there for a while", func() bool {
		var n int
		return pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_worker WHERE seen_at > started_at + interval '2 seconds'`).Scan(&n) == nil && n == 1
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if n := left("test.a.v1"); n != 1 {
		t.Error("a worker removes what is old although that is off")
	}
	named := pgtest.Roles(t, pool)
	if err := pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
		return sql.BindWorker(t.Context(), c.Conn(), named, named+"_bound", []string{"test."})
	}); err != nil {
		t.Fatal(err)
	}
	work(t, pgtest.As(t, pool, named, "bound"), worker.NewMux(), func(c *worker.Config) { c.Retention = worker.Retention{Every: time.Second, Finished: time.Hour} })
	pgtest.Await(t, "what is old to be gone", func() bool { return left("test.a.v1") == 0 })
	if n := left("other.a.v1"); n != 1 {
		t.Error("what is of another prefix is gone")
	}
}
