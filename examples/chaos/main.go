// Command chaos is a worker whose handlers misbehave on purpose: they hang, panic, leak, kill the process, ignore
// cancels and return what cannot be stored. It is for testing the engine, and for seeing what it does when your
// handlers fail.
//
// Like cmd/worker, it is configured by the environment and advances processes. With KEEP=duration it removes
// everything that has been over for that long; cmd/worker allows no less than a minute. With EXECLOG=file, each start
// and end of a handler is a line of that file.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kelseyhightower/envconfig"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type settings struct {
	DatabaseURL   string        `envconfig:"DATABASE_URL" required:"true"`
	ExecLog       string        `envconfig:"EXECLOG"`
	Prefixes      []string      `envconfig:"WORKER_TYPE_PREFIXES" default:"chaos.,graph."`
	Name          string        `envconfig:"WORKER_ID" default:"chaos"`
	Concurrency   int           `envconfig:"WORKER_CONCURRENCY"`
	Lease         time.Duration `envconfig:"WORKER_LEASE"`
	Heartbeat     time.Duration `envconfig:"WORKER_HEARTBEAT"`
	PollInterval  time.Duration `envconfig:"WORKER_POLL_INTERVAL"`
	ShutdownGrace time.Duration `envconfig:"WORKER_SHUTDOWN_GRACE"`
	Timeout       time.Duration `envconfig:"WORKER_TIMEOUT"`
	BackoffBase   time.Duration `envconfig:"WORKER_BACKOFF_BASE"`
	BackoffCap    time.Duration `envconfig:"WORKER_BACKOFF_CAP"`
	LogFormat     string        `envconfig:"WORKER_LOG_FORMAT" default:"auto"`
	Keep          time.Duration `envconfig:"KEEP"` // what is over is removed at this age; 0: never
}

func main() {
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

func serve() error {
	var s settings
	if err := envconfig.Process("", &s); err != nil {
		return err
	}
	log, err := newLogger(s.LogFormat)
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(s.DatabaseURL)
	if err != nil {
		return err
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // a pooler may be in between
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return err
	}
	defer pool.Close()
	engine := graph.New(pool)
	mux, err := newMux(pool, engine, s.ExecLog)
	if err != nil {
		return err
	}
	if s.Keep > 0 {
		s.Prefixes = append(s.Prefixes, "default.") // so that nothing is left
	}
	w, err := worker.New(s.config(pool, mux, engine, log))
	if err != nil {
		return err
	}
	ctx := untilSignal(w)
	if err := createTable(ctx, pool, log, s.Keep); err != nil {
		return err
	}
	if s.Keep > 0 {
		go cleanup.New(pool, s.Prefixes, max(s.Keep/4, time.Second), cleanup.Keep{
			Finished: s.Keep, Failed: s.Keep, Deleted: s.Keep, Published: s.Keep, Processes: s.Keep, Logger: log}).Run(ctx)
	}
	return w.Run(ctx)
}

func newLogger(format string) (*slog.Logger, error) {
	switch format {
	case "auto", "text":
		return slog.New(slog.NewTextHandler(os.Stderr, nil)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, nil)), nil
	}
	return nil, fmt.Errorf("WORKER_LOG_FORMAT %q: use auto, text or json", format)
}

func (s settings) config(pool *pgxpool.Pool, mux *worker.Mux, engine *graph.Engine, log *slog.Logger) worker.Config {
	return worker.Config{
		Pool:          pool,
		Mux:           mux,
		Prefixes:      s.Prefixes,
		Processes:     engine,
		Name:          s.Name,
		Concurrency:   s.Concurrency,
		Lease:         s.Lease,
		Heartbeat:     s.Heartbeat,
		PollInterval:  s.PollInterval,
		ShutdownGrace: s.ShutdownGrace,
		Timeout:       s.Timeout,
		Backoff:       run.Backoff{Base: s.BackoffBase, Cap: s.BackoffCap},
		Retention:     worker.Retention{Off: true}, // or retention by KEEP
		Logger:        log,
	}
}

// untilSignal returns a context that ends with the first SIGTERM or interrupt. A second signal ends the handlers'
// grace period.
func untilSignal(w *worker.Worker) context.Context {
	ctx, stop := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		stop()
		<-signals
		w.StopNow()
	}()
	return ctx
}
