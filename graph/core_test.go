package graph_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// The same process and the same events lead to the same decisions, whether the core knows the whole instance or only
// what is loaded for these events. After each decision the counts of the instance equal the numbers of its tokens, and
// an open instance has an event that can happen or an incident.
func TestCore(t *testing.T) {
	finished := 0
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		play := func(begin func(*graph.Definition, map[string]any) (*graph.Play, error)) *graph.Play {
			r := rand.New(rand.NewPCG(seed, 1))
			plan := newPlan(r, "p", []*plan{newPlan(r, "child", nil)})
			if r.IntN(2) == 0 {
				plan.definition = tangle(r)
			}
			p, err := begin(plan.definition, plan.input)
			for more := true; more && err == nil && len(p.Story) < 400 && p.Tokens() < 300; {
				more, err = p.Next(r.IntN)
			}
			if err != nil {
				text, _ := plan.definition.JSON()
				t.Fatalf("%v\n%s\n%s", err, text, strings.Join(p.Story[max(0, len(p.Story)-4):], "\n\n"))
			}
			if len(p.Story) < 400 {
				finished++
			}
			return p
		}
		one, two := play(graph.NewPlay), play(graph.NewNarrowPlay)
		for k := range min(len(one.Story), len(two.Story)) {
			if one.Story[k] != two.Story[k] {
				t.Fatalf("two ways to decide:\n%s\n\n%s", one.Story[k], two.Story[k])
			}
		}
		if len(one.Story) != len(two.Story) {
			t.Fatalf("one way ends after %d decisions, the other after %d", len(one.Story), len(two.Story))
		}
	})
	if finished == 0 {
		t.Error("no instance came to its end")
	}
}

// A branch of a fork that is ended while the branches before it are entered is not entered.
func TestEndedBranchStaysEnded(t *testing.T) {
	for name, nodes := range map[string]string{
		"the scope is terminated": `"S": {"scope": {"start": "F", "nodes": {
				"F": {"fork": ["T", "X"]}, "T": {"terminate": true}, "X": {"do": "t.x"}}}, "to": "After"}, "After": {"do": "t.after"}`,
		"an error leaves the scope": `"S": {"scope": {"start": "F", "nodes": {
				"F": {"fork": ["T", "X"]}, "T": {"throw": {"error": "e"}}, "X": {"do": "t.x"}}}, "to": "After", "on": [{"error": "e", "to": "After"}]}, "After": {"do": "t.after"}`,
		"all is undone":     `"S": {"fork": ["T", "X"]}, "T": {"throw": {"error": "e"}}, "X": {"do": "t.x", "undo": "t.y"}`,
		"a join has enough": `"S": {"fork": ["J", "X"]}, "J": {"join": {"need": 1, "rest": "cancel"}, "to": "After"}, "X": {"do": "t.x", "to": "J"}, "After": {"do": "t.after"}`,
	} {
		t.Run(name, func(t *testing.T) {
			d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "S", "nodes": {` + nodes + `}}`))
			if err != nil {
				t.Fatal(err)
			}
			p, err := graph.NewPlay(d, map[string]any{})
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(p.Story[0], " t.x ") {
				t.Errorf("a step begins on a branch that is over:\n%s", p.Story[0])
			}
		})
	}
}

// An undo step is not started if the decision that chose it also ends its token.
func TestUndoOfWhatEnds(t *testing.T) {
	for _, compensate := range []bool{false, true} {
		d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "A", "nodes": {
			"A": {"do": "t.a", "undo": "t.b", "to": "T"}, "T": {"throw": {"compensate": true}, "to": "B"}, "B": {"do": "t.c"}}}`))
		if err != nil {
			t.Fatal(err)
		}
		p, err := graph.NewPlay(d, map[string]any{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Next(func(n int) int { return n - 1 }); err != nil { // A is done
			t.Fatal(err)
		}
		if p.ChooseAndCancel(compensate) {
			t.Errorf("cancelled, to be undone %v: a step is undone by a token that has ended", compensate)
		}
	}
}

// A token that reaches the loop limit behind a join continues, when its incident is retried, from the node where it
// stopped. It does not arrive at the join again.
func TestLoopLimitBehindAJoin(t *testing.T) {
	p := played(t, `{"process": "p", "version": 1, "start": "A", "nodes": {
		"A": {"choose": [{"if": "false", "to": "E"}], "else": "B"}, "B": {"choose": [{"if": "false", "to": "E"}], "else": "F"}, "E": {"end": true},
		"F": {"fork": ["J", "J"]}, "J": {"join": "all", "to": "C"}, "C": {"choose": [{"if": "false", "to": "E"}], "else": "F"}}}`, map[string]any{})
	for range 2 {
		if stopped := p.Stopped(); !slices.Equal(stopped, []string{"C"}) {
			t.Fatalf("tokens are stopped at %v, want C", stopped)
		}
		if err := p.Retry("C", "loop_limit"); err != nil {
			t.Fatal(err)
		}
	}
}

// played starts an instance of a process in memory and returns it after its first decision.
func played(t *testing.T, text string, input map[string]any) *graph.Play {
	t.Helper()
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	p, err := graph.NewPlay(d, input)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// An incident that is opened in the decision that ends its instance is not left open.
func TestIncidentOfWhatEnds(t *testing.T) {
	p := played(t, `{"process": "p", "version": 1, "start": "F", "nodes": {"F": {"fork": ["a", "J"]}, "J": {"join": "all"}, "E": {"end": true},
		"a": {"do": "t.a", "to": "J", "on": [{"error": "no", "to": "E"}]}}}`, map[string]any{})
	open, err := p.FailAndCancel("a")
	if err != nil {
		t.Fatal(err)
	}
	if open > 0 {
		t.Errorf("incidents are open: %d", open)
	}
}
