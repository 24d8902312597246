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

// Config says what a Worker does. Pool and Mux are required; a zero field means its
// default.
type Config struct {
	// Pool tells where the database is. The worker opens connections of its own with the
	// pool's settings (see Connections), so that handlers which use up the pool cannot cost
	// it its leases.
	Pool *pgxpool.Pool

	// Mux holds the handlers.
	Mux *Mux

	// Prefixes of the types to lease, literal, each ending with a dot. Default: "default.".
	Prefixes []string

	// Name appears in leased_by and in the history, with a random suffix, for people. At most
	// 64 printable characters. Default: "worker".
	Name string

	// Version of the program, shown in workflow_live_worker. Default: none.
	Version string

	// Concurrency is how many runs are executed at once. Default: 100.
	Concurrency int

	// Lease is how long a lease lasts without a heartbeat, and so how long a crash goes
	// unnoticed. Types may have their own. 2 s to 24 h; default: 30 s.
	Lease time.Duration

	// Heartbeat is the time between extensions of a lease, at most a third of Lease.
	// Cancels reach handlers at heartbeats. Default: Lease / 3.
	Heartbeat time.Duration

	// Timeout is the most one attempt may take; the row's deadline_at enforces it even if the
	// handler does not listen. NoTimeout for none. Default: an hour.
	Timeout time.Duration

	// PollInterval is the longest pause between two polls while idle; shorter ones
	// come first. At least 10 ms. Default: 1 s.
	PollInterval time.Duration

	// ShutdownGrace is how long handlers may go on once Run's context has ended, before their
	// contexts end too. Negative: none. Default: 10 s.
	ShutdownGrace time.Duration

	// UnknownTypeGrace leaves runs without a handler to other workers until they have been
	// due for this long; then they fail as no_handler_registered. Default: at once.
	UnknownTypeGrace time.Duration

	// Backoff is the pause between attempts, and after an expired lease.
	Backoff run.Backoff

	// MaxPostponed is how often a run may be put off by run.Again before that is charged as a
	// failure. Default: 1000.
	MaxPostponed int

	// Batch is how many runs one statement leases or settles at most. Default: 1000.
	Batch int

	// NoWakeUp turns off the connection that listens for wake-ups. Polling finds everything
	// all the same, up to a PollInterval later.
	NoWakeUp bool

	// Processes lets the worker execute process graphs: pass a *graph.Engine. The worker then leases the steps under its
	// prefixes, and the engine's own types, for which Mux needs no handlers. Default: none.
	Processes Processes

	// Retention says for how long what is over is kept; what is older the worker removes, unless Off.
	Retention Retention

	// Observe reports what happens, for metrics.
	Observe Observer

	// LogErrors adds the text of handlers' errors to the log. It may quote payloads, so by
	// default it is only stored with the run, as last_error.
	LogErrors bool

	// Logger gets warnings and notices; never payloads. Default: slog.Default().
	Logger *slog.Logger

	hooks []hook.Hook // act in settle transactions before that of Processes; for tests
}

// Connections is how many database connections a worker opens at most, wake-up included. It opens one more for the moments in which it
// removes what is old.
const Connections = batchSettlers + soloSettlers + 4

// withDefaults returns c with defaults filled in, or an error that names each field that is
// wrong, its value, and what would be right.
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
