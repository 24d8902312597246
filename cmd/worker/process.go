package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/cmd/internal/build"
	"github.com/simple-workflow/simple-workflow/cmd/internal/database"
	"github.com/simple-workflow/simple-workflow/cmd/internal/probe"
	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// noop is a type for trying things out.
const noop = "default.noop.v1"

// builtIn are the types that every worker can execute, if its prefixes cover them.
var builtIn = []string{noop, cleanup.Type}

// A process is everything the program consists of.
type process struct {
	settings *settings
	log      *slog.Logger
	pool     *pgxpool.Pool // for what is not the worker's
	worker   *worker.Worker
	health   *probe.Health
	probe    *probe.Server
	listener net.Listener // nil: no HTTP
}

// newProcess puts the parts together. It listens for HTTP, but does not connect to the
// database yet.
func newProcess(s *settings, log *slog.Logger) (p *process, problems []string) {
	p = &process{settings: s, log: log}
	bad := func(err error) (*process, []string) { return nil, []string{err.Error()} }
	var err error
	if p.pool, err = pgxpool.NewWithConfig(context.Background(), s.pool); err != nil {
		return bad(err)
	}
	engine := graph.New(p.pool)
	mux, err := p.mux(engine)
	if err != nil {
		return nil, strings.Split(err.Error(), "\n")
	}
	metrics := newMetrics(s.patterns())
	if p.worker, err = worker.New(p.config(mux, metrics, engine)); err != nil {
		return nil, strings.Split(err.Error(), "\n")
	}
	p.health = probe.NewHealth(s.ReadyWithin.Value, p.worker.LastWrite)
	p.health.Watch("look for work", max(s.ReadyWithin.Value, 3*s.PollInterval.Value), p.lastLook)
	metrics.watch(p.worker)
	p.probe = &probe.Server{Ready: p.health.Ready, Metrics: metrics.registry, Token: s.HTTPToken.Value, Log: log}
	if address := s.HTTPAddr.Value; address != "" {
		if p.listener, err = net.Listen("tcp", address); err != nil {
			return bad(fmt.Errorf("WORKER_HTTP_ADDR=%q: %w; choose another address, or stop what uses it", address, err))
		}
	}
	return p, nil
}

func (p *process) mux(engine *graph.Engine) (*worker.Mux, error) {
	s, mux := p.settings, worker.NewMux()
	if s.Processes.Value {
		for typ, handler := range engine.Handlers() {
			mux.HandleRaw(typ, handler)
		}
	}
	if s.covers(noop) {
		worker.Handle(mux, noop, func(context.Context, json.RawMessage) (struct{}, error) { return struct{}{}, nil })
	}
	if s.covers(cleanup.Type) {
		worker.Handle(mux, cleanup.Type, cleanup.Handler(p.pool, cleanup.Keep{
			Finished:  s.KeepFinished.Value,
			Failed:    s.KeepFailed.Value,
			Deleted:   s.KeepDeleted.Value,
			Published: s.KeepPublished.Value,
			Processes: s.KeepProcesses.Value,
		}))
	}
	return mux, handlers.Register(mux, s.bindings, p.log)
}

func (p *process) config(mux *worker.Mux, m *metrics, engine *graph.Engine) worker.Config {
	s := p.settings
	c := worker.Config{
		Pool:             p.pool,
		Mux:              mux,
		Prefixes:         s.prefixes,
		Name:             s.ID.Value,
		Version:          build.Name(),
		Concurrency:      s.Concurrency.Value,
		Lease:            s.Lease.Value,
		Heartbeat:        s.Heartbeat.Value,
		Timeout:          s.Timeout.Value, // env.None is worker.NoTimeout
		PollInterval:     s.PollInterval.Value,
		ShutdownGrace:    s.ShutdownGrace.Value,
		UnknownTypeGrace: s.UnknownTypeGrace.Value,
		Backoff:          run.Backoff{Base: s.BackoffBase.Value, Cap: s.BackoffCap.Value},
		MaxPostponed:     s.MaxPostponed.Value,
		Batch:            s.Batch.Value,
		NoWakeUp:         !s.Wakeup.Value,
		Observe:          m.observer(),
		Logger:           p.log,
	}
	if s.Processes.Value { // whoever settles a step moves its process on
		c.Steps, c.Hooks = true, []worker.Hook{{Concerns: engine.Concerns, Begin: engine.Begin, Tend: engine.Tend}}
		if !s.covers(graph.Prefix) {
			c.Prefixes = append(slices.Clone(c.Prefixes), graph.Prefix)
		}
	}
	if c.ShutdownGrace == 0 {
		c.ShutdownGrace = -1 // none; 0 is the default
	}
	return c
}

// lastLook returns when the worker last looked for work. One all of whose slots are taken need not.
func (p *process) lastLook() time.Time {
	if p.worker.InFlight() >= p.settings.Concurrency.Value {
		return time.Now()
	}
	return p.worker.LastPoll()
}

// run works until a signal ends it, and returns the exit code.
func (p *process) run() int {
	defer p.close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	p.obeySignals(stop)

	var background sync.WaitGroup
	defer background.Wait()
	serving, stopServing := context.WithCancel(context.Background())
	defer stopServing()
	if p.listener != nil {
		background.Go(func() { p.serve(serving) })
	}

	if code, usable := p.await(ctx); !usable {
		return code
	}
	if every := p.settings.CleanupEvery.Value; every > 0 && p.settings.covers(cleanup.Type) {
		background.Go(func() { cleanup.Schedule(ctx, p.pool, every, p.log) })
	}
	return p.work(ctx, stop)
}

func (p *process) work(ctx context.Context, stop func()) int {
	defer stop()
	err := p.worker.Run(ctx)
	switch {
	case err == nil:
		return exitStopped
	case errors.Is(err, worker.ErrStuck), errors.Is(err, worker.ErrStalled):
		p.log.Error("worker gives up; start a new process", "err", err)
		return exitStuck
	}
	p.log.Error("worker cannot run", "err", err)
	return exitDatabase
}

// await waits until the database can be used. Without that, it returns the exit code.
func (p *process) await(ctx context.Context) (code int, usable bool) {
	waiter := database.Waiter{
		Config:   p.settings.pool.ConnConfig,
		Log:      p.log,
		FailFast: p.settings.FailFast.Value,
		Waiting:  p.health.Waiting,
	}
	facts, err := waiter.Await(ctx)
	if ctx.Err() != nil {
		p.log.Info("worker stopped before the database could be used")
		return exitStopped, false
	}
	if err != nil {
		p.log.Error("the database cannot be used", "err", err)
		return exitDatabase, false
	}
	if facts.Skew.Abs() > database.MaxSkew {
		p.log.Warn("this machine's clock and the database's differ; nothing depends on it but the times in logs", "skew", facts.Skew)
		if p.settings.Strict.Value {
			p.log.Error("worker does not start with clocks that differ, because of WORKER_STRICT")
			return exitDatabase, false
		}
	}
	p.health.Waiting(nil)
	return exitStopped, true
}

func (p *process) serve(ctx context.Context) {
	p.log.Info("serving HTTP", "address", p.listener.Addr().String())
	if err := p.probe.Serve(ctx, p.listener); err != nil {
		p.log.Error("HTTP has ended", "err", err)
	}
}

// close says goodbye to the database, but does not wait for a handler that keeps a
// connection.
func (p *process) close() {
	closed := make(chan struct{})
	go func() { p.pool.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(time.Second):
	}
}

// obeySignals has the first signal stop the worker, the second hurry it, and the third
// kill the process.
func (p *process) obeySignals(stop func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		s := <-signals
		p.log.Info("stopping", "signal", s.String())
		p.health.Stop()
		stop()
		s = <-signals
		p.log.Warn("stopping at once; one more signal kills the process", "signal", s.String())
		p.worker.StopNow()
		signal.Reset(syscall.SIGTERM, syscall.SIGINT)
	}()
}
