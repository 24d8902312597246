package graph_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Tokens that multiply or loop without end fail their instance, and other instances complete.
func TestEndlessTokens(t *testing.T) {
	s := newSite(t)
	good := s.deploy("A", step("A", ""))
	for name, nodes := range map[string]string{
		"a fork into itself":  `"S": {"fork": ["S", "S", "e"]}, "e": {"end": true}`,
		"an empty list":       `"S": {"each": {"list": "[]", "do": "test.step.v1"}, "to": "S", "on": [{"error": "*", "to": "e"}]}, "e": {"end": true}`,
		"a scope without end": `"S": {"scope": {"start": "e", "nodes": {"e": {"end": true}}}, "to": "S", "on": [{"error": "*", "to": "f"}]}, "f": {"end": true}`,
	} {
		id := s.start(s.deploy("S", nodes), `{}`)
		s.status(id, graph.Failed)
		if why := query[string](t, s.pool, `SELECT failure_reason FROM process_instance WHERE id = $1`, id); why != "S: tokens enter more than 4000 nodes without a step in between" &&
			why != "e: tokens enter more than 4000 nodes without a step in between" {
			t.Errorf("%s: failure_reason = %q", name, why)
		}
		s.status(s.start(good, `{}`), graph.Completed)
	}
	s.healthy()
}

// An instance with a scope can be cancelled in a batch that settles nothing else.
func TestCancelAScope(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("S", `"S": {"scope": {"start": "W", "nodes": {"W": {"wait": "PT1H"}}}}`), `{}`)
	s.status(id, graph.Waiting)
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
	s.status(id, graph.Cancelled)
	s.healthy()
}

// A step that somebody cancels or deletes fails with the code cancelled. workflow_retry refuses a step of a FAILED
// instance.
func TestStepCutOffByHand(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", `"A": {"do": "nobody.step.v1", "to": "never", "on": [{"error": "cancelled", "to": "B"}]},`+step("B", "")+","+step("never", ""))
	for _, cut := range []string{`SELECT workflow_cancel($1, 'not now')`, `SELECT workflow_delete($1, 'not at all')`} {
		id := s.start(p, `{}`)
		var runID uuid.UUID
		await(t, "the step", func() bool {
			return s.pool.QueryRow(t.Context(), `SELECT id FROM activity_instance WHERE instance_id = $1 AND node_id = 'A'`, id).Scan(&runID) == nil
		})
		query[string](t, s.pool, cut, runID)
		s.status(id, graph.Completed)
	}
	s.want(map[string]int{"B": 2, "never": 0})
	failed := s.start(s.deploy("A", step("A", "", `"fail": "'no'"`)), `{}`)
	s.status(failed, graph.Failed)
	if got := query[string](t, s.pool, `SELECT workflow_retry(id) FROM activity_instance WHERE instance_id = $1`, failed); got != fmt.Sprintf("not retried: a step of instance %s, which is FAILED; start that again: workflowctl restart %[1]s", failed) {
		t.Errorf("retry answers %q", got)
	}
	s.healthy()
}

// Elements of a list that are started later can read the input of the instance, too.
func TestEachReadsInput(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("E", `"E": {"each": {"list": "input.items", "do": "test.step.v1", "limit": 1}, "in": {"name": "input.name"}}`), `{"name": "x", "items": [1, 2, 3]}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"x": 3})
	s.healthy()
}

// A join fires again in the next pass of a loop, even if another fork leads to it then.
func TestJoinInTheNextPass(t *testing.T) {
	s := newSite(t)
	p := s.deploy("P", step("P", "X", `"n": "'P' in steps ? steps.P.n + 1.0 : 1.0"`)+`, "X": {"choose": [{"if": "steps.P.n < 2", "to": "F1"}], "else": "F2"},
		"F1": {"fork": ["A", "B"]}, "F2": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "Y"},
		"Y": {"choose": [{"if": "steps.P.n < 2", "to": "P"}], "else": "E"},`+step("A", "J")+","+step("B", "J")+","+step("E", ""))
	s.status(s.start(p, `{}`), graph.Completed)
	s.want(map[string]int{"P": 2, "A": 2, "B": 2, "E": 1})
	s.healthy()
}

// One step may lead two tokens to a join in one decision.
func TestTwoArrivalsAtOnce(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "G": {"fork": ["J", "J"]}, "J": {"join": "all", "to": "C"},`+
		step("A", "J")+","+step("B", "G", `"ms": "200"`)+","+step("C", ""))
	s.status(s.start(p, `{}`), graph.Completed)
	s.want(map[string]int{"C": 1})
	s.healthy()
}

// The nodes behind a join in a scope still belong to the scope, which ends only after them.
func TestJoinInAScope(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "C"},`+
		step("A", "J")+","+step("B", "J")+","+step("C", "", `"ms": "300"`)+`}}, "to": "N"},`+step("N", ""))
	s.status(s.start(p, `{}`), graph.Completed)
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := s.calls[len(s.calls)-1]; last != "N" {
		t.Errorf("the last step was %s, want N: %v", last, s.calls)
	}
}

// An unknown key in the payload of a command fails its run with a message that names the key.
func TestMisspeltPayload(t *testing.T) {
	s := newSite(t)
	id := s.enqueue("graph.start.v1", `{"process": "p", "inputs": {}}`)
	if got := s.finished(id); got != "failed" {
		t.Errorf("the run is %s, want failed", got)
	}
	if got := query[string](t, s.pool, `SELECT last_error FROM workflow_run WHERE id = $1`, id); got != "payload: /inputs: there is no such key" {
		t.Errorf("last_error = %q", got)
	}
}

// A message that arrives while its token leaves is either taken or free again, never both and never lost.
func TestMessageAgainstTimer(t *testing.T) {
	s := newSite(t)
	p := s.deploy("R", `"R": {"race": ["M", "T"]}, "M": {"await": {"message": "go", "key": "input.n"}, "to": "A"}, "T": {"wait": "30ms", "to": "B"},`+step("A", "")+","+step("B", "C")+","+step("C", ""))
	const n = 60
	for k := range n {
		s.start(p, fmt.Sprintf(`{"n": %d}`, k))
		s.enqueue("graph.message.v1", fmt.Sprintf(`{"name": "go", "key": "%d"}`, k))
		time.Sleep(time.Millisecond)
	}
	pgtest.Await(t, "all instances to complete", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED'`) == n
	})
	if a, b, c := s.count("A"), s.count("B"), s.count("C"); a+b != n || b != c {
		t.Errorf("A ran %d times, B %d and C %d times; want A and B %d together, and C as often as B", a, b, c, n)
	}
	if free := query[int](t, s.pool, `SELECT count(*) FROM message WHERE consumed_at IS NULL`); free != s.count("B") {
		t.Errorf("%d messages are free, want %d", free, s.count("B"))
	}
	s.healthy()
}
