package sql_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

func up(t *testing.T, s *session) {
	t.Helper()
	if err := sql.Up(t.Context(), s.conn); err != nil {
		t.Fatal(err)
	}
}

// objects lists everything in a schema.
func (s *session) objects(schema string) string {
	s.t.Helper()
	return s.do(`
		SELECT string_agg(what, E'\n' ORDER BY what)
		FROM (SELECT c.relname || ' ' || c.relkind::text AS what FROM pg_class c WHERE c.relnamespace = '` + schema + `'::regnamespace
		      UNION ALL
		      SELECT p.proname || ' f' FROM pg_proc p WHERE p.pronamespace = '` + schema + `'::regnamespace
		      UNION ALL
		      SELECT t.tgname || ' t' FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid AND NOT t.tgisinternal
		      WHERE c.relnamespace = '` + schema + `'::regnamespace) o`)
}

// W39: ten connections that migrate an empty database at once make one schema, without an error. Ten more calls find
// nothing to do. The default transaction settings of the role do not matter.
func TestConcurrentUp(t *testing.T) {
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			url := pgtest.Empty(t)
			var conns []*pgx.Conn
			for range 10 {
				s := connect(t, url)
				s.do(`SET default_transaction_isolation = '` + isolation + `'; SET default_transaction_read_only = on`)
				conns = append(conns, s.conn)
			}
			for range 2 {
				start := make(chan struct{})
				var all sync.WaitGroup
				for _, conn := range conns {
					all.Go(func() {
						<-start
						if err := sql.Up(t.Context(), conn); err != nil {
							t.Error(err)
						}
					})
				}
				close(start)
				all.Wait()
				if err := sql.Check(t.Context(), conns[0]); err != nil {
					t.Error(err)
				}
			}
			s := connect(t, url)
			s.expect("versions", s.do(`SELECT count(*) FROM workflow_schema`), fmt.Sprint(len(sql.Migrations())))
			s.enqueue()
		})
	}
}

// Status reports what was applied and when. Check and Status change nothing.
func TestStatus(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	steps, err := sql.Status(t.Context(), s.conn)
	if err != nil || len(steps) != len(sql.Migrations()) || !steps[0].AppliedAt.IsZero() {
		t.Errorf("of an empty database: %d steps, %v", len(steps), err)
	}
	s.expect("tables", s.do(`SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace`), "0")
	up(t, s)
	steps, err = sql.Status(t.Context(), s.conn)
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range steps {
		if step.AppliedAt.IsZero() || step.Version != i+1 || !strings.Contains(step.SQL, "simple-workflow") {
			t.Errorf("step %d: %d %s %v", i, step.Version, step.Name, step.AppliedAt)
		}
	}
}

// Check distinguishes a database that is behind, ahead, or altered, and names the versions and what to do.
func TestCheck(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	latest := len(sql.Migrations())
	expect := func(name string, err, want error, words ...string) {
		t.Helper()
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
			return
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %q does not say %q", name, err, word)
			}
		}
	}
	check := func() error { return sql.Check(t.Context(), s.conn) }

	expect("empty", check(), sql.ErrBehind, "version 0", fmt.Sprintf("needs %d", latest), "migrate up")
	up(t, s)
	if err := check(); err != nil {
		t.Error(err)
	}
	s.do(fmt.Sprintf(`BEGIN; SET LOCAL workflow.override = 'a test'; DELETE FROM workflow_schema WHERE version = %d`, latest))
	expect("one behind", check(), sql.ErrBehind, fmt.Sprintf("version %d", latest-1))
	s.do(fmt.Sprintf(`ROLLBACK; BEGIN; INSERT INTO workflow_schema VALUES (%d, '0099_x.sql', '')`, latest+1))
	expect("ahead", check(), sql.ErrAhead, fmt.Sprintf("version %d", latest+1), fmt.Sprintf("knows %d", latest))
	s.do(`COMMIT`)
	expect("ahead, up", sql.Up(t.Context(), s.conn), sql.ErrAhead)
	s.byHand(fmt.Sprintf(`DELETE FROM workflow_schema WHERE version > %d; UPDATE workflow_schema SET sha256 = 'x' WHERE version = 2`, latest))
	expect("altered", check(), nil, "0002", "other text")
	expect("altered, up", sql.Up(t.Context(), s.conn), nil, "0002", "other text")
}

// A migration that fails leaves the database at the version before it, and the next Up continues there.
func TestUpResumes(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	s.do(`CREATE TABLE outbox_event ()`)
	err := sql.Up(t.Context(), s.conn)
	if err == nil || !strings.Contains(err.Error(), "0003_outbox.sql") || !strings.Contains(err.Error(), "already exists") {
		t.Errorf("err = %v", err)
	}
	s.expect("version", s.do(`SELECT max(version) FROM workflow_schema`), "2")
	s.do(`DROP TABLE outbox_event`)
	up(t, s)
	if err := sql.Check(t.Context(), s.conn); err != nil {
		t.Error(err)
	}
}

// Tables are created in the first schema of search_path and nowhere else. Two schemas of one database are
// independent, even if the second can see the first.
func TestSchemas(t *testing.T) {
	url := pgtest.Empty(t)
	s := connect(t, url)
	home := s.do(`SELECT current_schema()`)
	s.do(`CREATE SCHEMA "My App"; CREATE SCHEMA other`)
	mine, other := connect(t, url), connect(t, url)
	mine.do(`SET search_path = "My App"`)
	other.do(`SET search_path = other, "My App"`)
	up(t, mine)
	up(t, other)
	up(t, mine)
	s.expect("objects of the first schema", s.objects(home), "")
	s.expect("objects", other.objects("other"), mine.objects(`"My App"`))
	if mine.objects(`"My App"`) == "" {
		t.Error("no objects")
	}
	id := s.do(`SELECT other.workflow_enqueue('a.b', idempotency_key => 'k')`)
	if id == s.do(`SELECT "My App".workflow_enqueue('a.b', idempotency_key => 'k')`) {
		t.Error("the same run in both schemas")
	}
	s.expect("answer", s.do(`SELECT "My App".workflow_cancel('`+id+`')`), "not found")
	s.expect("answer", s.do(`SELECT other.workflow_cancel('`+id+`')`), "cancelled")
	s.expect("events", s.do(`SELECT count(*) FROM other.workflow_event`), "2")
	s.expect("events", s.do(`SELECT count(*) FROM "My App".workflow_event`), "1")
}

// Without a schema for the tables, Up returns an error that says so.
func TestNoSchema(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	s.do(`SET search_path = nowhere`)
	if err := sql.Up(t.Context(), s.conn); err == nil || !strings.Contains(err.Error(), "search_path") {
		t.Errorf("err = %v", err)
	}
}

// Each file can be run by hand, in order, in one transaction or without any.
func TestByHand(t *testing.T) {
	for _, whole := range []bool{true, false} {
		s := connect(t, pgtest.Empty(t))
		if whole {
			s.do(`BEGIN`)
		}
		for _, m := range sql.Migrations() {
			s.do(m.SQL)
		}
		if whole {
			s.do(`COMMIT`)
		}
		s.expect("answer", s.do(`SELECT workflow_cancel(workflow_enqueue('a.b'))`), "cancelled")
	}
}

// A build with files that are not numbered from 1 without gaps panics.
func TestNumbering(t *testing.T) {
	of := func(names ...string) (panicked any) {
		defer func() { panicked = recover() }()
		files := fstest.MapFS{}
		for _, name := range names {
			files[name] = &fstest.MapFile{Data: []byte("SELECT 1")}
		}
		sql.MigrationsOf(files)
		return nil
	}
	if p := of("0001_a.sql", "0002_b_c.sql"); p != nil {
		t.Error(p)
	}
	for _, names := range [][]string{
		{"0001_a.sql", "0003_c.sql"}, {"0002_a.sql"}, {"0001_a.sql", "0001_b.sql"}, {"1_a.sql"}, {"0001_A.sql"}, {"0001.sql"}, {"0000_a.sql", "0001_b.sql"},
	} {
		if p := of(names...); p == nil || !strings.Contains(fmt.Sprint(p), names[len(names)-1]) && !strings.Contains(fmt.Sprint(p), names[0]) {
			t.Errorf("%v: %v", names, p)
		}
	}
}

// A migration is repeated after a deadlock with programs that run meanwhile and take locks in another order.
func TestUpInADeadlock(t *testing.T) {
	url := pgtest.Empty(t)
	s, other, pool := connect(t, url), connect(t, url), pgtest.Open(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	s.do(`SET deadlock_timeout = '1s'`) // the other session gets its lock before this, if it is quick, and waits for longer
	other.do(`SET deadlock_timeout = '1min'; BEGIN; LOCK TABLE each_progress IN ROW EXCLUSIVE MODE`)
	done := make(chan error, 1)
	go func() { done <- sql.Up(t.Context(), s.conn) }()
	pgtest.Blocked(t, pool, 1)
	other.do(`LOCK TABLE process_instance IN ROW EXCLUSIVE MODE; COMMIT`) // which the migration has locked by now
	if err := <-done; err != nil {
		t.Errorf("up: %v", err)
	}
}

// A transaction that holds a table for long delays a migration, but not the statements that would queue behind the
// migration's lock.
func TestUpBehindALock(t *testing.T) {
	url := pgtest.Empty(t)
	s, holder, other, pool := connect(t, url), connect(t, url), connect(t, url), pgtest.Open(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	holder.do(`BEGIN; LOCK TABLE each_progress IN ROW EXCLUSIVE MODE`)
	done := make(chan error, 1)
	go func() { done <- sql.Up(t.Context(), s.conn) }()
	pgtest.Blocked(t, pool, 1)
	other.do(`SET lock_timeout = '5s'; BEGIN; LOCK TABLE each_progress IN ROW EXCLUSIVE MODE; COMMIT`)
	holder.do(`COMMIT`)
	if err := <-done; err != nil {
		t.Errorf("up: %v", err)
	}
}

// A lock that is held longer than all tries is an error that says what to do. Up may be called again afterwards.
func TestUpGivesUp(t *testing.T) {
	url := pgtest.Empty(t)
	s, holder := connect(t, url), connect(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	holder.do(`BEGIN; LOCK TABLE each_progress IN ROW EXCLUSIVE MODE`)
	defer sql.SetLockTries(2)()
	err := sql.Up(t.Context(), s.conn)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "55P03" || !strings.Contains(err.Error(), "locked by others, 2 times in a row; end their transactions (pg_stat_activity names them) and try again") {
		t.Errorf("err = %v", err)
	}
	holder.do(`COMMIT`)
	up(t, s)
}

// If the commit of a batch of mended rows fails, the next try mends them and does not skip them.
func TestMendingIsDoneAgain(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_run (id, type, created_at) SELECT lpad(g::text, 32, '0')::uuid, 'up.a', CASE g WHEN 1 THEN timestamptz '1000-01-01' ELSE now() END FROM generate_series(1, 1500) AS g; COMMIT`)
	s.do(`CREATE SEQUENCE tries;
		CREATE FUNCTION refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('tries') = 1 THEN RAISE EXCEPTION 'not now' USING ERRCODE = 'lock_not_available'; END IF;
			RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER refuse_once AFTER UPDATE ON workflow_run DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse_once()`)
	up(t, s)
	s.expect("the row", s.do(`SELECT created_at > '1000-01-01' FROM workflow_run WHERE id = lpad('1', 32, '0')::uuid`), "t")
	s.expect("tries", s.do(`SELECT last_value >= 2 FROM tries`), "t")
}
