package graph_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The tests in this file check combinations of features: a join that fires far from the token that caused it, a token
// that two joins could end, an undo step that somebody takes away.

// If an inclusive join fires because a token took another way far from it, the nodes behind the join can read their
// facts.
func TestFactsBehindATakenJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["a", "b"]}, "c": {"choose": [{"if": "steps.a.go == true", "to": "x"}], "else": "E"}, "E": {"end": true},
		"T": {"join": "taken", "to": "y"},`+step("a", "c", `"ms": "'300'"`, `"go": "false"`)+","+step("b", "T", `"v": "'7'"`)+","+step("x", "T")+","+step("y", "", `"v": "steps.b.v"`))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"y": 1})
	s.healthy()
}

// If an inclusive join fires because a token took another way far from it, a join behind it counts the tokens that wait
// there.
func TestJoinBehindATakenJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["a", "b", "q"]}, "c": {"choose": [{"if": "steps.a.go == true", "to": "x"}], "else": "E"}, "E": {"end": true},
		"T": {"join": "taken", "to": "J"}, "J": {"join": "all", "to": "z"},`+
		step("a", "c", `"ms": "'300'"`, `"go": "false"`)+","+step("b", "T")+","+step("x", "T")+","+step("q", "J")+","+step("z", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"z": 1})
	s.healthy()
}

// A token that one join ends while it waits at another join is not counted again when the other one fires, even in the
// same decision.
func TestEndedAtAnOuterJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F1", `"F1": {"fork": ["c", "F2"]}, "F2": {"fork": ["x", "y"]}, "J": {"join": {"need": 1, "rest": "cancel"}, "to": "J2"}, "J2": {"join": "all", "to": "z"},`+
		step("c", "J2")+","+step("y", "J2")+`,"x": {"human": {}, "to": "J"},`+step("z", ""))
	id := s.start(p, `{}`)
	s.at("J2", 2)
	s.finish("x")
	s.status(id, graph.Completed)
	s.want(map[string]int{"z": 1})
	s.healthy()
}

// An undo step that somebody cancels, or deletes before it starts, opens an incident like one that failed. Retrying the
// incident executes it, and earlier steps are undone after it.
func TestUndoStepCutOff(t *testing.T) {
	for _, takeAway := range []string{`SELECT workflow_cancel($1)`, `SELECT workflow_delete($1, 'a mistake')`} {
		t.Run(takeAway, func(t *testing.T) {
			s := newSite(t)
			late := strings.Replace(step("B", "C"), `"in"`, `"undo": "late.undo.v1", "in"`, 1)
			id := s.start(s.deploy("A", undoable("A", "B")+","+late+","+step("C", "", `"fail": "'no'"`)), `{}`)
			pgtest.Await(t, "the undo step", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'late.undo.v1'`) == 1
			})
			query[string](t, s.pool, strings.Replace(takeAway, "$1", `(SELECT id FROM workflow_run WHERE type = 'late.undo.v1')`, 1))
			s.retry(s.stopped(id, "compensation_failed", 1), "")
			employ(t, s.pool, func(pool *pgxpool.Pool) worker.Config {
				mux := worker.NewMux()
				worker.Handle(mux, "late.undo.v1", func(ctx context.Context, _ map[string]any) (struct{}, error) {
					s.called(ctx, "undo B")
					return struct{}{}, nil
				})
				return worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"late."}, Processes: s.engine, PollInterval: 20 * time.Millisecond}
			})
			s.status(id, graph.Failed)
			s.want(map[string]int{"undo B": 1, "undo A": 1})
			s.healthy()
		})
	}
}

// A surplus token at a join in a scope, which waits for the next round, is ended with the scope.
func TestSurplusInAScope(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["P", "Q"]}, "Q": {"human": {}, "to": "J"},
		"P": {"human": {}, "to": "m", "on": [{"after": "PT1M", "keep": true, "to": "m"}]}, "J": {"join": "all", "to": "E"}, "E": {"terminate": true},`+
		step("m", "J")+`}}, "to": "Z"},`+step("Z", ""))
	id := s.start(p, `{}`)
	s.at("Q", 1)
	pgtest.Elapse(t, s.pool, time.Minute)
	s.at("J", 1)
	s.finish("P")
	s.at("J", 2)
	s.finish("Q")
	s.status(id, graph.Completed)
	s.want(map[string]int{"Z": 1})
	s.healthy()
}

// If the output of an instance cannot be computed when it is terminated, a retry after a correction terminates it.
func TestOutputOfATerminated(t *testing.T) {
	s := newSite(t)
	define(t, s.pool, `{"process": "p", "version": 1, "start": "F", "output": "{'n': steps.A.n}", "nodes": {
		"F": {"fork": ["A", "U"]}, "T": {"terminate": true}, "U": {"human": {}},`+step("A", "T")+`}}`)
	id := s.start("p", `{}`)
	incident := s.stopped(id, "output_failed", 1)
	s.correct(id, "A", `{"n": 3}`)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT output_payload->>'n' FROM process_instance WHERE id = $1`, id); got != "3" {
		t.Errorf("its output is %s, want 3", got)
	}
	s.healthy()
}

// Expressions can read the failure of a step that was cancelled by hand, and of a call of a process that is not
// deployed, at any later node.
func TestFailureThatIsNoRun(t *testing.T) {
	for name, story := range map[string]struct{ a, code string }{
		"a step that is cut off": {`"do": "nobody.step.v1"`, "cancelled"},
		"a call of nothing":      {`"call": {"process": "nowhere"}`, "child_not_started"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			id := s.start(s.deploy("A", `"A": {`+story.a+`, "on": [{"error": "*", "to": "B"}]},`+
				step("B", "C", `"code": "steps.A.error.code"`)+","+step("C", "", `"code": "steps.A.error.code"`)), `{}`)
			if story.code == "cancelled" {
				s.at("A", 1)
				query[string](t, s.pool, `SELECT workflow_cancel(id, 'not now') FROM activity_instance WHERE node_id = 'A'`)
			}
			s.status(id, graph.Completed)
			for _, node := range []string{"B", "C"} {
				if got := query[string](t, s.pool, `SELECT input->>'code' FROM activity_instance WHERE instance_id = $1 AND node_id = $2`, id, node); got != story.code {
					t.Errorf("%s is told %q, want %q", node, got, story.code)
				}
			}
			s.healthy()
		})
	}
}

// The mapping of an each is applied to the result of an empty list, too.
func TestMappingOfAnEmptyList(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"each": {"list": "input.l", "do": "test.step.v1"}, "in": {"name": "'item'"}, "out": {"count": "size(result)"}, "to": "Z"},`+
		step("Z", "", `"count": "steps.E.count"`))
	for list, count := range map[string]string{"[1, 2]": "2", "[]": "0"} {
		id := s.start(p, `{"l": `+list+`}`)
		s.status(id, graph.Completed)
		if got := query[string](t, s.pool, `SELECT input->>'count' FROM activity_instance WHERE instance_id = $1 AND node_id = 'Z'`, id); got != count {
			t.Errorf("the list %s has %s elements", list, got)
		}
	}
	s.healthy()
}

// If a result of any kind of node does not fit its mapping, the token stops at that node with an incident. After the
// fact is corrected, a retry continues from there.
func TestMappingsThatFail(t *testing.T) {
	out := `"out": {"x": "result.nope"}, "to": "B"`
	for name, story := range map[string]struct{ nodes, at string }{
		"a list":          {`"A": {"each": {"list": "[1, 2]", "do": "test.step.v1", "limit": 1}, "in": {"name": "'item'"}, ` + out + `}`, "A"},
		"an empty list":   {`"A": {"each": {"list": "[]", "do": "test.step.v1"}, ` + out + `}`, "A"},
		"a message":       {`"A": {"await": {"message": "paid", "key": "'k'"}, ` + out + `}`, "A"},
		"one of a race":   {`"A": {"race": ["M", "W"]}, "M": {"await": {"message": "paid", "key": "'k'"}, ` + out + `}, "W": {"wait": "PT1H"}`, "M"},
		"a person's task": {`"A": {"human": {}, ` + out + `}`, "A"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			id := s.start(s.deploy("A", story.nodes+","+step("B", "C", `"x": "steps.`+story.at+`.x"`)+","+step("C", "")), `{}`)
			switch {
			case strings.Contains(story.nodes, "paid"):
				s.waitsFor(1)
				s.enqueue("graph.message.v1", `{"name": "paid", "key": "k"}`)
			case strings.Contains(story.nodes, "human"):
				s.at("A", 1)
				s.finish("A")
			}
			s.retry(s.stopped(id, "mapping_failed", 1), "") // nothing was corrected: it stops again
			incident := s.stopped(id, "mapping_failed", 1)
			if got := query[string](t, s.pool, `SELECT node FROM incident WHERE id = $1`, incident); got != story.at {
				t.Errorf("the incident is at %s, want %s", got, story.at)
			}
			s.want(map[string]int{"B": 0})
			s.correct(id, story.at, `{"x": 5}`)
			s.retry(incident, "")
			s.status(id, graph.Completed)
			s.want(map[string]int{"B": 1, "C": 1})
			s.healthy()
		})
	}
}

// A scope whose tokens all wait at joins that cannot fire opens an incident if the remaining edges on its boundary can
// never be taken.
func TestStuckScope(t *testing.T) {
	for name, on := range map[string]string{
		"an error edge":            `{"error": "other", "to": "Z"}`,
		"a timer that has fired":   `{"after": "PT1M", "keep": true, "to": "Z"}`,
		"a timer with a last time": `{"every": "PT1M", "times": 1, "to": "Z"}`,
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			p := s.deploy("S", `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["a", "b"]}, "J": {"join": "all"}, "E": {"end": true},
				"X": {"choose": [{"if": "input.go", "to": "J"}], "else": "E"}, "b": {"human": {}, "to": "X"},`+step("a", "J")+`}}, "on": [`+on+`]},`+step("Z", ""))
			id := s.start(p, `{"go": false}`)
			s.at("J", 1)
			pgtest.Elapse(t, s.pool, time.Minute)
			if !strings.Contains(on, "error") {
				pgtest.Await(t, "the timer to fire", func() bool { return s.count("Z") == 1 })
				s.at("Z", 0)
			}
			s.finish("b")
			s.retry(s.stopped(id, "join_unsatisfiable", 1), `, "force": true`)
			s.status(id, graph.Completed)
			s.healthy()
		})
	}
}

// While a boundary timer of such a scope has yet to fire, no incident is opened. It is opened once the timer has fired.
func TestScopeThatATimerMoves(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["a", "b"]}, "J": {"join": "all"}, "E": {"end": true},
		"X": {"choose": [{"if": "input.go", "to": "J"}], "else": "E"}, "b": {"human": {}, "to": "X"},`+step("a", "J")+`}},
		"on": [{"after": "PT1M", "keep": true, "to": "Z"}]},`+step("Z", ""))
	id := s.start(p, `{"go": false}`)
	s.at("J", 1)
	s.finish("b")
	s.status(id, graph.Waiting)
	if n := query[int](t, s.pool, `SELECT count(*) FROM incident`); n > 0 {
		t.Error("there is an incident before the timer has fired")
	}
	pgtest.Elapse(t, s.pool, time.Minute)
	s.stopped(id, "join_unsatisfiable", 1)
	s.want(map[string]int{"Z": 1})
	s.healthy()
}
