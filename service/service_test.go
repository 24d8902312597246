package service_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/service"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The test binary is also the program under test.
func TestMain(m *testing.M) {
	if os.Getenv("TRIAL") == "" {
		os.Exit(m.Run())
	}
	code := service.Run(service.Program{Name: "trial", Prefixes: []string{"trial.", "more."}, Setup: setUp}, os.Args[1:])
	fmt.Println("it is over")
	os.Exit(code)
}

func setUp(s *service.Setup) error {
	counted := prometheus.NewCounter(prometheus.CounterOpts{Name: "trial_counted_total", Help: "Counts."})
	s.Metrics.MustRegister(counted)
	worker.Handle(s.Mux, "trial.count.v1", func(ctx context.Context, _ struct{}) (n int, err error) {
		s.Log.Info("counting")
		counted.Inc()
		return n, s.Pool.QueryRow(ctx, `SELECT count(*) FROM workflow_run`).Scan(&n)
	})
	if os.Getenv("TRIAL_LIMIT") != "" {
		return errors.Join(errors.New("TRIAL_LIMIT: use a number"), errors.New("TRIAL_SIZE: set it"))
	}
	return nil
}

func start(t *testing.T, env ...string) *cmdtest.Process {
	t.Helper()
	return cmdtest.StartProgram(t, os.Args[0], append(env, "TRIAL=1"))
}

// A program's handlers get runs of the program's prefixes, query the database through Setup.Pool, and have
// their own metrics beside those of the worker. At SIGTERM Run returns.
func TestSetup(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := start(t, "DATABASE_URL="+url, "WORKER_HTTP_ADDR=127.0.0.1:0")
	pool := pgtest.Open(t, url)
	if _, err := pool.Exec(t.Context(), `INSERT INTO workflow_run (type) VALUES ('trial.count.v1')`); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "it has counted", func() bool {
		var result *string
		if err := pool.QueryRow(t.Context(), `SELECT result::text FROM workflow_run WHERE leased_by LIKE 'trial-%' OR status = 'succeeded'`).Scan(&result); err != nil && !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
		return result != nil && *result == "1"
	})
	address := regexp.MustCompile(`"address":"([^"]+)"`).FindStringSubmatch(p.Stderr.String())
	if address == nil || !strings.Contains(p.Stderr.String(), `"counting"`) {
		t.Fatalf("stderr: %s", p.Stderr.String())
	}
	response, err := http.Get("http://" + address[1] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"trial_counted_total 1", `workflow_settled_total{outcome="succeeded"} 1`, `workflow_handler_seconds_count{type="trial.count.v1"} 1`} {
		if !strings.Contains(string(body), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	p.Signal(syscall.SIGTERM)
	if code := p.Wait(); code != 0 || p.Stdout.String() != "it is over\n" {
		t.Errorf("exit code %d, stdout %q", code, p.Stdout.String())
	}
}

// Problems of settings, of Setup, of the handlers file together with the program's handlers, and of the HTTP
// address are printed together, each once, and nothing is contacted.
func TestAllMistakesAtOnce(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	host, connections := cmdtest.Trap(t)
	file := filepath.Join(t.TempDir(), "handlers.yaml")
	if err := os.WriteFile(file, []byte("trial.count.v1: {program: /bin/true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "DATABASE_URL=postgres://app@"+host+"/app", "WORKER_LEASE=30", "WORKER_BATCH=0", "TRIAL_LIMIT=x", "WORKER_HANDLERS="+file, "WORKER_HTTP_ADDR="+other.Addr().String())
	if code := p.Wait(); code != 2 || connections() != 0 {
		t.Errorf("exit code %d with %d connections, want 2 with none", code, connections())
	}
	for _, want := range []string{"WORKER_LEASE=", "WORKER_BATCH=", "TRIAL_LIMIT:", "TRIAL_SIZE:", "handlers.yaml:1:", "WORKER_HTTP_ADDR="} {
		if n := strings.Count(p.Stderr.String(), want); n != 1 {
			t.Errorf("%s is told %d times:\n%s", want, n, p.Stderr.String())
		}
	}
}

// With WORKER_STRICT a handler of the program that no prefix covers is a mistake, and so is a prefix without a
// handler.
func TestStrictAboutHandlers(t *testing.T) {
	t.Parallel()
	p := start(t, "DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_STRICT=true", "WORKER_TYPE_PREFIXES=more.")
	if code := p.Wait(); code != 2 || !strings.Contains(p.Stderr.String(), "no handler is registered for more.") ||
		!strings.Contains(p.Stderr.String(), "the handler of trial.count.v1 is never used; add a prefix that covers it") {
		t.Errorf("exit code %d: %s", code, p.Stderr.String())
	}
}

// The help shows the program's name and its own defaults.
func TestOwnDefaults(t *testing.T) {
	t.Parallel()
	p := cmdtest.StartProgram(t, os.Args[0], []string{"TRIAL=1"}, "--help")
	text := p.Stdout.String
	if code := p.Wait(); code != 0 || !strings.HasPrefix(text(), "trial leases due runs") || !regexp.MustCompile(`WORKER_TYPE_PREFIXES +trial\.,more\. `).MatchString(text()) ||
		!regexp.MustCompile(`WORKER_ID +trial `).MatchString(text()) {
		t.Errorf("exit code %d, help:\n%s", code, text())
	}
	p = cmdtest.StartProgram(t, os.Args[0], []string{"TRIAL=1"}, "--version")
	if code := p.Wait(); code != 0 || !strings.HasPrefix(p.Stdout.String(), "trial ") {
		t.Errorf("exit code %d, version: %s", code, p.Stdout.String())
	}
}
