package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Heartbeats keep a run leased while its handler runs, well past the length of one lease. A quick run costs no
// heartbeat.
func TestHeartbeats(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate := make(chan bool, 1), make(chan bool)
	handle(mux, "test.long.v1", func(context.Context) error { started <- true; <-gate; return nil })
	handle(mux, "test.quick.v1", func(context.Context) error { return nil })
	var s seen
	work(t, pool, mux, func(c *worker.Config) { s.observe(c); brief(c) })
	addMany(t, pool, "test.quick.v1", 50)
	drained(t, pool)
	if n := s.get(&s.extended); n != 0 {
		t.Errorf("%d heartbeats for quick runs, want none", n)
	}
	id := enqueue(t, pool, "test.long.v1", empty{})
	<-started
	first := *read(t, pool, id).LeaseUntil
	pgtest.Await(t, "the lease to be extended beyond its first end", func() bool {
		return time.Now().After(first.Add(time.Second))
	})
	r := read(t, pool, id)
	close(gate)
	if done := finished(t, pool, id); r.Status != run.Leased || !r.LeaseUntil.After(first.Add(time.Second)) || done.Status != run.Succeeded || done.LeaseNo != 1 {
		t.Errorf("run was %s until %s, is %s with lease %d; want leased, later than %s, succeeded, 1", r.Status, r.LeaseUntil, done.Status, done.LeaseNo, first)
	}
}

// If the database refuses to extend the lease of one row, with any SQLSTATE, no other run that is extended with
// it loses its lease.
func TestHeartbeatPastRefusal(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"22003", "23514", "P0001", "54000", "55000", "XX001", "42P01", "ZZ999"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			mux := worker.NewMux()
			var started atomic.Int64
			gate := make(chan bool)
			handle(mux, "test.long.v1", func(ctx context.Context) error {
				started.Add(1)
				select {
				case <-gate:
				case <-ctx.Done():
				}
				return nil
			})
			work(t, pool, mux, nil)
			addMany(t, pool, "test.long.v1", 10)
			bad := add(t, pool, run.New{Type: "test.long.v1", Payload: empty{}, Tenant: "picky"})
			addMany(t, pool, "test.long.v1", 10)
			pgtest.Await(t, "all to run", func() bool { return started.Load() == 21 })
			execute(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '`+code+`'; END $$`)
			execute(t, pool, `CREATE TRIGGER picky BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.tenant_id = 'picky') EXECUTE FUNCTION refuse()`)
			time.Sleep(5 * time.Second) // more than two leases
			close(gate)
			pgtest.Await(t, "the others to be done", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND lease_no = 1`) == 20
			})
			if r := read(t, pool, bad); r.Status != run.Leased {
				t.Errorf("the one that is refused is %s", r.Status)
			}
		})
	}
}

// When a lease is taken away, by a person or by another worker, the handler's context ends with ErrLost, and
// what the handler returns is dropped.
func TestLostLease(t *testing.T) {
	t.Parallel()
	for name, result := range map[string]error{"error": errors.New("too late"), "success": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			mux := worker.NewMux()
			started := make(chan bool, 1)
			handle(mux, "test.taken.v1", func(ctx context.Context) error { started <- true; <-ctx.Done(); return result })
			var s seen
			// A lease this long is not given up for lack of an extension: a heartbeat finds out.
			w, _ := work(t, pool, mux, func(c *worker.Config) { s.observe(c); c.Lease, c.Heartbeat = time.Hour, 200*time.Millisecond })
			id := enqueue(t, pool, "test.taken.v1", empty{})
			<-started
			execute(t, pool, `UPDATE workflow_run SET status = 'pending', held_at = now() WHERE id = $1`, id)
			pgtest.Await(t, "the outcome to be dropped", func() bool { return w.InFlight() == 0 })
			refused := 1
			if result != nil {
				refused = 0
			}
			if r := read(t, pool, id); r.Status != run.Pending || r.LastError != nil || s.causes(run.ErrLost) != 1 || s.get(&s.refused) != refused {
				t.Errorf("run is %s, %d lost, %d refused; want pending, 1, %d", r.Status, s.causes(run.ErrLost), s.get(&s.refused), refused)
			}
		})
	}
}

// If a run is taken away and leased again by the same worker, only the new lease counts there: the old
// handler's context ends, and its result is not recorded.
func TestLeasedAgainBySameWorker(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate, over := make(chan bool, 2), make(chan bool), make(chan error, 1)
	worker.Handle(mux, "test.twice.v1", func(ctx context.Context, _ empty) (string, error) {
		started <- true
		if run.FromContext(ctx).LeaseNo == 2 {
			<-gate
			return "new", nil
		}
		<-ctx.Done()
		over <- context.Cause(ctx)
		return "old", nil
	})
	// There is no heartbeat, so only the new lease can end the old handler's context.
	work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.twice.v1", empty{})
	<-started
	execute(t, pool, `UPDATE workflow_run SET status = 'pending' WHERE id = $1`, id)
	<-started
	if cause := <-over; !errors.Is(cause, run.ErrLost) {
		t.Errorf("cause = %v, want %v", cause, run.ErrLost)
	}
	close(gate)
	if r := finished(t, pool, id); string(r.Result) != `"new"` {
		t.Errorf("result = %s, want that of the second lease", r.Result)
	}
}

// Deleting a row under its running handler does not harm the worker.
func TestRowDeleted(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate := make(chan bool, 1), make(chan bool)
	handle(mux, "test.deleted.v1", func(context.Context) error { started <- true; <-gate; return nil })
	handle(mux, "test.next.v1", func(context.Context) error { return nil })
	var s seen
	work(t, pool, mux, s.observe)
	id := enqueue(t, pool, "test.deleted.v1", empty{})
	<-started
	execute(t, pool, `ALTER TABLE workflow_run DISABLE TRIGGER workflow_run_delete_guard`)
	pgtest.ByHand(t, pool, `DELETE FROM workflow_run WHERE id = $1`, id)
	close(gate)
	pgtest.Await(t, "the outcome to be refused", func() bool { return s.get(&s.refused) == 1 })
	if r := finished(t, pool, enqueue(t, pool, "test.next.v1", empty{})); r.Status != run.Succeeded {
		t.Errorf("the next run is %s, want succeeded", r.Status)
	}
}

// If a person locks one leased row for three leases, no other run loses its lease, and no run that is settled
// together with that row is delayed.
func TestLockedRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var started atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.locked.v1", func(context.Context) error { started.Add(1); <-gate; return nil })
	locked := enqueue(t, pool, "test.locked.v1", empty{})
	addMany(t, pool, "test.locked.v1", 9)
	work(t, pool, mux, nil)
	pgtest.Await(t, "all handlers to start", func() bool { return started.Load() == 10 })
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run WHERE id = $1 FOR UPDATE`, locked); err != nil {
		t.Fatal(err)
	}
	from := time.Now()
	pgtest.Await(t, "three leases to pass", func() bool { return time.Since(from) > 6*time.Second })
	close(gate)
	pgtest.Await(t, "all others to succeed", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`) == 9
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := finished(t, pool, locked); r.Status != run.Succeeded {
		t.Errorf("the locked run is %s in the end, want succeeded", r.Status)
	}
}

// Handlers that hold all connections of the program's pool, and wait for more, cost the worker no lease.
func TestExhaustedPool(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	look := pgtest.Open(t, direct)
	pool := pgtest.Open(t, direct+"&pool_max_conns=2")
	mux := worker.NewMux()
	var started, holding atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.greedy.v1", func(ctx context.Context) error {
		started.Add(1)
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		holding.Add(1)
		<-gate
		return nil
	})
	addMany(t, look, "test.greedy.v1", 8)
	var s seen
	work(t, pool, mux, s.observe)
	pgtest.Await(t, "the pool to be used up", func() bool { return started.Load() == 8 && holding.Load() == 2 })
	from := time.Now()
	pgtest.Await(t, "a lease and a half to pass", func() bool { return time.Since(from) > 3*time.Second })
	close(gate)
	drained(t, look)
	if n := query[int](t, look, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`); n != 8 {
		t.Errorf("%d of 8 runs succeeded at once, %d contexts ended", n, s.causes(run.ErrLost))
	}
}
