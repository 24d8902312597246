package survival

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/protocol"
	"github.com/simple-workflow/simple-workflow/run"
)

// lease is the lease of the processes under test: short, but at least twice the minimum, for machines that pause for
// a second.
const lease = 4 * time.Second

// slots is how many runs each process may execute at once. As many may wait for a slot and be charged if it dies; and as many
// outcomes may wait to be recorded, or as many as handlers return in 50 ms, if these are more, with those that are leased
// ahead then. For handlers that take some milliseconds or more that is no more than mostHeld.
const (
	slots    = 8
	mostHeld = 6 * slots
)

// patience is how long something that normally takes far less than a second may take on a busy machine. The torture
// test measures it.
const patience = 5 * time.Second

var chaos string // path of the built examples/chaos

func TestMain(m *testing.M) {
	if at := os.Getenv(deathEnv); at != "" {
		mortal(at)
		return
	}
	dir, err := os.MkdirTemp("", "survival")
	if err != nil {
		panic(err)
	}
	chaos = filepath.Join(dir, "chaos")
	_, here, _, _ := runtime.Caller(0)
	build := exec.Command("go", "build", "-o", chaos, "./examples/chaos")
	build.Dir = filepath.Join(filepath.Dir(here), "..", "..")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		panic(err)
	}
	// The tests wait most of the time.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// A process is a running worker.
type process struct {
	*exec.Cmd
	ended chan error
	log   string // name of the file with its output
}

// start starts a worker of examples/chaos.
func start(t *testing.T, url, name string) *process {
	t.Helper()
	return launch(t, chaos, name, "DATABASE_URL="+url, "WORKER_TYPE_PREFIXES=chaos.", "WORKER_ID="+name, "WORKER_LEASE="+lease.String(),
		"WORKER_CONCURRENCY="+fmt.Sprint(slots), "WORKER_POLL_INTERVAL=100ms", "WORKER_SHUTDOWN_GRACE=1ms",
		"WORKER_BACKOFF_BASE=200ms", "WORKER_BACKOFF_CAP=1s", "WORKER_LOG_FORMAT=json")
}

func launch(t *testing.T, program, name string, env ...string) *process {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{exec.Command(program), make(chan error, 1), log.Name()}
	p.Env = append(os.Environ(), env...)
	p.Stdout, p.Stderr = log, log
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.Wait() }()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s:\n%s", name, text[max(0, len(text)-6000):])
		}
		_ = log.Close()
	})
	return p
}

func (p *process) signal(s syscall.Signal) { _ = p.Process.Signal(s) }

func connect(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	config.ConnConfig.RuntimeParams["jit"] = "off" // or JIT compilation of the invariants takes longer than counting
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	pgtest.LogTransitions(t, pool)
	if err := protocol.Install(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return pool
}

func number(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// effects enqueues n runs that work for ms milliseconds and then write one row each.
func effects(t *testing.T, pool *pgxpool.Pool, n, ms int) {
	t.Helper()
	runs := make([]run.New, n)
	for i := range runs {
		runs[i] = run.New{Type: "chaos.effect", Payload: map[string]any{"ms": ms, "key": "k"}, MaxAttempts: 10}
	}
	if _, err := run.EnqueueMany(t.Context(), pool, runs); err != nil {
		t.Fatal(err)
	}
}

// leasedBy waits until a worker of the given name holds at least n leases.
func leasedBy(t *testing.T, pool *pgxpool.Pool, name string, n int) {
	t.Helper()
	pgtest.Await(t, name+" to hold leases", func() bool {
		return number(t, pool, `SELECT count(*) FROM workflow_run WHERE leased_by LIKE $1 || '-%'`, name) >= n
	})
}

// settled waits until every run has finished.
func settled(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.Await(t, "every run to finish", func() bool {
		var left int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`).Scan(&left)
		return err == nil && left == 0
	})
}

// invariants are queries that count what must never exist.
var invariants = map[string]string{
	"succeeded chaos.effect runs without exactly one effect": `
		SELECT count(*) FROM workflow_run r WHERE type = 'chaos.effect' AND status = 'succeeded'
		AND (SELECT count(*) FROM chaos_effect e WHERE e.run_id = r.id) <> 1`,
	"effects of runs that did not succeed": `
		SELECT count(*) FROM chaos_effect e JOIN workflow_run r ON r.id = e.run_id WHERE r.status <> 'succeeded'`,
	"effects of another lease than the one that settled": `
		SELECT count(*) FROM chaos_effect e WHERE NOT EXISTS (SELECT FROM transition x
		WHERE x.run = e.run_id AND x.status = 'succeeded' AND x.lease_no = e.lease_no)`,
	"runs with more charged starts than max_attempts": `
		SELECT count(*) FROM workflow_run r WHERE attempt > max_attempts OR max_attempts <
		(SELECT count(*) FILTER (WHERE x.status = 'leased') -
		        (SELECT count(*) FROM workflow_history h WHERE h.workflow_id = r.id AND h.event_type IN ('released', 'postponed'))
		 FROM transition x WHERE x.run = r.id)`,
	"runs whose history has other leases than they had": `
		SELECT count(*) FROM workflow_run r WHERE
		(SELECT array_agg(DISTINCT lease_no ORDER BY lease_no) FROM workflow_event v WHERE v.workflow_id = r.id AND v.event_type = 'leased')
		IS DISTINCT FROM (SELECT array_agg(g) FROM generate_series(1, r.lease_no) g)`,
	"runs whose history does not end with their status": `
		SELECT count(*) FROM workflow_run r WHERE status <>
		(SELECT event_type FROM workflow_event v WHERE v.workflow_id = r.id AND v.event_type <> 'started' ORDER BY id DESC LIMIT 1)`,
	"leases that were not ended by exactly one event": `
		SELECT count(*) FROM workflow_run r CROSS JOIN LATERAL generate_series(1, r.lease_no) AS g (lease_no)
		WHERE (SELECT count(*) FROM workflow_history h WHERE h.workflow_id = r.id AND h.lease_no = g.lease_no AND h.started_at IS NOT NULL)
		    + CASE WHEN r.status = 'succeeded' AND r.settled_by IS NOT NULL AND r.lease_no = g.lease_no THEN 1 ELSE 0 END <> 1`,
	"runs with more than one final event": `
		SELECT count(*) FROM (SELECT FROM transition WHERE status IN ('succeeded', 'failed', 'cancelled')
		GROUP BY run HAVING count(*) > 1) AS twice`,
}

func check(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	invariant(t, pool)
	replay(t, pool, mostHeld)
}

func invariant(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for what, query := range invariants {
		if n := number(t, pool, query); n != 0 {
			t.Errorf("%d %s", n, what)
		}
	}
}

// replay checks what the database did to each run against the model of internal/protocol. most is how many leases whose
// attempts would be charged a worker holds at most; 0 means any number.
func replay(t *testing.T, pool *pgxpool.Pool, most int) {
	t.Helper()
	v := verdicts(t, pool, most)
	if v.Edits > 1 { // a lease of a worker that died long ago
		t.Errorf("%d changes were none of the engine's functions", v.Edits)
	}
	if v.Runs != number(t, pool, `SELECT count(*) FROM workflow_run`) {
		t.Errorf("the trace has %d runs, and the table others", v.Runs)
	}
	for _, w := range v.Wrong {
		t.Errorf("the protocol does not allow this: %s", w)
	}
}

func verdicts(t *testing.T, pool *pgxpool.Pool, most int) protocol.Verdicts {
	t.Helper()
	r := protocol.Replay{Most: most, Watch: 1500 * time.Millisecond}
	if err := protocol.Read(t.Context(), pool, r.Add); err != nil {
		t.Fatal(err)
	}
	return r.Verdicts()
}
