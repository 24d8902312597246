package survival

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// The model describes what happens to outcomes that the database refuses: they are kept, their leases run out but are
// not reclaimed, and another worker settles them, or a person cancels or fails their runs. A run with effects is
// reclaimed once its outcome could be recorded.
func TestWhatIsKept(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	first := start(t, url, "first")
	kept, cancelled, toFail, effect := odd(t, pool, "chaos.sleep"), odd(t, pool, "chaos.sleep"), odd(t, pool, "chaos.sleep"), odd(t, pool, "chaos.effect")
	refuse(t, pool, "chaos.")
	areKept(t, pool, 4)
	execute(t, pool, `SELECT workflow_cancel($1, 'enough')`, cancelled)
	execute(t, pool, `SELECT workflow_fail($1, 'it is no use')`, toFail)
	pgtest.Await(t, "their leases to run out", func() bool {
		return number(t, pool, `SELECT count(*) FROM workflow_run WHERE lease_until < now() - interval '1 second'`) == 3
	})
	if n := number(t, pool, `SELECT sum(workflow_release(name, 'test'))::int FROM (SELECT DISTINCT leased_by AS name FROM workflow_run WHERE leased_by <> '') AS w`); n != 0 {
		t.Errorf("%d leases were released", n)
	}
	first.signal(syscall.SIGTERM)
	if err := <-first.ended; err != nil {
		t.Errorf("the worker ended with %v, want exit code 0", err)
	}
	start(t, url, "second")
	time.Sleep(lease)
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	settled(t, pool)
	check(t, pool)
	for _, c := range []struct {
		what, is string
		id       uuid.UUID
	}{
		{"that is kept", "status = 'succeeded' AND attempt = 1 AND settled_by LIKE 'second-%'", kept},
		{"that was cancelled", "status = 'cancelled'", cancelled},
		{"that was failed", "status = 'failed' AND settled_by LIKE 'second-%'", toFail},
		{"whose effects were lost", "status = 'succeeded' AND attempt = 2 AND lease_no = 2", effect},
	} {
		if number(t, pool, `SELECT count(*) FROM workflow_run WHERE id = $1 AND `+c.is, c.id) != 1 {
			t.Errorf("the run %s: not %s", c.what, c.is)
		}
	}
}

// The model has no step that reclaims a lease whose outcome is kept, so the replay reports one. Here workers reclaim
// such a lease because their database does not look for kept outcomes.
func TestKeptAndTakenBack(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	id := odd(t, pool, "chaos.sleep")
	refuse(t, pool, "chaos.")
	start(t, url, "first")
	areKept(t, pool, 1)
	execute(t, pool, `CREATE TABLE nothing_kept (LIKE workflow_kept)`)
	execute(t, pool, `DO $$ BEGIN EXECUTE (SELECT replace(pg_get_functiondef(p.oid), 'workflow_kept', 'nothing_kept') FROM pg_proc p WHERE p.proname = 'workflow_expired'); END $$`)
	pgtest.Await(t, "it to be taken back", func() bool {
		execute(t, pool, `DELETE FROM workflow_set_aside`)
		return number(t, pool, `SELECT count(*) FROM workflow_run WHERE id = $1 AND suspect`, id) == 1
	})
	v := verdicts(t, pool, mostHeld)
	if len(v.Wrong) != 1 || v.Wrong[0].Run != id || !strings.Contains(v.Wrong[0].What, "the model has no take back by which it, having been leased, attempt 1 of 3, lease 1") {
		t.Errorf("the replay finds %v, want the take-back", v.Wrong)
	}
}

// While outcomes are refused, a worker holds more leases than it has slots, whether some or all of its outcomes are
// refused. The replay accounts for that.
func TestParked(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]string{"some": "chaos.", "all": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			pool := connect(t, url)
			refuse(t, pool, of)
			for range 3 * slots {
				odd(t, pool, "chaos.sleep")
			}
			start(t, url, "first")
			pgtest.Await(t, "it to hold more than it has slots", func() bool {
				return number(t, pool, `SELECT count(*) FROM workflow_run r WHERE lease_until > now() AND NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = r.id)`) > slots
			})
			time.Sleep(2 * lease)
			execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
			settled(t, pool)
			check(t, pool)
		})
	}
}

func odd(t *testing.T, pool *pgxpool.Pool, typ string) uuid.UUID {
	t.Helper()
	added, err := run.Enqueue(t.Context(), pool, run.New{Type: typ, Payload: map[string]any{"ms": 1500, "key": "k"}, MaxAttempts: 3})
	if err != nil {
		t.Fatal(err)
	}
	return added.ID
}

// refuse makes the database refuse every outcome of runs of a prefix, but not that they are reclaimed.
func refuse(t *testing.T, pool *pgxpool.Pool, prefix string) {
	t.Helper()
	execute(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$`)
	execute(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW
		WHEN (OLD.type ^@ '`+prefix+`' AND OLD.status = 'leased' AND NEW.status IN ('succeeded', 'failed')) EXECUTE FUNCTION refuse()`)
}

func areKept(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	pgtest.Await(t, "what is refused to be kept", func() bool { return number(t, pool, `SELECT count(*) FROM workflow_kept`) == n })
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
