package worker_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A run that has used its attempts is not given one back at shutdown, even if it could not
// be failed in time: its handler is never started again.
func TestShutdownGivesNothingToExhausted(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	id := add(t, pool, run.New{Type: "test.pill.v1", MaxAttempts: 1})
	expire(t, pool, id)
	mux := worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.pill.v1", func(context.Context) error { starts.Add(1); return nil })
	tried := make(chan bool, 1000)
	_, stop := work(t, pool, mux, func(c *worker.Config) {
		c.ShutdownGrace = -1
		*c.Hooks() = []hook.Hook{{Begin: func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) {
			tried <- true
			return nil, errors.New("not now")
		}}}
	})
	<-tried
	_ = stop()
	work(t, pool, mux, nil)
	pgtest.Await(t, "the run to fail", func() bool { return read(t, pool, id).Status.Finished() })
	if r := read(t, pool, id); r.Status != run.Failed || r.Attempt != 1 || starts.Load() != 0 {
		t.Errorf("run is %s after %d attempts and %d further starts; want failed, 1, 0", r.Status, r.Attempt, starts.Load())
	}
}

// Whatever a handler gives as an error's code, the failure is stored with what is usable of
// it, and at most 100 characters.
func TestOddCodes(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	cases := map[string]struct{ code, want string }{
		"test.fine.v1":  {"card_declined", "card_declined"},
		"test.nul.v1":   {"a\x00b", "ab"},
		"test.bytes.v1": {"\xff", settling.CodeHandler},
		"test.long.v1":  {strings.Repeat("x", 1<<20), strings.Repeat("x", 100)},
	}
	for typ, c := range cases {
		handle(mux, typ, func(context.Context) error { return run.WithCode(c.code, errors.New("no")) })
	}
	work(t, pool, mux, nil)
	for typ, c := range cases {
		r := finished(t, pool, add(t, pool, run.New{Type: typ, MaxAttempts: 1}))
		if got := failureOf(t, r); r.Status != run.Failed || got.Code != c.want || got.Message != "no" {
			t.Errorf("%s: run is %s: %.150s: %s; want failed: %.150s: no", typ, r.Status, got.Code, got.Message, c.want)
		}
	}
}

// A failure that the database refuses to describe is told in words of our own.
func TestRefusedFailure(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `ALTER TABLE workflow_run ADD CONSTRAINT no_rude_words CHECK (last_error NOT LIKE '%rude%')`)
	mux := worker.NewMux()
	handle(mux, "test.rude.v1", func(context.Context) error { return errors.New("something rude") })
	work(t, pool, mux, nil)
	r := finished(t, pool, add(t, pool, run.New{Type: "test.rude.v1", MaxAttempts: 1}))
	if r.Status != run.Failed || failureOf(t, r).Code != settling.CodeResult {
		t.Errorf("run is %s: %s; want failed as %s", r.Status, r.Error, settling.CodeResult)
	}
}

// When shutdown ends a handler's context and its effect fails for that, the run is handed
// back: it is not the handler's failure.
func TestEffectWithEndedContext(t *testing.T) {
	t.Parallel()
	pool := ledger(t)
	mux := worker.NewMux()
	began := make(chan bool, 1)
	worker.Handle(mux, "test.late.v1", func(ctx context.Context, _ empty) (empty, error) {
		began <- true
		<-ctx.Done()
		return empty{}, worker.InSettle(ctx, book(ctx, 1))
	})
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.ShutdownGrace = -1 })
	id := add(t, pool, run.New{Type: "test.late.v1", MaxAttempts: 1})
	<-began
	_ = stop()
	if r := read(t, pool, id); r.Status != run.Pending || r.Attempt != 0 || booked(t, pool) != 0 {
		t.Errorf("run is %s after %d attempts, %d entries; want pending, 0, 0", r.Status, r.Attempt, booked(t, pool))
	}
}

// While the server takes no changes nothing is repeated: finished work waits to be recorded,
// and nobody takes its leases back before.
func TestReadOnlyServer(t *testing.T) {
	t.Parallel()
	const runs = 20
	s := ownServer(t, nil)
	pool := pgtest.Open(t, s.URL("postgres"))
	mux := worker.NewMux()
	var starts atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.wait.v1", func(ctx context.Context) error {
		starts.Add(1)
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	addMany(t, pool, "test.wait.v1", runs)
	for range 2 {
		work(t, pool, mux, func(c *worker.Config) { c.Concurrency = runs / 2 })
	}
	pgtest.Await(t, "all handlers to start", func() bool { return starts.Load() == runs })
	operator, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = operator.Close(context.Background()) }()
	command := func(query string) {
		if _, err := operator.Exec(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	command(`ALTER SYSTEM SET default_transaction_read_only = on`)
	command(`SELECT pg_reload_conf()`)
	close(gate)
	<-time.After(5 * time.Second) // more than two leases
	command(`SET default_transaction_read_only = off`)
	command(`ALTER SYSTEM RESET default_transaction_read_only`)
	command(`SELECT pg_reload_conf()`)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`); n > runs/10 {
		t.Errorf("%d of %d runs were repeated, want at most a tenth", n, runs)
	}
}

// Forty runs whose rows somebody has locked keep neither plain outcomes nor ones with effects
// from being recorded.
func TestManyLockedRows(t *testing.T) {
	t.Parallel()
	pool := ledger(t)
	mux := worker.NewMux()
	var started atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.locked.v1", func(context.Context) error { started.Add(1); <-gate; return nil })
	handle(mux, "test.plain.v1", func(context.Context) error { return nil })
	effects(mux, "test.effect.v1", func(ctx context.Context) []func(pgx.Tx) error { return []func(pgx.Tx) error{book(ctx, 1)} })
	work(t, pool, mux, nil)
	addMany(t, pool, "test.locked.v1", 40)
	pgtest.Await(t, "all handlers to start", func() bool { return started.Load() == 40 })
	tx, err := pgtest.Open(t, pool.Config().ConnString()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run WHERE type = 'test.locked.v1' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	close(gate)
	for _, typ := range []string{"test.plain.v1", "test.effect.v1", "test.effect.v1", "test.plain.v1"} {
		start := time.Now()
		finished(t, pool, enqueue(t, pool, typ, empty{}))
		if took := time.Since(start); took > 8*time.Second {
			t.Errorf("%s took %s beside locked rows", typ, took)
		}
	}
}

// One locked row costs none of the others in its batch their leases, however short these are.
func TestLockedRowAndShortLeases(t *testing.T) {
	t.Parallel()
	pool := ledger(t)
	mux := worker.NewMux()
	var started atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.short.v1", func(context.Context) error { started.Add(1); <-gate; return nil })
	work(t, pool, mux, nil) // leases of two seconds
	addMany(t, pool, "test.short.v1", 40)
	pgtest.Await(t, "all handlers to start", func() bool { return started.Load() == 40 })
	tx, err := pgtest.Open(t, pool.Config().ConnString()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run WHERE id = (SELECT max(id::text)::uuid FROM workflow_run) FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	close(gate)
	expired := 0
	pgtest.Await(t, "the others to finish", func() bool {
		expired = max(expired, query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'leased' AND lease_until < now()
			AND id <> (SELECT max(id::text)::uuid FROM workflow_run)`))
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 39
	})
	if expired > 0 {
		t.Errorf("%d leases ran out while their outcomes waited for one locked row", expired)
	}
}
