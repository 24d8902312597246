package graph

import (
	"fmt"
	"maps"
	"slices"
)

// shape finds what is wrong with a graph whose nodes and edges are right by themselves.
func (c *compiler) shape(names []string) {
	reached := c.p.reach(c.p.start, nil)
	for _, name := range names {
		n := c.p.nodes[name]
		path := c.paths[n]
		if !reached[n] {
			c.bad("UNREACHABLE", path, "no path leads here from the start", "lead an edge here, or remove it")
		}
		if (n.kind == choose || n.kind == anyOf) && n.other == nil {
			c.note("NO_ELSE", path, "if no condition is true, an incident is opened", "say where to go then with else")
		}
		if n.kind == join {
			c.checkJoin(path, n)
		}
		c.p.survey = c.p.survey || n.hosts()
		c.p.undoes = c.p.undoes || n.Undo != "" || n.kind == call && n.Call.Undo == propagate
		if n.pure() && c.loops(n) {
			c.note("LOOP_WITHOUT_STEP", path, "a token can come back here without a step in between", "put a step or a wait into the loop")
		}
	}
}

func (c *compiler) checkJoin(path string, n *node) {
	c.p.survey = c.p.survey || n.Join.Taken || n.Join.Cancel
	n.fork, n.sources = c.p.forkOf(n), c.p.sources(n)
	if n.Join.Taken {
		c.p.taken = append(c.p.taken, n)
	}
	switch {
	case len(n.incoming) < 2 && n.Join.Need == 0:
		c.bad("JOIN_OF_ONE", path, fmt.Sprintf("%d edges lead to this join", len(n.incoming)), "lead two or more here, or leave the join out")
	case n.Join.Need > 0 && (n.fork == nil || n.fork.kind == scope):
		c.bad("NEED_WITHOUT_FORK", path, "no fork lies on every path to it, so nobody knows which tokens belong together", "put it behind a fork of its own")
	case n.Join.Need == 0 && !n.Join.Taken:
		for _, name := range slices.Sorted(maps.Keys(c.p.nodes)) {
			if x := c.p.nodes[name]; x.kind == choose && c.excludes(x, n) {
				c.bad("JOIN_AFTER_EXCLUSIVE", path, fmt.Sprintf("choose %q lets a token come over one of its edges only, so it would wait for ever", name),
					`let the edges meet at an ordinary node, or use "taken" after any`)
			}
		}
	}
}

// excludes reports whether two edges of the join are reached by different ways of x only.
func (c *compiler) excludes(x, j *node) bool {
	without := c.p.reach(c.p.start, x)
	var exclusive []map[*edge]bool // for each way of x, the edges of j it leads to
	for _, e := range x.edges() {
		from := c.p.reach(e.to, x)
		here := map[*edge]bool{}
		for _, in := range j.incoming {
			if !without[in.from] && (from[in.from] || in == e) {
				here[in] = true
			}
		}
		exclusive = append(exclusive, here)
	}
	only := func(i int) (edges []*edge) { // reached by this way and no other
		for e := range exclusive[i] {
			n := 0
			for _, other := range exclusive {
				if other[e] {
					n++
				}
			}
			if n == 1 {
				edges = append(edges, e)
			}
		}
		return edges
	}
	ways := 0
	for i := range exclusive {
		if len(only(i)) > 0 {
			ways++
		}
	}
	return ways > 1
}

// reach returns the nodes that can be reached from one, itself included, without passing another.
func (p *Process) reach(from, without *node) map[*node]bool {
	seen := map[*node]bool{}
	for queue := []*node{from}; len(queue) > 0; queue = queue[1:] {
		n := queue[0]
		if n == nil || n == without || seen[n] {
			continue
		}
		seen[n] = true
		for _, e := range n.edges() {
			queue = append(queue, e.to)
		}
	}
	return seen
}

// loops reports whether a token can come from n back to n through pure nodes alone.
func (c *compiler) loops(n *node) bool {
	seen := map[*node]bool{}
	for queue := n.edges(); len(queue) > 0; queue = queue[1:] {
		to := queue[0].to
		if to == n {
			return true
		}
		if to.pure() && !seen[to] {
			seen[to] = true
			queue = append(queue, to.edges()...)
		}
	}
	return false
}

// forkOf returns the innermost fork that every path to the join passes.
func (p *Process) forkOf(j *node) (inner *node) {
	var withoutInner map[*node]bool
	for _, name := range slices.Sorted(maps.Keys(p.nodes)) {
		f := p.nodes[name]
		if f.kind != fork && f.kind != anyOf {
			continue
		}
		without := p.reach(p.start, f)
		if !without[j] && (inner == nil || !withoutInner[f]) {
			inner, withoutInner = f, without
		}
	}
	if j.parent != nil && (inner == nil || inner.parent != j.parent) {
		return j.parent // every execution of a scope has activations of its own
	}
	return inner
}

// sources are the nodes from which a token can come to the join, without passing it.
func (p *Process) sources(j *node) map[*node]bool {
	seen := map[*node]bool{}
	queue := slices.Clone(j.incoming)
	for ; len(queue) > 0; queue = queue[1:] {
		from := queue[0].from
		if from == j || seen[from] {
			continue
		}
		seen[from] = true
		queue = append(queue, from.incoming...)
	}
	return seen
}
