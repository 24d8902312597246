package graph_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// list2000 returns an input that is expensive to iterate over.
func list2000() map[string]any {
	var items []any
	for k := range 2000 {
		items = append(items, map[string]any{"n": float64(k), "text": strings.Repeat("x", 20)})
	}
	return map[string]any{"items": items, "text": strings.Repeat("y", 200_000)}
}

func playOf(t *testing.T, nodes string, input map[string]any) *graph.Play {
	t.Helper()
	d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "S", "nodes": {` + nodes + `}}`))
	if err != nil {
		t.Fatal(err)
	}
	p, err := graph.NewPlay(d, input)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// dearChoose has a hundred conditions, each within the cost limit of one expression.
var dearChoose = `"S": {"choose": [` + strings.Repeat(`{"if": "input.items.exists(x, x.n < 0.0)", "to": "A"}, `, 99) +
	`{"if": "input.items.exists(x, x.n < 0.0)", "to": "A"}], "else": "A"}, "A": {"do": "t.a", "in": {"n": "1"}}`

// G31: an expression that exceeds the cost limit is stopped within 5 s, whether nested loops, growing texts or
// comparisons of large values make it expensive. The incident says what to do.
func TestExpressionLimit(t *testing.T) {
	for _, condition := range []string{
		"input.items.all(a, input.items.all(b, input.items.all(c, true)))",
		"size(" + strings.Repeat("input.text + ", 200) + "input.text) > 0",
		strings.Repeat("size(input.text) > 0 && ", 400) + "true",
		strings.Repeat("input.items == input.items && ", 300) + "true",
		strings.Repeat("string(input.text) >= input.text && ", 200) + "true",
	} {
		began := time.Now()
		p := playOf(t, fmt.Sprintf(`"S": {"choose": [{"if": %q, "to": "A"}], "else": "A"}, "A": {"do": "t.a", "in": {"n": "1"}}`, condition), list2000())
		for _, want := range []string{"expression_failed", "it costs more than 100000 units: have it look at fewer elements"} {
			if !strings.Contains(p.Story[0], want) {
				t.Errorf("%.60s: %.300s, want %s", condition, p.Story[0], want)
			}
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%.60s: stopped after %v", condition, took)
		}
	}
}

// Expressions that are cheap one by one are stopped when together they exceed the budget of a decision, always at the
// same expression. The next decision has a budget of its own.
func TestExpressionBudget(t *testing.T) {
	began := time.Now()
	one := playOf(t, dearChoose, list2000())
	t.Logf("stopped after %v", time.Since(began).Round(time.Millisecond))
	for _, want := range []string{"expression_failed", "have cost more than 500000 units together", "put a step between the gateways"} {
		if !strings.Contains(one.Story[0], want) {
			t.Errorf("%.300s, want %s", one.Story[0], want)
		}
	}
	if two := playOf(t, dearChoose, list2000()); !slices.Equal(one.Story, two.Story) {
		t.Errorf("two ways to decide: %.300s and %.300s", one.Story[0], two.Story[0])
	}
	many := map[string]string{}
	for k := range 100 {
		many[fmt.Sprintf("k%d", k)] = "input.items"
	}
	d := &graph.Definition{Process: "p", Version: 1, Start: "S", Nodes: map[string]*graph.Node{"S": {Do: "t.a", In: many}}}
	p, err := graph.NewPlay(d, list2000())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(p.Story[0], "have cost more than 500000 units together") {
		t.Errorf("a mapping of a hundred large values: %.300s", p.Story[0])
	}
	const some = `{"choose": [` // ten nodes with a few of the conditions each
	var nodes []string
	for k := range 10 {
		nodes = append(nodes, fmt.Sprintf(`"S%d": %s{"if": "%s", "to": "E"}], "else": "D%d"}, "D%d": {"do": "t.a", "in": {"n": "1"}, "to": "S%d"}`, k, some,
			strings.TrimSuffix(strings.Repeat("input.items.exists(x, x.n < 0.0) || ", 6), " || "), k, k, k+1))
	}
	p = playOf(t, `"S": {"do": "t.a", "in": {"n": "1"}, "to": "S0"}, `+strings.Join(nodes, ", ")+`, "S10": {"end": true}, "E": {"end": true}`, list2000())
	for more := true; more; {
		if more, err = p.Next(func(n int) int { return n - 1 }); err != nil {
			t.Fatal(err)
		}
	}
	if last := p.Story[len(p.Story)-1]; !strings.Contains(last, "COMPLETED") {
		t.Errorf("ten decisions with some of it each: %.300s", last)
	}
}

// Events of one instance that are decided in one batch do not share a budget, neither of entered nodes nor of
// expression cost.
func TestBatchOfOneInstance(t *testing.T) {
	dear := strings.TrimSuffix(strings.Repeat("input.items.exists(x, x.n < 0.0) || ", 5), " || ")
	for name, nodes := range map[string]string{
		"by the nodes they enter": `"S": {"fork": ["A"` + strings.Repeat(`, "A"`, 999) + `]}, "A": {"do": "t.a", "in": {"n": "1"}, "to": "c0"}, "c0": {"choose": [{"if": "true", "to": "c1"}], "else": "c1"},
			"c1": {"choose": [{"if": "true", "to": "c2"}], "else": "c2"}, "c2": {"choose": [{"if": "true", "to": "c3"}], "else": "c3"},
			"c3": {"choose": [{"if": "true", "to": "c4"}], "else": "c4"}, "c4": {"choose": [{"if": "true", "to": "B"}], "else": "B"}, "B": {"end": true}`,
		"by their expressions": `"S": {"fork": ["A"` + strings.Repeat(`, "A"`, 19) + `]}, "A": {"do": "t.a", "in": {"n": "1"}, "to": "X"}, "X": {"choose": [{"if": "` + dear + `", "to": "B"}], "else": "B"}, "B": {"end": true}`,
	} {
		p := playOf(t, nodes, list2000())
		together := func(n int) int { // takes all open events into one decision
			if n == 3 {
				return 0
			}
			return n - 1
		}
		if _, err := p.Next(together); err != nil {
			t.Fatal(err)
		}
		if last := p.Story[len(p.Story)-1]; len(p.Story) != 2 || !strings.Contains(last, "COMPLETED") {
			t.Errorf("charged %s: %d decisions, %.300s", name, len(p.Story), last)
		}
	}
}

// An instance that exceeds the budget gets an incident with the reason, and other instances of the definition complete.
func TestExpressionBudgetIncident(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", strings.ReplaceAll(dearChoose, `"t.a"`, `"test.step.v1"`))
	id := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input',
		jsonb_build_object('items', (SELECT jsonb_agg(jsonb_build_object('n', g)) FROM generate_series(1, 2000) g))) RETURNING id`, p)
	incident := s.stopped(id, "expression_failed", 1)
	if got := query[string](t, s.pool, `SELECT message FROM incident WHERE id = $1`, incident); !strings.Contains(got, "have cost more than 500000 units together") {
		t.Errorf("the incident says %q", got)
	}
	s.status(s.start(p, `{"items": []}`), graph.Completed)
	s.healthy()
}

// W75: an instance whose tokens multiply from step to step never has many more than 10,000 live tokens: at the limit an
// incident is opened.
func TestTooManyTokens(t *testing.T) {
	grow := `"S": {"fork": ["A"` + strings.Repeat(`, "A"`, 499) + `]}, "A": {"do": "t.a", "to": "S", "on": [{"error": "*", "to": "e"}]}, "e": {"end": true}`
	keep := `"S": {"fork": ["A"` + strings.Repeat(`, "A"`, 499) + `]}, "A": {"wait": "1h", "on": [{"message": "m", "key": "'k'", "keep": true, "to": "S"}]}`
	for name, nodes := range map[string]string{"a fork in a loop": grow, "a handler that keeps its token": keep} {
		p, most := playOf(t, nodes, map[string]any{}), 0
		for k := 0; k < 26; k++ {
			if _, err := p.Next(func(n int) int { return n - 1 }); err != nil {
				t.Fatal(err)
			}
			var status string
			var live int
			if _, err := fmt.Sscanf(p.Story[len(p.Story)-1], "%s live %d", &status, &live); err != nil {
				t.Fatal(err)
			}
			most = max(most, live)
		}
		if most < 9_000 || most > 10_100 {
			t.Errorf("%s: %d tokens lived at once, want close to 10000 at most", name, most)
		}
		if last := strings.Join(p.Story[len(p.Story)-5:], ""); !strings.Contains(last, "too_many_tokens") {
			t.Errorf("%s: no incident: %.300s", name, last)
		}
	}
}
