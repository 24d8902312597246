package worker_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A worker that gets no answers gives up its leases before others can have them: the handler's context ends
// with ErrLost while the lease still lasts. When the network is back, the run is executed again.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := pgtest.Open(t, direct)
	p, through := newProxy(t, direct)
	mux := worker.NewMux()
	started, ended := make(chan bool, 1), make(chan time.Time, 1)
	handle(mux, "test.cut_off.v1", func(ctx context.Context) error {
		if run.FromContext(ctx).Attempt > 1 {
			return nil
		}
		started <- true
		<-ctx.Done()
		ended <- time.Now()
		if !errors.Is(context.Cause(ctx), run.ErrLost) {
			t.Errorf("cause = %v, want %v", context.Cause(ctx), run.ErrLost)
		}
		return ctx.Err()
	})
	var s seen
	work(t, pgtest.Open(t, through), mux, func(c *worker.Config) { s.observe(c); brief(c) })
	id := enqueue(t, pool, "test.cut_off.v1", empty{})
	<-started
	pgtest.Await(t, "a heartbeat", func() bool { return s.get(&s.extended) > 0 })
	p.stall()
	at := <-ended
	if until := *read(t, pool, id).LeaseUntil; !at.Before(until) {
		t.Errorf("context ended %s after the lease", at.Sub(until))
	}
	p.resume()
	r := read(t, pool, id)
	pgtest.Await(t, "the run to be repeated", func() bool { r = read(t, pool, id); return r.Status.Finished() })
	if r.Status != run.Succeeded || r.Attempt != 2 {
		t.Errorf("run is %s, attempt %d; want succeeded, 2", r.Status, r.Attempt)
	}
}

// If one connection goes silent, even that of heartbeats, no lease is lost while other connections work.
func TestOneSilentConnection(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := pgtest.Open(t, direct)
	p, through := newProxy(t, direct)
	mux := worker.NewMux()
	handle(mux, "test.long.v1", func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(16 * time.Second):
			return nil
		}
	})
	p.silence("workflow_extend_v1")
	work(t, pgtest.Open(t, through), mux, func(c *worker.Config) { c.Lease = 9 * time.Second })
	id := enqueue(t, pool, "test.long.v1", empty{})
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("the run is %s after %d attempts, want succeeded after 1", r.Status, r.Attempt)
	}
}

// If the network fails in the middle of an effect, for so long that the server ends the transaction, that does
// not count as the effect's failure.
func TestSilentNetworkInAnEffect(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	pool := pgtest.Open(t, direct)
	execute(t, pool, `CREATE TABLE ledger (run_id uuid)`)
	p, through := newProxy(t, direct)
	mux := worker.NewMux()
	inside, silent := make(chan bool, 1), make(chan bool)
	calls := atomic.Int32{}
	handle(mux, "test.effect.v1", func(ctx context.Context) error {
		return worker.InSettle(ctx, func(tx pgx.Tx) error {
			if calls.Add(1) == 1 {
				inside <- true
				<-silent
			}
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1)`, run.FromContext(ctx).ID)
			return err
		})
	})
	work(t, pgtest.Open(t, through), mux, nil)
	id := enqueue(t, pool, "test.effect.v1", empty{})
	<-inside
	p.stall()
	close(silent)
	time.Sleep(4 * time.Second) // two leases, so that the server has ended the transaction
	p.resume()
	if r := finished(t, pool, id); r.Status != run.Succeeded {
		t.Errorf("run is %s", r.Status)
	}
	if got := query[int](t, pool, `SELECT count(*) FROM workflow_history WHERE event_type IN ('failed', 'retried')`); got != 0 {
		t.Errorf("%d failures are charged to the run", got)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM ledger`); n != 1 {
		t.Errorf("%d entries, want one", n)
	}
}

// A server that is down for two leases costs almost no attempts: handlers continue, their workers extend the
// leases as soon as it is back, and each effect is committed once.
func TestServerRestart(t *testing.T) {
	t.Parallel()
	const runs, length = 30, 5 * time.Second
	server := ownServer(t, nil)
	pool := pgtest.Open(t, server.URL("postgres"))
	execute(t, pool, `CREATE TABLE ledger (run_id uuid)`)
	mux := worker.NewMux()
	var started, cut atomic.Int32
	gate := make(chan bool)
	handle(mux, "test.sleep.v1", func(ctx context.Context) error {
		started.Add(1)
		select {
		case <-gate:
		case <-ctx.Done():
			cut.Add(1)
			return ctx.Err()
		}
		return worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1)`, run.FromContext(ctx).ID)
			return err
		})
	})
	addMany(t, pool, "test.sleep.v1", runs)
	for range 2 {
		work(t, pool, mux, func(c *worker.Config) { c.Lease, c.Concurrency = length, runs/2 })
	}
	pgtest.Await(t, "all handlers to start", func() bool { return started.Load() == runs })
	server.StopMode(pgserver.Fast)
	down := time.Now()
	pgtest.Await(t, "two leases to pass", func() bool { return time.Since(down) > 2*length })
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	pgtest.Await(t, "another two leases to pass", func() bool { return time.Since(back) > 2*length })
	close(gate)
	pool.Reset()
	drained(t, pool)
	again := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`)
	good := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`)
	entries, distinct := query[int](t, pool, `SELECT count(*) FROM ledger`), query[int](t, pool, `SELECT count(DISTINCT run_id) FROM ledger`)
	if again > runs/10 || good != runs || entries != runs || distinct != runs {
		t.Errorf("%d leased again, %d contexts ended, %d succeeded, %d entries of %d runs; want at most %d leased again, and %d each",
			again, cut.Load(), good, entries, distinct, runs/10, runs)
	}
}

// ownServer starts a server that only t uses, with our schema in its one database.
func ownServer(t *testing.T, settings map[string]string) *pgserver.Server {
	t.Helper()
	server := pgtest.Server(t, pgserver.Options{Settings: settings})
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(sql.Up(t.Context(), conn), conn.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	return server
}

// A batch that needs more locks than the server has room for is settled in parts.
func TestTooManyLocks(t *testing.T) {
	t.Parallel()
	server := ownServer(t, map[string]string{"max_locks_per_transaction": "10", "max_connections": "20"})
	pool := pgtest.Open(t, server.URL("postgres"))
	const runs, events = 200, 100
	mux := worker.NewMux()
	var together sync.WaitGroup // so that they are one batch
	together.Add(runs)
	handle(mux, "test.tell.v1", func(ctx context.Context) error {
		for range events {
			if err := worker.Emit(ctx, outbox.Event{Aggregate: uuid.New(), Type: "test.told"}); err != nil {
				return err
			}
		}
		together.Done()
		together.Wait()
		return nil
	})
	addMany(t, pool, "test.tell.v1", runs)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = runs })
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM outbox_event`); n != runs*events {
		t.Errorf("%d events, want %d", n, runs*events)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`); n != runs {
		t.Errorf("%d runs succeeded at once, want %d", n, runs)
	}
}
