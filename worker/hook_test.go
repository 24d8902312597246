package worker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// acting returns a hook that only acts after the runs are settled.
func acting(act hook.Act) func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) {
	return func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) { return act, nil }
}

// The statements that Begin queues see runs before they are settled. The returned Act sees them after that, and
// only those whose leases still held.
func TestHooks(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.fine.v1", func(context.Context) error { return nil })
	handle(mux, "test.lost.v1", func(ctx context.Context) error {
		execute(t, pool, `UPDATE workflow_run SET status = 'pending', run_at = now() + interval '1 hour' WHERE id = $1`, run.FromContext(ctx).ID)
		return nil
	})
	fine, lost := enqueue(t, pool, "test.fine.v1", empty{}), enqueue(t, pool, "test.lost.v1", empty{})
	var mu sync.Mutex
	log := map[uuid.UUID]string{}
	step := func(name string) hook.Act {
		return func(ctx context.Context, tx pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
			mu.Lock()
			defer mu.Unlock()
			for _, s := range batch {
				var status string
				if err := tx.QueryRow(ctx, `SELECT status FROM workflow_run WHERE id = $1`, s.Lease.ID).Scan(&status); err != nil {
					return err
				}
				log[s.Lease.ID] += " " + name + ":" + status + ":" + string(s.Verdict)
			}
			return nil
		}
	}
	begin := func(first *pgx.Batch, batch []leasing.Settlement) (hook.Act, error) {
		for _, s := range batch {
			first.Queue(`SELECT status FROM workflow_run WHERE id = $1`, s.Lease.ID).QueryRow(func(row pgx.Row) error {
				mu.Lock()
				defer mu.Unlock()
				var status string
				err := row.Scan(&status)
				log[s.Lease.ID] += " begin:" + status + ":" + string(s.Verdict)
				return err
			})
		}
		return step("act"), nil
	}
	var s seen
	work(t, pool, mux, func(c *worker.Config) {
		s.observe(c)
		*c.Hooks() = []hook.Hook{{Begin: begin}, {Begin: acting(step("second"))}, {}, {Begin: acting(nil)}}
	})
	finished(t, pool, fine)
	pgtest.Await(t, "the other to be refused", func() bool { return s.get(&s.refused) == 1 })
	mu.Lock()
	defer mu.Unlock()
	if got, want := log[fine], " begin:leased:succeeded act:succeeded:succeeded second:succeeded:succeeded"; got != want {
		t.Errorf("settled run:%s, want%s", got, want)
	}
	if got, want := log[lost], " begin:pending:succeeded"; got != want {
		t.Errorf("lost run:%s, want%s", got, want)
	}
}

// A hook that fails for one run of a batch, with an error or a panic, delays only that run. The others are
// settled. The failing run keeps its outcome and its lease, but no slot, and is settled as soon as the hook
// succeeds, without being executed again.
func TestFailingHook(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(context.Context, pgx.Tx) error{
		"error": func(context.Context, pgx.Tx) error { return errors.New("no") },
		"panic": func(context.Context, pgx.Tx) error { panic("ouch") },
		"missing": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT FROM no_such_table`)
			return err
		},
		"aborted": func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, `SELECT 1/0`); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			mux := worker.NewMux()
			var starts, tries atomic.Int32
			var healed atomic.Bool
			guilty := enqueue(t, pool, "test.many.v1", empty{})
			gates := []chan bool{make(chan bool), make(chan bool)}
			handle(mux, "test.many.v1", func(context.Context) error {
				n := int(starts.Add(1))
				if n%20 == 0 {
					close(gates[(n-1)/20])
				}
				<-gates[(n-1)/20]
				return nil
			})
			addMany(t, pool, "test.many.v1", 19)
			work(t, pool, mux, func(c *worker.Config) {
				c.Concurrency = 20
				*c.Hooks() = []hook.Hook{{Begin: acting(func(ctx context.Context, tx pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
					for _, s := range batch {
						if s.Lease.ID == guilty && !healed.Load() {
							tries.Add(1)
							return fail(ctx, tx)
						}
					}
					return nil
				})}}
			})
			pgtest.Await(t, "the others to succeed", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 19
			})
			first := starts.Load()
			// Twenty more run at once, so all twenty slots are free for them.
			addMany(t, pool, "test.many.v1", 20)
			pgtest.Await(t, "more to succeed", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 39
			})
			if r := read(t, pool, guilty); r.Status != run.Leased || first != 20 {
				t.Errorf("guilty run is %s after %d starts in all, want leased after 20", r.Status, first)
			}
			healed.Store(true)
			if r := finished(t, pool, guilty); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 40 {
				t.Errorf("guilty run is %s, attempt %d, %d starts in all; want succeeded, 1, 40", r.Status, r.Attempt, starts.Load())
			}
			if n := tries.Load(); n > 25 {
				t.Errorf("the hook failed %d times, which is a hot loop", n)
			}
		})
	}
}

// A success for which a hook writes a value that the database refuses becomes a failure, and the hook sees that
// failure.
func TestHookRefusal(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `CREATE TABLE fact (n int CHECK (n < 5))`)
	mux := worker.NewMux()
	worker.Handle(mux, "test.fact.v1", func(_ context.Context, in struct{ N int }) (int, error) { return in.N, nil })
	addMany(t, pool, "test.fact.v1", 8)
	var failures atomic.Int32
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{{Begin: acting(func(ctx context.Context, tx pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
			for _, s := range batch {
				if s.Verdict == settling.Fail {
					failures.Add(1)
					continue
				}
				if _, err := tx.Exec(ctx, `INSERT INTO fact VALUES ($1::text::int)`, string(s.Result)); err != nil {
					return err
				}
			}
			return nil
		})}}
	})
	drained(t, pool)
	good := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND (result)::int < 5`)
	bad := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'failed' AND error->>'code' = 'result_rejected' AND attempt = 1`)
	facts := query[int](t, pool, `SELECT count(*) FROM fact`)
	if good != 4 || bad != 4 || facts != 4 || failures.Load() < 4 {
		t.Errorf("%d good, %d bad, %d facts, %d failures told; want 4 each", good, bad, facts, failures.Load())
	}
}

// If a hook names the run that is the cause of its error, that run is settled alone, and the others at once.
// The batch is not halved.
func TestHookNames(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var begun, refused atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.many.v1", func(context.Context) error {
		if begun.Add(1) == 64 {
			close(gate)
		}
		<-gate
		return nil
	})
	addMany(t, pool, "test.many.v1", 64)
	guilty := query[uuid.UUID](t, pool, `SELECT id FROM workflow_run ORDER BY id OFFSET 40 LIMIT 1`)
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{{Begin: acting(func(_ context.Context, _ pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
			for _, s := range batch {
				if s.Outcome.ID == guilty && len(batch) > 1 {
					refused.Add(1)
					return &leasing.SettleError{Run: guilty, Err: errors.New("no")}
				}
			}
			return nil
		})}}
	})
	drained(t, pool)
	if n := refused.Load(); n > 1 {
		t.Errorf("batches with the guilty one were refused %d times, want once", n)
	}
	if r := read(t, pool, guilty); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("the guilty one is %s, attempt %d", r.Status, r.Attempt)
	}
}

// Runs that a hook refuses for good fail with its error, each with its own, after one start and without their
// events. All others of the batch succeed, and the batch is not refused once for each of them.
func TestHookFailsRuns(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var begun, refused atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.many.v1", func(ctx context.Context) error {
		if begun.Add(1) == 64 {
			close(gate)
		}
		<-gate
		return worker.Emit(ctx, outbox.Event{Type: "test.told", Payload: 1})
	})
	addMany(t, pool, "test.many.v1", 64)
	guilty := query[[]uuid.UUID](t, pool, `SELECT array_agg(id) FROM (SELECT id FROM workflow_run ORDER BY id OFFSET 20 LIMIT 20) x`)
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{{Begin: acting(func(_ context.Context, _ pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
			var ids []uuid.UUID
			for _, s := range batch {
				if s.Verdict == settling.Succeed && slices.Contains(guilty, s.Outcome.ID) {
					ids = append(ids, s.Outcome.ID)
				}
			}
			if len(ids) == 0 {
				return nil
			}
			if len(batch) > 1 {
				refused.Add(1)
			}
			return &leasing.SettleError{Run: ids[0], Others: ids[1:], Err: run.Permanent(run.WithCode("taken", fmt.Errorf("%s is taken", ids[0])))}
		})}}
	})
	drained(t, pool)
	got := query[string](t, pool, `
		SELECT string_agg(concat_ws(' ', n, status, attempt, code, own), ', ' ORDER BY status)
		FROM (SELECT count(*) AS n, status, attempt, error->>'code' AS code, last_error = id || ' is taken' AS own FROM workflow_run GROUP BY 2, 3, 4, 5) x`)
	if want := "20 failed 1 taken t, 44 succeeded 1"; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM outbox_event WHERE event_type = 'test.told'`); n != 44 {
		t.Errorf("%d events, want 44", n)
	}
	if n := refused.Load(); n > 4 {
		t.Errorf("%d batches were refused, want one for each settler, or two", n)
	}
}

// Events are appended in the order in which they were emitted, with their headers. Their aggregate is the run
// unless the handler sets another.
func TestEvents(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	other := uuid.New()
	handle(mux, "test.tell.v1", func(ctx context.Context) error {
		for i := range 5 {
			if err := worker.Emit(ctx, outbox.Event{Type: "test.told", Payload: i}); err != nil {
				return err
			}
		}
		return worker.Emit(ctx, outbox.Event{Type: "test.other", Aggregate: other, Headers: map[string]string{"a": "b"}})
	})
	work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.tell.v1", empty{})
	finished(t, pool, id)
	got := query[string](t, pool, `SELECT string_agg(payload::text, ',' ORDER BY id) FROM outbox_event WHERE aggregate_id = $1 AND event_type = 'test.told'`, id)
	if got != "0,1,2,3,4" {
		t.Errorf("events %s, want 0,1,2,3,4", got)
	}
	if got := query[string](t, pool, `SELECT headers->>'a' FROM outbox_event WHERE aggregate_id = $1`, other); got != "b" {
		t.Errorf("header a = %q, want b", got)
	}
}

// A run whose event cannot be stored does not succeed, and is not executed again.
func TestBadEvent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.tell.v1", func(ctx context.Context) error { return worker.Emit(ctx, outbox.Event{Type: "not a type"}) })
	work(t, pool, mux, nil)
	r := finished(t, pool, enqueue(t, pool, "test.tell.v1", empty{}))
	if r.Status != run.Failed || r.Attempt != 1 || failureOf(t, r).Code != settling.CodeResult || !strings.Contains(*r.LastError, "outbox_event_type_check") {
		t.Errorf("run is %s after %d attempts, %s; want failed after 1, %s", r.Status, r.Attempt, r.Error, settling.CodeResult)
	}
}

// While a try to settle has rows locked, no heartbeat can extend their leases. Even several slow tries in a row
// cost no lease: what the handlers did is recorded as soon as possible.
func TestSlowSettling(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var starts atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.many.v1", func(context.Context) error {
		if starts.Add(1) == 8 {
			close(gate)
		}
		<-gate
		return nil
	})
	addMany(t, pool, "test.many.v1", 8)
	begun := time.Now()
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{{Begin: acting(func(ctx context.Context, _ pgx.Tx, _ []leasing.Settlement, _ *leasing.Carrier) error {
			if time.Since(begun) > 8*time.Second {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})}}
	})
	pgtest.Await(t, "all to succeed", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 8
	})
	if n, took := starts.Load(), query[int](t, pool, `SELECT sum(lease_no)::int FROM workflow_run`); n != 8 || took != 8 {
		t.Errorf("8 runs were started %d times, and leased %d times", n, took)
	}
}

// What a hook enqueues is executed at once, even if no wake-up arrives and polls are rare.
func TestNextStepsDoNotWait(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var returned, begun atomic.Int64
	handle(mux, "test.first.v1", func(context.Context) error {
		time.Sleep(3 * time.Second) // by now the worker polls every few seconds
		returned.Store(time.Now().UnixNano())
		return nil
	})
	handle(mux, "test.next.v1", func(context.Context) error { begun.Store(time.Now().UnixNano()); return nil })
	work(t, pool, mux, func(c *worker.Config) {
		c.NoWakeUp, c.PollInterval, c.Lease = true, time.Minute, time.Minute
		*c.Hooks() = []hook.Hook{{
			Concerns: func(l *leasing.Lease) bool { return l.Type == "test.first.v1" },
			Begin: acting(func(ctx context.Context, tx pgx.Tx, _ []leasing.Settlement, _ *leasing.Carrier) error {
				_, err := run.Enqueue(ctx, tx, run.New{Type: "test.next.v1"})
				return err
			}),
		}}
	})
	enqueue(t, pool, "test.first.v1", empty{})
	pgtest.Await(t, "the next one", func() bool { return begun.Load() > 0 })
	if waited := time.Duration(begun.Load() - returned.Load()); waited > 10*time.Second { // a minute if the poll is not woken
		t.Errorf("it waited %v", waited)
	}
}
