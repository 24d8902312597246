package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// mainEnv makes this test binary behave as the program.
const mainEnv = "CHAOS_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A process is the program with a database of its own.
type process struct {
	*exec.Cmd
	pool   *pgxpool.Pool
	output *bytes.Buffer
}

func startProcess(t *testing.T, env ...string) *process {
	t.Helper()
	url := pgtest.URL(t)
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	p := &process{Cmd: exec.Command(os.Args[0]), pool: pool, output: &bytes.Buffer{}}
	p.Env = append(os.Environ(), mainEnv+"=1", "DATABASE_URL="+url, "WORKER_LEASE=2s", "WORKER_POLL_INTERVAL=50ms")
	p.Env = append(p.Env, env...)
	p.Stdout, p.Stderr = p.output, p.output
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Process.Kill() // it has usually ended
		_ = p.Wait()
	})
	return p
}

// exitCode waits for the process to end.
func (p *process) exitCode(t *testing.T) int {
	t.Helper()
	var exit *exec.ExitError
	if err := p.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return p.ProcessState.ExitCode()
}

// A handler that kills its process does so, and its run, left leased, fails as expired once another worker reclaims
// it.
func TestKillers(t *testing.T) {
	for _, test := range []struct {
		typ     string
		payload any
		code    int
		says    string
	}{
		{"chaos.exit", exit{Code: 7}, 7, ""},
		{"chaos.gopanic", nil, 2, "a goroutine of a handler panics"},
	} {
		t.Run(test.typ, func(t *testing.T) {
			p := startProcess(t)
			id := enqueue(t, p.pool, run.New{Type: test.typ, Payload: test.payload, MaxAttempts: 1})
			if got := p.exitCode(t); got != test.code {
				t.Errorf("exit code = %d, want %d\n%s", got, test.code, p.output)
			}
			if !strings.Contains(p.output.String(), test.says) {
				t.Errorf("%q is not in:\n%s", test.says, p.output)
			}
			if r := read(t, p.pool, id); r.Status != run.Leased {
				t.Errorf("status = %s, want leased", r.Status)
			}
			pgtest.Elapse(t, p.pool, time.Minute)
			setup(t, p.pool)
			if got := codeOf(t, await(t, p.pool, id, run.Failed)); got != settling.CodeExpired {
				t.Errorf("code = %q, want %q", got, settling.CodeExpired)
			}
		})
	}
}

// The first SIGTERM lets handlers continue, and the second ends them. Their runs are given back with no attempt
// charged, and the program exits with 0.
func TestSignals(t *testing.T) {
	p := startProcess(t, "WORKER_SHUTDOWN_GRACE=10m", "WORKER_LEASE=10s", "WORKER_HEARTBEAT=500ms")
	id := enqueue(t, p.pool, run.New{Type: "chaos.sleep", Payload: nap{MS: 600_000}})
	await(t, p.pool, id, run.Leased)
	for range 2 {
		if err := p.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		// Two signals at the same time would be delivered as one.
		pgtest.Await(t, "the lease is extended or handed back", extended(t, p.pool))
	}
	if got := p.exitCode(t); got != 0 {
		t.Errorf("exit code = %d, want 0\n%s", got, p.output)
	}
	if r := read(t, p.pool, id); r.Status != run.Pending || r.Attempt != 0 {
		t.Errorf("status %s, attempt %d; want pending, 0", r.Status, r.Attempt)
	}
}

// extended returns a function that reports whether a lease has changed since.
func extended(t *testing.T, pool *pgxpool.Pool) func() bool {
	t.Helper()
	state := func() (s string) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), `SELECT status || coalesce(lease_until::text, '') FROM workflow_run`).Scan(&s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := state()
	return func() bool { return state() != before }
}

// An error in the environment is reported, and ends the program with exit code 1.
func TestBadEnvironment(t *testing.T) {
	for setting, says := range map[string]string{
		"WORKER_LOG_FORMAT=xml":           "WORKER_LOG_FORMAT",
		"WORKER_TYPE_PREFIXES=chaos":      `did you mean "chaos."`,
		"WORKER_LEASE=1ms":                "Lease 1ms",
		"EXECLOG=/no/such/folder/log.csv": "EXECLOG",
	} {
		p := startProcess(t, setting)
		if got := p.exitCode(t); got != 1 || !strings.Contains(p.output.String(), says) {
			t.Errorf("%s: exit code %d, %s", setting, got, p.output)
		}
	}
}
