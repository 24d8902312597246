package worker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// brief makes leases short, for tests in which one expires. Otherwise leases last longer than a slow machine
// may freeze.
func brief(c *worker.Config) { c.Lease = 4 * time.Second }

// work runs a worker until the test ends, with a config that is fast enough for tests.
func work(t *testing.T, pool *pgxpool.Pool, mux *worker.Mux, change func(*worker.Config)) (*worker.Worker, func() error) {
	t.Helper()
	config := worker.Config{
		Pool: pool, Mux: mux, Prefixes: []string{"test."}, Lease: time.Minute, PollInterval: 50 * time.Millisecond, Retention: worker.Retention{Off: true},
		ShutdownGrace: 5 * time.Second, Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond},
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
	if change != nil {
		change(&config)
	}
	w, err := worker.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	var result error
	stopped := false
	stop := func() error {
		cancel()
		if !stopped {
			stopped = true
			result = <-ended
		}
		return result
	}
	t.Cleanup(func() { _ = stop() })
	return w, stop
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p[:len(p)-1])
	return len(p), nil
}

// patiently repeats what fails while an old pgbouncer, which the tests may use, ends and is restarted; see
// pgbouncer.Bouncer.
func patiently(do func() error) error {
	err := do()
	for try := 0; err != nil && os.Getenv("PGTEST_BOUNCER") != "" && try < 20; try++ {
		time.Sleep(50 * time.Millisecond)
		err = do()
	}
	return err
}

func enqueue(t *testing.T, pool *pgxpool.Pool, typ string, payload any) uuid.UUID {
	t.Helper()
	return add(t, pool, run.New{Type: typ, Payload: payload})
}

func read(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) (r *run.Run) {
	t.Helper()
	if err := patiently(func() (err error) { r, err = run.Read(context.Background(), pool, id); return err }); err != nil {
		t.Fatal(err)
	}
	return r
}

// finished waits until the run has finished and returns it.
func finished(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) *run.Run {
	t.Helper()
	pgtest.Await(t, "run "+id.String()+" to finish", func() bool { return read(t, pool, id).Status.Finished() })
	return read(t, pool, id)
}

type empty struct{}

// handle registers a handler without input and result.
func handle(mux *worker.Mux, typ string, fn func(context.Context) error, options ...worker.Options) {
	worker.Handle(mux, run.Task[empty](typ), func(ctx context.Context, _ empty) (empty, error) { return empty{}, fn(ctx) }, options...)
}

// add enqueues a run with more fields than a type.
func add(t *testing.T, pool *pgxpool.Pool, n run.New) uuid.UUID {
	t.Helper()
	n.ID = uuid.Must(uuid.NewV7()) // once, however often the insert is repeated
	if err := patiently(func() error { _, err := run.Enqueue(t.Context(), pool, n); return err }); err != nil {
		t.Fatal(err)
	}
	return n.ID
}

// addMany inserts n runs of a type with plain SQL, with payloads {"N": 1} and so on.
func addMany(t *testing.T, pool *pgxpool.Pool, typ string, n int) {
	t.Helper()
	execute(t, pool, `INSERT INTO workflow_run (type, payload) SELECT $1, jsonb_build_object('N', g) FROM generate_series(1, $2::int) g`, typ, n)
}

func execute(t *testing.T, pool *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(context.Background(), query, args...); err != nil {
		t.Fatal(err)
	}
}

// query returns the only value that a query returns.
func query[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) T {
	t.Helper()
	rows, _ := pool.Query(context.Background(), query, args...)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// drained waits until no run is pending or leased.
func drained(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.Await(t, "all runs to finish", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status IN ('pending', 'leased')`) == 0
	})
}

func failureOf(t *testing.T, r *run.Run) settling.Failure {
	t.Helper()
	var f settling.Failure
	if err := json.Unmarshal(r.Error, &f); err != nil {
		t.Fatalf("error column of %s run: %v: %s", r.Status, err, r.Error)
	}
	return f
}

// expire makes a run look as if the worker that had leased it died a while ago.
func expire(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) {
	t.Helper()
	execute(t, pool, `
		UPDATE workflow_run
		SET status = 'leased', lease_token = gen_random_uuid(), lease_no = lease_no + 1, attempt = attempt + 1,
		    leased_by = 'dead', started_at = now() - interval '1 minute', lease_until = now() - interval '1 second'
		WHERE id = $1`, id)
}

// seen counts the calls of an Observer.
type seen struct {
	mu                          sync.Mutex
	lost                        []error
	settled                     map[settling.Verdict]int
	refused, extended, stuck    int
	again, exhausted, failedTry int
}

func (s *seen) observe(c *worker.Config) {
	s.settled = map[settling.Verdict]int{}
	locked := func(f func()) { s.mu.Lock(); defer s.mu.Unlock(); f() }
	c.Observe = worker.Observer{
		Settled: func(_ string, v string) { locked(func() { s.settled[settling.Verdict(v)]++ }) },
		Refused: func(string) { locked(func() { s.refused++ }) },
		Lost:    func(_ string, cause error) { locked(func() { s.lost = append(s.lost, cause) }) },
		Stuck:   func(n int) { locked(func() { s.stuck = max(s.stuck, n) }) },
		Extended: func(n int, _ time.Duration, err error) {
			locked(func() {
				if err == nil && n > 0 {
					s.extended++
				}
			})
		},
		Reclaimed: func(again, exhausted int) { locked(func() { s.again += again; s.exhausted += exhausted }) },
		SettleRun: func(_ int, _ time.Duration, err error) {
			locked(func() {
				if err != nil {
					s.failedTry++
				}
			})
		},
	}
}

// get returns a count.
func (s *seen) get(count *int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *count
}

func (s *seen) verdicts(v settling.Verdict) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled[v]
}

func (s *seen) causes(target error) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cause := range s.lost {
		if errors.Is(cause, target) {
			n++
		}
	}
	return n
}

// A journal collects log lines.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
