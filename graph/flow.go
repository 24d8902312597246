package graph

import "slices"

// over reports, by index, from which nodes a token can come to an end: a path leads from the node to an end, or
// something else may end the part of the process that the node is in. It searches backwards from these ends.
func (p *Process) over() []bool {
	over, queue := make([]bool, len(p.list)), []*node{}
	endable := p.endable()
	for _, n := range p.list {
		if n.ends() || endable[n.parent] {
			over[n.index] = true
			queue = append(queue, n)
		}
	}
	for ; len(queue) > 0; queue = queue[1:] {
		for _, in := range queue[0].incoming {
			from := in.from
			if in != from.inner && !over[from.index] { // the host of a scope leaves it by the scope's own edges
				over[from.index] = true
				queue = append(queue, from)
			}
			for _, r := range from.incoming { // a race passes its option at once: what follows the option follows the race
				if r.from.kind == race && !over[r.from.index] {
					over[r.from.index] = true
					queue = append(queue, r.from)
				}
			}
		}
	}
	return over
}

// ends reports whether a token may end at the node.
func (n *node) ends() bool {
	switch n.kind {
	case choose, anyOf, fork:
		return false
	case race:
		return slices.ContainsFunc(n.options, func(o *edge) bool { return o.to.next == nil })
	}
	return n.next == nil
}

// endable returns the scopes, with nil for the process itself, whose tokens may be ended wherever they are. One of
// their tokens may terminate the scope, throw an error, or fire a join that cancels the rest. Or a boundary event may
// leave the scope.
func (p *Process) endable() map[*node]bool {
	all := map[*node]bool{}
	for _, n := range p.list {
		switch {
		case n.kind == terminate, n.kind == join && n.Join.Cancel:
			all[n.parent] = true
		case n.kind == throw && n.Throw.Error != "":
			for s := n.parent; s != nil; s = s.parent {
				all[s] = true
			}
			all[nil] = true
		case n.kind == scope && slices.ContainsFunc(n.boundaries, func(h boundary) bool { return !h.stays() }):
			all[n] = true
		}
	}
	for _, n := range p.list {
		for s := n.parent; n.kind == scope && !all[n]; s = s.parent { // the end of a scope ends the scopes within
			if all[s] {
				all[n] = true
			}
			if s == nil {
				break
			}
		}
	}
	return all
}

// stays reports whether the token stays where it is when the handler's edge is taken.
func (h boundary) stays() bool { return h.Keep || h.Every > 0 }

// A flow says where a token at each node goes next. It leaves out three sorts of edges: those of handlers that let the
// token stay, because another token takes them; the inner edges of scopes, because the host stays at the scope; and the
// edges from a race to its options, because a token passes an option and goes directly to what follows it.
type flow struct {
	nodes   []*node
	leaving [][]*edge // by index: the edges that a token may take
	before  [][]*node // by index: the nodes from which a token may come
}

// flow returns the flow of all nodes.
func (p *Process) flow() *flow {
	f := &flow{nodes: p.list, leaving: make([][]*edge, len(p.list)), before: make([][]*node, len(p.list))}
	for _, n := range p.list {
		for _, e := range n.outgoing {
			aside := slices.ContainsFunc(n.boundaries, func(h boundary) bool { return h.edge == e && h.stays() })
			if e == n.inner || n.kind == race && slices.Contains(n.options, e) || aside {
				continue
			}
			f.leaving[n.index] = append(f.leaving[n.index], e)
			f.before[e.to.index] = append(f.before[e.to.index], n)
		}
	}
	return f
}

// A miss says whether a token that takes an edge avoids what avoid is looking for.
type miss int

const (
	goesOn miss = iota // depends on what follows the edge
	never              // the edge is what is looked for
	surely             // whatever follows the edge does not matter: it is avoided
)

// avoid reports, by index, from which of the given nodes a token may come to its end such that neither the token nor
// any token it splits into takes an edge for which look returns never. Terminate nodes and throws of errors do not
// count as ends, because no other token waits in vain after them. Other nodes than the given ones are not visited.
func (f *flow) avoid(nodes []*node, look func(e *edge) miss) []bool {
	may, within := make([]bool, len(f.nodes)), make([]bool, len(f.nodes))
	for _, n := range nodes {
		within[n.index] = true
	}
	holds := func(n *node) bool {
		if n.kind == terminate || n.kind == throw && n.Throw.Error != "" {
			return false
		}
		misses := func(e *edge) bool {
			m := look(e)
			return m == surely || m == goesOn && may[e.to.index]
		}
		if n.kind == fork { // a token takes every edge, so all of them have to miss
			return !slices.ContainsFunc(f.leaving[n.index], func(e *edge) bool { return !misses(e) })
		}
		return n.ends() || slices.ContainsFunc(f.leaving[n.index], misses)
	}
	for queue := slices.Clone(nodes); len(queue) > 0; queue = queue[1:] {
		if n := queue[0]; within[n.index] && !may[n.index] && holds(n) {
			may[n.index] = true
			queue = append(queue, f.before[n.index]...)
		}
	}
	return may
}

// missed returns a fork and an edge of the join j such that tokens from the fork may wait at j while none comes over
// the edge. It returns nil, nil if there is no such fork.
func (f *flow) missed(j *node) (*node, *edge) {
	forks := []*node{j.fork}
	if j.fork == nil || j.fork.kind == scope {
		forks = slices.DeleteFunc(slices.Clone(f.nodes), func(n *node) bool { return !n.verb.parts || n.parent != j.parent })
	}
	for _, fork := range forks {
		behind := f.from(fork, j)
		var in []*edge
		for _, e := range j.incoming {
			if slices.Contains(behind, e.from) {
				in = append(in, e)
			}
		}
		if len(in) < 2 {
			continue
		}
		for _, e := range in { // may all tokens of the fork end, or come over other edges of j?
			may := f.avoid(behind, func(x *edge) miss {
				switch {
				case x == e:
					return never
				case x.to == j:
					return surely
				}
				return goesOn
			})
			if may[fork.index] {
				return fork, e
			}
		}
	}
	return nil, nil
}

// from returns the nodes that a token at n may come to without passing a given node. n is among them.
func (f *flow) from(n, without *node) (all []*node) {
	seen := map[*node]bool{without: true}
	add := func(n *node) {
		if !seen[n] {
			seen[n] = true
			all = append(all, n)
		}
	}
	add(n)
	for k := 0; k < len(all); k++ {
		for _, e := range f.leaving[all[k].index] {
			add(e.from) // differs from all[k] in a race: it is the option that a token passes
			add(e.to)
		}
	}
	return all
}
