package main

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watersql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// forwarded is watermill's outbox: messages in a table, and the forwarder that publishes them. It takes part in the
// events scenario only.
type forwarded struct{ queue bool }

const (
	forwardedShipped = "backlog of %s, log with offsets, 100 at once as shipped"
	forwardedGroup   = "backlog of %s, log with offsets"
	forwardedQueue   = "backlog of %s, queue, deleted when published"

	forwardBatch = 1000
	forwardPoll  = 20 * time.Millisecond
	forwardConns = 4
	forwardTopic = "outbox"
	forwardTo    = "bench"
)

func (forwarded) name() string { return "watermill" }
func (forwarded) version() string {
	return fmt.Sprintf("%s, watermill-sql %s", moduleVersion("github.com/ThreeDotsLabs/watermill"), moduleVersion("github.com/ThreeDotsLabs/watermill-sql/v4"))
}
func (forwarded) settings() string {
	return fmt.Sprintf("forwarder on pgx, SubscribeBatchSize %d unless a row says otherwise, PollInterval %v; a log with offsets for one consumer group"+
		" (DefaultPostgreSQLSchema), or a queue with DeleteOnAck (PostgreSQLQueueSchema); one process, since a consumer group has one reader at a time",
		forwardBatch, forwardPoll)
}

func (e forwarded) schema(batch int) watersql.SchemaAdapter {
	if e.queue {
		return watersql.PostgreSQLQueueSchema{SubscribeBatchSize: batch}
	}
	return watersql.DefaultPostgreSQLSchema{SubscribeBatchSize: batch}
}

func (e forwarded) subscriber(pool *pgxpool.Pool, batch int) (*watersql.Subscriber, error) {
	var offsets watersql.OffsetsAdapter = watersql.DefaultPostgreSQLOffsetsAdapter{}
	if e.queue {
		offsets = watersql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true}
	}
	return watersql.NewSubscriber(watersql.BeginnerFromPgx(pool), watersql.SubscriberConfig{
		SchemaAdapter: e.schema(batch), OffsetsAdapter: offsets, PollInterval: forwardPoll,
	}, watermill.NopLogger{})
}

func (e forwarded) install(_ context.Context, db *database) error {
	s, err := e.subscriber(db.Pool, 0)
	if err != nil {
		return err
	}
	return s.SubscribeInitialize(forwardTopic)
}

// load appends n messages with the bodies of our events, 1,000 per transaction.
func (e forwarded) load(ctx context.Context, db *database, n int, _ kind) error {
	p := forwarding{db.Pool, e}
	for begin := 1; begin <= n; begin += forwardBatch {
		var ns []int
		for k := begin; k < min(begin+forwardBatch, n+1); k++ {
			ns = append(ns, k)
		}
		if err := p.many(ctx, ns); err != nil {
			return err
		}
	}
	return nil
}

// busy reports whether messages are left: the forwarder records what it has published in the transaction in which it
// has read it.
func (e forwarded) busy(ctx context.Context, db *database) (busy bool, err error) {
	query := `SELECT coalesce((SELECT (transaction_id, "offset") FROM watermill_outbox ORDER BY transaction_id DESC, "offset" DESC LIMIT 1)
		> (SELECT (last_processed_transaction_id, offset_acked) FROM watermill_offsets_outbox), false)`
	if e.queue {
		query = `SELECT EXISTS (SELECT FROM watermill_outbox)`
	}
	err = db.QueryRow(ctx, query).Scan(&busy)
	return busy, err
}

func (forwarded) stored(ctx context.Context, db *database) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT count(*) FROM watermill_outbox`).Scan(&n)
	return n, err
}

// unsettled counts the messages that are not published yet. Published messages of a queue are deleted.
func (e forwarded) unsettled(ctx context.Context, db *database, n int) (left int, err error) {
	query := `SELECT $1::int - count(*) FROM watermill_outbox m, watermill_offsets_outbox o
		WHERE (m.transaction_id, m."offset") <= (o.last_processed_transaction_id, o.offset_acked)`
	if e.queue {
		query = `SELECT count(*) FROM watermill_outbox WHERE $1::int > 0`
	}
	err = db.QueryRow(ctx, query, n).Scan(&left)
	return left, err
}

func (forwarded) process(t task) *exec.Cmd { return exec.Command(self(), "child", t.String()) }

func (e forwarded) producer(_ task, pool *pgxpool.Pool) (producer, error) {
	return forwarding{pool, e}, nil
}

// forwarding appends messages, each call in a transaction of its own.
type forwarding struct {
	pool *pgxpool.Pool
	to   forwarded
}

func (p forwarding) one(ctx context.Context, n int) error { return p.many(ctx, []int{n}) }

func (p forwarding) many(ctx context.Context, ns []int) error {
	all := make([]*message.Message, len(ns))
	for k, n := range ns {
		e := eventOf(n)
		all[k] = message.NewMessage(e.ID.String(), []byte(jsonOf(e.Payload)))
		all[k].Metadata = message.Metadata{"aggregate": e.Aggregate.String(), "type": e.Type}
	}
	return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		inner, err := watersql.NewPublisher(watersql.TxFromPgx(tx), watersql.PublisherConfig{SchemaAdapter: p.to.schema(0)}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		return forwarder.NewPublisher(inner, forwarder.PublisherConfig{ForwarderTopic: forwardTopic}).Publish(forwardTo, all...)
	})
}

// carryOut is one forwarder process with a publisher that does nothing.
func (forwarded) carryOut(ctx context.Context, t task, c *conversation) error {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return err
	}
	config.MaxConns = forwardConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	s, err := forwarded{t.Queue}.subscriber(pool, t.Batch)
	if err != nil {
		return err
	}
	f, err := forwarder.NewForwarder(s, &nowhereElse{&counted{c: c, told: t.Told}}, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwardTopic})
	if err != nil || !c.ready() {
		return err
	}
	return f.Run(ctx)
}

// nowhereElse is a publisher that accepts everything at once.
type nowhereElse struct{ *counted }

// Publish counts.
func (w *nowhereElse) Publish(_ string, messages ...*message.Message) error {
	at := clock()
	numbers := make([]int, len(messages))
	for k, m := range messages {
		numbers[k] = numberOfEvent(m.UUID)
	}
	w.count(numbers, at)
	return nil
}

// Close does nothing.
func (*nowhereElse) Close() error { return nil }
