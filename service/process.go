package service

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/build"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/internal/probe"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// noop is a type for trials.
const noop = "default.noop.v1"

// builtIn are the types that every worker can execute if its prefixes cover them.
var builtIn = []string{noop, cleanup.Type}

// A process holds all parts of the running program.
type process struct {
	settings *settings
	log      *slog.Logger
	pool     *pgxpool.Pool // for all but the worker and the handlers
	own      *pgxpool.Pool // for handlers, see Setup.Pool
	worker   *worker.Worker
	health   *probe.Health
	probe    *probe.Server
	listener net.Listener // nil: no HTTP
}

// newProcess makes all parts, and returns all problems of them and of the settings. It listens for HTTP, but
// does not connect to the database.
func newProcess(s *settings, log *slog.Logger) (p *process, problems []string) {
	p = &process{settings: s, log: log}
	defer func() {
		if len(problems) > 0 {
			p.discard()
		}
	}()
	problems = append(s.report.Problems, p.listen()...)
	if s.pool == nil {
		return p, problems // handlers need a pool
	}
	var err error
	if p.pool, err = pgxpool.NewWithConfig(context.Background(), s.pool); err != nil {
		return p, append(problems, err.Error())
	}
	if p.own, err = pgxpool.NewWithConfig(context.Background(), s.own); err != nil {
		return p, append(problems, err.Error())
	}
	metrics := newMetrics()
	mux, err := p.mux(metrics)
	problems = append(problems, lines(err)...)
	if s.strict() {
		problems = append(problems, s.unserved(mux.Patterns())...)
	}
	if len(problems) > 0 {
		return p, problems
	}
	if p.worker, err = worker.New(p.config(mux, metrics)); err != nil {
		return p, lines(err)
	}
	p.health = probe.NewHealth(s.ReadyWithin.Value, p.worker.LastWrite)
	p.health.Watch("look for work", max(s.ReadyWithin.Value, 3*s.PollInterval.Value), p.worker.LastPoll)
	metrics.watch(p.worker)
	p.probe = &probe.Server{Ready: p.health.Ready, Metrics: metrics.registry, Token: s.HTTPToken.Value, Log: log}
	if s.HTTPComplete.Value {
		p.probe.Complete = newCompletions(p.pool, log)
	}
	return p, nil
}

// lines splits an error into its lines.
func lines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

// listen opens the HTTP listener, if an address is set. It returns what is wrong.
func (p *process) listen() []string {
	address := p.settings.HTTPAddr.Value
	if address == "" || !p.settings.HTTPAddr.Good() {
		return nil
	}
	var err error
	if p.listener, err = net.Listen("tcp", address); err != nil {
		return []string{fmt.Sprintf("WORKER_HTTP_ADDR=%q: %s; choose another address, or stop what uses it", address, err)}
	}
	return nil
}

// discard closes what newProcess opened, if the process does not start.
func (p *process) discard() {
	if p.listener != nil {
		_ = p.listener.Close()
	}
	for _, pool := range []*pgxpool.Pool{p.pool, p.own} {
		if pool != nil {
			pool.Close()
		}
	}
}

// mux returns all handlers: the built-in ones, the program's, and those of the file.
func (p *process) mux(metrics *metrics) (*worker.Mux, error) {
	s, mux := p.settings, worker.NewMux()
	if s.covers(noop) {
		worker.Handle(mux, noop, func(context.Context, json.RawMessage) (struct{}, error) { return struct{}{}, nil })
	}
	if s.covers(cleanup.Type) {
		worker.Handle(mux, cleanup.Type, cleanup.New(p.pool, s.prefixes, cmp.Or(s.CleanupEvery.Value, shipped.CleanupEvery), cleanup.Keep{
			Finished:  s.KeepFinished.Value,
			Failed:    s.KeepFailed.Value,
			Deleted:   s.KeepDeleted.Value,
			Published: s.KeepPublished.Value,
			Processes: s.KeepProcesses.Value,
		}).Handle)
	}
	var err error
	if setup := s.program.Setup; setup != nil {
		err = setup(&Setup{Mux: mux, Pool: p.own, Metrics: metrics.registry, Log: p.log})
	}
	return mux, errors.Join(err, handlers.Register(mux, s.bindings, p.log))
}

func (p *process) config(mux *worker.Mux, m *metrics) worker.Config {
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
		Retention: worker.Retention{
			Off:       s.CleanupEvery.Value == 0,
			Every:     s.CleanupEvery.Value,
			Finished:  s.KeepFinished.Value, // env.None is worker.KeepForever
			Failed:    s.KeepFailed.Value,
			Deleted:   s.KeepDeleted.Value,
			Published: s.KeepPublished.Value,
			Processes: s.KeepProcesses.Value,
		},
		Observe: m.observer(),
		Logger:  p.log,
	}
	if s.Processes.Value { // settling a step advances its process
		c.Processes = graph.New(p.pool)
	}
	if c.ShutdownGrace == 0 {
		c.ShutdownGrace = -1 // 0 would mean the default
	}
	return c
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

// await waits until the database can be used. If it cannot, usable is false and code is the exit code.
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

// close closes the pools. It waits a second at most, in case a handler keeps a connection.
func (p *process) close() {
	closed := make(chan struct{})
	go func() { p.pool.Close(); p.own.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(time.Second):
	}
}

// obeySignals makes the first signal stop the worker, the second end the contexts of its handlers, and the
// third kill the process.
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
