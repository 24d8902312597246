package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
	"github.com/simple-workflow/simple-workflow/worker"
)

// ours is the engine of this repository, used through its public packages.
type ours struct{}

const (
	noop   = "bench.noop.v1"
	asleep = "bench.sleep.v1" // its handler returns when it is released

	// slots is the one setting that differs from the defaults: no-op handlers need no time
	// of their own, so that the number of runs in flight must cover what is being settled.
	slots = 2000
)

// A payload is what every run of the bench carries.
type payload struct {
	N int `json:"n"`
}

func (ours) name() string    { return "simple-workflow" }
func (ours) version() string { return commit() }
func (ours) settings() string {
	return fmt.Sprintf("Concurrency %d, all else as shipped: Batch %d, history and wake-up on", slots, worker.DefaultBatch)
}

func (ours) install(ctx context.Context, db *database) error {
	return db.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return sql.Up(ctx, c.Conn()) })
}

// load stores foreground runs as anyone would, and others without triggers: neither their
// history nor the checks of their insert change what is measured.
func (ours) load(ctx context.Context, db *database, n int, what kind) error {
	columns, values := "type, payload", fmt.Sprintf(`'%s', '{"n": -1}'`, noop)
	more := func(names, expressions string) { columns, values = columns+", "+names, values+", "+expressions }
	switch what {
	case foreground:
		values = fmt.Sprintf(`'%s', jsonb_build_object('n', g)`, noop)
	case low:
		more("priority", "-50")
	case future:
		more("priority, run_at", "50, now() + interval '1 day'")
	case foreign:
		values = `'elsewhere.noop.v1', '{"n": -1}'`
	case foreign50:
		values = `'elsewhere.noop_' || g % 50 || '.v1', '{"n": -1}'`
	case finished:
		more("status, result, attempt, lease_no, started_at, finished_at, settled_token",
			"'succeeded', '{}', 1, 1, now() - interval '1 day', now() - interval '1 day', gen_random_uuid()")
	case leased:
		more("status, attempt, lease_no, started_at, lease_until, deadline_at, lease_token, leased_by",
			"'leased', 1, 1, now() - interval '1 minute', now() + interval '1 hour', now() + interval '1 hour', gen_random_uuid(), 'elsewhere'")
	}
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if what != foreground {
			if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, fmt.Sprintf(`INSERT INTO workflow_run (%s) SELECT %s FROM generate_series(1, %d) g`, columns, values, n))
		return err
	})
}

// busy looks at leased runs from the youngest on, where the living ones are.
func (ours) busy(ctx context.Context, db *database) (busy bool, err error) {
	err = db.QueryRow(ctx, `
		SELECT coalesce((SELECT true FROM workflow_run
			WHERE status = 'leased' AND leased_by <> 'elsewhere' AND started_at > now() - interval '1 hour' AND (payload->>'n')::int > 0
			ORDER BY started_at DESC LIMIT 1), false)`).Scan(&busy)
	return busy, err
}

func (ours) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM workflow_run WHERE (payload->>'n')::int > 0`).Scan(&n)
	return n, err
}

func (ours) unsettled(ctx context.Context, db *database, n int) (left int, err error) {
	err = db.QueryRow(ctx, `SELECT $1::int - count(*) FROM workflow_run WHERE status = 'succeeded' AND (payload->>'n')::int > 0`, n).Scan(&left)
	return left, err
}

func (ours) process(t task) *exec.Cmd { return exec.Command(self(), "child", t.String()) }

func (ours) producer(_ task, pool *pgxpool.Pool) (producer, error) {
	return oursProducer{pool, noop}, nil
}

type oursProducer struct {
	pool *pgxpool.Pool
	typ  string
}

func (p oursProducer) one(ctx context.Context, n int) error {
	_, err := run.Enqueue(ctx, p.pool, run.New{Type: p.typ, Payload: payload{n}})
	return err
}

func (p oursProducer) many(ctx context.Context, ns []int) error {
	news := make([]run.New, len(ns))
	for i, n := range ns {
		news[i] = run.New{Type: p.typ, Payload: payload{n}}
	}
	_, err := run.EnqueueMany(ctx, p.pool, news)
	return err
}

func (o ours) carryOut(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 8 // for producers; a worker opens its own
	counts := &tally{}
	if t.Lease > 0 { // the heartbeat scenario
		config.ConnConfig.Tracer = counts
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	switch t.Do {
	case "work":
		return o.work(ctx, t, pool, c, counts)
	case "enqueue":
		p, err := o.producer(t, pool)
		if err == nil && c.ready() {
			err = produce(ctx, t, p, c)
		}
		return err
	case "floor":
		return o.floor(ctx, t, c)
	}
	return fmt.Errorf("unknown task %q", t.Do)
}

// work is one worker process.
func (ours) work(ctx context.Context, t task, pool *pgxpool.Pool, c *conversation, counts *tally) error {
	mux := worker.NewMux()
	types, prefixes := t.Types, t.Prefixes
	if len(types) == 0 {
		types, prefixes = []string{noop}, []string{"bench."}
	}
	for _, typ := range types {
		worker.Handle(mux, typ, func(_ context.Context, p payload) (struct{}, error) {
			c.handle(p.N)
			return struct{}{}, nil
		})
	}
	if t.Lease > 0 {
		worker.Handle(mux, asleep, func(ctx context.Context, p payload) (struct{}, error) {
			c.handle(p.N)
			select {
			case <-c.released:
				return struct{}{}, nil
			case <-ctx.Done():
				return struct{}{}, context.Cause(ctx)
			}
		})
	}
	if t.Keep > 0 {
		worker.Handle(mux, cleanup.Type, cleanup.Handler(pool, cleanup.Keep{Finished: time.Duration(t.Keep) * time.Second}))
		prefixes = append(prefixes, "default.")
		go cleanup.Schedule(ctx, pool, time.Minute, slog.Default())
	}
	if !c.ready() {
		return nil
	}
	go counts.tell(c)
	return worker.Run(ctx, worker.Config{
		Pool: pool, Mux: mux, Prefixes: prefixes,
		Concurrency:  concurrency(t),
		Lease:        time.Duration(t.Lease) * time.Millisecond,
		PollInterval: time.Duration(t.Poll) * time.Millisecond,
		NoWakeUp:     t.NoWakeUp,
		Observe:      counts.observer(),
		Logger:       slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// concurrency is 0, the default, for negative slots.
func concurrency(t task) int { return max(cmp.Or(t.Slots, slots), 0) }

// floor leases and settles batches in bare loops: the least that any worker must do.
func (ours) floor(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // as the worker has it
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil || !c.ready() {
		return err
	}
	errs := make(chan error, t.Loops)
	for range t.Loops {
		go func() { errs <- leaseAndSettle(ctx, newPoller(pool, "bench."), pool, c) }()
	}
	for range t.Loops {
		err = errors.Join(err, <-errs)
	}
	return err
}

func newPoller(pool *pgxpool.Pool, prefixes ...string) *lease.Poller {
	return &lease.Poller{DB: pool, Prefixes: prefixes, Worker: "bench",
		Terms: func(string) lease.Terms { return lease.Terms{Length: worker.DefaultLease, Room: -1} }}
}

func leaseAndSettle(ctx context.Context, p *lease.Poller, pool *pgxpool.Pool, c *conversation) error {
	for ctx.Err() == nil {
		leases, wait, err := p.Acquire(ctx, worker.DefaultBatch, 0)
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
		c.all.Add(int64(len(leases)))
		c.foreground.Add(int64(len(leases)))
		if len(leases) == 0 {
			time.Sleep(min(wait, time.Millisecond))
		}
	}
	return nil
}
