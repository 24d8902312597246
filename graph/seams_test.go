package graph_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/graph"
)

// Where two things meet that are right by themselves: a join that fires far from the token that
// let it, a token that two joins could end, an undo step that somebody takes away.

// The failure of a step that was cut off, and of a call of what there is not, can be read for as
// long as any other result: until the node is visited again.
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

// A list of which nothing is to be done has a result like any other, as its mapping makes it.
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

// Whatever a result is of, if it is not what its mapping expects the token stops where it is done;
// with the fact corrected it goes on from there.
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
			s.retry(s.stopped(id, "mapping_failed", 1), "") // it is what it was
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
