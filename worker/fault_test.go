package worker_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// raise creates a trigger that raises an unusual SQLSTATE for updates of runs of a type.
func raise(t *testing.T, pool *pgxpool.Pool, typ, when string) {
	t.Helper()
	execute(t, pool, `CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = 'XX777'; END $$`)
	execute(t, pool, fmt.Sprintf(`CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = '%s' AND %s) EXECUTE FUNCTION refuse()`, typ, when))
}

// If a statement is refused for a row with any SQLSTATE, that row is reported with the statement, and all other
// rows continue.
func TestUnforeseenState(t *testing.T) {
	t.Parallel()
	for statement, when := range map[string]string{
		"lease":     `OLD.status = 'pending' AND NEW.status = 'leased'`,
		"extend":    `OLD.status = 'leased' AND NEW.status = 'leased' AND NEW.lease_no = OLD.lease_no`,
		"settle":    `OLD.status = 'leased' AND NEW.settled_token IS NOT NULL`,
		"take back": `OLD.status = 'leased' AND NEW.error->>'code' = 'lease_expired'`,
	} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			handle(mux, "test.bad.v1", func(context.Context) error { return nil })
			handle(mux, "test.good.v1", func(context.Context) error { return nil })
			var lost atomic.Int32
			handle(mux, "test.long.v1", func(ctx context.Context) error { // longer than two leases
				select {
				case <-time.After(5 * time.Second):
				case <-ctx.Done():
					lost.Add(1)
				}
				return ctx.Err()
			})
			raise(t, pool, "test.bad.v1", when)
			bad := enqueue(t, pool, "test.bad.v1", empty{})
			if statement == "extend" {
				handle(mux, "test.slow.v1", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
				execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
				raise(t, pool, "test.slow.v1", when)
				bad = enqueue(t, pool, "test.slow.v1", empty{})
			}
			addMany(t, pool, "test.good.v1", 300)
			addMany(t, pool, "test.long.v1", 30)
			for _, typ := range []string{"test.good.v1", "test.bad.v1"} {
				if statement == "take back" {
					expire(t, pool, enqueue(t, pool, typ, empty{}))
				}
			}
			if statement == "take back" {
				bad = query[uuid.UUID](t, pool, `SELECT id FROM workflow_run WHERE type = 'test.bad.v1' AND status = 'leased'`)
			}
			var told atomic.Int32
			work(t, pool, mux, func(c *worker.Config) { c.Observe.SetAside = func(string) { told.Add(1) } })
			pgtest.Await(t, "it to be told", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_set_aside WHERE id = $1 AND statement = $2 AND sqlstate = 'XX777' AND message = 'not this one'`, bad, statement) == 1
			})
			pgtest.Await(t, "all others to succeed", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND type IN ('test.good.v1', 'test.long.v1')`) >= 330
			})
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside WHERE id <> $1`, bad); n != 0 || told.Load() == 0 {
				t.Errorf("%d others are set aside, told %d times", n, told.Load())
			}
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1 AND id <> $1 AND type <> 'test.good.v1'`, bad); n != 0 || lost.Load() != 0 {
				t.Errorf("%d others were charged, %d lost their leases", n, lost.Load())
			}
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_fault`); n != 0 {
				t.Errorf("%d statements are said to fail for every row", n)
			}
		})
	}
}

// outage is how long something is missing: a minute if TEST_OUTAGE is set.
func outage(t *testing.T) time.Duration {
	text := os.Getenv("TEST_OUTAGE")
	if text == "" {
		return 8 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// What fails for every row is blamed on no row. With ten thousand runs due and others under way, a table, a
// right, a function or a sequence is missing for some time. Nothing is set aside, failed or charged because of
// it. Once it is back, all runs are done within ten seconds more than they take otherwise. Meanwhile
// workflow_fault names the statement, and the log does so once a minute.
func TestStatementsThatFail(t *testing.T) {
	t.Parallel()
	type outage struct{ harm, mend, statement string }
	all := map[string]outage{
		"a table renamed":                {`ALTER TABLE workflow_history RENAME TO moved`, `ALTER TABLE moved RENAME TO workflow_history`, "settle"},
		"the table renamed":              {`ALTER TABLE workflow_run RENAME TO moved`, `ALTER TABLE moved RENAME TO workflow_run`, "extend"},
		"a hook's table renamed":         {`ALTER TABLE hooked RENAME TO moved`, `ALTER TABLE moved RENAME TO hooked`, "settle"},
		"a right revoked":                {`REVOKE UPDATE ON workflow_run FROM $owner`, `GRANT UPDATE ON workflow_run TO $owner`, "lease"},
		"a call revoked":                 {`REVOKE EXECUTE ON FUNCTION workflow_settle_v1 FROM $engine`, `GRANT EXECUTE ON FUNCTION workflow_settle_v1 TO $engine`, "settle"},
		"a function missing":             {`ALTER FUNCTION workflow_due RENAME TO moved`, `ALTER FUNCTION moved RENAME TO workflow_due`, "lease"},
		"the settle of policies missing": {`ALTER FUNCTION workflow_settle_v2 RENAME TO moved`, `ALTER FUNCTION moved RENAME TO workflow_settle_v2`, "settle"},
		"the settle missing":             {`ALTER FUNCTION workflow_settle_v1 RENAME TO moved`, `ALTER FUNCTION moved RENAME TO workflow_settle_v1`, "settle"},
		"the heartbeat missing":          {`ALTER FUNCTION workflow_extend_v1 RENAME TO moved`, `ALTER FUNCTION moved RENAME TO workflow_extend_v1`, "extend"},
		"a history without numbers":      {`SELECT setval(pg_get_serial_sequence('workflow_history', 'id'), 9223372036854775807)`, `SELECT setval(pg_get_serial_sequence('workflow_history', 'id'), 1000000)`, "settle"},
		"an outbox without numbers":      {`SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 9223372036854775807)`, `SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 1000000)`, "settle"},
		"a trigger for all": {`CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX777'; END $$;
			CREATE TRIGGER never BEFORE UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION never()`, `DROP TRIGGER never ON workflow_run`, "lease"},
	}
	names := slices.Sorted(maps.Keys(all))
	for half := range 2 { // two at a time, since they mostly wait
		t.Run(fmt.Sprint(half), func(t *testing.T) {
			t.Parallel()
			for i, name := range names {
				if c := all[name]; i%2 == half {
					t.Run(name, func(t *testing.T) { statementsFail(t, c.harm, c.mend, c.statement) })
				}
			}
		})
	}
}

func statementsFail(t *testing.T, harm, mend, statement string) {
	owner := pgtest.New(t)
	named := pgtest.Roles(t, owner)
	roles := strings.NewReplacer("$owner", named+"_owner", "$engine", named+"_engine")
	execute(t, owner, `CREATE TABLE hooked (run uuid); GRANT ALL ON hooked TO PUBLIC`)
	pool := pgtest.As(t, owner, named, "engine")
	mux, hold := worker.NewMux(), outage(t)
	handle(mux, "test.plain.v1", func(context.Context) error { return nil })
	handle(mux, "test.hooked.v1", func(context.Context) error { return nil })
	worker.Handle(mux, "test.again.v1", func(ctx context.Context, _ empty) (empty, error) {
		if run.FromContext(ctx).Attempt == 1 {
			return empty{}, errors.New("not yet")
		}
		return empty{}, nil
	})
	worker.Handle(mux, "test.told.v1", func(ctx context.Context, _ empty) (empty, error) {
		return empty{}, worker.Emit(ctx, outbox.Event{Aggregate: run.FromContext(ctx).ID, Type: "test.told", Payload: empty{}})
	})
	var slow atomic.Int32
	handle(mux, "test.slow.v1", func(ctx context.Context) error {
		slow.Add(1)
		select {
		case <-time.After(hold + time.Second):
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	var log journal
	for range 2 {
		work(t, pool, mux, func(c *worker.Config) {
			c.Concurrency, c.Logger, c.Lease = 50, log.logger(), hold/2
			*c.Hooks() = []hook.Hook{{
				Concerns: func(l *leasing.Lease) bool { return l.Type == "test.hooked.v1" },
				Begin: acting(func(ctx context.Context, tx pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
					for _, s := range batch {
						if _, err := tx.Exec(ctx, `INSERT INTO hooked VALUES ($1)`, s.ID); err != nil {
							return err
						}
					}
					return nil
				}),
			}}
		})
	}
	all := `INSERT INTO workflow_run (type, payload) SELECT 'test.' || CASE WHEN n % 20 = 0 THEN 'again' WHEN n % 20 = 1 THEN 'hooked' WHEN n % 20 = 2 THEN 'told' ELSE 'plain' END || '.v1', '{}' FROM generate_series(1, 10000) AS n`
	done := func() bool {
		return query[int](t, owner, `SELECT count(*) FROM workflow_run WHERE status IN ('pending', 'leased')`) == 0
	}
	execute(t, owner, all)
	start := time.Now()
	pgtest.Await(t, "the drain without harm", done)
	anyhow := time.Since(start)
	addMany(t, owner, "test.slow.v1", 20)
	pgtest.Await(t, "the slow ones to begin", func() bool { return slow.Load() == 20 })

	execute(t, owner, `BEGIN; `+all+`; `+roles.Replace(harm)+`; COMMIT`)
	began := time.Now()
	ends := began.Add(hold)
	named1, aside := false, 0
	for time.Now().Before(ends) {
		aside += query[int](t, owner, `SELECT count(*) FROM workflow_set_aside`)
		named1 = named1 || query[int](t, owner, `SELECT count(*) FROM workflow_fault WHERE statement = $1`, statement) > 0
		time.Sleep(100 * time.Millisecond)
	}
	execute(t, owner, roles.Replace(mend))
	start = time.Now()
	pgtest.Await(t, "all runs to finish", done)
	took := time.Since(start)
	t.Logf("done in %v, %v without harm", took, anyhow)
	if took > 2*anyhow+10*time.Second { // twice, since the machine may have become slower
		t.Errorf("all is done %v after it was mended, and takes %v anyhow", took, anyhow)
	}
	if n := query[int](t, owner, `SELECT count(*) FROM workflow_set_aside`) + aside; n != 0 {
		t.Errorf("set aside: %s", query[string](t, owner, `SELECT coalesce(string_agg(DISTINCT statement || ' ' || sqlstate || ' ' || message, '; '), 'no more') FROM workflow_set_aside`))
	}
	if bad := query[string](t, owner, `SELECT coalesce(string_agg(DISTINCT concat_ws(' ', type, status, attempt, last_error), '; '), '') FROM workflow_run
				WHERE status <> 'succeeded' OR attempt <> CASE type WHEN 'test.again.v1' THEN 2 ELSE 1 END`); bad != "" {
		t.Errorf("failed or charged: %.500s", bad)
	}
	if n := query[int](t, owner, `SELECT (SELECT count(*) FROM hooked) + (SELECT count(*) FROM outbox_event)`); n != 2000 {
		t.Errorf("%d rows of hooks and events, want 2000", n)
	}
	if lines := strings.Count(log.String(), "a statement fails for every row"); !named1 || lines == 0 || lines > 2*4*(1+int(time.Since(began)/time.Minute)) {
		t.Errorf("named in workflow_fault: %v; %d lines in the log", named1, lines)
	}
	pgtest.Await(t, "workflow_fault to be empty", func() bool { return query[int](t, owner, `SELECT count(*) FROM workflow_fault`) == 0 })
}

// A trigger that refuses a type has the runs of that type set aside, and others continue. Ten seconds after the
// trigger is dropped, all runs of the type are eligible again.
func TestTypeIsBack(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.bad.v1", func(context.Context) error { return nil })
	handle(mux, "test.good.v1", func(context.Context) error { return nil })
	raise(t, pool, "test.bad.v1", `OLD.status = 'pending'`)
	addMany(t, pool, "test.bad.v1", 2000)
	addMany(t, pool, "test.good.v1", 1000)
	work(t, pool, mux, nil)
	pgtest.Await(t, "the others to finish", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.good.v1' AND status = 'succeeded'`) == 1000
	})
	pgtest.Await(t, "the type to be set aside", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_set_aside WHERE NOT due`) == 2000
	})
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	start := time.Now()
	drained(t, pool)
	if took := time.Since(start); took > 30*time.Second { // 10 s on an idle machine, and a minute if nothing tries them
		t.Errorf("the type was back after %v", took)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
		t.Errorf("%d are still set aside", n)
	}
}
