package dispatcher_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
)

func register(t *testing.T, pool *pgxpool.Pool, sink string, types ...string) {
	t.Helper()
	if err := delivery.Register(t.Context(), pool, sink, types); err != nil {
		t.Fatal(err)
	}
}

func claim(t *testing.T, pool *pgxpool.Pool, sink string) *delivery.Claim {
	t.Helper()
	c, err := delivery.Acquire(t.Context(), pool, sink, "test", delivery.Limits{Events: 1000, Bytes: 1 << 20, Lanes: 64, Length: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// delivered marks all events of a claim as delivered.
func delivered(t *testing.T, pool *pgxpool.Pool, c *delivery.Claim) (recorded int) {
	t.Helper()
	var outcomes []delivery.Outcome
	for _, row := range c.Rows {
		outcomes = append(outcomes, delivery.Outcome{ID: row.ID, Delivered: row.Wanted, Unwanted: !row.Wanted})
	}
	recorded, err := delivery.Mark(t.Context(), pool, c, outcomes)
	if err != nil {
		t.Fatal(err)
	}
	return recorded
}

// An event that no sink wanted when it was read, and that a sink wants by the time it is marked, was not sent. It
// stays open.
func TestWantedMeanwhile(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a", "x.")
	emit(t, pool, "y.told", 3, 1)
	c := claim(t, pool, "a")
	if len(c.Rows) != 3 || c.Rows[0].Wanted {
		t.Fatalf("%+v", c.Rows)
	}
	register(t, pool, "a", "x.", "y.")
	delivered(t, pool, c)
	if n := count(t, pool, openEvents+` AND delivered_to IS NULL`); n != 3 {
		t.Errorf("%d are open, want 3", n)
	}
	if c = claim(t, pool, "a"); len(c.Rows) != 3 || !c.Rows[0].Wanted {
		t.Errorf("%+v", c.Rows)
	}
}

// A replay also applies to events that are claimed at that time: they are published once more.
func TestReplayOfWhatIsOnItsWay(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 1, 3)
	c := claim(t, pool, "a")
	if n := count(t, pool, `SELECT outbox_replay('-infinity')`); n != 3 {
		t.Errorf("%d are replayed, want 3", n)
	}
	if n := delivered(t, pool, c); n != 0 {
		t.Errorf("%d were marked under the claim from before", n)
	}
	if n := count(t, pool, openEvents); n != 3 {
		t.Errorf("%d are open, want 3", n)
	}
}

// A parked event is marked published after it was replayed and acknowledged, and also after the sink that parked it
// was removed.
func TestParkedNoMore(t *testing.T) {
	for _, removed := range []bool{false, true} {
		t.Run(fmt.Sprintf("sink removed %t", removed), func(t *testing.T) {
			pool, crm := pgtest.New(t), &memory{}
			other := dispatcher.Target{Name: "other", Sink: &memory{}}
			crm.set(func(event.Event) error { return dispatcher.RejectForGood(errors.New("no")) })
			emit(t, pool, "test.told", 5, 1)
			stop := dispatch(t, pool, nil, dispatcher.Target{Name: "crm", Sink: crm}, other)
			pgtest.Await(t, "events to be parked", func() bool {
				return count(t, pool, `SELECT count(*) FROM outbox_event WHERE parked_at IS NOT NULL`) == 5
			})
			if removed {
				stop() // otherwise it registers the sink again
				if _, err := delivery.Abandon(t.Context(), pool, "crm", 0); err != nil {
					t.Fatal(err)
				}
				dispatch(t, pool, nil, other)
			} else {
				crm.set(nil)
				count(t, pool, `SELECT outbox_replay('-infinity', sink => 'crm')`)
			}
			pgtest.Await(t, "them to be published", func() bool {
				return count(t, pool, `SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL AND parked_at IS NULL AND parked_by IS NULL`) == 5
			})
		})
	}
}

// Floors rise again in a database that was restored into a cluster whose transactions have
// lower numbers.
func TestFloorsAfterRestore(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "test.told", 300, 1)
	delivered(t, pool, claim(t, pool, "a"))
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_lane SET next_floor = 1, next_xid = '9000000000000'`); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "floors to rise", func() bool {
		if err := delivery.RaiseFloors(t.Context(), pool, "a"); err != nil {
			t.Fatal(err)
		}
		return count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor > 1`) == delivery.Lanes
	})
}

// A transaction has a number before it draws an event's id, so RaiseFloors can see that it is under way.
func TestAppendIsSeen(t *testing.T) {
	pool := pgtest.New(t)
	// The trigger runs after the row's id was drawn and before the row is written. One call of nextval in 32 is
	// written to the WAL, which assigns a number as well; the call after setval is not one of these.
	if _, err := pool.Exec(t.Context(), `
		CREATE FUNCTION unseen() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN IF pg_current_xact_id_if_assigned() IS NULL THEN RAISE 'nobody can see who has drawn id %', NEW.id; END IF; RETURN NEW; END $$;
		CREATE TRIGGER unseen BEFORE INSERT ON outbox_event FOR EACH ROW EXECUTE FUNCTION unseen();
		SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 100), nextval(pg_get_serial_sequence('outbox_event', 'id'))`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SELECT outbox_emit(gen_random_uuid(), 'test.told', '{}')`); err != nil {
		t.Error(err)
	}
	for _, held := range []bool{false, true} {
		if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return outbox.Append(t.Context(), tx, outbox.Event{Aggregate: uuid.New(), Type: "test.told", Held: held})
		}); err != nil {
			t.Errorf("held %t: %v", held, err)
		}
	}
}

// A claim raises no floor past an id that may still be committed. Once it is committed, the next claim reads the event,
// and later claims raise the floors past it, without RaiseFloors.
func TestFloorsThatClaimsRaise(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	register(t, pool, "elsewhere")
	late := begin(t, pool)
	var id int64
	if err := late.QueryRow(t.Context(), `SELECT outbox_emit(gen_random_uuid(), 'test.late', '{}')`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	whole := func() *delivery.Claim {
		c, err := delivery.Acquire(t.Context(), pool, "a", "test", delivery.Limits{Events: 100 * delivery.Lanes, Bytes: 1 << 20, Lanes: delivery.Lanes, Length: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	rounds := func(n int) {
		for range n {
			emit(t, pool, "test.told", 800, 1)
			delivered(t, pool, whole())
		}
	}
	rounds(4)
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE floor >= $1`, id); n > 0 {
		t.Errorf("%d floors have passed an id that may still be committed", n)
	}
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c := whole(); len(c.Rows) != 1 || c.Rows[0].ID != id {
		t.Errorf("%d events were read, want the late one alone", len(c.Rows))
	} else {
		delivered(t, pool, c)
	}
	rounds(4)
	if n := count(t, pool, `SELECT count(*) FROM outbox_lane WHERE sink = 'a' AND floor > $1`, id); n != delivery.Lanes {
		t.Errorf("%d floors have risen, want all", n)
	}
}

// A claim reads hardly more than the events that it claims, even if another sink has not received what this one has:
// claims raise the floors of their lanes, and look at no more lanes than they take.
func TestReadsBesideAnotherSink(t *testing.T) {
	config := pgtest.New(t).Config()
	config.MaxConns = 1 // a session reports what it has read
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	register(t, pool, "a")
	register(t, pool, "elsewhere")
	const aggregates, each, batch = 400, 50, 400
	emit(t, pool, "test.told", aggregates, each)
	read := func() int {
		count(t, pool, `SELECT count(*) FROM pg_stat_force_next_flush()`)
		return count(t, pool, `SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_event_open_idx'`)
	}
	if _, err := pool.Exec(t.Context(), `VACUUM (ANALYZE) outbox_event, outbox_lane, outbox_sink, outbox_delivery`); err != nil {
		t.Fatal(err)
	}
	before, got := read(), 0
	for {
		c, err := delivery.Acquire(t.Context(), pool, "a", "test", delivery.Limits{Events: batch, Bytes: 1 << 20, Lanes: 16, Length: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		if c.Lanes == 0 {
			break
		}
		got += delivered(t, pool, c)
	}
	if got != aggregates*each {
		t.Errorf("%d events were delivered, want %d", got, aggregates*each)
	}
	if perEvent := float64(read()-before) / float64(got); perEvent > 5 {
		t.Errorf("%.1f entries of the index were read for each event, want at most 5", perEvent)
	}
}

// After one slow poll the next event does not wait, as it would if slow polls followed each other: ten times as long as the
// poll took.
func TestOneSlowPoll(t *testing.T) {
	pool, sink := pgtest.New(t), &memory{}
	dispatch(t, pool, nil, dispatcher.Target{Name: "memory", Sink: sink})
	emit(t, pool, "a.b", 1, 1)
	pgtest.Await(t, "the first event", func() bool { return len(sink.got()) == 1 })
	const slow = 2 * time.Second
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK outbox_lane`); err != nil {
		t.Fatal(err)
	}
	time.Sleep(slow)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // the poll is over
	from := time.Now()
	emit(t, pool, "a.b", 1, 1)
	pgtest.Await(t, "the next event", func() bool { return len(sink.got()) == 2 })
	if took := time.Since(from); took > 5*slow {
		t.Errorf("the event after a poll of %v took %v", slow, took)
	}
}

// A claim that leaves due events unread, or lanes with due events unclaimed, says so; one that takes all that is due does not.
func TestFullClaim(t *testing.T) {
	pool := pgtest.New(t)
	register(t, pool, "a")
	emit(t, pool, "a.b", 10, 3) // three events in each of at most ten lanes
	for _, c := range []struct {
		limits delivery.Limits
		left   bool
	}{
		{delivery.Limits{Events: 1000, Lanes: 64}, false},
		{delivery.Limits{Events: 10, Lanes: 64}, true},
		{delivery.Limits{Events: 1000, Lanes: 2}, true},
	} {
		c.limits.Bytes, c.limits.Length = 1<<20, time.Minute
		claim, err := delivery.Acquire(t.Context(), pool, "a", "test", c.limits)
		if err != nil {
			t.Fatal(err)
		}
		if left := len(claim.Rows) < 30; left != c.left || claim.Full != c.left {
			t.Errorf("%+v: read %d of 30 events in %d lanes, Full is %v", c.limits, len(claim.Rows), claim.Lanes, claim.Full)
		}
		if _, err := delivery.Mark(t.Context(), pool, claim, nil); err != nil {
			t.Fatal(err)
		}
	}
}
