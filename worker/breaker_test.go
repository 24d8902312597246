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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// downstream is the service that the handlers of a test need. It counts their calls.
type downstream struct {
	down          atomic.Bool
	calls, within atomic.Int64
	most          atomic.Int64 // the most calls at the same time
}

func (d *downstream) call(took time.Duration) error {
	d.calls.Add(1)
	n := d.within.Add(1)
	defer d.within.Add(-1)
	for most := d.most.Load(); n > most && !d.most.CompareAndSwap(most, n); most = d.most.Load() {
	}
	time.Sleep(took)
	if d.down.Load() {
		return run.Unavailable(errDown)
	}
	return nil
}

func openBreakers(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return text(t, pool, `SELECT coalesce(string_agg(type, ' ' ORDER BY type), '') FROM workflow_breaker`)
}

// text returns the only value that a query returns.
func text(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (value string) {
	t.Helper()
	if err := patiently(func() error { return pool.QueryRow(context.Background(), query, args...).Scan(&value) }); err != nil {
		t.Fatal(err)
	}
	return value
}

// chargedForGood returns the sum of the attempts of runs that are not leased. Probes come and go, so whether
// one is leased must be seen in the same snapshot.
const chargedForGood = `SELECT sum(attempt - (status = 'leased')::int)::text FROM workflow_run WHERE type = 'test.down.v1'`

// While the service that a type needs is down, its runs are tried one at a time by all workers together, and no
// attempt is charged. Other types continue. People can see the open breaker. One success closes it, and no run
// is lost.
func TestBreaker(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var d downstream
	d.down.Store(true)
	var mu sync.Mutex
	var told []string
	for range 3 {
		mux := worker.NewMux()
		handle(mux, "test.down.v1", func(context.Context) error { return d.call(100 * time.Millisecond) })
		handle(mux, "test.other.v1", func(context.Context) error { return nil })
		work(t, pool, mux, func(c *worker.Config) {
			c.Observe.Breakers = func(open []string) {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, fmt.Sprint(open))
			}
		})
	}
	addMany(t, pool, "test.down.v1", 40)
	pgtest.Await(t, "the breaker to open", func() bool { return openBreakers(t, pool) == "test.down.v1" })
	pgtest.Await(t, "all workers to know", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(told) >= 3
	})
	pgtest.Await(t, "what was leased before to be over", func() bool {
		return text(t, pool, `SELECT count(*)::text FROM workflow_run WHERE status = 'leased'`) == "0" && text(t, pool, `SELECT (probes > 0)::text FROM workflow_breaker`) == "true"
	})
	d.most.Store(0)
	charged := text(t, pool, chargedForGood)
	calls := d.calls.Load()
	waiting := text(t, pool, `SELECT id::text FROM workflow_run WHERE status = 'pending' ORDER BY run_at DESC LIMIT 1`)
	if why := text(t, pool, `SELECT workflow_why($1::uuid)`, waiting); !strings.Contains(why, "the breaker of test.down.v1 is open") || !strings.Contains(why, "unavailable") {
		t.Errorf("workflow_why says %q", why)
	}
	other := enqueue(t, pool, "test.other.v1", empty{})
	if r := finished(t, pool, other); r.Status != run.Succeeded {
		t.Errorf("a run of another type has %s", r.Status)
	}
	pgtest.Await(t, "two more probes", func() bool { return d.calls.Load() >= calls+2 })
	if n := d.most.Load(); n != 1 {
		t.Errorf("%d handlers at once while the breaker is open, want 1", n)
	}
	if now := text(t, pool, chargedForGood); now != charged {
		t.Errorf("%s attempts are charged after probes, %s before", now, charged)
	}
	if n := text(t, pool, `SELECT count(*)::text FROM workflow_history WHERE event_type = 'released' AND data->>'code' = 'unavailable'`); n == "0" {
		t.Error("the history has nothing of what was given back")
	}
	d.down.Store(false)
	pgtest.Await(t, "all runs to succeed", func() bool {
		return text(t, pool, `SELECT count(*)::text FROM workflow_run WHERE type = 'test.down.v1' AND status = 'succeeded'`) == "40"
	})
	pgtest.Await(t, "the breaker to close", func() bool { return text(t, pool, `SELECT count(*)::text FROM workflow_outage`) == "0" })
	if n := text(t, pool, `SELECT max(postponed)::text FROM workflow_run`); n != "0" {
		t.Errorf("a run counts as put off %s times", n)
	}
	pgtest.Await(t, "all workers to know that it is closed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Contains(told, "[test.down.v1]") && told[len(told)-1] == "[]"
	})
}

// A breaker is not opened by errors that are no outages, nor by panics, time limits and permanent errors, nor
// by one run that always reports an outage, nor by outages of a type whose policy turns the breaker off. All
// these are charged and end as usual.
func TestNoBreaker(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 6, backoff_base => '1 ms', curve => 'constant'), workflow_set_policy('test.off.', breaker => false)`)
	mux := worker.NewMux()
	handle(mux, "test.error.v1", func(context.Context) error { return errDown })
	handle(mux, "test.panic.v1", func(context.Context) error { panic("broken") })
	handle(mux, "test.limit.v1", func(ctx context.Context) error { <-ctx.Done(); return run.Unavailable(ctx.Err()) }, worker.Options{Timeout: 50 * time.Millisecond})
	handle(mux, "test.permanent.v1", func(context.Context) error { return run.Permanent(run.Unavailable(errDown)) })
	handle(mux, "test.poison.v1", func(context.Context) error { return run.Unavailable(errDown) })
	handle(mux, "test.off.v1", func(context.Context) error { return run.Unavailable(errDown) })
	work(t, pool, mux, nil)
	var ids []uuid.UUID
	for typ, n := range map[string]int{"test.error.v1": 4, "test.panic.v1": 4, "test.limit.v1": 4, "test.permanent.v1": 8, "test.poison.v1": 1, "test.off.v1": 4} {
		for range n {
			ids = append(ids, enqueue(t, pool, typ, empty{}))
		}
	}
	for _, id := range ids {
		r, want := finished(t, pool, id), 6
		if r.Type == "test.permanent.v1" {
			want = 1
		}
		if r.Status != run.Failed || r.Attempt != want {
			t.Errorf("%s: %s at attempt %d, want failed at %d", r.Type, r.Status, r.Attempt, want)
		}
	}
	if open := openBreakers(t, pool); open != "" {
		t.Errorf("breakers of %s are open", open)
	}
	if n := text(t, pool, `SELECT coalesce(string_agg(DISTINCT type, ' '), '') FROM workflow_outage`); n != "test.poison.v1" {
		t.Errorf("outages of %q are noted, want those of test.poison.v1 alone", n)
	}
}

// While a breaker is open, a run that was given back a hundred times is charged again, so even runs that always
// report an outage end. A run past its policy's deadline fails when it is next leased.
func TestBreakerSparesNotForEver(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 50, backoff_base => '500 ms', curve => 'constant'), workflow_set_policy('test.late.v1', deadline => '1 hour')`)
	mux := worker.NewMux()
	for _, typ := range []string{"test.poison.v1", "test.late.v1"} {
		handle(mux, typ, func(context.Context) error { return run.Unavailable(errDown) })
	}
	pgtest.ByHand(t, pool, `INSERT INTO workflow_run (type, lease_no) SELECT 'test.poison.v1', 1000 FROM generate_series(1, 3)`)
	addMany(t, pool, "test.late.v1", 10) // their first attempts open the breaker: a second charged attempt would fail as no probe does
	work(t, pool, mux, nil)
	pgtest.Await(t, "the breakers to open", func() bool { return openBreakers(t, pool) == "test.late.v1 test.poison.v1" })
	pgtest.ByHand(t, pool, `UPDATE workflow_run SET created_at = created_at - interval '2 hours' WHERE type = 'test.late.v1'`)
	before := text(t, pool, `SELECT sum(attempt)::text FROM workflow_run WHERE type = 'test.poison.v1'`)
	pgtest.Await(t, "a probe to be charged", func() bool {
		return text(t, pool, `SELECT (sum(attempt) > $1::int)::text FROM workflow_run WHERE type = 'test.poison.v1' AND status <> 'leased'`, before) == "true"
	})
	if n := text(t, pool, `SELECT count(*)::text FROM workflow_history h JOIN workflow_run r ON r.id = h.workflow_id WHERE r.type = 'test.poison.v1' AND event_type = 'released'`); n != "0" {
		t.Errorf("%s attempts of runs that were given back often enough are given back", n)
	}
	pgtest.Await(t, "a run that is late to fail", func() bool {
		return text(t, pool, `SELECT count(*)::text FROM workflow_run WHERE type = 'test.late.v1' AND status = 'failed' AND error->>'code' = 'too_late'`) != "0"
	})
}

// A run that may be started once, by its own number or by its policy, is not started again after an outage,
// because a service that answers 503 may have done the work.
func TestBreakerStartsNothingTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.once.v1', attempts => 1)`)
	pgtest.ByHand(t, pool, `INSERT INTO workflow_outage (type, bound, in_a_row, runs, code, opened_at) SELECT unnest('{test.down.v1,test.once.v1}'::text[]), false, 5, 3, 'unavailable', now()`)
	mux := worker.NewMux()
	for _, typ := range []string{"test.down.v1", "test.once.v1"} {
		handle(mux, typ, func(context.Context) error { return run.Unavailable(errDown) })
	}
	own := text(t, pool, `INSERT INTO workflow_run (type, max_attempts) VALUES ('test.down.v1', 1) RETURNING id::text`)
	byPolicy := text(t, pool, `INSERT INTO workflow_run (type) VALUES ('test.once.v1') RETURNING id::text`)
	work(t, pool, mux, nil)
	for _, id := range []string{own, byPolicy} {
		finished(t, pool, uuid.MustParse(id))
		if got := text(t, pool, `SELECT concat_ws(' ', status, attempt, lease_no) FROM workflow_run WHERE id = $1::uuid`, id); got != "failed 1 1" {
			t.Errorf("its status, attempts and leases are %s", got)
		}
	}
}

// A breaker without news for five minutes, one that an operator closes, and one that is turned off hold nobody
// up.
func TestBreakerIsForgotten(t *testing.T) {
	t.Parallel()
	for name, forget := range map[string]func(t *testing.T, pool *pgxpool.Pool){
		"stale": func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.ByHand(t, pool, `UPDATE workflow_outage SET said_at = now() - interval '6 minutes'`)
		},
		"closed": func(t *testing.T, pool *pgxpool.Pool) {
			execute(t, pool, `SELECT workflow_close_breaker('test.down.v1')`)
		},
		"off": func(t *testing.T, pool *pgxpool.Pool) {
			execute(t, pool, `SELECT workflow_set_policy('test.down.v1', breaker => false)`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			pgtest.ByHand(t, pool, `INSERT INTO workflow_outage (type, bound, in_a_row, runs, code, opened_at, next_probe) VALUES ('test.down.v1', false, 5, 3, 'unavailable', now(), now() + interval '1 hour')`)
			mux := worker.NewMux()
			handle(mux, "test.down.v1", func(context.Context) error { return errors.New("it is none") })
			handle(mux, "test.other.v1", func(context.Context) error { return nil })
			work(t, pool, mux, nil)
			addMany(t, pool, "test.down.v1", 3)
			for range 3 { // polls
				finished(t, pool, enqueue(t, pool, "test.other.v1", empty{}))
			}
			if n := text(t, pool, `SELECT count(*)::text FROM workflow_run WHERE type = 'test.down.v1' AND lease_no > 0`); n != "0" {
				t.Fatalf("%s runs are leased though the breaker is open", n)
			}
			forget(t, pool)
			pgtest.Await(t, "the runs to be leased", func() bool {
				return text(t, pool, `SELECT count(*)::text FROM workflow_run WHERE type = 'test.down.v1' AND attempt > 0`) == "3"
			})
		})
	}
}

// While a breaker is open, runs past their policy's deadline fail, however many there are, and none takes the
// place of a probe: of the others the next one is the probe.
func TestBreakerEndsWhatIsLate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.down.v1', deadline => '1 hour')`)
	pgtest.ByHand(t, pool, `INSERT INTO workflow_run (type, created_at, run_at) SELECT 'test.down.v1', now() - interval '2 hours', now() - interval '2 hours' FROM generate_series(1, 5)`)
	pgtest.ByHand(t, pool, `INSERT INTO workflow_outage (type, bound, in_a_row, runs, code, opened_at, probes) VALUES ('test.down.v1', false, 5, 3, 'unavailable', now(), 9)`)
	execute(t, pool, `INSERT INTO workflow_run (type) SELECT 'test.down.v1' FROM generate_series(1, 2)`)
	mux := worker.NewMux()
	handle(mux, "test.down.v1", func(context.Context) error { return run.Unavailable(errDown) })
	work(t, pool, mux, nil)
	pgtest.Await(t, "what is late to fail, and a probe", func() bool { // pauses between probes are 30 s
		return text(t, pool, `SELECT count(*) FILTER (WHERE status = 'failed' AND error->>'code' = 'too_late') || ' ' || count(*) FILTER (WHERE lease_no = 1 AND error->>'code' = 'unavailable') FROM workflow_run`) == "5 1"
	})
	if n := text(t, pool, `SELECT probes::text FROM workflow_breaker`); n != "10" {
		t.Errorf("%s probes are counted, want 10", n)
	}
}
