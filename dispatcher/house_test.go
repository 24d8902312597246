package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// unguarded executes a script without bounds, triggers and foreign keys, to make rows that the guards would refuse.
func unguarded(t *testing.T, pool *pgxpool.Pool, script string) {
	t.Helper()
	pgtest.Unbound(t, pool.Config().ConnString())
	if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SET LOCAL session_replication_role = replica;"+script)
		return err
	}); err != nil {
		t.Fatalf("%.200s: %v", script, err)
	}
}

// setRights counts calls of outbox_set_right_v1.
type setRights struct{ n atomic.Int64 }

func (s *setRights) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "outbox_set_right_v1") {
		s.n.Add(1)
	}
	return ctx
}

func (s *setRights) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// While floors cannot be raised, SetRight runs every five seconds at most, because it reads all open events below the
// floors. A temporary error of raising them does not make it run.
func TestFloorsThatCannotBeRaised(t *testing.T) {
	for state, most := range map[string]int64{"40001": 1, "XX777": 4} { // one at the start
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			pool, seen := pgtest.New(t), &setRights{}
			config := pool.Config()
			config.ConnConfig.Tracer = seen
			traced, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(traced.Close)
			if _, err := pool.Exec(t.Context(), `
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '`+state+`'; END $$;
				CREATE TRIGGER refuse BEFORE UPDATE ON outbox_lane FOR EACH ROW WHEN (NEW.next_floor IS DISTINCT FROM OLD.next_floor) EXECUTE FUNCTION refuse()`); err != nil {
				t.Fatal(err)
			}
			dispatch(t, traced, nil, dispatcher.Target{Name: "memory", Sink: &memory{}})
			emit(t, pool, "test.told", 100, 1)
			drained(t, pool)
			time.Sleep(9 * time.Second)
			if n := seen.n.Load(); n > most || state == "XX777" && n < 3 {
				t.Errorf("it was set right %d times", n)
			}
		})
	}
}

// Floors rise twice a second even if it takes long to set lanes right, as it does beside a million events that another
// sink has not received.
func TestFloorsBesideSlowRepairs(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `
		CREATE OR REPLACE FUNCTION outbox_set_right_v1(only_sink text DEFAULT NULL) RETURNS text
		LANGUAGE sql SECURITY DEFINER AS $$ SELECT pg_sleep(1); SELECT 'nothing was wrong' $$`); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: &memory{}})
	time.Sleep(3 * time.Second)
	emit(t, pool, "test.told", 500, 1)
	within(t, 5*time.Second, "floors to rise", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`) == delivery.Lanes
	})
}

// damages are scripts that damage the lanes of the sink named memory.
var damages = map[string]string{
	"deleted":           `DELETE FROM outbox_lane WHERE sink = 'memory' AND lane % 2 = 0`,
	"all deleted":       `DELETE FROM outbox_lane WHERE sink = 'memory'`,
	"other numbers":     `UPDATE outbox_lane SET lane = CASE lane WHEN 5 THEN 32767 WHEN 6 THEN -32768 WHEN 7 THEN -1 ELSE 64 END WHERE sink = 'memory' AND lane BETWEEN 5 AND 8`,
	"another's":         `UPDATE outbox_lane SET sink = '' WHERE sink = 'memory' AND lane < 8`,
	"sink renamed":      `UPDATE outbox_sink SET name = 'other' WHERE name = 'memory'`,
	"sink deleted":      `DELETE FROM outbox_sink WHERE name = 'memory'; DELETE FROM outbox_lane WHERE sink = 'memory'`,
	"claimed for ever":  `UPDATE outbox_lane SET claim_token = gen_random_uuid(), claim_until = 'infinity' WHERE sink = 'memory' AND lane < 32`,
	"claimed for years": `UPDATE outbox_lane SET claim_token = NULL, claim_until = '9999-12-31' WHERE sink = 'memory' AND lane < 32`,
	"served later":      `UPDATE outbox_lane SET served_at = 'infinity' WHERE sink = 'memory' AND lane < 62`,
	"floor too high":    `UPDATE outbox_lane SET floor = 9223372036854775807 WHERE sink = 'memory'`,
	"floor too low":     `UPDATE outbox_lane SET floor = -9223372036854775808 WHERE sink = 'memory'`,
	"next floor":        `UPDATE outbox_lane SET next_floor = 9223372036854775807, next_xid = '0' WHERE sink = 'memory'`,
	"next transaction":  `UPDATE outbox_lane SET next_floor = 1, next_xid = '18446744073709551615' WHERE sink = 'memory'`,
	"no transaction":    `UPDATE outbox_lane SET next_floor = 1, next_xid = NULL WHERE sink = 'memory'`,
	"replays":           `UPDATE outbox_lane SET replays = 9223372036854775807 WHERE sink = 'memory'`,
}

// After any of the damages to outbox_lane, a running dispatcher and a newly started one deliver all events, floors
// rise, and events can be replayed.
func TestLanesAreMadeAnew(t *testing.T) {
	for name, damage := range damages {
		for _, running := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, running %t", name, running), func(t *testing.T) {
				t.Parallel()
				pool, sink := pgtest.New(t), &memory{}
				start := func() func() {
					return dispatch(t, pool, func(c *dispatcher.Config) { c.Claim = time.Minute }, dispatcher.Target{Name: "memory", Sink: sink})
				}
				emit(t, pool, "test.told", 300, 1)
				stop := start()
				drained(t, pool)
				if !running {
					stop()
				}
				unguarded(t, pool, damage)
				emit(t, pool, "test.told", 300, 1)
				if !running {
					start()
				}
				within(t, 20*time.Second, "delivery", func() bool {
					return count(t, pool, `SELECT count(*) FROM outbox_event WHERE 'memory' = ANY (delivered_to)`) == 600
				})
				inOrder(t, sink.got())
				within(t, 20*time.Second, "floors to rise", func() bool {
					return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE sink = 'memory' AND lane BETWEEN 0 AND 63 AND floor BETWEEN 1 AND (SELECT max(id) FROM outbox_event)`) == delivery.Lanes
				})
				before := len(sink.got())
				if n := count(t, pool, `SELECT outbox_replay('-infinity', sink => 'memory')`); n != 600 {
					t.Errorf("%d are replayed, want 600", n)
				}
				within(t, 20*time.Second, "the replay", func() bool { return len(sink.got()) >= before+600 })
			})
		}
	}
}

// A claim of the longest length allowed stays valid, also after SetRight. A longer one is refused.
func TestClaimsStand(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 10, 1)
	long := delivery.Limits{Events: 1000, Bytes: 1 << 20, Lanes: 64, Length: delivery.LongestClaim}
	c, err := delivery.Acquire(t.Context(), pool, "a", "test", long)
	if err != nil || len(c.Rows) != 10 {
		t.Fatalf("%d rows, %v", len(c.Rows), err)
	}
	if did, err := delivery.SetRight(t.Context(), pool, "a"); err != nil || did != "" {
		t.Fatal(did, err)
	}
	if again := claim(t, pool, "a"); again.Lanes > 0 {
		t.Errorf("%d lanes were claimed twice", again.Lanes)
	}
	if n := delivered(t, pool, c); n != 10 {
		t.Errorf("%d were marked, want 10", n)
	}
	if _, err := dispatcher.New(dispatcher.Config{Pool: pool, Source: "/", Claim: delivery.LongestClaim + time.Second, Sinks: []dispatcher.Target{{Name: "a", Sink: &memory{}}}}); err == nil ||
		!strings.Contains(err.Error(), "Claim: 1h0m1s") {
		t.Errorf("a claim that is longer: %v", err)
	}
}

const byHand = `INSERT INTO outbox_event (id, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE
	SELECT id, gen_random_uuid(), 'test.told', '{"n": 1}' FROM `

// Events whose ids were not drawn from the sequence are delivered, below the floors and above the sequence. They raise
// no floor above the last id drawn, so events that are appended afterwards are delivered too.
func TestIdsThatWereNotDrawn(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	emit(t, pool, "test.told", 300, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool)
	pgtest.Unbound(t, pool.Config().ConnString())
	if _, err := pool.Exec(t.Context(), byHand+`unnest('{-9223372036854775807,-5,0,9223372036854775806,9223372036854775807}'::bigint[]) AS id`); err != nil {
		t.Fatal(err)
	}
	within(t, 20*time.Second, "those above", func() bool { return count(t, pool, openEvents+` AND id > 1000`) == 0 })
	for range 5 {
		if err := delivery.RaiseFloors(t.Context(), pool, "memory"); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 300`); n > 0 {
		t.Errorf("%d floors have passed what was drawn", n)
	}
	emit(t, pool, "test.told", 300, 1)
	within(t, 10*time.Second, "those that were drawn", func() bool { return count(t, pool, openEvents+` AND id BETWEEN 1 AND 1000`) == 0 })
	within(t, time.Minute, "all", func() bool { return count(t, pool, openEvents) == 0 })
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 600`); n > 0 {
		t.Errorf("%d floors have passed what was drawn", n)
	}
	if last := count(t, pool, `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{"n": 1}')`); last != 601 {
		t.Errorf("the next id is %d, want 601: what is too far away is not followed", last)
	}
	drained(t, pool)
}

// If events have ids above the last value of the sequence, a running dispatcher advances the sequence past them within
// seconds, except past ids more than 2^40 above it. Events are delivered even if their ids, drawn from a sequence that
// was behind, are below the floors.
func TestSequenceBehind(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	emit(t, pool, "test.told", 300, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool)
	pgtest.Await(t, "floors to rise", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`) == delivery.Lanes
	})
	// The ids from 1 to 100 are free, as after retention.
	unguarded(t, pool, `DELETE FROM outbox_event WHERE id <= 100; SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 10)`)
	emit(t, pool, "test.told", 50, 1) // below the floors
	within(t, 20*time.Second, "those below the floors", func() bool { return count(t, pool, openEvents) == 0 })
	within(t, 20*time.Second, "the sequence", func() bool {
		return count(t, pool, `SELECT last_value FROM outbox_event_id_seq`) >= 300
	})
	if _, err := pool.Exec(t.Context(), byHand+`unnest(ARRAY[5000, 4000000, 2000000000000]) AS id`); err != nil {
		t.Fatal(err)
	}
	within(t, 20*time.Second, "the sequence", func() bool {
		return count(t, pool, `SELECT last_value FROM outbox_event_id_seq`) == 4_000_000
	})
	emit(t, pool, "test.told", 300, 1)
	within(t, 20*time.Second, "the rest", func() bool { return count(t, pool, openEvents) == 0 })
	if n := count(t, pool, `SELECT max(id) FROM outbox_event WHERE id < 2000000000000`); n != 4_000_300 {
		t.Errorf("the last id is %d, want 4000300", n)
	}
}

// While SetRight advances the sequence, concurrent appends to an aggregate still get ascending ids: the sequence never
// goes back. An append is refused only if it draws an id that was inserted by hand.
func TestSequenceIsSetRightUnderLoad(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "memory")
	var failed atomic.Int64
	ended, stop := make(chan bool, 4), make(chan bool)
	for range cap(ended) {
		go func() {
			defer func() { ended <- true }()
			for last, id := int64(0), int64(0); ; last = id {
				select {
				case <-stop:
					return
				default:
				}
				err := pool.QueryRow(t.Context(), `SELECT outbox_emit('00000000-0000-4000-8000-000000000001', 'test.told', '{}')`).Scan(&id)
				var refused *pgconn.PgError
				switch {
				case errors.As(err, &refused) && refused.Code == "23505":
					failed.Add(1)
				case err != nil:
					t.Error(err)
					return
				case id <= last:
					t.Errorf("%d was drawn after %d", id, last)
				}
			}
		}()
	}
	const times = 40
	for n := range times {
		if _, err := pool.Exec(t.Context(), byHand+`(SELECT last_value + $1 FROM outbox_event_id_seq) AS s (id)`, []int{200, 1000, 200_000}[n%3]); err != nil {
			t.Fatal(err)
		}
		if _, err := delivery.SetRight(t.Context(), pool, "memory"); err != nil {
			t.Fatal(err)
		}
		if n := count(t, pool, `SELECT count(*) FROM outbox_event WHERE id > (SELECT last_value FROM outbox_event_id_seq)`); n > 0 {
			t.Errorf("%d are above the sequence", n)
		}
	}
	close(stop)
	for range cap(ended) {
		<-ended
	}
	if n := failed.Load(); n > times {
		t.Errorf("%d were refused, of %d ids that were given", n, times)
	}
}

// An event whose delivered_to or parked_by has two dimensions or contains NULL is delivered like any other, and does
// not affect others. It can be replayed, and its sink can be abandoned.
func TestStrangeMarks(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	ids := emit(t, pool, "test.told", 6, 2)
	for k, marks := range []string{`delivered_to = '{{a,b},{c,d}}'`, `parked_by = '{{a,b},{c,d}}'`, `delivered_to = '{{a,b},{c,d}}', parked_by = '{e}'`,
		`delivered_to = '{NULL}'`, `parked_by = '{NULL}', delivered_to = '{{NULL}}'`} {
		unguarded(t, pool, fmt.Sprintf(`UPDATE outbox_event SET %s WHERE aggregate_id = '%s' AND payload->>'n' = '1'`, marks, ids[k]))
	}
	register(t, pool, "gone")
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	pgtest.Await(t, "all to come", func() bool { return len(sink.got()) == 12 })
	pgtest.Await(t, "all to be marked", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_event WHERE 'memory' = ANY (delivered_to) AND array_ndims(delivered_to) = 1 AND NOT EXISTS (SELECT FROM unnest(delivered_to) AS m WHERE m IS NULL)`) == 12
	})
	unguarded(t, pool, `UPDATE outbox_event SET delivered_to = '{{memory,b},{c,NULL}}', parked_by = '{{memory,b},{c,gone}}' WHERE payload->>'n' = '2'`)
	if n := count(t, pool, `SELECT outbox_replay('-infinity', sink => 'memory')`); n != 12 {
		t.Errorf("%d are replayed, want 12", n)
	}
	if _, err := delivery.Abandon(t.Context(), pool, "gone", 0); err != nil {
		t.Error(err)
	}
	pgtest.Await(t, "all to come again", func() bool { return len(sink.got()) == 24 })
	inOrder(t, sink.got())
	drained(t, pool)
}

// An event is published and marked even if the numbers in outbox_delivery are the lowest or highest of their type. If
// its next_attempt_at is later than any backoff allows, it is due.
func TestStrangeDeliveries(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	register(t, pool, "memory")
	ids := emit(t, pool, "test.told", 5, 2)
	for k, values := range []string{`2147483647, 0, now()`, `-2147483648, 0, now()`, `0, 2147483647, now()`, `0, -2147483648, now()`, `1, 0, 'infinity'`} {
		unguarded(t, pool, fmt.Sprintf(`INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, rejected, next_attempt_at, last_error)
			SELECT min(id), 'memory', aggregate_id, %s, 'x' FROM outbox_event WHERE aggregate_id = '%s' GROUP BY aggregate_id`, values, ids[k]))
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool)
	inOrder(t, sink.got())
}

// Events with headers above the limit, written while guards were off, are parked without being read, with the reason,
// in bounded memory. All others are delivered.
func TestLargeHeaders(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	register(t, pool, "memory")
	unguarded(t, pool, `INSERT INTO outbox_event (aggregate_id, event_type, payload, headers)
		SELECT gen_random_uuid(), 'test.huge', '{"n": 1}', jsonb_build_object('x', repeat('x', 40000000)) FROM generate_series(1, 12)`)
	emit(t, pool, "test.told", 300, 1)
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	var most uint64
	dispatch(t, pool, func(c *dispatcher.Config) { c.Claim = time.Minute }, dispatcher.Target{Name: "memory", Sink: sink})
	within(t, time.Minute, "all", func() bool {
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapAlloc)
		return count(t, pool, openEvents) == 0
	})
	if more := int64(most-before.HeapAlloc) >> 20; more > 64 {
		t.Errorf("it took %d MB", more)
	}
	if n := count(t, pool, parked+` AND last_error LIKE 'headers have 40000009 bytes, the limit is 65536%'`); n != 12 {
		t.Errorf("%d are parked with the reason, want 12", n)
	}
	if n := len(sink.got()); n != 300 {
		t.Errorf("%d came, want 300", n)
	}
}

// A batch is bounded by the size of payloads and headers as text, not by their stored size, which may be a hundredth of
// that.
func TestBytesOfHeaders(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "memory")
	for _, headers := range []string{`jsonb_build_object('x', repeat('x', 50000))`, `jsonb_build_object('x', (SELECT string_agg(md5(n::text || m), '') FROM generate_series(1, 1560) AS m))`,
		`jsonb_build_object('x', repeat(E'\x01', 10000))`} {
		unguarded(t, pool, `DELETE FROM outbox_event;
			INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) SELECT gen_random_uuid(), 'test.told', '1', `+headers+` FROM generate_series(1, 100) AS n`)
		c, err := delivery.Acquire(t.Context(), pool, "memory", "test", delivery.Limits{Events: 1000, Bytes: 1_000_000, Lanes: 64, Length: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		sum := 0
		for _, row := range c.Rows {
			if row.Refused != "" {
				t.Errorf("%s: refused: %s", headers, row.Refused)
			}
			for name, value := range row.Headers {
				sum += len(name) + len(value)
			}
		}
		if most := 1_000_000 / 50_000; len(c.Rows) < 10 || len(c.Rows) > most {
			t.Errorf("%s: %d rows with %d bytes of headers, want about %d rows", headers, len(c.Rows), sum, most)
		}
		if _, err := delivery.Mark(t.Context(), pool, c, nil); err != nil {
			t.Error(err)
		}
	}
}

// An event whose payload exceeds the limit, from before the limit existed, is parked without being read.
func TestLargePayload(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	register(t, pool, "memory")
	unguarded(t, pool, `ALTER TABLE outbox_event DROP CONSTRAINT outbox_event_payload_check;
		INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'test.huge', to_jsonb(repeat('x', 9000000)));
		ALTER TABLE outbox_event ADD CONSTRAINT outbox_event_payload_check CHECK (bytes <= 8 * 1024 * 1024) NOT VALID`)
	other := emit(t, pool, "test.told", 50, 1)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	within(t, 20*time.Second, "the others", func() bool { return count(t, pool, published) == len(other) })
	within(t, 20*time.Second, "parking", func() bool {
		return count(t, pool, parked+` AND last_error LIKE '%payload has 9000002 bytes, the limit is 8388608%'`) == 1
	})
}

// If the row of a known sink refuses the update of its registration, or is locked, another sink still gets its events.
// The first sink gets its own once the cause is gone.
func TestOneSinkCannotBeRegistered(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, pool *pgxpool.Pool) (mend func()){
		"refused": func(t *testing.T, pool *pgxpool.Pool) func() {
			if _, err := pool.Exec(t.Context(), `
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'XX777'; END $$;
				CREATE TRIGGER refuse BEFORE UPDATE ON outbox_sink FOR EACH ROW WHEN (OLD.name = 'bad') EXECUTE FUNCTION refuse()`); err != nil {
				t.Fatal(err)
			}
			return func() {
				if _, err := pool.Exec(t.Context(), `DROP TRIGGER refuse ON outbox_sink`); err != nil {
					t.Fatal(err)
				}
			}
		},
		"locked": func(t *testing.T, pool *pgxpool.Pool) func() {
			tx := begin(t, pool)
			if _, err := tx.Exec(t.Context(), `SELECT FROM outbox_sink WHERE name = 'bad' FOR UPDATE`); err != nil {
				t.Fatal(err)
			}
			return func() { _ = tx.Rollback(t.Context()) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.New(t)
			register(t, pool, "bad")
			mend := harm(t, pool)
			bad, good := &memory{}, &memory{}
			dispatch(t, pool, nil, dispatcher.Target{Name: "bad", Sink: bad}, dispatcher.Target{Name: "good", Sink: good})
			within(t, 10*time.Second, "the other sink to be known", func() bool { return count(t, pool, `SELECT count(*) FROM outbox_sink WHERE name = 'good'`) == 1 })
			emit(t, pool, "test.told", 3, 2)
			within(t, 10*time.Second, "the other sink's events", func() bool { return len(good.got()) == 6 })
			if n := len(bad.got()); n > 0 {
				t.Errorf("%d came to the one that is not registered", n)
			}
			mend()
			within(t, 15*time.Second, "its own", func() bool { return len(bad.got()) == 6 })
			drained(t, pool)
		})
	}
}
