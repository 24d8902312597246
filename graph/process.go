package graph

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// A Process is a definition that has been checked, ready to be walked.
type Process struct {
	ID         uuid.UUID // of its row; zero if it was never deployed
	Definition *Definition

	start  *node
	nodes  map[string]*node
	list   []*node // the same, in order of their names
	output *expression
	taken  []*node // its joins that wait for those that can still come
	survey bool    // it has nodes that have to know of every live token
	undoes bool    // it has steps that can be undone
}

// A node is a Node with its edges tied to nodes and its expressions compiled.
type node struct {
	*Node
	name       string
	index      int // among the nodes, in order of their names
	kind       kind
	verb       *verb // what there is to know of its kind
	ways       []way // of choose and any
	branches   []*edge
	boundaries []boundary
	options    []*edge // of race
	inner      *edge   // of scope: to its start
	parent     *node   // the scope it lies in; nil: none
	other      *edge   // else
	next       *edge   // to
	incoming   []*edge
	outgoing   []*edge // all that lead on, whatever makes a token take them

	in, out  []mapping
	until    *expression
	key      *expression // of await
	assignee *expression // of human
	list     *expression // of each

	fork    *node  // of a join: the innermost fork that all of its edges come from
	sources []bool // of a join, by index: where a token can still come here from

	ahead func() *ahead // what may be decided when a token leaves here
}

type way struct {
	condition *expression
	edge      *edge
}

type boundary struct {
	*Boundary
	key  *expression
	edge *edge
}

// endless reports whether it may happen for as long as a token is there.
func (h boundary) endless() bool {
	return h.Message != "" || h.After > 0 && !h.Keep || h.Every > 0 && h.Times == 0
}

type mapping struct {
	key   string
	value *expression
}

// An edge's id is from>to, with #2 and so on for a second one: stable, so that it can be
// stored.
type edge struct {
	id       string
	from, to *node
}

// ahead is what lies between a node and the next steps, gateways and joins: all that one
// decision may touch.
type ahead struct {
	joins []*node        // joins it may arrive at
	edges []string       // the edges it may arrive over
	many  map[*node]bool // joins that more than one may arrive at over an edge: it may fork before
	reads []string       // nodes whose facts are read on the way; nil with all: any
	all   bool
	input bool // the instance's input may be read, or anything else by an expression
}

// failure returns what a failure at a node does that no edge takes.
func (p *Process) failure(n *node) Failure {
	return cmp.Or(n.Failure, p.Definition.Failure, OpenIncident)
}

// pure reports whether a token passes the node without waiting for anything but other tokens.
func (n *node) pure() bool { return n.verb.pure && (n.kind != throw || !n.Throw.Compensate) }

// attached reports whether anything but a run of its own must go when a token leaves: a wait, a
// task, a child, a timer, tokens within.
func (n *node) attached() bool {
	return n.verb.holds || slices.ContainsFunc(n.boundaries, func(h boundary) bool { return h.Error == "" })
}

// hosts reports whether a token here stands for others within.
func (n *node) hosts() bool { return n.verb.hosts }

// edges lists what is outgoing, once all nodes are tied.
func (n *node) edges() (all []*edge) {
	for _, w := range n.ways {
		all = append(all, w.edge)
	}
	all = append(all, n.branches...)
	for _, o := range n.options {
		all = append(all, o)
		if o.to.next != nil { // the race has it passed
			all = append(all, o.to.next)
		}
	}
	if n.inner != nil {
		all = append(all, n.inner)
	}
	for _, h := range n.boundaries {
		all = append(all, h.edge)
	}
	for _, e := range []*edge{n.other, n.next} {
		if e != nil {
			all = append(all, e)
		}
	}
	return all
}

// lookAhead finds what a decision may need to know when a token leaves n: which results its expressions read, which joins
// it may arrive at, and over which edges. It is worked out once for each node of a process. The shell then reads just that
// from the database, however large the instance is.
//
// It walks all edges that a decision may follow before it has to wait: through gateways, and through scopes, lists
// and races, which may be over at once. It goes on beyond a join, because the join may fire. A token may also be the last of
// its scope, which leads on from there. A join of those that can still come (taken) may fire wherever it is,
// because this token cannot come any more; so all of these are looked at.
//
// Conditions are not evaluated here. What is found is what may be needed, never less.
func (n *node) lookAhead(p *Process) *ahead {
	w := &walk{ahead: &ahead{many: map[*node]bool{}}, reads: map[string]bool{}, seen: make([]bool, len(p.list)), forked: make([]bool, len(p.list))}
	w.read(p.output) // any token may be the last
	w.evaluates(n)   // it may be tried again, be armed again, or have elements to come
	if n.kind == each && n.out != nil {
		w.reads[n.name] = true // of all elements; is it what the mapping expects?
	}
	w.seen[n.index] = true
	w.queue = slices.Clone(n.outgoing)
	for s := n.parent; s != nil; s = s.parent { // its last token leads on from it
		w.queue = append(w.queue, s.outgoing...)
	}
	if n.kind == join || n.kind == choose || n.kind == anyOf { // an incident that is tried again starts here
		w.seen[n.index] = false
		w.queue = append(w.queue, &edge{to: n})
	}
	for _, j := range p.taken {
		w.queue = append(w.queue, &edge{to: j})
	}
	for ; len(w.queue) > 0; w.queue = w.queue[1:] {
		w.follow(w.queue[0])
	}
	w.ahead.reads = slices.Sorted(maps.Keys(w.reads))
	return w.ahead
}

// A walk is a lookAhead under way.
type walk struct {
	*ahead
	reads  map[string]bool
	seen   []bool // by index, as forked
	forked []bool // visited from behind a fork
	queue  []*edge
}

// follow visits what an edge leads to. A node behind a fork is visited once more than others, as forked: more than one token of
// this decision may come to a join there over the same edge (many). Then not even the number of this batch's tokens bounds how
// many arrive.
func (w *walk) follow(e *edge) {
	to := e.to
	split := e.from != nil && (e.from.verb.parts || w.forked[e.from.index])
	if to.kind == join && e.id != "" {
		w.edges = append(w.edges, e.id)
		w.many[to] = w.many[to] || split
	}
	again := w.seen[to.index]
	if again && (!split || w.forked[to.index]) {
		return
	}
	w.seen[to.index], w.forked[to.index] = true, split
	if to.pure() || to.hosts() || to.kind == race { // these may be over at once
		w.queue = append(w.queue, to.outgoing...)
	}
	if again {
		return
	}
	w.evaluates(to)
	for _, way := range to.ways {
		w.read(way.condition)
	}
	if to.kind == join {
		w.joins = append(w.joins, to)
	}
}

// evaluates notes what a token's coming to a node evaluates.
func (w *walk) evaluates(n *node) {
	for _, m := range n.in {
		w.read(m.value)
	}
	w.read(n.until, n.key, n.assignee, n.list)
	for _, h := range n.boundaries {
		w.read(h.key)
	}
}

func (w *walk) read(all ...*expression) {
	for _, e := range all {
		if e == nil {
			continue
		}
		w.all, w.input = w.all || e.every, true
		for _, name := range e.steps {
			w.reads[name] = true
		}
	}
}

func (n *node) errorEdge(code string) *edge {
	for _, h := range n.boundaries {
		if h.Error == code || h.Error == "*" {
			return h.edge
		}
	}
	return nil
}

// behind tells, by index, which nodes a token may come to that is at one of these, themselves included.
func (p *Process) behind(names map[string]bool) []bool {
	all := make([]bool, len(p.list))
	add := func(from *node) {
		for k, is := range p.reach(from, nil) {
			all[k] = all[k] || is
		}
	}
	for name := range names {
		n := p.nodes[name]
		add(n)
		for s := n.parent; s != nil; s = s.parent { // its last token leads on from it
			for _, e := range s.outgoing {
				if e != s.inner {
					add(e.to)
				}
			}
		}
	}
	return all
}

// named returns the node that a record is of: one of an instance that was called has the path to it behind.
func (p *Process) named(at string) (string, bool) {
	for {
		if p.nodes[at] != nil {
			return at, true
		}
		k := strings.LastIndexByte(at, '/')
		if k < 0 {
			return "", false
		}
		at = at[:k]
	}
}

func (n *node) expects() int {
	switch {
	case n.Join.Taken:
		return 0
	case n.Join.Need > 0:
		return n.Join.Need
	}
	return len(n.incoming)
}
