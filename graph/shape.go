package graph

import (
	"fmt"
	"slices"
)

// shape checks the graph as a whole, once each node and edge is valid: unreachable nodes, loops without an end, joins
// that wait in vain. It also sets survey and undoes.
func (c *compiler) shape() {
	reached, over, recurs := c.p.reach(c.p.start, nil), c.p.over(), false
	for _, n := range c.p.list {
		path := c.paths[n]
		switch {
		case !reached[n.index]:
			c.bad("UNREACHABLE", path, "no path leads here from the start", "lead an edge here, or remove it")
		case !over[n.index]:
			c.bad("NO_END", path, "no path leads from here to an end, and nothing ends it from outside",
				`lead a way out of the loop, or have it in a scope that "after" or "message" leaves`)
		}
		recurs = recurs || n.kind == call && n.Call.Process == c.p.Definition.Process
		if (n.kind == choose || n.kind == anyOf) && n.other == nil {
			c.note("NO_ELSE", path, "if no condition is true, an incident is opened", "say where to go then with else")
		}
		c.p.survey = c.p.survey || n.hosts()
		c.p.undoes = c.p.undoes || n.Undo != "" || n.kind == call && n.Call.Undo == propagate
		if c.advise && n.pure() && c.loops(n) {
			c.note("LOOP_WITHOUT_STEP", path, "a token can come back here without a step in between", "put a step or a wait into the loop")
		}
	}
	c.joins()
	if recurs && c.advise {
		c.recursion()
	}
}

// joins finds the fork of each join, and joins that may wait for a token which cannot arrive.
func (c *compiler) joins() {
	var all []*node // the joins that wait for a token over each of their edges
	forks := c.p.forks()
	for _, n := range c.p.list {
		if n.kind != join {
			continue
		}
		c.join(n, forks)
		if n.Join.Need == 0 && !n.Join.Taken {
			all = append(all, n)
		}
	}
	if len(all) == 0 {
		return
	}
	c.excluded(all)
	if !c.advise || !c.valid() {
		return // what follows makes only notes, and may repeat an error in other words
	}
	flow := c.p.flow()
	for _, j := range all {
		if fork, in := flow.missed(j); in != nil {
			c.note("JOIN_MAY_WAIT", c.paths[j], fmt.Sprintf("a branch of %q may end, or lead elsewhere, without coming over %s: the others would wait for ever", fork.name, in.id),
				`lead all its ways here, let it fail with "throw", or use "taken"`)
		}
	}
}

// join finds the fork of one join, and checks whether the edges that lead to it suit it.
func (c *compiler) join(n *node, forks forks) {
	c.p.survey = c.p.survey || n.Join.Taken || n.Join.Cancel
	n.fork = forks.of(n)
	if n.Join.Taken {
		n.sources = c.p.sources(n)
		c.p.taken = append(c.p.taken, n)
	}
	path, forked := c.paths[n], n.fork != nil && n.fork.kind != scope
	switch {
	case len(n.incoming) < 2 && n.Join.Need == 0:
		c.bad("JOIN_OF_ONE", path, fmt.Sprintf("%d edges lead to this join", len(n.incoming)), "lead two or more here, or leave the join out")
	case n.Join.Need > 0 && !forked:
		c.bad("NEED_WITHOUT_FORK", path, "no fork lies on every path to it, so nobody knows which tokens belong together", "put it behind a fork of its own")
	case n.Join.Need == 0 && !forked:
		c.note("UNSTRUCTURED_JOIN", path, "no fork lies on every path to it, so tokens that belong to different forks may meet here",
			"put it behind a fork of its own, unless that is meant")
	}
	if n.Join.Need > len(n.incoming) {
		c.note("JOIN_MAY_WAIT", path, fmt.Sprintf("it needs %d, and %d edges lead here: tokens would have to arrive over some of them more than once", n.Join.Need, len(n.incoming)),
			"need no more than there are branches, unless that is meant")
	}
}

// excluded finds joins that wait in vain: they need tokens over two edges, but some node sends its token on by only one
// of the ways to these edges. If that node is a choose or race, this is an error. If it is a node with boundary events,
// it is a note.
func (c *compiler) excluded(joins []*node) {
	for _, x := range c.p.list {
		edges, others := x.exclusive()
		certain := x.kind == choose || x.kind == race
		if len(edges) < 2 || !certain && !c.advise {
			continue
		}
		w := c.p.waysOf(x, edges, others)
		for _, j := range joins {
			switch {
			case !w.exclude(j):
			case certain:
				c.bad("JOIN_AFTER_EXCLUSIVE", c.paths[j], fmt.Sprintf("%s %q lets a token come over one of its edges only, so it would wait for ever", x.kind, x.name),
					`let the edges meet at an ordinary node, or use "taken" after any`)
			default:
				c.note("JOIN_MAY_WAIT", c.paths[j], fmt.Sprintf("a token leaves %q over one of its edges only: it would wait for ever for one over another", x.name),
					"let the edges meet at an ordinary node")
			}
		}
	}
}

// recursion finds calls of the process itself that every instance reaches. It looks outwards, scope by scope: whether
// each way through the scope passes the call, whether each way through the next scope passes this scope, and so on.
func (c *compiler) recursion() {
	flow := c.p.flow()
	for _, n := range c.p.list {
		if n.kind != call || n.Call.Process != c.p.Definition.Process {
			continue
		}
		passed, always := n, true
		for always {
			start := c.p.start
			if passed.parent != nil {
				start = passed.parent.inner.to
			}
			may := flow.avoid(c.p.list, func(e *edge) miss {
				if e.to == passed {
					return never
				}
				return goesOn
			})
			always = start == passed || !may[start.index]
			if passed.parent == nil {
				break
			}
			passed = passed.parent
		}
		if always {
			c.note("ENDLESS_CALL", c.paths[n], "each instance calls another one: the hundredth stops with an incident", "put a choose before it")
		}
	}
}

// exclusive returns the edges of a node of which a token takes exactly one. others are the edges that tokens may take in
// addition: those of handlers that let the token stay, and the inner edge of a scope.
func (n *node) exclusive() (edges, others []*edge) {
	switch n.kind {
	case choose:
		return n.outgoing, nil
	case race:
		edges = n.options
	case anyOf, fork, join, throw, end, terminate:
		return nil, nil
	default:
		if n.next != nil {
			edges = append(edges, n.next)
		}
	}
	for _, h := range n.boundaries {
		if h.Keep || h.Every > 0 {
			others = append(others, h.edge)
		} else {
			edges = append(edges, h.edge)
		}
	}
	if n.inner != nil {
		others = append(others, n.inner)
	}
	return slices.DeleteFunc(slices.Clone(edges), func(e *edge) bool { return e == nil }), slices.DeleteFunc(others, func(e *edge) bool { return e == nil })
}

// ways says what can be reached by each of the exclusive edges of a node.
type ways struct {
	without []bool // by index: the nodes that can be reached without taking any of these edges
	edges   []*edge
	from    [][]bool // by edge, then by index: the nodes that can be reached by it
}

// waysOf returns the ways from x, given what x.exclusive returns.
func (p *Process) waysOf(x *node, edges, others []*edge) *ways {
	w, known := &ways{without: p.reach(p.start, x), edges: edges}, map[*node][]bool{}
	for _, e := range others {
		for k, reached := range p.reach(e.to, x) {
			w.without[k] = w.without[k] || reached
		}
	}
	for _, e := range w.edges {
		if known[e.to] == nil {
			known[e.to] = p.reach(e.to, x)
		}
		w.from = append(w.from, known[e.to])
	}
	return w
}

// exclude reports whether two edges of a join can be reached only by different ways. A token takes one way, so none
// arrives over the other edge.
func (w *ways) exclude(j *node) bool {
	first := -1
	for _, in := range j.incoming {
		if w.without[in.from.index] {
			continue
		}
		only, n := -1, 0
		for k, e := range w.edges {
			if w.from[k][in.from.index] || in == e {
				if only, n = k, n+1; n > 1 {
					break
				}
			}
		}
		if n == 1 && first >= 0 && only != first {
			return true
		}
		if n == 1 {
			first = only
		}
	}
	return false
}

// reach reports, by index, which nodes can be reached from a node without passing another one; nil: none is excluded.
// The node itself counts as reached.
func (p *Process) reach(from, without *node) []bool {
	seen := make([]bool, len(p.list))
	for queue := []*node{from}; len(queue) > 0; {
		n := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		if n == nil || n == without || seen[n.index] {
			continue
		}
		seen[n.index] = true
		for _, e := range n.outgoing {
			queue = append(queue, e.to)
		}
	}
	return seen
}

// loops reports whether a token can come from n back to n through pure nodes alone.
func (c *compiler) loops(n *node) bool {
	seen := make([]bool, len(c.p.list))
	for queue := slices.Clone(n.outgoing); len(queue) > 0; queue = queue[1:] {
		to := queue[0].to
		if to == n {
			return true
		}
		if to.pure() && !seen[to.index] {
			seen[to.index] = true
			queue = append(queue, to.outgoing...)
		}
	}
	return false
}

// forks lists the nodes of a process that may split tokens, each with what can be reached from the start without
// passing it.
type forks []struct {
	*node
	without []bool
}

func (p *Process) forks() (all forks) {
	for _, f := range p.list {
		if f.verb.parts {
			all = append(all, struct {
				*node
				without []bool
			}{f, p.reach(p.start, f)})
		}
	}
	return all
}

// of returns the innermost fork that every path to the join passes, or the scope around the join if no such fork is in
// that scope; nil if there is neither. The tokens that meet at the join are those of one execution of this node.
func (all forks) of(j *node) (inner *node) {
	var withoutInner []bool
	for _, f := range all {
		if !f.without[j.index] && (inner == nil || !withoutInner[f.index]) {
			inner, withoutInner = f.node, f.without
		}
	}
	if j.parent != nil && (inner == nil || inner.parent != j.parent) {
		return j.parent // each execution of a scope has a group of its own, so it can serve as the fork
	}
	return inner
}

// sources reports, by index, from which nodes a token can come to the join without passing it before.
func (p *Process) sources(j *node) []bool {
	seen := make([]bool, len(p.list))
	queue := slices.Clone(j.incoming)
	for ; len(queue) > 0; queue = queue[1:] {
		from := queue[0].from
		if from == j || seen[from.index] {
			continue
		}
		seen[from.index] = true
		queue = append(queue, from.incoming...)
	}
	return seen
}
