package graph

import "slices"

// over tells, by index, which nodes a token does not stay among for ever: a path leads to an end, or
// something else may end the part they are in.
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
			if in != from.inner && !over[from.index] {
				over[from.index] = true
				queue = append(queue, from)
			}
			for _, r := range from.incoming { // what follows an option of a race follows the race
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

// endable are the scopes, and nil for the process, whose tokens something may end that is not on
// their way: one of them terminates it, throws, or joins and cancels the rest; or a handler leaves it.
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
		for s := n.parent; n.kind == scope && !all[n]; s = s.parent { // what ends a part ends what lies in it
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

// A flow is where tokens go from each node; those that handlers send on beside them are left out.
type flow struct {
	nodes   []*node
	leaving [][]*edge
	before  [][]*node // from which a token comes to the node
}

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

// A miss says of an edge whether a token that takes it misses what is looked for.
type miss int

const (
	goesOn miss = iota // that depends on what follows
	never
	surely
)

// avoid tells, by index, from which nodes a token may come to its end so that neither it nor what
// it splits into has taken an edge that is never a miss. What terminates or fails counts as no end:
// nothing waits then. Only these nodes are looked at.
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
		if n.kind == fork {
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

// missed returns a fork, and an edge of a join behind it over which there may come nothing while
// others wait at the join; nil: there is none.
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
		for _, e := range in {
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

// from are the nodes that a token comes to from one, itself included, without passing another.
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
			add(e.from) // of a race: the option that is passed
			add(e.to)
		}
	}
	return all
}
