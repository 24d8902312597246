package leasing_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
)

func asideCount(t *testing.T, pool run.DB) int {
	t.Helper()
	return query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`)
}

// raises creates a user's trigger that raises an SQLSTATE for every update of some runs.
func raises(t *testing.T, pool *pgxpool.Pool, when, code string) {
	t.Helper()
	exec(t, pool, `CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '`+code+`'; END $$`)
	exec(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (`+when+`) EXECUTE FUNCTION refuse()`)
}

// A refused run that is the only one is set aside, because a control that is made for this is not refused. For a bound
// worker the control is of its own prefix. If no control can be made, nothing is set aside, and the error is the
// statement's.
func TestControlThatIsMade(t *testing.T) {
	pool := pgtest.New(t)
	named := pgtest.Roles(t, pool)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if err := sql.BindWorker(t.Context(), conn.Conn(), named, named+"_bound", []string{"a."}); err != nil {
		t.Fatal(err)
	}
	bound := pgtest.As(t, pool, named, "bound")
	for name, db := range map[string]*pgxpool.Pool{"the owner": pool, "a bound worker": bound} {
		for _, statement := range []string{"lease", "extend", "settle", "take back"} {
			if works, err := leasing.Works(t.Context(), db, statement); err != nil || !works {
				t.Errorf("%s: %s works: %v, %v", name, statement, works, err)
			}
		}
		bad := add(t, pool, "a.x", 0, 0)
		raises(t, pool, `OLD.type = 'a.x'`, "XX777")
		exec(t, pool, `CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX777'; END $$`)
		exec(t, pool, `CREATE TRIGGER never BEFORE INSERT ON workflow_run FOR EACH ROW EXECUTE FUNCTION never()`)
		var statement *fault.Error
		if _, _, err := newPoller(db, "a.").Acquire(t.Context(), 10, 1); !errors.As(err, &statement) || statement.Statement != "lease" || asideCount(t, pool) != 0 {
			t.Errorf("%s: none can be made: %d are set aside, %v", name, asideCount(t, pool), err)
		}
		exec(t, pool, `DROP FUNCTION never CASCADE`)
		if leases := acquire(t, newPoller(db, "a."), 10); len(leases) != 0 || asideCount(t, pool) != 1 {
			t.Errorf("%s: leased %d, %d are set aside", name, len(leases), asideCount(t, pool))
		}
		exec(t, pool, `DROP FUNCTION refuse CASCADE`)
		exec(t, pool, `DELETE FROM workflow_set_aside`)
		exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE id = $1`, bad)
	}
}

// Of all runs that were set aside for the same reason, one is tried for all. If it succeeds, all are leased again,
// however many they are. If a run succeeds because somebody has changed it, the others stay set aside.
func TestGroupIsReleased(t *testing.T) {
	pool := pgtest.New(t)
	const many = 21_000
	exec(t, pool, `INSERT INTO workflow_run (type, run_at) SELECT 'a.x', now() - interval '1 hour' FROM generate_series(1, $1)`, many)
	tx := begin(t, pool)
	exec(t, tx, `SET LOCAL session_replication_role = replica`)
	exec(t, tx, `INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version, last_tried_at)
		SELECT 'run', id, type, 'lease', 'XX777', 'not this one', '', xmin, now() - interval '1 minute' FROM workflow_run`)
	commit(t, tx)
	p := newPoller(pool, "a.")
	if leases := acquire(t, p, 10); len(leases) != 0 {
		t.Fatalf("leased %d of what is set aside", len(leases))
	}
	exec(t, pool, `UPDATE workflow_run SET metadata = '{}' WHERE id = (SELECT id FROM workflow_run LIMIT 1)`)
	p.Discover()
	if leases := acquire(t, p, 10); len(leases) != 1 || asideCount(t, pool) != many-1 {
		t.Errorf("leased %d, and %d are still set aside; want the one that was changed", len(leases), asideCount(t, pool))
	}
	if err := leasing.TryAgain(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	leased := 1
	for rounds := 0; leased < many && rounds < 40; rounds++ {
		p.Discover()
		leases := acquire(t, p, 1000)
		if rounds == 0 && len(leases) != 1 {
			t.Errorf("leased %d at first, want one for all", len(leases))
		}
		leased += len(leases)
	}
	if leased != many || asideCount(t, pool) != 0 {
		t.Errorf("leased %d of %d, %d are still set aside", leased, many, asideCount(t, pool))
	}
}

// Each run that was set aside ten minutes ago is tried again, and runs that have ended are forgotten, however many are
// set aside. One call looks at some of them; many calls look at all.
func TestAllAreTriedInTurns(t *testing.T) {
	pool := pgtest.New(t)
	const many = 3000
	exec(t, pool, `INSERT INTO workflow_run (type, run_at) SELECT 'a.x', now() - interval '1 hour' FROM generate_series(1, $1)`, many)
	tx := begin(t, pool)
	exec(t, tx, `SET LOCAL session_replication_role = replica`)
	exec(t, tx, `INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version, last_tried_at)
		SELECT 'run', id, type, 'lease', 'XX777', 'not this one', '', xmin, now() - interval '11 minutes' FROM workflow_run`)
	commit(t, tx)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE id IN (SELECT id FROM workflow_run ORDER BY id LIMIT $1)`, many/2)
	var due, forgotten int
	for calls := 0; due+forgotten < many && calls < 150; calls++ {
		if err := leasing.TryAgain(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE due), $1 - count(*) FROM workflow_set_aside`, many).Scan(&due, &forgotten); err != nil {
			t.Fatal(err)
		}
	}
	if due != many/2 || forgotten != many/2 {
		t.Errorf("%d are tried again and %d forgotten, want %d each", due, forgotten, many/2)
	}
}

// ExtendRefused returns the leases that the database refuses to extend, and no others. They are not passed over: once
// they have expired, they are taken back. If no lease can be extended, it returns none.
func TestExtendRefused(t *testing.T) {
	pool := settledServer(t)
	addMany(t, pool, 20, "a.x", 0)
	exec(t, pool, `INSERT INTO workflow_run (type, tenant_id) SELECT 'a.x', 'picky' FROM generate_series(1, 2)`)
	leases := acquire(t, newPoller(pool, "a."), 30)
	held := make([]leasing.Held, len(leases))
	for i, l := range leases {
		held[i] = leasing.Held{ID: l.ID, Token: l.Token, Length: time.Minute}
	}
	const heartbeat = `OLD.status = 'leased' AND NEW.status = 'leased' AND NEW.lease_until > OLD.lease_until`
	raises(t, pool, heartbeat, "XX777")
	if aside, err := leasing.ExtendRefused(t.Context(), pool, held, false); err != nil || len(aside) != 0 || asideCount(t, pool) != 0 {
		t.Errorf("none can be extended: told of %v, %v", aside, err)
	}
	exec(t, pool, `DROP FUNCTION refuse CASCADE`)
	raises(t, pool, heartbeat+` AND OLD.tenant_id = 'picky'`, "XX777")
	if _, _, err := leasing.Extend(t.Context(), pool, held); fault.Of(err) != fault.Halve {
		t.Fatalf("extended: %v", err)
	}
	aside, err := leasing.ExtendRefused(t.Context(), pool, held, false)
	if err != nil || len(aside) != 2 || query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside a JOIN workflow_run r ON r.id = a.id WHERE r.tenant_id = 'picky' AND a.statement = 'extend' AND a.due`) != 2 {
		t.Fatalf("told of %v, %v", aside, err)
	}
	bad := map[uuid.UUID]bool{aside[0].ID: true, aside[1].ID: true}
	var rest []leasing.Held
	for _, h := range held {
		if !bad[h.ID] {
			rest = append(rest, h)
		}
	}
	if kept, _, err := leasing.Extend(t.Context(), pool, rest); err != nil || len(kept) != 20 {
		t.Errorf("extended %d of the others, %v", len(kept), err)
	}
	expire(t, pool, aside[0].ID, aside[1].ID)
	if again, _ := reclaim(t, newReclaimer(pool), 20); again != 2 {
		t.Errorf("took back %d of the two", again)
	}
}

// After an error that calls for fewer rows, half as many runs are leased each time, down to one. That one is set aside
// if it is refused alone and others are not. Then the number grows again.
func TestFewerAtATime(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 5, "a.x", 50)
	exec(t, pool, `INSERT INTO workflow_run (type, priority, tenant_id) VALUES ('a.x', 10, 'heavy')`)
	addMany(t, pool, 100, "a.x", 0)
	raises(t, pool, `OLD.tenant_id = 'heavy'`, "57014")
	p := newPoller(pool, "a.")
	leased, failed := 0, 0
	for turn := 0; leased < 105 && turn < 30; turn++ {
		p.Discover()
		leases, _, err := p.Acquire(t.Context(), 50, 1)
		if leased += len(leases); err != nil {
			failed++
		}
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside a JOIN workflow_run r ON r.id = a.id WHERE r.tenant_id = 'heavy' AND a.sqlstate = '57014'`); leased != 105 || n != 1 || failed > 12 {
		t.Errorf("leased %d, set aside %d, failed %d times", leased, n, failed)
	}
}

// A person's cancel and statement_timeout end the search for refused rows, even while any SQLSTATE counts as an answer
// about a row.
func TestCancelEndsTheSearch(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 20, "a.x", 0)
	exec(t, pool, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END $$`)
	exec(t, pool, `CREATE TRIGGER slow BEFORE UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION slow()`)
	for _, search := range []string{
		`SELECT FROM workflow_lease_refused_v1('{f}', '{a.x}', '{0}', '{1901-01-01}', '{00000000-0000-0000-0000-000000000000}', '{0}', false, 20, true, 'w', '{a.x}', '{60}', '{NULL}')`,
		`SELECT workflow_works_v1('lease')`,
	} {
		tx := begin(t, pool)
		exec(t, tx, `SET LOCAL statement_timeout = '200ms'`)
		start := time.Now()
		if _, err := tx.Exec(t.Context(), search); fault.State(err) != "57014" || time.Since(start) > 2*time.Second {
			t.Errorf("%.30s: %v after %v with statement_timeout", search, err, time.Since(start))
		}
		tx = begin(t, pool)
		pid := query[int](t, tx, `SELECT pg_backend_pid()`)
		done := make(chan error, 1)
		go func() {
			_, err := tx.Exec(t.Context(), search)
			done <- err
		}()
		pgtest.Await(t, "it looks", func() bool {
			return query[bool](t, pool, `SELECT wait_event IS NOT DISTINCT FROM 'PgSleep' FROM pg_stat_activity WHERE pid = $1`, pid)
		})
		exec(t, pool, `SELECT pg_cancel_backend($1)`, pid)
		if err := <-done; fault.State(err) != "57014" {
			t.Errorf("%.30s: %v after a cancel", search, err)
		}
	}
}
