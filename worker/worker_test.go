package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Most tests wait most of the time, so more of them run at once than there are cores.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// A row inserted by plain SQL is executed, and its result is stored.
func TestInsertIsExecuted(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.add.v1", func(_ context.Context, in struct{ A, B int }) (int, error) { return in.A + in.B, nil })
	work(t, pool, mux, nil)
	var id uuid.UUID
	if err := pool.QueryRow(t.Context(), `
		INSERT INTO workflow_run (type, payload) VALUES ('test.add.v1', '{"A": 2, "B": 3}') RETURNING id`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	r := finished(t, pool, id)
	if r.Status != run.Succeeded || string(r.Result) != "5" || r.Attempt != 1 {
		t.Errorf("got %s with %s after %d attempts, want succeeded with 5 after 1", r.Status, r.Result, r.Attempt)
	}
}

// A failing run is tried again until its attempts are used up, then it is failed.
func TestRetriesEnd(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	pgtest.Attempts(t, pool, 3)
	mux := worker.NewMux()
	starts := make(chan int, 10)
	worker.Handle(mux, "test.fail.v1", func(ctx context.Context, _ empty) (empty, error) {
		starts <- run.FromContext(ctx).Attempt
		return empty{}, errors.New("no luck")
	})
	work(t, pool, mux, nil)
	r := finished(t, pool, enqueue(t, pool, "test.fail.v1", empty{}))
	if r.Status != run.Failed || r.Attempt != 3 || len(starts) != 3 {
		t.Errorf("got %s after %d attempts and %d starts, want failed after 3", r.Status, r.Attempt, len(starts))
	}
	var f settling.Failure
	if err := json.Unmarshal(r.Error, &f); err != nil || f.Message != "no luck" || f.Code != settling.CodeHandler {
		t.Errorf("error = %s", r.Error)
	}
}

// Effects, result and events commit together; a failing effect rolls all of them back and
// the run is tried again.
func TestEffects(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE ledger (run_id uuid, attempt int)`); err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	worker.Handle(mux, "test.effect.v1", func(ctx context.Context, _ empty) (string, error) {
		info := run.FromContext(ctx)
		if err := worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1, $2)`, info.ID, info.Attempt)
			return err
		}); err != nil {
			return "", err
		}
		if info.Attempt == 1 {
			if err := worker.InSettle(ctx, func(pgx.Tx) error { return errors.New("not this time") }); err != nil {
				return "", err
			}
		}
		return "done", worker.Emit(ctx, outbox.Event{Type: "test.done", Payload: info.Attempt})
	})
	work(t, pool, mux, nil)
	r := finished(t, pool, enqueue(t, pool, "test.effect.v1", empty{}))
	var booked, events, attempt int
	if err := pool.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM ledger), (SELECT sum(attempt) FROM ledger), (SELECT count(*) FROM outbox_event WHERE aggregate_id = $1)`,
		r.ID).Scan(&booked, &attempt, &events); err != nil {
		t.Fatal(err)
	}
	if r.Status != run.Succeeded || r.Attempt != 2 || booked != 1 || attempt != 2 || events != 1 {
		t.Errorf("got %s, attempt %d, %d bookings (attempt %d), %d events; want succeeded, 2, 1 (2), 1", r.Status, r.Attempt, booked, attempt, events)
	}
}

// A cancel ends the context of a running handler with its cause, and is final.
func TestCancelReachesHandler(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, cause := make(chan bool, 1), make(chan error, 1)
	worker.Handle(mux, "test.wait.v1", func(ctx context.Context, _ empty) (string, error) {
		started <- true
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return "late", nil
	})
	work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.wait.v1", empty{})
	<-started
	if err := run.Cancel(t.Context(), pool, id, "changed my mind"); err != nil {
		t.Fatal(err)
	}
	if got := <-cause; !errors.Is(got, run.ErrCancelled) {
		t.Errorf("cause = %v, want %v", got, run.ErrCancelled)
	}
	if r := read(t, pool, id); r.Status != run.Cancelled || r.Result != nil {
		t.Errorf("run is %s with result %s, want cancelled without", r.Status, r.Result)
	}
}

// Shutdown hands running work back with no attempt charged, due at once.
func TestShutdownReleases(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started := make(chan bool, 1)
	worker.Handle(mux, "test.wait.v1", func(ctx context.Context, _ empty) (empty, error) {
		started <- true
		<-ctx.Done()
		return empty{}, ctx.Err()
	})
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.ShutdownGrace = -1 })
	id := enqueue(t, pool, "test.wait.v1", empty{})
	<-started
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	r := read(t, pool, id)
	if r.Status != run.Pending || r.Attempt != 0 || r.LeaseNo != 1 || r.RunAt.After(time.Now().Add(time.Second)) {
		t.Errorf("run is %s, attempt %d, lease_no %d, run_at %s; want pending, 0, 1, now", r.Status, r.Attempt, r.LeaseNo, r.RunAt)
	}
}

// An expired lease is taken back by another worker, charged, and the run ends well.
func TestExpiredLeaseIsTakenBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	id := enqueue(t, pool, "test.ok.v1", empty{})
	if _, err := pool.Exec(t.Context(), `
		UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, leased_by = 'dead',
		       started_at = now(), lease_until = now() - interval '1 second'`); err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	worker.Handle(mux, "test.ok.v1", func(context.Context, empty) (empty, error) { return empty{}, nil })
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 2 || r.LeaseNo != 2 {
		t.Errorf("run is %s, attempt %d, lease_no %d; want succeeded, 2, 2", r.Status, r.Attempt, r.LeaseNo)
	}
}

// A run whose last lease expired with all attempts used is failed through the ordinary
// path, and its handler is not started.
func TestExhaustedRunFails(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	pgtest.Attempts(t, pool, 3)
	id := enqueue(t, pool, "test.ok.v1", empty{})
	if _, err := pool.Exec(t.Context(), `BEGIN; SET LOCAL workflow.override = 'a test needs it';
		UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 3, leased_by = 'dead',
		       started_at = now(), lease_until = now() - interval '1 second'; COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	worker.Handle(mux, "test.ok.v1", func(context.Context, empty) (empty, error) { t.Error("started a fourth time"); return empty{}, nil })
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Failed || r.Attempt != 3 || *r.LastError == "" {
		t.Errorf("run is %s, attempt %d, %v; want failed, 3", r.Status, r.Attempt, r.LastError)
	}
}

// Thousands of runs of several types and priorities all end, each settled once.
func TestManyRuns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.a.v1", func(context.Context, empty) (empty, error) { return empty{}, nil })
	worker.Handle(mux, "test.b.v1", func(context.Context, empty) (empty, error) { return empty{}, nil }, worker.Options{Concurrency: 3})
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, priority) SELECT 'test.' || CASE WHEN g % 10 = 0 THEN 'b' ELSE 'a' END || '.v1', g % 5 FROM generate_series(1, 5000) g`); err != nil {
		t.Fatal(err)
	}
	pgtest.LogTransitions(t, pool)
	work(t, pool, mux, nil)
	work(t, pool, mux, nil)
	pgtest.Await(t, "all runs to succeed", func() bool {
		var left int
		_ = pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE status <> 'succeeded'`).Scan(&left)
		return left == 0
	})
	var events, runs int
	if err := pool.QueryRow(t.Context(), `
		SELECT count(*), count(DISTINCT run) FROM transition WHERE status = 'succeeded'`).Scan(&events, &runs); err != nil {
		t.Fatal(err)
	}
	if events != 5000 || runs != 5000 {
		t.Errorf("%d successes of %d runs, want 5000 of 5000", events, runs)
	}
}
