package leasing_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// unchecked changes a row as somebody could while our constraints and triggers are off. Afterwards they are on
// again, without checking the rows that exist.
func unchecked(t *testing.T, pool *pgxpool.Pool, id uuid.UUID, change string) {
	t.Helper()
	tx := begin(t, pool)
	exec(t, tx, `SET LOCAL session_replication_role = replica`)
	exec(t, tx, `
		DO $do$
		DECLARE c record;
		BEGIN
			CREATE TEMP TABLE checks ON COMMIT DROP AS
				SELECT conname, pg_get_constraintdef(oid) AS def FROM pg_constraint WHERE conrelid = 'workflow_run'::regclass AND contype = 'c';
			FOR c IN SELECT * FROM checks LOOP EXECUTE format('ALTER TABLE workflow_run DROP CONSTRAINT %I', c.conname); END LOOP;
		END $do$`)
	exec(t, tx, `UPDATE workflow_run SET `+change+` WHERE id = $1`, id)
	exec(t, tx, `
		DO $do$
		DECLARE c record;
		BEGIN
			FOR c IN SELECT * FROM checks LOOP EXECUTE format('ALTER TABLE workflow_run ADD CONSTRAINT %I %s NOT VALID', c.conname, replace(c.def, ' NOT VALID', '')); END LOOP;
		END $do$`)
	commit(t, tx)
}

// refuse creates a user's trigger that refuses every update of some runs.
func refuse(t *testing.T, pool *pgxpool.Pool, when string) {
	t.Helper()
	exec(t, pool, `CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one: %', OLD.payload; END $$`)
	exec(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (`+when+`) EXECUTE FUNCTION refuse()`)
}

// A run that cannot be leased does not keep other runs from being leased by the same poll. It is set aside: it is
// recorded in workflow_set_aside, polls skip it, and workflow_unleasable lists it with the wrong column and the fix.
// Once the fix is made, it is leased.
func TestRunThatCannotBeLeased(t *testing.T) {
	for _, test := range []struct{ change, sqlstate, problem, fix string }{
		{`lease_no = 9223372036854775807`, "22003", "lease_no is 9223372036854775807", "lease_no = 0"},
		{`attempt = -2`, "23514", "attempt is -2", "attempt = 0"},
		{`attempt = -2147483648`, "23514", "attempt is -2147483648", "attempt = 0"},
		{`priority = 2147483647`, "23514", "priority is 2147483647", "priority = 0"},
		{`priority = -101`, "23514", "priority is -101", "priority = 0"},
		{`max_attempts = 0`, "23514", "max_attempts is 0", "max_attempts = 3"},
		{`max_attempts = -2147483648, suspect = true`, "23514", "max_attempts is -2147483648", "max_attempts = 3"},
		{`run_at = '-infinity'`, "23514", "run_at is -infinity", "run_at = now()"},
		{`finished_at = now()`, "23514", "finished_at is set, though it has not finished", "finished_at = NULL"},
		{`attempt = 2147483647`, "23514", "attempt is 2147483647", "attempt = 0"},
		{`postponed = 2147483647`, "23514", "postponed is 2147483647", "postponed = 0"},
	} {
		t.Run(test.change, func(t *testing.T) {
			pool := pgtest.New(t)
			addMany(t, pool, 3, "a.x", 0)
			bad := add(t, pool, "a.x", 0, time.Hour)
			addMany(t, pool, 3, "a.y", 0)
			unchecked(t, pool, bad, test.change)
			var told []leasing.Aside
			p := newPoller(pool, "a.")
			p.SetAside = func(a []leasing.Aside) { told = append(told, a...) }
			leases := acquire(t, p, 10)
			if len(leases) != 6 || slices.ContainsFunc(leases, func(l leasing.Lease) bool { return l.ID == bad }) {
				t.Errorf("leased %d", len(leases))
			}
			if len(told) != 1 || told[0].ID != bad || told[0].SQLState != test.sqlstate {
				t.Errorf("told of %v", told)
			}
			got := query[string](t, pool, `SELECT concat_ws(' | ', id, sqlstate, problem, fix) FROM workflow_unleasable`)
			if want := fmt.Sprintf("%s | %s | %s | %s", bad, test.sqlstate, test.problem, test.fix); got != want {
				t.Errorf("workflow_unleasable has\n%s, want\n%s", got, want)
			}
			unchecked(t, pool, bad, test.fix)
			p.Discover()
			if again := acquire(t, p, 10); len(again) != 1 || again[0].ID != bad {
				t.Errorf("leased %d after the fix", len(again))
			}
			if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`); n != 0 {
				t.Errorf("%d are still set aside", n)
			}
		})
	}
}

// A run with a wrong value that does not keep it from being leased is leased and settled with the others.
func TestOddRunsAreLeased(t *testing.T) {
	for _, change := range []string{`run_at = '1999-12-31'`, `created_at = '-infinity'`, `updated_at = 'infinity'`, `metadata = to_jsonb(repeat('x', 1000))`} {
		t.Run(change, func(t *testing.T) {
			pool := pgtest.New(t)
			addMany(t, pool, 3, "a.x", 0)
			odd := add(t, pool, "a.x", 0, time.Hour)
			unchecked(t, pool, odd, change)
			p := newPoller(pool, "a.")
			leases := acquire(t, p, 10)
			if len(leases) != 4 {
				t.Fatalf("leased %d: %v", len(leases), query[[]string](t, pool, `SELECT array_agg(sqlstate || message) FROM workflow_set_aside`))
			}
			settle(t, pool, leases...)
		})
	}
}

// A run with run_at infinity is never due, and no other run waits for it.
func TestNeverDue(t *testing.T) {
	pool := pgtest.New(t)
	never := add(t, pool, "a.x", 50, 0)
	add(t, pool, "a.x", 0, 0)
	unchecked(t, pool, never, `run_at = 'infinity'`)
	p := newPoller(pool, "a.")
	for _, want := range []int{1, 0} {
		p.Discover()
		if leases := acquire(t, p, 10); len(leases) != want {
			t.Errorf("leased %d, want %d", len(leases), want)
		}
	}
}

// If a user's trigger refuses all runs of a type, these runs are set aside. Every ten seconds one of them is tried. Once
// the trigger is gone, the try succeeds, and all are leased, more by each poll.
func TestRefusedByTrigger(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 500, "a.bad", 0)
	addMany(t, pool, 5, "a.good", 0)
	refuse(t, pool, `OLD.type = 'a.bad'`)
	p := newPoller(pool, "a.")
	count := func(which string) int {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside WHERE `+which)
	}
	for leased := 0; leased < 5 || count("true") < 500; {
		leases := acquire(t, p, 10)
		leased += len(leases)
		if slices.Contains(types(leases), "a.bad") {
			t.Fatal("leased what is refused")
		}
	}
	tryAgain := func() {
		t.Helper()
		if err := leasing.TryAgain(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		p.Discover()
	}
	tryAgain()
	if n := count("due"); n != 0 {
		t.Errorf("%d are tried again at once", n)
	}
	exec(t, pool, `BEGIN; SET LOCAL workflow.override = 'ten seconds later'; UPDATE workflow_set_aside SET last_tried_at = last_tried_at - interval '10 seconds'; COMMIT`)
	tryAgain()
	if n := count("due"); n != 1 {
		t.Errorf("%d of one kind are tried again", n)
	}
	if leases := acquire(t, p, 10); len(leases) != 0 {
		t.Errorf("leased %v", types(leases))
	}
	exec(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	exec(t, pool, `BEGIN; SET LOCAL workflow.override = 'ten seconds later'; UPDATE workflow_set_aside SET last_tried_at = last_tried_at - interval '10 seconds'; COMMIT`)
	tryAgain()
	leased, rounds := 0, 0
	for ; leased < 500 && rounds < 10; rounds++ {
		p.Discover()
		leased += len(acquire(t, p, 1000))
	}
	if leased != 500 || count("true") != 0 {
		t.Errorf("leased %d of 500 in %d rounds, %d are still set aside", leased, rounds, count("true"))
	}
}

// If every run is refused, no run is the cause: nothing is set aside, and Acquire returns an error. Once the cause is
// mended, all runs are leased.
func TestStatementAtFault(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 20, "a.x", 0)
	for name, fault := range map[string]struct{ harm, mend string }{
		"a trigger for all": {`CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never'; END $$;
			CREATE TRIGGER never BEFORE UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION never()`, `DROP TRIGGER never ON workflow_run`},
		"a check for all":       {`ALTER TABLE workflow_run ADD CONSTRAINT never CHECK (status <> 'leased') NOT VALID`, `ALTER TABLE workflow_run DROP CONSTRAINT never`},
		"a column is missing":   {`ALTER TABLE workflow_run RENAME lease_no TO lease_number`, `ALTER TABLE workflow_run RENAME lease_number TO lease_no`},
		"a table is missing":    {`ALTER TABLE workflow_run RENAME TO moved`, `ALTER TABLE moved RENAME TO workflow_run`},
		"a function is missing": {`ALTER FUNCTION workflow_due RENAME TO moved`, `ALTER FUNCTION moved RENAME TO workflow_due`},
	} {
		exec(t, pool, fault.harm)
		p := newPoller(pool, "a.")
		if leases, _, err := p.Acquire(t.Context(), 10, 1); err == nil {
			t.Errorf("%s: leased %d", name, len(leases))
		}
		exec(t, pool, fault.mend)
		if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`); n != 0 {
			t.Errorf("%s: %d are set aside", name, n)
		}
	}
	if leases := acquire(t, newPoller(pool, "a."), 30); len(leases) != 20 {
		t.Errorf("leased %d of 20", len(leases))
	}
}

// Expired leases that cannot be taken back, for any reason, do not keep others from being taken back. Leases without a
// beginning or an end, which no worker makes, are taken back too.
func TestTakeBackPastRefusal(t *testing.T) {
	pool := settledServer(t)
	refused := map[int]string{0: `lease_no = -1`, 1: `postponed = -1`, 2: `priority = 101`, 4: `started_at = '-infinity'`, 6: `started_at = 'infinity'`, 8: `type = repeat('x', 1000000)`} // no index takes that
	odd := map[int]string{3: `started_at = NULL`, 5: `lease_until = 'infinity'`, 7: `started_at = NULL, lease_until = 'infinity'`,
		9: `leased_by = repeat('x', 1000000)`}
	refused[10] = `tenant_id = 'picky'` // the trigger refuses only what the take-back writes
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not so'; END $$`)
	exec(t, pool, `CREATE TRIGGER picky BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.tenant_id = 'picky' AND NEW.error->>'code' = 'lease_expired') EXECUTE FUNCTION refuse()`)
	addMany(t, pool, 14, "a.x", 0)
	leases := acquire(t, newPoller(pool, "a."), 14)
	for i, l := range leases {
		expire(t, pool, l.ID)
		if change := refused[i] + odd[i]; change != "" {
			unchecked(t, pool, l.ID, change)
		}
	}
	r := newReclaimer(pool)
	if again, exhausted := reclaim(t, r, 20); again != 7 || len(exhausted) != 0 {
		t.Errorf("%d due again, %d exhausted; want 7", again, len(exhausted))
	}
	got := query[string](t, pool, `SELECT string_agg(split_part(problem, ' is', 1), ' ' ORDER BY problem) FROM workflow_unleasable WHERE statement = 'take back'`)
	if got != "lease_no postponed priority started_at started_at the database refuses to take its lease back the database refuses to take its lease back" {
		t.Errorf("set aside: %s: %s", got, strings.Join(query[[]string](t, pool, `SELECT array_agg(status || id::text) FROM workflow_run WHERE status = 'leased'`), ", "))
	}
}

// Exhausted runs whose expired leases cannot be taken back do not keep other leases from being taken back.
func TestTakeBackPastExhausted(t *testing.T) {
	pool := settledServer(t)
	pgtest.Attempts(t, pool, 3)
	addMany(t, pool, 5, "a.x", 0)
	leases := acquire(t, newPoller(pool, "a."), 5)
	for i, change := range []string{`attempt = max_attempts, lease_no = 9223372036854775807`, `attempt = max_attempts, lease_until = 'infinity'`, `attempt = max_attempts`} {
		expire(t, pool, leases[i].ID)
		unchecked(t, pool, leases[i].ID, change)
	}
	expire(t, pool, leases[3].ID, leases[4].ID)
	again, exhausted := reclaim(t, newReclaimer(pool), 20)
	if again != 2 || len(exhausted) != 2 {
		t.Errorf("%d due again, %d exhausted; want 2 and 2", again, len(exhausted))
	}
	if got := query[string](t, pool, `SELECT string_agg(problem, '; ') FROM workflow_unleasable`); got != "lease_no is 9223372036854775807" {
		t.Errorf("set aside: %s", got)
	}
}

// Any number of old rows that a user's NOT VALID check refuses are set aside, although the check also refuses the run
// that is made as a control. Rows that a deferred constraint refuses at the commit are set aside too.
func TestRefusedByUsersConstraint(t *testing.T) {
	for name, constraint := range map[string]string{
		"check": `ALTER TABLE workflow_run ADD CONSTRAINT owned CHECK (tenant_id IS NOT NULL) NOT VALID`,
		"deferred": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
			CREATE CONSTRAINT TRIGGER owned AFTER UPDATE ON workflow_run DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.tenant_id IS NULL) EXECUTE FUNCTION refuse()`,
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.New(t)
			addMany(t, pool, 2500, "a.x", 0)
			p := newPoller(pool, "a.")
			exec(t, pool, constraint)
			exec(t, pool, `INSERT INTO workflow_run (type, tenant_id) VALUES ('a.x', 'anna')`)
			leased := 0
			pgtest.Await(t, "all others to be set aside, and the one that is allowed to be leased", func() bool {
				leased += len(acquire(t, p, 10))
				return leased > 0 && query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`) == 2500
			})
			if leased != 1 {
				t.Errorf("%d are leased, want 1", leased)
			}
		})
	}
}

// An SQLSTATE of passing trouble that a user's trigger raises for one row counts as passing trouble for a minute.
// After that the row is blamed. With the SQLSTATE of a lock, the row is passed over at once.
func TestPassingCodeOfARow(t *testing.T) {
	for _, code := range []string{"08001", "40001", "55P03", "P0004"} {
		t.Run(code, func(t *testing.T) {
			pool := pgtest.New(t)
			addMany(t, pool, 3, "a.x", 0)
			bad := add(t, pool, "a.x", 0, 0)
			exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '`+code+`'; END $$`)
			exec(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.id = '`+bad.String()+`') EXECUTE FUNCTION refuse()`)
			p := newPoller(pool, "a.")
			if _, _, err := p.Acquire(t.Context(), 10, 1); code != "P0004" && code != "55P03" && err == nil {
				t.Error("no error at first")
			}
			p.RefusedForLong()
			p.Discover()
			if leases := acquire(t, p, 10); len(leases) != 3 && code != "P0004" && code != "55P03" {
				t.Errorf("leased %d, want the other three", len(leases))
			}
			if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside WHERE id = $1`, bad); n != 1 {
				t.Errorf("%d are set aside", n)
			}
		})
	}
}

// A run for which an SQLSTATE of passing trouble is raised is set aside after a minute, although leases from busy
// lanes of higher priority succeed meanwhile. Runs of those lanes are not blamed.
func TestPassingCodeInALowerLane(t *testing.T) {
	pool := pgtest.New(t)
	bad := add(t, pool, "a.x", 0, time.Hour)
	addMany(t, pool, 3, "a.x", 0)
	raises(t, pool, `OLD.id = '`+bad.String()+`'`, "40001")
	p := newPoller(pool, "a.")
	turn := func(n, want int) {
		t.Helper()
		p.Discover()
		leases, _, err := p.Acquire(t.Context(), n, 1)
		if len(leases) != want || (want == 0) != (err != nil) {
			t.Errorf("leased %d, want %d; %v", len(leases), want, err)
		}
	}
	addMany(t, pool, 115, "a.y", 10)
	turn(10, 10)
	turn(106, 0) // reaches the lower lane
	turn(10, 10)
	p.RefusedForLong()
	turn(5, 5)
	if n := asideCount(t, pool); n != 0 {
		t.Errorf("%d are set aside", n)
	}
	addMany(t, pool, 20, "a.y", 10)
	turn(200, 113)
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside WHERE id = $1`, bad); n != 1 || asideCount(t, pool) != 1 {
		t.Errorf("%d of %d that are set aside are the one", n, asideCount(t, pool))
	}
}

// Leases in doubt that the database refuses to give back do not keep the poller from leasing other runs.
func TestDoubtThatIsRefused(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.x", 0, 0)
	d := &deaf{DB: pool}
	p := newPoller(d, "a.")
	lose(t, p, d, "lost")
	refuse(t, pool, `OLD.status = 'leased'`)
	add(t, pool, "a.y", 0, 0)
	if l := one(t, p); l.Type != "a.y" {
		t.Errorf("leased %s", l.Type)
	}
}

// Ten thousand runs at the head of a lane that cannot be leased are set aside in steps, while runs of other lanes are
// leased. Then they cost the others next to nothing. If one of them is mended, the others are not all tried again.
func TestManySetAside(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 10_000, "a.x", 0)
	exec(t, pool, `UPDATE workflow_run SET run_at = run_at - interval '1 hour'`)
	exec(t, pool, `ALTER TABLE workflow_run ADD COLUMN bad boolean`)
	exec(t, pool, `UPDATE workflow_run SET bad = true`)
	refuse(t, pool, `OLD.bad AND NEW.bad`)
	addMany(t, pool, 100, "a.x", 0)
	addMany(t, pool, 10, "a.y", 0)
	p := newPoller(pool, "a.")
	start := time.Now()
	if leases := acquire(t, p, 100); len(leases) != 10 || leases[0].Type != "a.y" {
		t.Errorf("leased %d at first, want those of the other lane", len(leases))
	}
	for leased := 0; leased < 100 && time.Since(start) < time.Minute; {
		leased += len(acquire(t, p, 100))
	}
	t.Logf("set 10,000 aside in %v", time.Since(start))
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside`); n != 10_000 {
		t.Errorf("%d are set aside", n)
	}
	addMany(t, pool, 100, "a.x", 0)
	if leases := acquire(t, p, 100); len(leases) != 100 {
		t.Errorf("leased %d afterwards", len(leases))
	}
	exec(t, pool, `UPDATE workflow_run SET bad = false WHERE id = (SELECT id FROM workflow_set_aside LIMIT 1)`)
	p.Discover()
	if leases := acquire(t, p, 100); len(leases) != 1 {
		t.Errorf("leased %d, want the one that was mended", len(leases))
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside WHERE due`); n > 12 {
		t.Errorf("%d are tried again since one was mended", n)
	}
}

// The search for refused runs tries the same update as the lease, because a user's trigger may look at any column that
// it writes.
func TestTriedAsDone(t *testing.T) {
	pool := settledServer(t)
	update := func(function string) string {
		body := query[string](t, pool, `SELECT prosrc FROM pg_proc WHERE proname = '`+function+`'`)
		_, body, _ = strings.Cut(body, "SET status = 'leased'")
		body, _, ok := strings.Cut(body, "WHERE w.id = ANY")
		if !ok {
			t.Fatalf("%s leases nothing", function)
		}
		return strings.Join(strings.Fields(body), " ")
	}
	for _, lease := range []string{"workflow_lease_v1", "workflow_lease_v2"} {
		if tried, done := update("workflow_try"), update(lease); tried != done {
			t.Errorf("tried is\n%s\nand done by %s\n%s", tried, lease, done)
		}
	}
	// A lease ahead has a token of its group, and none of its runs is a suspect.
	same := strings.NewReplacer(
		"lease_token = CASE WHEN i.place <= slots THEN tokens[1] ELSE tokens[2 + (i.place - slots - 1) / together] END", "lease_token = token",
		"alone = CASE WHEN w.alone THEN true END", "alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END",
		"FROM unnest(ids) WITH ORDINALITY AS i (id, place), unnest", "FROM unnest")
	if tried, done := update("workflow_try"), same.Replace(update("workflow_lease_ahead_v1")); tried != done {
		t.Errorf("tried is\n%s\nand done ahead\n%s", tried, done)
	}

	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not by this one'; END $$`)
	exec(t, pool, `CREATE TRIGGER picky BEFORE UPDATE ON workflow_run FOR EACH ROW
		WHEN (NEW.leased_by = 'blue' AND NEW.tenant_id = 'picky' AND NEW.lease_until > now() + interval '20 seconds') EXECUTE FUNCTION refuse()`)
	addMany(t, pool, 3, "a.x", 0)
	exec(t, pool, `INSERT INTO workflow_run (type, tenant_id, run_at) VALUES ('a.x', 'picky', now() - interval '2 hours')`)
	addMany(t, pool, 3, "a.x", 0)
	blue := ahead(pool, 2, 1, "a.")
	blue.Worker = "blue"
	if leases := acquire(t, blue, 1); len(leases) != 3 {
		t.Errorf("leased %d to begin at once and ahead, want 3", len(leases))
	}
	blue.Ahead = leasing.Ahead{}
	if leases := acquire(t, blue, 10); len(leases) != 3 {
		t.Errorf("leased %d, want the other 3", len(leases))
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_set_aside WHERE statement = 'lease'`); n != 1 {
		t.Errorf("%d runs are set aside, want the one that is refused", n)
	}
}
