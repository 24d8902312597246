package main_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// count returns how many runs meet a condition.
func count(t *testing.T, url, condition string) (n int) {
	t.Helper()
	conn := connect(t, url)
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE `+condition).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// sleeper returns a handlers file in which slow.v1 sleeps, and ignores SIGTERM if trap is set.
func sleeper(t *testing.T, trap bool) string {
	t.Helper()
	script := "sleep 600"
	if trap {
		script = "trap '' TERM; while :; do sleep 1; done"
	}
	path := filepath.Join(t.TempDir(), "handlers.yaml")
	text := fmt.Sprintf("default.slow.v1: {program: /bin/sh, args: [-c, %q]}\n", script)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A row inserted as with psql is executed with no setting but the address of the database, and its result is
// the empty object.
func TestWork(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url})
	exec(t, url, `INSERT INTO workflow_run (type, payload) VALUES ('default.noop.v1', '{"anything": [1, "is", null]}')`)
	pgtest.Await(t, "the run succeeds", func() bool {
		return count(t, url, `status = 'succeeded' AND type = 'default.noop.v1' AND result = '{}'`) == 1
	})
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0, `"signal":"terminated"`, "worker stopped")
}

// A worker removes old runs of its prefixes, and old events if it has the rights of the engine, without
// covering default. It writes to workflow_retention how long it wants them kept. With WORKER_CLEANUP_EVERY=0 it
// does neither. A run of default.cleanup.v1 removes old rows at once.
func TestCleanup(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	owner := connect(t, url)
	old := func(typ string) {
		t.Helper()
		exec(t, url, `INSERT INTO workflow_run (type) VALUES ('`+typ+`')`)
		exec(t, url, `UPDATE workflow_run SET status = 'cancelled' WHERE type = '`+typ+`'`)
		pgtest.ByHand(t, owner, `UPDATE workflow_run SET finished_at = now() - interval '31 days' WHERE type = '`+typ+`'`)
	}
	old("media.x.v1")
	old("billing.x.v1")
	exec(t, url, `SELECT outbox_emit(gen_random_uuid(), 'test.event', '{}')`)
	exec(t, url, `UPDATE outbox_event SET published_at = now() - interval '8 days'`)
	idle := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_CLEANUP_EVERY=0"})
	idle.AwaitLog("worker starts")
	cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_TYPE_PREFIXES=media.", "WORKER_CLEANUP_EVERY=1s", "WORKER_KEEP_FAILED=none"})
	pgtest.Await(t, "what is old of media. to be gone", func() bool { return count(t, url, `type = 'media.x.v1'`) == 0 })
	pgtest.Await(t, "a published event to be gone", func() bool { return count(t, url, `EXISTS (SELECT FROM outbox_event)`) == 0 })
	if n := count(t, url, `type = 'billing.x.v1'`); n != 1 {
		t.Error("it has removed what is of another prefix")
	}
	const asked = `SELECT string_agg(prefix || ' ' || kind || ' ' || period, ', ' ORDER BY prefix, kind) FROM workflow_retention WHERE prefix <> 'graph.'`
	var said string
	if err := owner.QueryRow(t.Context(), asked).Scan(&said); err != nil {
		t.Fatal(err)
	}
	if want := "* events 604800, * messages 7776000, * processes 7776000, media. cancelled 2592000, media. deleted 2592000, media. failed 0, media. succeeded 2592000"; said != want {
		t.Errorf("it asks for %s, want %s", said, want)
	}
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.cleanup.v1')`)
	pgtest.Await(t, "what nobody asks for to be gone", func() bool { return count(t, url, `type = 'billing.x.v1'`) == 0 })
}

// Two workers with the same name both work, each with a suffix of its own.
func TestSameName(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	name := regexp.MustCompile(`"worker":"(twin-[0-9a-f]{8})"`)
	seen := map[string]bool{}
	for range 2 {
		p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_ID=twin"})
		p.AwaitLog("worker starts")
		if match := name.FindStringSubmatch(p.Stderr.String()); match != nil {
			seen[match[1]] = true
		}
	}
	if len(seen) != 2 {
		t.Errorf("names: %v", seen)
	}
}

// A worker that was killed is reported as dead after about ten seconds.
func TestKilledWorkerIsToldOf(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url})
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`)
	pgtest.Await(t, "the run succeeds", func() bool { return count(t, url, `status = 'succeeded' AND type = 'default.noop.v1'`) == 1 })
	p.Signal(syscall.SIGKILL)
	p.Wait()
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.noop.v1')`)
	pgtest.Await(t, "why to say that no worker lives", func() bool {
		return count(t, url, `status = 'pending' AND type = 'default.noop.v1' AND workflow_why(id) = 'no live worker covers default.noop.v1; none lives at all'`) == 1
	})
}

// The first SIGTERM lets a handler continue for the grace period. The second ends it at once, and its run is
// released with no attempt charged.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HANDLERS=" + sleeper(t, false), "WORKER_SHUTDOWN_GRACE=10m", "WORKER_CLEANUP_EVERY=0"})
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.slow.v1')`)
	pgtest.Await(t, "the run is leased", func() bool { return count(t, url, `status = 'leased'`) == 1 })
	p.Signal(syscall.SIGTERM)
	p.AwaitLog("waiting for handlers")
	if !p.Running() || count(t, url, `status = 'leased'`) != 1 {
		t.Error("the handler was not let finish")
	}
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0, "stopping at once")
	if n := count(t, url, `status = 'pending' AND attempt = 0`); n != 1 {
		t.Error("the run was not handed back without charge")
	}
}

// When the grace period is over, handlers are ended without another signal, even one whose program ignores
// SIGTERM.
func TestGraceEnds(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HANDLERS=" + sleeper(t, true), "WORKER_SHUTDOWN_GRACE=0", "WORKER_CLEANUP_EVERY=0"})
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.slow.v1')`)
	pgtest.Await(t, "the run is leased", func() bool { return count(t, url, `status = 'leased'`) == 1 })
	p.Signal(syscall.SIGINT)
	wantExit(t, p, 0)
	if n := count(t, url, `status = 'pending' AND attempt = 0`); n != 1 {
		t.Error("the run was not handed back without charge")
	}
}

// The log has one JSON object a line, readable durations, and never the password or a payload.
func TestLog(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_LOG_LEVEL=debug"})
	exec(t, url, `INSERT INTO workflow_run (type, payload, max_attempts) VALUES ('default.nobody.v1', '{"card": "4000-1234"}', 1)`)
	p.AwaitLog("no_handler_registered\"")
	log := p.Stderr.String()
	for _, line := range strings.Split(strings.TrimSpace(log), "\n") {
		if !strings.HasPrefix(line, "{") || !strings.HasSuffix(line, "}") {
			t.Errorf("not an object: %s", line)
		}
	}
	for _, want := range []string{`"lease":"30s"`, `"type":"default.nobody.v1"`, `"run":"`, `"attempt":1`} {
		if !strings.Contains(log, want) {
			t.Errorf("log lacks %s", want)
		}
	}
	if strings.Contains(log, "4000-1234") {
		t.Error("log has a payload")
	}
}

// With format text the log has lines for people, without colours if it does not go to a terminal.
func TestTextLog(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + pgtest.URL(t), "WORKER_LOG_FORMAT=text"})
	p.AwaitLog("INF worker starts")
	if strings.Contains(p.Stderr.String(), "\x1b") {
		t.Error("there are colours")
	}
}
