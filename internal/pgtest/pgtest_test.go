package pgtest_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

func exec1(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](t *testing.T, pool *pgxpool.Pool, sql string) (value T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// The databases of two tests are separate: neither sees the other's tables, rows or sessions.
func TestIsolation(t *testing.T) {
	a, b := pgtest.New(t), pgtest.New(t)
	exec1(t, a, "CREATE TABLE mine ()")
	if query[bool](t, b, "SELECT to_regclass('mine') IS NOT NULL") {
		t.Error("b sees a table of a")
	}
	const where = "SELECT current_database() || '.' || current_schema()"
	if a, b := query[string](t, a, where), query[string](t, b, where); a == b {
		t.Errorf("both are %s", a)
	}
}

// A new database is migrated to the latest version.
func TestMigrated(t *testing.T) {
	pool := pgtest.New(t)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if err := sql.Check(t.Context(), conn.Conn()); err != nil {
		t.Error(err)
	}
}

// A test that finds no server fails with a message that says why. It is not skipped.
func TestNoServer(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestMigrated$", "-test.v")
	cmd.Env = append(os.Environ(), "TEST_DATABASE_URL=", "DATABASE_URL=", "PGTEST_BINDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--- FAIL: TestMigrated") || !strings.Contains(string(out), "PGTEST_BINDIR") {
		t.Errorf("error %v, want a failure that names PGTEST_BINDIR\n%s", err, out)
	}
}

// An empty database has no tables at all.
func TestEmpty(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), pgtest.Empty(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if n := query[int](t, pool, "SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace"); n != 0 {
		t.Errorf("%d tables, want none", n)
	}
}

// Tests that run in parallel all get a database.
func TestParallel(t *testing.T) {
	for i := range 12 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			if got := query[int](t, pgtest.New(t), "SELECT 1"); got != 1 {
				t.Errorf("got %d", got)
			}
		})
	}
}

// The database is gone after its test, even if something is still connected.
func TestDropped(t *testing.T) {
	var conn *pgx.Conn
	t.Run("user", func(t *testing.T) {
		var err error
		if conn, err = pgx.Connect(t.Context(), pgtest.URL(t)); err != nil {
			t.Fatal(err)
		}
	})
	defer conn.Close(context.Background())
	var there bool
	err := conn.QueryRow(t.Context(), "SELECT to_regclass('workflow_schema') IS NOT NULL").Scan(&there)
	if err == nil && there {
		t.Error("its tables are still there")
	}
}

// The pool leaves no named prepared statement on the server, so a pooler may share its connections.
func TestNoPreparedStatements(t *testing.T) {
	pool := pgtest.New(t)
	for range 3 {
		if err := pool.QueryRow(t.Context(), "SELECT $1::text", "x").Scan(new(string)); err != nil {
			t.Fatal(err)
		}
	}
	if n := query[int](t, pool, "SELECT count(*) FROM pg_prepared_statements"); n != 0 {
		t.Errorf("%d prepared statements", n)
	}
}

// A private server can be killed and restarted.
func TestServer(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{Durable: true})
	pool, err := pgxpool.New(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	exec1(t, pool, "CREATE TABLE kept AS SELECT 7 AS n")
	server.Kill()
	if _, err := pool.Exec(t.Context(), "SELECT 1"); err == nil {
		t.Error("a killed server answers")
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the pool recovers", func() bool { return pool.Ping(t.Context()) == nil })
	if n := query[int](t, pool, "SELECT n FROM kept"); n != 7 {
		t.Errorf("n = %d, want 7", n)
	}
}

// Blocked finds the sessions that wait for a lock in this database, even if they use all connections of the pool.
func TestBlocked(t *testing.T) {
	pool := pgtest.New(t)
	exec1(t, pool, "CREATE TABLE fought_over ()")
	holder, err := pgx.Connect(t.Context(), pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close(context.Background())
	tx, err := holder.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "LOCK TABLE fought_over"); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range pool.Config().MaxConns {
		group.Go(func() {
			if _, err := pool.Exec(t.Context(), "SELECT FROM fought_over"); err != nil {
				t.Error(err)
			}
		})
	}
	pgtest.Blocked(t, pool, int(pool.Config().MaxConns))
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	group.Wait()
	pgtest.Blocked(t, pool, 0)
}

// failing is a test that records why it failed.
type failing struct {
	testing.TB
	reason string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.reason = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// Await calls cond until it returns true, and otherwise fails the test with what it waited for.
func TestAwait(t *testing.T) {
	asked := 0
	pgtest.Await(t, "the third time", func() bool { asked++; return asked == 3 })
	if asked != 3 {
		t.Errorf("asked %d times, want 3", asked)
	}

	f := &failing{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pgtest.AwaitFor(f, 20*time.Millisecond, "hell freezes over", func() bool { return false })
	}()
	<-done
	if !strings.Contains(f.reason, "hell freezes over") {
		t.Errorf("reason = %q", f.reason)
	}
}
