package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

const minutes = `SELECT coalesce(string_agg(concat_ws(' ', type, leased, succeeded, failed, retried, seconds > 0, waited > 0), ', ' ORDER BY type), '')
	FROM (SELECT type, sum(leased) leased, sum(succeeded) succeeded, sum(failed) failed, sum(retried) retried, sum(seconds) seconds, sum(waited) waited FROM workflow_minute WHERE counted_at IS NOT NULL GROUP BY type) x`

// workflow_minute counts by type what a worker leases and settles: within seconds, and completely once the
// worker has stopped. Counts that could not be written at first are written later, and not twice.
func TestCountsByMinute(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.good", func(context.Context) error { time.Sleep(time.Millisecond); return nil })
	handle(mux, "test.bad", func(context.Context) error { return run.Permanent(errors.New("no")) })
	handle(mux, "test.again", func(ctx context.Context) error {
		if run.FromContext(ctx).Attempt < 3 {
			return errors.New("not yet")
		}
		return nil
	}, worker.Options{Backoff: run.Backoff{Base: time.Millisecond, Cap: time.Millisecond}})
	execute(t, pool, `ALTER TABLE workflow_minute RENAME TO away`)
	addMany(t, pool, "test.good", 50)
	_, stop := work(t, pool, mux, nil)
	drained(t, pool)
	pgtest.Await(t, "a report", func() bool {
		return query[bool](t, pool, `SELECT count(*) > 0 FROM workflow_worker WHERE seen_at > started_at + interval '2 s'`)
	})
	execute(t, pool, `ALTER TABLE away RENAME TO workflow_minute`)
	addMany(t, pool, "test.bad", 3)
	pgtest.Await(t, "what was counted before, and since", func() bool {
		return query[string](t, pool, minutes) == "test.bad 3 0 3 0 t t, test.good 50 50 0 0 t t"
	})
	finished(t, pool, enqueue(t, pool, "test.again", empty{}))
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := query[string](t, pool, minutes); got != "test.again 3 1 0 2 t t, test.bad 3 0 3 0 t t, test.good 50 50 0 0 t t" {
		t.Errorf("after it has stopped: %s", got)
	}
}

// Up to a hundred types are counted by name and all others as one, so that made-up types cannot make the table,
// or a worker, grow.
func TestManyTypesAreCountedAsOne(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	mux.HandleRaw("test.", func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil })
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 500 })
	for i := range 150 {
		enqueue(t, pool, fmt.Sprintf("test.t%d", i), empty{})
	}
	drained(t, pool)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := query[int](t, pool, `SELECT sum(succeeded)::int FROM workflow_minute`); got != 150 {
		t.Errorf("%d are counted, want 150", got)
	}
}

// The backlog of each prefix is reported as a metric, and recorded by type.
func TestBacklogIsTold(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	mux.HandleRaw("test.", func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil })
	execute(t, pool, `INSERT INTO workflow_run (type, run_at) SELECT 'test.later', now() - interval '1 minute' FROM generate_series(1, 20)`)
	end, begun := make(chan struct{}), make(chan struct{}, 2)
	handle(mux, "test.slow", func(context.Context) error { begun <- struct{}{}; <-end; return nil })
	execute(t, pool, `SELECT workflow_pause('test.', 'until it is full')`)
	enqueue(t, pool, "test.slow", empty{})
	var mu sync.Mutex
	var told []worker.Backlog
	_, stop := work(t, pool, mux, func(c *worker.Config) {
		c.Concurrency, c.Prefixes = 1, []string{"other.", "test."}
		c.Observe.Backlog = func(due []worker.Backlog) { mu.Lock(); told = due; mu.Unlock() }
	})
	defer func() {
		close(end)
		if err := stop(); err != nil {
			t.Error(err)
		}
	}()
	execute(t, pool, `UPDATE workflow_run SET priority = 100 WHERE type = 'test.slow'`)
	execute(t, pool, `SELECT workflow_resume('test.')`)
	<-begun
	pgtest.Await(t, "the backlog", func() bool {
		mu.Lock()
		defer mu.Unlock()
		var s string
		for _, b := range told {
			s += fmt.Sprintf("%s %d %v %v; ", b.Prefix, b.Due, b.AtLeast, b.Oldest > time.Minute)
		}
		return s == "other. 0 false false; test. 20 false true; " || s == "test. 20 false true; other. 0 false false; "
	})
	if got := query[string](t, pool, `SELECT string_agg(DISTINCT type || ' ' || due, ', ') FROM workflow_minute WHERE due IS NOT NULL AND type = 'test.later'`); got != "test.later 20" {
		t.Errorf("noted: %s", got)
	}
}
