// Command bench measures the engine as it ships: rates with CPU and WAL per run beside
// them, on a private PostgreSQL with full durability. Machines are noisy: where rates
// disagree, judge by CPU and WAL.
//
//	go run . [-runs 50000]
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
	"github.com/simple-workflow/simple-workflow/worker"
)

func main() {
	runs := flag.Int("runs", 50_000, "runs to enqueue and to drain")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := bench(ctx, *runs); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// settings of the server; durability is its default.
var settings = map[string]string{
	"shared_buffers": "512MB", "work_mem": "16MB", "maintenance_work_mem": "128MB",
	"max_wal_size": "4GB", "checkpoint_timeout": "15min", "jit": "off", "autovacuum_naptime": "10s",
}

func bench(ctx context.Context, runs int) error {
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Settings: settings})
	if err != nil {
		return err
	}
	defer server.Stop()
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		return err
	}
	config.MaxConns = 16
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return sql.Up(ctx, c.Conn()) }); err != nil {
		return err
	}
	m := &meter{pool: pool, server: server}
	fmt.Printf("%-28s %10s %12s %12s %12s\n", "", "runs/s", "server µs", "client µs", "WAL bytes")
	for _, b := range []struct {
		name string
		n    int
		do   func(context.Context, *pgxpool.Pool, int) error
		prep func(context.Context, *pgxpool.Pool, int) error
	}{
		{"enqueue, 1000 a statement", runs, enqueueBulk, empty},
		{"enqueue, single, 8 sessions", runs / 10, enqueueSingle, empty},
		{"drain, one worker", runs, drain, load},
		{"lease and settle, plain loop", runs, floor, load},
		{"heartbeat, 10000 leases", 10_000, heartbeat, leaseAll},
	} {
		if err := b.prep(ctx, pool, b.n); err != nil {
			return fmt.Errorf("prepare %s: %w", b.name, err)
		}
		if err := m.measure(ctx, b.name, b.n, func() error { return b.do(ctx, pool, b.n) }); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
	}
	return pickUp(ctx, pool)
}

const typ = "bench.noop.v1"

func exec(ctx context.Context, pool *pgxpool.Pool, queries ...string) error {
	for _, q := range queries {
		if _, err := pool.Exec(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

func empty(ctx context.Context, pool *pgxpool.Pool, _ int) error {
	return exec(ctx, pool, `TRUNCATE workflow_run, workflow_event`, `CHECKPOINT`)
}

func load(ctx context.Context, pool *pgxpool.Pool, n int) error {
	return exec(ctx, pool, `TRUNCATE workflow_run, workflow_event`, fmt.Sprintf(`
		INSERT INTO workflow_run (type, payload) SELECT '%s', jsonb_build_object('n', g) FROM generate_series(1, %d) g`, typ, n),
		`VACUUM ANALYZE workflow_run`, `CHECKPOINT`)
}

func leaseAll(ctx context.Context, pool *pgxpool.Pool, n int) error {
	if err := load(ctx, pool, n); err != nil {
		return err
	}
	_, err := newPoller(pool).takeAll(ctx, n)
	return err
}

func enqueueBulk(ctx context.Context, pool *pgxpool.Pool, n int) error {
	news := make([]run.New, n)
	for i := range news {
		news[i] = run.New{Type: typ, Payload: map[string]int{"n": i}}
	}
	_, err := run.EnqueueMany(ctx, pool, news)
	return err
}

func enqueueSingle(ctx context.Context, pool *pgxpool.Pool, n int) error {
	var all sync.WaitGroup
	errs := make(chan error, 8)
	for range 8 {
		all.Go(func() {
			for i := range n / 8 {
				if _, err := run.Enqueue(ctx, pool, run.New{Type: typ, Payload: map[string]int{"n": i}}); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	return <-errs
}

// work runs a worker until done reports true.
func work(ctx context.Context, pool *pgxpool.Pool, handler func(context.Context, struct{}) (struct{}, error), done func() bool) error {
	mux := worker.NewMux()
	worker.Handle(mux, typ, handler)
	working, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(working, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"bench."}, Concurrency: 2000,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	}()
	for !done() && ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
	}
	stop()
	return <-ended
}

func drain(ctx context.Context, pool *pgxpool.Pool, n int) error {
	var handled atomic.Int64
	return work(ctx, pool, func(context.Context, struct{}) (struct{}, error) { handled.Add(1); return struct{}{}, nil }, func() bool {
		if handled.Load() < int64(n) {
			return false
		}
		var left bool
		err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM workflow_run WHERE status = 'leased')`).Scan(&left)
		return err == nil && !left
	})
}

type poller struct{ lease.Poller }

func newPoller(pool *pgxpool.Pool) *poller {
	return &poller{lease.Poller{DB: pool, Prefixes: []string{"bench."}, Worker: "bench",
		Terms: func(string) lease.Terms { return lease.Terms{Length: time.Minute, Room: -1} }}}
}

func (p *poller) takeAll(ctx context.Context, n int) (all []lease.Lease, err error) {
	for len(all) < n {
		some, _, err := p.Acquire(ctx, 500, 0)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// floor is a bare loop of lease and settle, without a worker.
func floor(ctx context.Context, pool *pgxpool.Pool, n int) error {
	p := newPoller(pool)
	for done := 0; done < n; {
		leases, _, err := p.Acquire(ctx, 500, 0)
		if err != nil {
			return err
		}
		outcomes := make([]run.Outcome, len(leases))
		for i, l := range leases {
			outcomes[i] = run.Outcome{ID: l.ID, Token: l.Token, Verdict: run.Succeed, Result: []byte(`{}`)}
		}
		if _, err := run.Settle(ctx, pool, "bench", outcomes); err != nil {
			return err
		}
		done += len(leases)
	}
	return nil
}

func heartbeat(ctx context.Context, pool *pgxpool.Pool, _ int) error {
	rows, _ := pool.Query(ctx, `SELECT id, lease_token, interval '1 minute' FROM workflow_run WHERE status = 'leased'`)
	held, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lease.Held])
	if err != nil {
		return err
	}
	kept, _, err := lease.Extend(ctx, pool, held)
	if err == nil && len(kept) != len(held) {
		err = fmt.Errorf("%d of %d leases extended", len(kept), len(held))
	}
	return err
}

// pickUp measures the time from an insert's commit to its handler's start on an idle system.
func pickUp(ctx context.Context, pool *pgxpool.Pool) error {
	if err := empty(ctx, pool, 0); err != nil {
		return err
	}
	started := make(chan uuid.UUID, 1)
	var delays durations
	err := work(ctx, pool, func(ctx context.Context, _ struct{}) (struct{}, error) {
		started <- run.FromContext(ctx).ID
		return struct{}{}, nil
	}, func() bool {
		for i := range 220 {
			time.Sleep(10 * time.Millisecond)
			if _, err := run.Enqueue(ctx, pool, run.New{Type: typ}); err != nil {
				return true
			}
			committed := time.Now()
			<-started
			if i >= 20 {
				delays = append(delays, time.Since(committed))
			}
		}
		return true
	})
	fmt.Printf("%-28s p50 %v, p99 %v (commit to handler, with wake-up)\n", "pick-up while idle", delays.at(0.50), delays.at(0.99))
	return err
}
