package worker_test

import (
	"context"
	"errors"
	"fmt"
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
	worker.HandleBatch(mux, "test.batch.v1", 5, 10*time.Second, func(_ context.Context, batch []number) []worker.Result[string] {
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
	if sizes := seen.sizes(); !slices.Equal(sizes, []int{5, 5, 5, 5}) {
		t.Errorf("calls had %v runs, want four of five", sizes)
	}
}

// A batch that cannot grow any more does not wait: it is full with as many runs as the worker, or the type, has slots.
func TestBatchIsFullWithAllSlots(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var all, few calls
	count := func(c *calls) func(context.Context, []number) []worker.Result[int] {
		return func(_ context.Context, batch []number) []worker.Result[int] {
			c.note(batch)
			return make([]worker.Result[int], len(batch))
		}
	}
	worker.HandleBatch(mux, "test.all.v1", 100, 10*time.Second, count(&all))
	worker.HandleBatch(mux, "test.few.v1", 100, 10*time.Second, count(&few), worker.Options{Concurrency: 2})
	addNumbers(t, pool, "test.few.v1", 4)
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 3 })
	drained(t, pool)
	if sizes := few.sizes(); !slices.Equal(sizes, []int{2, 2}) {
		t.Errorf("calls of the type with a limit had %v runs, want two of two", sizes)
	}
	_ = stop()
	addNumbers(t, pool, "test.all.v1", 6)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 3 })
	drained(t, pool)
	if sizes := all.sizes(); !slices.Equal(sizes, []int{3, 3}) {
		t.Errorf("calls of a worker with three slots had %v runs, want two of three", sizes)
	}
}

// A batch that does not become full is called after its wait.
func TestBatchWaits(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var seen calls
	worker.HandleBatch(mux, "test.batch.v1", 5, 50*time.Millisecond, func(_ context.Context, batch []number) []worker.Result[int] {
		seen.note(batch)
		return make([]worker.Result[int], len(batch))
	})
	addNumbers(t, pool, "test.batch.v1", 3)
	work(t, pool, mux, nil)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`); n != 3 {
		t.Errorf("%d of 3 runs succeeded", n)
	}
}

// A payload at which the handler panics fails no other run: what has failed before shares its call with fewer, and with
// none at its last attempt. The same holds if the handler returns too few results.
func TestBatchWithABadPayload(t *testing.T) {
	t.Parallel()
	bad := map[string]func([]worker.Result[int]) []worker.Result[int]{
		"panic": func([]worker.Result[int]) []worker.Result[int] { panic("three") },
		"short": func(r []worker.Result[int]) []worker.Result[int] { return r[1:] },
	}
	words := map[string]string{"panic": "panic: three", "short": "the handler returned 0 results for a batch of 1 runs"}
	for name, answer := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			pgtest.Attempts(t, pool, 3)
			var seen calls
			worker.HandleBatch(mux, "test.batch.v1", 8, 100*time.Millisecond, func(_ context.Context, batch []number) []worker.Result[int] {
				seen.note(batch)
				results := make([]worker.Result[int], len(batch))
				if slices.ContainsFunc(batch, func(in number) bool { return in.N == 3 }) {
					return answer(results)
				}
				return results
			})
			ids := addNumbers(t, pool, "test.batch.v1", 8)
			work(t, pool, mux, nil)
			for i, id := range ids {
				r := finished(t, pool, id)
				switch {
				case i != 3 && r.Status != run.Succeeded:
					t.Errorf("run %d is %s with error %s", i, r.Status, r.Error)
				case i == 3 && (r.Status != run.Failed || !strings.Contains(*r.LastError, words[name])):
					t.Errorf("the bad run is %s with %q, want failed with %q", r.Status, *r.LastError, words[name])
				}
			}
			sizes := seen.with(3)
			if len(sizes) != 3 || sizes[1] > 4 || sizes[2] != 1 {
				t.Errorf("the bad run was called with %v runs, itself included: want three calls, at most 4 in the second and 1 in the third", sizes)
			}
		})
	}
}

// A suspect, which has perhaps killed its process, shares its call with no other.
func TestBatchOfSuspects(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var seen calls
	worker.HandleBatch(mux, "test.batch.v1", 5, 100*time.Millisecond, func(_ context.Context, batch []number) []worker.Result[int] {
		seen.note(batch)
		return make([]worker.Result[int], len(batch))
	})
	ids := addNumbers(t, pool, "test.batch.v1", 5)
	expire(t, pool, ids[4])
	work(t, pool, mux, nil)
	drained(t, pool)
	if sizes := seen.with(4); !slices.Equal(sizes, []int{1}) {
		t.Errorf("the suspect was called with %v runs, itself included: want 1", sizes)
	}
}

// Each run of a batch has a context of its own, for its facts, its effects and its events. That of the call carries none.
func TestBatchContexts(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE ledger (run uuid, n int)`)
	worker.HandleBatch(mux, "test.batch.v1", 4, 10*time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
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
	begun := make(chan []context.Context, 1)
	release := make(chan struct{})
	worker.HandleBatch(mux, "test.batch.v1", 3, 10*time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
		begun <- worker.BatchContexts(ctx)
		<-release
		if ctx.Err() != nil {
			t.Errorf("the context of the call has ended: %v", context.Cause(ctx))
		}
		return make([]worker.Result[int], len(batch))
	})
	addNumbers(t, pool, "test.batch.v1", 3)
	work(t, pool, mux, func(c *worker.Config) { brief(c); c.Concurrency = 3 })
	contexts := <-begun
	if err := run.Cancel(t.Context(), pool, run.FromContext(contexts[0]).ID, "one too many"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-contexts[0].Done():
	case <-time.After(time.Minute):
		t.Fatal("the context of the cancelled run has not ended after a minute")
	}
	if cause := context.Cause(contexts[0]); !errors.Is(cause, run.ErrCancelled) {
		t.Errorf("the cause is %v, want %v", cause, run.ErrCancelled)
	}
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
	begun := make(chan struct{})
	worker.HandleBatch(mux, "test.batch.v1", 3, 10*time.Second, func(ctx context.Context, batch []number) []worker.Result[int] {
		close(begun)
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
	} {
		func() {
			defer func() {
				if said := fmt.Sprint(recover()); !strings.Contains(said, c.words) {
					t.Errorf("it panics with %q, want %q in it", said, c.words)
				}
			}()
			worker.HandleBatch(worker.NewMux(), c.typ, c.most, c.wait, c.fn)
		}()
	}
}
