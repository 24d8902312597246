package dispatcher_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A journal stores log output.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// within fails the test unless done becomes true within limit.
func within(t *testing.T, limit time.Duration, what string, done func() bool) {
	t.Helper()
	for begun := time.Now(); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > limit {
			t.Fatalf("%s took more than %s", what, limit)
		}
	}
}

// repeated counts the events that came more than once.
func repeated(events []event.Event) (n int) {
	times := map[string]int{}
	for _, e := range events {
		if times[e.ID()]++; times[e.ID()] == 2 {
			n++
		}
	}
	return n
}

const (
	published = `SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL`
	parked    = `SELECT count(*) FROM outbox_delivery WHERE parked_at IS NOT NULL`
)

// refusals are scripts that make the database refuse to mark events of the type test.bad, and scripts that end that.
var refusals = []struct{ name, begin, end, state, words string }{
	{"trigger", `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one: %', NEW.payload USING ERRCODE = 'XX777'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_event FOR EACH ROW WHEN (NEW.event_type = 'test.bad') EXECUTE FUNCTION refuse()`,
		`DROP TRIGGER refuse ON outbox_event`, "XX777", "not this one"},
	{"check", `ALTER TABLE outbox_event ADD CONSTRAINT fine CHECK (event_type <> 'test.bad') NOT VALID`,
		`ALTER TABLE outbox_event DROP CONSTRAINT fine`, "23514", "fine"},
}

// An event that the database refuses to mark is parked with the database's message, and later events of its aggregate
// continue. All others are marked and sent once: within 5 s if one event is refused, within 20 s if 150 are. Once the
// cause is gone, outbox_replay_parked has the parked events published.
func TestEventThatCannotBeMarked(t *testing.T) {
	for _, bad := range []int{1, 150} {
		for _, r := range refusals {
			t.Run(fmt.Sprint(bad, " by ", r.name), func(t *testing.T) {
				pool, sink, log := pgtest.New(t), &memory{}, &journal{}
				emit(t, pool, "test.told", 925-bad/2, 1)
				ids := emit(t, pool, "test.bad", bad, 1)
				emit(t, pool, "test.told", 925-bad/2, 1)
				later(t, pool, ids[0].String())
				if _, err := pool.Exec(t.Context(), r.begin); err != nil {
					t.Fatal(err)
				}
				good := count(t, pool, `SELECT count(*) FROM outbox_event WHERE event_type <> 'test.bad'`)
				dispatch(t, pool, func(c *dispatcher.Config) {
					c.Claim, c.Logger = time.Minute, slog.New(slog.NewTextHandler(log, nil))
				}, dispatcher.Target{Name: "memory", Sink: sink})
				limit := time.Duration(bad/10)*time.Second + 5*time.Second // each refused event takes several statements, and the machine may be busy
				within(t, limit, "marking the others", func() bool { return count(t, pool, published) == good })
				within(t, limit, "parking", func() bool { return count(t, pool, parked) == bad })
				if n := count(t, pool, parked+` AND last_error LIKE $1`, r.state+"%"+r.words+"%"); n != bad {
					t.Errorf("%d are parked with the database's words, want %d", n, bad)
				}
				if n := repeated(sink.got()); n > 0 {
					t.Errorf("%d came more than once", n)
				}
				id := count(t, pool, `SELECT min(event_id) FROM outbox_delivery`)
				pgtest.Await(t, "the log to name the event", func() bool {
					return strings.Contains(log.String(), fmt.Sprintf("event=%d state=%s sink=memory", id, r.state))
				})
				if said := log.String(); strings.Contains(said, `"n"`) || strings.Contains(said, `\"n\"`) || strings.Contains(said, r.words) {
					t.Errorf("the log says %s", said)
				}
				emit(t, pool, "test.told", 100, 1)
				within(t, limit, "the next ones", func() bool { return count(t, pool, published) == good+100 })
				if n := len(sink.got()); n != good+bad+100 {
					t.Errorf("%d came, want %d", n, good+bad+100)
				}
				if n := count(t, pool, `SELECT outbox_replay_parked('memory')`); n != bad { // too early
					t.Errorf("%d are replayed, want %d", n, bad)
				}
				within(t, limit, "parking again", func() bool { return count(t, pool, parked) == bad && len(sink.got()) == good+2*bad+100 })
				if _, err := pool.Exec(t.Context(), r.end); err != nil {
					t.Fatal(err)
				}
				count(t, pool, `SELECT outbox_replay_parked('memory')`)
				drained(t, pool)
				if n := count(t, pool, `SELECT count(*) FROM outbox_delivery`); n > 0 || len(sink.got()) != good+3*bad+100 {
					t.Errorf("%d deliveries are left; %d came", n, len(sink.got()))
				}
			})
		}
	}
}

// later appends a good event to the aggregate of a bad one.
func later(t *testing.T, pool *pgxpool.Pool, aggregate string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `SELECT outbox_emit($1, 'test.told', '{"n": 2}')`, aggregate); err != nil {
		t.Fatal(err)
	}
}

// While no event can be marked, none is parked and none is sent again. workflow_fault and the observer report it, and
// the log has one line. Once events can be marked again, all are marked.
func TestNothingCanBeMarked(t *testing.T) {
	pool, sink, log := pgtest.New(t), &memory{}, &journal{}
	emit(t, pool, "test.told", 10, 1)
	var failing atomic.Bool
	dispatch(t, pool, func(c *dispatcher.Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
		c.Observe.Fault = func(_ string, fails bool) { failing.Store(fails) }
	}, dispatcher.Target{Name: "memory", Sink: sink})
	drained(t, pool) // these events are marked, so one of them can serve as the control
	if _, err := pool.Exec(t.Context(), strings.ReplaceAll(refusals[0].begin, "test.bad", "test.told")); err != nil {
		t.Fatal(err)
	}
	emit(t, pool, "test.told", 200, 1)
	pgtest.Await(t, "them to come", func() bool { return len(sink.got()) == 210 })
	time.Sleep(4 * time.Second) // two claims
	if n := count(t, pool, parked); n > 0 {
		t.Errorf("%d are parked", n)
	}
	const fault = `SELECT count(*) FROM workflow_fault WHERE statement = 'mark' AND sqlstate = 'XX777'`
	pgtest.Await(t, "it to be told", func() bool {
		return count(t, pool, fault) == 1 && failing.Load() && strings.Count(log.String(), "no event can be marked; none is parked") == 1
	})
	if _, err := pool.Exec(t.Context(), refusals[0].end); err != nil {
		t.Fatal(err)
	}
	emit(t, pool, "test.told", 1, 1)
	pgtest.Await(t, "it to be told that it is over", func() bool { return count(t, pool, fault) == 0 && !failing.Load() })
	within(t, 30*time.Second, "marking", func() bool { return count(t, pool, openEvents) == 0 })
	if n := repeated(sink.got()); n > 0 {
		t.Errorf("%d came more than once", n)
	}
}

// A refused event is parked even if no event has been marked yet: an open event is marked as the control and rolled
// back. If outbox_delivery is missing, the control fails too, and nothing is parked.
func TestOpenControl(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.bad", 1, 1)
	c := claim(t, pool, "a")
	emit(t, pool, "test.told", 1, 1)
	if _, err := pool.Exec(t.Context(), refusals[0].begin+`; ALTER TABLE outbox_delivery RENAME TO moved`); err != nil {
		t.Fatal(err)
	}
	was := delivery.Outcome{ID: c.Rows[0].ID, Delivered: true}
	rest, err := delivery.MarkApart(t.Context(), pool, c, []delivery.Outcome{was}, 2*time.Second)
	if err != nil || rest.Fault == nil || len(rest.Refused) > 0 || len(rest.Open) != 1 {
		t.Errorf("without a table: %+v, %v", rest, err)
	}
	if _, err := pool.Exec(t.Context(), `ALTER TABLE moved RENAME TO outbox_delivery; UPDATE outbox_lane SET claim_until = now() WHERE claim_until > now()`); err != nil {
		t.Fatal(err)
	}
	c = claim(t, pool, "a")
	c.Rows = slices.DeleteFunc(c.Rows, func(r delivery.Row) bool { return r.ID != was.ID })
	rest, err = delivery.MarkApart(t.Context(), pool, c, []delivery.Outcome{was}, 2*time.Second)
	if err != nil || rest.Fault != nil || len(rest.Refused) != 1 || count(t, pool, parked) != 1 || count(t, pool, published) != 0 {
		t.Errorf("%+v, %v; want it parked, and the other one open", rest, err)
	}
}

// harmed returns a database with an event that sink a has got and an open event of type test.bad, after executing
// script.
func harmed(t *testing.T, script string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 1, 1)
	delivered(t, pool, claim(t, pool, "a"))
	emit(t, pool, "test.bad", 1, 1)
	if _, err := pool.Exec(t.Context(), script); err != nil {
		t.Fatal(err)
	}
	return pool
}

// If marking one event raises the SQLSTATE of a temporary error, the error is first treated as temporary. With
// AnyState, which is set after a minute, the event is blamed.
func TestPassingStateOfAnEvent(t *testing.T) {
	pool := harmed(t, strings.ReplaceAll(refusals[0].begin, "XX777", "40001"))
	c := claim(t, pool, "a")
	was := []delivery.Outcome{{ID: c.Rows[0].ID, Delivered: true}}
	if rest, err := delivery.MarkApart(t.Context(), pool, c, was, 2*time.Second); err == nil || len(rest.Refused) > 0 || !rest.Claimed {
		t.Errorf("at first %+v, %v", rest, err)
	}
	c.AnyState = true
	if rest, err := delivery.MarkApart(t.Context(), pool, c, was, 2*time.Second); err != nil || len(rest.Refused) != 1 || rest.Refused[0].State != "40001" {
		t.Errorf("after a minute %+v, %v", rest, err)
	}
}

// If marking one event raises the SQLSTATE of a temporary error, the other lanes of the claim are still marked and
// given back.
func TestPassingStateInOneLane(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.bad", 1, 1)
	if _, err := pool.Exec(t.Context(), strings.ReplaceAll(refusals[0].begin, "XX777", "40001")); err != nil {
		t.Fatal(err)
	}
	emit(t, pool, "test.told", 200, 1)
	c := claim(t, pool, "a")
	lane := c.Rows[0].Lane
	var was []delivery.Outcome
	inLane := 0
	for _, row := range c.Rows {
		was = append(was, delivery.Outcome{ID: row.ID, Delivered: true})
		if row.Lane == lane {
			inLane++
		}
	}
	rest, err := delivery.MarkApart(t.Context(), pool, c, was, 2*time.Second)
	if err == nil || !rest.Claimed || len(rest.Lanes) != inLane || len(rest.Refused) > 0 {
		t.Errorf("%d are not marked, of %d in the lane; %+v, %v", len(rest.Lanes), inLane, rest, err)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE claim_token IS NOT NULL AND lane <> $1`, lane); n > 0 {
		t.Errorf("%d other lanes are still claimed", n)
	}
	if n := count(t, pool, published); n != 201-inLane {
		t.Errorf("%d are marked, want %d", n, 201-inLane)
	}
}

// An event for which a user's trigger raises the SQLSTATE of a temporary error is parked after a minute, even while
// other events are published, and delays no event of another lane.
func TestPassingStateBesideTraffic(t *testing.T) {
	t.Parallel()
	pool, sink := pgtest.New(t), &memory{}
	if _, err := pool.Exec(t.Context(), strings.ReplaceAll(refusals[0].begin, "XX777", "40001")); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, func(c *dispatcher.Config) { c.Claim = 10 * time.Second }, dispatcher.Target{Name: "memory", Sink: sink})
	emit(t, pool, "test.bad", 1, 1)
	lane := count(t, pool, `SELECT lane FROM outbox_event`)
	begun, slow := time.Now(), 0
	for count(t, pool, parked) == 0 {
		if time.Since(begun) > 2*time.Minute { // on a busy machine the last try of a minute comes late
			t.Fatal("it is not parked")
		}
		emit(t, pool, "test.told", 1, 1)
		time.Sleep(50 * time.Millisecond)
		slow = max(slow, count(t, pool, openEvents+` AND lane <> $1 AND created_at < now() - interval '4 seconds'`, lane))
	}
	if took := time.Since(begun); took < 55*time.Second {
		t.Errorf("it is parked after %s", took)
	}
	if slow > 0 {
		t.Errorf("%d events of other lanes were not marked within four seconds", slow)
	}
	within(t, 15*time.Second, "marking all others", func() bool { return count(t, pool, openEvents+` AND event_type <> 'test.bad'`) == 0 })
	if n := repeated(sink.got()); n > 0 {
		t.Errorf("%d came more than once", n)
	}
}

// If the control fails with a temporary error, nothing is decided: nothing is parked, Rest.Fault is nil, and the lane
// stays claimed for another attempt.
func TestTroubleWithControl(t *testing.T) {
	pool := harmed(t, refusals[0].begin+`;
		CREATE FUNCTION busy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END $$;
		CREATE TRIGGER busy BEFORE UPDATE ON outbox_event FOR EACH ROW WHEN (OLD.event_type = 'test.told') EXECUTE FUNCTION busy()`)
	c := claim(t, pool, "a")
	rest, err := delivery.MarkApart(t.Context(), pool, c, []delivery.Outcome{{ID: c.Rows[0].ID, Delivered: true}}, 2*time.Second)
	if err == nil || rest.Fault != nil || len(rest.Lanes) != 1 || !rest.Claimed || len(rest.Refused) > 0 {
		t.Errorf("%+v, %v", rest, err)
	}
}

// mended is a pool that executes the script end before the first transaction begins.
type mended struct {
	*pgxpool.Pool
	end   string
	ended bool
}

func (m *mended) Begin(ctx context.Context) (pgx.Tx, error) {
	if !m.ended {
		if _, err := m.Exec(ctx, m.end); err != nil {
			return nil, err
		}
		m.ended = true
	}
	return m.Pool.Begin(ctx)
}

// An event that was refused together with all others is not parked if the refusal ends in between: after the event was
// refused, and before the control is tried.
func TestRefusalThatEnds(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 1, 1)
	delivered(t, pool, claim(t, pool, "a"))
	if _, err := pool.Exec(t.Context(), strings.ReplaceAll(refusals[0].begin, "test.bad", "test.told")); err != nil {
		t.Fatal(err)
	}
	emit(t, pool, "test.told", 1, 1)
	c, db := claim(t, pool, "a"), &mended{Pool: pool, end: refusals[0].end}
	rest, err := delivery.MarkApart(t.Context(), db, c, []delivery.Outcome{{ID: c.Rows[0].ID, Delivered: true}}, 2*time.Second)
	if err != nil || !db.ended || len(rest.Refused) > 0 {
		t.Errorf("ended %t: %+v, %v", db.ended, rest, err)
	}
	if n := count(t, pool, openEvents); n > 0 {
		t.Errorf("%d are not marked", n)
	}
}

// If an event can be neither marked nor parked, its original outcome is returned in Rest.Open, so that it is marked,
// and not parked, once that works again.
func TestNeitherMarkedNorParked(t *testing.T) {
	pool := harmed(t, refusals[0].begin+`;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION refuse()`)
	c := claim(t, pool, "a")
	was := delivery.Outcome{ID: c.Rows[0].ID, Delivered: true}
	rest, err := delivery.MarkApart(t.Context(), pool, c, []delivery.Outcome{was}, 2*time.Second)
	if err != nil || len(rest.Refused) > 0 || len(rest.Open) != 1 || rest.Open[0] != was {
		t.Errorf("%+v, %v; want %+v open", rest, err, was)
	}
}

// A locked event is skipped. The others, including those of its lane, are marked within 5 s and sent once. The
// locked event is marked once it is free, and is not sent again for that.
func TestLockedEvent(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	ids := emit(t, pool, "test.told", 500, 1)
	for _, id := range ids[:100] {
		later(t, pool, id.String())
	}
	lock, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(context.Background())
	if _, err := lock.Exec(t.Context(), `SELECT FROM outbox_event WHERE aggregate_id = $1 ORDER BY id LIMIT 1 FOR UPDATE`, ids[7]); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink}) // with claims of two seconds
	for round := range 4 {
		want := 599 + round*500
		within(t, 5*time.Second, "the others", func() bool { return count(t, pool, published) == want })
		emit(t, pool, "test.told", 500, 1)
	}
	within(t, 5*time.Second, "the last of them", func() bool { return count(t, pool, published) == 2599 })
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "marking the event that was locked", func() bool { return count(t, pool, openEvents) == 0 })
	if n := repeated(sink.got()); n > 0 {
		t.Errorf("%d came more than once", n)
	}
}

// An event that was acknowledged and could not be marked is still sent again if it is replayed.
func TestReplayOfWhatWasLocked(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	emit(t, pool, "test.told", 1, 1)
	lock, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(context.Background())
	if _, err := lock.Exec(t.Context(), `SELECT FROM outbox_event FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	pgtest.Await(t, "it to come", func() bool { return len(sink.got()) == 1 })
	pgtest.Await(t, "its lane to be given back", func() bool {
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE claim_token IS NOT NULL`) == 0
	})
	if _, err := lock.Exec(t.Context(), `SELECT outbox_replay('-infinity')`); err != nil {
		t.Fatal(err)
	}
	if err := lock.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "it to come again", func() bool { return len(sink.got()) == 2 })
	drained(t, pool)
}

// A failure that cannot be recorded because the event is locked delays only that aggregate. The event is
// retried, and the later events of its aggregate stay in order.
func TestLockedFailure(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	ids := emit(t, pool, "test.told", 50, 3)
	lock, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(context.Background())
	if _, err := lock.Exec(t.Context(), `SELECT FROM outbox_event WHERE aggregate_id = $1 FOR UPDATE`, ids[7]); err != nil {
		t.Fatal(err)
	}
	sink.set(func(e event.Event) error {
		if e.Subject() == ids[7].String() {
			return fmt.Errorf("not now")
		}
		return nil
	})
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	within(t, 5*time.Second, "the others", func() bool { return count(t, pool, published) == 147 })
	pgtest.Await(t, "it to be tried again", func() bool { return len(sink.got()) > 150 })
	sink.set(nil)
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "the rest", func() bool { return count(t, pool, published) == 150 })
	inOrder(t, sink.got())
}

// A locked lane delays only its own events: other lanes are published.
func TestLockedLane(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	register(t, pool, "memory")
	lock, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(context.Background())
	taken := make(chan struct{})
	first := sync.OnceFunc(func() { // called once the lane is claimed
		defer close(taken)
		if _, err := lock.Exec(context.Background(), `SELECT FROM outbox_lane WHERE lane = 7 FOR UPDATE`); err != nil {
			t.Error(err)
		}
	})
	sink.set(func(event.Event) error { first(); return nil })
	emit(t, pool, "test.told", 1000, 1)
	elsewhere := count(t, pool, `SELECT count(*) FROM outbox_event WHERE lane <> 7`)
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	<-taken
	within(t, 5*time.Second, "the other lanes", func() bool { return count(t, pool, published+` AND lane <> 7`) == elsewhere })
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	drained(t, pool)
}

// RaiseFloors and SetRight do not wait for locks on lanes or events.
func TestFloorsDoNotWait(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 300, 1)
	delivered(t, pool, claim(t, pool, "a"))
	emit(t, pool, "test.told", 1, 1)
	if err := delivery.RaiseFloors(t.Context(), pool, "a"); err != nil { // notes the next floors
		t.Fatal(err)
	}
	if err := pgx.BeginFunc(t.Context(), pool, func(lock pgx.Tx) error {
		if _, err := lock.Exec(t.Context(), `SELECT FROM outbox_lane WHERE lane = 7 FOR UPDATE`); err != nil {
			return err
		}
		if _, err := lock.Exec(t.Context(), `SELECT FROM outbox_event FOR UPDATE`); err != nil {
			return err
		}
		within(t, 5*time.Second, "raising floors", func() bool {
			ctx, done := context.WithTimeout(t.Context(), time.Second)
			defer done()
			if err := delivery.RaiseFloors(ctx, pool, "a"); err != nil {
				t.Fatal(err)
			}
			if _, err := delivery.SetRight(ctx, pool, "a"); err != nil {
				t.Fatal(err)
			}
			return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`) >= delivery.Lanes-1
		})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// No floor passes an id that was drawn by the newest transaction, which no other transaction has followed yet.
func TestFloorOfTheNewest(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	older, newest := begin(t, pool), begin(t, pool)
	if _, err := older.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	for _, tx := range []pgx.Tx{newest, older} { // the older transaction draws the higher id
		if _, err := tx.Exec(t.Context(), `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{}')`); err != nil {
			t.Fatal(err)
		}
	}
	if err := older.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := delivery.RaiseFloors(t.Context(), pool, "a"); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 0`); n > 0 {
		t.Errorf("%d floors have passed an id that may still be committed", n)
	}
}

// begin starts a transaction that is rolled back when t ends.
func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}
