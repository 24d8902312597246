package worker_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type number struct{ N int }

// calls notes the batches that a handler gets.
type calls struct {
	mu  sync.Mutex
	all [][]int
}

func (c *calls) note(batch []number) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var numbers []int
	for _, in := range batch {
		numbers = append(numbers, in.N)
	}
	c.all = append(c.all, numbers)
}

// handle is a handler that notes its batches, and succeeds.
func (c *calls) handle(_ context.Context, batch []number) []worker.Result[int] {
	c.note(batch)
	return make([]worker.Result[int], len(batch))
}

// sizes returns how many runs each call had, the largest first.
func (c *calls) sizes() (sizes []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, numbers := range c.all {
		sizes = append(sizes, len(numbers))
	}
	slices.SortFunc(sizes, func(a, b int) int { return b - a })
	return sizes
}

// with returns the sizes of the calls that had a number, in their order.
func (c *calls) with(n int) (sizes []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, numbers := range c.all {
		if slices.Contains(numbers, n) {
			sizes = append(sizes, len(numbers))
		}
	}
	return sizes
}

func addNumbers(t *testing.T, pool *pgxpool.Pool, typ string, n int) (ids []uuid.UUID) {
	t.Helper()
	all := make([]run.New, n)
	for i := range all {
		all[i] = run.New{Type: typ, Payload: number{i}}
	}
	enqueued, err := run.EnqueueMany(t.Context(), pool, all)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range enqueued {
		ids = append(ids, e.ID)
	}
	return ids
}

// Runs come to a handler together, at most as many as it takes, and each is settled by itself: one that fails, or whose
// payload does not fit, is no other's failure.
func TestBatch(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var seen calls
	worker.HandleBatch(mux, "test.batch.v1", 5, time.Second, func(_ context.Context, batch []number) []worker.Result[string] {
		seen.note(batch)
		results := make([]worker.Result[string], len(batch))
		for i, in := range batch {
			if results[i].Value = fmt.Sprint("number ", in.N); in.N == 7 {
				results[i].Err = run.Permanent(run.WithCode("unlucky", errors.New("seven")))
			}
		}
		return results
	})
	ids := addNumbers(t, pool, "test.batch.v1", 20)
	unfit := enqueue(t, pool, "test.batch.v1", map[string]string{"N": "twenty"})
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 8 })
	for i, id := range ids {
		r := finished(t, pool, id)
		switch {
		case i == 7 && (r.Status != run.Failed || failureOf(t, r).Code != "unlucky"):
			t.Errorf("run 7 is %s with error %s, want failed as unlucky", r.Status, r.Error)
		case i != 7 && (r.Status != run.Succeeded || string(r.Result) != fmt.Sprintf(`"number %d"`, i)):
			t.Errorf("run %d is %s with result %s", i, r.Status, r.Result)
		}
	}
	if r := finished(t, pool, unfit); r.Status != run.Failed || failureOf(t, r).Code != settling.CodePayload {
		t.Errorf("the run whose payload does not fit is %s with error %s, want failed as %s", r.Status, r.Error, settling.CodePayload)
	}
	if sizes := seen.sizes(); sizes[0] != 5 {
		t.Errorf("calls had %v runs, want 5 in the largest", sizes)
	}
}

// A batch that does not become full is called after its wait, with those that have come.
func TestBatchWaits(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var seen calls
	worker.HandleBatch(mux, "test.batch.v1", 50, time.Second, seen.handle)
	addNumbers(t, pool, "test.batch.v1", 3)
	work(t, pool, mux, nil)
	drained(t, pool)
	if sizes := seen.sizes(); !slices.Equal(sizes, []int{3}) {
		t.Errorf("calls had %v runs, want one of 3", sizes)
	}
}

// A payload at which the handler panics, ends its goroutine or returns too few results costs no other run an attempt: each
// is called again alone.
func TestBatchWithABadPayload(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func([]worker.Result[int]) []worker.Result[int]
		words  string
	}{
		"panic":  {func([]worker.Result[int]) []worker.Result[int] { panic("three") }, "panic: three"},
		"short":  {func(r []worker.Result[int]) []worker.Result[int] { return r[1:] }, "the handler returned 0 results for a batch of 1"},
		"goexit": {func([]worker.Result[int]) []worker.Result[int] { runtime.Goexit(); return nil }, "runtime.Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			pgtest.Attempts(t, pool, 3)
			worker.HandleBatch(mux, "test.batch.v1", 8, time.Second, func(_ context.Context, batch []number) []worker.Result[int] {
				results := make([]worker.Result[int], len(batch))
				if slices.ContainsFunc(batch, func(in number) bool { return in.N == 3 }) {
					return c.answer(results)
				}
				return results
			})
			ids := addNumbers(t, pool, "test.batch.v1", 8)
			work(t, pool, mux, nil)
			others := 0
			for i, id := range ids {
				switch r := finished(t, pool, id); {
				case i == 3 && (r.Status != run.Failed || r.Attempt != 3 || !strings.Contains(*r.LastError, c.words)):
					t.Errorf("the bad run is %s at attempt %d with %q, want failed at 3 with %q", r.Status, r.Attempt, *r.LastError, c.words)
				case i != 3 && r.Status != run.Succeeded:
					t.Errorf("run %d is %s with error %s", i, r.Status, r.Error)
				case i != 3:
					others += r.Attempt
				}
			}
			if name != "goexit" && others != 7 { // with that, the goroutine of the first run of each call ends
				t.Errorf("the 7 others took %d attempts", others)
			}
		})
	}
}

// A run at its last attempt, and a suspect, share their call with no other, though others gather meanwhile.
func TestBatchOfOne(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(t *testing.T, pool *pgxpool.Pool, id uuid.UUID){
		"suspect": func(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) {
			execute(t, pool, `UPDATE workflow_run SET suspect = true WHERE id = $1`, id)
		},
		"last attempt": func(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) {
			execute(t, pool, `UPDATE workflow_run SET max_attempts = 1 WHERE id = $1`, id)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			var seen calls
			worker.HandleBatch(mux, "test.batch.v1", 5, time.Second, seen.handle)
			ids := addNumbers(t, pool, "test.batch.v1", 3)
			prepare(t, pool, ids[1])
			work(t, pool, mux, nil)
			drained(t, pool)
			if alone, others := seen.with(1), seen.with(0); !slices.Equal(alone, []int{1}) || !slices.Equal(others, []int{2}) {
				t.Errorf("it was called with %v runs, itself included, and the others with %v: want 1 and 2", alone, others)
			}
		})
	}
}

// The context of a call ends with the time limit of its runs, and that is a failure of all.
func TestBatchAtItsTimeLimit(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	worker.HandleBatch(mux, "test.batch.v1", 3, 100*time.Millisecond, func(ctx context.Context, batch []number) []worker.Result[int] {
		<-ctx.Done()
		results := make([]worker.Result[int], len(batch))
		for i := range results {
			results[i].Err = context.Cause(ctx)
		}
		return results
	}, worker.Options{Timeout: time.Second, MaxAttempts: 2})
	ids := addNumbers(t, pool, "test.batch.v1", 3)
	work(t, pool, mux, nil)
	for i, id := range ids {
		if r := finished(t, pool, id); r.Status != run.Failed || r.Attempt != 2 || failureOf(t, r).Code != "time_limit" {
			t.Errorf("run %d is %s at attempt %d with %s, want failed at 2 with time_limit", i, r.Status, r.Attempt, r.Error)
		}
	}
}

// Each run of a batch has a context of its own, for its facts, its effects and its events. That of the call carries none.
func TestBatchContexts(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE ledger (run uuid, n int)`)
	worker.HandleBatch(mux, "test.batch.v1", 4, time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
		if id := run.FromContext(ctx).ID; id != uuid.Nil {
			t.Errorf("the context of the call carries run %s", id)
		}
		if err := worker.Emit(ctx, outbox.Event{Type: "counted"}); !errors.Is(err, worker.ErrNoRun) {
			t.Errorf("Emit with the context of the call returned %v, want ErrNoRun", err)
		}
		results := make([]worker.Result[int], len(batch))
		for i, one := range worker.BatchContexts(ctx) {
			results[i].Err = errors.Join(
				worker.InSettle(one, func(tx pgx.Tx) error {
					_, err := tx.Exec(one, `INSERT INTO ledger VALUES ($1, $2)`, run.FromContext(one).ID, batch[i].N)
					return err
				}),
				worker.Emit(one, outbox.Event{Type: "counted", Payload: batch[i]}))
		}
		return results
	})
	addNumbers(t, pool, "test.batch.v1", 4)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 4 })
	drained(t, pool)
	n := query[int](t, pool, `
		SELECT count(*) FROM workflow_run r JOIN ledger l ON l.run = r.id AND l.n = (r.payload->>'N')::int
		JOIN outbox_event e ON e.aggregate_id = r.id AND e.payload = r.payload WHERE r.status = 'succeeded'`)
	if n != 4 {
		t.Errorf("%d of 4 runs succeeded with their effect and their event", n)
	}
	if all := worker.BatchContexts(t.Context()); all != nil {
		t.Errorf("a context that is not a batch's has contexts: %v", all)
	}
}

// If one run of a batch is cancelled, its context ends. The call goes on for the others.
func TestBatchGoesOnWithoutACancelledRun(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	begun := make(chan []context.Context, 3)
	release := make(chan struct{})
	worker.HandleBatch(mux, "test.batch.v1", 3, time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
		begun <- worker.BatchContexts(ctx)
		<-release
		if ctx.Err() != nil {
			t.Errorf("the context of the call has ended: %v", context.Cause(ctx))
		}
		return make([]worker.Result[int], len(batch))
	})
	addNumbers(t, pool, "test.batch.v1", 3)
	w, _ := work(t, pool, mux, func(c *worker.Config) { brief(c); c.Concurrency = 3 })
	contexts := <-begun
	if err := run.Cancel(t.Context(), pool, run.FromContext(contexts[1]).ID, "one too many"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-contexts[1].Done():
	case <-time.After(time.Minute):
		t.Fatal("the context of the cancelled run has not ended after a minute")
	}
	if cause := context.Cause(contexts[1]); !errors.Is(cause, run.ErrCancelled) {
		t.Errorf("the cause is %v, want %v", cause, run.ErrCancelled)
	}
	pgtest.Await(t, "the cancelled run to leave the call", func() bool { return w.InFlight() == 2 })
	close(release)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`); n != 2 {
		t.Errorf("%d runs succeeded, want the 2 that were not cancelled", n)
	}
}

// When the worker stops, the context of a call ends with those of its runs, and they are handed back with their attempt.
func TestBatchAtShutdown(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	begun := make(chan struct{}, 3)
	worker.HandleBatch(mux, "test.batch.v1", 3, time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
		begun <- struct{}{}
		<-ctx.Done()
		results := make([]worker.Result[int], len(batch))
		for i := range results {
			results[i].Err = ctx.Err()
		}
		if cause := context.Cause(ctx); !errors.Is(cause, run.ErrShutdown) {
			t.Errorf("the cause is %v, want %v", cause, run.ErrShutdown)
		}
		return results
	})
	addNumbers(t, pool, "test.batch.v1", 3)
	w, stop := work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 3 })
	<-begun
	w.StopNow()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'pending' AND attempt = 0`); n != 3 {
		t.Errorf("%d of 3 runs are due again without an attempt charged", n)
	}
}

// HandleBatch panics on misuse, in words that name the value.
func TestBatchMisuse(t *testing.T) {
	t.Parallel()
	fn := func(context.Context, []number) []worker.Result[int] { return nil }
	for _, c := range []struct {
		typ   run.Task[number]
		most  int
		wait  time.Duration
		fn    func(context.Context, []number) []worker.Result[int]
		words string
	}{
		{"test.batch.v1", 5, time.Second, nil, `handler of "test.batch.v1" is nil`},
		{"test.", 5, time.Second, fn, `"test." is not a type`},
		{"test.batch.v1", 0, time.Second, fn, "at most 0 runs"},
		{"test.batch.v1", 10_001, time.Second, fn, "at most 10001 runs"},
		{"test.batch.v1", 5, 0, fn, "a wait of 0s"},
		{"test.batch.v1", 5, time.Minute, fn, "a wait of 1m0s"},
		{"test.batch.v1", 5, 500 * time.Millisecond, fn, "whose time limit is 500ms"},
	} {
		func() {
			defer func() {
				if said := fmt.Sprint(recover()); !strings.Contains(said, c.words) {
					t.Errorf("it panics with %q, want %q in it", said, c.words)
				}
			}()
			worker.HandleBatch(worker.NewMux(), c.typ, c.most, c.wait, c.fn, worker.Options{Timeout: 500 * time.Millisecond})
		}()
	}
}
