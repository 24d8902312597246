package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// An outcome that is refused time and again is reported where people look: which run, since when, and why. It
// is kept, and recorded once nothing refuses it. After that it is not reported any more.
func TestUnsettledIsTold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ refuse, mend, says, why string }{
		"by the database": {
			refuse: `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = '55000', CONSTRAINT = 'mine'; END $$;
			         CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'test.odd.v1' AND OLD.status = 'leased' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`,
			mend: `DROP TRIGGER refuse ON workflow_run`,
			says: "settle|55000|never|the database refuses what its handler returned by mine",
			why:  "the database refuses what its handler returned by mine for ",
		},
		"by a hook": {
			mend: `SELECT`,
			says: "settle||hook: not today|what its handler returned cannot be recorded",
			why:  "what its handler returned cannot be recorded for ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			var starts atomic.Int32
			var mended atomic.Bool
			mended.Store(c.refuse != "")
			handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
			handle(mux, "test.even.v1", func(context.Context) error { return nil })
			if c.refuse != "" {
				execute(t, pool, c.refuse)
			}
			id := enqueue(t, pool, "test.odd.v1", empty{})
			var log journal
			work(t, pool, mux, func(cfg *worker.Config) {
				cfg.Logger = log.logger()
				*cfg.Hooks() = []hook.Hook{{Begin: acting(func(_ context.Context, _ pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
					for _, s := range batch {
						if s.Type == "test.odd.v1" && !mended.Load() {
							return errors.New("not today")
						}
					}
					return nil
				})}}
			})
			told(t, pool, id)
			if got := query[string](t, pool, `SELECT concat_ws('|', statement, sqlstate, message, problem, kept) FROM workflow_unleasable`); got != c.says+"|succeeded" {
				t.Errorf("workflow_unleasable says\n%s, want\n%s", got, c.says)
			}
			if why := query[string](t, pool, `SELECT workflow_why($1)`, id); !strings.HasPrefix(why, c.why) || !strings.Contains(why, "it has succeeded: that is kept, and recorded once nothing refuses it") {
				t.Errorf("why: %s", why)
			}
			finished(t, pool, enqueue(t, pool, "test.even.v1", empty{}))
			pgtest.Await(t, "the log to tell of it", func() bool {
				return regexp.MustCompile("outcome refused time and again.* run=" + id.String()).MatchString(log.String())
			})
			execute(t, pool, c.mend)
			mended.Store(true)
			if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 {
				t.Errorf("it is %s at attempt %d, and was started %d times", r.Status, r.Attempt, starts.Load())
			}
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_unleasable`); n != 0 {
				t.Errorf("%d are told of still", n)
			}
		})
	}
}

// If no outcome at all can be recorded, no run is to blame, and none is reported.
func TestNothingCanBeSettled(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'XX001'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.status = 'leased' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`)
	handle(mux, "test.any.v1", func(context.Context) error { return nil })
	addMany(t, pool, "test.any.v1", 5)
	var tries, told atomic.Int32
	work(t, pool, mux, func(c *worker.Config) {
		c.Observe.SetAside = func(string) { told.Add(1) }
		c.Observe.SettleRun = func(int, time.Duration, error) { tries.Add(1) }
	})
	pgtest.Await(t, "each to be tried often enough", func() bool { return tries.Load() > 40 })
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 || told.Load() != 0 {
		t.Errorf("%d are set aside, %d told of", n, told.Load())
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	drained(t, pool)
}

// told waits until the outcome of a run is kept and reported.
func told(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) {
	t.Helper()
	pgtest.Await(t, "it to be told", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_unleasable WHERE id = $1 AND statement = 'settle' AND kept IS NOT NULL`, id) == 1
	})
}

// refuse creates a user's trigger that refuses to let runs of a type change from leased to some states.
func refuse(t *testing.T, pool *pgxpool.Pool, typ, sqlstate, states string) {
	t.Helper()
	execute(t, pool, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = '`+sqlstate+`'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW
		WHEN (OLD.type = '`+typ+`' AND OLD.status = 'leased' AND NEW.status IN (`+states+`)) EXECUTE FUNCTION refuse()`)
}

const leaves = `'succeeded', 'failed', 'pending'`

type answer struct{ Start int32 }

// A run whose outcome is refused costs its worker nothing: its slot is free, and its lease is not extended. It
// is not taken back, and its handler is not started again, even if the worker dies. Another worker records what
// the handler returned once nothing refuses it.
func TestOutcomeIsKept(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var starts atomic.Int32
	worker.Handle(mux, "test.odd.v1", func(context.Context, empty) (answer, error) { return answer{starts.Add(1)}, nil })
	handle(mux, "test.even.v1", func(context.Context) error { return nil })
	refuse(t, pool, "test.odd.v1", "XX123", `'succeeded', 'failed'`) // it may be taken back
	id := enqueue(t, pool, "test.odd.v1", empty{})
	_, stop := work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 1; brief(c) })
	told(t, pool, id)
	time.Sleep(2 * time.Second) // a heartbeat may have been under way
	until := query[time.Time](t, pool, `SELECT lease_until FROM workflow_run WHERE id = $1`, id)
	addMany(t, pool, "test.even.v1", 20)
	pgtest.Await(t, "the others to end, and the lease, too", func() bool {
		return query[bool](t, pool, `SELECT count(*) = 1 AND min(lease_until) < now() - interval '2 seconds' FROM workflow_run WHERE status IN ('pending', 'leased')`)
	})
	if now := query[time.Time](t, pool, `SELECT lease_until FROM workflow_run WHERE id = $1`, id); !now.Equal(until) {
		t.Errorf("the lease was extended from %v to %v", until, now)
	}
	began := time.Now()
	if err := stop(); err != nil || time.Since(began) > 3*time.Second {
		t.Errorf("the worker stopped after %v: %v", time.Since(began), err)
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	var s seen
	work(t, pool, mux, s.observe)
	r := finished(t, pool, id)
	if r.Status != run.Succeeded || r.Attempt != 1 || string(r.Result) != `{"Start": 1}` || starts.Load() != 1 {
		t.Errorf("it is %s at attempt %d with %s, and was started %d times", r.Status, r.Attempt, r.Result, starts.Load())
	}
	if n := query[int](t, pool, `SELECT (SELECT count(*) FROM workflow_set_aside) + (SELECT count(*) FROM workflow_kept)`); n != 0 || s.get(&s.again) != 0 {
		t.Errorf("%d are noted still, and %d were taken back", n, s.again)
	}
}

// A kept success stays kept if the database then refuses every success with an SQLSTATE that blames a value. It
// does not fail because of an error that concerns all runs.
func TestWhatIsKeptFailsForNobodysError(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.odd.v1", func(context.Context) error { return nil })
	refuse(t, pool, "test.odd.v1", "XX123", leaves)
	id := enqueue(t, pool, "test.odd.v1", empty{})
	var log journal
	work(t, pool, mux, func(c *worker.Config) { c.Logger = log.logger() })
	told(t, pool, id)
	execute(t, pool, `BEGIN; DROP TRIGGER refuse ON workflow_run;
		CREATE FUNCTION bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a bad migration'; END $$;
		CREATE TRIGGER bad BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION bad(); COMMIT`)
	pgtest.Await(t, "it to be tried again", func() bool { return strings.Contains(log.String(), "a kept outcome is still refused") })
	time.Sleep(2 * time.Second)
	if r := read(t, pool, id); r.Status != run.Leased {
		t.Errorf("it is %s with %v", r.Status, r.Error)
	}
	execute(t, pool, `DROP TRIGGER bad ON workflow_run; SELECT workflow_settle_again('`+id.String()+`')`)
	if r := finished(t, pool, id); r.Status != run.Succeeded {
		t.Errorf("it is %s", r.Status)
	}
}

// While a hook fails for all its runs, none of their outcomes is kept, even though another hook succeeds
// meanwhile.
func TestOneHookOfTwoFails(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.good.v1", func(context.Context) error { return nil })
	handle(mux, "test.bad.v1", func(context.Context) error { return nil })
	inserting := func(typ, statement string) hook.Hook {
		return hook.Hook{
			Concerns: func(l *leasing.Lease) bool { return l.Type == typ },
			Begin: acting(func(ctx context.Context, tx pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
				_, err := tx.Exec(ctx, statement)
				return err
			}),
		}
	}
	execute(t, pool, `CREATE TABLE good (n int); CREATE TABLE bad (n int)`)
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{inserting("test.good.v1", `INSERT INTO good VALUES (1)`), inserting("test.bad.v1", `INSERT INTO bad VALUES (1)`)}
	})
	execute(t, pool, `ALTER TABLE bad RENAME TO moved`)
	addMany(t, pool, "test.bad.v1", 5)
	for until := time.Now().Add(15 * time.Second); time.Now().Before(until); { // the other hook succeeds between any two tries of this one
		addMany(t, pool, "test.good.v1", 1)
		time.Sleep(2 * time.Millisecond)
	}
	if n := query[int](t, pool, `SELECT (SELECT count(*) FROM workflow_set_aside) + (SELECT count(*) FROM workflow_kept)`); n != 0 {
		t.Errorf("%d are set aside", n)
	}
	execute(t, pool, `ALTER TABLE moved RENAME TO bad`)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status <> 'succeeded' OR attempt <> 1`); n != 0 {
		t.Errorf("%d have not succeeded at once", n)
	}
}

// Nothing that a trigger says is logged, whatever its SQLSTATE, because it may quote a payload.
func TestWordsOfTriggersStayOutOfTheLog(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.odd.v1", func(context.Context) error { return nil })
	var log journal
	for _, sqlstate := range []string{"XX777", "40001", "P0001", "57014"} {
		execute(t, pool, `CREATE OR REPLACE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not %', NEW.payload USING ERRCODE = '`+sqlstate+`'; END $$;
			CREATE OR REPLACE TRIGGER tell BEFORE UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION tell()`)
		add(t, pool, run.New{Type: "test.odd.v1", Payload: map[string]string{"card": "4111 1111"}})
		_, stop := work(t, pool, mux, func(c *worker.Config) { c.Logger = log.logger() })
		time.Sleep(3 * time.Second)
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	if text := log.String(); strings.Contains(text, "4111 1111") || !strings.Contains(text, "XX777") || !strings.Contains(text, "40001") {
		t.Errorf("the log:\n%.3000s", text)
	}
}

// While something is set aside, Tend of the hooks is called every second, also if Tend of another fails.
func TestTendWhoeverFails(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.odd.v1", func(context.Context) error { return nil })
	refuse(t, pool, "test.odd.v1", "XX123", leaves)
	enqueue(t, pool, "test.odd.v1", empty{})
	var tended atomic.Int32
	work(t, pool, mux, func(c *worker.Config) {
		*c.Hooks() = []hook.Hook{
			{Tend: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
			{Tend: func(ctx context.Context) error { tended.Add(1); return ctx.Err() }},
		}
	})
	pgtest.Await(t, "the other hook to be called twice", func() bool { return tended.Load() >= 2 })
}

// A search for expired leases passes over a run whose outcome is kept during the search.
func TestKeptWhileTakenBack(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	release := make(chan struct{})
	handle(mux, "test.odd.v1", func(context.Context) error { <-release; return nil })
	refuse(t, pool, "test.odd.v1", "XX123", `'succeeded', 'failed'`) // it may be taken back
	id := enqueue(t, pool, "test.odd.v1", empty{})
	work(t, pool, mux, nil)
	pgtest.Await(t, "it to run", func() bool { return read(t, pool, id).Status == run.Leased })
	close(release)
	told(t, pool, id)
	for range 3 { // also without the note, and with a note that is due: only workflow_kept decides
		execute(t, pool, `UPDATE workflow_run SET lease_until = now() - interval '1 minute' WHERE id = $1`, id)
		execute(t, pool, `DELETE FROM workflow_set_aside`)
		time.Sleep(time.Second)
	}
	if r := read(t, pool, id); r.Status != run.Leased || r.Attempt != 1 {
		t.Errorf("it is %s at attempt %d", r.Status, r.Attempt)
	}
	told(t, pool, id)
}

// The events of an outcome are kept with it.
func TestEventsAreKept(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.odd.v1", func(ctx context.Context) error {
		return worker.Emit(ctx, outbox.Event{Type: "odd.done", Payload: json.RawMessage(`{"n": 12345678901234567890}`), Headers: map[string]string{"a": "b"}})
	})
	refuse(t, pool, "test.odd.v1", "XX123", leaves)
	id := enqueue(t, pool, "test.odd.v1", empty{})
	work(t, pool, mux, nil)
	told(t, pool, id)
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	finished(t, pool, id)
	if got := query[string](t, pool, `SELECT string_agg(concat_ws(' ', aggregate_id = $1, event_type, payload, headers), '; ') FROM outbox_event`, id); got != `t odd.done {"n": 12345678901234567890} {"a": "b"}` {
		t.Errorf("events: %s", got)
	}
}

// An outcome with effects cannot be kept whole. Its lease is left to be taken back, as after a crash, but not
// before an outcome could be recorded. Until then the handler is not started again.
func TestEffectsAreLost(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE done (run uuid)`)
	var starts atomic.Int32
	handle(mux, "test.odd.v1", func(ctx context.Context) error {
		starts.Add(1)
		return worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO done VALUES ($1)`, run.FromContext(ctx).ID)
			return err
		})
	})
	refuse(t, pool, "test.odd.v1", "XX123", `'succeeded'`)
	id := enqueue(t, pool, "test.odd.v1", empty{})
	work(t, pool, mux, brief)
	told(t, pool, id)
	if why := query[string](t, pool, `SELECT workflow_why($1)`, id); !strings.Contains(why, "its effects are lost, and its handler is started again once an outcome could be recorded") {
		t.Errorf("why: %s", why)
	}
	pgtest.Await(t, "its lease to run out", func() bool {
		return query[bool](t, pool, `SELECT lease_until < now() - interval '2 seconds' FROM workflow_run WHERE id = $1`, id)
	})
	if query[string](t, pool, `SELECT workflow_settle_again($1)`, id) != "tried again" {
		t.Error("it is not tried again")
	}
	pgtest.Await(t, "it to be tried", func() bool { return query[bool](t, pool, `SELECT NOT due FROM workflow_set_aside`) })
	time.Sleep(time.Second)
	if r := read(t, pool, id); starts.Load() != 1 || r.Status != run.Leased {
		t.Errorf("it is %s, and was started %d times", r.Status, starts.Load())
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 2 || starts.Load() != 2 || query[int](t, pool, `SELECT count(*) FROM done`) != 1 {
		t.Errorf("it is %s at attempt %d, was started %d times, and has done %d", r.Status, r.Attempt, starts.Load(), query[int](t, pool, `SELECT count(*) FROM done`))
	}
}

// A trigger that raises an SQLSTATE of bad values is recognized as the cause: if the failure is refused too,
// the original outcome is kept.
func TestRefusalIsNotOfTheValue(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	worker.Handle(mux, "test.odd.v1", func(context.Context, empty) (answer, error) { return answer{7}, nil })
	refuse(t, pool, "test.odd.v1", "P0001", leaves)
	id := enqueue(t, pool, "test.odd.v1", empty{})
	work(t, pool, mux, nil)
	told(t, pool, id)
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	if r := finished(t, pool, id); r.Status != run.Succeeded || string(r.Result) != `{"Start": 7}` {
		t.Errorf("it is %s with %s: %s", r.Status, r.Result, r.Error)
	}
}

// Operators can cancel a run whose outcome is kept, fail it, or have the outcome tried at once. Their actions
// are recorded, and the handler is not started again.
func TestActingOnWhatIsKept(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
	refuse(t, pool, "test.odd.v1", "XX123", `'succeeded', 'pending'`)
	cancelled, failed, again := enqueue(t, pool, "test.odd.v1", empty{}), enqueue(t, pool, "test.odd.v1", empty{}), enqueue(t, pool, "test.odd.v1", empty{})
	w, _ := work(t, pool, mux, nil)
	for _, id := range []uuid.UUID{cancelled, failed, again} {
		told(t, pool, id)
	}
	answers := func(want, sql string, args ...any) {
		t.Helper()
		if got := query[string](t, pool, sql, args...); got != want {
			t.Errorf("%s answers %q, want %q", sql, got, want)
		}
	}
	answers("0", `SELECT workflow_release($1, 'test')::text`, w.Name())
	answers("cancelled", `SELECT workflow_cancel($1, 'enough')`, cancelled)
	answers("to be failed", `SELECT workflow_fail($1, 'it is no use')`, failed)
	answers("tried again", `SELECT workflow_settle_again($1)`, again)
	answers("not set aside: cancelled", `SELECT workflow_settle_again($1)`, cancelled)
	answers("not kept: cancelled", `SELECT workflow_fail($1, 'too late')`, cancelled)
	answers("not found", `SELECT workflow_fail(gen_random_uuid(), 'none')`)
	answers("not found", `SELECT workflow_settle_again(gen_random_uuid())`)
	if r := finished(t, pool, failed); r.Status != run.Failed || failureOf(t, r).Code != "failed_by_hand" || !strings.HasSuffix(failureOf(t, r).Message, ": it is no use") {
		t.Errorf("it is %s: %s", r.Status, r.Error)
	}
	answers("cancelled", `SELECT status FROM workflow_run WHERE id = $1`, cancelled)
	pgtest.Await(t, "it to be tried again", func() bool {
		return query[bool](t, pool, `SELECT NOT due FROM workflow_set_aside WHERE id = $1`, again)
	})
	answers("1", `SELECT count(*)::text FROM workflow_kept`)
	answers("true", `SELECT (count(*) = 2 AND bool_and(data ? 'statement' AND actor <> ''))::text FROM workflow_history WHERE event_type = 'edited'`)
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	if r := finished(t, pool, again); r.Status != run.Succeeded || starts.Load() != 3 {
		t.Errorf("it is %s, and handlers were started %d times", r.Status, starts.Load())
	}
}

// A worker that is stopped while outcomes are refused ends in time, and what its handlers returned is not lost.
func TestStopWhileRefused(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
	refuse(t, pool, "test.odd.v1", "XX123", leaves)
	addMany(t, pool, "test.odd.v1", 20)
	_, stop := work(t, pool, mux, nil)
	pgtest.Await(t, "all to be started", func() bool { return starts.Load() == 20 })
	began := time.Now()
	if err := stop(); err != nil || time.Since(began) > 30*time.Second { // 5 s on an idle machine
		t.Errorf("it stopped after %v: %v", time.Since(began), err)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_kept`); n != 20 {
		t.Errorf("%d outcomes are kept, want 20", n)
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	work(t, pool, mux, nil)
	drained(t, pool)
	if starts.Load() != 20 || query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`) != 20 {
		t.Errorf("handlers were started %d times", starts.Load())
	}
}

// If workers may not settle at all, no run is to blame.
func TestNobodyMaySettle(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.any.v1", func(context.Context) error { return nil })
	addMany(t, pool, "test.any.v1", 5)
	execute(t, pool, `ALTER FUNCTION workflow_settle_v1 RENAME TO elsewhere`)
	var tries atomic.Int32
	work(t, pool, mux, func(c *worker.Config) { c.Observe.SettleRun = func(int, time.Duration, error) { tries.Add(1) } })
	pgtest.Await(t, "each to be tried often enough", func() bool { return tries.Load() > 40 })
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
		t.Errorf("%d are set aside", n)
	}
	execute(t, pool, `ALTER FUNCTION elsewhere RENAME TO workflow_settle_v1`)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`); n != 5 {
		t.Errorf("%d have succeeded at once, want 5", n)
	}
}

// Of many outcomes that are refused for the same reason one is tried. Once it succeeds, all are settled, and no
// handler is started again. An outcome that can be recorded does not wait for one that cannot.
func TestManyAreKept(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	var starts, tries atomic.Int32
	var dropped atomic.Bool
	handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
	refuse(t, pool, "test.odd.v1", "XX123", leaves)
	addMany(t, pool, "test.odd.v1", 500)
	work(t, pool, mux, func(c *worker.Config) {
		c.Observe.SettleRun = func(int, time.Duration, error) {
			if dropped.Load() {
				tries.Add(1)
			}
		}
	})
	pgtest.Await(t, "all to be kept", func() bool { return query[int](t, pool, `SELECT count(*) FROM workflow_kept`) == 500 })
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run;`)
	execute(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.payload->>'N' = '7' AND OLD.status = 'leased' AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`)
	dropped.Store(true)
	pgtest.Await(t, "all but one to end", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status <> 'succeeded'`) == 1
	})
	if n := tries.Load(); n > 150 {
		t.Errorf("%d transactions were needed", n)
	}
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	drained(t, pool)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`); n != 500 || starts.Load() != 500 {
		t.Errorf("%d have succeeded at once, and handlers were started %d times", n, starts.Load())
	}
}

// A trigger may raise the SQLSTATE of a server that is going down, or take longer than a settle may. For a
// minute that is taken for passing trouble. Then the run is found, and it costs no slot.
func TestRefusedWithACodeOfPassingTrouble(t *testing.T) {
	t.Parallel()
	for _, sqlstate := range []string{"57P03", "40001", "53300", "slow"} {
		t.Run(sqlstate, func(t *testing.T) {
			t.Parallel()
			pool, mux := pgtest.New(t), worker.NewMux()
			var starts atomic.Int32
			handle(mux, "test.odd.v1", func(context.Context) error { starts.Add(1); return nil })
			handle(mux, "test.even.v1", func(context.Context) error { return nil })
			if sqlstate == "slow" {
				refuse(t, pool, "test.odd.v1", "XX123", leaves)
				execute(t, pool, `CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(8); RETURN NEW; END $$`)
			} else {
				refuse(t, pool, "test.odd.v1", sqlstate, leaves)
			}
			id := enqueue(t, pool, "test.odd.v1", empty{})
			work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 1; brief(c) })
			time.Sleep(30 * time.Second)
			if n := query[int](t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
				t.Error("it is not believed")
			}
			addMany(t, pool, "test.even.v1", 5)
			pgtest.Await(t, "it to be told", func() bool { return query[int](t, pool, `SELECT count(*) FROM workflow_kept`) == 1 })
			pgtest.Await(t, "the others to end", func() bool {
				return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.even.v1' AND status = 'succeeded'`) == 5
			})
			execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
			drained(t, pool)
			if r := finished(t, pool, id); r.Status != run.Succeeded || starts.Load() != 1 {
				t.Errorf("it is %s, and was started %d times", r.Status, starts.Load())
			}
		})
	}
}
