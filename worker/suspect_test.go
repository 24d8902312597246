package worker_test

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A run that kills its process makes no other run fail. Twenty innocent runs are in flight when the pill kills
// the first process. The pill then kills each process that starts it: the test expires all leases that are held
// at that moment for good. The pill uses up its attempts. Each innocent run succeeds, at its last attempt at
// the latest.
func TestPoisonPill(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	pgtest.Attempts(t, pool, 3)
	pill := enqueue(t, pool, "test.pill.v1", empty{})
	expire(t, pool, pill)
	addMany(t, pool, "test.innocent.v1", 20)
	for _, id := range query[[]uuid.UUID](t, pool, `SELECT array_agg(id) FROM workflow_run WHERE status = 'pending'`) {
		expire(t, pool, id)
	}
	mux := worker.NewMux()
	handle(mux, "test.pill.v1", func(ctx context.Context) error {
		execute(t, pool, `UPDATE workflow_run SET lease_until = now() - interval '1 second' WHERE status = 'leased'`)
		execute(t, pool, `UPDATE workflow_run SET lease_token = gen_random_uuid(), lease_no = lease_no + 1 WHERE status = 'leased' AND lease_until < now()`)
		<-ctx.Done()
		return ctx.Err()
	})
	handle(mux, "test.innocent.v1", func(ctx context.Context) error {
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond): // long enough to be in flight beside a pill
		}
		return ctx.Err()
	})
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 8 })
	drained(t, pool)
	if r := read(t, pool, pill); r.Status != run.Failed || r.Attempt != 3 {
		t.Errorf("the pill is %s after %d attempts, want failed after 3", r.Status, r.Attempt)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.innocent.v1' AND status = 'succeeded'`); n != 20 {
		t.Errorf("%d of 20 innocent runs succeeded", n)
	}
}

// A worker starts with one suspect at a time, and may watch one more for each that has lived for two seconds:
// 1, 2, then 4.
func TestSuspectsInDoublingSteps(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var started atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.suspect.v1", func(context.Context) error { started.Add(1); <-gate; return nil })
	for range 7 {
		expire(t, pool, enqueue(t, pool, "test.suspect.v1", empty{}))
	}
	var s seen
	work(t, pool, mux, s.observe)
	pgtest.Await(t, "all to be taken back and started", func() bool { return s.get(&s.again) == 7 && started.Load() == 7 })
	var steps, second []int
	rows, _ := pool.Query(t.Context(), `SELECT count(*), extract(epoch FROM started_at - min(started_at) OVER ())::int
		FROM workflow_run GROUP BY started_at ORDER BY started_at`)
	var n, at int
	if _, err := pgx.ForEachRow(rows, []any{&n, &at}, func() error { steps, second = append(steps, n), append(second, at); return nil }); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(steps, []int{1, 2, 4}) || second[1] < 2 || second[2]-second[1] < 2 {
		t.Errorf("%d suspects started, %d s after the first; want 1, 2 and 4, two seconds between them", steps, second)
	}
	close(gate)
	drained(t, pool)
}

// Suspects with one attempt left are watched one at a time, however many suspects the worker has survived, and
// no other is added meanwhile.
func TestLastAttemptsOneByOne(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate := make(chan time.Time, 3), make(chan bool)
	other := make(chan time.Time, 6)
	handle(mux, "test.suspect.v1", func(context.Context) error { other <- time.Now(); return nil })
	handle(mux, "test.last.v1", func(context.Context) error { started <- time.Now(); <-gate; return nil })
	for range 5 {
		expire(t, pool, enqueue(t, pool, "test.suspect.v1", empty{}))
	}
	for range 3 {
		id := enqueue(t, pool, "test.last.v1", empty{})
		execute(t, pool, `UPDATE workflow_run SET max_attempts = 2 WHERE id = $1`, id)
		expire(t, pool, id)
	}
	work(t, pool, mux, nil)
	first := <-started
	for range 5 {
		<-other
	}
	expire(t, pool, add(t, pool, run.New{Type: "test.suspect.v1", Payload: empty{}, Delay: time.Hour})) // not due before: the worker would lease it
	if d := (<-other).Sub(first); d < 1500*time.Millisecond {
		t.Errorf("another suspect started %s after the first, which still ran", d)
	}
	second := <-started
	if d := second.Sub(first); d < 1500*time.Millisecond {
		t.Errorf("the second started %s after the first, which still ran", d)
	}
	close(gate) // two of them end, so that the third need not wait
	if d := (<-started).Sub(second); d > 3*time.Second {
		t.Errorf("the third started %s after the others had ended", d)
	}
	drained(t, pool)
}

// A type's MaxAttempts also bounds the starts after crashes, which no handler reported.
func TestMaxAttemptsAfterCrash(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	id := enqueue(t, pool, "test.single.v1", empty{})
	expire(t, pool, id)
	mux := worker.NewMux()
	starts := make(chan uuid.UUID, 5)
	handle(mux, "test.single.v1", func(ctx context.Context) error {
		starts <- run.FromContext(ctx).ID
		return nil
	}, worker.Options{MaxAttempts: 1})
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Failed || failureOf(t, r).Code != settling.CodeExpired || len(starts) != 0 {
		t.Errorf("run is %s after %d further starts, %s; want failed after none, %s", r.Status, len(starts), r.Error, settling.CodeExpired)
	}
	// A person may still grant another attempt.
	if err := run.Retry(t.Context(), pool, id, 1); err != nil {
		t.Fatal(err)
	}
	if r := finished(t, pool, id); r.Status != run.Succeeded {
		t.Errorf("run is %s after a retry by hand, want succeeded", r.Status)
	}
}

// TestSlowSuspectChild is the child of TestSlowSuspect: a process whose worker one of its runs kills.
func TestSlowSuspectChild(t *testing.T) {
	url := os.Getenv("SLOW_SUSPECT_CHILD")
	if url == "" {
		return // not a child: TestSlowSuspect starts it
	}
	mux := worker.NewMux()
	handle(mux, "test.slow.v1", func(ctx context.Context) error {
		select {
		case <-time.After(6 * time.Second):
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	handle(mux, "test.pill.v1", func(context.Context) error { os.Exit(137); return nil })
	_ = worker.Run(context.Background(), worker.Config{Pool: pgtest.Open(t, url), Mux: mux, Prefixes: []string{"test."}, Lease: 4 * time.Second, PollInterval: 50 * time.Millisecond,
		Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond}})
}

// An innocent run that takes longer than suspects are watched does not fail because of a guilty one that is
// started beside it. The attempt under which its process died is given back, and its next start is alone. The
// guilty one still fails, after its attempts and at most one more.
func TestSlowSuspect(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Open(t, url)
	slow := add(t, pool, run.New{Type: "test.slow.v1", Payload: empty{}, MaxAttempts: 2, Priority: 5})
	pill := add(t, pool, run.New{Type: "test.pill.v1", Payload: empty{}, MaxAttempts: 2})
	over := func() bool { return read(t, pool, slow).Status.Finished() && read(t, pool, pill).Status.Finished() }
	deaths := 0
	for limit := time.Now().Add(2 * time.Minute); !over() && time.Now().Before(limit); {
		child := exec.Command(os.Args[0], "-test.run=^TestSlowSuspectChild$")
		child.Env = append(os.Environ(), "SLOW_SUSPECT_CHILD="+url)
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		died := make(chan struct{})
		go func() { _ = child.Wait(); close(died) }() // it dies, or the test kills it
		for running := true; running; {
			select {
			case <-died:
				deaths++
				running = false
			case <-time.After(100 * time.Millisecond):
				if over() || time.Now().After(limit) {
					_ = child.Process.Kill()
					<-died
					running = false
				}
			}
		}
	}
	if r := read(t, pool, slow); r.Status != run.Succeeded {
		t.Errorf("the innocent run is %s at attempt %d of %d, %v; want succeeded", r.Status, r.Attempt, r.MaxAttempts, *r.LastError)
	}
	r := read(t, pool, pill)
	if r.Status != run.Failed || failureOf(t, r).Code != settling.CodeExpired || r.Attempt != 2 || deaths < 2 || deaths > 3 {
		t.Errorf("the guilty run is %s at attempt %d and has killed %d processes; want failed at attempt 2, and 2 or 3 processes", r.Status, r.Attempt, deaths)
	}
}
