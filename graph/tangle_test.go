package graph_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/graph"
)

// tangle draws a process with nodes of every kind and edges from anywhere to anywhere. The outcome of an instance is
// not known in advance, but its counts must be right (TestCore).
func tangle(r *rand.Rand) *graph.Definition {
	for {
		names := 0
		d := &graph.Definition{Process: "tangle", Version: 1, Nodes: map[string]*graph.Node{}}
		d.Start = part(r, d.Nodes, &names, 1)
		if r.IntN(3) == 0 {
			d.Output = "{'n': 'n2' in steps ? 1 : 2}"
		}
		for range 10 {
			_, found, err := graph.Compile(d)
			if err == nil {
				if slices.ContainsFunc(found, func(f graph.Finding) bool { return f.Code == "LOOP_WITHOUT_STEP" }) {
					break // see TestEndlessTokens
				}
				return d
			}
			for _, f := range found {
				mend(d.Nodes, strings.Split(strings.TrimPrefix(f.Path, "/nodes/"), "/"), f.Code)
			}
		}
	}
}

// mend changes the node at a path so that a finding disappears, if there is a simple way.
func mend(in map[string]*graph.Node, path []string, code string) {
	n := in[path[0]]
	switch {
	case n == nil:
	case len(path) > 3 && n.Scope != nil:
		mend(n.Scope.Nodes, path[3:], code)
	case code == "UNREACHABLE":
		delete(in, path[0])
	case n.Join == nil:
	case code == "JOIN_OF_ONE":
		n.Join, n.Do = nil, "t.a"
	case code == "NEED_WITHOUT_FORK":
		n.Join = &graph.Join{}
	case code == "JOIN_AFTER_EXCLUSIVE":
		n.Join = &graph.Join{Taken: true}
	}
}

// part draws the nodes of a process, or of a scope in it, and returns the start node.
func part(r *rand.Rand, in map[string]*graph.Node, names *int, scopes int) string {
	var all []string
	for range 4 + r.IntN(7) {
		*names++
		all = append(all, fmt.Sprintf("n%d", *names))
	}
	forward := func(k int) string { // mostly to a later node, sometimes to any node
		if k+1 < len(all) && r.IntN(8) > 0 {
			return all[k+1+r.IntN(min(4, len(all)-k-1))]
		}
		return all[r.IntN(len(all))]
	}
	reads := func() string { return fmt.Sprintf("'n%[1]d' in steps && has(steps.n%[1]d.n)", 1+r.IntN(*names)) }
	for k, name := range all {
		n := &graph.Node{}
		switch p := r.IntN(20); {
		case p < 5:
			n.Do, n.To = "t.a", forward(k)
			if r.IntN(2) == 0 {
				n.In = map[string]string{"v": reads()}
			}
			if r.IntN(4) == 0 {
				n.Undo = "t.u"
			}
			if r.IntN(4) == 0 {
				n.On = []graph.Boundary{{Error: "bad", To: forward(k)}}
			}
		case p < 9:
			n.Fork = []string{forward(k), forward(k)}
			if r.IntN(2) == 0 {
				n.Fork = append(n.Fork, forward(k))
			}
		case p < 14:
			n.Join, n.To = &graph.Join{}, forward(k)
			switch r.IntN(5) {
			case 0, 1:
				n.Join.Taken = true
			case 2:
				n.Join.Need, n.Join.Cancel = 1+r.IntN(2), r.IntN(2) == 0
			}
		case p < 15:
			n.Choose, n.Else = []graph.Way{{If: reads(), To: forward(k)}}, forward(k)
		case p < 16:
			n.Any, n.Else = []graph.Way{{If: reads(), To: forward(k)}, {If: "true", To: forward(k)}}, forward(k)
		case p < 17 && scopes > 0:
			n.Scope, n.To = &graph.Scope{Nodes: map[string]*graph.Node{}}, forward(k)
			n.Scope.Start = part(r, n.Scope.Nodes, names, scopes-1)
			if r.IntN(2) == 0 {
				n.On = []graph.Boundary{{Error: "bad", To: forward(k)}}
			}
			if r.IntN(4) == 0 {
				n.On = append(n.On, graph.Boundary{After: ms(50), Keep: r.IntN(2) == 0, To: forward(k)})
			}
		case p < 18:
			n.Human, n.To = &graph.Human{}, forward(k)
			n.On = []graph.Boundary{{After: ms(50), Keep: true, To: forward(k)}}
		case p < 19:
			n.Each, n.To = &graph.Each{List: "[1, 2, 3]", Do: "t.e", Limit: r.IntN(3)}, forward(k)
			n.On = []graph.Boundary{{Error: "bad", To: forward(k)}}
		default:
			switch r.IntN(3) {
			case 0:
				n.Terminate = true
			case 1:
				n.End = true
			default:
				n.Throw = &graph.Throw{Error: "bad"}
			}
		}
		in[name] = n
	}
	return all[0]
}
