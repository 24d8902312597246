package main

import (
	"context"
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

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/probe"
	"github.com/simple-workflow/simple-workflow/run"
)

// A process holds the parts of the program.
type process struct {
	settings   *settings
	log        *slog.Logger
	pool       *pgxpool.Pool
	dispatcher *dispatcher.Dispatcher
	health     *probe.Health
	probe      *probe.Server
	listener   net.Listener // nil: no HTTP
}

// newProcess creates the parts. It listens for HTTP, but does not connect to the database yet.
func newProcess(s *settings, log *slog.Logger) (p *process, problems []string) {
	p = &process{settings: s, log: log}
	bad := func(err error) (*process, []string) { return nil, strings.Split(err.Error(), "\n") }
	var err error
	if p.pool, err = pgxpool.NewWithConfig(context.Background(), s.pool); err != nil {
		return bad(err)
	}
	metrics, looks := newMetrics(), &looks{last: map[string]time.Time{}}
	if p.dispatcher, err = dispatcher.New(dispatcher.Config{
		Pool: p.pool, Source: s.Source.Value, Sinks: s.targets, Name: s.ID.Value,
		Batch: s.Batch.Value, BatchBytes: s.BatchBytes.Value, PollInterval: s.PollInterval.Value, Claim: s.Claim.Value,
		MaxAttempts: s.MaxAttempts.Value, Backoff: run.Backoff{Base: s.BackoffBase.Value, Cap: s.BackoffCap.Value},
		Grace: s.ShutdownGrace.Value, Observe: looks.observe(metrics.observer()), Logger: log,
	}); err != nil {
		return bad(err)
	}
	p.health = newHealth(s, p.dispatcher.LastWrite, looks)
	p.probe = &probe.Server{Ready: p.health.Ready, Metrics: metrics.registry, Token: s.HTTPToken.Value, Log: log}
	if address := s.HTTPAddr.Value; address != "" {
		if p.listener, err = net.Listen("tcp", address); err != nil {
			return bad(fmt.Errorf("DISPATCHER_HTTP_ADDR=%q: %w; choose another address, or stop what uses it", address, err))
		}
	}
	return p, nil
}

// run publishes until a signal ends it, and returns the exit code.
func (p *process) run() int {
	defer p.pool.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills the process
	context.AfterFunc(ctx, p.health.Stop)
	// Catch SIGPIPE, so that a write to a closed pipe fails only the sink that writes. It is not ignored, because child
	// processes would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	var background sync.WaitGroup
	defer background.Wait()
	serving, stopServing := context.WithCancel(context.Background())
	defer stopServing()
	if p.listener != nil {
		background.Go(func() {
			p.log.Info("serving HTTP", "address", p.listener.Addr().String())
			if err := p.probe.Serve(serving, p.listener); err != nil {
				p.log.Error("HTTP has ended", "err", err)
			}
		})
	}
	waiter := database.Waiter{Config: p.settings.pool.ConnConfig, Log: p.log, FailFast: p.settings.FailFast.Value, Waiting: p.health.Waiting}
	if _, err := waiter.Await(ctx); err != nil {
		if ctx.Err() != nil {
			p.log.Info("dispatcher stopped before the database could be used")
			return exitStopped
		}
		p.log.Error("the database cannot be used", "err", err)
		return exitDatabase
	}
	p.health.Waiting(nil)
	if err := p.orphans(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "dispatcher:", err)
		return exitConfig
	}
	if err := p.dispatcher.Run(ctx); err != nil {
		p.log.Error("the database cannot be used", "err", err)
		return exitDatabase
	}
	return exitStopped
}

// orphanedAfter is how long a sink must have gone unserved to count as forgotten.
const orphanedAfter = time.Minute

// orphans returns an error if the database has sinks with open events that nobody serves: those events would stay
// for ever.
func (p *process) orphans(ctx context.Context) error {
	served := slices.Clone(p.settings.Elsewhere.Value)
	for _, t := range p.settings.targets {
		served = append(served, t.Name)
	}
	names, err := delivery.Unserved(ctx, p.pool, served, orphanedAfter)
	if err != nil {
		return nil // if the database has a problem, Run reports it
	}
	var errs []error
	for _, name := range names {
		if lag, err := delivery.LagOf(ctx, p.pool, name); err == nil && lag.Open > 0 {
			errs = append(errs, fmt.Errorf("DISPATCHER_SINKS: the sink %s is not among them, and has %d events to get (100000: or more); "+
				"add it, name it in DISPATCHER_ELSEWHERE if another dispatcher serves it, or remove it: dispatcher --abandon %s", name, lag.Open, name))
		}
	}
	return errors.Join(errs...)
}
