package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/clock"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// A memory is a sink that stores the events it gets.
type memory struct {
	mu     sync.Mutex
	events []event.Event
	answer func(event.Event) error // nil: acknowledges all
	delay  time.Duration
}

func (m *memory) Publish(ctx context.Context, events []event.Event) []error {
	return dispatcher.BySubject(ctx, events, 8, func(_ context.Context, e event.Event) error {
		if m.delay > 0 {
			time.Sleep(m.delay)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.events = append(m.events, e)
		if m.answer != nil {
			return m.answer(e)
		}
		return nil
	})
}

func (m *memory) Close() error { return nil }

// got returns the events received so far, in order.
func (m *memory) got() []event.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.events)
}

func (m *memory) set(answer func(event.Event) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answer = answer
}

// dispatch runs a dispatcher until the test ends or stop is called.
func dispatch(t *testing.T, pool *pgxpool.Pool, change func(*dispatcher.Config), sinks ...dispatcher.Target) (stop func()) {
	t.Helper()
	c := dispatcher.Config{
		Pool: pool, Source: "/test", Sinks: sinks, Claim: 2 * time.Second, PollInterval: 5 * time.Millisecond,
		Backoff: run.Backoff{Base: 20 * time.Millisecond, Cap: 100 * time.Millisecond}, MaxAttempts: 4, Grace: time.Second,
	}
	if change != nil {
		change(&c)
	}
	d, err := dispatcher.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// emit appends n events to each of the given number of new aggregates. The payload of the first event of an aggregate is
// {"n": 1}, of the second {"n": 2}, and so on.
func emit(t *testing.T, pool *pgxpool.Pool, typ string, aggregates, n int) (ids []uuid.UUID) {
	t.Helper()
	for range aggregates {
		ids = append(ids, uuid.New())
	}
	_, err := pool.Exec(t.Context(), `
		SELECT outbox_append_v1(array_agg(NULL::uuid), array_agg(a ORDER BY n), array_agg($2::text), array_agg(jsonb_build_object('n', n) ORDER BY n))
		FROM generate_series(1, $3) AS n, unnest($1::uuid[]) AS a`, ids, typ, n)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func count(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

const openEvents = `SELECT count(*) FROM outbox_event WHERE published_at IS NULL AND parked_at IS NULL`

func drained(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.Await(t, "the outbox to drain", func() bool { return count(t, pool, openEvents) == 0 })
}

// inOrder checks that each aggregate's events came in order, apart from repetitions.
func inOrder(t *testing.T, events []event.Event) {
	t.Helper()
	last := map[string]int{}
	for _, e := range events {
		var n int
		if _, err := fmt.Sscanf(string(e.Data()), `{"n": %d}`, &n); err != nil {
			t.Fatalf("payload %s: %v", e.Data(), err)
		}
		if n > last[e.Subject()]+1 {
			t.Fatalf("aggregate %s: %d came after %d", e.Subject(), n, last[e.Subject()])
		}
		last[e.Subject()] = max(last[e.Subject()], n)
	}
}

// An event arrives with the attributes that CloudEvents requires and with those of its row.
func TestAttributes(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	id, aggregate := uuid.New(), uuid.New()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Append(t.Context(), tx, outbox.Event{ID: id, Aggregate: aggregate, Type: "invoice.charged.v1",
		Payload: map[string]any{"cents": 700}, Headers: map[string]string{"traceparent": "00-1", "Content-Language": "de", "id": "never"}}); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	drained(t, pool)
	e := sink.got()[0]
	if err := e.Validate(); err != nil {
		t.Error(err)
	}
	got := []any{e.ID(), e.Source(), e.Type(), e.Subject(), e.DataContentType(), string(e.Data()),
		e.Extensions()["partitionkey"], e.Extensions()["traceparent"], e.Extensions()["contentlanguage"], len(e.Extensions())}
	want := []any{id.String(), "/test", "invoice.charged.v1", aggregate.String(), "application/json", `{"cents": 700}`,
		aggregate.String(), "00-1", "de", 3}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if d := time.Since(e.Time()).Abs(); d > time.Minute {
		t.Errorf("its time is %s away", d)
	}
}

// Several dispatchers share the work. Without faults no event comes twice, and the events of each aggregate
// come in order.
func TestShared(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	emit(t, pool, "test.told", 500, 20)
	for range 4 {
		dispatch(t, pool, func(c *dispatcher.Config) { c.Claim = time.Minute }, dispatcher.Target{Name: "memory", Sink: sink})
	}
	drained(t, pool)
	got := sink.got()
	inOrder(t, got)
	if len(got) != 10_000 {
		t.Errorf("10000 events came %d times", len(got))
	}
}

// W51: events that are always rejected delay only their own aggregates, and are parked.
func TestPoisonAtTheHead(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	sink.set(func(e event.Event) error {
		if e.Type() == "test.poison" {
			return dispatcher.Reject(errors.New("no, thank you"))
		}
		return nil
	})
	emit(t, pool, "test.poison", 100, 1)
	emit(t, pool, "test.told", 900, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	pgtest.Await(t, "the others to be published", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL`) == 900
	})
	pgtest.Await(t, "the rest to be parked", func() bool {
		emit(t, pool, "test.told", 1, 1) // if the sink acknowledged nothing at all, it would be blamed instead
		return count(t, pool, openEvents+` AND event_type = 'test.poison'`) == 0
	})
	if n := count(t, pool, `SELECT count(*) FROM outbox_delivery WHERE parked_at IS NOT NULL AND rejected = 3 AND last_error = 'no, thank you'`); n != 100 {
		t.Errorf("%d are parked with the reason, want 100", n)
	}
	sink.set(nil)
	if n := count(t, pool, `SELECT outbox_replay_parked('memory', '{test.}')`); n != 100 {
		t.Errorf("%d are to be tried again, want 100", n)
	}
	drained(t, pool)
	if n := count(t, pool, `SELECT count(*) FROM outbox_event WHERE published_at IS NULL`); n != 0 {
		t.Errorf("%d are not published", n)
	}
}

// If a sink rejects every event, far more than three times each, only the event that it rejects for good is
// parked. Once the sink is repaired it gets all the others.
func TestRejectionOfAll(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	sink.set(func(e event.Event) error {
		if e.Type() == "test.huge" {
			return dispatcher.RejectForGood(errors.New("too large"))
		}
		return dispatcher.Reject(errors.New("I have lost my memory"))
	})
	emit(t, pool, "test.told", 50, 3)
	emit(t, pool, "test.huge", 1, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	pgtest.Await(t, "many tries", func() bool { return len(sink.got()) > 50*10 })
	if n := count(t, pool, `SELECT count(*) FROM outbox_delivery WHERE parked_at IS NOT NULL`); n != 1 {
		t.Errorf("%d are parked, want 1", n)
	}
	failed := map[string]bool{} // once the sink is back, some events fail once more
	sink.set(func(e event.Event) error {
		if e.Subject() < "8" && !failed[e.ID()] {
			failed[e.ID()] = true
			return errors.New("not now")
		}
		return nil
	})
	drained(t, pool)
	inOrder(t, sink.got())
	if n := count(t, pool, `SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL`); n != 150 {
		t.Errorf("%d are published, want 150", n)
	}
}

// An event that fails is retried, in its aggregate's order, while other aggregates continue.
func TestRetry(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	tries := map[string]int{}
	sink.set(func(e event.Event) error {
		if tries[e.ID()]++; tries[e.ID()] < 3 && strings.Contains(string(e.Data()), "5") && e.Subject() < "8" {
			return errors.New("not now")
		}
		return nil
	})
	emit(t, pool, "test.told", 50, 20)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool)
	inOrder(t, sink.got())
	if n := count(t, pool, `SELECT count(*) FROM outbox_delivery`); n != 0 {
		t.Errorf("%d deliveries are left over", n)
	}
}

// While a sink is down, no attempt is charged, no event is parked, and another sink gets its events. outbox_sink shows
// that the sink is down, and later that it is back; the log reports its return once.
func TestSinkDown(t *testing.T) {
	pool, down, up := pgtest.New(t), &memory{}, &memory{}
	for name, failure := range map[string]error{"unavailable": dispatcher.Unavailable(errors.New("no route"), 0), "every event fails": errors.New("status 500")} {
		t.Run(name, func(t *testing.T) {
			down.set(func(event.Event) error { return failure })
			emit(t, pool, "test.told", 30, 5)
			log := &journal{}
			stop := dispatch(t, pool, func(c *dispatcher.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) }, dispatcher.Target{Name: "down", Sink: down}, dispatcher.Target{Name: "up", Sink: up})
			pgtest.Await(t, "the other sink to have all", func() bool {
				return count(t, pool, `SELECT count(*) FROM outbox_event WHERE NOT 'up' = ANY (coalesce(delivered_to, '{}'))`) == 0
			})
			time.Sleep(2 * time.Second)
			if n := count(t, pool, `SELECT count(*) FROM outbox_delivery WHERE parked_at IS NOT NULL`); n != 0 {
				t.Errorf("%d were parked", n)
			}
			if n := count(t, pool, `SELECT coalesce(max(attempt), 0) FROM outbox_delivery`); n != 0 {
				t.Errorf("an event was charged with %d tries", n)
			}
			if n := count(t, pool, openEvents); n != 150 {
				t.Errorf("%d are open, want 150", n)
			}
			if n := count(t, pool, `SELECT count(*) FROM outbox_sink WHERE name = 'down' AND down_since < now() - interval '1 second' AND last_error IS NOT NULL OR name = 'up' AND down_since IS NULL`); n != 2 {
				t.Errorf("outbox_sink does not tell that it is down")
			}
			down.set(nil)
			drained(t, pool)
			pgtest.Await(t, "it to be noted that the sink is back", func() bool {
				return count(t, pool, `SELECT count(*) FROM outbox_sink WHERE name = 'down' AND down_since IS NULL AND last_error IS NULL AND back_at > now() - interval '1 minute'`) == 1
			})
			stop()
			inOrder(t, up.got())
			if n := strings.Count(log.String(), "sink takes events again"); n != 1 {
				t.Errorf("the log says %d times that it is back: %s", n, log.String())
			}
		})
	}
}

// Each sink gets only the event types of its Target.Types. An event that no sink wants is marked published.
func TestRouting(t *testing.T) {
	pool, all, invoices := pgtest.New(t), &memory{}, &memory{}
	emit(t, pool, "invoice.charged", 3, 1)
	emit(t, pool, "order.placed", 4, 1)
	emit(t, pool, "internal.note", 5, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "orders", Sink: all, Types: []string{"order.", "invoice."}},
		dispatcher.Target{Name: "invoices", Sink: invoices, Types: []string{"invoice."}})
	drained(t, pool)
	if a, i := len(all.got()), len(invoices.got()); a != 7 || i != 3 {
		t.Errorf("%d and %d events came, want 7 and 3", a, i)
	}
	for _, row := range []struct {
		where string
		want  int
	}{
		{`event_type = 'invoice.charged' AND delivered_to @> '{orders,invoices}'`, 3},
		{`event_type = 'order.placed' AND delivered_to = '{orders}'`, 4},
		{`event_type = 'internal.note' AND delivered_to IS NULL AND published_at IS NOT NULL`, 5},
	} {
		if n := count(t, pool, `SELECT count(*) FROM outbox_event WHERE `+row.where); n != row.want {
			t.Errorf("%d events with %s, want %d", n, row.where, row.want)
		}
	}
}

// W52: an event that commits late is delivered, even if reading passed its id long before.
func TestLateCommit(t *testing.T) {
	pool, sink, other := pgtest.New(t), &memory{}, &memory{}
	other.set(func(event.Event) error { return dispatcher.Unavailable(errors.New("no route"), 0) })
	late, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Append(t.Context(), late, outbox.Event{Aggregate: uuid.New(), Type: "test.late", Payload: 1}); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink}, dispatcher.Target{Name: "other", Sink: other})
	emit(t, pool, "test.told", 200, 1)
	pgtest.Await(t, "the others", func() bool { return len(sink.got()) == 200 })
	raise := func() {
		for range 3 {
			if err := delivery.RaiseFloors(t.Context(), pool, "memory"); err != nil {
				t.Fatal(err)
			}
		}
	}
	raise()
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE sink = 'memory' AND floor > 0`); n > 0 {
		t.Errorf("%d floors have passed an id that may still be committed", n)
	}
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the late one", func() bool { return len(sink.got()) == 201 })
	pgtest.Await(t, "floors to rise", func() bool {
		raise()
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE sink = 'memory' AND floor > 0`) == delivery.Lanes
	})
}

// A dispatcher that was frozen for longer than its claim cannot mark events that others have claimed since.
func TestLostClaim(t *testing.T) {
	pool := pgtest.New(t)
	emit(t, pool, "test.told", 3, 2)
	if err := delivery.Register(t.Context(), pool, "memory", nil); err != nil {
		t.Fatal(err)
	}
	limits := delivery.Limits{Events: 100, Bytes: 1 << 20, Lanes: 64, Length: time.Millisecond}
	frozen, err := delivery.Acquire(t.Context(), pool, "memory", "frozen", limits)
	if err != nil || len(frozen.Rows) != 6 {
		t.Fatalf("%d rows, %v", len(frozen.Rows), err)
	}
	time.Sleep(5 * time.Millisecond)
	other, err := delivery.Acquire(t.Context(), pool, "memory", "other", limits)
	if err != nil || len(other.Rows) != 6 {
		t.Fatalf("%d rows, %v", len(other.Rows), err)
	}
	var outcomes []delivery.Outcome
	for _, row := range frozen.Rows {
		outcomes = append(outcomes, delivery.Outcome{ID: row.ID, Delivered: true})
	}
	if n, err := delivery.Mark(t.Context(), pool, frozen, outcomes); n != 0 || err != nil {
		t.Errorf("%d were marked under a lost claim, %v", n, err)
	}
	if n := count(t, pool, openEvents); n != 6 {
		t.Errorf("%d are open, want 6", n)
	}
	if n, err := delivery.Mark(t.Context(), pool, other, outcomes); n != 6 || err != nil {
		t.Errorf("%d were marked, %v; want 6", n, err)
	}
}

// W60: a batch is bounded by bytes, and an event larger than the bound is a batch of its own.
func TestBytes(t *testing.T) {
	pool := pgtest.New(t)
	if err := delivery.Register(t.Context(), pool, "memory", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_event (aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'test.large', to_jsonb(repeat('x', 100000)) FROM generate_series(1, 50)`); err != nil {
		t.Fatal(err)
	}
	for limit, want := range map[int]int{1_000_000: 9, 1000: 1} {
		c, err := delivery.Acquire(t.Context(), pool, "memory", "test", delivery.Limits{Events: 1000, Bytes: limit, Lanes: 64, Length: time.Minute})
		if err != nil || len(c.Rows) != want {
			t.Errorf("%d rows of 100 kB in %d bytes, %v; want %d", len(c.Rows), limit, err, want)
		}
		if _, err := delivery.Mark(t.Context(), pool, c, nil); err != nil {
			t.Error(err)
		}
	}
}

// outbox_replay publishes the events of a time span again to one sink, with the same ids and bytes.
func TestReplay(t *testing.T) {
	pool, a, b := pgtest.New(t), &memory{}, &memory{}
	emit(t, pool, "test.told", 5, 3)
	stop := dispatch(t, pool, nil, dispatcher.Target{Name: "a", Sink: a}, dispatcher.Target{Name: "b", Sink: b})
	drained(t, pool)
	pgtest.Await(t, "floors to rise", func() bool {
		for _, sink := range []string{"a", "b"} {
			if err := delivery.RaiseFloors(t.Context(), pool, sink); err != nil {
				t.Fatal(err)
			}
		}
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`) == 2*delivery.Lanes
	})
	if n := count(t, pool, `SELECT outbox_replay(now() - interval '1 hour', sink => 'b')`); n != 15 {
		t.Errorf("%d are replayed, want 15", n)
	}
	drained(t, pool)
	stop()
	if na, nb := len(a.got()), len(b.got()); na != 15 || nb != 30 {
		t.Fatalf("%d and %d came, want 15 and 30", na, nb)
	}
	bytes := map[string]string{}
	for _, e := range b.got() {
		text, err := e.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if first, again := bytes[e.ID()]; again && first != string(text) {
			t.Errorf("an event came as\n%s\nand as\n%s", first, text)
		}
		bytes[e.ID()] = string(text)
	}
	if len(bytes) != 15 {
		t.Errorf("%d ids, want 15", len(bytes))
	}
}

// After a sink was abandoned, events that were open only for it are published. A sink that was served recently, or does
// not exist, cannot be abandoned.
func TestAbandon(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	if err := delivery.Register(t.Context(), pool, "gone", nil); err != nil {
		t.Fatal(err)
	}
	emit(t, pool, "test.told", 5, 3)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	pgtest.Await(t, "the sink to have all", func() bool { return len(sink.got()) == 15 })
	pgtest.Await(t, "them to be marked", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_event WHERE 'memory' = ANY (delivered_to)`) == 15
	})
	if n := count(t, pool, openEvents); n != 15 {
		t.Errorf("%d are open, want 15", n)
	}
	if _, err := delivery.Abandon(t.Context(), pool, "gone", time.Minute); !errors.Is(err, delivery.ErrServed) {
		t.Errorf("a sink that somebody has just served: %v", err)
	}
	if n, err := delivery.Abandon(t.Context(), pool, "gone", 0); n != 15 || err != nil {
		t.Errorf("%d were open for it, %v; want 15", n, err)
	}
	drained(t, pool)
	if len(sink.got()) != 15 {
		t.Errorf("%d came, want 15", len(sink.got()))
	}
	if _, err := delivery.Abandon(t.Context(), pool, "gone", 0); !errors.Is(err, delivery.ErrNoSink) {
		t.Errorf("a sink that is not there: %v", err)
	}
}

// K47: the payload of an appended event cannot be changed.
func TestEventsStay(t *testing.T) {
	pool := pgtest.New(t)
	emit(t, pool, "test.told", 1, 1)
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_event SET payload = '{}'`); err == nil || !strings.Contains(err.Error(), "cannot be changed") {
		t.Errorf("a payload was changed: %v", err)
	}
}

// A dispatcher that is stopped at any moment leaves no lane claimed. Otherwise others would wait for the claim
// to expire.
func TestStopLeavesNoClaim(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	for n := range 20 {
		emit(t, pool, "test.told", 50, 2)
		stop := dispatch(t, pool, func(c *dispatcher.Config) { c.Claim = time.Hour }, dispatcher.Target{Name: "memory", Sink: sink})
		time.Sleep(time.Duration(n) * 2 * time.Millisecond)
		stop()
		if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE claim_token IS NOT NULL`); n > 0 {
			t.Fatalf("%d lanes are claimed by nobody", n)
		}
	}
}

// K34: an event whose created_at is infinite or out of range is published, too, and does not stop the others.
func TestStrangeTimes(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	pgtest.Unbound(t, pool.Config().ConnString())
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_event (aggregate_id, event_type, payload, created_at)
		SELECT gen_random_uuid(), 'test.told', '1', at FROM unnest('{infinity,-infinity,4000-01-01 BC,20000-01-01,2026-01-02}'::timestamptz[]) AS at`); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool)
	for _, e := range sink.got() {
		if _, err := e.MarshalJSON(); err != nil || e.Time().Year() != 2026 && e.Time().Year() != 1970 {
			t.Errorf("%s, %v", e.Time(), err)
		}
	}
	if n := len(sink.got()); n != 5 {
		t.Errorf("%d came, want 5", n)
	}
}

// A dispatcher that starts while the database is read-only waits for it.
func TestDatabaseAwayAtStart(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	ids := emit(t, pool, "test.told", 1, 1)
	if _, err := pool.Exec(t.Context(), `ALTER DATABASE `+pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()+` SET default_transaction_read_only = on`); err != nil {
		t.Fatal(err)
	}
	other, err := pgxpool.NewWithConfig(t.Context(), pool.Config())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	stop := dispatch(t, other, nil, dispatcher.Target{Name: "memory", Sink: sink})
	defer stop() // before the pool is closed
	time.Sleep(300 * time.Millisecond)
	if _, err := pool.Exec(t.Context(), `ALTER DATABASE `+pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()+` RESET default_transaction_read_only`); err != nil {
		t.Fatal(err)
	}
	other.Reset() // closes the sessions, as a server does when it becomes the primary
	pgtest.Await(t, "the event", func() bool { return len(sink.got()) == 1 && sink.got()[0].Subject() == ids[0].String() })
}

// Registering a sink is retried after errors that fault.Of classifies as temporary. Run returns any other error.
func TestRegistrationIsRefused(t *testing.T) {
	for state, passes := range map[string]bool{"40001": true, "28000": true, "42P05": true, "53200": true, "55P03": true, "25006": true, "XX777": false, "55000": false, "53000": false} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			if _, err := pool.Exec(t.Context(), `
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '`+state+`'; END $$;
				CREATE TRIGGER refuse BEFORE INSERT ON outbox_sink FOR EACH ROW EXECUTE FUNCTION refuse()`); err != nil {
				t.Fatal(err)
			}
			d, err := dispatcher.New(dispatcher.Config{Pool: pool, Source: "/test", Sinks: []dispatcher.Target{{Name: "memory", Sink: &memory{}}}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := d.Run(ctx); (err == nil) != passes {
				t.Error(err)
			}
		})
	}
}

// A watch is a sink that compares clock.Now with this machine's clock.
type watch struct{ ahead chan time.Duration }

func (c watch) Publish(ctx context.Context, events []event.Event) []error {
	c.ahead <- time.Until(clock.Now(ctx))
	return make([]error, len(events))
}

func (watch) Close() error { return nil }

// clock.Now returns the database's time to a sink, even if it is an hour from this machine's.
func TestTimeOfDatabase(t *testing.T) {
	pool := pgtest.New(t)
	for _, create := range []string{`CREATE SCHEMA skewed`,
		`CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$`} {
		if _, err := pool.Exec(t.Context(), create); err != nil {
			t.Fatal(err)
		}
	}
	config := pool.Config()
	config.ConnConfig.RuntimeParams["search_path"] = "skewed, pg_catalog, public"
	skewed, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(skewed.Close)
	emit(t, skewed, "test.told", 1, 1)
	sink := watch{make(chan time.Duration, 1)}
	dispatch(t, skewed, nil, dispatcher.Target{Name: "clock", Sink: sink})
	if ahead := <-sink.ahead; (ahead - time.Hour).Abs() > 10*time.Second {
		t.Errorf("the time is %v ahead, want an hour", ahead)
	}
}

// A faint is a sink that panics with what it is given.
type faint struct{}

func (faint) Publish(_ context.Context, events []event.Event) []error {
	panic(string(events[0].Data()))
}
func (faint) Close() error { return nil }

// A sink's panic is logged by its type and its stack alone, because its value may quote an event.
func TestPanicStaysOutOfTheLog(t *testing.T) {
	pool, log := pgtest.New(t), &journal{}
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return outbox.Append(t.Context(), tx, outbox.Event{Aggregate: uuid.New(), Type: "test.told", Payload: map[string]string{"card": "4111 1111"}})
	})
	if err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, func(c *dispatcher.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) }, dispatcher.Target{Name: "faint", Sink: faint{}})
	pgtest.Await(t, "the panic to be logged", func() bool { return strings.Contains(log.String(), "a sink panicked") })
	if text := log.String(); strings.Contains(text, "4111 1111") || !strings.Contains(text, "panic=string") || !strings.Contains(text, "stack=") {
		t.Error(text)
	}
}
