package graph_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/graph"
)

// A definition of the largest size compiles within a minute, because a worker may compile while it locks an instance:
// the time does not grow with the product of gateways, joins and nodes.
func TestCompileLargeDefinition(t *testing.T) {
	const n = 650
	for name, add := range map[string]func(d *graph.Definition, k int, here, next string){
		"forks that are joined": func(d *graph.Definition, k int, here, next string) {
			f, j := fmt.Sprintf("f%d", k), fmt.Sprintf("j%d", k)
			d.Nodes[here] = &graph.Node{Choose: []graph.Way{{If: "input.n == 1", To: f}}, Else: next}
			d.Nodes[f] = &graph.Node{Fork: []string{j, j}}
			d.Nodes[j] = &graph.Node{Join: &graph.Join{}, To: next}
		},
		"inclusive joins": func(d *graph.Definition, k int, here, next string) {
			j, s := fmt.Sprintf("j%d", k), fmt.Sprintf("s%d", k)
			d.Nodes[here] = &graph.Node{Any: []graph.Way{{If: "input.n == 1", To: s}}, Else: j}
			d.Nodes[s] = &graph.Node{Do: "x.y", To: j}
			d.Nodes[j] = &graph.Node{Join: &graph.Join{Taken: true}, To: next}
		},
		"gateways in a row": func(d *graph.Definition, k int, here, next string) {
			d.Nodes[here] = &graph.Node{Choose: []graph.Way{{If: fmt.Sprintf("steps.a%d.n == 1", k), To: "end"}}, Else: next}
		},
	} {
		d := &graph.Definition{Process: "p", Version: 1, Start: "a0", Nodes: map[string]*graph.Node{"end": {End: true}}}
		for k := range n {
			next := "end"
			if k < n-1 {
				next = fmt.Sprintf("a%d", k+1)
			}
			add(d, k, fmt.Sprintf("a%d", k), next)
		}
		began := time.Now()
		if _, _, err := graph.Compile(d); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		took := time.Since(began)
		t.Logf("%s: %d nodes in %v", name, len(d.Nodes), took.Round(time.Millisecond))
		if took > time.Minute {
			t.Errorf("%s: %d nodes took %v", name, len(d.Nodes), took)
		}
	}
}
