package worker

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// Config is the configuration of a Worker. Pool and Mux are required. A zero field means its default.
type Config struct {
	// Pool says where the database is. The worker opens connections of its own with the pool's settings (see
	// Connections). So handlers that use up the pool cannot cost the worker its leases.
	Pool *pgxpool.Pool

	// Mux holds the handlers.
	Mux *Mux

	// Prefixes are the type prefixes to lease. They are literal, and each ends with a dot. Default:
	// "default.".
	Prefixes []string

	// Name appears with a random suffix in leased_by and in the history, for people to read. At most 64
	// printable characters. Default: "worker".
	Name string

	// Version is the version of the program. It is shown in workflow_live_worker. Default: none.
	Version string

	// Concurrency is how many handlers run at once. The worker holds more leases than that, because runs may wait for a
	// handler to return. Default: 100.
	Concurrency int

	// Lease is how long a lease lasts without a heartbeat, and so how long a crash goes unnoticed. Options may
	// set another length for a type. 2 s to 24 h; default: 30 s.
	Lease time.Duration

	// Heartbeat is the time between two extensions of a lease, at most a third of Lease. A handler learns at a
	// heartbeat that its run was cancelled. Default: Lease / 3.
	Heartbeat time.Duration

	// Timeout is the longest time that one attempt may take, from when its handler begins. The row's deadline_at, two
	// seconds later, enforces it even if the handler ignores its context. NoTimeout means no limit. Default: an hour.
	Timeout time.Duration

	// PollInterval is the longest pause between two polls of an idle worker. Pauses start shorter and grow to
	// it. At least 10 ms. Default: 1 s.
	PollInterval time.Duration

	// ShutdownGrace is how long handlers may continue once Run's context has ended. Then their contexts end
	// too. Negative: no grace. Default: 10 s.
	ShutdownGrace time.Duration

	// UnknownTypeGrace is how long this worker leaves due runs for which it has no handler to other workers.
	// After that it leases them, and they fail as no_handler_registered. Default: 0, they fail at once.
	UnknownTypeGrace time.Duration

	// Backoff is the pause between attempts, and after an expired lease. Its zero fields mean run's defaults.
	Backoff run.Backoff

	// MaxPostponed is how often run.Again may put a run off. After that it counts as a failure. Default:
	// 1000.
	MaxPostponed int

	// Batch is the largest number of runs that one statement leases or settles. Default: 1000.
	Batch int

	// NoWakeUp turns off the connection that listens for wake-ups. Polling still finds every run, up to a
	// PollInterval later.
	NoWakeUp bool

	// Processes is a *graph.Engine, which lets the worker execute process graphs. The worker then leases steps
	// under its prefixes, and runs of the engine's own types, for which Mux needs no handlers. Default: none.
	Processes Processes

	// Retention says how long finished work is kept. The worker removes what is older, unless Retention.Off is
	// set.
	Retention Retention

	// Observe is called as things happen, for metrics.
	Observe Observer

	// LogErrors adds the text of handlers' errors to the log. The text may quote payloads, so by default it is
	// stored with the run only, as last_error.
	LogErrors bool

	// Logger receives notices, warnings and errors, but never payloads. Default: slog.Default().
	Logger *slog.Logger

	hooks []hook.Hook // called before the hook of Processes; for tests
}

// Connections is the largest number of database connections that a worker opens, wake-ups included. While it
// removes old rows it opens one more.
const Connections = batchSettlers + soloSettlers + 5

// withDefaults returns c with its defaults filled in, or an error that names each bad field, its value and the
// fix.
func (c Config) withDefaults() (Config, error) {
	if c.Prefixes == nil {
		c.Prefixes = []string{shipped.Prefix}
	}
	c.Name = cmp.Or(c.Name, "worker")
	c.Concurrency = cmp.Or(c.Concurrency, shipped.Concurrency)
	c.Lease = cmp.Or(c.Lease, shipped.Lease)
	c.Heartbeat = cmp.Or(c.Heartbeat, c.Lease/3)
	c.Timeout = cmp.Or(c.Timeout, shipped.Timeout)
	c.PollInterval = cmp.Or(c.PollInterval, shipped.PollInterval)
	c.ShutdownGrace = max(cmp.Or(c.ShutdownGrace, shipped.ShutdownGrace), 0)
	c.MaxPostponed = cmp.Or(c.MaxPostponed, shipped.MaxPostponed)
	c.Batch = cmp.Or(c.Batch, shipped.Batch)
	c.Logger = cmp.Or(c.Logger, slog.Default())

	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Pool == nil {
		bad("Pool is nil: pass a *pgxpool.Pool")
	}
	if c.Mux == nil {
		bad("Mux is nil: pass worker.NewMux() with handlers")
	}
	if c.Processes != nil {
		own := c.Processes.Parts().Prefix
		c.Prefixes = append(slices.Clone(c.Prefixes), own)
		if c.Mux != nil {
			for _, pattern := range c.Mux.Patterns() {
				if strings.HasPrefix(pattern, own) {
					bad("Mux has a handler of %s, which is a type of Processes: remove it", pattern)
				}
			}
		}
	}
	prefixes, err := naming.Prefixes(c.Prefixes)
	if err != nil {
		problems = append(problems, err)
	}
	c.Prefixes = prefixes
	if len(c.Name) > 64 || !utf8.ValidString(c.Name) || strings.ContainsFunc(c.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		bad("Name %.70q: use at most 64 printable characters", c.Name)
	}
	if c.Concurrency < 1 || c.Concurrency > shipped.MaxConcurrency {
		bad("Concurrency %d: use 1 to %d", c.Concurrency, shipped.MaxConcurrency)
	}
	if c.Lease < shipped.MinLease || c.Lease > shipped.MaxLease {
		bad("Lease %s: use %s to %s; a crash goes unnoticed for as long", c.Lease, shipped.MinLease, shipped.MaxLease)
	} else if c.Heartbeat <= 0 || c.Heartbeat > c.Lease/3 {
		bad("Heartbeat %s: use more than 0 and at most a third of Lease, %s", c.Heartbeat, c.Lease/3)
	}
	if c.Timeout < 0 && c.Timeout != NoTimeout {
		bad("Timeout %s: use a positive duration, or NoTimeout", c.Timeout)
	}
	if c.PollInterval < shipped.MinPollInterval {
		bad("PollInterval %s: use at least %s", c.PollInterval, shipped.MinPollInterval)
	}
	if c.UnknownTypeGrace < 0 {
		bad("UnknownTypeGrace %s: use 0 or more", c.UnknownTypeGrace)
	}
	if err := (Options{Backoff: c.Backoff}).validate(); err != nil {
		problems = append(problems, err)
	}
	if c.MaxPostponed < 1 {
		bad("MaxPostponed %d: use at least 1", c.MaxPostponed)
	}
	if c.Batch < 1 || c.Batch > 10_000 {
		bad("Batch %d: use 1 to 10000", c.Batch)
	}
	c.Retention = c.Retention.withDefaults(bad)
	if err := errors.Join(problems...); err != nil {
		return c, fmt.Errorf("worker: bad configuration:\n%w", err)
	}
	return c, nil
}
