package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

func (o ours) carryOut(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 8 // for producers; a worker opens its own
	if t.Graph {
		config.MaxConns = 2 // as cmd/worker uses for the engine of processes
	}
	counts := &tally{}
	if t.Beats {
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
	case "publish":
		return oursEvents{}.publish(ctx, t, c)
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
	note := func(int) error { return nil }
	if t.Journal != "" {
		j, err := openJournal(t.Journal)
		if err != nil {
			return err
		}
		defer j.file.Close()
		note = j.note
	}
	for _, typ := range types {
		worker.Handle(mux, run.Task[payload](typ), func(_ context.Context, p payload) (struct{}, error) {
			err := note(p.N)
			c.handle(p.N)
			return struct{}{}, err
		})
	}
	for _, e := range t.Efforts {
		e.register(mux, c)
	}
	if t.Beats {
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
		go cleanup.New(pool, append(slices.Clone(prefixes), "default."), time.Minute, cleanup.Keep{Finished: time.Duration(t.Keep) * time.Second}).Run(ctx)
	}
	var processes worker.Processes
	if t.Graph {
		processes = graph.New(pool)
		worker.Handle(mux, clocked, func(_ context.Context, p payload) (stamp, error) {
			at := time.Now().UnixNano()
			c.handle(p.N)
			return stamp{at}, nil
		})
	}
	observe := counts.observer()
	if t.Counted != "" {
		observe.Settled = func(typ string, _ string) {
			if typ == t.Counted {
				c.handle(1)
			}
		}
	}
	if !c.ready() {
		return nil
	}
	go counts.tell(c)
	return worker.Run(ctx, worker.Config{
		Pool: pool, Mux: mux, Prefixes: prefixes,
		Concurrency:  t.Slots,
		Lease:        time.Duration(t.Lease) * time.Millisecond,
		PollInterval: time.Duration(t.Poll) * time.Millisecond,
		NoWakeUp:     t.NoWakeUp,
		Observe:      observe,
		Retention:    worker.Retention{Off: true}, // or retention by Keep
		Processes:    processes,
		Logger:       slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// A stamp is the time when a handler was called, in Unix nanoseconds.
type stamp struct {
	At int64 `json:"at"`
}

// floor leases and settles batches in bare loops: the minimum that any worker must do.
func (ours) floor(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	session.Prepare(config) // like the worker
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

func newPoller(pool *pgxpool.Pool, prefixes ...string) *leasing.Poller {
	return &leasing.Poller{DB: pool, Prefixes: prefixes, Worker: "bench",
		Terms: func(string) leasing.Terms { return leasing.Terms{Length: shipped.Lease, Room: -1} }}
}

func leaseAndSettle(ctx context.Context, p *leasing.Poller, pool *pgxpool.Pool, c *conversation) error {
	for ctx.Err() == nil {
		leases, wait, err := p.Acquire(ctx, shipped.Batch, 0)
		if err != nil {
			return err
		}
		outcomes := make([]settling.Outcome, len(leases))
		for i, l := range leases {
			outcomes[i] = settling.Outcome{ID: l.ID, Token: l.Token, Verdict: settling.Succeed, Result: []byte(`{}`)}
		}
		if _, err := settling.Settle(ctx, pool, "bench", outcomes); err != nil {
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
