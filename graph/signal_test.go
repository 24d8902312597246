package graph_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// listeners starts n instances that wait for the signal go and then execute A, and waits until all of them wait.
func listeners(s *site, n int) (ids []uuid.UUID) {
	s.t.Helper()
	p := s.deploy("S", `"S": {"await": {"signal": "go"}, "to": "A"},`+step("A", "", `"v": "steps.S.v"`))
	for range n {
		ids = append(ids, s.start(p, `{}`))
	}
	await(s.t, "all to wait", func() bool { return query[int](s.t, s.pool, `SELECT count(*) FROM message_wait`) == n })
	return ids
}

const picky = `CREATE FUNCTION picky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'XX999'; END $$;
	CREATE TRIGGER picky BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (%s) EXECUTE FUNCTION picky()`

// If one of five waiting tokens cannot take a signal, for any reason, the other four get it, and its run succeeds with
// both numbers. process_unreachable and process_why name the problem of the fifth, and process_unreachable has the
// fix. Retention keeps the signal. After the fix the fifth token gets the signal exactly once.
func TestSignalPassesOverOne(t *testing.T) {
	for _, c := range []struct {
		name, role, change, problem, mend string
	}{
		{"priority, from before", "before", `UPDATE process_instance SET priority = 2147483647 WHERE id = '%s'`, "process_instance.priority is 2147483647", ""},
		{"huge tenant, from before", "before", `ALTER TABLE process_instance DROP CONSTRAINT process_instance_tenant_check; UPDATE process_instance SET tenant_id = repeat('x', 100000) WHERE id = '%s'`, "process_instance.tenant_id has 100000 characters", ""},
		{"empty tenant, from before", "before", `ALTER TABLE process_instance DROP CONSTRAINT process_instance_tenant_check; UPDATE process_instance SET tenant_id = '' WHERE id = '%s'`, "process_instance.tenant_id has 0 characters", ""},
		{"another's instance, from before", "before", `UPDATE message_wait SET instance_id = (SELECT id FROM process_instance WHERE id <> '%[1]s' LIMIT 1) WHERE instance_id = '%[1]s'`, "message_wait.instance_id is not that of its token", ""},
		{"a trigger of the user's", "", fmt.Sprintf(picky, `NEW.token_id = '$token'`), "the database refuses the run that would bring it", `DROP FUNCTION picky() CASCADE`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t)
			ids := listeners(s, 5)
			token := query[uuid.UUID](t, s.pool, `SELECT id FROM process_token WHERE instance_id = $1`, ids[2])
			switch c.role {
			case "before":
				unguarded(t, s.pool, fmt.Sprintf(c.change, ids[2]))
			default:
				execute(t, s.pool, strings.NewReplacer(`%s`, ids[2].String(), `$token`, token.String()).Replace(c.change))
			}
			signal := s.enqueue("graph.signal.v1", `{"name": "go", "payload": {"v": 7}}`)
			for k, id := range ids {
				if k != 2 {
					s.status(id, graph.Completed)
				}
			}
			s.done(signal)
			if got := query[string](t, s.pool, `SELECT status || result FROM workflow_run WHERE id = $1`, signal); got != `succeeded{"reached": 4, "set_aside": 1}` {
				t.Errorf("the signal: %s", got)
			}
			if got := query[string](t, s.pool, `SELECT concat_ws(' ', signal, signal_id, problem) FROM process_unreachable WHERE token_id = $1`, token); got != "go "+signal.String()+" "+c.problem {
				t.Errorf("process_unreachable says %s, want %s", got, c.problem)
			}
			if got := query[string](t, s.pool, `SELECT process_why($1)`, ids[2]); !strings.Contains(got, c.problem) {
				t.Errorf("process_why says %s, want %s", got, c.problem)
			}
			time.Sleep(10 * time.Millisecond)
			execute(t, s.pool, anyPeriod)
			if _, err := cleanup.New(s.pool, []string{"default."}, time.Hour, cleanup.Keep{Finished: time.Millisecond}).Handle(t.Context(), struct{}{}); err != nil {
				t.Fatal(err)
			}
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE id = $1`, signal); n != 1 {
				t.Error("retention has removed a signal that is owed to somebody")
			}
			if fix := query[*string](t, s.pool, `SELECT fix FROM process_unreachable WHERE token_id = $1`, token); c.mend == "" && fix == nil {
				t.Fatal("there is no fix")
			} else if c.mend == "" {
				execute(t, s.pool, `BEGIN; SET LOCAL workflow.override = 'as doctor tells'; `+*fix+`; COMMIT`)
			} else {
				execute(t, s.pool, c.mend)
				elapseAside(t, s)
			}
			if err := graph.New(s.pool).Parts().Hook.Tend(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.status(ids[2], graph.Completed)
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'`); n != 5 {
				t.Errorf("%d got it, want 5", n)
			}
			if got := query[string](t, s.pool, `SELECT string_agg(DISTINCT input->>'v', ' ') FROM activity_instance WHERE node_id = 'A'`); got != "7" {
				t.Errorf("what it brought is %s, want 7", got)
			}
			if n := query[int](t, s.pool, `SELECT (SELECT count(*) FROM process_unreached) + (SELECT count(*) FROM workflow_set_aside) + (SELECT count(*) FROM process_broadcast) + (SELECT count(*) FROM message_wait)`); n != 0 {
				t.Errorf("%d rows are left of it", n)
			}
			s.healthy()
		})
	}
}

// elapseAside makes 10 s pass for the rows that are set aside.
func elapseAside(t *testing.T, s *site) {
	t.Helper()
	execute(t, s.pool, `BEGIN; SET LOCAL workflow.override = 'ten seconds later'; UPDATE workflow_set_aside SET last_tried_at = last_tried_at - interval '10 seconds'; COMMIT`)
}

// If the database refuses a signal for every token, and for the control, no token is set aside. The run of the signal
// neither fails nor is charged an attempt, even if runs may be put off only once. When the cause is gone, all tokens
// get the signal within 10 s.
func TestSignalRefusedToAll(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	s.change = func(c *worker.Config) { c.MaxPostponed = 1 }
	s.worker = s.hire()
	ids := listeners(s, 3)
	execute(t, s.pool, fmt.Sprintf(picky, `NEW.type = 'graph.arrive.v1'`))
	signal := s.enqueue("graph.signal.v1", `{"name": "go", "payload": {"v": 7}}`)
	await(t, "it to be refused", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_broadcast WHERE sqlstate = 'XX999'`) == 1
	})
	time.Sleep(12 * time.Second)
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', (SELECT count(*) FROM workflow_set_aside), (SELECT count(*) FROM process_unreached), (SELECT count(*) FROM message_wait))`); got != "0 0 3" {
		t.Errorf("set aside, owed and waiting are %s, want 0 0 3", got)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, attempt, last_error) FROM workflow_run WHERE id = $1`, signal); got != "leased 1" {
		t.Errorf("its run: %s", got)
	}
	execute(t, s.pool, `DROP FUNCTION picky() CASCADE`)
	mended := time.Now()
	for _, id := range ids {
		s.status(id, graph.Completed)
	}
	if took := time.Since(mended); took > 10*time.Second {
		t.Errorf("they got it after %s", took)
	}
	s.done(signal)
	if got := query[string](t, s.pool, `SELECT status || result || ' ' || attempt FROM workflow_run WHERE id = $1`, signal); got != `succeeded{"reached": 3, "set_aside": 0} 1` {
		t.Errorf("the signal: %s", got)
	}
	s.healthy()
}

// Signals that the database refuses for every token do not keep other runs from getting a slot, however many such
// signals there are.
func TestRefusedSignalsLeaveSlots(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	s.change = func(c *worker.Config) { c.Concurrency = 8 }
	s.worker = s.hire()
	ids := listeners(s, 1)
	execute(t, s.pool, fmt.Sprintf(picky, `NEW.type = 'graph.arrive.v1'`))
	for range 20 {
		s.enqueue("graph.signal.v1", `{"name": "go", "payload": {"v": 7}}`)
	}
	await(t, "all to be refused", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_broadcast WHERE sqlstate = 'XX999'`) == 20
	})
	for range 20 {
		begun := time.Now()
		s.done(s.enqueue("test.step.v1", `{"name": "other"}`))
		if took := time.Since(begun); took > 3*time.Second {
			t.Errorf("another run took %s", took)
		}
	}
	execute(t, s.pool, `DROP FUNCTION picky() CASCADE`)
	s.status(ids[0], graph.Completed)
	await(t, "all signals to be over", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.signal.v1' AND status = 'succeeded' AND attempt = 1`) == 20
	})
	s.healthy()
}

// A signal that is refused for every token, while four others keep their slots for that reason, is put off for 5 s, and
// for longer the more often it was leased, so that it does not reach the limit of run.Again within hours.
func TestRefusedSignalIsPutOff(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 1)
	execute(t, s.pool, fmt.Sprintf(picky, `NEW.type = 'graph.arrive.v1'`))
	handler := graph.New(s.pool).Parts().Handlers["graph.signal.v1"]
	send := func(ctx context.Context, signal uuid.UUID, lease int64) error {
		_, err := handler(run.NewContext(ctx, run.Info{ID: signal, Type: "graph.signal.v1", LeaseNo: lease}), []byte(`{"name": "go"}`))
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	var staying sync.WaitGroup
	for range 4 {
		signal := leased(t, s.pool)
		staying.Go(func() { _ = send(ctx, signal, 1) })
	}
	await(t, "four to stay", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_broadcast WHERE sqlstate = 'XX999'`) == 4
	})
	time.Sleep(time.Second)
	for lease, want := range map[int64]time.Duration{1: 5 * time.Second, 250: 20 * time.Second} {
		if delay, free, _ := run.Delay(send(t.Context(), leased(t, s.pool), lease)); delay != want || !free {
			t.Errorf("lease %d: it is put off for %s, free %t, want %s", lease, delay, free, want)
		}
	}
	cancel()
	staying.Wait()
	signal := leased(t, s.pool)
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, free, _ := run.Delay(send(ctx, signal, 1)); !free || ctx.Err() == nil {
		t.Error("the places of those that were cancelled are not free")
	}
}

// A signal whose batches became smaller during a shortage of memory is delivered in full batches again after it.
func TestSignalAfterShortage(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 4000)
	signal := leased(t, s.pool)
	execute(t, s.pool, `
		CREATE SEQUENCE tries; CREATE SEQUENCE batches;
		CREATE FUNCTION shortage() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('tries') <= 8 THEN RAISE EXCEPTION 'no memory' USING ERRCODE = 'out_of_memory'; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER shortage BEFORE INSERT ON workflow_run FOR EACH STATEMENT EXECUTE FUNCTION shortage();
		CREATE FUNCTION batch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM nextval('batches'); RETURN NULL; END $$;
		CREATE TRIGGER batch AFTER UPDATE ON process_broadcast FOR EACH STATEMENT EXECUTE FUNCTION batch()`)
	ctx := run.NewContext(t.Context(), run.Info{ID: signal, Type: "graph.signal.v1"})
	result, err := graph.New(s.pool).Parts().Handlers["graph.signal.v1"](ctx, []byte(`{"name": "go"}`))
	if err != nil || string(result) != `{"reached":4000,"set_aside":0}` {
		t.Errorf("the signal: %s, %v", result, err)
	}
	if n := query[int](t, s.pool, `SELECT last_value FROM batches`); n > 50 {
		t.Errorf("it took %d transactions", n)
	}
}

// If batches of a signal to 10,000 tokens are rolled back in between, each token that waited still gets the signal
// exactly once. Waits that began after the first batch do not get it, not even one that was inserted before and
// committed after it.
func TestBroadcastGoesOn(t *testing.T) {
	const n = 10_000
	s := newEmptySite(t)
	t.Parallel()
	p := s.deploy("S", `"S": {"await": {"signal": "go"}}`)
	audience(t, s.pool, p, n)
	late, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer late.Rollback(t.Context())
	begin := func(tx pgx.Tx) {
		if _, err := tx.Exec(t.Context(), `SET LOCAL session_replication_role = replica;
			WITH i AS (INSERT INTO process_instance (process_definition_id, status, live_tokens) SELECT id, 'WAITING', 1 FROM process_definition LIMIT 1 RETURNING id),
			     t AS (INSERT INTO process_token (id, instance_id, node, state) SELECT gen_random_uuid(), id, 'S', 'Waiting' FROM i RETURNING id, instance_id)
			INSERT INTO message_wait (token_id, place, instance_id, node, name) SELECT id, '', instance_id, 'S', 'go' FROM t`, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	begin(late)
	signal := leased(t, s.pool)
	reached, aside := broadcast(t, s.pool, signal, 700, func(batch int) {
		switch batch {
		case 3:
			if err := late.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		case 4:
			if err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error { begin(tx); return nil }); err != nil {
				t.Fatal(err)
			}
		case 5, 9: // a batch that is rolled back, as if its worker had died
			tx, err := s.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), `SELECT process_signal_v1($1, 1000, false)`, signal); err != nil {
				t.Fatal(err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
	if reached != n || aside != 0 {
		t.Errorf("%d are reached, %d set aside; want %d, 0", reached, aside, n)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', count(*), count(DISTINCT token_id), (SELECT count(*) FROM message_wait)) FROM workflow_run WHERE type = 'graph.arrive.v1'`); got != "10000 10000 2" {
		t.Errorf("runs, tokens and waits are %s, want 10000 10000 2", got)
	}
	if reached, _ = broadcast(t, s.pool, signal, 700, nil); reached != n {
		t.Errorf("after all was done once more, %d are reached", reached)
	}
	if got := query[int](t, s.pool, `SELECT count(*) FROM message_wait`); got != 2 {
		t.Errorf("%d wait, want 2", got)
	}
}

// A locked wait does not keep other tokens from getting a signal and is not set aside. Its token gets the signal when
// the lock is released.
func TestSignalAndLock(t *testing.T) {
	s := newSite(t)
	ids := listeners(s, 5)
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `SELECT FROM message_wait WHERE instance_id = $1 FOR UPDATE`, ids[2]); err != nil {
		t.Fatal(err)
	}
	signal := s.enqueue("graph.signal.v1", `{"name": "go", "payload": {"v": 7}}`)
	for k, id := range ids {
		if k != 2 {
			s.status(id, graph.Completed)
		}
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
		t.Error("one that was locked is set aside")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.status(ids[2], graph.Completed)
	s.done(signal)
	if got := query[string](t, s.pool, `SELECT result::text FROM workflow_run WHERE id = $1`, signal); got != `{"reached": 5, "set_aside": 0}` {
		t.Errorf("the signal: %s", got)
	}
	s.healthy()
}

// While a trigger refuses a thousand tokens, only one of them is tried every 10 s. When the trigger is gone, all of
// them get the signal.
func TestOwedComeBack(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 2000)
	execute(t, s.pool, fmt.Sprintf(picky, `hashtext(NEW.token_id::text) % 2 = 0`))
	reached, aside := broadcast(t, s.pool, leased(t, s.pool), 1000, nil)
	if reached+aside != 2000 || aside < 800 {
		t.Fatalf("%d are reached, %d set aside", reached, aside)
	}
	for range 2 {
		elapseAside(t, s)
		if got := query[int](t, s.pool, `SELECT process_try_again_v1()`); got != 0 {
			t.Fatalf("%d are given it, though it is refused", got)
		}
		if got := query[int](t, s.pool, `SELECT count(*) FROM workflow_set_aside WHERE last_tried_at > now() - interval '9 seconds'`); got != 1 {
			t.Errorf("%d were tried, want one for all with the same reason", got)
		}
	}
	execute(t, s.pool, `DROP FUNCTION picky() CASCADE`)
	elapseAside(t, s)
	await(t, "all to get it", func() bool {
		query[int](t, s.pool, `SELECT process_try_again_v1()`)
		return query[int](t, s.pool, `SELECT count(DISTINCT token_id) FROM workflow_run WHERE type = 'graph.arrive.v1'`) == 2000
	})
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'`); n != 2000 {
		t.Errorf("%d runs bring it, want 2000", n)
	}
}

// A token that is owed a signal, but has moved on since and waits for something else, does not get it. The debt is
// forgotten. This holds for any number of tokens.
func TestOwedToNobodyElse(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	const n = 2500
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}, "to": "T"}, "T": {"await": {"signal": "stop"}}`), n)
	signal := leased(t, s.pool)
	execute(t, s.pool, fmt.Sprintf(`BEGIN; SET LOCAL workflow.advance = 'on'; INSERT INTO process_unreached (token_id, place, signal_id, visit) SELECT id, '', '%s', version FROM process_token;
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) SELECT 'wait', id, 'graph.arrive.v1', 'signal', 'XX999', 'no', '', '1' FROM process_token; COMMIT`, signal))
	unguarded(t, s.pool, `UPDATE process_token SET node = 'T', version = version + 1; UPDATE message_wait SET node = 'T', name = 'stop'`)
	for range 10 {
		elapseAside(t, s)
		query[int](t, s.pool, `SELECT process_try_again_v1()`)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', (SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'), (SELECT count(*) FROM message_wait))`); got != "0 2500" {
		t.Errorf("runs that bring it, and waits, are %s, want 0 2500", got)
	}
	await(t, "all that is owed to be forgotten", func() bool {
		query[int](t, s.pool, `SELECT process_try_again_v1()`)
		return query[int](t, s.pool, `SELECT (SELECT count(*) FROM process_unreached) + (SELECT count(*) FROM workflow_set_aside)`) == 0
	})
}

// New signals that are owed to the same token do not postpone the next try for it.
func TestOwedComeBackBetweenSignals(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 20)
	execute(t, s.pool, fmt.Sprintf(picky, `NEW.token_id = '`+query[string](t, s.pool, `SELECT min(id::text) FROM process_token`)+`'`))
	if reached, aside := broadcast(t, s.pool, leased(t, s.pool), 1000, nil); reached != 19 || aside != 1 {
		t.Fatalf("%d are reached, %d set aside", reached, aside)
	}
	execute(t, s.pool, `DROP FUNCTION picky() CASCADE`)
	for range 2 {
		execute(t, s.pool, `BEGIN; SET LOCAL workflow.override = 'five seconds later'; UPDATE workflow_set_aside SET last_tried_at = last_tried_at - interval '5 seconds'; COMMIT`)
		broadcast(t, s.pool, leased(t, s.pool), 1000, nil)
		query[int](t, s.pool, `SELECT process_try_again_v1()`)
	}
	if got := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'`); got != 20 {
		t.Errorf("%d got it, want 20", got)
	}
}

// If somebody writes values beyond their bounds into the row of a broadcast, past the guards, it starts from the
// beginning and reaches every waiting token exactly once.
func TestBroadcastBeyondItsBounds(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 40)
	broken := []string{`reached = -1`, `began = '{infinity}'`, `name = ''`}
	broadcast(t, s.pool, leased(t, s.pool), 10, func(batch int) {
		if batch == 0 || batch > len(broken) {
			return
		}
		execute(t, s.pool, `ALTER TABLE process_broadcast DROP CONSTRAINT process_broadcast_count_check, DROP CONSTRAINT process_broadcast_left_check, DROP CONSTRAINT process_broadcast_name_check`)
		unguarded(t, s.pool, `UPDATE process_broadcast SET `+broken[batch-1])
		execute(t, s.pool, `ALTER TABLE process_broadcast ADD CONSTRAINT process_broadcast_count_check CHECK (reached >= 0) NOT VALID,
			ADD CONSTRAINT process_broadcast_left_check CHECK (cardinality(began) = cardinality(tokens)) NOT VALID, ADD CONSTRAINT process_broadcast_name_check CHECK (name <> '') NOT VALID`)
	})
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', count(*), count(DISTINCT token_id)) FROM workflow_run WHERE type = 'graph.arrive.v1'`); got != "40 40" {
		t.Errorf("runs that bring it, and tokens that it is brought to, are %s, want 40 40", got)
	}
}

// Signals that are owed are delivered even if somebody has deleted the rows of workflow_set_aside that report them.
func TestOwedWithoutANote(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), 1000)
	execute(t, s.pool, fmt.Sprintf(picky, `NEW.type = 'graph.arrive.v1' AND hashtext(NEW.token_id::text) % 2 = 0`))
	if _, aside := broadcast(t, s.pool, leased(t, s.pool), 1000, nil); aside < 400 {
		t.Fatalf("%d are set aside", aside)
	}
	execute(t, s.pool, `DROP FUNCTION picky() CASCADE; DELETE FROM workflow_set_aside`)
	for range 4 {
		query[int](t, s.pool, `SELECT process_try_again_v1()`)
	}
	if got := query[int](t, s.pool, `SELECT count(DISTINCT token_id) FROM workflow_run WHERE type = 'graph.arrive.v1'`); got != 1000 {
		t.Errorf("%d got it, want 1000", got)
	}
}

// A signal sets aside a wait with any kind of broken column, and reaches the others.
func TestOddWaitsAreNoted(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	for k, change := range []string{`place = repeat('p', 4000)`, `instance_id = gen_random_uuid()`, `node = repeat('n', 4000)`, `created_at = '-infinity'`} {
		process := s.deploy("S", `"S": {"await": {"signal": "go"}}`)
		unguarded(t, s.pool, `TRUNCATE process_instance, message_wait, process_token, workflow_set_aside, process_unreached, workflow_run CASCADE`)
		audience(t, s.pool, process, 5)
		unguarded(t, s.pool, `UPDATE message_wait SET `+change+` WHERE token_id = (SELECT min(token_id::text)::uuid FROM message_wait);
			UPDATE process_token SET state = 'Completed' WHERE id = (SELECT min(token_id::text)::uuid FROM message_wait)`)
		reached, aside := broadcast(t, s.pool, leased(t, s.pool), 1000, nil)
		if reached != 4 || aside != 1 {
			t.Errorf("%d, %s: %d are reached, %d set aside; want 4, 1", k, change, reached, aside)
		}
	}
}

// With tens of thousands of rows set aside and nothing due, process_try_again_v1 and workflow_try_again_v1 read only
// some of them.
func TestLookingAgainIsBounded(t *testing.T) {
	s := newEmptySite(t)
	t.Parallel()
	const n = 20_000
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), n)
	signal := leased(t, s.pool)
	execute(t, s.pool, fmt.Sprintf(`BEGIN; SET LOCAL workflow.advance = 'on'; INSERT INTO process_unreached (token_id, place, signal_id, visit) SELECT id, '', '%s', version FROM process_token;
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) SELECT 'wait', id, 'graph.arrive.v1', 'signal', 'XX999', 'no', '', process_wait_version(id) FROM process_token;
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) SELECT 'run', gen_random_uuid(), 'a.b', 'lease', 'XX999', 'no', '', '1' FROM process_token; COMMIT; ANALYZE`, signal))
	unguarded(t, s.pool, `INSERT INTO incident (instance_id, node, code, message, resolved_at) SELECT id, 'S', 'not_reached', 'x', now() FROM process_instance;
		INSERT INTO workflow_accepted (run, token, type, until) SELECT id, id, 'a.b', now() + interval '1 day' FROM process_token`)
	for _, call := range []string{`process_try_again_v1`, `workflow_try_again_v1`, `workflow_look_v1`} {
		tx, err := s.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		read := func() (n int) {
			if err := tx.QueryRow(t.Context(), `SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables WHERE relname ~ '^(workflow_|process_|message_|incident)'`).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		before := read()
		if _, err := tx.Exec(t.Context(), `SELECT `+call+`()`); err != nil {
			t.Fatal(err)
		}
		if n := read() - before; n > 10_000 {
			t.Errorf("%s reads %d rows", call, n)
		}
		_ = tx.Rollback(t.Context())
	}
}

// audience inserts n instances that wait for the signal go at S, with SQL and without triggers.
func audience(t *testing.T, pool *pgxpool.Pool, process string, n int) {
	t.Helper()
	unguarded(t, pool, `
		CREATE TEMP TABLE crowd AS SELECT gen_random_uuid() AS id, gen_random_uuid() AS token, g FROM generate_series(1, `+strconv.Itoa(n)+`) AS g;
		INSERT INTO process_instance (id, process_definition_id, status, live_tokens, version, started_at)
		SELECT c.id, (SELECT id FROM process_definition WHERE name = '`+process+`'), 'WAITING', 1, 2, now() FROM crowd c;
		INSERT INTO process_state_history (instance_id, from_status, to_status, version, actor) SELECT c.id, f, s, 2, 'x' FROM crowd c, (VALUES ('CREATED', 'IN_PROGRESS'), ('IN_PROGRESS', 'WAITING')) AS v (f, s);
		INSERT INTO process_token (id, instance_id, node, edge, state) SELECT c.token, c.id, 'S', '>S', 'Waiting' FROM crowd c;
		INSERT INTO message_wait (token_id, place, instance_id, node, name) SELECT c.token, '', c.id, 'S', 'go' FROM crowd c ORDER BY c.g;
		DROP TABLE crowd`)
}

// unguarded executes statements as the owner without triggers, to make rows as earlier versions may have written them.
func unguarded(t *testing.T, pool *pgxpool.Pool, statements string) {
	t.Helper()
	pgtest.Unbound(t, pool.Config().ConnString())
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SET LOCAL session_replication_role = replica;`+statements, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func execute(t *testing.T, pool *pgxpool.Pool, statements string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), statements, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
}

// leased inserts a run that sends the signal go, leased already, and returns its id.
func leased(t *testing.T, pool *pgxpool.Pool) uuid.UUID {
	t.Helper()
	id := query[uuid.UUID](t, pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.signal.v1', '{"name": "go"}') RETURNING id`)
	unguarded(t, pool, fmt.Sprintf(`UPDATE workflow_run SET status = 'leased', lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'test', lease_until = now() + interval '1 hour', started_at = now() WHERE id = '%s'`, id))
	return id
}

// broadcast delivers a signal in batches of at most most tokens, and calls between before each batch. It returns the
// final numbers.
func broadcast(t *testing.T, pool *pgxpool.Pool, signal uuid.UUID, most int, between func(batch int)) (reached, aside int) {
	t.Helper()
	finished := false
	for batch := 0; !finished; batch++ {
		if between != nil {
			between(batch)
		}
		if err := pool.QueryRow(t.Context(), `SELECT reached, set_aside, finished FROM process_signal_v1($1, $2, false)`, signal, most).Scan(&reached, &aside, &finished); err != nil {
			t.Fatal(err)
		}
	}
	return reached, aside
}
