package graph_test

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// everything is a definition with a node of each kind.
const everything = `{"process": "order", "version": 3, "start": "reserve", "nodes": {
	"reserve": {"do": "inventory.reserve.v1", "undo": "inventory.release.v1", "to": "pay"},
	"pay": {"do": "billing.charge.v1", "to": "size", "on": [
		{"error": "DECLINED", "to": "ask"}, {"error": "*", "to": "giveUp"}, {"after": "PT30M", "to": "undo"},
		{"every": "PT10M", "times": 3, "to": "remind"}, {"message": "withdrawn", "key": "input.id", "keep": true, "to": "remind"}]},
	"ask": {"human": {"groups": ["support", "sales"]}, "to": "pay"},
	"remind": {"do": "mail.remind.v1"},
	"giveUp": {"throw": {"error": "NOT_PAID"}},
	"undo": {"throw": {"compensate": true}, "to": "over"},
	"over": {"terminate": true},
	"size": {"choose": [{"if": "input.items.size() > 1", "to": "extras"}], "else": "ship"},
	"extras": {"any": [{"if": "input.card", "to": "card"}, {"if": "input.gift == \"yes\"", "to": "pack"}], "else": "added"},
	"card": {"call": {"process": "card", "version": 2, "undo": "none"}, "to": "added"},
	"pack": {"each": {"list": "input.items", "do": "pack.item.v1"}, "to": "added"},
	"added": {"join": "taken", "to": "ship"},
	"ship": {"scope": {"start": "both", "nodes": {
		"both": {"fork": ["pick", "book"]}, "pick": {"do": "ship.pick.v1", "to": "ready"}, "book": {"call": {"process": "carrier", "undo": "none"}, "to": "ready"},
		"ready": {"join": {"need": 1, "rest": "cancel"}, "to": "left"}, "left": {"end": true}}},
		"on": [{"error": "LOST", "to": "undo"}], "to": "first"},
	"first": {"race": ["week", "opens", "arrived", "recall"]},
	"week": {"wait": "P7D", "to": "done"}, "opens": {"wait": {"until": "input.opens"}, "to": "done"},
	"arrived": {"await": {"message": "arrived", "key": "input.id"}, "to": "two"}, "recall": {"await": {"signal": "recall"}, "to": "two"},
	"two": {"join": {"need": 2}, "to": "done"},
	"done": {"join": "all", "to": "ended"}, "ended": {"end": true}}}`

// Each kind of node has its shape, each edge is labelled with when it is taken, and a scope is a box.
func TestMermaid(t *testing.T) {
	const want = `flowchart TD
  n1(( ))
  n2["reserve<br/>inventory.reserve.v1"]
  n3["pay<br/>billing.charge.v1"]
  n4{"size<br/>choose"}
  n5[/"ask<br/>human support sales"/]
  n6(["giveUp<br/>throw NOT_PAID"])
  n7(["undo<br/>compensate"])
  n8["remind<br/>mail.remind.v1"]
  n9{"extras<br/>any"}
  subgraph n10["ship"]
    n23(( ))
    n24[/"both<br/>fork"\]
    n25["pick<br/>ship.pick.v1"]
    n26[["book<br/>call carrier"]]
    n27[\"ready<br/>join 1, cancel the rest"/]
    n28(("left<br/>end"))
  end
  n11((("over<br/>terminate")))
  n12[["card<br/>call card version 2"]]
  n13{{"pack<br/>pack.item.v1 for each of input.items"}}
  n14[\"added<br/>join taken"/]
  n15{"first<br/>race"}
  n16("week<br/>wait P7D")
  n17("opens<br/>until input.opens")
  n18>"arrived<br/>message arrived, key input.id"]
  n19>"recall<br/>signal recall"]
  n20[\"done<br/>join"/]
  n21[\"two<br/>join 2"/]
  n22(("ended<br/>end"))
  n23 --> n24
  n24 --> n25
  n24 --> n26
  n25 --> n27
  n26 --> n27
  n27 --> n28
  n1 --> n2
  n2 --> n3
  n3 --> n4
  n3 -.->|"error DECLINED"| n5
  n3 -.->|"any error"| n6
  n3 -.->|"after PT30M"| n7
  n3 -.->|"every PT10M, 3 times"| n8
  n3 -.->|"message withdrawn, key input.id, and stays"| n8
  n4 -->|"input.items.size() #62; 1"| n9
  n4 -->|"else"| n10
  n5 --> n3
  n7 --> n11
  n9 -->|"input.card"| n12
  n9 -->|"input.gift == #34;yes#34;"| n13
  n9 -->|"else"| n14
  n10 --> n15
  n10 -.->|"error LOST"| n7
  n12 --> n14
  n13 --> n14
  n14 --> n10
  n15 --> n16
  n15 --> n17
  n15 --> n18
  n15 --> n19
  n16 --> n20
  n17 --> n20
  n18 --> n21
  n19 --> n21
  n20 --> n22
  n21 --> n20
`
	picture(t, everything, nil, want)
}

// With marks, a picture shows where the tokens of an instance are and which nodes they have visited.
func TestMermaidWithMarks(t *testing.T) {
	const want = `flowchart TD
  n1(( ))
  n2["a<br/>x.a<br/>1 visit, succeeded"]
  n3[/"f<br/>fork"\]
  n4["b<br/>x.b<br/>12 visits, 1 live, Executing"]
  subgraph n5["s<br/>2 live"]
    n8(( ))
    n9("c<br/>wait PT1H<br/>2 visits, 2 live, Waiting")
  end
  n6["d<br/>x.d<br/>1 visit, Failed"]
  n7["e<br/>x.e<br/>1 visit, undone"]
  n8 --> n9
  n1 --> n2
  n2 --> n3
  n3 --> n4
  n3 --> n5
  n3 --> n6
  n6 --> n7
  classDef visited fill:#e8f3e8,stroke:#2e7d32
  class n2 visited
  classDef undone fill:#eee,stroke:#757575,stroke-dasharray: 4 4
  class n7 undone
  classDef live fill:#fff3c4,stroke:#b26a00,stroke-width:3px
  class n4,n5,n9 live
  classDef failed fill:#fbe0e0,stroke:#b00020,stroke-width:3px
  class n6 failed
`
	picture(t, `{"process": "p", "version": 1, "start": "a", "nodes": {
		"a": {"do": "x.a", "to": "f"}, "f": {"fork": ["b", "s", "d"]}, "b": {"do": "x.b"},
		"s": {"scope": {"start": "c", "nodes": {"c": {"wait": "1h"}}}}, "d": {"do": "x.d", "to": "e"}, "e": {"do": "x.e"}}}`,
		map[string]graph.Mark{
			"a": {Visits: 1, State: "succeeded"}, "e": {Visits: 1, State: "undone"}, "b": {Visits: 12, Live: 1, State: "Executing"}, "s": {Live: 2}, "c": {Visits: 2, Live: 2, State: "Waiting"},
			"d": {Visits: 1, State: "Failed"}, "gone": {Visits: 1, Live: 1}, "f": {},
		}, want)
}

// An invalid definition is drawn as well, and its missing, null and verbless nodes are visible.
func TestMermaidOfADraft(t *testing.T) {
	const want = `flowchart TD
  n1(( ))
  n2{"end<br/>choose"}
  n3["b<br/>no verb"]
  n4["a<br/>no verb"]
  n5["gone<br/>is missing"]
  n1 --> n2
  n2 -->|"true"| n5
  n2 --> n3
  n4 --> n2
  classDef missing stroke-dasharray: 4 4,color:#a00
  class n5 missing
`
	picture(t, `{"start": "end", "nodes": {"end": {"to": "b", "choose": [{"if": "true", "to": "gone"}]}, "b": null, "a": {"to": "end"}}}`, nil, want)
}

func picture(t *testing.T, text string, marks map[string]graph.Mark, want string) {
	t.Helper()
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // the result is always the same
		if got := graph.Mermaid(d, marks); got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
	}
}

// No text of a definition or a mark can leave the quotes of its label.
func TestMermaidEscapes(t *testing.T) {
	const want = `flowchart TD
  n1(( ))
  n2{"x#34;#93; click n1 #34;javascript:alert(1)#34; #37;#37;#123;init: #123;#125;#125;#37;#37; #60;b#62;#38;amp#59; #96;#42;#96;#59; #35;<br/>choose<br/>x#34;#93; click n1 #34;javascript:alert(1)#34; #37;#37;#123;init: #123;#125;#125;#37;#37; #60;b#62;#38;amp#59; #96;#42;#96;#59; #35;"}
  n3["gone#34;#93;<br/>is missing"]
  n1 --> n2
  n2 -->|"x#34;#93; click n1 #34;javascript:alert(1)#34; #37;#37;#123;init: #123;#125;#125;#37;#37; #60;b#62;#38;amp#59; #96;#42;#96;#59; #35;yyyyyyyyyyyyyyy…"| n3
  classDef missing stroke-dasharray: 4 4,color:#a00
  class n3 missing
`
	evil := "x\"]\nclick n1 \"javascript:alert(1)\"\n%%{init: {}}%% <b>&amp; `*`;\u202e#"
	d := &graph.Definition{Start: evil, Nodes: map[string]*graph.Node{evil: {Choose: []graph.Way{{If: evil + strings.Repeat("y", 100), To: "gone\"]"}}}}}
	if got := graph.Mermaid(d, map[string]graph.Mark{evil: {State: evil}}); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// Every line of a picture of any definition has one of a few known forms.
func TestMermaidLines(t *testing.T) {
	const label = `"[\pL\p{Nd} .,:_+/()?!'…=-]*(?:(?:#\d+;|<br/>)[\pL\p{Nd} .,:_+/()?!'…=-]*)*"`
	line := regexp.MustCompile(`^(?:flowchart TD| *end| *subgraph n\d+\[` + label + `\]` +
		`| *n\d+(?:\(\( \)\)|[\[({>/\\]+` + label + `[\])}/\\]+)|  n\d+ -\.?->(?:\|` + label + `\|)? n\d+|  class(?:Def)? [a-z0-9,]+ [^"]+)$`)
	rapid.Check(t, func(t *rapid.T) {
		d := anyDefinition().Draw(t, "definition")
		marks := map[string]graph.Mark{}
		for name := range d.Nodes {
			marks[name] = graph.Mark{Visits: 1, State: anyText(t)}
		}
		for text := range strings.Lines(graph.Mermaid(d, marks)) {
			if !line.MatchString(strings.TrimSuffix(text, "\n")) {
				t.Fatalf("a line is %q", text)
			}
		}
	})
}
