package main

import (
	"fmt"
	"io"

	"github.com/simple-workflow/simple-workflow/internal/env"
)

// A config holds the environment's settings, one field per variable.
type config struct {
	DatabaseURL   env.String `envconfig:"DATABASE_URL" otherwise:"required" bounds:"postgres://…" help:"Address of the database."`
	DispatcherURL env.String `envconfig:"DISPATCHER_DATABASE_URL" otherwise:"DATABASE_URL" bounds:"postgres://…" help:"Used instead of DATABASE_URL."`

	Sinks  env.String `envconfig:"DISPATCHER_SINKS" otherwise:"required" bounds:"URLs, separated by spaces" secret:"true" help:"Where events go; see below."`
	Source env.String `envconfig:"DISPATCHER_SOURCE" otherwise:"required" bounds:"a URI, such as https://shop.example/billing" help:"The CloudEvents source; the same for all dispatchers of a database, and different for each database."`
	ID     env.String `envconfig:"DISPATCHER_ID" default:"dispatcher" bounds:"1 to 64 printable characters" help:"Name shown in outbox_lane.claimed_by, with a random suffix."`

	WebhookSecret env.String `envconfig:"DISPATCHER_WEBHOOK_SECRET" otherwise:"none" bounds:"at least 24 characters" secret:"true" help:"Secret with which requests to webhooks are signed."`
	WebhookKeyID  env.String `envconfig:"DISPATCHER_WEBHOOK_KEY_ID" otherwise:"none" bounds:"1 to 64 printable characters" help:"Name of the secret, sent to receivers, so that the secret can be changed."`
	Elsewhere     env.List   `envconfig:"DISPATCHER_ELSEWHERE" otherwise:"none" bounds:"names, comma separated" help:"Sinks that are served by dispatchers with another configuration."`

	Batch         env.Int      `envconfig:"DISPATCHER_BATCH" default:"1000" min:"1" max:"10000" help:"Most events published at once, for each sink."`
	BatchBytes    env.Int      `envconfig:"DISPATCHER_BATCH_BYTES" default:"8388608" min:"1024" max:"268435456" help:"Most bytes of payloads and headers in a batch; a larger event is sent alone."`
	PollInterval  env.Duration `envconfig:"DISPATCHER_POLL_INTERVAL" default:"20ms" min:"1ms" max:"1m" help:"Pause between two polls while no event is due."`
	Claim         env.Duration `envconfig:"DISPATCHER_CLAIM" default:"1m" min:"1s" max:"1h" because:"; a crash holds up what was claimed for as long" help:"Length of a claim on lanes: how long a crash may hold them up."`
	MaxAttempts   env.Int      `envconfig:"DISPATCHER_MAX_ATTEMPTS" default:"20" min:"1" max:"1000000" help:"Failures after which an event is parked."`
	BackoffBase   env.Duration `envconfig:"DISPATCHER_BACKOFF_BASE" default:"1s" min:"1ms" max:"8760h" help:"Pause before the second attempt at an event; doubles with each failure."`
	BackoffCap    env.Duration `envconfig:"DISPATCHER_BACKOFF_CAP" default:"5m" min:"1ms" max:"8760h" help:"Longest pause between attempts, without the jitter of up to half of it."`
	ShutdownGrace env.Duration `envconfig:"DISPATCHER_SHUTDOWN_GRACE" default:"10s" min:"1ms" max:"24h" help:"Time that running batches get to finish after SIGTERM."`

	HTTPAddr    env.String   `envconfig:"DISPATCHER_HTTP_ADDR" otherwise:"off" bounds:"host:port" help:"Address on which to serve /healthz, /readyz and /metrics."`
	HTTPToken   env.String   `envconfig:"DISPATCHER_HTTP_TOKEN" otherwise:"none" bounds:"at least 16 characters" secret:"true" help:"Bearer token for /metrics and for reasons in /readyz; required unless on loopback."`
	ReadyWithin env.Duration `envconfig:"DISPATCHER_READY_WITHIN" default:"10s" min:"5s" max:"1h" help:"/readyz is 200 only if the database has accepted a write within this time."`

	LogLevel  env.String `envconfig:"DISPATCHER_LOG_LEVEL" default:"info" oneof:"debug|info|warn|error" help:"Lowest level that is logged, to stderr."`
	LogFormat env.String `envconfig:"DISPATCHER_LOG_FORMAT" default:"auto" oneof:"auto|text|json" help:"auto: text on a terminal, JSON elsewhere."`
	FailFast  env.Bool   `envconfig:"DISPATCHER_FAIL_FAST" default:"false" help:"Exit with 3 instead of waiting for a database that does not answer at start."`
}

// Exit codes.
const (
	exitStopped  = 0
	exitConfig   = 2
	exitDatabase = 3
)

// help writes the text of --help.
func help(w io.Writer) {
	fmt.Fprint(w, `dispatcher publishes the events in outbox_event as CloudEvents.

Usage:
  dispatcher                  publish until SIGTERM or SIGINT
  dispatcher --abandon NAME   remove a sink; prints the number of events that were open for it
  dispatcher --help           print this
  dispatcher --version        print the version

All settings come from the environment. Durations need a unit: 500ms, 30s, 5m, 1h30m.
An empty variable counts as unset.

`)
	env.Print(w, &config{})
	fmt.Fprint(w, `
Sinks:
  DISPATCHER_SINKS lists them, separated by spaces. Each is NAME=URL, or a URL alone, whose
  scheme is then the name. Progress is kept under the name.

`+schemes()+`
  Options follow the URL after #, separated by &:
    types=billing.,invoice.   only events whose types start with one of these; none: all
    rate=100                  at most that many events a second
    mode=binary               attributes as headers; webhooks, NATS, Kafka and AMQP only
    allow=10.0.0.0/8          private addresses that a webhook may connect to
    env=NAME,OTHER            environment variables to pass to a program, besides PATH and the like
    exchange=NAME             AMQP exchange to publish to; it must exist
    sasl=scram-sha-512        SASL mechanism for Kafka; also scram-sha-256, plain
    creds=PATH                credentials file for NATS
    ca=PATH                   CA certificates to trust, with TLS; otherwise the system's
    cert=PATH                 client certificate, with TLS, read at each handshake
    key=PATH                  its private key

  DISPATCHER_SINKS="audit=stdout: crm=https://crm.example/events#types=invoice."

Signals:
  The first SIGTERM or SIGINT stops claiming and lets running batches finish. The second
  kills the process; events that it has not marked are published again.

Exit codes:
  0  stopped cleanly
  2  the configuration is wrong; every problem is listed
  3  the database cannot be used
`)
}
