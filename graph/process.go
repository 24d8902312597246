package graph

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// A Process is a definition in the form that the core walks: checked, with its edges resolved and its expressions
// compiled.
type Process struct {
	ID         uuid.UUID // of its row in process_definition; zero: it was not read from there
	Definition *Definition

	start  *node
	nodes  map[string]*node // all nodes, including those in scopes
	list   []*node          // the same nodes, in order of their names
	output *expression
	taken  []*node // the joins that wait until no other token can still arrive
	survey bool    // some node depends on every live token, so all of them are loaded: a taken join, a join that cancels, a scope or an each
	undoes bool    // it has steps that can be undone, or calls whose instances are undone with it
}

// A node is a Node with its edges resolved and its expressions compiled.
type node struct {
	*Node
	name       string
	index      int // in Process.list
	kind       kind
	verb       *verb   // of its kind
	ways       []way   // of a choose or any
	branches   []*edge // of a fork
	boundaries []boundary
	options    []*edge // of a race
	inner      *edge   // of a scope: leads to its start
	parent     *node   // the scope that the node is in; nil: none
	other      *edge   // Else
	next       *edge   // To
	incoming   []*edge
	outgoing   []*edge // all edges that tokens may take from here, see edges

	in, out  []mapping
	until    *expression // of a wait
	key      *expression // of an await
	assignee *expression // of a human
	list     *expression // of an each

	fork    *node  // of a join: the innermost fork that every path to it passes, or the scope around it; nil: neither, see forks.of
	sources []bool // of a taken join, by index: the nodes from which a token can still arrive

	ahead func() *ahead // the result of lookAhead, computed at the first call
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

// endless reports whether the event may happen for as long as a token is at the node.
func (h boundary) endless() bool {
	return h.Message != "" || h.After > 0 && !h.Keep || h.Every > 0 && h.Times == 0
}

type mapping struct {
	key   string
	value *expression
}

// An edge leads from a node to another one. Its id is from>to, with #2 and so on for further edges between the same
// nodes. The ids follow from the definition alone, so rows of join_arrival and process_token can refer to edges by
// them.
type edge struct {
	id       string
	from, to *node
}

// An ahead is what one decision may touch when a token leaves a node, see lookAhead.
type ahead struct {
	joins []*node        // the joins where a token may arrive
	edges []string       // the edges by which a token may arrive there
	many  map[*node]bool // the joins where several tokens may arrive by one edge, because a fork is on the way
	reads []string       // the nodes whose facts expressions may read, by name
	all   bool           // an expression may read the facts of all nodes
	input bool           // at least one expression may be evaluated; it may read the instance's input
}

// failure returns what a failure at a node does that no error edge takes.
func (p *Process) failure(n *node) Failure {
	return cmp.Or(n.Failure, p.Definition.Failure, OpenIncident)
}

// pure reports whether a token passes the node without waiting for anything but other tokens.
func (n *node) pure() bool { return n.verb.pure && (n.kind != throw || !n.Throw.Compensate) }

// attached reports whether a token here may have more than the node's own run to be removed when it leaves: a wait, a
// task, a child, a timer, or tokens within.
func (n *node) attached() bool {
	return n.verb.holds || slices.ContainsFunc(n.boundaries, func(h boundary) bool { return h.Error == "" })
}

// hosts reports whether a token here is the host of a group: it stands for the tokens within.
func (n *node) hosts() bool { return n.verb.hosts }

// edges returns the outgoing edges, once all nodes are tied. Those of a race include the edges that follow its options,
// because a token passes the option that comes first without entering it.
func (n *node) edges() (all []*edge) {
	for _, w := range n.ways {
		all = append(all, w.edge)
	}
	all = append(all, n.branches...)
	for _, o := range n.options {
		all = append(all, o)
		if o.to.next != nil {
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

// lookAhead finds what a decision may need to know when a token leaves n: which results expressions may read, which
// joins a token may arrive at, and by which edges. The core cannot ask the database for more in the middle of a
// decision, so the shell reads all of this before. It reads no more than this. So the cost of a decision depends on
// what lies ahead, not on how much the instance has done. The result depends on the process alone, and is computed once
// for each node.
//
// lookAhead may find more than a decision needs, but never less: the core would take a fact that was not read for one
// that does not exist, and a join that was not read for one where nobody waits. Therefore it does not evaluate
// conditions. It walks every edge that a token may take before it has to wait for a step:
//
//   - through gateways;
//   - through scopes and lists, which may be over at once, and the options of a race, whose expressions are evaluated when
//     a token enters the race;
//   - beyond joins, which may fire;
//   - from the scopes around n, because the token may be the last in them, or fail with an error that they take;
//   - from all taken joins of the process, wherever they are, because such a join may fire as soon as this token can no
//     longer arrive there.
func (n *node) lookAhead(p *Process) *ahead {
	w := &walk{ahead: &ahead{many: map[*node]bool{}}, reads: map[string]bool{}, seen: make([]bool, len(p.list)), forked: make([]bool, len(p.list))}
	w.read(p.output) // the token may be the last of the instance
	w.evaluates(n)   // the node may be retried, a handler of it armed again, or an element of its list started
	if n.kind == each && n.out != nil {
		w.reads[n.name] = true // the results of all elements: the mapping may refuse them, which told reports
	}
	w.seen[n.index] = true
	w.queue = slices.Clone(n.outgoing)
	for s := n.parent; s != nil; s = s.parent {
		w.queue = append(w.queue, s.outgoing...)
	}
	if n.kind == join || n.kind == choose || n.kind == anyOf { // a token stopped here by an incident: a retry enters n again
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

// A walk is the state of a lookAhead.
type walk struct {
	*ahead
	reads  map[string]bool
	seen   []bool // by index: visited
	forked []bool // by index: visited on a path that has passed a fork
	queue  []*edge
}

// follow visits the node that an edge leads to. A node that was visited on a path without a fork is visited once more
// when a path with a fork reaches it. Behind a fork, several tokens of one decision may arrive at a join by the same
// edge (many). Then the number of tokens in the batch is no upper bound for the arrivals, and askJoins may not rely on
// it.
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
	if to.pure() || to.hosts() || to.kind == race { // a token need not wait here, see lookAhead
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

// evaluates notes the expressions that are evaluated when a token enters a node.
func (w *walk) evaluates(n *node) {
	for _, m := range n.in {
		w.read(m.value)
	}
	w.read(n.until, n.key, n.assignee, n.list)
	for _, h := range n.boundaries {
		w.read(h.key)
	}
}

// read notes what expressions may read.
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

// errorEdge returns the edge that takes an error with this code; nil: none does.
func (n *node) errorEdge(code string) *edge {
	for _, h := range n.boundaries {
		if h.Error == code || h.Error == "*" {
			return h.edge
		}
	}
	return nil
}

// behind reports, by index, which nodes can be reached by a token that is at one of the named nodes. These count as
// reached.
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
		for s := n.parent; s != nil; s = s.parent { // the last token within leads the scope's host on
			for _, e := range s.outgoing {
				if e != s.inner {
					add(e.to)
				}
			}
		}
	}
	return all
}

// named returns the node of this process that a compensation record belongs to. A record that was lent by a called
// instance is named by a path, call node first: call/step. The name is then that of the call node.
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

// expects returns how many tokens a join waits for; 0 for a taken join, which no number makes fire.
func (n *node) expects() int {
	switch {
	case n.Join.Taken:
		return 0
	case n.Join.Need > 0:
		return n.Join.Need
	}
	return len(n.incoming)
}
