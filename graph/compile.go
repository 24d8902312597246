package graph

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
)

// Limits of a definition.
const (
	maxNodes = 10_000
	maxName  = 100
)

var (
	nameForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	kindForm = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	typeForm = regexp.MustCompile(`^[a-z0-9_-]+(\.[a-z0-9_-]+)+$`)
)

// Compile checks a definition and makes it ready to be walked. The findings are all there are,
// in order of their paths; the error is an *InvalidError if one of them is more than a note.
func Compile(d *Definition) (*Process, []Finding, error) {
	c := &compiler{p: &Process{Definition: d, nodes: map[string]*node{}}}
	c.header()
	names := slices.Sorted(maps.Keys(d.Nodes))
	for _, name := range names {
		c.node(name, d.Nodes[name])
	}
	for _, name := range names {
		if n := c.p.nodes[name]; n != nil {
			c.tie(n)
		}
	}
	if c.p.start = c.p.nodes[d.Start]; c.p.start == nil && len(d.Nodes) > 0 {
		c.bad("NO_START", "/start", fmt.Sprintf("there is no node %q", d.Start), "name the node where instances start")
	}
	if c.valid() {
		c.shape(names)
	}
	slices.SortStableFunc(c.found, func(a, b Finding) int { return cmp.Compare(a.Path, b.Path) })
	if !c.valid() {
		errs := slices.DeleteFunc(slices.Clone(c.found), func(f Finding) bool { return f.Note })
		return nil, c.found, &InvalidError{Process: d.Process, Version: d.Version, Findings: errs}
	}
	for _, n := range c.p.nodes {
		n.ahead = n.lookAhead(c.p)
	}
	return c.p, c.found, nil
}

type compiler struct {
	p     *Process
	found []Finding
}

func (c *compiler) bad(code, path, reason, fix string) {
	c.found = append(c.found, Finding{Code: code, Path: path, Reason: reason, Fix: fix})
}

func (c *compiler) note(code, path, reason, fix string) {
	c.found = append(c.found, Finding{Code: code, Path: path, Reason: reason, Fix: fix, Note: true})
}

func (c *compiler) valid() bool {
	return !slices.ContainsFunc(c.found, func(f Finding) bool { return !f.Note })
}

func (c *compiler) header() {
	d := c.p.Definition
	if !kindForm.MatchString(d.Process) || len(d.Process) > maxName {
		c.bad("PROCESS_NAME", "/process", fmt.Sprintf("%.120q is no name", d.Process), "use 1 to 100 letters, digits, _ and -")
	}
	if d.Version < 1 || d.Version > 1<<31-1 {
		c.bad("VERSION", "/version", fmt.Sprintf("%d is no version", d.Version), "count versions from 1")
	}
	if d.Lang != "" && d.Lang != "cel" {
		c.bad("LANG", "/lang", fmt.Sprintf("%.40q is not known", d.Lang), "use cel, or leave it out")
	}
	if len(d.Nodes) == 0 || len(d.Nodes) > maxNodes {
		c.bad("NODE_COUNT", "/nodes", fmt.Sprintf("there are %d nodes", len(d.Nodes)), fmt.Sprintf("use 1 to %d", maxNodes))
	}
	c.p.output = c.expression("/output", d.Output)
}

// verbs are the kinds whose keys are set.
func (n *Node) verbs() (all []kind) {
	for _, v := range []struct {
		kind kind
		set  bool
	}{
		{do, n.Do != ""}, {choose, n.Choose != nil}, {anyOf, n.Any != nil}, {fork, n.Fork != nil}, {join, n.Join != nil},
		{wait, n.Wait != nil}, {throw, n.Throw != nil}, {end, n.End}, {terminate, n.Terminate},
	} {
		if v.set {
			all = append(all, v.kind)
		}
	}
	return all
}

// node checks a node by itself.
func (c *compiler) node(name string, def *Node) {
	path := "/nodes/" + name
	if !nameForm.MatchString(name) || len(name) > maxName {
		c.bad("NODE_NAME", path, "a name is a word, so that expressions can say steps."+"name", "use 1 to 100 letters, digits and _, no digit first")
	}
	if def == nil {
		c.bad("VERB", path, "it is null", "give it a verb, such as do")
		return
	}
	verbs := def.verbs()
	if len(verbs) != 1 {
		c.bad("VERB", path, fmt.Sprintf("it has %d verbs %v, one says what it is", len(verbs), verbs),
			"use one of do, choose, any, fork, join, wait, throw, end, terminate")
		return
	}
	n := &node{Node: def, name: name, kind: verbs[0]}
	c.p.nodes[name] = n
	c.misplaced(path, n)
	if n.kind == do && (!typeForm.MatchString(def.Do) || len(def.Do) > 200) {
		c.bad("RUN_TYPE", path+"/do", fmt.Sprintf("%.120q is not the type of a run", def.Do), "use a dotted lower-case name such as billing.charge.v1")
	}
	if def.Attempts < 0 || def.Attempts > 1000 {
		c.bad("ATTEMPTS", path+"/attempts", fmt.Sprintf("%d is outside 1 to 1000", def.Attempts), "say how often the step may be started")
	}
	if n.kind == throw && def.Throw.Error == "" {
		c.bad("NO_CODE", path+"/throw/error", "a throw needs a code", "name the error, such as REJECTED")
	}
	n.in, n.out = c.mappings(path+"/in", def.In), c.mappings(path+"/out", def.Out)
	if n.kind == wait {
		n.until = c.expression(path+"/wait/until", def.Wait.Until)
	}
	for i, w := range slices.Concat(def.Choose, def.Any) {
		at := fmt.Sprintf("%s/%s/%d/if", path, n.kind, i)
		if w.If == "" {
			c.bad("NO_CONDITION", at, "a way needs a condition", "say when it is taken, or make it the else")
		} else if err := boolean(w.If); err != nil {
			c.bad("NOT_A_CONDITION", at, err.Error(), "compare it with something")
		}
		n.ways = append(n.ways, way{condition: c.expression(at, w.If)})
	}
}

// misplaced finds keys that mean nothing at a node of this kind.
func (c *compiler) misplaced(path string, n *node) {
	gateway := n.kind == choose || n.kind == anyOf
	for _, k := range []struct {
		key     string
		set, ok bool
	}{
		{"in", n.In != nil, n.kind == do},
		{"out", n.Out != nil, n.kind == do},
		{"attempts", n.Attempts != 0, n.kind == do},
		{"on", n.On != nil, n.kind == do},
		{"else", n.Else != "", gateway},
		{"to", n.To != "", n.kind == do || n.kind == wait || n.kind == join},
	} {
		if k.set && !k.ok {
			c.bad("MISPLACED", path+"/"+k.key, fmt.Sprintf("%s means nothing at a %s", k.key, n.kind), "remove it")
		}
	}
	if gateway && len(n.Choose)+len(n.Any) == 0 {
		c.bad("NO_WAY", path+"/"+string(n.kind), "no way leads on", "list ways with if and to")
	}
	if n.kind == fork && len(n.Fork) < 2 {
		c.bad("NO_FORK", path+"/fork", fmt.Sprintf("it has %d branches", len(n.Fork)), "use two or more, or an edge")
	}
}

func (c *compiler) expression(path, text string) *expression {
	if text == "" {
		return nil
	}
	if len(text) > 10_000 {
		c.bad("EXPRESSION", path, fmt.Sprintf("it has %d bytes", len(text)), "use at most 10000")
		return nil
	}
	e, err := compile(text)
	if err != nil {
		c.bad("EXPRESSION", path, err.Error(), "read input, steps.<node>, or, in out, result")
		return nil
	}
	return e
}

func (c *compiler) mappings(path string, from map[string]string) (all []mapping) {
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if from[key] == "" {
			c.bad("EXPRESSION", path+"/"+key, "it is empty", "say what the value is, or remove the key")
			continue
		}
		all = append(all, mapping{key, c.expression(path+"/"+key, from[key])})
	}
	return all
}

// tie ties a node's edges to other nodes.
func (c *compiler) tie(n *node) {
	path, used := "/nodes/"+n.name, map[string]int{}
	to := func(at, name string) *edge {
		target := c.p.nodes[name]
		if target == nil {
			if _, there := c.p.Definition.Nodes[name]; !there {
				c.bad("UNKNOWN_NODE", path+at, fmt.Sprintf("there is no node %.120q", name), "name a node, or leave to out for an end")
			}
			return nil
		}
		e := &edge{id: n.name + ">" + name, from: n, to: target}
		if used[name]++; used[name] > 1 {
			e.id += fmt.Sprintf("#%d", used[name])
		}
		target.incoming = append(target.incoming, e)
		return e
	}
	for i, w := range slices.Concat(n.Choose, n.Any) {
		n.ways[i].edge = to(fmt.Sprintf("/%s/%d/to", n.kind, i), w.To)
	}
	for i, name := range n.Fork {
		n.branches = append(n.branches, to(fmt.Sprintf("/fork/%d", i), name))
	}
	seen := map[string]bool{}
	for i, h := range n.On {
		at := fmt.Sprintf("/on/%d", i)
		if h.Error == "" {
			c.bad("NO_CODE", path+at+"/error", "an error edge needs a code", "name the error, or use * for any")
		}
		if seen[h.Error] || seen["*"] {
			c.bad("DUPLICATE_HANDLER", path+at+"/error", fmt.Sprintf("an earlier edge takes %q", h.Error), "remove one of them, or put * last")
		}
		seen[h.Error] = true
		n.handlers = append(n.handlers, handler{h.Error, to(at+"/to", h.To)})
	}
	if n.Else != "" {
		n.other = to("/else", n.Else)
	}
	if n.To != "" {
		n.next = to("/to", n.To)
	}
}
