package main_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

var served = regexp.MustCompile(`"msg":"serving HTTP","address":"([^"]+)"`)

// address returns where the process serves HTTP.
func address(t *testing.T, p *cmdtest.Process) string {
	t.Helper()
	p.AwaitLog("serving HTTP")
	match := served.FindStringSubmatch(p.Stderr.String())
	if match == nil {
		t.Fatalf("no address in %s", p.Stderr.String())
	}
	_, port, err := net.SplitHostPort(match[1])
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", port)
}

func ask(t *testing.T, p *cmdtest.Process, method, path, authorization string) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+address(t, p)+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body), response.Header
}

func get(t *testing.T, p *cmdtest.Process, path string) (int, string) {
	t.Helper()
	status, body, _ := ask(t, p, "GET", path, "")
	return status, body
}

func awaitStatus(t *testing.T, p *cmdtest.Process, path string, want int) (body string) {
	t.Helper()
	pgtest.Await(t, fmt.Sprintf("%s answers %d", path, want), func() bool {
		var got int
		got, body = get(t, p, path)
		return got == want
	})
	return body
}

// While the database is down, at start as well as later, the process is alive but not ready, and gives the
// reason. When the database is back, it works again without help.
func TestDatabaseDown(t *testing.T) {
	t.Parallel()
	server, url := migrated(t)
	server.StopMode(pgserver.Fast)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_POLL_INTERVAL=50ms"})
	p.AwaitLog("waiting for the database")
	if status, _ := get(t, p, "/healthz"); status != 200 {
		t.Errorf("healthz: %d", status)
	}
	if status, body := get(t, p, "/readyz"); status != 503 || !strings.Contains(body, "waiting for the database") {
		t.Errorf("readyz: %d %s", status, body)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitStatus(t, p, "/readyz", 200)

	server.StopMode(pgserver.Immediate)
	if body := awaitStatus(t, p, "/readyz", 503); !strings.Contains(body, "no change of the database has succeeded for") {
		t.Errorf("readyz: %s", body)
	}
	if status, _ := get(t, p, "/healthz"); status != 200 {
		t.Errorf("healthz: %d", status)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitStatus(t, p, "/readyz", 200)
}

// A worker whose slots are all taken for a long time is ready. One that was told to stop is not.
func TestReadyWhenFull(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_POLL_INTERVAL=10ms",
		"WORKER_HANDLERS=" + sleeper(t, false), "WORKER_CONCURRENCY=1", "WORKER_CLEANUP_EVERY=0", "WORKER_LEASE=2s"})
	exec(t, url, `INSERT INTO workflow_run (type) VALUES ('default.slow.v1')`)
	pgtest.Await(t, "the run is leased", func() bool { return count(t, url, `status = 'leased'`) == 1 })
	polls := pollsOf(t, p)
	for deadline := time.Now().Add(7 * time.Second); time.Now().Before(deadline); {
		if status, body := get(t, p, "/readyz"); status != 200 {
			t.Fatalf("readyz: %d %s", status, body)
		}
	}
	if now := pollsOf(t, p); now != polls {
		t.Errorf("it polled, %s times and then %s, so this shows nothing", polls, now)
	}
	p.Signal(syscall.SIGTERM)
	if body := awaitStatus(t, p, "/readyz", 503); !strings.Contains(body, "stopping") {
		t.Errorf("readyz: %s", body)
	}
	p.Signal(syscall.SIGTERM)
	wantExit(t, p, 0)
}

// pollsOf returns how often the worker has polled.
func pollsOf(t *testing.T, p *cmdtest.Process) string {
	t.Helper()
	_, body := get(t, p, "/metrics")
	_, value, found := strings.Cut(body, "\nworkflow_poll_rows_count ")
	if !found {
		t.Fatalf("no count of polls in:\n%s", body)
	}
	value, _, _ = strings.Cut(value, "\n")
	return value
}

// Metrics count what was done. Types without a handler share one label, so clients cannot create labels.
func TestMetrics(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_CLEANUP_EVERY=0"})
	exec(t, url, `INSERT INTO workflow_run (type) SELECT 'default.noop.v1' FROM generate_series(1, 7)`)
	exec(t, url, `INSERT INTO workflow_run (type) SELECT 'default.made_up_' || i FROM generate_series(1, 5) i`)
	var body string
	pgtest.Await(t, "all runs are settled", func() bool {
		_, body = get(t, p, "/metrics")
		return strings.Contains(body, `workflow_settled_total{outcome="succeeded"} 7`) &&
			strings.Contains(body, `workflow_settled_total{outcome="failed"} 5`)
	})
	for _, want := range []string{
		"workflow_leased_total 12", "workflow_retries_total 0", "workflow_stale_settles_refused_total 0", "workflow_in_flight 0",
		`workflow_lost_leases_total{cause="lost"} 0`, `workflow_reclaimed_total{kind="exhausted"} 0`,
		`workflow_handler_seconds_count{type="default.noop.v1"} 7`, `workflow_handler_seconds_count{type="other"} 5`,
		"workflow_lease_seconds_bucket", "workflow_settle_seconds_count", "workflow_poll_rows_sum 12", "workflow_heartbeat_seconds_count",
		"workflow_stuck_handlers 0", "workflow_last_poll_timestamp_seconds 1.", "workflow_build_info{", "go_goroutines", "process_open_fds",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	if strings.Contains(body, "made_up") {
		t.Error("metrics have a label from a row")
	}
}

// On an address that others can reach, metrics and reasons require the token. Without it one only learns
// whether the process is alive and ready.
func TestToken(t *testing.T) {
	t.Parallel()
	const token = "0123456789abcdef"
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_HTTP_ADDR=0.0.0.0:0", "WORKER_HTTP_TOKEN=" + token})
	p.AwaitLog("waiting for the database")
	for authorization, want := range map[string]int{
		"":                    401,
		"Bearer ":             401,
		"Bearer " + token[1:]: 401,
		token:                 401,
		"Bearer " + token:     200,
	} {
		if got, _, _ := ask(t, p, "GET", "/metrics", authorization); got != want {
			t.Errorf("metrics with %q: %d, want %d", authorization, got, want)
		}
	}
	if status, body := get(t, p, "/healthz"); status != 200 || body != "alive\n" {
		t.Errorf("healthz: %d %s", status, body)
	}
	if status, body := get(t, p, "/readyz"); status != 503 || body != "not ready\n" {
		t.Errorf("readyz: %d %s", status, body)
	}
	if status, body, _ := ask(t, p, "GET", "/readyz", "Bearer "+token); status != 503 || !strings.Contains(body, "waiting") {
		t.Errorf("readyz with token: %d %s", status, body)
	}
	if strings.Contains(p.Stderr.String(), token) {
		t.Error("the log has the token")
	}
}

// Only three pages are served, and only to GET and HEAD.
func TestOnlyReads(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_HTTP_ADDR=127.0.0.1:0"})
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS"} {
		if status, _, header := ask(t, p, method, "/healthz", ""); status != 405 || header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d, Allow %q", method, status, header.Get("Allow"))
		}
	}
	if status, body, _ := ask(t, p, "HEAD", "/healthz", ""); status != 200 || body != "" {
		t.Errorf("HEAD: %d %q", status, body)
	}
	for _, path := range []string{"/", "/debug/pprof/", "/debug/vars"} {
		if status, _ := get(t, p, path); status != 404 {
			t.Errorf("%s: %d, want 404", path, status)
		}
	}
}

// The connection of a client that sends nothing is closed.
func TestSilentClient(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_HTTP_ADDR=127.0.0.1:0"})
	conn, err := net.Dial("tcp", address(t, p))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); err != nil {
		t.Errorf("the connection is still open: %v", err)
	}
}
