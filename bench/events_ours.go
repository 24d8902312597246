package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// oursEvents is the outbox of this repository, and its dispatcher.
type oursEvents struct{ ours }

const (
	noopEvent       = "bench.noop.v1"
	eventAggregates = 10_000
	dispatcherConns = 4 // as cmd/dispatcher uses for one sink

	// The aggregate, id and payload of event number g, about 200 bytes in all.
	aggregateOf = `md5('aggregate ' || g % 10000)::uuid`
	numberOf    = `('00000000-0000-7000-8000-' || lpad(to_hex(g), 12, '0'))::uuid`
	payloadOf   = `jsonb_build_object('n', g, 'order', md5('order ' || g), 'customer', md5('customer ' || g), 'text', repeat('x', 84))`
)

// poisoned is the aggregate that the sink refuses.
var poisoned = uuid.MustParse("00000000-0000-7000-8000-ffffffffffff")

func (oursEvents) settings() string {
	return fmt.Sprintf("all as shipped: batches of %d, a look every %v while idle, %d connections for a dispatcher",
		shipped.EventBatch, shipped.EventPollInterval, dispatcherConns)
}

// load appends n events to the existing ones.
func (oursEvents) load(ctx context.Context, db *database, n int, _ kind) error {
	_, err := db.Exec(ctx, `
		INSERT INTO outbox_event (event_uuid, aggregate_id, event_type, payload)
		SELECT `+numberOf+`, `+aggregateOf+`, $2, `+payloadOf+`
		FROM (SELECT count(*)::int AS n FROM outbox_event WHERE event_type = $2) before, generate_series(before.n + 1, before.n + $1::int) g`, n, noopEvent)
	return err
}

// busy looks for claims: an event that was published is marked when its claim is given back.
func (oursEvents) busy(ctx context.Context, db *database) (busy bool, err error) {
	err = db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_lane WHERE sink = $1 AND claim_token IS NOT NULL)`, openSink).Scan(&busy)
	return busy, err
}

func (oursEvents) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM outbox_event WHERE event_type = $1`, noopEvent).Scan(&n)
	return n, err
}

// unsettled counts the events that are not recorded as published to the sink exactly once.
func (oursEvents) unsettled(ctx context.Context, db *database, n int) (left int, err error) {
	err = db.QueryRow(ctx, `
		SELECT $1::int - count(*) FROM outbox_event
		WHERE event_type = $2 AND delivered_to = ARRAY[$3]::text[]
		  AND (published_at IS NULL) = EXISTS (SELECT FROM outbox_sink WHERE name <> $3)`, n, noopEvent, openSink).Scan(&left)
	return left, err
}

func (e oursEvents) process(t task) *exec.Cmd { return e.ours.process(t) }

func (oursEvents) producer(_ task, pool *pgxpool.Pool) (producer, error) { return appender{pool}, nil }

// An appender commits events, each in a transaction of its own.
type appender struct{ pool *pgxpool.Pool }

func (a appender) one(ctx context.Context, n int) error {
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error { return outbox.Append(ctx, tx, eventOf(n)) })
}

func (a appender) many(ctx context.Context, ns []int) error {
	all := make([]outbox.Event, len(ns))
	for k, n := range ns {
		all[k] = eventOf(n)
	}
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error { return outbox.Append(ctx, tx, all...) })
}

// eventOf returns an event like those that load appends.
func eventOf(n int) outbox.Event {
	return outbox.Event{ID: numbered(n), Aggregate: uuid.NewMD5(uuid.Nil, strconv.AppendInt(nil, int64(n%eventAggregates), 10)), Type: noopEvent, Payload: contentOf(n)}
}

// numbered is the id of the nth event.
func numbered(n int) uuid.UUID {
	return uuid.MustParse(fmt.Sprintf("00000000-0000-7000-8000-%012x", n))
}

// numberOfEvent returns the number of the event with this id.
func numberOfEvent(id string) int {
	n, err := strconv.ParseInt(id[len(id)-12:], 16, 64)
	if err != nil {
		panic(err) // the bench has numbered the events
	}
	return int(n)
}

// A content is the payload of an event, about 200 bytes.
type content struct {
	N        int    `json:"n"`
	Order    string `json:"order"`
	Customer string `json:"customer"`
	Text     string `json:"text"`
}

func contentOf(n int) content {
	return content{n, fmt.Sprintf("%032x", n), fmt.Sprintf("%032x", n%eventAggregates), strings.Repeat("x", 84)}
}

// publish is one dispatcher process.
func (oursEvents) publish(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	config.MaxConns = dispatcherConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	sink, err := t.sink(c)
	if err != nil {
		return err
	}
	d, err := dispatcher.New(dispatcher.Config{
		Pool: pool, Source: "/bench", Sinks: []dispatcher.Target{{Name: openSink, Sink: sink}},
		Backoff: run.Backoff{Base: time.Second},
		Logger:  slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil || !c.ready() {
		return err
	}
	return d.Run(ctx)
}

// nowhere is a sink that acknowledges everything at once, except events of the poisoned aggregate.
type nowhere struct{ *counted }

// Publish counts.
func (w *nowhere) Publish(_ context.Context, events []event.Event) []error {
	at := clock()
	errs := make([]error, len(events))
	numbers, refused := make([]int, 0, len(events)), poisoned.String()
	refusal := errPoisoned
	for k, e := range events {
		if e.Subject() == refused {
			errs[k], refusal = refusal, dispatcher.ErrNotTried
			continue
		}
		numbers = append(numbers, numberOfEvent(e.ID()))
	}
	w.count(numbers, at)
	return errs
}

// Close does nothing.
func (*nowhere) Close() error { return nil }

var errPoisoned = errors.New("the sink does not take this one")

// counted records which events were published.
type counted struct {
	c    *conversation
	told bool // reports each event with its time

	mu   sync.Mutex
	seen []uint64 // one bit for each
}

func (d *counted) count(numbers []int, at int64) {
	d.mu.Lock()
	first := 0
	for _, n := range numbers {
		if word := n / 64; word >= len(d.seen) {
			d.seen = append(d.seen, make([]uint64, word+1)...)
		}
		if bit := uint64(1) << (n % 64); d.seen[n/64]&bit == 0 {
			d.seen[n/64] |= bit
			first++
		}
	}
	d.mu.Unlock()
	d.c.foreground.Add(int64(first))
	d.c.all.Add(int64(len(numbers)))
	if d.told {
		for _, n := range numbers {
			d.c.say("seen %d %d", n, at)
		}
	}
}
