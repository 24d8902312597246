package worker_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A worker that loses the answer to its last poll, and stops, gives back what that poll has leased: no attempt
// is charged, and another worker begins the run as attempt 1, even if it has no other.
func TestStopAfterLostAnswer(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := open(t, direct)
	p, through := newProxy(t, direct)
	mux := worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.once.v1", func(context.Context) error { starts.Add(1); return nil })
	id := add(t, pool, run.New{Type: "test.once.v1", Payload: empty{}, MaxAttempts: 1})
	p.cutAt("workflow_lease_v1(", true, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	cfg := worker.Config{Pool: open(t, through), Mux: mux, Prefixes: []string{"test."}, Lease: time.Minute, ShutdownGrace: 10 * time.Second}
	cfg.Observe.Polled = func(_ int, _ time.Duration, err error) {
		if err != nil {
			stop()
		}
	}
	begun := time.Now()
	if err := worker.Run(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("the stop took %s", took)
	}
	if r := read(t, pool, id); p.cutCount() != 1 || r.Status != run.Pending || r.Attempt != 0 || r.LeaseNo != 1 {
		t.Fatalf("%d answers were lost; the run is %s, attempt %d, lease %d; want pending, 0, 1", p.cutCount(), r.Status, r.Attempt, r.LeaseNo)
	}
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 {
		t.Errorf("the run is %s, attempt %d, started %d times", r.Status, r.Attempt, starts.Load())
	}
}

// With the database away a worker that has lost an answer stops when its grace period is over, and says what it left.
func TestStopInDoubtWithoutDatabase(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := open(t, direct)
	p, through := newProxy(t, direct)
	mux := worker.NewMux()
	handle(mux, "test.once.v1", func(context.Context) error { return nil })
	add(t, pool, run.New{Type: "test.once.v1", Payload: empty{}})
	p.cutAt("workflow_lease_v1(", true, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var log bytes.Buffer
	cfg := worker.Config{Pool: open(t, through), Mux: mux, Prefixes: []string{"test."}, ShutdownGrace: 2 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	var left time.Time
	cfg.Observe.Polled = func(_ int, _ time.Duration, err error) {
		if err != nil && left.IsZero() {
			left = time.Now()
			p.stall()
			stop()
		}
	}
	if err := worker.Run(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(left); took < 2*time.Second || took > 15*time.Second {
		t.Errorf("the stop took %s", took)
	}
	if !strings.Contains(log.String(), "requests=") {
		t.Errorf("the log says %s", log.String())
	}
}

// The answer to a take-back is lost: an exhausted run that it has leased is failed at once all the same, and
// not when that lease is over.
func TestTakeBackAfterLostAnswer(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := open(t, direct)
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
	work(t, open(t, through), mux, func(c *worker.Config) { c.Lease = time.Minute })
	begun := time.Now()
	r := finished(t, pool, id)
	if took := time.Since(begun); r.Status != run.Failed || r.LeaseNo != 3 || p.cutCount() != 1 || took > 10*time.Second {
		t.Errorf("the run is %s after %s and %d leases, of %d lost answers", r.Status, took, r.LeaseNo, p.cutCount())
	}
}
