package graph

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// A Builder writes a definition in Go. Edges are handles of nodes rather than names, so that a
// mistyped one does not compile; names are only where they are stored:
//
//	g := graph.Build("order", 3)
//	reserve := g.Do("reserve", "inventory.reserve.v1").Undo("inventory.release.v1")
//	pay := g.Do("pay", "billing.charge.v1").In("amount", "input.total").Attempts(5)
//	giveUp := g.Compensate("giveUp")
//	g.Start(reserve).Then(pay)
//	pay.OnError("DECLINED", giveUp).After(30*time.Minute, giveUp)
//	definition, err := g.Definition()
//
// Nothing fails before Definition, which tells all that is wrong at once. A Builder is for one
// goroutine.
type Builder struct {
	Part
	process string
	version int
	output  string
}

// Build begins a definition of a version of a process.
func Build(process string, version int) *Builder {
	return &Builder{Part: newPart("/nodes", "/start", new([]Finding)), process: process, version: version}
}

// Output says what an instance gives when it completes: an expression.
func (b *Builder) Output(expression string) *Builder {
	b.output = expression
	return b
}

// Definition returns what was built, or an *InvalidError with everything that is wrong: the
// mistakes of building it and the findings of Compile. What is built afterwards does not change
// what was returned.
func (b *Builder) Definition() (*Definition, error) {
	d, found := b.draft(), slices.Clone(*b.mistakes)
	mistaken := map[string]bool{}
	for _, f := range found {
		mistaken[f.Path] = true
	}
	_, more, _ := Compile(d)
	for _, f := range more {
		follows := mistaken[f.Path] || len(mistaken) > 0 && (f.Code == "UNREACHABLE" || f.Code == "NO_END") // from a mistake
		if !f.Note && !follows {
			found = append(found, f)
		}
	}
	if len(found) > 0 {
		slices.SortStableFunc(found, func(a, b Finding) int { return cmp.Compare(a.Path, b.Path) })
		return nil, &InvalidError{Process: b.process, Version: b.version, Findings: found}
	}
	text, err := d.JSON()
	if err != nil {
		return nil, fmt.Errorf("graph: process %q version %d: %w", b.process, b.version, err)
	}
	return Parse(text)
}

// draft is the definition as it is so far, right or wrong.
func (b *Builder) draft() *Definition {
	return &Definition{Process: b.process, Version: b.version, Start: b.start, Output: b.output, Nodes: b.nodes}
}

// A Part is what holds nodes: a process, or a scope in it. Names are unique in the whole process.
type Part struct {
	path     string // of its nodes
	startAt  string
	start    string
	nodes    map[string]*Node
	mistakes *[]Finding // of the whole builder
}

func newPart(path, startAt string, mistakes *[]Finding) Part {
	return Part{path: path, startAt: startAt, nodes: map[string]*Node{}, mistakes: mistakes}
}

// Start says where it starts, and returns that node.
func (p *Part) Start(first *Place) *Place {
	if p.start != "" {
		p.mistake("TWO_STARTS", p.startAt, "it starts in two places", "start at a fork that leads to both")
	}
	p.start = p.target(p.startAt, first)
	if first == nil {
		return &Place{part: p, node: &Node{}} // so that the sentence can be finished
	}
	return first
}

// Path leads from each of the nodes to the next.
func (p *Part) Path(nodes ...*Place) {
	for i := 1; i < len(nodes); i++ {
		if nodes[i-1] == nil {
			p.mistake("NO_TARGET", p.path, fmt.Sprintf("node %d of a path is nil", i), "make the node first")
			continue
		}
		nodes[i-1].Then(nodes[i])
	}
}

// Do adds a step, which a run of the type does.
func (p *Part) Do(name, runType string) *Place { return p.add(name, &Node{Do: runType}) }

// Choose adds a gateway that takes the first way whose condition is true, or else Else.
func (p *Part) Choose(name string) *Place { return p.add(name, &Node{Choose: []Way{}}) }

// Any adds a gateway that takes all ways whose conditions are true, at once, or else Else.
func (p *Part) Any(name string) *Place { return p.add(name, &Node{Any: []Way{}}) }

// Fork adds a gateway that takes all branches, at once.
func (p *Part) Fork(name string, branches ...*Place) *Place {
	f := p.add(name, &Node{})
	f.node.Fork = f.targets("fork", branches)
	return f
}

// Join adds a node that waits for a token over each edge that leads to it, unless Taken or Need
// says otherwise.
func (p *Part) Join(name string) *Place { return p.add(name, &Node{Join: &Join{}}) }

// Wait adds a node that lets time pass.
func (p *Part) Wait(name string, d time.Duration) *Place {
	w := p.add(name, &Node{})
	w.node.Wait = &Wait{For: w.duration("wait", d, 0)}
	return w
}

// WaitUntil adds a node that waits for a time, which the expression gives as RFC 3339 has it.
func (p *Part) WaitUntil(name, expression string) *Place {
	w := p.add(name, &Node{Wait: &Wait{Until: expression}})
	if expression == "" {
		w.mistake("EXPRESSION", "wait/until", "it is empty", "say until when, such as input.opens")
	}
	return w
}

// Await adds a node that waits for a message with a key, which is an expression.
func (p *Part) Await(name, message, key string) *Place {
	return p.add(name, &Node{Await: &Await{Message: message, Key: key}})
}

// AwaitSignal adds a node that waits for a signal.
func (p *Part) AwaitSignal(name, signal string) *Place {
	return p.add(name, &Node{Await: &Await{Signal: signal}})
}

// Race adds a node that goes on from the first of several wait and await nodes.
func (p *Part) Race(name string, between ...*Place) *Place {
	r := p.add(name, &Node{})
	r.node.Race = r.targets("race", between)
	return r
}

// Human adds a task for a person, whom Assignee names or who is in one of the groups.
func (p *Part) Human(name string, groups ...string) *Place {
	return p.add(name, &Node{Human: &Human{Groups: slices.Clone(groups)}})
}

// Call adds a node that starts an instance of a process and waits for its end.
func (p *Part) Call(name, process string) *Place {
	return p.add(name, &Node{Call: &Call{Process: process}})
}

// Each adds a node that has a run of the type for each element of a list, which is an expression.
func (p *Part) Each(name, list, runType string) *Place {
	return p.add(name, &Node{Each: &Each{List: list, Do: runType}})
}

// Scope adds a part of the process that can be interrupted as a whole. Inside builds it, at
// once; its nodes lead to each other only.
func (p *Part) Scope(name string, inside func(*Part)) *Place {
	s := p.add(name, &Node{})
	inner := newPart(s.path+"/scope/nodes", s.path+"/scope/start", p.mistakes)
	inside(&inner)
	s.node.Scope = &Scope{Start: inner.start, Nodes: inner.nodes}
	return s
}

// Throw adds a node that fails the scope or the instance with a code.
func (p *Part) Throw(name, code string) *Place {
	return p.add(name, &Node{Throw: &Throw{Error: code}})
}

// Compensate adds a node that undoes what was done in its scope, and goes on then.
func (p *Part) Compensate(name string) *Place {
	return p.add(name, &Node{Throw: &Throw{Compensate: true}})
}

// End adds a node that ends its token.
func (p *Part) End(name string) *Place { return p.add(name, &Node{End: true}) }

// Terminate adds a node that completes the scope or the instance, whatever else moves in it.
func (p *Part) Terminate(name string) *Place { return p.add(name, &Node{Terminate: true}) }

func (p *Part) add(name string, n *Node) *Place {
	at := &Place{part: p, name: name, path: p.path + "/" + name, node: n}
	if p.nodes[name] != nil {
		p.mistake("DUPLICATE_NAME", at.path, "another node has this name", "rename one of them")
		return at
	}
	p.nodes[name] = n
	return at
}

// target is the name that an edge to a node stores.
func (p *Part) target(path string, to *Place) string {
	switch {
	case to == nil:
		p.mistake("NO_TARGET", path, "it leads to nil", "make the node first")
		return ""
	case to.part.mistakes != p.mistakes:
		p.mistake("FOREIGN_NODE", path, fmt.Sprintf("%.120q is a node of another builder", to.name), "make a node with this builder")
	case to.part != p:
		p.mistake("EDGE_ACROSS_SCOPES", path, fmt.Sprintf("%.120q lies in another scope", to.name),
			"lead edges to nodes of the same scope, and on from the scope itself")
	}
	return to.name
}

func (p *Part) mistake(code, path, reason, fix string) {
	*p.mistakes = append(*p.mistakes, Finding{Code: code, Path: path, Reason: reason, Fix: fix})
}
