package graph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A throw with compensate also undoes a step that a boundary timer cut off while it was running, because it may have
// taken effect.
func TestThrowUndoesWhatWasCutOff(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "B")+`,
		"B": {"do": "test.step.v1", "in": {"name": "'B'", "ms": "10000"}, "undo": "test.undo.v1", "on": [{"after": "PT1S", "to": "X"}], "to": "Z"},
		"X": {"throw": {"compensate": true}, "to": "Z"}, "Z": {"end": true}`)
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	if got := s.undone(id); got != "B A" {
		t.Errorf("undone: %s; want B A", got)
	}
	if certain := query[string](t, s.pool, `SELECT string_agg(node_id || certain, ',' ORDER BY "order") FROM compensation_record`); certain != "Atrue,Bfalse" {
		t.Errorf("recorded %s", certain)
	}
	s.healthy()
}

// A step whose result alone was refused is not executed again: a retry continues with a result that an operator
// corrects. The step is undone if its instance fails.
func TestRefusedResultIsDone(t *testing.T) {
	s := newEmptySite(t)
	worker.Handle(s.mux, "test.big.v1", func(ctx context.Context, _ map[string]any) (string, error) {
		s.called(ctx, "big")
		return strings.Repeat("x", jsondoc.MaxResult+1), nil
	})
	s.worker = s.hire()
	p := s.deploy("A", `"A": {"do": "test.big.v1", "in": {"name": "'A'"}, "undo": "test.undo.v1", "to": "B"},`+step("B", "", `"n": "steps.A.n"`))
	mended := s.start(p, `{}`)
	s.retry(s.stopped(mended, settling.CodeResult, 1), "")
	s.stopped(mended, settling.CodeResult, 1)
	s.correct(mended, "A", `{"n": 7}`)
	s.retry(s.stopped(mended, settling.CodeResult, 1), "")
	s.status(mended, graph.Completed)
	s.want(map[string]int{"big": 1, "B": 1, "undo A": 0})
	failed := s.start(p, `{}`)
	s.stopped(failed, settling.CodeResult, 1)
	s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, failed)))
	s.status(failed, graph.Failed)
	if n := s.count("undo A"); n != 1 {
		t.Errorf("undone %d times, want once", n)
	}
	s.healthy()
}

// If the payload and the result of a step together are too large for the payload of its undo step, the undo step gets
// only the id of the step's run.
func TestUndoOfLargeResult(t *testing.T) {
	s := newEmptySite(t)
	worker.Handle(s.mux, "test.large.v1", func(context.Context, map[string]any) (string, error) {
		return strings.Repeat("x", jsondoc.MaxPayload), nil
	})
	var told atomic.Pointer[map[string]json.RawMessage]
	worker.Handle(s.mux, "test.unlarge.v1", func(_ context.Context, in map[string]json.RawMessage) (struct{}, error) {
		told.Store(&in)
		return struct{}{}, nil
	})
	s.worker = s.hire()
	p := s.deploy("A", `"A": {"do": "test.large.v1", "undo": "test.unlarge.v1", "to": "T"}, "T": {"throw": {"error": "no"}}`)
	s.status(s.start(p, `{}`), graph.Failed)
	given := *told.Load()
	if _, has := given["input"]; has || len(given["run"]) == 0 || string(given["certain"]) != "true" {
		t.Errorf("the undo step was given %d keys, %s, certain %s", len(given), given["run"], given["certain"])
	}
	s.healthy()
}

// A payload that is nested too deep for a run opens an incident at its own step. The step before it succeeds.
func TestDeepPayload(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "B")+`, "B": {"do": "test.step.v1", "in": {"name": "'B'", "x": "{'a': {'a': {'a': {'a': {'a': input}}}}}"}}`)
	id := s.start(p, strings.Repeat(`{"a":`, 59)+`1`+strings.Repeat("}", 59))
	pgtest.Await(t, "the incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND node = 'B' AND code = 'expression_failed' AND message LIKE '%nested deeper than 64%'`, id) == 1
	})
	if status := query[string](t, s.pool, `SELECT status FROM workflow_run WHERE node = 'A'`); status != "succeeded" {
		t.Errorf("A is %s", status)
	}
}

// An input with a number beyond ±1e308 is refused when the start is enqueued, or, if the row was inserted without
// triggers, when the instance is started. A correction with such a number is refused, too.
func TestHugeNumbers(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "", `"fails": "99"`))
	const start = `INSERT INTO workflow_run (id, type, payload) VALUES ($1, 'graph.start.v1', $2)`
	refused, payload := uuid.New(), fmt.Sprintf(`{"process": %q, "input": {"x": 1e400}}`, p)
	if _, err := s.pool.Exec(t.Context(), start, refused, payload); err == nil || !strings.Contains(err.Error(), "payload: a number is beyond ±1e308") {
		t.Errorf("enqueued with 1e400: %v", err)
	}
	if err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), start, refused, payload)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the start to fail", func() bool {
		return query[string](t, s.pool, `SELECT status || coalesce(last_error, '') FROM workflow_run WHERE id = $1`, refused) ==
			`failedinput: payload: $.x: number 1`+strings.Repeat("0", 119)+`… is beyond ±1e308; round it, or send it as a string`
	})
	id := s.start(p, `{}`)
	s.stopped(id, "handler_error", 1)
	id = s.start(s.deploy("H", `"H": {"human": {}, "to": "A"}, `+step("A", "")), `{}`)
	s.status(id, graph.Waiting)
	if _, err := s.pool.Exec(t.Context(), `SELECT process_correct($1, 'H', '{"x": [1e400]}', 'oops')`, id); err == nil || !strings.Contains(err.Error(), "beyond ±1e308") {
		t.Errorf("a correction to 1e400: %v", err)
	}
}

// A throw with compensate undoes nothing until a called instance that was cut off has undone its own steps, because
// these were done last.
func TestThrowWaitsForCalled(t *testing.T) {
	s := newSite(t)
	child := s.deploy("C", undoable("C", "D")+","+step("D", "", `"ms": "10000"`))
	p := s.deploy("A", undoable("A", "B")+`,
		"B": {"call": {"process": "`+child+`", "undo": "propagate"}, "on": [{"after": "PT1S", "to": "X"}], "to": "Z"},
		"X": {"throw": {"compensate": true}, "to": "Z"}, "Z": {"end": true}`)
	s.status(s.start(p, `{}`), graph.Completed)
	if late := query[bool](t, s.pool, `
		SELECT min(started_at) FILTER (WHERE payload->'input'->>'name' = 'A') < max(finished_at) FILTER (WHERE payload->'input'->>'name' = 'C')
		FROM workflow_run WHERE type = 'test.undo.v1'`); late {
		t.Error("A was undone before C was")
	}
	s.healthy()
}

// If the start of a called instance is cancelled or deleted by hand, the caller takes its error edge for
// child_not_started.
func TestCancelledStart(t *testing.T) {
	s := newSite(t)
	child := s.deploy("C", step("C", ""))
	p := s.deploy("H", `"H": {"human": {}, "to": "A"}, "A": {"call": {"process": "`+child+`", "undo": "none"}, "on": [{"error": "child_not_started", "to": "B"}]}, `+step("B", ""))
	// A trigger holds the starts as they are inserted: workflow_pause would take effect only with the worker's next
	// look.
	if _, err := s.pool.Exec(t.Context(), `
		CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.held_at := now(); RETURN NEW; END$$;
		CREATE TRIGGER held BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (NEW.payload ? 'parent') EXECUTE FUNCTION held()`); err != nil {
		t.Fatal(err)
	}
	for how, want := range map[string]string{"workflow_cancel": "cancelled", "workflow_delete": "deleted"} {
		id := s.start(p, `{}`)
		s.status(id, graph.Waiting)
		s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": "%s", "by": "anna"}`, query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE instance_id = $1`, id)))
		var start uuid.UUID
		pgtest.Await(t, "the child's start", func() bool {
			return s.pool.QueryRow(t.Context(), `SELECT id FROM workflow_run WHERE payload->'parent'->>'instance' = $1`, id.String()).Scan(&start) == nil
		})
		if got := query[string](t, s.pool, `SELECT `+how+`($1, 'not today')`, start); got != want {
			t.Fatalf("%s answers %s", how, got)
		}
		s.status(id, graph.Completed)
	}
	if n := s.count("B"); n != 2 {
		t.Errorf("B was done %d times, want twice", n)
	}
	s.healthy()
}

// A reminder (a non-interrupting timer) that is cancelled by hand does not fire, and the user task it belongs to
// continues.
func TestCancelledReminder(t *testing.T) {
	s := newSite(t)
	p := s.deploy("H", `"H": {"human": {}, "on": [{"after": "PT1H", "keep": true, "to": "R"}], "to": "A"}, `+step("R", "")+","+step("A", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	if got := query[string](t, s.pool, `SELECT workflow_cancel(id, 'no reminder') FROM workflow_run WHERE type = 'graph.timer.v1'`); got != "cancelled" {
		t.Fatal(got)
	}
	s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": "%s", "by": "anna"}`, query[uuid.UUID](t, s.pool, `SELECT id FROM user_task`)))
	s.status(id, graph.Completed)
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.cut_off.v1'`); n != 0 {
		t.Errorf("%d runs tell of a step that was cut off", n)
	}
	s.healthy()
}

// Instances of different tenants may have the same key.
func TestKeysOfTenants(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", ""))
	for _, tenant := range []string{"", "a", "b", "a"} {
		s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "1", "tenant": %q}`, p, tenant))
	}
	pgtest.Await(t, "the starts", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.start.v1' AND status = 'succeeded'`) == 4
	})
	if got := query[string](t, s.pool, `SELECT string_agg(coalesce(tenant_id, '-'), ',' ORDER BY tenant_id) FROM process_instance`); got != "a,b,-" {
		t.Errorf("instances of %s", got)
	}
}

// A start with the id of an instance of another process fails with the code conflict.
func TestIDOfAnotherProcess(t *testing.T) {
	s := newSite(t)
	p, q := s.deploy("A", step("A", "")), s.deploy("A", step("A", ""))
	for _, c := range []struct{ process, want string }{
		{p, "succeeded"}, {p, "succeeded"}, {q, "failed conflict id: 01890a5d-ac96-774b-bcce-b302099a8057 is an instance of " + p},
	} {
		id := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "id": "01890a5d-ac96-774b-bcce-b302099a8057"}`, c.process))
		pgtest.Await(t, "the start", func() bool {
			return query[bool](t, s.pool, `SELECT finished_at IS NOT NULL FROM workflow_run WHERE id = $1`, id)
		})
		if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, error->>'code', last_error) FROM workflow_run WHERE id = $1`, id); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
	s.healthy()
}

// A message with the id of one that has expired undelivered is a new message.
func TestMessageAgainAfterItsTime(t *testing.T) {
	s := newSite(t)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1", "id": "m1", "ttl": "PT1S", "payload": {"n": 1}}`)
	pgtest.Await(t, "the message", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM message WHERE expires_at <= now()`) == 1
	})
	id := s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'1'"}, "to": "A"}, `+step("A", "", `"n": "steps.M.n"`)), `{}`)
	s.status(id, graph.Waiting)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1", "id": "m1", "payload": {"n": 2}}`)
	s.status(id, graph.Completed)
	if n := query[string](t, s.pool, `SELECT result->>'n' FROM workflow_run WHERE node = 'A'`); n != "2" {
		t.Errorf("the message was that of %s", n)
	}
	s.healthy()
}

// A number that is not exact as a double is refused as the key of a message, so that it cannot match the key of another
// instance.
func TestInexactKey(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "input.k"}}`), `{"k": 9007199254740995}`)
	pgtest.Await(t, "the incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND message LIKE '%use a text as key'`, id) == 1
	})
}

// A message that was taken may outlive the instance that took it: the invariants still hold.
func TestMessageOutlivesInstance(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'1'"}}`), `{}`)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	s.status(id, graph.Completed)
	pgtest.ByHand(t, s.pool, `WITH gone AS (DELETE FROM workflow_run WHERE token_id IS NOT NULL) DELETE FROM process_instance`)
	s.healthy()
}

// A start with both a key and an id fails.
func TestStartWithTwoNames(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", ""))
	s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "1", "id": %q}`, p, uuid.NewString()))
	pgtest.Await(t, "the start to fail", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE status = 'failed' AND last_error LIKE 'id, key: give one of them%'`) == 1
	})
}

// Two tokens of an inner fork may arrive at a join over the same edge. Both count if the join needs a number of tokens.
func TestForkOntoOneEdge(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "G": {"fork": ["X", "X"]}, "X": {"choose": [{"if": "input == {}", "to": "J"}], "else": "Z"},
		"J": {"join": {"need": 3}, "to": "D"}, "Z": {"end": true},`+step("A", "G", `"ms": "300"`)+","+step("B", "J")+","+step("D", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "D": 1})
	s.healthy()
}

// A step of type graph.message.v1 or graph.signal.v1 sends its message or signal.
func TestStepsSend(t *testing.T) {
	s := newSite(t)
	wait := s.deploy("F", `"F": {"fork": ["M", "S"]}, "M": {"await": {"message": "paid", "key": "input.k"}}, "S": {"await": {"signal": "go"}}`)
	id := s.start(wait, `{"k": "7"}`)
	s.waitsFor(2)
	send := s.deploy("M", `"M": {"do": "graph.message.v1", "in": {"name": "'paid'", "key": "input.k"}, "to": "S"}, "S": {"do": "graph.signal.v1", "in": {"name": "'go'"}}`)
	s.status(s.start(send, `{"k": "7"}`), graph.Completed)
	s.status(id, graph.Completed)
	s.healthy()
}

// An instance whose tokens multiply without end undoes its completed steps before it fails.
func TestExplosionIsUndone(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", undoable("A", "X")+`, "X": {"fork": ["X", "X", "E"]}, "E": {"end": true}`), `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "A" {
		t.Errorf("undone %q, want A", got)
	}
	s.healthy()
}

// A step that is ended while it runs, with its scope, by a join or by a timer, is undone exactly once by a throw behind
// it, because it may have taken effect.
func TestThrowUndoesWhatWasEnded(t *testing.T) {
	const slow = `"B": {"do": "test.step.v1", "in": {"name": "'B'", "ms": "10000"}, "undo": "test.undo.v1"`
	const after = `, "X": {"throw": {"compensate": true}, "to": "Z"}, "Z": {"end": true}`
	for name, nodes := range map[string]string{
		"a timer of its scope": `"S": {"scope": {"start": "B", "nodes": {` + slow + `}}}, "on": [{"after": "PT1S", "to": "X"}], "to": "Z"}` + after,
		"an error beside it": `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["B", "C"]}, ` + slow + `},` + step("C", "", `"ms": "500"`, `"fail": "'no'"`) + `}},
			"on": [{"error": "*", "to": "X"}], "to": "Z"}` + after,
		"a join that is done": `"S": {"fork": ["B", "C"]}, ` + slow + `, "to": "J"}, "J": {"join": {"need": 1, "rest": "cancel"}, "to": "X"},` + step("C", "J", `"ms": "500"`) + after,
		"two throws": `"S": {"fork": ["B", "C"]}, ` + slow + `, "on": [{"after": "PT1S", "to": "X"}], "to": "Z"},
			"C": {"wait": "PT1S", "to": "X"}` + after,
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			id := s.start(s.deploy("A", undoable("A", "S")+","+nodes), `{}`)
			s.status(id, graph.Completed)
			got := s.undone(id)
			if name == "two throws" && got == "A B" { // the throw of C came before that of B
				got = "B A"
			}
			if got != "B A" {
				t.Errorf("undone: %s; want B A", got)
			}
			s.healthy()
		})
	}
}

// If an effect of a step pauses the instance, the next step is held: what an effect changes is seen when the step is
// settled.
func TestEffectPausesInstance(t *testing.T) {
	s := newEmptySite(t)
	worker.Handle(s.mux, "test.pause.v1", func(ctx context.Context, in struct{ Instance uuid.UUID }) (struct{}, error) {
		return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT process_pause(t.instance_id) FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE r.id = $1`, run.FromContext(ctx).ID)
			return err
		})
	})
	s.worker = s.hire()
	id := s.start(s.deploy("A", `"A": {"do": "test.pause.v1", "to": "B"},`+step("B", "")), `{}`)
	pgtest.Await(t, "A to be done", func() bool { return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE node = 'B'`) == 1 })
	if held := query[bool](t, s.pool, `SELECT held_at IS NOT NULL FROM workflow_run WHERE node = 'B'`); !held {
		t.Error("B is not held")
	}
	query[string](t, s.pool, `SELECT process_resume($1)::text`, id)
	s.status(id, graph.Completed)
	s.healthy()
}

// Two copies of one message in a batch are stored as one message, and the batch is settled without an error.
func TestMessageTwiceAtOnce(t *testing.T) {
	s := newEmptySite(t)
	// The first run is settled alone; meanwhile the others are collected into a batch.
	if _, err := s.pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, payload)
		SELECT 'graph.message.v1', jsonb_build_object('name', 'paid', 'key', '1', 'id', (g / 2)::text) FROM generate_series(2, 21) AS g`); err != nil {
		t.Fatal(err)
	}
	var refused atomic.Int32
	employ(t, s.pool, func(pool *pgxpool.Pool) worker.Config {
		return worker.Config{
			Pool: pool, Mux: s.mux, Prefixes: []string{"graph."}, Processes: s.engine, Retention: worker.Retention{Off: true}, PollInterval: 20 * time.Millisecond,
			Observe: worker.Observer{SettleRun: func(_ int, _ time.Duration, err error) {
				if err != nil {
					refused.Add(1)
				}
			}},
		}
	})
	pgtest.Await(t, "the messages", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 20
	})
	if n := query[int](t, s.pool, `SELECT count(*) FROM message`); n != 10 {
		t.Errorf("%d messages", n)
	}
	if n := refused.Load(); n > 0 {
		t.Errorf("%d batches were refused", n)
	}
	s.healthy()
}

// Deleting or truncating instances also deletes their events, their state history and their arrivals at joins, although
// these have no foreign key.
func TestWhatHappenedGoesAlong(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "J": {"join": "all"},`+step("A", "J")+","+step("B", "J"))
	for _, how := range []string{`DELETE FROM process_instance`, `TRUNCATE process_instance CASCADE`} {
		s.status(s.start(p, `{}`), graph.Completed)
		left := func() int {
			return query[int](t, s.pool, `SELECT (SELECT count(*) FROM process_event) + (SELECT count(*) FROM process_state_history) + (SELECT count(*) FROM join_arrival)`)
		}
		if n := left(); n < 5 {
			t.Fatalf("only %d rows tell of it", n)
		}
		pgtest.ByHand(t, s.pool, how)
		if n := left(); n != 0 {
			t.Errorf("%s leaves %d rows", how, n)
		}
	}
}

// A message that a boundary event with keep takes leads a second token on also if the boundary event cannot be armed again: its key
// is evaluated anew, and a corrected fact may have made that impossible. The token that stays then has an incident.
func TestTakenMessageWhoseKeyFails(t *testing.T) {
	s := newSite(t)
	p := s.deploy("H", `"H": {"human": {}, "to": "W"},
		"W": {"human": {}, "on": [{"message": "more", "key": "string(int(10.0 / steps.H.n))", "keep": true, "to": "R"}], "to": "E"}, "E": {"end": true},`+step("R", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	s.done(s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": "%s", "by": "anna", "output": {"n": 2}}`, query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE instance_id = $1`, id))))
	pgtest.Await(t, "the wait for the message", func() bool {
		return query[bool](t, s.pool, `SELECT EXISTS (SELECT FROM message_wait w WHERE w.instance_id = $1)`, id)
	})
	query[string](t, s.pool, `SELECT process_correct($1, 'H', '{"n": 0}', 'a mistake')`, id)
	s.enqueue("graph.message.v1", `{"name": "more", "key": "5"}`)
	pgtest.Await(t, "the step of the second token", func() bool { return s.count("R") == 1 })
	if got := query[string](t, s.pool, `SELECT string_agg(node || ' ' || code, ', ') FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, id); got != "W expression_failed" {
		t.Errorf("incidents: %s", got)
	}
}
