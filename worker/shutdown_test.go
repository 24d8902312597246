package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// During the grace period handlers continue, their outcomes are recorded, and nothing new is leased.
func TestGrace(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate := make(chan bool, 1), make(chan bool)
	handle(mux, "test.grace.v1", func(ctx context.Context) error { started <- true; <-gate; return ctx.Err() })
	w, stop := work(t, pool, mux, func(c *worker.Config) { c.ShutdownGrace, c.Lease = time.Minute, time.Minute })
	id := enqueue(t, pool, "test.grace.v1", empty{})
	<-started
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	pgtest.Await(t, "the worker to look no more", func() bool {
		at := w.LastPoll()
		return time.Since(at) > 500*time.Millisecond
	})
	late := enqueue(t, pool, "test.grace.v1", empty{})
	close(gate)
	if err := <-ended; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if r := read(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("run is %s, attempt %d; want succeeded, 1", r.Status, r.Attempt)
	}
	if r := read(t, pool, late); r.Status != run.Pending || r.LeaseNo != 0 {
		t.Errorf("late run is %s, lease %d; want pending, 0", r.Status, r.LeaseNo)
	}
}

// StopNow ends a long grace period: contexts end with ErrShutdown, runs are released with no attempt charged,
// and another worker starts them at once as attempt 1.
func TestStopNow(t *testing.T) {
	t.Parallel()
	const runs = 8
	pool := pgtest.New(t)
	mux, next := worker.NewMux(), worker.NewMux()
	var started, shut atomic.Int32
	handle(mux, "test.stop.v1", func(ctx context.Context) error {
		started.Add(1)
		<-ctx.Done()
		if errors.Is(context.Cause(ctx), run.ErrShutdown) {
			shut.Add(1)
		}
		return ctx.Err()
	})
	handle(next, "test.stop.v1", func(context.Context) error { return nil })
	addMany(t, pool, "test.stop.v1", runs)
	w, stop := work(t, pool, mux, func(c *worker.Config) { c.Lease, c.ShutdownGrace = time.Minute, time.Hour })
	pgtest.Await(t, "all handlers to start", func() bool { return started.Load() == runs })
	w.StopNow()
	w.StopNow()
	if err := stop(); err != nil || shut.Load() != runs {
		t.Errorf("Run = %v with %d of %d contexts ended by shutdown", err, shut.Load(), runs)
	}
	released := time.Now()
	work(t, pool, next, nil)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1 AND lease_no = 2`); n != runs {
		t.Errorf("%d of %d runs succeeded as attempt 1 with lease 2", n, runs)
	}
	if late := query[time.Time](t, pool, `SELECT max(started_at) FROM workflow_run`).Sub(released); late > 10*time.Second {
		t.Errorf("leased again after %s, want long before they expire", late)
	}
}

// A handler that ignores its context does not delay shutdown: its run is released with no attempt charged, and
// what it returns later changes nothing.
func TestDeafToShutdown(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate, returned := make(chan bool, 1), make(chan bool), make(chan bool)
	handle(mux, "test.deaf.v1", func(context.Context) error { defer close(returned); started <- true; <-gate; return nil })
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.ShutdownGrace = -1 })
	id := enqueue(t, pool, "test.deaf.v1", empty{})
	<-started
	if err := stop(); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	before := read(t, pool, id)
	close(gate)
	<-returned
	if r := read(t, pool, id); before.Status != run.Pending || before.Attempt != 0 || r.Status != run.Pending || r.Result != nil {
		t.Errorf("run was %s, attempt %d, is %s; want pending, 0, pending", before.Status, before.Attempt, r.Status)
	}
}

// Shutdown does not interrupt effects: the context of their handler lasts until the outcome is recorded.
func TestShutdownDuringEffects(t *testing.T) {
	t.Parallel()
	pool := ledger(t)
	mux := worker.NewMux()
	started, gate := make(chan bool, 1), make(chan bool)
	effects(mux, "test.effect.v1", func(ctx context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(tx pgx.Tx) error {
			started <- true
			select {
			case <-gate:
			case <-ctx.Done():
			}
			return book(ctx, 1)(tx)
		}}
	})
	w, stop := work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.effect.v1", empty{})
	<-started
	w.StopNow()
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	stopping := time.Now()
	pgtest.Await(t, "handlers' contexts to have ended", func() bool { return time.Since(stopping) > 500*time.Millisecond })
	close(gate)
	if err := <-ended; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if r := read(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || booked(t, pool) != 1 {
		t.Errorf("run is %s, attempt %d, %d entries; want succeeded, 1, 1", r.Status, r.Attempt, booked(t, pool))
	}
}

// If an effect hangs while the worker stops, its run is released with no attempt charged and due at once, and
// not left until its lease expires.
func TestHangingEffectAtShutdown(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	entered := make(chan bool, 1)
	hang := make(chan bool)
	handle(mux, "test.hang.v1", func(ctx context.Context) error {
		return worker.InSettle(ctx, func(pgx.Tx) error { entered <- true; <-hang; return errors.New("enough") })
	})
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.ShutdownGrace = -1; c.Lease = time.Minute })
	id := enqueue(t, pool, "test.hang.v1", empty{})
	<-entered
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	defer close(hang) // long after the worker has stopped
	if err := <-ended; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if r := read(t, pool, id); r.Status != run.Pending || r.Attempt != 0 {
		t.Errorf("run is %s, attempt %d; want pending, 0", r.Status, r.Attempt)
	}
}
