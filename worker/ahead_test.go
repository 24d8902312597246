package worker_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// aheadNow returns how many runs are leased ahead of their handlers.
func aheadNow(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased' AND workflow_leased_ahead(lease_token)`)
}

// few makes the slots few, so that runs wait for them.
func few(c *worker.Config) { c.Concurrency = 2 }

// After ten quick calls of a type, a worker leases ahead of its slots. No more handlers run at once than it has slots, each run is executed once,
// and the number of leases follows the pace of the handlers.
func TestLeasesAhead(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var now, most, calls atomic.Int32
	handle(mux, "test.quick.v1", func(context.Context) error {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		calls.Add(1)
		time.Sleep(5 * time.Millisecond)
		return nil
	})
	addMany(t, pool, "test.quick.v1", 400)
	w, _ := work(t, pool, mux, few)
	held := 0
	pgtest.Await(t, "all to succeed", func() bool {
		held = max(held, w.InFlight())
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'succeeded'`) == 400
	})
	if most.Load() > 2 || calls.Load() != 400 {
		t.Errorf("%d handlers at once, %d calls; want 2 at most, 400", most.Load(), calls.Load())
	}
	if held <= 4 || held > 100 {
		t.Errorf("it held up to %d leases; want more than twice its slots, and what 400 handlers a second get through in 50 ms, outcomes included", held)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE attempt <> 1`); n != 0 {
		t.Errorf("%d runs had more than one attempt", n)
	}
}

// Runs of a type whose handlers take long are not leased ahead, nor those of a type with a limit of its own.
func TestSlowTypesAreNotLeasedAhead(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.slow.v1", func(context.Context) error { time.Sleep(80 * time.Millisecond); return nil })
	handle(mux, "test.limited.v1", func(context.Context) error { return nil }, worker.Options{Concurrency: 1})
	addMany(t, pool, "test.slow.v1", 40)
	addMany(t, pool, "test.limited.v1", 200)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 4 })
	pgtest.Await(t, "all to succeed", func() bool {
		if n := aheadNow(t, pool); n > 0 {
			t.Fatalf("%d runs are leased ahead", n)
		}
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status <> 'succeeded'`) == 0
	})
}

// A stop gives back at once what waits for a slot, uncharged, while handlers have their grace.
func TestStopGivesBackWhatWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var gated atomic.Bool
	gate := make(chan bool)
	handle(mux, "test.quick.v1", func(context.Context) error {
		if gated.Load() {
			<-gate
		}
		time.Sleep(time.Millisecond)
		return nil
	})
	addMany(t, pool, "test.quick.v1", 5000)
	_, stop := work(t, pool, mux, func(c *worker.Config) { few(c); c.ShutdownGrace = time.Minute })
	pgtest.Await(t, "runs to be leased ahead", func() bool { return aheadNow(t, pool) > 10 })
	gated.Store(true)
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	pgtest.Await(t, "only what has begun to be leased", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`) <= 2
	})
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'pending' AND attempt > 0`); n != 0 {
		t.Errorf("%d runs that were given back are charged", n)
	}
	close(gate)
	if err := <-ended; err != nil {
		t.Errorf("Run = %v", err)
	}
}

// No handler of a paused type begins after its worker has looked; what waits for a slot is given back.
func TestPauseGivesBackWhatWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var last atomic.Int64
	handle(mux, "test.quick.v1", func(context.Context) error {
		last.Store(time.Now().UnixNano())
		time.Sleep(2 * time.Millisecond)
		return nil
	})
	addMany(t, pool, "test.quick.v1", 20_000)
	work(t, pool, mux, few)
	pgtest.Await(t, "runs to be leased ahead", func() bool { return aheadNow(t, pool) > 10 })
	execute(t, pool, `SELECT workflow_pause('test.', 'a test')`)
	paused := time.Now()
	pgtest.Await(t, "nothing to be leased", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`) == 0
	})
	if after := time.Unix(0, last.Load()).Sub(paused); after > 5*time.Second { // it looks less often while the server is slow
		t.Errorf("the last handler began %s after the pause", after)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'pending' AND attempt > 0`); n != 0 {
		t.Errorf("%d runs that were given back are charged", n)
	}
}

// What has waited for a slot for a second is given back: another worker may have one.
func TestWaitsAreShort(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var gated atomic.Bool
	gate := make(chan bool)
	handle(mux, "test.quick.v1", func(context.Context) error {
		if gated.Load() {
			<-gate
		}
		time.Sleep(time.Millisecond)
		return nil
	})
	addMany(t, pool, "test.quick.v1", 10_000)
	work(t, pool, mux, few)
	pgtest.Await(t, "runs to be leased ahead", func() bool { return aheadNow(t, pool) > 10 })
	gated.Store(true)
	start := time.Now()
	pgtest.Await(t, "only what has begun to be leased", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`) <= 2
	})
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it was given back after %s, want about a second", took)
	}
	close(gate)
}

// A run of higher priority does not wait behind the runs that are leased ahead.
func TestPriorityPassesWhatWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var mu sync.Mutex
	var order []string
	note := func(what string) func(context.Context) error {
		return func(context.Context) error {
			mu.Lock()
			order = append(order, what)
			mu.Unlock()
			time.Sleep(5 * time.Millisecond)
			return nil
		}
	}
	handle(mux, "test.quick.v1", note("quick"))
	handle(mux, "test.urgent.v1", note("urgent"))
	urgent := add(t, pool, run.New{Type: "test.urgent.v1", Priority: 50}) // so that its lane is known
	addMany(t, pool, "test.quick.v1", 3000)
	work(t, pool, mux, few)
	finished(t, pool, urgent)
	pgtest.Await(t, "runs to be leased ahead", func() bool { return aheadNow(t, pool) > 4 })
	mu.Lock()
	before := len(order)
	mu.Unlock()
	finished(t, pool, add(t, pool, run.New{Type: "test.urgent.v1", Priority: 50}))
	mu.Lock()
	defer mu.Unlock()
	for i, what := range order[before:] {
		if what == "urgent" {
			if i > 600 { // a second and a half, on a busy machine
				t.Errorf("it came after %d others", i)
			}
			return
		}
	}
	t.Error("it was never called")
}

// Runs that may not be leased ahead have their turn beside a flood of those that are.
func TestSlowTypeBesideAFlood(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.quick.v1", func(context.Context) error { time.Sleep(time.Millisecond); return nil })
	handle(mux, "test.slow.v1", func(context.Context) error { time.Sleep(60 * time.Millisecond); return nil })
	addMany(t, pool, "test.quick.v1", 20_000)
	addMany(t, pool, "test.slow.v1", 20)
	execute(t, pool, `UPDATE workflow_run SET run_at = run_at - interval '1 minute' WHERE type = 'test.quick.v1'`)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 4 })
	pgtest.Await(t, "the slow ones to succeed", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE type = 'test.slow.v1' AND status = 'succeeded'`) == 20
	})
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE type = 'test.quick.v1' AND status <> 'succeeded'`); n == 0 {
		t.Error("the flood was over before: nothing is proved")
	}
}

// If the database refuses marks, what was leased ahead is given back, and runs are leased to begin at once for a while. Nothing is charged for that.
func TestMarksAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.quick.v1", func(context.Context) error { time.Sleep(time.Millisecond); return nil })
	addMany(t, pool, "test.quick.v1", 1000)
	execute(t, pool, `ALTER FUNCTION workflow_begin_v1(uuid[], uuid[]) RENAME TO begin_no_more`)
	work(t, pool, mux, few)
	pgtest.Await(t, "all to succeed", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`) == 1000
	})
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_history WHERE event_type = 'released'`); n == 0 || n > 500 {
		t.Errorf("%d leases were given back, want some, and no more once it is known", n)
	}
}

// Suspects have their turn beside a flood of runs that are leased ahead, one after the other at first.
func TestSuspectsBesideAFloodHaveTheirTurn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.quick.v1", func(context.Context) error { time.Sleep(time.Millisecond); return nil })
	addMany(t, pool, "test.quick.v1", 20_000)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{`SET LOCAL workflow.override = 'as after a crash'`,
		`UPDATE workflow_run SET suspect = true, run_at = run_at - interval '1 minute' WHERE id IN (SELECT id FROM workflow_run LIMIT 8)`} {
		if _, err := tx.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 4 })
	pgtest.Await(t, "the suspects to succeed", func() bool {
		return query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE run_at < now() - interval '30 seconds' AND status = 'succeeded'`) == 8
	})
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_run WHERE status <> 'succeeded'`); n == 0 {
		t.Error("the flood was over before: nothing is proved")
	}
}
