package service

import (
	"fmt"
	"io"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/env"
)

// A config holds the environment variables, one field for each.
type config struct {
	DatabaseURL       env.String `envconfig:"DATABASE_URL" otherwise:"required" bounds:"postgres://…" help:"Address of the database."`
	WorkerDatabaseURL env.String `envconfig:"WORKER_DATABASE_URL" otherwise:"DATABASE_URL" bounds:"postgres://…" help:"Used instead of DATABASE_URL."`

	Prefixes  env.List   `envconfig:"WORKER_TYPE_PREFIXES" default:"default." empty:"refuse" bounds:"1 to 100, comma separated" help:"Types to execute: literal prefixes, each ending with a dot."`
	Processes env.Bool   `envconfig:"WORKER_PROCESSES" default:"true" help:"Execute processes: their steps, and the engine's own runs (graph.)."`
	Handlers  env.String `envconfig:"WORKER_HANDLERS" otherwise:"none" bounds:"path of a file" help:"YAML file that maps types to programs and URLs."`
	ID        env.String `envconfig:"WORKER_ID" default:"worker" bounds:"1 to 64 printable characters" help:"Name shown in leased_by and in the history, with a random suffix."`

	Concurrency      env.Int      `envconfig:"WORKER_CONCURRENCY" default:"100" min:"1" max:"100000" help:"Runs executed at once."`
	Batch            env.Int      `envconfig:"WORKER_BATCH" default:"1000" min:"1" max:"10000" help:"Most runs leased or settled by one statement."`
	Lease            env.Duration `envconfig:"WORKER_LEASE" default:"30s" min:"2s" max:"24h" because:"; a crash goes unnoticed for as long" help:"Length of a lease without heartbeats: how long a crash may go unnoticed."`
	Heartbeat        env.Duration `envconfig:"WORKER_HEARTBEAT" otherwise:"WORKER_LEASE / 3" min:"100ms" max:"8h" bounds:"100ms to WORKER_LEASE / 3" help:"Time between extensions of a lease; handlers learn of a cancel at the next one."`
	Timeout          env.Duration `envconfig:"WORKER_TIMEOUT" default:"1h" min:"1ms" max:"8760h" none:"no limit" help:"Time limit of one attempt."`
	PollInterval     env.Duration `envconfig:"WORKER_POLL_INTERVAL" default:"1s" min:"10ms" max:"1h" help:"Longest pause between two polls while idle."`
	ShutdownGrace    env.Duration `envconfig:"WORKER_SHUTDOWN_GRACE" default:"10s" min:"1ms" max:"24h" zero:"none" help:"Time that handlers get to finish after the first SIGTERM."`
	UnknownTypeGrace env.Duration `envconfig:"WORKER_UNKNOWN_TYPE_GRACE" default:"0s" min:"1ms" max:"8760h" zero:"fail at once" help:"How long runs without a handler here are left to other workers."`
	BackoffBase      env.Duration `envconfig:"WORKER_BACKOFF_BASE" default:"1s" min:"1ms" max:"8760h" help:"Pause before the second attempt; doubles with each failure."`
	BackoffCap       env.Duration `envconfig:"WORKER_BACKOFF_CAP" default:"5m" min:"1ms" max:"8760h" help:"Longest pause between attempts, without the jitter of up to half of it."`
	MaxPostponed     env.Int      `envconfig:"WORKER_MAX_POSTPONED" default:"1000" min:"1" max:"1000000000" help:"How often a run may be postponed without charging an attempt."`
	Wakeup           env.Bool     `envconfig:"WORKER_WAKEUP" default:"true" help:"Listen for wake-ups; without them, polling finds new runs a little later."`

	CleanupEvery  env.Duration `envconfig:"WORKER_CLEANUP_EVERY" default:"1h" min:"1s" max:"8760h" zero:"never" help:"Time between two cleanups of a prefix; 0: this worker removes nothing."`
	KeepFinished  env.Duration `envconfig:"WORKER_KEEP_FINISHED" default:"720h" min:"1m" max:"876000h" none:"for ever" help:"Age at which succeeded and cancelled runs are deleted."`
	KeepFailed    env.Duration `envconfig:"WORKER_KEEP_FAILED" default:"2160h" min:"1m" max:"876000h" none:"for ever" help:"Age at which failed runs are deleted."`
	KeepDeleted   env.Duration `envconfig:"WORKER_KEEP_DELETED" default:"720h" min:"1m" max:"876000h" none:"for ever" help:"Time after which soft-deleted runs are deleted for good."`
	KeepProcesses env.Duration `envconfig:"WORKER_KEEP_PROCESSES" default:"2160h" min:"1m" max:"876000h" none:"for ever" help:"Age at which finished process instances are deleted, with their steps and history."`
	KeepPublished env.Duration `envconfig:"WORKER_KEEP_PUBLISHED" default:"168h" min:"1m" max:"876000h" none:"for ever" help:"Age at which published outbox events are deleted."`

	HTTPAddr     env.String   `envconfig:"WORKER_HTTP_ADDR" otherwise:"off" bounds:"host:port" help:"Address on which to serve /healthz, /readyz and /metrics."`
	HTTPToken    env.String   `envconfig:"WORKER_HTTP_TOKEN" otherwise:"none" bounds:"at least 16 characters" secret:"true" help:"Bearer token for /metrics and for reasons in /readyz; required unless on loopback."`
	HTTPComplete env.Bool     `envconfig:"WORKER_HTTP_COMPLETE" default:"false" help:"Serve POST /complete too, which completes runs that were handed on, by their tokens."`
	ReadyWithin  env.Duration `envconfig:"WORKER_READY_WITHIN" default:"10s" min:"5s" max:"1h" help:"/readyz is 200 only if the database has accepted a write within this time."`

	LogLevel  env.String `envconfig:"WORKER_LOG_LEVEL" default:"info" oneof:"debug|info|warn|error" help:"Lowest level that is logged, to stderr."`
	LogFormat env.String `envconfig:"WORKER_LOG_FORMAT" default:"auto" oneof:"auto|text|json" help:"auto: text on a terminal, JSON elsewhere."`
	FailFast  env.Bool   `envconfig:"WORKER_FAIL_FAST" default:"false" help:"Exit with 3 instead of waiting for a database that does not answer at start."`
	Strict    env.Bool   `envconfig:"WORKER_STRICT" default:"false" help:"Treat warnings at start as errors."`
}

// Exit codes.
const (
	exitStopped  = 0
	exitConfig   = 2
	exitDatabase = 3
	exitStuck    = 4
)

// config returns a config with the program's own defaults, before the environment is read.
func (p Program) config() *config {
	c := &config{}
	c.ID.Preset(p.Name)
	c.Prefixes.Preset(strings.Join(p.Prefixes, ","))
	return c
}

// help prints the text of --help.
func help(w io.Writer, p Program) {
	fmt.Fprintf(w, `%[1]s leases due runs from Postgres, executes their handlers and records the outcomes.

Usage:
  %[1]s              work until SIGTERM or SIGINT
  %[1]s --help       print this
  %[1]s --version    print the version

All settings come from the environment. Durations need a unit: 500ms, 30s, 5m, 1h30m.
An empty variable counts as unset, except WORKER_TYPE_PREFIXES.

`, p.Name)
	env.Print(w, p.config())
	fmt.Fprint(w, `
Signals:
  The first SIGTERM or SIGINT stops leasing and lets handlers finish for
  WORKER_SHUTDOWN_GRACE. The second ends their contexts at once; their runs are handed
  back. The third kills the process.

Exit codes:
  0  stopped cleanly
  2  the configuration is wrong; every problem is listed
  3  the database cannot be used
  4  handlers are stuck, or the poll loop has stalled; start a new process
`)
}
