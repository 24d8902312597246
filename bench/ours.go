package main

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
)

// ours is the engine of this repository, used through its public packages.
type ours struct{}

const (
	noop    = "bench.noop.v1"
	asleep  = "bench.sleep.v1" // its handler returns when it is released
	clocked = "bench.clock.v1" // its result is the time of its handler's call
)

// A payload is what every run of the bench has.
type payload struct {
	N int `json:"n"`
}

func (ours) name() string    { return "simple-workflow" }
func (ours) version() string { return commit() }
func (ours) settings() string {
	return fmt.Sprintf("as shipped: Concurrency %d, Batch %d, history and wake-up on", shipped.Concurrency, shipped.Batch)
}

func (ours) install(ctx context.Context, db *database) error {
	return db.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return sql.Up(ctx, c.Conn()) })
}

// load stores foreground runs as any program would, and others without triggers: neither their history nor the checks
// of their insert affect the measurement.
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
			"'leased', 1, 1, now() - random() * interval '1 minute', now() + interval '1 hour', now() + interval '1 hour', gen_random_uuid(), 'elsewhere'")
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

// busy looks at leased runs from the youngest on, because those of live workers are there.
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
	return oursProducer{pool: pool, typ: noop}, nil
}

type oursProducer struct {
	pool     *pgxpool.Pool
	typ      string
	priority int
}

func (p oursProducer) one(ctx context.Context, n int) error {
	_, err := run.Enqueue(ctx, p.pool, run.New{Type: p.typ, Payload: payload{n}, Priority: p.priority})
	return err
}

func (p oursProducer) many(ctx context.Context, ns []int) error {
	news := make([]run.New, len(ns))
	for i, n := range ns {
		news[i] = run.New{Type: p.typ, Payload: payload{n}, Priority: p.priority}
	}
	_, err := run.EnqueueMany(ctx, p.pool, news)
	return err
}

// bind returns the address of a login whose role is bound to the bench's prefix, with row-level security.
func bind(ctx context.Context, db *database) (string, error) {
	err := db.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		if err := sql.Roles(ctx, c.Conn(), "bench"); err != nil {
			return err
		}
		if err := sql.BindWorker(ctx, c.Conn(), "bench", "bench_bound", []string{"bench."}); err != nil {
			return err
		}
		_, err := c.Exec(ctx, `ALTER ROLE bench_bound LOGIN PASSWORD 'bench'`)
		return err
	})
	if err != nil {
		return "", err
	}
	u, err := url.Parse(db.url)
	if err != nil {
		return "", err
	}
	u.User = url.UserPassword("bench_bound", "bench")
	return u.String(), nil
}
