package graph

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Mermaid draws a definition as a Mermaid flowchart: shapes by kind, scopes as boxes, and edges labelled with their
// conditions or events. With marks, by the names of nodes, it also shows where an instance is. The definition need not
// be valid: a node that an edge names and that does not exist is drawn as missing. Equal arguments give equal text. All
// text of the definition is escaped, so it cannot act as Mermaid code.
func Mermaid(d *Definition, marks map[string]Mark) string {
	p := &picture{marks: marks, classes: map[string][]string{}}
	p.line("flowchart TD")
	p.part(&Scope{Start: d.Start, Nodes: d.Nodes})
	p.text.WriteString(p.edges.String()) // after all nodes: an edge to a node that is not declared yet would declare it in the wrong box
	for _, c := range []struct{ name, style string }{
		{"missing", "stroke-dasharray: 4 4,color:#a00"},
		{"visited", "fill:#e8f3e8,stroke:#2e7d32"},
		{"undone", "fill:#eee,stroke:#757575,stroke-dasharray: 4 4"},
		{"live", "fill:#fff3c4,stroke:#b26a00,stroke-width:3px"},
		{"failed", "fill:#fbe0e0,stroke:#b00020,stroke-width:3px"},
	} {
		if ids := p.classes[c.name]; len(ids) > 0 {
			p.line("classDef %s %s", c.name, c.style)
			p.line("class %s %s", strings.Join(ids, ","), c.name)
		}
	}
	return p.text.String()
}

type picture struct {
	marks       map[string]Mark
	text, edges strings.Builder
	depth, last int
	classes     map[string][]string // ids of nodes
}

func (p *picture) line(format string, args ...any) {
	fmt.Fprintf(&p.text, strings.Repeat("  ", p.depth)+format+"\n", args...)
	p.depth = max(p.depth, 1) // all lines but the first are indented
}

// id returns a new id for a node. It is a number, because the name of a node could be a keyword of Mermaid.
func (p *picture) id() string {
	p.last++
	return fmt.Sprintf("n%d", p.last)
}

// part draws the nodes of a process or a scope, and collects their edges.
func (p *picture) part(s *Scope) {
	order, ids, missing := s.order(), map[string]string{}, map[string]bool{}
	begin := p.id()
	for _, name := range order {
		ids[name] = p.id()
	}
	to := func(name string) string {
		if _, there := ids[name]; !there {
			ids[name], missing[name] = p.id(), true
		}
		return ids[name]
	}
	p.line("%s(( ))", begin)
	for _, name := range order {
		n := s.Nodes[name]
		if n == nil {
			n = &Node{}
		}
		p.node(ids[name], name, n)
	}
	if s.Start != "" {
		fmt.Fprintf(&p.edges, "  %s --> %s\n", begin, to(s.Start))
	}
	for _, name := range order {
		for _, l := range s.Nodes[name].links() {
			arrow := "-->"
			if l.event {
				arrow = "-.->"
			}
			if l.label != "" {
				arrow += `|"` + escape(l.label) + `"|`
			}
			fmt.Fprintf(&p.edges, "  %s %s %s\n", ids[name], arrow, to(l.to))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		p.line(`%s["%s<br/>is missing"]`, ids[name], escape(name))
		p.classes["missing"] = append(p.classes["missing"], ids[name])
	}
}

func (p *picture) node(id, name string, n *Node) {
	detail, shape, box := "no verb", [2]string{"[", "]"}, false
	if said := n.verbs(); len(said) > 0 {
		detail, shape, box = said[0].says(n), said[0].shape, said[0].kind == scope
	}
	label := escape(name)
	m := p.marks[name]
	for _, text := range []string{detail, m.String()} {
		if text != "" {
			label += "<br/>" + escape(text)
		}
	}
	if class := m.class(); class != "" {
		p.classes[class] = append(p.classes[class], id)
	}
	if box {
		p.line(`subgraph %s["%s"]`, id, label)
		p.depth++
		p.part(n.Scope)
		p.depth--
		p.line("end")
		return
	}
	p.line(`%s%s"%s"%s`, id, shape[0], label, shape[1])
}

// A link is an edge in a picture.
type link struct {
	label, to string
	event     bool // the edge of a boundary event, drawn dotted
}

// links returns all edges of a node, in the order in which they are drawn.
func (n *Node) links() (all []link) {
	if n == nil {
		return nil
	}
	for _, w := range slices.Concat(n.Choose, n.Any) {
		all = append(all, link{label: w.If, to: w.To})
	}
	for _, to := range slices.Concat(n.Fork, n.Race) {
		all = append(all, link{to: to})
	}
	if n.Else != "" {
		all = append(all, link{label: "else", to: n.Else})
	}
	if n.To != "" {
		all = append(all, link{to: n.To})
	}
	for _, h := range n.On {
		all = append(all, link{h.label(), h.To, true})
	}
	return all
}

// order returns the names of the nodes in reading order: from the start along the edges, then the unreachable ones.
func (s *Scope) order() (names []string) {
	seen := map[string]bool{}
	walk := func(from string) {
		for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
			name := queue[0]
			n, there := s.Nodes[name]
			if !there || seen[name] {
				continue
			}
			seen[name] = true
			names = append(names, name)
			for _, l := range n.links() {
				queue = append(queue, l.to)
			}
		}
	}
	walk(s.Start)
	for _, name := range slices.Sorted(maps.Keys(s.Nodes)) {
		walk(name)
	}
	return names
}
