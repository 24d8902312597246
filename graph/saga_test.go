package graph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/worker"
)

// undoable returns the JSON of a node like step, with the undo step test.undo.v1, which calls "undo " and its name.
func undoable(name, to string, more ...string) string {
	return strings.Replace(step(name, to, more...), `"do": "test.step.v1"`, `"do": "test.step.v1", "undo": "test.undo.v1"`, 1)
}

// undone returns the names of the steps that were undone, in the order in which their undo steps completed.
func (s *site) undone(id uuid.UUID) string {
	s.t.Helper()
	return query[string](s.t, s.pool, `
		SELECT coalesce(string_agg(r.payload->'input'->>'name', ' ' ORDER BY r.finished_at), '')
		FROM workflow_run r JOIN process_token t ON t.id = r.token_id
		WHERE t.instance_id = $1 AND r.type = 'test.undo.v1' AND r.status = 'succeeded'`, id)
}

// S20: completed steps are undone in reverse order of their completion, across branches. S29: each undo step gets the
// input and output of its own step.
func TestUndoInReverseOrder(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "C"]}, "J": {"join": "all", "to": "D"},`+
		undoable("A", "B", `"x": "'1'"`)+","+undoable("B", "J", `"ms": "'300'"`, `"x": "'2'"`)+","+undoable("C", "J", `"ms": "'100'"`)+","+step("D", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "B C A" && got != "C B A" {
		t.Errorf("undone %q", got)
	}
	want := query[string](t, s.pool, `SELECT string_agg(node_id, ' ' ORDER BY "order" DESC) FROM compensation_record WHERE instance_id = $1`, id)
	if got := s.undone(id); got != want {
		t.Errorf("undone %q, want %q: the reverse of the completions", got, want)
	}
	if got := query[string](t, s.pool, `
		SELECT r.payload->'output'->>'x' FROM workflow_run r JOIN process_token t ON t.id = r.token_id
		WHERE t.instance_id = $1 AND r.type = 'test.undo.v1' AND r.payload->'input'->>'name' = 'A'`, id); got != "1" {
		t.Errorf("A is undone with x = %s, want its own", got)
	}
	if why := query[string](t, s.pool, `SELECT failure_reason FROM process_instance WHERE id = $1`, id); why != "D: no: it was told to fail" {
		t.Errorf("failure_reason = %q", why)
	}
	s.healthy()
}

// An undo step is not due before what led to it has finished, so its lease cannot seem to have begun earlier: process_misundone
// and the torture compare these times. (A lease begins at the time of its statement, which may be before the commit that it sees.)
func TestUndoIsDueInOrder(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", undoable("A", "B")+","+undoable("B", "C")+","+undoable("C", "D")+","+step("D", "", `"fail": "'no'"`)), `{}`)
	s.status(id, graph.Failed)
	if got := query[string](t, s.pool, `
		SELECT string_agg(o.name || CASE WHEN o.run_at >= o.before THEN '' ELSE ' early' END, ' ' ORDER BY o.finished_at)
		FROM (SELECT coalesce(r.payload->'input'->>'name', r.node) AS name, r.run_at, r.finished_at, lag(r.finished_at) OVER (ORDER BY r.finished_at) AS before
		      FROM workflow_run r JOIN process_token t ON t.id = r.token_id
		      WHERE t.instance_id = $1 AND (r.type = 'test.undo.v1' OR r.node = 'D')) AS o
		WHERE o.before IS NOT NULL`, id); got != "C B A" {
		t.Errorf("undone %q, want C B A, each due when the one before has finished", got)
	}
}

// The same holds for steps that the worker does not carry on, and for timers whose time has come.
func TestStepsAreDueInOrder(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", step("A", "F")+`, "F": {"fork": ["X", "W", "U"]}, "X": {"do": "nobody.x.v1"}, "W": {"wait": "PT0S"}, "U": {"wait": {"until": "input.opens"}}`), `{"opens": "2020-01-01T00:00:00Z"}`)
	const due = `
		SELECT string_agg(r.node || CASE WHEN r.run_at >= a.finished_at THEN '' ELSE ' early' END, ' ' ORDER BY r.node)
		FROM workflow_run r JOIN process_token t ON t.id = r.token_id, workflow_run a JOIN process_token o ON o.id = a.token_id
		WHERE t.instance_id = $1 AND o.instance_id = $1 AND a.node = 'A' AND r.node IN ('X', 'W', 'U')`
	await(t, "all branches", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.node IN ('X', 'W', 'U')`, id) == 3
	})
	if got := query[string](t, s.pool, due, id); got != "U W X" {
		t.Errorf("the branches are %q, want U W X, each due when A has finished", got)
	}
}

// S22: a step that was done twice is undone twice, the later execution first.
func TestUndoLoop(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "X", `"n": "'A' in steps ? steps.A.n + 1.0 : 1.0"`)+`, "X": {"choose": [{"if": "steps.A.n < 2", "to": "A"}], "else": "D"},`+step("D", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	got := query[string](t, s.pool, `
		SELECT string_agg(r.payload->'output'->>'n', ' ' ORDER BY r.finished_at) FROM workflow_run r JOIN process_token t ON t.id = r.token_id
		WHERE t.instance_id = $1 AND r.type = 'test.undo.v1'`, id)
	if got != "2 1" {
		t.Errorf("undone %q, want 2 1", got)
	}
	s.healthy()
}

// S24: an undo step that fails for good is not skipped: nothing more is undone until an operator retries it.
func TestUndoFails(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "B")+","+undoable("B", "C", `"undo_fails": "true"`)+","+step("C", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'compensation_failed'`, id) == 1
	})
	if got := s.undone(id); got != "" {
		t.Errorf("undone %q although the first has failed", got)
	}
	s.healthy()
	s.mu.Lock()
	s.undoWorks = true
	s.mu.Unlock()
	incident := query[uuid.UUID](t, s.pool, `SELECT id FROM incident WHERE instance_id = $1`, id)
	s.enqueue("graph.retry.v1", fmt.Sprintf(`{"incident": %q}`, incident))
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "B A" {
		t.Errorf("undone %q, want B A", got)
	}
	got := query[string](t, s.pool, `SELECT string_agg(concat(node_id, ' ', status), ', ' ORDER BY "order") FROM compensation_record WHERE instance_id = $1`, id)
	if want := "A Completed, B Failed, B Completed"; got != want {
		t.Errorf("records %q, want %q", got, want)
	}
	s.healthy()
}

// S25: a second throw with compensate undoes only what the first has not undone.
func TestThrowTwice(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "T1")+`, "T1": {"throw": {"compensate": true}, "to": "B"},`+undoable("B", "T2")+`, "T2": {"throw": {"compensate": true}, "to": "C"},`+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	if got := s.undone(id); got != "A B" {
		t.Errorf("undone %q, want A and then B", got)
	}
	s.healthy()
}

// S21: a failure in one branch stops the others. A step that was running is undone as uncertain, because it may have
// taken effect, and not before its lease has expired.
func TestUndoWhatWasRunning(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B", "C"]},`+undoable("A", "")+","+step("B", "", `"ms": "'300'"`, `"fail": "'no'"`)+","+undoable("C", "after", `"ms": "'900'"`)+","+step("after", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "C A" {
		t.Errorf("undone %q, want C A", got)
	}
	if n := query[int](t, s.pool, `
		SELECT count(*) FROM compensation_record c JOIN workflow_run r ON r.id = c.run_id JOIN workflow_run u ON u.id = c.undo_run_id
		WHERE c.instance_id = $1 AND NOT c.certain AND c.node_id = 'C' AND u.started_at - r.started_at >= interval '4900 ms'`, id); n != 1 {
		t.Error("C is not undone as uncertain, or was undone before its lease of five seconds has expired")
	}
	s.want(map[string]int{"after": 0})
	s.healthy()
}

// A cancel with "compensate" undoes the completed steps and then cancels the instance.
func TestCancelAndUndo(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "W")+`, "W": {"wait": "PT1H"}`)
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "compensate": true}`, id))
	s.status(id, graph.Cancelled)
	if got := s.undone(id); got != "A" {
		t.Errorf("undone %q, want A", got)
	}
	s.healthy()
}

// A cancel fails when it is settled if the instance began to compensate after its handler looked.
func TestCancelOfWhatUndoes(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "B", `"undo_fails": "true"`)+","+step("B", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'compensation_failed'`, id) == 1
	})
	s.worker.release()
	s.mux = worker.NewMux()
	s.engine = altered{s.engine, func(e *hook.Engine) {
		e.Handlers["graph.cancel.v1"] = func(context.Context, json.RawMessage) (json.RawMessage, error) { return json.RawMessage(`{}`), nil }
	}}
	s.hire()
	cancel := query[uuid.UUID](t, s.pool, `
		INSERT INTO workflow_run (type, payload, max_attempts) VALUES ('graph.cancel.v1', jsonb_build_object('instance', $1::text, 'compensate', true), 1) RETURNING id`, id.String())
	if got, want := s.outcome(cancel), fmt.Sprintf("failed conflict instance: %s is already undoing its completed steps, and ends after that", id); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	s.healthy()
}

// S26: a throw with compensate outside a scope undoes the steps within the scope only if the scope is over. Inside a
// scope it undoes the steps of that scope and no others. A failure of the instance undoes whatever has not been undone.
func TestThrowAndScopes(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["over", "open", "B"]},
		"over": {"scope": {"start": "Z", "nodes": {`+undoable("Z", "")+`}}, "to": "J"},
		"open": {"scope": {"start": "A", "nodes": {`+undoable("A", "U")+`, "U": {"human": {}, "to": "Y"},`+undoable("Y", "inner")+`,
			"inner": {"throw": {"compensate": true}, "to": "V"}, "V": {"human": {}, "to": "bad"},`+step("bad", "", `"fail": "'no'"`)+`}}, "to": "J"},`+
		undoable("B", "W", `"ms": "'300'"`)+`, "W": {"human": {}, "to": "outer"}, "outer": {"throw": {"compensate": true}, "to": "J"},
		"J": {"join": "all"}`)
	id := s.start(p, `{}`)
	s.at("U", 1)
	s.at("W", 1)
	s.finish("W")
	s.at("J", 2)
	outside := s.undone(id)
	if outside != "B Z" && outside != "Z B" {
		t.Errorf("thrown outside it undoes %q, want B and Z: the scope of A is not over", outside)
	}
	s.finish("U")
	s.at("V", 1)
	if got := s.undone(id); got != outside+" Y A" {
		t.Errorf("thrown inside it undoes %q, want Y A besides", got)
	}
	s.finish("V")
	s.status(id, graph.Failed)
	if got := s.undone(id); got != outside+" Y A" {
		t.Errorf("in the end %q is undone, want nothing besides", got)
	}
	s.healthy()
}

// S27: the steps of a called instance are undone with those of its caller if the call has "undo": "propagate", in
// reverse order together with the caller's own steps, and through several levels of calls.
func TestUndoOfWhatWasCalled(t *testing.T) {
	s := newSite(t)
	grandchild := s.deploy("G", undoable("G", ""))
	child := s.deploy("X", undoable("X", "call")+fmt.Sprintf(`, "call": {"call": {"process": %q, "undo": "propagate"}, "to": "Y"},`, grandchild)+undoable("Y", ""))
	kept := s.deploy("K", undoable("K", ""))
	p := s.deploy("A", undoable("A", "call")+fmt.Sprintf(`, "call": {"call": {"process": %q, "undo": "propagate"}, "to": "kept"},
		"kept": {"call": {"process": %q, "undo": "none"}, "to": "B"},`, child, kept)+undoable("B", "D")+","+step("D", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "B Y G X A" {
		t.Errorf("undone %q, want B Y G X A", got)
	}
	s.want(map[string]int{"undo K": 0})
	if got := query[string](t, s.pool, `SELECT node_id FROM compensation_record c JOIN workflow_run r ON r.id = c.run_id
		WHERE c.instance_id = $1 AND r.payload->>'name' = 'G'`, id); got != "call/call/G" {
		t.Errorf("the record of G is of node %q, want call/call/G", got)
	}
	s.healthy()
}

// If a step of a called instance was cut off when the instance ended, the caller does not undo it before its lease has
// expired, because its handler may still work.
func TestUndoOfWhatWasCutOffInACall(t *testing.T) {
	s := newSite(t)
	child := s.deploy("F", `"F": {"fork": ["X", "U"]}, "U": {"human": {}, "to": "T"}, "T": {"terminate": true},`+undoable("X", "", `"ms": "'10000'"`))
	p := s.deploy("call", fmt.Sprintf(`"call": {"call": {"process": %q, "undo": "propagate"}, "to": "D"},`, child)+step("D", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	await(t, "X to run, and somebody to be asked", func() bool {
		return s.count("X") == 1 && query[int](t, s.pool, `SELECT count(*) FROM user_task WHERE state = 'open'`) == 1
	})
	until := query[time.Time](t, s.pool, `SELECT lease_until FROM workflow_run WHERE payload->>'name' = 'X'`)
	s.finish("U")
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "X" {
		t.Errorf("undone %q, want X", got)
	}
	if begun := query[time.Time](t, s.pool, `SELECT started_at FROM workflow_run WHERE type = 'test.undo.v1'`); begun.Before(until) {
		t.Errorf("X is undone %s before its lease was over", until.Sub(begun))
	}
	s.healthy()
}

// If a called instance completes, and lends its records, while the caller's throw already undoes other steps, the lent
// records are undone next or not at all by that throw, and no invariant about the order is violated.
func TestLentWhileItIsUndone(t *testing.T) {
	s := newSite(t)
	s.hire()
	child := s.deploy("X", undoable("X", ""))
	p := s.deploy("A", undoable("A", "F")+fmt.Sprintf(`, "F": {"fork": ["call", "U"]}, "call": {"call": {"process": %q, "undo": "propagate"}, "to": "J"},
		"U": {"human": {}, "to": "T"}, "T": {"throw": {"compensate": true}, "to": "J"}, "J": {"join": "all"}`, child))
	// A trigger keeps the called instance, which has lent its records, from committing before A is undone.
	if _, err := s.pool.Exec(t.Context(), `
		CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
		CREATE TRIGGER linger AFTER INSERT ON compensation_record FOR EACH ROW WHEN (NEW.node_id = 'call/X') EXECUTE FUNCTION linger()`); err != nil {
		t.Fatal(err)
	}
	lock, err := s.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_lock(7)`); err != nil {
		t.Fatal(err)
	}
	id := s.start(p, `{}`)
	await(t, "the child to be about to commit", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 1
	})
	s.finish("U")
	await(t, "A to be undone", func() bool { return s.count("undo A") == 1 })
	if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_unlock(7)`); err != nil {
		t.Fatal(err)
	}
	s.status(id, graph.Completed)
	if got := s.undone(id); got != "A X" && got != "A" {
		t.Errorf("undone %q, want A, and X if it was lent in time", got)
	}
	s.healthy()
}

// If a called instance is still open when its caller begins to compensate, the called instance first undoes its own
// steps. No step of the caller is undone before that.
func TestUndoWhileACallGoesOn(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", undoable("X", "W", `"undo_fails": "true"`)+`, "W": {"wait": "PT1H"}`)
	p := s.deploy("A", undoable("A", "F")+fmt.Sprintf(`, "F": {"fork": ["call", "U"]}, "call": {"call": {"process": %q, "undo": "propagate"}}, "U": {"human": {}, "to": "D"},`, child)+
		step("D", "", `"fail": "'no'"`))
	id := s.start(p, `{}`)
	await(t, "the child to wait", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1 AND status = 'WAITING'`, id) == 1
	})
	s.finish("U")
	stopped := func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE code = 'compensation_failed' AND resolved_at IS NULL`) == 1
	}
	await(t, "the child's undoing to fail", stopped)
	await(t, "its caller to ask again", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.undo.v1' AND node = 'D/undo' AND status = 'succeeded'`) > 2
	})
	if got := s.undone(id); got != "" {
		t.Errorf("%q is undone while what was called has still to be undone", got)
	}
	s.mu.Lock()
	s.undoWorks = true
	s.mu.Unlock()
	s.enqueue("graph.retry.v1", fmt.Sprintf(`{"incident": %q}`, query[uuid.UUID](t, s.pool, `SELECT id FROM incident WHERE resolved_at IS NULL`)))
	s.status(id, graph.Failed)
	s.status(query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE parent_process_instance_id = $1`, id), graph.Cancelled)
	if got := s.undone(id); got != "A" {
		t.Errorf("undone %q, want A", got)
	}
	s.want(map[string]int{"undo X": 2, "undo A": 1})
	s.healthy()
}

// A called instance that a terminate of its caller cuts off undoes its completed steps and is cancelled.
func TestTerminateUndoesACall(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", undoable("X", "W")+`, "W": {"wait": "PT1H"}`)
	id := s.start(s.deploy("F", fmt.Sprintf(`"F": {"fork": ["call", "U"]}, "call": {"call": {"process": %q, "undo": "propagate"}}, "U": {"human": {}, "to": "T"}, "T": {"terminate": true}`, child)), `{}`)
	await(t, "the child to wait", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1 AND status = 'WAITING'`, id) == 1
	})
	s.finish("U")
	s.status(id, graph.Completed)
	called := query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE parent_process_instance_id = $1`, id)
	s.status(called, graph.Cancelled)
	if got := s.undone(called); got != "X" {
		t.Errorf("%q of what was called is undone, want X", got)
	}
	s.healthy()
}
