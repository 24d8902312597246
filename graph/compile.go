package graph

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/spelling"
)

// Limits of a definition. They bound the time that Compile takes, and the work of one decision.
const (
	maxText     = 1 << 20 // bytes
	maxNodes    = 2_000   // including those in scopes
	maxEdges    = 10_000
	maxBranches = 1_000 // of a fork or any
	maxEach     = 1_000 // elements under way at once
	maxName     = 100   // bytes
)

var (
	nameForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	kindForm = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	typeForm = regexp.MustCompile(`^[a-z0-9_-]+(\.[a-z0-9_-]+)+$`)
)

// Compile checks a definition and returns it as a Process. It returns all findings, notes included, in order of their
// paths; of a definition that is too large, only that and what is wrong with its header. If at least one finding is not
// a note, the process is nil and the error is an *InvalidError.
func Compile(d *Definition) (*Process, []Finding, error) { return compileAll(d, true) }

// compileAll is Compile. Without advise it leaves out the notes that take long to find: a worker that loads a deployed
// definition shows them to nobody.
func compileAll(d *Definition, advise bool) (*Process, []Finding, error) {
	c := &compiler{advise: advise, p: &Process{Definition: d, nodes: map[string]*node{}}, paths: map[*node]string{}}
	c.header()
	if !c.small() {
		return nil, c.found, c.invalid()
	}
	c.nodes("/nodes", d.Nodes, nil)
	for k, name := range slices.Sorted(maps.Keys(c.p.nodes)) {
		n := c.p.nodes[name]
		n.index = k
		c.p.list = append(c.p.list, n)
	}
	for _, n := range c.p.list {
		c.tie(n)
	}
	for _, n := range c.p.list {
		n.outgoing = n.edges()
	}
	c.knownSteps()
	if c.p.start = c.p.nodes[d.Start]; len(d.Nodes) > 0 && (c.p.start == nil || c.p.start.parent != nil) {
		c.bad("NO_START", "/start", fmt.Sprintf("there is no node %.120q", d.Start), c.nearest(d.Start, "name the node where instances start"))
	}
	if c.valid() {
		c.shape()
	}
	slices.SortStableFunc(c.found, func(a, b Finding) int { return cmp.Compare(a.Path, b.Path) })
	if !c.valid() {
		return nil, c.found, c.invalid()
	}
	for _, n := range c.p.list {
		n.ahead = sync.OnceValue(func() *ahead { return n.lookAhead(c.p) }) // on demand: for all nodes of a large process it takes long
	}
	return c.p, c.found, nil
}

// A compiler makes a Process of a Definition. It continues after an error, so that an author sees all of them at once.
type compiler struct {
	p      *Process
	advise bool // also find the notes that take long to find
	asked  int  // calls of nearest
	found  []Finding
	texts  []located
	paths  map[*node]string // the JSON pointers of the nodes
}

// A located expression is checked by knownSteps, once all nodes are known.
type located struct {
	path string
	*expression
}

// knownSteps finds expressions that read the results of nodes which do not exist.
func (c *compiler) knownSteps() {
	for _, e := range c.texts {
		for _, name := range e.steps {
			if c.p.nodes[name] == nil && !c.there(name) {
				c.bad("UNKNOWN_STEP", e.path, fmt.Sprintf("there is no node %.120q whose result could be read", name), c.nearest(name, "name a node of this process"))
			}
		}
	}
}

// nodes checks each node of the process, or of a scope, on its own. Names are unique in the whole definition, because
// expressions read steps.name from any scope.
func (c *compiler) nodes(path string, all map[string]*Node, parent *node) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		at := path + "/" + name
		if c.p.nodes[name] != nil {
			c.bad("DUPLICATE_NAME", at, "another scope has a node of this name", "rename one of them")
			continue
		}
		if n := c.node(at, name, all[name]); n != nil {
			n.parent, c.paths[n] = parent, at
			if n.kind == scope {
				c.nodes(at+"/scope/nodes", n.Scope.Nodes, n)
			}
		}
	}
}

func (c *compiler) bad(code, path, reason, fix string) {
	c.found = append(c.found, Finding{Code: code, Path: path, Reason: reason, Fix: fix})
}

func (c *compiler) note(code, path, reason, fix string) {
	c.found = append(c.found, Finding{Code: code, Path: path, Reason: reason, Fix: fix, Note: true})
}

func (c *compiler) invalid() error {
	errs := slices.DeleteFunc(slices.Clone(c.found), func(f Finding) bool { return f.Note })
	return &InvalidError{Process: c.p.Definition.Process, Version: c.p.Definition.Version, Findings: errs}
}

// small reports whether the definition is small enough to be checked further: the checks of a larger one would take too
// long.
func (c *compiler) small() bool {
	nodes, edges := size(c.p.Definition.Nodes)
	if nodes == 0 || nodes > maxNodes {
		c.bad("NODE_COUNT", "/nodes", fmt.Sprintf("there are %d nodes", nodes), fmt.Sprintf("use 1 to %d; move parts into processes of their own and call them", maxNodes))
	}
	if edges > maxEdges {
		c.bad("EDGE_COUNT", "/nodes", fmt.Sprintf("there are %d edges", edges), fmt.Sprintf("use at most %d", maxEdges))
	}
	return nodes <= maxNodes && edges <= maxEdges
}

// size counts the nodes and the edges that leave them, including those in scopes.
func size(all map[string]*Node) (nodes, edges int) {
	for _, n := range all {
		if nodes++; n == nil {
			continue
		}
		edges += len(n.links())
		if n.Scope != nil {
			within, leaving := size(n.Scope.Nodes)
			nodes, edges = nodes+within, edges+leaving
		}
	}
	return nodes, edges
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
	for _, path := range d.zeros {
		c.bad("ZERO", path, "0 would mean the same as leaving it out", "leave it out, or give a number greater than 0")
	}
	c.failure("/failure", d.Failure)
	c.p.output = c.expression("/output", d.Output, ofInstance)
}

// node checks a node on its own, and returns nil if it has no usable verb.
func (c *compiler) node(path, name string, def *Node) *node {
	if !nameForm.MatchString(name) || len(name) > maxName {
		c.bad("NODE_NAME", path, "a name is a word, so that expressions can say steps."+"name", "use 1 to 100 letters, digits and _, no digit first")
	}
	if def == nil {
		c.bad("VERB", path, "it is null", "give it a verb, such as do")
		return nil
	}
	said := def.verbs()
	if len(said) != 1 {
		c.bad("VERB", path, fmt.Sprintf("it has %d verbs %v; a node has exactly one", len(said), kindsOf(said)), fmt.Sprintf("use one of %s", strings.Join(kindsOf(verbs), ", ")))
		return nil
	}
	n := &node{Node: def, name: name, kind: said[0].kind, verb: said[0]}
	c.p.nodes[name] = n
	c.misplaced(path, n)
	if n.verb.check != nil {
		n.verb.check(c, path, n)
	}
	c.runType(path+"/undo", def.Undo, false)
	c.retry(path, def)
	c.failure(path+"/failure", def.Failure)
	given := ofInstance
	if n.kind == each {
		given = ofElement
	}
	n.in, n.out = c.mappings(path+"/in", def.In, given), c.mappings(path+"/out", def.Out, ofResult)
	return n
}

// runType checks the type of a run. own lists the engine's own types that are allowed here.
func (c *compiler) runType(path, typ string, required bool, own ...string) {
	switch {
	case (typ != "" || required) && (!typeForm.MatchString(typ) || len(typ) > 200):
		c.bad("RUN_TYPE", path, fmt.Sprintf("%.120q is not the type of a run", typ), "use a dotted lower-case name such as billing.charge.v1")
	case strings.HasPrefix(typ, naming.Engine) && !slices.Contains(own, typ):
		c.bad("RUN_TYPE", path, fmt.Sprintf("%q is the engine's own and no step", typ),
			fmt.Sprintf("to start a process use call; the only steps of this kind are %q and %q", messageType, signalType))
	}
}

// name checks the name of a message or signal.
func (c *compiler) name(path, name string) {
	if len(name) > maxSubject {
		c.bad("NAME", path, fmt.Sprintf("a name of %d bytes", len(name)), fmt.Sprintf("use at most %d", maxSubject))
	}
}

// failure checks a value of Failure.
func (c *compiler) failure(path string, f Failure) {
	if f != "" && f != OpenIncident && f != FailInstance {
		c.bad("FAILURE", path, fmt.Sprintf("%.40q is neither incident nor fail", string(f)), "use one of them, or leave it out for incident")
	}
}

// longestPause is the longest pause that a definition may set between two attempts of a step.
const longestPause = 365 * 24 * time.Hour

// retry checks the retry policy of a node, in its long or its short form.
func (c *compiler) retry(path string, def *Node) {
	r := RetryPolicy{Attempts: def.Attempts}
	at := path + "/attempts"
	if def.Retry != nil {
		r, at = *def.Retry, path+"/retry/attempts"
		if def.Attempts != 0 {
			c.bad("ATTEMPTS", path+"/attempts", "retry sets it, too", "set it in retry only")
		}
	}
	if r.Attempts < 0 || r.Attempts > 1000 {
		c.bad("ATTEMPTS", at, fmt.Sprintf("%d is outside 1 to 1000", r.Attempts), "say how often the step may be started")
	}
	for _, pause := range []struct {
		key string
		is  Duration
	}{{"base", r.Base}, {"cap", r.Cap}} {
		if d := time.Duration(pause.is); d != 0 && (d < time.Millisecond || d > longestPause) {
			c.bad("RETRY", path+"/retry/"+pause.key, fmt.Sprintf("%s is outside 1 ms to one year", pause.is), "use a pause such as PT10S")
		}
	}
	if r.Cap != 0 && r.Base > r.Cap {
		c.bad("RETRY", path+"/retry", fmt.Sprintf("base %s is longer than cap %s", r.Base, r.Cap), "base is the first pause, cap the longest")
	}
}

// attempts returns how often the node's runs may be started; 0: as the policy of their type says.
func (n *node) attempts() int {
	if n.Retry != nil {
		return n.Retry.Attempts
	}
	return n.Attempts
}

// expression compiles an expression; it returns nil if there is none, or if it is wrong.
func (c *compiler) expression(path, text string, in use) *expression {
	if text == "" {
		return nil
	}
	if len(text) > 10_000 {
		c.bad("EXPRESSION", path, fmt.Sprintf("it has %d bytes", len(text)), "use at most 10000")
		return nil
	}
	e, err := compile(text, in)
	if err != nil {
		c.bad("EXPRESSION", path, err.Error(), "mend it; "+in.String())
		return nil
	}
	c.texts = append(c.texts, located{path, e})
	return e
}

func (c *compiler) mappings(path string, from map[string]string, in use) (all []mapping) {
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if from[key] == "" {
			c.bad("EXPRESSION", path+"/"+key, "it is empty", "say what the value is, or remove the key")
			continue
		}
		all = append(all, mapping{key, c.expression(path+"/"+key, from[key], in)})
	}
	return all
}

// tie connects a node's edges to the nodes that they name, and checks what depends on these.
func (c *compiler) tie(n *node) {
	path, used := c.paths[n], map[string]int{}
	to := func(at, name string) *edge {
		target := c.p.nodes[name]
		if target == nil {
			if !c.there(name) {
				c.bad("UNKNOWN_NODE", path+at, fmt.Sprintf("there is no node %.120q", name), c.nearest(name, "name a node, or leave to out for an end"))
			}
			return nil
		}
		if target.parent != n.parent {
			c.bad("EDGE_ACROSS_SCOPES", path+at, fmt.Sprintf("%q lies in another scope", name), "lead edges to nodes of the same scope, and on from the scope itself")
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
	for i, name := range n.Race {
		at := fmt.Sprintf("/race/%d", i)
		if o := to(at, name); o != nil {
			n.options = append(n.options, o)
			if len(o.to.On) > 0 {
				c.bad("RACE", path+at, fmt.Sprintf("%q has edges of its own for what else may happen", name), "make that another node of the race")
			}
			if o.to.kind != wait && o.to.kind != await {
				c.bad("RACE", path+at, fmt.Sprintf("%q is a %s", name, o.to.kind), "a race is between wait and await nodes")
			}
		}
	}
	if n.kind == scope {
		if start := c.p.nodes[n.Scope.Start]; start != nil && start.parent == n {
			n.inner = &edge{id: n.name + ">" + start.name, from: n, to: start}
			start.incoming = append(start.incoming, n.inner)
		}
	}
	c.boundaries(n, path, to)
	if n.Else != "" {
		n.other = to("/else", n.Else)
	}
	if n.To != "" {
		n.next = to("/to", n.To)
	}
}

// nearest suggests the node with the most similar name as a fix. If no name is similar, it returns otherwise.
func (c *compiler) nearest(name, otherwise string) string {
	if c.asked++; c.asked > 100 || len(name) > maxName { // each search compares all names: 100 suggestions are enough
		return otherwise
	}
	best, least := "", 1+len(name)/3
	for _, n := range c.p.list {
		if len(n.name) > len(name)+least || len(n.name)+least < len(name) {
			continue // the lengths alone differ by more than least
		}
		if d := spelling.Distance(strings.ToLower(name), strings.ToLower(n.name)); d <= least && (best == "" || d < least) {
			best, least = n.name, d
		}
	}
	if best == "" {
		return otherwise
	}
	return fmt.Sprintf("did you mean %q?", best)
}

// there reports whether the definition has a node of this name, even if that node is invalid: then its error is reported
// elsewhere, and edges to it are not errors of their own.
func (c *compiler) there(name string) bool {
	var in func(all map[string]*Node) bool
	in = func(all map[string]*Node) bool {
		for n, def := range all {
			if n == name || def != nil && def.Scope != nil && in(def.Scope.Nodes) {
				return true
			}
		}
		return false
	}
	return in(c.p.Definition.Nodes)
}

// handlers checks and ties the boundary events of a node.
func (c *compiler) boundaries(n *node, path string, to func(at, name string) *edge) {
	seen := map[string]bool{}
	for i := range n.On {
		h, at := &n.On[i], fmt.Sprintf("/on/%d", i)
		kinds := count(h.Error != "") + count(h.After > 0) + count(h.Every > 0) + count(h.Message != "")
		switch {
		case kinds != 1:
			c.bad("HANDLER", path+at, "it needs one of error, after, every and message, and durations greater than 0", "say when this edge is taken")
		case h.Error != "":
			if !n.verb.fails {
				c.bad("MISPLACED", path+at+"/error", fmt.Sprintf("a %s does not fail", n.kind), "remove it")
			}
			if h.Keep {
				c.bad("MISPLACED", path+at+"/keep", "a token cannot stay where it has failed", "remove it")
			}
			if seen["error "+h.Error] || seen["error *"] {
				c.bad("DUPLICATE_HANDLER", path+at+"/error", fmt.Sprintf("an earlier edge takes %q", h.Error), "remove one of them, or put * last")
			}
			seen["error "+h.Error] = true
		case h.Message != "" && h.Key == "":
			c.bad("NO_KEY", path+at+"/key", "a message needs a key", "say what it is correlated by, such as input.order")
		case h.Every > 0 && h.Every < Duration(time.Second):
			c.bad("HANDLER", path+at+"/every", fmt.Sprintf("%s is too short", h.Every), "use a second or more")
		}
		if kinds == 1 && (h.Message != "" || h.After > 0 && !h.Keep) { // two timers that let the token stay are both taken, so both make sense
			what, kind := "after "+h.After.String(), "time"
			if h.Message != "" {
				what, kind = fmt.Sprintf("message %q %q", h.Message, h.Key), "message"
			}
			if seen[what] {
				c.bad("DUPLICATE_HANDLER", path+at, "an earlier edge is taken at the same "+kind, "remove one of them, or lead one edge to a fork")
			}
			seen[what] = true
		}
		c.name(path+at+"/message", h.Message)
		if h.Times < 0 || h.Times > 0 && h.Every == 0 || h.Key != "" && h.Message == "" {
			c.bad("MISPLACED", path+at, "times goes with every, and key with message", "remove what does not belong there")
		}
		n.boundaries = append(n.boundaries, boundary{Boundary: h, key: c.expression(path+at+"/key", h.Key, ofInstance), edge: to(at+"/to", h.To)})
	}
}

// count returns 1 for true and 0 for false.
func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
