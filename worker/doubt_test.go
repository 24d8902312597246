package worker_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// loser runs a worker that loses the answer to its first poll, which leases the run id, and is then stopped. It
// returns how long the stop took, and what the worker logged.
func loser(t *testing.T, mux *worker.Mux, grace time.Duration, lost func(*proxy)) (pool *pgxpool.Pool, id uuid.UUID, took time.Duration, logged string) {
	t.Helper()
	direct := pgtest.URL(t)
	pool = pgtest.Open(t, direct)
	p, through := newProxy(t, direct)
	id = add(t, pool, run.New{Type: "test.once.v1", Payload: empty{}, MaxAttempts: 1})
	p.cutAt("workflow_lease_v2(", true, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var log journal
	cfg := worker.Config{Pool: pgtest.Open(t, through), Mux: mux, Prefixes: []string{"test."}, Lease: time.Minute, ShutdownGrace: grace, Logger: log.logger()}
	var begun time.Time
	cfg.Observe.Polled = func(_ int, _ time.Duration, err error) {
		if err != nil && begun.IsZero() {
			begun = time.Now()
			lost(p)
			stop()
		}
	}
	if err := worker.Run(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if p.cutCount() != 1 {
		t.Fatalf("%d answers were lost, want 1", p.cutCount())
	}
	return pool, id, time.Since(begun), log.String()
}

// A worker that loses the answer to its last poll and stops gives back what that poll leased. No attempt is
// charged, and another worker starts the run as attempt 1, even if that is its only one.
func TestStopAfterLostAnswer(t *testing.T) {
	t.Parallel()
	mux := worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.once.v1", func(context.Context) error { starts.Add(1); return nil })
	pool, id, took, _ := loser(t, mux, time.Minute, func(*proxy) {})
	if took > 30*time.Second {
		t.Errorf("the stop took %s", took)
	}
	if r := read(t, pool, id); r.Status != run.Pending || r.Attempt != 0 || r.LeaseNo != 1 {
		t.Fatalf("the run is %s, attempt %d, lease %d; want pending, 0, 1", r.Status, r.Attempt, r.LeaseNo)
	}
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 {
		t.Errorf("the run is %s, attempt %d, started %d times", r.Status, r.Attempt, starts.Load())
	}
}

// A worker that has lost an answer and then the database stops when its grace period is over, and logs what is
// in doubt.
func TestStopInDoubtWithoutDatabase(t *testing.T) {
	t.Parallel()
	mux := worker.NewMux()
	handle(mux, "test.once.v1", func(context.Context) error { return nil })
	_, _, took, logged := loser(t, mux, 2*time.Second, (*proxy).stall)
	if took < 2*time.Second || took > 45*time.Second {
		t.Errorf("the stop took %s", took)
	}
	if !strings.Contains(logged, "requests=1") && !strings.Contains(logged, "requests=2") { // the second poll was under way
		t.Errorf("the log says %s", logged)
	}
}

// If the answer to a take-back is lost, an exhausted run that it leased is failed soon, and not only when that
// lease expires.
func TestTakeBackAfterLostAnswer(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := pgtest.Open(t, direct)
	p, through := newProxy(t, direct)
	id := add(t, pool, run.New{Type: "test.once.v1", Payload: empty{}, MaxAttempts: 1})
	execute(t, pool, `UPDATE workflow_run SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'dead',
		lease_until = now() - interval '1 second', started_at = now() - interval '1 minute', deadline_at = now() WHERE id = $1`, id)
	mux := worker.NewMux()
	handle(mux, "test.once.v1", func(context.Context) error { return nil })
	pgtest.Await(t, "the server to have been up for long enough to take leases back", func() bool {
		var up bool
		return pool.QueryRow(t.Context(), `SELECT pg_postmaster_start_time() < now() - interval '3 seconds'`).Scan(&up) == nil && up
	})
	p.cutAt("workflow_take_back_v1(", true, 1)
	work(t, pgtest.Open(t, through), mux, nil)
	begun := time.Now()
	r := finished(t, pool, id)
	if took := time.Since(begun); r.Status != run.Failed || r.LeaseNo != 3 || p.cutCount() != 1 || took > 30*time.Second {
		t.Errorf("the run is %s after %s and %d leases, of %d lost answers", r.Status, took, r.LeaseNo, p.cutCount())
	}
}
