package main_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// login returns the address of the database for a role of the test's own.
func login(t *testing.T, address, role string) string {
	t.Helper()
	exec(t, address, `CREATE ROLE `+role+` LOGIN SUPERUSER PASSWORD 'secret'`)
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(role, "secret")
	return u.String()
}

// within waits until /readyz says something, and fails if that takes longer than allowed.
func within(t *testing.T, p *cmdtest.Process, status int, limit time.Duration, when string) {
	t.Helper()
	begun := time.Now()
	awaitStatus(t, p, "/readyz", status)
	if took := time.Since(begun); took > limit {
		t.Errorf("%s: /readyz is %d after %s, want it within %s", when, status, took.Round(time.Second/10), limit)
	}
}

// A worker without work is ready only while it can write to the database. It is not ready while the server is
// away or read-only, while its role's sessions are read-only, or while its role lacks a right. Each condition
// shows within the documented time, and ends within seconds after its cause. Then runs are executed, even by
// sessions opened meanwhile.
func TestReadyMeansWritable(t *testing.T) {
	t.Parallel()
	server, owner := migrated(t)
	app := login(t, owner, "app")
	exec(t, owner, `ALTER ROLE app NOSUPERUSER`)
	exec(t, owner, `GRANT ALL ON ALL TABLES IN SCHEMA public TO app; GRANT ALL ON ALL FUNCTIONS IN SCHEMA public TO app`)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + app, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_CLEANUP_EVERY=0", "WORKER_READY_WITHIN=5s"})
	const soon = 10 * time.Second // five, and some more for a busy machine
	within(t, p, 200, soon, "at start")
	hurt := func(what string, do, undo func()) {
		do()
		within(t, p, 503, soon, what)
		if status, _ := get(t, p, "/healthz"); status != 200 {
			t.Errorf("%s: /healthz is %d", what, status)
		}
		undo()
		within(t, p, 200, soon, what+" no more")
		exec(t, owner, `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`)
		pgtest.Await(t, "a run to be executed, after: "+what, func() bool { return count(t, owner, `status <> 'succeeded'`) == 0 })
	}
	cut := `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'`
	statements := func(list ...string) func() {
		return func() {
			for _, s := range list {
				exec(t, owner, s)
			}
		}
	}
	hurt("no server", func() { server.StopMode(pgserver.Fast) }, func() {
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	hurt("a read-only server", statements(`ALTER SYSTEM SET default_transaction_read_only = on`, `SELECT pg_reload_conf()`),
		statements(`ALTER SYSTEM RESET default_transaction_read_only`, `SELECT pg_reload_conf()`))
	// Sessions that were opened meanwhile stay read-only for ever.
	hurt("read-only sessions", statements(`ALTER ROLE app SET default_transaction_read_only = on`, cut), statements(`ALTER ROLE app RESET default_transaction_read_only`))
	hurt("a missing right", statements(`REVOKE EXECUTE ON FUNCTION workflow_present_v1 FROM app`), statements(`GRANT EXECUTE ON FUNCTION workflow_present_v1 TO app`))
	hurt("no connection", statements(`ALTER ROLE app CONNECTION LIMIT 0`, cut), statements(`ALTER ROLE app CONNECTION LIMIT -1`))
}

// A worker does not connect again and again if the server permits one connection of its role or none: its
// pools, its listener and its cleanup together make a few attempts at first, and then one a second. With one
// connection it works.
func TestRefusedConnectionsArePaced(t *testing.T) {
	t.Parallel()
	_, direct := migrated(t)
	const role = "one"
	through, connections := cmdtest.Forward(t, login(t, direct, role))
	exec(t, direct, `ALTER ROLE `+role+` NOSUPERUSER CONNECTION LIMIT 1`)
	exec(t, direct, `GRANT ALL ON ALL TABLES IN SCHEMA public TO `+role+`; GRANT ALL ON ALL FUNCTIONS IN SCHEMA public TO `+role)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + through + "&sslmode=disable", "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_POLL_INTERVAL=20ms"})
	awaitStatus(t, p, "/readyz", 200)
	exec(t, direct, `INSERT INTO workflow_run (type) SELECT 'default.noop.v1' FROM generate_series(1, 20)`)
	before, begun := connections(), time.Now()
	for time.Since(begun) < 8*time.Second {
		exec(t, direct, `INSERT INTO workflow_run (type) SELECT 'default.noop.v1' FROM generate_series(1, 5)`)
		time.Sleep(100 * time.Millisecond)
	}
	if n := connections() - before; n > 12 {
		t.Errorf("%d attempts to connect in 8 seconds, want twelve at most", n)
	}
	pgtest.Await(t, "runs to be executed", func() bool { return count(t, direct, `status <> 'succeeded' AND type = 'default.noop.v1'`) == 0 })

	exec(t, direct, `ALTER ROLE `+role+` CONNECTION LIMIT 0`)
	exec(t, direct, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '`+role+`'`)
	awaitStatus(t, p, "/readyz", 503)
	before, begun = connections(), time.Now()
	pgtest.Await(t, "ten seconds to pass", func() bool { return time.Since(begun) > 10*time.Second })
	if n := connections() - before; n < 5 || n > 25 {
		t.Errorf("%d attempts to connect in 10 seconds, want one a second, and one more for what was let in", n)
	}
	if log := p.Stderr.String(); strings.Count(log, "not tried again yet") > 40 {
		t.Errorf("the log is full of it:\n%s", log)
	}
}
