package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverQueue is River.
type riverQueue struct{}

const (
	riverWorkers  = 2000
	riverConns    = 20
	riverCooldown = time.Millisecond
	riverPoll     = 20 * time.Millisecond

	riverStartWorkers = 100 // of its start page
)

func (riverQueue) name() string    { return "River" }
func (riverQueue) version() string { return moduleVersion("github.com/riverqueue/river") }
func (riverQueue) settings() string {
	return fmt.Sprintf("MaxWorkers %d, FetchCooldown %v, FetchPollInterval %v, pool of %d, InsertManyFast in bulk; default fetch: %v and %v; documented defaults: these, MaxWorkers %d, pgxpool's default pool",
		riverWorkers, riverCooldown, riverPoll, riverConns, river.FetchCooldownDefault, river.FetchPollIntervalDefault, riverStartWorkers)
}

func (riverQueue) install(ctx context.Context, db *database) error {
	m, err := rivermigrate.New(riverpgxv5.New(db.Pool), &rivermigrate.Config{Logger: quiet()})
	if err != nil {
		return err
	}
	_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

// load cannot give scheduled jobs a higher priority than the foreground, which has the highest. River keeps scheduled
// jobs in a state of their own.
func (riverQueue) load(ctx context.Context, db *database, n int, what kind) error {
	args, priority, state, at := `jsonb_build_object('n', g)`, 1, "available", "now()"
	switch what {
	case foreground:
	case low:
		args, priority = `'{"n": -1}'`, 4
	case future:
		args, state, at = `'{"n": -1}'`, "scheduled", "now() + interval '1 day'"
	default:
		return fmt.Errorf("River is not measured among %s rows", what)
	}
	return db.do(ctx, fmt.Sprintf(`
		INSERT INTO river_job (args, kind, max_attempts, priority, queue, state, scheduled_at, metadata, tags)
		SELECT %s, 'noop', 25, %d, 'default', '%s', %s, '{}', '{}' FROM generate_series(1, %d) g`, args, priority, state, at, n))
}

func (riverQueue) busy(ctx context.Context, db *database) (busy bool, err error) {
	err = db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM river_job
		WHERE state IN ('available', 'running', 'retryable') AND queue = 'default' AND priority = 1)`).Scan(&busy)
	return busy, err
}

func (riverQueue) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM river_job WHERE (args->>'n')::int > 0`).Scan(&n)
	return n, err
}

func (riverQueue) unsettled(ctx context.Context, db *database, n int) (left int, err error) {
	err = db.QueryRow(ctx, `SELECT $1::int - count(*) FROM river_job WHERE state = 'completed' AND (args->>'n')::int > 0`, n).Scan(&left)
	return left, err
}

func (riverQueue) process(t task) *exec.Cmd { return exec.Command(self(), "child", t.String()) }

// producer returns a client that only inserts. River throttles an inserter's notifications by its FetchCooldown.
func (riverQueue) producer(t task, pool *pgxpool.Pool) (producer, error) {
	config := &river.Config{Logger: quiet()}
	if !t.Default {
		config.FetchCooldown, config.FetchPollInterval = riverCooldown, riverPoll
	}
	c, err := river.NewClient(riverpgxv5.New(pool), config)
	return riverProducer{c}, err
}

type riverProducer struct{ client *river.Client[pgx.Tx] }

func (p riverProducer) one(ctx context.Context, n int) error {
	_, err := p.client.Insert(ctx, riverArgs{payload{n}}, nil)
	return err
}

func (p riverProducer) many(ctx context.Context, ns []int) error {
	all := make([]river.InsertManyParams, len(ns))
	for i, n := range ns {
		all[i] = river.InsertManyParams{Args: riverArgs{payload{n}}}
	}
	_, err := p.client.InsertManyFast(ctx, all)
	return err
}

type riverArgs struct{ payload }

func (riverArgs) Kind() string { return "noop" }

type riverHandler struct {
	river.WorkerDefaults[riverArgs]
	handle func(n int)
}

func (h *riverHandler) Work(_ context.Context, j *river.Job[riverArgs]) error {
	h.handle(j.Args.N)
	return nil
}

func (r riverQueue) carryOut(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	switch {
	case t.Do == "enqueue":
		config.MaxConns = 8
	case !t.Start:
		config.MaxConns, config.MinConns = riverConns, riverConns
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	if t.Do == "enqueue" {
		p, err := r.producer(t, pool)
		if err == nil && c.ready() {
			err = produce(ctx, t, p, c)
		}
		return err
	}
	return r.work(ctx, t, pool, c)
}

func (riverQueue) work(ctx context.Context, t task, pool *pgxpool.Pool, c *conversation) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverHandler{handle: c.handle})
	config := &river.Config{
		Logger: quiet(), Workers: workers, FetchCooldown: riverCooldown, FetchPollInterval: riverPoll,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: riverWorkers}},
	}
	if t.Default || t.Start {
		config.FetchCooldown, config.FetchPollInterval = 0, 0
	}
	if t.Start {
		config.Queues[river.QueueDefault] = river.QueueConfig{MaxWorkers: riverStartWorkers}
	}
	client, err := river.NewClient(riverpgxv5.New(pool), config)
	if err != nil || !c.ready() {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	<-c.ended
	return nil
}

// quiet drops what River logs while it works.
func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError + 4}))
}
