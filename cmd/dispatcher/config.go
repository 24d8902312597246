package main

import (
	"fmt"
	"io"

	"github.com/simple-workflow/simple-workflow/internal/env"
)

// A config holds the environment's settings, one field per variable.
type config struct {
	DatabaseURL   env.String `envconfig:"DATABASE_URL" otherwise:"required" bounds:"postgres://…" help:"Where the database is."`
	DispatcherURL env.String `envconfig:"DISPATCHER_DATABASE_URL" otherwise:"DATABASE_URL" bounds:"postgres://…" help:"Goes before DATABASE_URL."`

	Sinks  env.String `envconfig:"DISPATCHER_SINKS" otherwise:"required" bounds:"URLs, separated by blanks" secret:"true" help:"Where events go; see below."`
	Source env.String `envconfig:"DISPATCHER_SOURCE" otherwise:"required" bounds:"a URI, such as https://shop.example/billing" help:"The CloudEvents source; the same for all dispatchers of a database, and no other database's."`
	ID     env.String `envconfig:"DISPATCHER_ID" default:"dispatcher" bounds:"1 to 64 printable characters" help:"Name shown in outbox_lane.claimed_by, with a random suffix."`

	WebhookSecret env.String `envconfig:"DISPATCHER_WEBHOOK_SECRET" otherwise:"none" bounds:"at least 24 characters" secret:"true" help:"Signs what goes to webhooks."`
	WebhookKeyID  env.String `envconfig:"DISPATCHER_WEBHOOK_KEY_ID" otherwise:"none" bounds:"1 to 64 printable characters" help:"Names the secret to receivers, so that it can be changed."`
	Elsewhere     env.List   `envconfig:"DISPATCHER_ELSEWHERE" otherwise:"none" bounds:"names, comma separated" help:"Sinks that dispatchers of another configuration serve."`

	Batch         env.Int      `envconfig:"DISPATCHER_BATCH" default:"1000" min:"1" max:"10000" help:"Events published at once at most, for each sink."`
	BatchBytes    env.Int      `envconfig:"DISPATCHER_BATCH_BYTES" default:"8388608" min:"1024" max:"268435456" help:"Bytes of payloads and headers in a batch; a larger event goes by itself."`
	PollInterval  env.Duration `envconfig:"DISPATCHER_POLL_INTERVAL" default:"20ms" min:"1ms" max:"1m" help:"Pause between two looks at an outbox without anything due."`
	Claim         env.Duration `envconfig:"DISPATCHER_CLAIM" default:"1m" min:"1s" max:"1h" because:"; a crash holds up what was claimed for as long" help:"How long lanes are claimed for: a crash holds them up for as long."`
	MaxAttempts   env.Int      `envconfig:"DISPATCHER_MAX_ATTEMPTS" default:"20" min:"1" max:"1000000" help:"Failures after which an event is parked."`
	BackoffBase   env.Duration `envconfig:"DISPATCHER_BACKOFF_BASE" default:"1s" min:"1ms" max:"8760h" help:"Pause before the second try of an event; doubles with each."`
	BackoffCap    env.Duration `envconfig:"DISPATCHER_BACKOFF_CAP" default:"5m" min:"1ms" max:"8760h" help:"Longest pause between tries, jitter of up to half of it aside."`
	ShutdownGrace env.Duration `envconfig:"DISPATCHER_SHUTDOWN_GRACE" default:"10s" min:"1ms" max:"24h" help:"Time that what is being published gets after SIGTERM."`

	HTTPAddr    env.String   `envconfig:"DISPATCHER_HTTP_ADDR" otherwise:"off" bounds:"host:port" help:"Serve /healthz, /readyz and /metrics there."`
	HTTPToken   env.String   `envconfig:"DISPATCHER_HTTP_TOKEN" otherwise:"none" bounds:"at least 16 characters" secret:"true" help:"Bearer token for /metrics and for reasons in /readyz; required unless on loopback."`
	ReadyWithin env.Duration `envconfig:"DISPATCHER_READY_WITHIN" default:"10s" min:"5s" max:"1h" help:"Time within which the database must have taken a change for /readyz to be 200."`

	LogLevel  env.String `envconfig:"DISPATCHER_LOG_LEVEL" default:"info" oneof:"debug|info|warn|error" help:"The least important lines to log, to stderr."`
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
  DISPATCHER_SINKS lists them, separated by blanks. Each is NAME=URL, or a URL alone, whose
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
