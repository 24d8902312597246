package graph_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// stopped waits until an instance has n open incidents with a code, and returns one of them.
func (s *site) stopped(id uuid.UUID, code string, n int) (incident uuid.UUID) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("%d incidents %s", n, code), func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = $2 AND resolved_at IS NULL`, id, code) == n
	})
	return query[uuid.UUID](s.t, s.pool, `SELECT id FROM incident WHERE instance_id = $1 AND code = $2 AND resolved_at IS NULL LIMIT 1`, id, code)
}

// retry retries an incident, and waits until the retry has succeeded.
func (s *site) retry(incident uuid.UUID, more string) {
	s.t.Helper()
	if got := s.finished(s.enqueue("graph.retry.v1", fmt.Sprintf(`{"incident": %q%s}`, incident, more))); got != "succeeded" {
		s.t.Fatalf("the retry has %s", got)
	}
}

// hasten retries an incident of a row that is set aside. The retry may fail if a worker, which tries the row every 10
// s, has just resolved the incident.
func (s *site) hasten(incident uuid.UUID) {
	s.t.Helper()
	retry := s.enqueue("graph.retry.v1", fmt.Sprintf(`{"incident": %q}`, incident))
	if got := s.finished(retry); got != "succeeded" && query[bool](s.t, s.pool, `SELECT resolved_at IS NULL FROM incident WHERE id = $1`, incident) {
		s.t.Fatalf("the retry has %s", got)
	}
}

func (s *site) correct(id uuid.UUID, node, value string) {
	s.t.Helper()
	if got := query[string](s.t, s.pool, `SELECT process_correct($1, $2, $3::jsonb, 'the partner sent it wrong')`, id, node, value); got != "corrected" {
		s.t.Fatalf("process_correct answers %q", got)
	}
}

// S08: a retry with "force" fires a join with the tokens that have arrived.
func TestForcedJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B", "D"]}, "X": {"choose": [{"if": "false", "to": "J"}], "else": "over"}, "over": {"end": true},
		"J": {"join": "all", "to": "C"},`+step("A", "X")+","+step("B", "J")+","+step("D", "J")+","+step("C", ""))
	id := s.start(p, `{}`)
	s.retry(s.stopped(id, "join_unsatisfiable", 1), "")
	s.want(map[string]int{"C": 0}) // without force nothing changes
	s.retry(s.stopped(id, "join_unsatisfiable", 1), `, "force": true`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "C": 1, "D": 1})
	if got := query[string](t, s.pool, `SELECT data::text FROM process_event WHERE instance_id = $1 AND event_type = 'join.fired'`, id); got != `{"forced": true, "joined": 2}` {
		t.Errorf("the event says %s", got)
	}
	s.healthy()
}

// "force" has no effect on the retry of an incident that is not at a join.
func TestForceElsewhere(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("X", `"X": {"choose": [{"if": "input.missing > 1", "to": "A"}], "else": "A"},`+step("A", "")), `{}`)
	s.retry(s.stopped(id, "expression_failed", 1), `, "force": true`)
	s.stopped(id, "expression_failed", 1)
	s.want(map[string]int{"A": 0})
	s.healthy()
}

// After an operator corrects the fact that a condition could not be evaluated with, a retry of the incident continues
// with the latest correction. Each correction writes an event with the operator.
func TestCorrection(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "X")+`, "X": {"choose": [{"if": "steps.A.n > 1", "to": "B"}], "else": "C"},`+step("B", "A2", `"n": "steps.A.n"`)+","+step("A2", "")+","+step("C", ""))
	id := s.start(p, `{}`)
	incident := s.stopped(id, "expression_failed", 1)
	s.correct(id, "A", `{"n": 1}`)
	s.correct(id, "A", `{"n": 5}`)
	s.want(map[string]int{"A": 1, "B": 0})
	s.retry(incident, "")
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "C": 0})
	if got := query[string](t, s.pool, `SELECT payload->>'n' FROM workflow_run WHERE node = 'B'`); got != "5" {
		t.Errorf("B is given n = %s, want 5 as corrected", got)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_event WHERE instance_id = $1 AND event_type = 'fact.corrected' AND node = 'A' AND data ? 'actor'`, id); n != 2 {
		t.Errorf("%d events tell of the corrections, want 2", n)
	}
	s.healthy()
}

// A correction of a node's result holds until the node is visited again.
func TestCorrectionOfALoop(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "U", `"n": "7.0"`)+`, "U": {"human": {}, "to": "B"},`+step("B", "X", `"n": "steps.A.n"`)+`,
		"X": {"choose": [{"if": "steps.B.n == 1", "to": "A"}], "else": "end"}, "end": {"end": true}`)
	id := s.start(p, `{}`)
	s.at("U", 1)
	s.correct(id, "A", `{"n": 1}`)
	s.finish("U")
	s.at("U", 1)
	s.finish("U")
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT string_agg(payload->>'n', ' ' ORDER BY created_at) FROM workflow_run WHERE node = 'B'`); got != "1 7" {
		t.Errorf("B is given n = %s, want 1 as corrected, and then 7 as A has said since", got)
	}
	s.healthy()
}

// A step whose result does not fit its mapping opens an incident, and no retry executes the step again.
func TestRetryOfAMapping(t *testing.T) {
	s := newSite(t)
	mapped := strings.Replace(step("A", "B"), `"to"`, `"out": {"id": "result.receipt.id"}, "to"`, 1)
	id := s.start(s.deploy("A", mapped+","+step("B", "", `"id": "steps.A.id"`)), `{}`)
	s.retry(s.stopped(id, "mapping_failed", 1), "")
	incident := s.stopped(id, "mapping_failed", 1)
	s.correct(id, "A", `{"id": "r-9"}`)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1})
	if got := query[string](t, s.pool, `SELECT payload->>'id' FROM workflow_run WHERE node = 'B'`); got != "r-9" {
		t.Errorf("B is given id = %s, want r-9", got)
	}
	s.healthy()
}

// If one element of a list cannot be started, a retry of its incident starts that element alone.
func TestRetryOfAnElement(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "E")+`, "E": {"each": {"list": "input.list", "do": "test.step.v1"}, "in": {"name": "item", "n": "item == 'b' ? steps.A.n : 0.0"}}`)
	id := s.start(p, `{"list": ["a", "b", "c"]}`)
	incident := s.stopped(id, "expression_failed", 1)
	s.correct(id, "A", `{"n": 4}`)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	s.want(map[string]int{"a": 1, "b": 1, "c": 1})
	s.healthy()
}

// process_correct refuses a node without a result, an empty reason, and a value that is too large. For an instance that
// is over or does not exist it says so.
func TestCorrectionRefused(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("U", `"U": {"human": {}, "to": "G"}, "G": {"choose": [{"if": "true", "to": "E"}], "else": "E"}, "E": {"end": true}`), `{}`)
	s.at("U", 1)
	for _, c := range []struct{ node, value, reason, says string }{
		{"missing", "{}", "why", "'missing' has no result"},
		{"G", "{}", "why", "'G' has no result"},
		{"U", "{}", " ", "process_correction_reason_check"},
		{"U", fmt.Sprintf(`"%s"`, strings.Repeat("x", 1<<20)), "why", "process_correction_value_check"},
	} {
		_, err := s.pool.Exec(t.Context(), `SELECT process_correct($1, $2, $3::jsonb, $4)`, id, c.node, c.value, c.reason)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s, reason %q: %.200v; want %q", c.node, c.reason, err, c.says)
		}
	}
	s.finish("U")
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT process_correct($1, 'U', '{}', 'why')`, id); got != "too late: COMPLETED" {
		t.Errorf("of an instance that is over it answers %q", got)
	}
	if got := query[string](t, s.pool, `SELECT process_correct($1, 'U', '{}', 'why')`, uuid.New()); got != "not found" {
		t.Errorf("of an instance that is not there it answers %q", got)
	}
}

// A run that somebody holds by hand stays held when a pause of its process ends.
func TestHeldByHand(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("F", `"F": {"fork": ["W", "V"]}, "W": {"wait": "PT1M", "to": "J"}, "V": {"wait": "PT1M", "to": "J"}, "J": {"join": "all"}`), `{}`)
	s.status(id, graph.Waiting)
	held := query[uuid.UUID](t, s.pool, `UPDATE workflow_run SET held_at = now() WHERE node = 'W' RETURNING id`)
	if got := query[string](t, s.pool, `SELECT workflow_why($1)`, held); !strings.HasPrefix(got, "held since ") || !strings.Contains(got, "SET held_at = NULL") {
		t.Error(got)
	}
	for _, function := range []string{"process_pause", "process_resume"} {
		query[string](t, s.pool, `SELECT `+function+`($1)`, id)
		if got, want := query[string](t, s.pool, `SELECT string_agg(node, ' ' ORDER BY node) FROM workflow_run WHERE held_at IS NOT NULL`), map[string]string{"process_pause": "V W", "process_resume": "W"}[function]; got != want {
			t.Errorf("after %s %s are held, want %s", function, got, want)
		}
	}
	pgtest.Elapse(t, s.pool, 2*time.Minute)
	query[uuid.UUID](t, s.pool, `UPDATE workflow_run SET held_at = NULL WHERE id = $1 RETURNING id`, held)
	s.status(id, graph.Completed)
	s.healthy()
}

// Changes by hand to the rows that the engine maintains are refused with a message.
func TestProcessGuards(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "F")+`, "F": {"fork": ["B", "U"]}, "U": {"human": {}, "to": "J"}, "J": {"join": "all"},`+step("B", "J"))
	over := s.start(p, `{}`)
	s.at("J", 1)
	s.finish("U")
	s.status(over, graph.Completed)
	open := s.start(p, `{}`)
	s.at("J", 1)
	stuck := s.start(s.deploy("X", `"X": {"choose": [{"if": "input.missing > 1", "to": "A"}], "else": "A"},`+step("A", "")), `{}`)
	s.stopped(stuck, "expression_failed", 1)
	for _, c := range []struct {
		of   uuid.UUID
		sql  string
		says string
	}{
		{open, `UPDATE process_instance SET status = 'COMPLETED', completed_at = now(), live_tokens = 0, ready_tokens = 0, joining_tokens = 0 WHERE id = $1`, "changed by the engine alone"},
		{open, `UPDATE process_instance SET live_tokens = 9 WHERE id = $1`, "changed by the engine alone"},
		{open, `UPDATE process_instance SET input_payload = '{"n": 1}' WHERE id = $1`, "input_payload goes from {} to"},
		{open, `UPDATE process_instance SET deleted_at = now() WHERE id = $1`, "it is not over"},
		{open, `DELETE FROM process_instance WHERE id = $1`, "it is not over"},
		{over, `UPDATE process_instance SET status = 'IN_PROGRESS', completed_at = NULL WHERE id = $1`, "changed by the engine alone"},
		{open, `UPDATE process_token SET state = 'Completed' WHERE instance_id = $1`, "changed by the engine alone"},
		{open, `UPDATE process_token SET node = 'B' WHERE instance_id = $1`, "changed by the engine alone"},
		{open, `UPDATE parallel_group SET live = 0 WHERE instance_id = $1`, "changed by the engine alone"},
		{open, `UPDATE parallel_join SET fired = true WHERE instance_id = $1`, "changed by the engine alone"},
		{open, `UPDATE compensation_record SET status = 'Completed' WHERE instance_id = $1`, "changed by the engine alone"},
		{stuck, `UPDATE incident SET resolved_at = now() WHERE instance_id = $1`, "changed by the engine alone"},
		{over, `UPDATE process_state_history SET actor = 'nobody' WHERE instance_id = $1`, "changed by the engine alone"},
		{over, `UPDATE process_event SET node = 'B' WHERE instance_id = $1`, "changed by the engine alone"},
		{over, `DELETE FROM process_instance WHERE id = $1`, "deleted by the engine alone"},
		{open, `DELETE FROM process_token WHERE instance_id = $1`, "deleted by the engine alone"},
		{open, `DELETE FROM workflow_run WHERE token_id IN (SELECT id FROM process_token WHERE instance_id = $1)`, "deleted by retention alone"},
		{open, `INSERT INTO process_instance (process_definition_id, status, started_at) SELECT process_definition_id, status, started_at FROM process_instance WHERE id = $1`, "status is "},
		{open, `INSERT INTO process_token (id, instance_id, node, state) VALUES (gen_random_uuid(), $1, 'B', 'Ready')`, "inserted by the engine alone"},
		{open, `INSERT INTO process_event (instance_id, event_type, version) VALUES ($1, 'node.completed', 1)`, "inserted by the engine alone"},
		{open, `INSERT INTO workflow_run (type, token_id, node) SELECT 'forged.step', id, 'B' FROM process_token WHERE instance_id = $1`, "inserted by the engine alone"},
	} {
		if _, err := s.pool.Exec(t.Context(), c.sql, c.of); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", c.sql, err, c.says)
		}
	}
	// Even with workflow.advance, a final status does not change.
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SET LOCAL workflow.advance = 'on'`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE process_instance SET status = 'IN_PROGRESS', completed_at = NULL WHERE id = $1`, over); err == nil || !strings.Contains(err.Error(), "COMPLETED is final") {
		t.Errorf("what is final: %v", err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.pool.Exec(t.Context(), `UPDATE process_instance SET deleted_at = now() WHERE id = $1`, over); err != nil {
		t.Errorf("one that is over is marked as deleted: %v", err)
	}
	s.healthy()
}

// W48: process_stuck lists instances that need attention, with the reason, and none that waits as intended.
func TestStuck(t *testing.T) {
	s := newSite(t)
	waits := s.start(s.deploy("U", `"U": {"human": {}}`), `{}`)
	s.at("U", 1)
	lost := s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'k'"}}`), `{}`)
	s.at("M", 1)
	fails := s.start(s.deploy("X", `"X": {"choose": [{"if": "input.missing > 1", "to": "A"}], "else": "A"},`+step("A", "")), `{}`)
	s.stopped(fails, "expression_failed", 1)
	idle := s.start(s.deploy("N", `"N": {"do": "nobody.has.this"}`), `{}`)
	s.at("N", 1)
	pgtest.ByHand(t, s.pool, `DELETE FROM message_wait WHERE instance_id = $1`, lost)
	pgtest.ByHand(t, s.pool, `UPDATE process_instance SET updated_at = now() - interval '2 minutes' WHERE id = $1`, lost)
	pgtest.Elapse(t, s.pool, 2*time.Hour)
	rows, _ := s.pool.Query(t.Context(), `SELECT instance_id, why FROM process_stuck WHERE since < now()`)
	got := map[uuid.UUID]string{}
	var id uuid.UUID
	var why string
	for rows.Next() {
		if err := rows.Scan(&id, &why); err != nil {
			t.Fatal(err)
		}
		got[id] = why
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for of, want := range map[uuid.UUID]string{
		waits: "", lost: "nothing moves it", fails: "incident expression_failed at X", idle: "no worker takes its step N of type nobody.has.this",
	} {
		if got[of] != want {
			t.Errorf("%q, want %q", got[of], want)
		}
	}
}

// What nothing moves is stuck since a token of it last moved, if that was after its row last changed, and for a minute it is
// not listed.
func TestStuckSinceATokenMoved(t *testing.T) {
	s := newSite(t)
	lost := s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'k'"}}`), `{}`)
	s.at("M", 1)
	pgtest.ByHand(t, s.pool, `DELETE FROM message_wait WHERE instance_id = $1`, lost)
	pgtest.ByHand(t, s.pool, `UPDATE process_instance SET updated_at = now() - interval '1 hour' WHERE id = $1`, lost)
	const stuck = `SELECT coalesce((SELECT round(extract(epoch FROM now() - since) / 60)::text FROM process_stuck), 'not listed')`
	if got := query[string](t, s.pool, stuck); got != "not listed" {
		t.Errorf("a token has just moved; stuck for %s minutes", got)
	}
	pgtest.ByHand(t, s.pool, `UPDATE process_token SET updated_at = now() - interval '5 minutes' WHERE instance_id = $1`, lost)
	if got := query[string](t, s.pool, stuck); got != "5" {
		t.Errorf("a token moved 5 minutes ago; stuck for %s", got)
	}
}

// process_duration has the average duration of completed instances by process and version.
func TestDuration(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "", `"ms": "'200'"`))
	s.status(s.start(p, `{}`), graph.Completed)
	s.status(s.start(p, `{}`), graph.Completed)
	if got := query[string](t, s.pool, `
		SELECT concat_ws(' ', name = $1, version, completed, average BETWEEN interval '200 ms' AND interval '5 s') FROM process_duration`, p); got != "t 1 2 t" {
		t.Errorf("process_duration says %q, want t 1 2 t", got)
	}
}

// process_why reports each reason why an instance does not continue, in a real situation.
func TestProcessWhy(t *testing.T) {
	s := newSite(t)
	says := func(id uuid.UUID, words ...string) {
		t.Helper()
		got := ""
		defer func() { t.Log(got) }()
		await(t, strings.Join(words, " … "), func() bool {
			got = query[string](t, s.pool, `SELECT process_why($1)`, id)
			for _, w := range words {
				if !strings.Contains(got, w) {
					return false
				}
			}
			return true
		})
	}
	says(uuid.New(), "there is no such instance")
	says(s.start(s.deploy("A", step("A", "", `"ms": "'10000'"`)), `{}`), "A: runs at worker-", "attempt 1 of 25 (policy as shipped)")
	says(s.start(s.deploy("N", `"N": {"do": "nobody.has.this"}`), `{}`), "N: no live worker covers nobody.has.this; those that live cover graph., test.")
	says(s.start(s.deploy("H", `"H": {"human": {"groups": ["sales"]}}`), `{}`), "waits at H for somebody of sales to complete task ")
	says(s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'o-1'"}}`), `{}`), "waits at M for message paid with key o-1, for ")
	says(s.start(s.deploy("G", `"G": {"await": {"signal": "open"}}`), `{}`), "waits at G for signal open")
	says(s.start(s.deploy("T", `"T": {"wait": "PT3H"}`), `{}`), "T: due in 3 h")
	child := s.deploy("W", `"W": {"human": {}}`)
	says(s.start(s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}}`, child)), `{}`), "waits at C for the instance it has called: ", "WAITING; SELECT process_why('")
	says(s.start(s.deploy("F", `"F": {"fork": ["A", "B", "U"]}, "U": {"human": {}, "to": "J"}, "J": {"join": "all"},`+step("A", "J")+","+step("B", "J")), `{}`),
		"waits for 1 of 3 branches at join J: waits at U for somebody to complete task ")
	x := s.start(s.deploy("X", `"X": {"choose": [{"if": "input.missing > 1", "to": "A"}], "else": "A"},`+step("A", "")), `{}`)
	says(x, "incident expression_failed at X for ", "input.missing", `''{"incident": "`[1:])
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "reason": "withdrawn"}`, x))
	says(x, "CANCELLED ", " s ago: withdrawn")
	bad := s.start(s.deploy("D", step("D", "", `"fail": "'no'"`)), `{}`)
	says(bad, "FAILED ", " s ago: D: no: it was told to fail")
	undoes := s.start(s.deploy("A", undoable("A", "D", `"undo_fails": "true"`)+","+step("D", "", `"fail": "'no'"`)), `{}`)
	says(undoes, "incident compensation_failed at D for ")
	p := s.start(s.deploy("P", `"P": {"wait": "PT1H"}`), `{}`)
	says(p, "P: due in 60 min")
	if got := query[string](t, s.pool, `SELECT process_pause($1)`, p); got != "paused" {
		t.Fatal(got)
	}
	says(p, "paused since ", "SELECT process_resume('"+p.String()+"')")
	lost := s.start(s.deploy("L", `"L": {"await": {"message": "lost", "key": "'k'"}}`), `{}`)
	says(lost, "waits at L")
	pgtest.ByHand(t, s.pool, `DELETE FROM message_wait WHERE instance_id = $1`, lost)
	says(lost, "nothing will ever move it: that is a bug")
}

// If only the output of an instance cannot be computed, a retry computes it again, with corrected facts. No step is
// executed again.
func TestRetryOfAnOutput(t *testing.T) {
	s := newSite(t)
	name := "p" + uuid.NewString()[:8]
	define(t, s.pool, fmt.Sprintf(`{"process": %q, "version": 1, "start": "A", "output": "{'n': steps.A.n}", "nodes": {%s}}`, name, undoable("A", "")))
	id := s.start(name, `{}`)
	s.retry(s.stopped(id, "output_failed", 1), "")
	incident := s.stopped(id, "output_failed", 1)
	s.correct(id, "A", `{"n": 3}`)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1})
	if got := query[string](t, s.pool, `SELECT output_payload::text FROM process_instance WHERE id = $1`, id); got != `{"n": 3}` {
		t.Errorf("output %s", got)
	}
	s.healthy()
}

// When a list has as many results as it needs, a remaining element leaves no incident open. A correction of the list is
// not overwritten by elements that end later, and the instance computes its output when the last element has ended.
func TestRestOfAList(t *testing.T) {
	s := newSite(t)
	name := "p" + uuid.NewString()[:8]
	define(t, s.pool, fmt.Sprintf(`{"process": %q, "version": 1, "start": "E", "output": "{'n': steps.E}", "nodes": {
		"E": {"each": {"list": "[1, 1500, 2]", "do": "test.step.v1", "need": 1}, "in": {"name": "'item'", "ms": "item", "x": "item == 2 ? input.missing : 0.0"}, "to": "U"},
		"U": {"human": {}}}}`, name))
	id := s.start(name, `{}`)
	s.at("U", 1)
	if n := query[int](t, s.pool, `SELECT open_incidents FROM process_instance WHERE id = $1`, id); n != 0 {
		t.Errorf("%d incidents are open of elements that nobody needs", n)
	}
	s.correct(id, "E", `["corrected"]`)
	s.finish("U")
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT output_payload::text FROM process_instance WHERE id = $1`, id); got != `{"n": ["corrected"]}` {
		t.Errorf("output %s", got)
	}
	s.want(map[string]int{"item": 2})
	s.healthy()
}
