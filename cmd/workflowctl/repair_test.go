package main_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// startWorker builds cmd/worker and runs it as a process, with a handlers file.
func startWorker(t *testing.T, url, handlers string, more ...string) {
	t.Helper()
	startProgram(t, "worker", append([]string{"DATABASE_URL=" + url, "WORKER_HANDLERS=" + save(t, "handlers.yaml", handlers), "WORKER_TYPE_PREFIXES=travel.", "WORKER_PROCESSES=true",
		"WORKER_LOG_LEVEL=error", "WORKER_POLL_INTERVAL=100ms", "WORKER_CLEANUP_EVERY=0"}, more...))
}

// startProgram builds the named program of the neighboring directory and runs it as a process.
func startProgram(t *testing.T, name string, env []string) {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	if out, err := exec.Command("go", "build", "-tags", "nonats,nokafka,noamqp", "-o", program, "../"+name).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	p := exec.Command(program)
	p.Env = env
	log := &cmdtest.Text{}
	p.Stdout, p.Stderr = log, log
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Process.Kill()
		_ = p.Wait()
		if t.Failed() {
			t.Logf("the %s: %.20000s", name, log.String())
		}
	})
}

// A bug in one handler of a process loses nothing, whatever its definition says about undoing. Within 15 s of the
// first sign, why, doctor, top, show failing and the metrics name the cause. Once the bug is fixed, one command
// completes a thousand instances.
func TestBugLosesNothing(t *testing.T) {
	t.Parallel()
	const instances = 1000
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	var mended atomic.Bool
	var booked, undone atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/book":
			booked.Add(1)
		case "/undo":
			undone.Add(1)
		case "/charge":
			if !mended.Load() {
				w.WriteHeader(http.StatusInternalServerError)
				fmt.Fprint(w, "KeyError: 'currency'")
				return
			}
		}
		fmt.Fprint(w, "{}")
	}))
	t.Cleanup(server.Close)
	var handlers strings.Builder
	for _, does := range []string{"book", "charge", "undo"} {
		fmt.Fprintf(&handlers, "travel.%s.v1: {url: %s/%s}\n", does, server.URL, does)
	}
	metrics := free(t)
	startWorker(t, url, handlers.String(), "WORKER_HTTP_ADDR="+metrics)
	want(t, cmdtest.Start(t, env, "define", save(t, "trip.json", `{"process": "trip", "version": 1, "start": "book", "nodes": {
		"book": {"do": "travel.book.v1", "undo": "travel.undo.v1", "to": "charge"}, "charge": {"do": "travel.charge.v1", "retry": {"attempts": 2, "base": "50ms"}}}}`)), 0, "trip version 1 is deployed")
	if _, err := connect(t, url).Exec(t.Context(), `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', '{"process": "trip"}' FROM generate_series(1, $1)`, instances); err != nil {
		t.Fatal(err)
	}

	conn := connect(t, url)
	count := func(what string) (n int) {
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM `+what).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	pgtest.Await(t, "the first sign", func() bool { return count(`incident`) > 0 })
	sign := time.Now()
	trip := value[string](t, url, `SELECT instance_id::text FROM incident ORDER BY created_at LIMIT 1`)
	for _, c := range []struct {
		command []string
		names   []string
	}{
		{[]string{"doctor"}, []string{"of process trip: incident handler_error at charge", "workflowctl retry-incidents --process trip --code handler_error --node charge", "of type travel.charge.v1 failed for good within an hour as handler_error", "KeyError"}},
		{[]string{"top", "--once"}, []string{"NEEDS YOU", "trip", "handler_error", "travel.charge.v1"}},
		{[]string{"why", trip}, []string{"incident handler_error at charge", "KeyError"}},
		{[]string{"show", "failing"}, []string{"travel.charge.v1", "handler_error", "KeyError"}},
		{[]string{"show", "incidents"}, []string{"charge", "handler_error", "KeyError"}},
	} {
		p, _ := cmdtest.Run(t, env, c.command...)
		for _, name := range c.names {
			if !strings.Contains(p.Stdout.String(), name) {
				t.Errorf("%v does not say %q:\n%s", c.command, name, p.Stdout.String())
			}
		}
	}
	if text := get(t, metrics); !regexp.MustCompile(`workflow_outcomes_total\{outcome="failed",type="travel.charge.v1"\} [1-9]`).MatchString(text) {
		t.Errorf("the metrics do not say that travel.charge.v1 fails:\n%s", text)
	}
	if took := time.Since(sign); took > 15*time.Second {
		t.Errorf("all of them took %s, want 15 s", took)
	}

	pgtest.Await(t, "all to be stopped", func() bool { return count(`incident`) == instances })
	if n := count(`process_instance WHERE status = 'WAITING' AND failure_reason IS NULL`); n != instances {
		t.Errorf("%d instances wait, want all %d", n, instances)
	}
	mended.Store(true)
	p, code := cmdtest.Run(t, env, "retry-incidents", "--process", "trip", "--node", "charge", "--most", "100000", "--do", "--json")
	var retried []json.RawMessage
	if err := json.Unmarshal([]byte(p.Stdout.String()), &retried); err != nil || code != 0 || len(retried) != instances {
		t.Fatalf("%d were retried, exit code %d, %v", len(retried), code, err)
	}
	pgtest.Await(t, "all to complete", func() bool { return count(`process_instance WHERE status = 'COMPLETED'`) == instances })
	if undone.Load() != 0 || booked.Load() < instances {
		t.Errorf("%d trips were booked, and %d undone", booked.Load(), undone.Load())
	}
	if p, _ := cmdtest.Run(t, env, "doctor"); strings.Contains(p.Stdout.String(), "incident") {
		t.Errorf("afterwards doctor says:\n%s", p.Stdout.String())
	}
}
