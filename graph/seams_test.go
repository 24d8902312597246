package graph_test

import (
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Where two things meet that are right by themselves: a join that fires far from the token that
// let it, a token that two joins could end, an undo step that somebody takes away.

// A scope in which all wait for each other is not moved by edges that nothing leads over any more:
// the incident says so.
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

// While a timer of the scope is still to fire, nothing is stuck.
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
