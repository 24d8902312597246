package worker_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Calls that take too long are given up, and tried again through the same connections: opening others would give a server
// that is slow more to do.
func TestSlowCallsCostNoConnections(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	execute(`CREATE SEQUENCE tries; CREATE TABLE quick (); GRANT ALL ON SEQUENCE tries TO PUBLIC; GRANT SELECT ON quick TO PUBLIC;
		CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM nextval('tries'), pg_sleep(CASE WHEN EXISTS (SELECT FROM quick) THEN 0 ELSE 60 END);
			RETURN NEW;
		END
		$$;
		CREATE TRIGGER slow BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION slow()`)
	number := func(sql string) (n int) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	mux := worker.NewMux()
	handle(mux, "test.slow.v1", func(context.Context) error { return nil })
	config, err := pgxpool.ParseConfig(pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	var opened atomic.Int32
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { opened.Add(1); return nil }
	counted, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(counted.Close)
	work(t, counted, mux, func(c *worker.Config) { c.Lease, c.NoWakeUp = shipped.MinLease, true })
	id := enqueue(t, pool, "test.slow.v1", empty{})
	pgtest.Await(t, "many tries to settle", func() bool { return number(`SELECT last_value FROM tries`) > worker.Connections })
	if n := opened.Load(); n > worker.Connections {
		t.Errorf("%d connections were opened, want no more than %d at a time", n, worker.Connections)
	}
	execute(`ALTER TABLE quick ADD COLUMN now boolean; INSERT INTO quick VALUES (true)`)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("the run is %s after %d attempts, want succeeded after 1", r.Status, r.Attempt)
	}
}
