package graph

import (
	"fmt"
	"slices"
	"strings"
)

// A kind says what a node is. Its value is the key of the node's verb.
type kind string

const (
	do        kind = "do"
	choose    kind = "choose"
	anyOf     kind = "any"
	fork      kind = "fork"
	join      kind = "join"
	wait      kind = "wait"
	await     kind = "await"
	race      kind = "race"
	human     kind = "human"
	call      kind = "call"
	each      kind = "each"
	scope     kind = "scope"
	throw     kind = "throw"
	end       kind = "end"
	terminate kind = "terminate"
)

// A verb describes a kind of node: how it is written, checked and drawn, and how tokens behave there in general. What
// happens when a token enters such a node is in entering (move.go), which belongs to the core. A new kind needs a row
// in verbs, a case in entering and a key in Node.
type verb struct {
	kind  kind
	given func(*Node) bool                        // reports whether a node has the verb's key
	keys  string                                  // the keys of besides that may accompany it
	check func(c *compiler, path string, n *node) // checks its value and compiles its expressions; nil: there is nothing to check
	label func(*Node) string                      // its text in a picture; nil: the verb's key
	shape [2]string                               // the Mermaid brackets around the label

	pure  bool // a token passes without waiting for anything but other tokens
	holds bool // a token here may have more than a run to be removed when it leaves: a wait, a task, a child or tokens within
	hosts bool // a token here is the host of a group: it stands for the tokens within
	fails bool // it may fail, so it may have error edges
	parts bool // it may send on more tokens than arrived
}

// verbs lists all kinds of nodes, in the order in which messages name them.
var verbs = []*verb{
	{kind: do, given: func(n *Node) bool { return n.Do != "" }, keys: "in out attempts failure retry undo on to",
		check: (*compiler).step, label: func(n *Node) string { return n.Do }, shape: [2]string{"[", "]"}, fails: true},
	{kind: choose, given: func(n *Node) bool { return n.Choose != nil }, keys: "else",
		check: (*compiler).gateway, shape: [2]string{"{", "}"}, pure: true},
	{kind: anyOf, given: func(n *Node) bool { return n.Any != nil }, keys: "else",
		check: (*compiler).gateway, shape: [2]string{"{", "}"}, pure: true, parts: true},
	{kind: fork, given: func(n *Node) bool { return n.Fork != nil },
		check: (*compiler).fork, shape: [2]string{"[/", `\]`}, pure: true, parts: true},
	{kind: join, given: func(n *Node) bool { return n.Join != nil }, keys: "to",
		label: func(n *Node) string { return n.Join.label() }, shape: [2]string{`[\`, "/]"}, pure: true},
	{kind: wait, given: func(n *Node) bool { return n.Wait != nil }, keys: "on to",
		check: (*compiler).wait, label: func(n *Node) string { return n.Wait.label() }, shape: [2]string{"(", ")"}},
	{kind: await, given: func(n *Node) bool { return n.Await != nil }, keys: "out on to",
		check: (*compiler).await, label: func(n *Node) string { return n.Await.label() }, shape: [2]string{">", "]"}, holds: true},
	{kind: race, given: func(n *Node) bool { return n.Race != nil },
		check: (*compiler).race, shape: [2]string{"{", "}"}, holds: true},
	{kind: human, given: func(n *Node) bool { return n.Human != nil }, keys: "in out on to",
		check: (*compiler).human, label: func(n *Node) string { return strings.Join(append([]string{"human"}, n.Human.Groups...), " ") },
		shape: [2]string{"[/", "/]"}, holds: true},
	{kind: call, given: func(n *Node) bool { return n.Call != nil }, keys: "in out failure on to",
		check: (*compiler).call, label: func(n *Node) string { return n.Call.label() }, shape: [2]string{"[[", "]]"}, holds: true, fails: true},
	{kind: each, given: func(n *Node) bool { return n.Each != nil }, keys: "in out attempts failure retry on to",
		check: (*compiler).each, label: func(n *Node) string { return fmt.Sprintf("%s for each of %s", n.Each.Do, n.Each.List) },
		shape: [2]string{"{{", "}}"}, holds: true, hosts: true, fails: true},
	{kind: scope, given: func(n *Node) bool { return n.Scope != nil }, keys: "on to",
		check: (*compiler).scope, label: func(*Node) string { return "" }, holds: true, hosts: true, fails: true}, // drawn as a box, without a shape
	{kind: throw, given: func(n *Node) bool { return n.Throw != nil }, keys: "to",
		check: (*compiler).throw, label: func(n *Node) string { return n.Throw.label() }, shape: [2]string{"([", "])"}, pure: true},
	{kind: end, given: func(n *Node) bool { return n.End }, shape: [2]string{"((", "))"}, pure: true},
	{kind: terminate, given: func(n *Node) bool { return n.Terminate }, shape: [2]string{"(((", ")))"}, pure: true},
}

// besides lists the keys that may accompany a verb. A verb's keys say which of them have a meaning there.
var besides = []struct {
	key   string
	given func(*Node) bool
}{
	{"in", func(n *Node) bool { return n.In != nil }},
	{"out", func(n *Node) bool { return n.Out != nil }},
	{"attempts", func(n *Node) bool { return n.Attempts != 0 }},
	{"failure", func(n *Node) bool { return n.Failure != "" }},
	{"retry", func(n *Node) bool { return n.Retry != nil }},
	{"undo", func(n *Node) bool { return n.Undo != "" }},
	{"on", func(n *Node) bool { return n.On != nil }},
	{"else", func(n *Node) bool { return n.Else != "" }},
	{"to", func(n *Node) bool { return n.To != "" }},
}

// verbs returns the verbs that a node has. A valid node has exactly one.
func (n *Node) verbs() (all []*verb) {
	for _, v := range verbs {
		if v.given(n) {
			all = append(all, v)
		}
	}
	return all
}

// kindsOf returns the keys of verbs.
func kindsOf(all []*verb) (keys []string) {
	for _, v := range all {
		keys = append(keys, string(v.kind))
	}
	return keys
}

// says returns the text of the verb in a picture.
func (v *verb) says(n *Node) string {
	if v.label != nil {
		return v.label(n)
	}
	return string(v.kind)
}

// misplaced finds keys that have no meaning beside the node's verb.
func (c *compiler) misplaced(path string, n *node) {
	allowed := strings.Fields(n.verb.keys)
	if n.kind == throw && !n.Throw.Compensate {
		allowed = nil // an error leads to an error edge, so the node has no next one
	}
	for _, k := range besides {
		if k.given(n.Node) && !slices.Contains(allowed, k.key) {
			c.bad("MISPLACED", path+"/"+k.key, fmt.Sprintf("%s means nothing at a %s", k.key, n.kind), "remove it")
		}
	}
}
