package main_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/schema"
	"github.com/simple-workflow/simple-workflow/sql"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func want(t *testing.T, p *cmdtest.Process, code int, parts ...string) {
	t.Helper()
	if got := p.Wait(); got != code {
		t.Errorf("exit code %d, want %d", got, code)
	}
	all := p.Stdout.String() + p.Stderr.String()
	for _, part := range parts {
		if !strings.Contains(all, part) {
			t.Errorf("output lacks %q:\n%s", part, all)
		}
	}
}

// migrate up creates the schema, says what it applied, and does nothing the second time. migrate status exits with 1
// before and names the command, and with 0 after.
func TestUp(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	env := []string{"DATABASE_URL=" + url}
	latest := len(sql.Migrations())
	want(t, cmdtest.Start(t, env, "migrate", "status"), 1,
		"0001_run.sql", "no", fmt.Sprintf("%d of %[1]d migrations are missing; run: workflowctl migrate up", latest))
	want(t, cmdtest.Start(t, nil, "migrate", "up", "--database-url", url), 0,
		"applied 0001_run.sql", fmt.Sprintf("is at version %d", latest))
	if err := sql.Check(t.Context(), connect(t, url)); err != nil {
		t.Error(err)
	}
	again, _ := cmdtest.Run(t, env, "migrate", "up")
	want(t, again, 0, "is at version")
	if strings.Contains(again.Stdout.String(), "applied") {
		t.Errorf("applied twice: %s", again.Stdout.String())
	}
	status, _ := cmdtest.Run(t, env, "migrate", "status")
	want(t, status, 0, time.Now().UTC().Format("  2006-01-"))
}

// Ten commands that migrate one empty database at once make one schema, and none fails. The same holds for a schema
// that has to be created first.
func TestTenAtOnce(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"migrate", "up"}, {"migrate", "up", "--schema", "flows"}} {
		url := pgtest.Empty(t)
		var all []*cmdtest.Process
		for range 10 {
			all = append(all, cmdtest.Start(t, []string{"DATABASE_URL=" + url}, args...))
		}
		for _, p := range all {
			want(t, p, 0, "is at version")
		}
		conn := connect(t, url)
		var tables int
		if err := conn.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_class WHERE relname = 'workflow_run'`).Scan(&tables); err != nil || tables != 1 {
			t.Errorf("%d tables workflow_run, %v", tables, err)
		}
		if len(args) > 2 {
			if _, err := conn.Exec(t.Context(), `SET search_path = flows`); err != nil {
				t.Fatal(err)
			}
		}
		if err := sql.Check(t.Context(), conn); err != nil {
			t.Error(err)
		}
	}
}

// In a schema whose name needs quotes, all tables are created there, and none in public.
func TestSchema(t *testing.T) {
	t.Parallel()
	const name = `My "flows", all`
	server := pgtest.Server(t, pgserver.Options{})
	url := server.URL("postgres")
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "migrate", "up", "--schema", name), 0, "is at version")
	want(t, cmdtest.Start(t, env, "migrate", "status", "--schema", name), 0)
	want(t, cmdtest.Start(t, env, "migrate", "status"), 1, "there is an installation in "+name, "by ?"+schema.InAddress(name)+" in the address", "a second one is made by workflowctl migrate up")
	of, _ := cmdtest.Run(t, []string{"DATABASE_URL=" + url + "&" + schema.InAddress(name)}, "migrate", "status")
	want(t, of, 0)
	if of.Stderr.String() != "" {
		t.Errorf("stderr: %s", of.Stderr.String())
	}
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url + "&search_path=public"}, "migrate", "status"), 1, "note: search_path names the schema to this program, but not to psql")
	conn := connect(t, url)
	var elsewhere int
	if err := conn.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
		WHERE nspname = 'public'`).Scan(&elsewhere); err != nil || elsewhere != 0 {
		t.Errorf("%d relations in public, %v", elsewhere, err)
	}
	if _, err := conn.Exec(t.Context(), "SET search_path = "+pgx.Identifier{name}.Sanitize()); err != nil {
		t.Fatal(err)
	}
	if err := sql.Check(t.Context(), conn); err != nil {
		t.Error(err)
	}
	if _, err := conn.Exec(t.Context(), `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`); err != nil {
		t.Error(err)
	}
}

// What print prints makes the same database as up, also when it is executed in two parts.
func TestPrint(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	conn := connect(t, url)
	all, _ := cmdtest.Run(t, nil, "migrate", "print")
	rest, _ := cmdtest.Run(t, nil, "migrate", "print", "--from", "2")
	first, found := strings.CutSuffix(all.Stdout.String(), rest.Stdout.String())
	if !found || !strings.Contains(first, "CREATE TABLE workflow_run (") {
		t.Fatal("print --from 2 is not the end of print")
	}
	for _, script := range []string{first, rest.Stdout.String()} {
		if _, err := conn.PgConn().Exec(t.Context(), script).ReadAll(); err != nil {
			t.Fatal(err)
		}
	}
	if err := sql.Check(t.Context(), conn); err != nil {
		t.Error(err)
	}
	const columns = `
		SELECT table_name, column_name, data_type, is_nullable, column_default
		FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 2`
	if got, want := dump(t, conn, columns), dump(t, connect(t, pgtest.URL(t)), columns); got != want {
		t.Errorf("columns differ:\n%s\nwant:\n%s", got, want)
	}
}

func dump(t *testing.T, conn *pgx.Conn, query string) string {
	t.Helper()
	rows, _ := conn.Query(t.Context(), "SELECT string_agg(row::text, e'\\n') FROM ("+query+") row")
	text, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// A database that is newer, or an unreachable server, is reported with a message and exit code 1.
func TestFailures(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	if _, err := connect(t, url).Exec(t.Context(), `
		INSERT INTO workflow_schema (version, name, sha256) VALUES (999, '0999_later.sql', '')`); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"up", "status"} {
		want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url}, "migrate", command), 1, "newer", "version 999")
	}
	host, _ := cmdtest.Trap(t)
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=postgres://app:s3cr3t@" + host + "/app"}, "migrate", "up"), 1, "workflowctl: ")
}

// Errors in the command line or the environment exit with 2, without connecting and without printing a password.
func TestUsage(t *testing.T) {
	t.Parallel()
	host, connections := cmdtest.Trap(t)
	url := "postgres://app:s3cr3t@" + host + "/app"
	for _, row := range []struct {
		env  string
		args []string
		want string
	}{
		{"", []string{"migrate", "up"}, "DATABASE_URL"},
		{"", []string{"migrate"}, "migrate up"},
		{"", []string{"migrate", "down"}, `there is no command "down"`},
		{"", []string{"mirgate"}, "migrate"},
		{url, []string{"migrate", "up", "now"}, `use: workflowctl migrate up`},
		{url, []string{"migrate", "up", "--scheme=x"}, "--scheme"},
		{url, []string{"migrate", "up", "--schema=pg_mine"}, `--schema="pg_mine"`},
		{url, []string{"migrate", "up", "--schema=" + strings.Repeat("x", 64)}, "63 bytes"},
		{url, []string{"migrate", "print", "--from=0"}, "--from=0: use 1 to"},
		{"postgre://app:s3cr3t@" + host + "/app", []string{"migrate", "up"}, "scheme must be postgres or postgresql"},
		{"postgres://app:s3cr3t/x@" + host + "/app", []string{"migrate", "status"}, "percent-encode"},
		{url + "?sslmode=requrie", []string{"migrate", "status"}, "verify-full"},
	} {
		p := cmdtest.Start(t, []string{"DATABASE_URL=" + row.env}, row.args...)
		want(t, p, 2, row.want)
		if strings.Contains(p.Stderr.String(), "s3cr3t") {
			t.Errorf("%v: %s", row.args, p.Stderr.String())
		}
	}
	if n := connections(); n != 0 {
		t.Errorf("%d connections, want none", n)
	}
}

// Version and completion work without a database.
func TestVersion(t *testing.T) {
	t.Parallel()
	want(t, cmdtest.Start(t, nil, "version"), 0, "workflowctl ", "schema ")
	want(t, cmdtest.Start(t, nil, "completion", "bash"), 0, "workflowctl")
}
