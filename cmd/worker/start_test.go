package main_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// exec executes a statement on the database at url.
func exec(t *testing.T, url, statement string, args ...any) {
	t.Helper()
	conn := connect(t, url)
	if _, err := conn.Exec(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// migrated returns a server of the test's own, whose database postgres is migrated.
func migrated(t *testing.T) (*pgserver.Server, string) {
	t.Helper()
	server := pgtest.Server(t, pgserver.Options{})
	url := server.URL("postgres")
	if err := sql.Up(t.Context(), connect(t, url)); err != nil {
		t.Fatal(err)
	}
	return server, url
}

// refuser answers each connection like a server that refuses the user.
func refuser(t *testing.T, code, message string) (hostPort string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			backend := pgproto3.NewBackend(conn, conn)
			if _, err := backend.ReceiveStartupMessage(); err == nil {
				backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: code, Message: message})
				_ = backend.Flush()
			}
			_ = conn.Close()
		}
	}()
	return listener.Addr().String()
}

func wantExit(t *testing.T, p *cmdtest.Process, code int, parts ...string) {
	t.Helper()
	if got := p.Wait(); got != code {
		t.Errorf("exit code %d, want %d", got, code)
	}
	for _, part := range parts {
		if !strings.Contains(p.Stderr.String(), part) {
			t.Errorf("stderr lacks %q:\n%s", part, p.Stderr.String())
		}
	}
	if strings.Contains(p.Stderr.String(), secret) {
		t.Errorf("stderr has a secret:\n%s", p.Stderr.String())
	}
}

// A start ends if the server refuses the password, or if the database does not exist.
func TestRefusedByServer(t *testing.T) {
	t.Parallel()
	for code, message := range map[string]string{
		"28P01": `password authentication failed for user "app"`,
		"28000": `role "app" does not exist`,
		"3D000": `database "app" does not exist`,
	} {
		p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app:" + secret + "@" + refuser(t, code, message) + "/app?sslmode=disable"})
		wantExit(t, p, 3, "the database cannot be used", strings.Split(message, `"`)[0])
	}
}

// If the tables are missing, the worker says how to create them, and creates nothing.
func TestSchemaMissing(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url}), 3, "version 0", "workflowctl migrate up")
	var tables int
	if err := connect(t, url).QueryRow(t.Context(), `
		SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace`).Scan(&tables); err != nil || tables != 0 {
		t.Errorf("%d tables, %v", tables, err)
	}
}

// A schema that is newer or older than the program is refused, and both versions are named.
func TestSchemaOfOtherVersion(t *testing.T) {
	t.Parallel()
	newer := pgtest.URL(t)
	exec(t, newer, `INSERT INTO workflow_schema (version, name, sha256) VALUES (999, '0999_later.sql', '')`)
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + newer}), 3, "newer", "version 999")

	older := pgtest.URL(t)
	pgtest.ByHand(t, connect(t, older), `DELETE FROM workflow_schema WHERE version = (SELECT max(version) FROM workflow_schema)`)
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + older}), 3, "older", "workflowctl migrate up")
}

// A schema that was changed after its release is refused.
func TestSchemaEdited(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pgtest.ByHand(t, connect(t, url), `UPDATE workflow_schema SET sha256 = 'other' WHERE version = 1`)
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url}), 3, "other text")
}

// An encoding that cannot hold all text is refused.
func TestEncoding(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Options{})
	exec(t, server.URL("postgres"), `
		CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + server.URL("ascii")}), 3, "SQL_ASCII", "UTF8")
}

// The worker waits while the database is read-only, and touches no run meanwhile.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	_, url := migrated(t)
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`)
	exec(t, url, `ALTER DATABASE postgres SET default_transaction_read_only = on`)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0"})
	p.AwaitLog("waiting for the database")
	if status, body := get(t, p, "/readyz"); status != 503 || !strings.Contains(body, "read-only") {
		t.Errorf("readyz: %d %s", status, body)
	}
	if n := count(t, url, `attempt > 0`); n != 0 {
		t.Errorf("%d runs were started", n)
	}
	exec(t, url+"&default_transaction_read_only=off", `ALTER DATABASE postgres RESET default_transaction_read_only`)
	p.AwaitLog("worker starts")
	pgtest.Await(t, "the run succeeds", func() bool { return count(t, url, `status = 'succeeded' AND type = 'default.noop.v1'`) == 1 })
}

// With WORKER_FAIL_FAST the worker does not wait for a database that does not answer.
func TestFailFast(t *testing.T) {
	t.Parallel()
	host, _ := cmdtest.Trap(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app:" + secret + "@" + host + "/app", "WORKER_FAIL_FAST=true"})
	wantExit(t, p, 3, "the database cannot be used")
}

// A worker that waits for its database stops at the first signal.
func TestStopWhileWaiting(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app:" + secret + "@127.0.0.1:1/app"})
	p.AwaitLog("waiting for the database")
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0, "stopped before")
}

// Without WORKER_STRICT the worker warns of doubtful settings, each with a remedy, and starts. Prefixes are
// trimmed and shown. An underscore is literal. Duplicates are removed. For an unknown name the nearest name is
// proposed. A long grace period is doubtful.
func TestWarnings(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{
		"DATABASE_URL=" + pgtest.URL(t),
		"WORKER_TYPE_PREFIXES=media., email. ,bil_ling.,email.,media.video.",
		"WORKER_LEASE_DURATON=30s", "WORKER_CONCURENCY=3", "WORKER_QUITE_ANOTHER_THING=1",
		"WORKER_SERVICE_HOST=10.0.0.1", "WORKER_PORT=tcp://10.0.0.1:80", "WORKER_PORT_80_TCP_ADDR=10.0.0.1",
		"WORKER_SHUTDOWN_GRACE=1m",
	})
	p.AwaitLog("a prefix has no handler") // the last of the warnings
	for _, want := range []string{
		"WORKER_LEASE_DURATON: there is no such variable; remove it, or write WORKER_LEASE if that is meant",
		"or write WORKER_CONCURRENCY if that is meant",
		"WORKER_QUITE_ANOTHER_THING: there is no such variable; remove it\"",
		"it is longer than WORKER_LEASE, 30s",
		"these are enough: bil_ling.,email.,media.",
		`"prefixes":["bil_ling.","email.","graph.","media."]`,
	} {
		if !strings.Contains(p.Stderr.String(), want) {
			t.Errorf("stderr lacks %q", want)
		}
	}
	for _, not := range []string{"SERVICE_HOST", "WORKER_PORT"} {
		if strings.Contains(p.Stderr.String(), not) {
			t.Errorf("stderr has %q, which Kubernetes sets", not)
		}
	}
	p.Signal(syscall.SIGINT)
	wantExit(t, p, 0)
}

// If this machine's clock is an hour off the database's, the worker warns and names the difference. With
// WORKER_STRICT it does not start.
func TestSkew(t *testing.T) {
	t.Parallel()
	_, url := migrated(t)
	exec(t, url, `CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
		AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$`)
	url += "&search_path=public,pg_catalog"
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url})
	p.AwaitLog("worker starts")
	if got := p.Stderr.String(); !strings.Contains(got, `clock and the database's differ`) || !strings.Contains(got, `"skew":"`) {
		t.Errorf("stderr: %s", got)
	}
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_STRICT=true"}), 3, "WORKER_STRICT")
}

// Tables in a schema of another name are found through options, as with psql, and through search_path, which
// causes a note but no warning. If the address names no schema, the error says where the tables are.
func TestSearchPath(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Options{})
	exec(t, server.URL("postgres"), `CREATE SCHEMA flows`)
	url := server.URL("postgres") + "&options=-csearch_path%3Dflows"
	if err := sql.Up(t.Context(), connect(t, url)); err != nil {
		t.Fatal(err)
	}
	for i, address := range []string{url, server.URL("postgres") + "&search_path=flows"} {
		p := cmdtest.Start(t, []string{"DATABASE_URL=" + address, "WORKER_STRICT=true"})
		exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`)
		pgtest.Await(t, "the run succeeds", func() bool { return count(t, url, `status = 'succeeded' AND type = 'default.noop.v1'`) == i+1 })
		if told := strings.Contains(p.Stderr.String(), "but not to psql; ?options=-csearch_path%3Dname does so to both"); told != (i == 1) {
			t.Errorf("%s: stderr: %s", address, p.Stderr.String())
		}
		p.Signal(syscall.SIGTERM)
		wantExit(t, p, 0)
	}
	wantExit(t, cmdtest.Start(t, []string{"DATABASE_URL=" + server.URL("postgres")}), 3, `tables are in schema \"flows\"; have the address lead there by ?options=-csearch_path%3Dflows`)
}
