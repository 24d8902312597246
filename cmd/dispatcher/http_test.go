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
	"github.com/simple-workflow/simple-workflow/sql"
)

var served = regexp.MustCompile(`"msg":"serving HTTP","address":"([^"]+)"`)

// get requests a path from the process's HTTP server.
func get(t *testing.T, p *cmdtest.Process, path string) (status int, body string) {
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
	response, err := http.Get("http://127.0.0.1:" + port + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
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

func awaitMetric(t *testing.T, p *cmdtest.Process, lines ...string) {
	t.Helper()
	pgtest.Await(t, strings.Join(lines, ", "), func() bool {
		_, body := get(t, p, "/metrics")
		for _, line := range lines {
			if !strings.Contains(body, "\n"+line) {
				return false
			}
		}
		return true
	})
}

// Metrics count, by sink, what was published and how far each sink is behind. They show a sink that is down, and such a
// sink does not make the dispatcher unready.
func TestMetrics(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	r := receive(t, func(w http.ResponseWriter, body []byte) {
		if strings.Contains(string(body), `"n": 2`) {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
		}
	})
	emit(t, url, 5, 3)
	p := cmdtest.Start(t, settings(url, r.sink()+" down=http://127.0.0.1:1#allow=127.0.0.0/8", "DISPATCHER_HTTP_ADDR=127.0.0.1:0"))
	awaitMetric(t, p, `outbox_published_total{sink="crm"} 10`, `outbox_retried_total{sink="crm"} 5`, `outbox_parked_total{sink="crm"} 5`,
		`outbox_parked_events{sink="crm"} 5`, `outbox_lag_events{sink="crm"} 0`, `outbox_oldest_seconds{sink="crm"} 0`, `outbox_sink_down{sink="crm"} 0`,
		`outbox_sink_down{sink="down"} 1`, `outbox_lag_events{sink="down"} 15`, `outbox_oldest_seconds{sink="down"} `, `outbox_published_total{sink="down"} 0`,
		`outbox_poll_seconds_count{sink="crm"}`, `outbox_publish_seconds_count{sink="crm"}`, `outbox_build_info{`, "go_goroutines", "process_open_fds")
	if status, body := get(t, p, "/readyz"); status != 200 {
		t.Errorf("readyz: %d %s", status, body)
	}
	if status, body := get(t, p, "/healthz"); status != 200 || body != "alive\n" {
		t.Errorf("healthz: %d %s", status, body)
	}
}

// A dispatcher that was told to stop is not ready.
func TestStopping(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	release := make(chan struct{})
	r := receive(t, func(http.ResponseWriter, []byte) { <-release })
	p := cmdtest.Start(t, settings(url, r.sink(), "DISPATCHER_HTTP_ADDR=127.0.0.1:0"))
	emit(t, url, 1, 1)
	pgtest.Await(t, "the event to come", func() bool { return r.ids() == 1 })
	awaitStatus(t, p, "/readyz", 200)
	p.Signal(syscall.SIGTERM)
	if body := awaitStatus(t, p, "/readyz", 503); !strings.Contains(body, "stopping") {
		t.Errorf("readyz: %s", body)
	}
	close(release)
	wantExit(t, p, 0)
}

// No event is lost if the database is down when the dispatcher starts, or is stopped or killed while events are
// published.
func TestDatabaseDown(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Options{})
	url := server.URL("postgres")
	if err := sql.Up(t.Context(), connect(t, url)); err != nil {
		t.Fatal(err)
	}
	emit(t, url, 100, 20)
	execute(t, url, `CHECKPOINT`)
	server.StopMode(pgserver.Fast)
	r := receive(t, func(http.ResponseWriter, []byte) { time.Sleep(10 * time.Millisecond) })
	p := cmdtest.Start(t, settings(url, r.sink(), "DISPATCHER_HTTP_ADDR=127.0.0.1:0", "DISPATCHER_CLAIM=2s"))
	p.AwaitLog("waiting for the database")
	if status, body := get(t, p, "/readyz"); status != 503 || !strings.Contains(body, "waiting for the database") {
		t.Errorf("readyz: %d %s", status, body)
	}
	for n, mode := range []pgserver.Mode{pgserver.Fast, pgserver.Immediate} {
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r.ids() == 2000 {
			t.Error("all has come already, so this shows nothing")
		}
		pgtest.Await(t, "some to come", func() bool { return r.ids() > 300*(n+1) })
		server.StopMode(mode)
	}
	if status, _ := get(t, p, "/healthz"); status != 200 {
		t.Errorf("healthz: %d", status)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	drained(t, url)
	awaitStatus(t, p, "/readyz", 200)
	t.Logf("%d requests for 2000 events", r.check(2000))
	if strings.Contains(p.Stderr.String(), "goroutine ") {
		t.Errorf("stderr: %s", p.Stderr.String())
	}
}
