package graph_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// Parse refuses a text that is not a definition, and the error names the place.
func TestParseRefuses(t *testing.T) {
	node := func(text string) string { return `{"nodes": {"pay": ` + text + `}}` }
	for _, row := range []struct{ text, want string }{
		{`{"process": "a", "proces": 1}`, "/proces: UNKNOWN_KEY: there is no such key"},
		{`{"Process": "a"}`, "/Process: UNKNOWN_KEY: there is no such key"},
		{node(`{"do": "x", "too": "b"}`), "/nodes/pay/too: UNKNOWN_KEY: there is no such key"},
		{node(`{"choose": [{"if": "true", "then": "b"}]}`), "/nodes/pay/choose/0/then: UNKNOWN_KEY: there is no such key"},
		{node(`{"on": [{"error": "*", "to": "b"}, {"errors": "*"}]}`), "/nodes/pay/on/1/errors: UNKNOWN_KEY: there is no such key"},
		{node(`{"join": {"need": 1, "of": 2}}`), "/nodes/pay/join/of: UNKNOWN_KEY: there is no such key"},
		{node(`{"wait": {"untill": "x"}}`), "/nodes/pay/wait/untill: UNKNOWN_KEY: there is no such key"},
		{node(`{"await": {"message": "m", "ttl": "P7D"}}`), "/nodes/pay/await/ttl: UNKNOWN_KEY: there is no such key"},
		{node(`{"scope": {"start": "a", "nodes": {"a": {"ned": true}}}}`), "/nodes/pay/scope/nodes/a/ned: UNKNOWN_KEY: there is no such key"},

		{`{"process": "a", "process": "b"}`, `/process: DUPLICATE_KEY: "process" comes twice`},
		{node(`{"do": "x", "do": "y"}`), `/nodes/pay/do: DUPLICATE_KEY: `},
		{node(`{"end": true}, "pay": {"end": true}`), `/nodes/pay: DUPLICATE_KEY: `},
		{node(`{"in": {"a": "1", "a": "2"}}`), `/nodes/pay/in/a: DUPLICATE_KEY: `},
		{node(`{"join": {"need": 1, "need": 2}}`), `/nodes/pay/join/need: DUPLICATE_KEY: `},
		{node(`{"scope": {"nodes": {"a": {}, "a": {}}}}`), `/nodes/pay/scope/nodes/a: DUPLICATE_KEY: `},

		{`[]`, "TYPE: a JSON [ does not fit here"},
		{`{"version": "1"}`, "/version: "},
		{`{"version": 1.5}`, "/version: "},
		{`{"nodes": []}`, "/nodes: "},
		{node(`"end"`), "/nodes/pay: "},
		{node(`{"end": "yes"}`), "/nodes/pay/end: "},
		{node(`{"choose": {"if": "true", "to": "b"}}`), "/nodes/pay/choose: "},
		{node(`{"fork": ["a", 2]}`), "/nodes/pay/fork/1: "},
		{node(`{"attempts": 99999999999999999999}`), "/nodes/pay/attempts: "},
		{node(`{"join": 2}`), "/nodes/pay/join: "},
		{node(`{"join": "some"}`), `/nodes/pay/join: JOIN: "some" is no join; use "all", "taken" or {"need": 1}`},
		{node(`{"join": {"need": 0}}`), "/nodes/pay/join: JOIN: it is no join; use"},
		{node(`{"join": {"need": 1, "rest": "keep"}}`), "/nodes/pay/join: JOIN: it is no join; use"},
		{node(`{"wait": {}}`), "/nodes/pay/wait: WAIT: it is no wait; use"},
		{node(`{"wait": "soon"}`), `/nodes/pay/wait: DURATION: duration "soon"; use a form such as`},
		{node(`{"wait": "P1M"}`), `/nodes/pay/wait: DURATION: duration "P1M"; use a form such as`},
		{node(`{"wait": "-5m"}`), `/nodes/pay/wait: DURATION: duration "-5m"; use 0 to ten years`},
		{node(`{"on": [{"after": "P11Y"}]}`), `/nodes/pay/on/0/after: DURATION: duration "P11Y"`},
		{node(`{"on": [{"every": "P4000D"}]}`), `/nodes/pay/on/0/every: DURATION: duration "P4000D"`},
		{node(`{"human": {"due": 5}}`), "/nodes/pay/human/due: "},

		{strings.Repeat(" ", 1<<20+1), "more than 1048576 bytes"},
		{``, "EOF"},
		{`{"process": "a"`, "EOF"},
		{`{} {}`, "after the definition"},
		{"{\"process\": \"\xff\"}", `invalid UTF-8 within "/process"`},
	} {
		d, err := graph.Parse([]byte(row.text))
		if err == nil || d != nil || !strings.Contains(err.Error(), row.want) || !strings.HasPrefix(err.Error(), "graph: ") {
			t.Errorf("%s: error %v, want %q", row.text, err, row.want)
		}
	}
}

// Parse reports all mistakes of a definition at once, each with its code and path, and none that only follows from
// another.
func TestAllMistakesAtOnce(t *testing.T) {
	_, err := graph.Parse([]byte(`{"process": "p q", "version": "1", "start": "A", "lang": "js", "extra": {"a": 1}, "nodes": {
		"A": {"do": "Bad Type", "too": "B", "to": "nowhere", "attempts": 0},
		"B": {"wait": "soon", "to": "C"},
		"C": {"doo": "test.step.v1", "to": "D"},
		"D": {"fork": ["A", 7, "C"]},
		"E": {"human": {"due": "P1M", "groups": "anna"}, "on": [{"after": "x", "to": "F"}, {"errors": "*"}], "to": "F"},
		"F": {"await": {"mesage": "paid", "key": "input.("}},
		"G": {"join": "some", "join": {"need": 0}, "to": "F"},
		"H": "end",
		"I": {"scope": {"start": "J", "nodes": {"J": {"call": {"process": "x", "version": "two"}, "on": [{"every": "P4000D", "to": "J"}]}}}, "to": "H"},
		"K": {"each": {"list": "input.l", "do": "test.step.v1", "limit": 5000, "rest": "maybe"}, "to": 5}
	}}`))
	var invalid *graph.InvalidError
	if !errors.As(err, &invalid) {
		t.Fatalf("error %v, want an InvalidError", err)
	}
	var got []string
	for _, f := range invalid.Findings {
		if f.Reason == "" || f.Fix == "" || f.Note {
			t.Errorf("%+v", f)
		}
		got = append(got, f.Code+" "+f.Path)
	}
	want := []string{
		"UNKNOWN_KEY /extra", "LANG /lang", "ZERO /nodes/A/attempts", "RUN_TYPE /nodes/A/do", "UNKNOWN_NODE /nodes/A/to", "UNKNOWN_KEY /nodes/A/too",
		"DURATION /nodes/B/wait", "UNKNOWN_KEY /nodes/C/doo", "TYPE /nodes/D/fork/1", "DURATION /nodes/E/human/due", "TYPE /nodes/E/human/groups", "DURATION /nodes/E/on/0/after",
		"UNKNOWN_KEY /nodes/E/on/1/errors", "UNKNOWN_NODE /nodes/E/on/1/to", "EXPRESSION /nodes/F/await/key", "UNKNOWN_KEY /nodes/F/await/mesage", "DUPLICATE_KEY /nodes/G/join", "JOIN /nodes/G/join", "TYPE /nodes/H",
		"TYPE /nodes/I/scope/nodes/J/call/version", "DURATION /nodes/I/scope/nodes/J/on/0/every", "EACH /nodes/K/each", "EACH /nodes/K/each/rest", "TYPE /nodes/K/to",
		"PROCESS_NAME /process", "TYPE /version",
	}
	if !slices.Equal(got, want) {
		t.Errorf("findings\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// All ways to write a join, a wait or a duration have one canonical form.
func TestCanonicalForms(t *testing.T) {
	for _, row := range []struct{ text, want string }{
		{`"join": "all"`, ``},
		{`"join": "taken"`, ``},
		{`"join": {"need": 2}`, `"join":{"need":2}`},
		{`"join": {"need": 2, "rest": ""}`, `"join":{"need":2}`},
		{`"join": {"rest": "cancel", "need": 1}`, `"join":{"need":1,"rest":"cancel"}`},
		{`"wait": {"until": "input.at"}`, `"wait":{"until":"input.at"}`},
		{`"wait": "PT0S"`, ``},
		{`"wait": "0s"`, `"wait":"PT0S"`},
		{`"wait": "PT5M"`, ``},
		{`"wait": "5m"`, `"wait":"PT5M"`},
		{`"wait": "PT90M"`, `"wait":"PT1H30M"`},
		{`"wait": "1h30m5s"`, `"wait":"PT1H30M5S"`},
		{`"wait": "24h"`, `"wait":"P1D"`},
		{`"wait": "P1W"`, `"wait":"P7D"`},
		{`"wait": "P1DT12H"`, ``},
		{`"wait": "36h"`, `"wait":"P1DT12H"`},
		{`"wait": "PT0.5S"`, ``},
		{`"wait": "500ms"`, `"wait":"PT0.5S"`},
		{`"wait": "1500ns"`, `"wait":"PT0.000001S"`},
		{`"wait": "PT0.000065S"`, ``},
		{`"wait": "PT59.999999S"`, ``},
		{`"wait": "P3650D"`, ``},
		{`"on": [{"after": "30m", "to": "b"}, {"every": "PT60S", "times": 3, "to": "b"}]`,
			`"on":[{"after":"PT30M","to":"b"},{"every":"PT1M","times":3,"to":"b"}]`},
		{`"human": {"due": "48h"}`, `"human":{"due":"P2D"}`},
		{`"human": {}`, ``},
		{`"end": true, "attempts": 0, "to": ""`, `"end":true`},
	} {
		if row.want == "" {
			row.want = strings.ReplaceAll(row.text, ": ", ":")
		}
		want := `{"process":"p","version":1,"start":"a","nodes":{"a":{` + row.want + `}}}`
		text := `{"version": 1, "process": "p", "nodes": {"a": {` + row.text + `}}, "start": "a"}`
		for range 2 { // the canonical form of a canonical form is itself
			d, err := graph.Parse([]byte(text))
			if err != nil {
				t.Errorf("%s: %v", row.text, err)
				break
			}
			if text = asJSON(t, d); text != want {
				t.Errorf("%s: %s, want %s", row.text, text, want)
			}
		}
	}
}

func asJSON(t interface{ Fatal(...any) }, d *graph.Definition) string {
	text, err := d.JSON()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Any definition, valid or not, is unchanged when it is encoded as JSON and parsed again.
func TestJSONKeepsEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := asJSON(t, anyDefinition().Draw(t, "definition"))
		d, err := graph.Parse([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if again := asJSON(t, d); again != text {
			t.Fatalf("%s became %s", text, again)
		}
	})
}

func anyDefinition() *rapid.Generator[*graph.Definition] {
	return rapid.Custom(func(t *rapid.T) *graph.Definition {
		return &graph.Definition{
			Process: anyText(t), Version: anyNumber(t), Lang: anyText(t), Start: anyText(t), Output: anyText(t), Nodes: anyNodes(t, 2),
		}
	})
}

func anyNodes(t *rapid.T, depth int) map[string]*graph.Node {
	all := map[string]*graph.Node{}
	for range rapid.IntRange(0, 4).Draw(t, "nodes") {
		all[anyText(t)] = anyNode(t, depth)
	}
	return all
}

// anyNode draws a node with any verbs, or none, and any other keys.
func anyNode(t *rapid.T, depth int) *graph.Node {
	n := &graph.Node{
		Do: anyText(t), Choose: anyWays(t), Any: anyWays(t), Fork: anyTexts(t), Race: anyTexts(t),
		Join: maybe(t, func() graph.Join {
			switch need := anyNumber(t); rapid.IntRange(0, 2).Draw(t, "join") {
			case 0:
				return graph.Join{Taken: anyBool(t)}
			default:
				return graph.Join{Need: need, Cancel: anyBool(t)}
			}
		}),
		Wait: maybe(t, func() graph.Wait {
			if text := anyText(t); text != "" {
				return graph.Wait{Until: text}
			}
			return graph.Wait{For: anyDuration(t)}
		}),
		Await: maybe(t, func() graph.Await {
			return graph.Await{Message: anyText(t), Key: anyText(t), Signal: anyText(t)}
		}),
		Human: maybe(t, func() graph.Human {
			return graph.Human{Assignee: anyText(t), Groups: anyTexts(t), Due: anyDuration(t)}
		}),
		Call: maybe(t, func() graph.Call {
			return graph.Call{Process: anyText(t), Version: anyNumber(t), Undo: anyText(t)}
		}),
		Each: maybe(t, func() graph.Each {
			return graph.Each{List: anyText(t), Do: anyText(t), Limit: anyNumber(t), Need: anyNumber(t)}
		}),
		Throw: maybe(t, func() graph.Throw { return graph.Throw{Compensate: anyBool(t), Error: anyText(t)} }),
		End:   anyBool(t), Terminate: anyBool(t),
		Retry: maybe(t, func() graph.RetryPolicy {
			return graph.RetryPolicy{Attempts: anyNumber(t), Base: anyDuration(t), Cap: anyDuration(t)}
		}),
		In: anyMap(t), Out: anyMap(t), Attempts: anyNumber(t), Undo: anyText(t), Else: anyText(t), To: anyText(t),
	}
	if depth > 0 && rapid.IntRange(0, 3).Draw(t, "scope") == 0 {
		n.Scope = &graph.Scope{Start: anyText(t), Nodes: anyNodes(t, depth-1)}
	}
	for range rapid.IntRange(0, 3).Draw(t, "handlers") {
		n.On = append(n.On, graph.Boundary{
			Error: anyText(t), After: anyDuration(t), Every: anyDuration(t), Times: anyNumber(t),
			Message: anyText(t), Key: anyText(t), Keep: anyBool(t), To: anyText(t),
		})
	}
	return n
}

func maybe[T any](t *rapid.T, make func() T) *T {
	if rapid.IntRange(0, 3).Draw(t, "there") > 0 {
		return nil
	}
	v := make()
	return &v
}

func anyText(t *rapid.T) string {
	return rapid.OneOf(rapid.Just(""), rapid.SampledFrom([]string{"a", "b", "all", "input.x > 1"}), rapid.String()).Draw(t, "text")
}

func anyTexts(t *rapid.T) []string {
	return rapid.OneOf(rapid.Just[[]string](nil), rapid.SliceOfN(rapid.String(), 0, 3)).Draw(t, "texts")
}

func anyMap(t *rapid.T) map[string]string {
	return rapid.OneOf(rapid.Just[map[string]string](nil), rapid.MapOfN(rapid.String(), rapid.String(), 0, 3)).Draw(t, "map")
}

func anyWays(t *rapid.T) (all []graph.Way) {
	for range rapid.IntRange(0, 2).Draw(t, "ways") {
		all = append(all, graph.Way{If: anyText(t), To: anyText(t)})
	}
	return all
}

func anyBool(t *rapid.T) bool { return rapid.Bool().Draw(t, "bool") }

func anyNumber(t *rapid.T) int { return rapid.IntRange(0, 1<<31).Draw(t, "number") }

// anyDuration draws a duration that a definition may have: a number of microseconds.
func anyDuration(t *rapid.T) graph.Duration {
	const tenYears = int64(10 * 365 * 24 * time.Hour / time.Microsecond)
	return graph.Duration(time.Duration(rapid.Int64Range(0, tenYears).Draw(t, "duration")) * time.Microsecond)
}

// found is a definition and one finding that Compile reports about it.
type found struct {
	code, path string
	note       bool
	start      string
	nodes      string
}

var allFindings = []found{
	{code: "NODE_NAME", path: "/nodes/1st", start: "1st", nodes: `"1st": {"end": true}`},
	{code: "NODE_NAME", path: "/nodes/" + strings.Repeat("a", 101), start: "a", nodes: `"` + strings.Repeat("a", 101) + `": {"end": true}`},
	{code: "DUPLICATE_NAME", path: "/nodes/s/scope/nodes/a", start: "a",
		nodes: `"a": {"do": "x.y", "to": "s"}, "s": {"scope": {"start": "a", "nodes": {"a": {"end": true}}}}`},
	{code: "VERB", path: "/nodes/a", start: "a", nodes: `"a": {"to": "b"}, "b": {"end": true}`},
	{code: "VERB", path: "/nodes/a", start: "a", nodes: `"a": {"do": "x.y", "end": true}`},
	{code: "VERB", path: "/nodes/a", start: "a", nodes: `"a": null`},
	{code: "RUN_TYPE", path: "/nodes/a/do", start: "a", nodes: `"a": {"do": "Charge"}`},
	{code: "RUN_TYPE", path: "/nodes/a/do", start: "a", nodes: `"a": {"do": "graph.start.v1"}`},
	{code: "RUN_TYPE", path: "/nodes/a/undo", start: "a", nodes: `"a": {"do": "x.y", "undo": "graph.message.v1"}`},
	{code: "NAME", path: "/nodes/a/await", start: "a", nodes: `"a": {"await": {"signal": "` + strings.Repeat("n", 201) + `"}}`},
	{code: "NAME", path: "/nodes/a/on/0/message", start: "a", nodes: `"a": {"do": "x.y", "on": [{"message": "` + strings.Repeat("n", 201) + `", "key": "'k'", "to": "b"}]}, "b": {"end": true}`},
	{code: "AWAIT", path: "/nodes/a/await/key", start: "a", nodes: `"a": {"await": {"signal": "s", "key": "'k'"}}`},
	{code: "RUN_TYPE", path: "/nodes/a/undo", start: "a", nodes: `"a": {"do": "x.y", "undo": "none"}`},
	{code: "RUN_TYPE", path: "/nodes/a/each/do", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": ""}}`},
	{code: "ATTEMPTS", path: "/nodes/a/attempts", start: "a", nodes: `"a": {"do": "x.y", "attempts": 1001}`},
	{code: "ATTEMPTS", path: "/nodes/a/attempts", start: "a", nodes: `"a": {"do": "x.y", "attempts": 4, "retry": {"base": "1s"}}`},
	{code: "ATTEMPTS", path: "/nodes/a/retry/attempts", start: "a", nodes: `"a": {"do": "x.y", "retry": {"attempts": -1}}`},
	{code: "FAILURE", path: "/nodes/a/failure", start: "a", nodes: `"a": {"do": "x.y", "failure": "undo"}`},
	{code: "RETRY", path: "/nodes/a/retry/base", start: "a", nodes: `"a": {"do": "x.y", "retry": {"base": "9000h"}}`},
	{code: "RETRY", path: "/nodes/a/retry/cap", start: "a", nodes: `"a": {"do": "x.y", "retry": {"cap": "10us"}}`},
	{code: "RETRY", path: "/nodes/a/retry", start: "a", nodes: `"a": {"do": "x.y", "retry": {"base": "10s", "cap": "9s"}}`},
	{code: "MISPLACED", path: "/nodes/a/retry", start: "a", nodes: `"a": {"wait": "1m", "retry": {"attempts": 2}}`},
	{code: "NO_CODE", path: "/nodes/a/throw", start: "a", nodes: `"a": {"throw": {}}`},
	{code: "NO_CODE", path: "/nodes/a/throw", start: "a", nodes: `"a": {"throw": {"compensate": true, "error": "E"}}`},
	{code: "AWAIT", path: "/nodes/a/await", start: "a", nodes: `"a": {"await": {}}`},
	{code: "NO_KEY", path: "/nodes/a/await/key", start: "a", nodes: `"a": {"await": {"message": "paid"}}`},
	{code: "NO_KEY", path: "/nodes/a/on/0/key", start: "a", nodes: `"a": {"do": "x.y", "on": [{"message": "m", "to": "b"}]}, "b": {"end": true}`},
	{code: "CALL", path: "/nodes/a/call/process", start: "a", nodes: `"a": {"call": {"process": "", "undo": "none"}}`},
	{code: "CALL", path: "/nodes/a/call/undo", start: "a", nodes: `"a": {"call": {"process": "p", "undo": "all"}}`},
	{code: "CALL_UNDO", path: "/nodes/a/call/undo", note: true, start: "a", nodes: `"a": {"call": {"process": "p"}}`},
	{code: "NO_LIST", path: "/nodes/a/each/list", start: "a", nodes: `"a": {"each": {"list": "", "do": "x.y"}}`},
	{code: "EACH", path: "/nodes/a/each/rest", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": "x.y", "rest": "cancel"}}`},
	{code: "EACH", path: "/nodes/a/each/rest", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": "x.y", "need": 1, "rest": "keep"}}`},
	{code: "EACH", path: "/nodes/a/each", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": "x.y", "limit": -1}}`},
	{code: "EACH", path: "/nodes/a/each", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": "x.y", "limit": 1001}}`},
	{code: "EMPTY_SCOPE", path: "/nodes/a/scope/nodes", start: "a", nodes: `"a": {"scope": {"start": "b", "nodes": {}}}`},
	{code: "NO_START", path: "/start", start: "b", nodes: `"a": {"end": true}`},
	{code: "NO_START", path: "/nodes/a/scope/start", start: "a", nodes: `"a": {"scope": {"start": "c", "nodes": {"b": {"end": true}}}}`},
	{code: "MISPLACED", path: "/nodes/a/in", start: "a", nodes: `"a": {"end": true, "in": {"k": "1"}}`},
	{code: "MISPLACED", path: "/nodes/a/out", start: "a", nodes: `"a": {"end": true, "out": {"k": "1"}}`},
	{code: "MISPLACED", path: "/nodes/a/attempts", start: "a", nodes: `"a": {"end": true, "attempts": 1}`},
	{code: "MISPLACED", path: "/nodes/a/undo", start: "a", nodes: `"a": {"end": true, "undo": "x.y"}`},
	{code: "MISPLACED", path: "/nodes/a/on", start: "a", nodes: `"a": {"end": true, "on": []}`},
	{code: "MISPLACED", path: "/nodes/a/else", start: "a", nodes: `"a": {"do": "x.y", "else": "b"}, "b": {"end": true}`},
	{code: "MISPLACED", path: "/nodes/a/to", start: "a", nodes: `"a": {"end": true, "to": "b"}, "b": {"end": true}`},
	{code: "MISPLACED", path: "/nodes/a/on/0/error", start: "a", nodes: `"a": {"wait": "1m", "on": [{"error": "E", "to": "b"}]}, "b": {"end": true}`},
	{code: "MISPLACED", path: "/nodes/a/on/0/keep", start: "a",
		nodes: `"a": {"do": "x.y", "on": [{"error": "E", "keep": true, "to": "b"}]}, "b": {"end": true}`},
	{code: "MISPLACED", path: "/nodes/a/on/0", start: "a",
		nodes: `"a": {"do": "x.y", "on": [{"after": "1m", "times": 2, "to": "b"}]}, "b": {"end": true}`},
	{code: "NO_WAY", path: "/nodes/a/choose", start: "a", nodes: `"a": {"choose": []}`},
	{code: "NO_WAY", path: "/nodes/a/any", start: "a", nodes: `"a": {"any": []}`},
	{code: "NO_FORK", path: "/nodes/a/fork", start: "a", nodes: `"a": {"fork": ["b"]}, "b": {"end": true}`},
	{code: "BRANCHES", path: "/nodes/a/fork", start: "a", nodes: `"a": {"fork": ["b"` + strings.Repeat(`, "b"`, 1000) + `]}, "b": {"end": true}`},
	{code: "BRANCHES", path: "/nodes/a/any", start: "a", nodes: `"a": {"any": [{"if": "true", "to": "b"}` + strings.Repeat(`, {"if": "true", "to": "b"}`, 1000) + `]}, "b": {"end": true}`},
	{code: "NO_CONDITION", path: "/nodes/a/choose/0/if", start: "a", nodes: `"a": {"choose": [{"if": "", "to": "b"}]}, "b": {"end": true}`},
	{code: "NOT_A_CONDITION", path: "/nodes/a/any/0/if", start: "a", nodes: `"a": {"any": [{"if": "1 + 1", "to": "b"}]}, "b": {"end": true}`},
	{code: "EXPRESSION", path: "/nodes/a/choose/0/if", start: "a", nodes: `"a": {"choose": [{"if": "input.x >", "to": "b"}]}, "b": {"end": true}`},
	{code: "EXPRESSION", path: "/nodes/a/choose/0/if", start: "a", nodes: `"a": {"choose": [{"if": "result.ok", "to": "b"}]}, "b": {"end": true}`},
	{code: "EXPRESSION", path: "/nodes/a/in/k", start: "a", nodes: `"a": {"do": "x.y", "in": {"k": "item"}}`},
	{code: "EXPRESSION", path: "/nodes/a/out/k", start: "a", nodes: `"a": {"do": "x.y", "out": {"k": "input.y"}}`},
	{code: "EXPRESSION", path: "/nodes/a/in/k", start: "a", nodes: `"a": {"do": "x.y", "in": {"k": ""}}`},
	{code: "EXPRESSION", path: "/nodes/a/out/k", start: "a", nodes: `"a": {"do": "x.y", "out": {"k": "nothing.x"}}`},
	{code: "EXPRESSION", path: "/nodes/a/wait/until", start: "a", nodes: `"a": {"wait": {"until": "` + strings.Repeat("1", 10_001) + `"}}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/to", start: "a", nodes: `"a": {"do": "x.y", "to": "c"}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/choose/0/to", start: "a", nodes: `"a": {"choose": [{"if": "true", "to": "c"}]}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/else", start: "a", nodes: `"a": {"any": [{"if": "true", "to": "b"}], "else": "c"}, "b": {"end": true}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/fork/1", start: "a", nodes: `"a": {"fork": ["b", "c"]}, "b": {"end": true}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/race/0", start: "a", nodes: `"a": {"race": ["c", "b"]}, "b": {"wait": "1m"}`},
	{code: "UNKNOWN_NODE", path: "/nodes/a/on/0/to", start: "a", nodes: `"a": {"do": "x.y", "on": [{"error": "*", "to": "c"}]}`},
	{code: "EDGE_ACROSS_SCOPES", path: "/nodes/a/to", start: "a",
		nodes: `"a": {"do": "x.y", "to": "in"}, "s": {"scope": {"start": "in", "nodes": {"in": {"end": true}}}}`},
	{code: "EDGE_ACROSS_SCOPES", path: "/nodes/s/scope/nodes/in/to", start: "s",
		nodes: `"a": {"end": true}, "s": {"to": "a", "scope": {"start": "in", "nodes": {"in": {"do": "x.y", "to": "a"}}}}`},
	{code: "RACE", path: "/nodes/a/race/1", start: "a", nodes: `"a": {"race": ["b", "c"]}, "b": {"wait": "1m"}, "c": {"do": "x.y"}`},
	{code: "RACE", path: "/nodes/a/race", start: "a", nodes: `"a": {"race": ["b"]}, "b": {"wait": "1m"}`},
	{code: "RACE", path: "/nodes/a/race/0", start: "a",
		nodes: `"a": {"race": ["b", "c"]}, "b": {"wait": "1m", "on": [{"after": "1s", "to": "c"}]}, "c": {"wait": "2m"}`},
	{code: "HANDLER", path: "/nodes/a/on/0", start: "a", nodes: `"a": {"do": "x.y", "on": [{"error": "E", "after": "1m", "to": "b"}]}, "b": {"end": true}`},
	{code: "HANDLER", path: "/nodes/a/on/0", start: "a", nodes: `"a": {"do": "x.y", "on": [{"to": "b"}]}, "b": {"end": true}`},
	{code: "HANDLER", path: "/nodes/a/on/0/every", start: "a", nodes: `"a": {"do": "x.y", "on": [{"every": "1ms", "to": "b"}]}, "b": {"end": true}`},
	{code: "DUPLICATE_HANDLER", path: "/nodes/a/on/1/error", start: "a",
		nodes: `"a": {"do": "x.y", "on": [{"error": "*", "to": "b"}, {"error": "E", "to": "b"}]}, "b": {"end": true}`},
	{code: "DUPLICATE_HANDLER", path: "/nodes/a/on/1", start: "a",
		nodes: `"a": {"do": "x.y", "on": [{"after": "60s", "to": "b"}, {"after": "1m", "to": "c"}]}, "b": {"end": true}, "c": {"end": true}`},
	{code: "DUPLICATE_HANDLER", path: "/nodes/a/on/1", start: "a",
		nodes: `"a": {"do": "x.y", "on": [{"message": "m", "key": "input.n", "to": "b"}, {"message": "m", "key": "input.n", "to": "c"}]}, "b": {"end": true}, "c": {"end": true}`},
	{code: "ZERO", path: "/nodes/a/attempts", start: "a", nodes: `"a": {"do": "x.y", "attempts": 0}`},
	{code: "ZERO", path: "/nodes/a/on/0/times", start: "a", nodes: `"a": {"do": "x.y", "on": [{"every": "1m", "times": 0, "to": "b"}]}, "b": {"end": true}`},
	{code: "ZERO", path: "/nodes/a/each/limit", start: "a", nodes: `"a": {"each": {"list": "input.l", "do": "x.y", "limit": 0}}`},
	{code: "UNREACHABLE", path: "/nodes/b", start: "a", nodes: `"a": {"end": true}, "b": {"end": true}`},
	{code: "NO_END", path: "/nodes/b", start: "a", nodes: `"a": {"do": "x.y", "to": "b"}, "b": {"do": "x.y", "to": "a"}`},
	{code: "NO_END", path: "/nodes/c", start: "a", nodes: `"a": {"choose": [{"if": "input.n", "to": "b"}], "else": "c"}, "b": {"end": true}, "c": {"wait": "P1D", "to": "c"}`},
	{code: "NO_END", path: "/nodes/s/scope/nodes/a", start: "s", nodes: `"s": {"scope": {"start": "a", "nodes": {"a": {"do": "x.y", "to": "a"}}},
		"on": [{"every": "1m", "to": "b"}]}, "b": {"end": true}`},
	{code: "NO_END", path: "/nodes/a", start: "a", nodes: `"a": {"race": ["b", "c"]}, "b": {"wait": "1m", "to": "a"}, "c": {"wait": "2m", "to": "a"}`},
	{code: "NO_END", path: "/nodes/s", start: "s", nodes: `"s": {"scope": {"start": "e", "nodes": {"e": {"end": true}}}, "to": "s"}`},
	{code: "UNSTRUCTURED_JOIN", path: "/nodes/j", note: true, start: "a",
		nodes: `"a": {"choose": [{"if": "input.n", "to": "f"}], "else": "g"}, "f": {"fork": ["b", "c"]}, "g": {"fork": ["b", "c"]}, "b": {"do": "x.y", "to": "j"},
			"c": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "f",
		nodes: `"f": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "x"}, "x": {"choose": [{"if": "input.n", "to": "j"}], "else": "e"}, "b": {"do": "x.y", "to": "j"},
			"j": {"join": "all"}, "e": {"end": true}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "f", // past the join
		nodes: `"f": {"fork": ["a", "b"]}, "a": {"choose": [{"if": "input.n", "to": "j"}], "else": "e"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all", "to": "e"}, "e": {"do": "x.y"}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "f",
		nodes: `"f": {"any": [{"if": "input.n", "to": "a"}, {"if": "input.m", "to": "b"}], "else": "a"}, "a": {"do": "x.y", "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "f",
		nodes: `"f": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "j", "on": [{"error": "*", "to": "e"}]}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}, "e": {"end": true}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/s/scope/nodes/j", note: true, start: "s",
		nodes: `"s": {"scope": {"start": "f", "nodes": {"f": {"fork": ["a", "j"]}, "a": {"race": ["b", "c"]}, "b": {"wait": "1m", "to": "j"}, "c": {"wait": "2m"}, "j": {"join": "all"}}}}`},
	{code: "ENDLESS_CALL", path: "/nodes/a", note: true, start: "a", nodes: `"a": {"call": {"process": "p", "undo": "none"}}`},
	{code: "ENDLESS_CALL", path: "/nodes/s/scope/nodes/a", note: true, start: "f",
		nodes: `"f": {"fork": ["s", "b"]}, "b": {"end": true}, "s": {"scope": {"start": "c", "nodes": {"c": {"do": "x.y", "to": "a"}, "a": {"call": {"process": "p", "undo": "none"}}}}}`},
	{code: "NO_ELSE", path: "/nodes/a", note: true, start: "a", nodes: `"a": {"choose": [{"if": "true", "to": "b"}]}, "b": {"end": true}`},
	{code: "LOOP_WITHOUT_STEP", path: "/nodes/a", note: true, start: "a",
		nodes: `"a": {"choose": [{"if": "true", "to": "a"}], "else": "b"}, "b": {"end": true}`},
	{code: "UNKNOWN_STEP", path: "/nodes/a/in/x", start: "a", nodes: `"a": {"do": "x.y", "in": {"x": "steps.b"}}`},
	{code: "NEED_WITHOUT_FORK", path: "/nodes/b", start: "a", nodes: `"a": {"do": "x.y", "to": "b"}, "b": {"join": {"need": 1}}`},
	{code: "JOIN_OF_ONE", path: "/nodes/b", start: "a", nodes: `"a": {"do": "x.y", "to": "b"}, "b": {"join": "all"}`},
	{code: "JOIN_AFTER_EXCLUSIVE", path: "/nodes/j", start: "r",
		nodes: `"r": {"race": ["t", "m"]}, "t": {"wait": "PT1S", "to": "j"}, "m": {"await": {"message": "x", "key": "'1'"}, "to": "j"}, "j": {"join": "all"}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "a", // either it fails or not
		nodes: `"a": {"do": "x.y", "on": [{"error": "*", "to": "b"}], "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`},
	{code: "JOIN_MAY_WAIT", path: "/nodes/j", note: true, start: "f",
		nodes: `"f": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": {"need": 3}}`},
	{code: "CALL", path: "/nodes/a/call/version", start: "a", nodes: `"a": {"call": {"process": "p", "version": -1, "undo": "none"}}`},
	{code: "JOIN_AFTER_EXCLUSIVE", path: "/nodes/j", start: "a",
		nodes: `"a": {"choose": [{"if": "true", "to": "b"}], "else": "c"}, "b": {"do": "x.y", "to": "j"}, "c": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`},
}

// Compile reports each finding with its code and path. A definition compiles only if all findings are notes.
func TestFindings(t *testing.T) {
	for _, row := range allFindings {
		text := fmt.Sprintf(`{"process": "p", "version": 1, "start": %q, "nodes": {%s}}`, row.start, row.nodes)
		checkFinding(t, text, row)
	}
	const node = `"start": "a", "nodes": {"a": {"end": true}}`
	for _, row := range []struct{ text, code, path string }{
		{`{"process": "an order", "version": 1, ` + node + `}`, "PROCESS_NAME", "/process"},
		{`{"process": "p", "version": 0, ` + node + `}`, "VERSION", "/version"},
		{`{"process": "p", "version": 1, "lang": "lua", ` + node + `}`, "LANG", "/lang"},
		{`{"process": "p", "version": 1, "start": "a", "nodes": {}}`, "NODE_COUNT", "/nodes"},
		{`{"process": "p", "version": 1, "start": "n1", "nodes": {` + inRow(2_001) + `}}`, "NODE_COUNT", "/nodes"},
		{`{"process": "p", "version": 1, "start": "s", "nodes": {"s": {"scope": {"start": "n1", "nodes": {` + inRow(2_000) + `}}}}}`, "NODE_COUNT", "/nodes"},
		{`{"process": "p", "version": 1, "start": "n1", "nodes": {` + inRow(1) + `, "a": {"race": ["b"` + strings.Repeat(`, "b"`, 10_000) + `]}}}`, "EDGE_COUNT", "/nodes"},
		{`{"process": "p", "version": 1, "output": "input.", ` + node + `}`, "EXPRESSION", "/output"},
	} {
		checkFinding(t, row.text, found{code: row.code, path: row.path})
	}
}

// Compile has no findings about correct definitions: loops that something else ends, joins at which every branch
// arrives, and recursion that may end.
func TestNoFindings(t *testing.T) {
	for _, nodes := range []string{
		`"S": {"scope": {"start": "a", "nodes": {"a": {"do": "x.y", "to": "b"}, "b": {"wait": "1m", "to": "a"}}}, "on": [{"message": "stop", "key": "input.n", "to": "e"}]}, "e": {"end": true}`,
		`"S": {"scope": {"start": "s", "nodes": {"s": {"scope": {"start": "a", "nodes": {"a": {"do": "x.y", "to": "a"}}}}}}, "on": [{"after": "P1D", "to": "e"}]}, "e": {"end": true}`,
		`"S": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "a"}, "b": {"wait": "P1D", "to": "t"}, "t": {"terminate": true}`,
		`"S": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "a"}, "b": {"wait": "P1D", "to": "t"}, "t": {"throw": {"error": "LATE"}}`,
		`"S": {"fork": ["a", "b"]}, "a": {"choose": [{"if": "input.n", "to": "j"}], "else": "w"}, "w": {"wait": "1m", "to": "w"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": {"need": 1, "rest": "cancel"}}`,

		`"S": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "x"}, "x": {"choose": [{"if": "input.n", "to": "a"}], "else": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`,
		`"S": {"fork": ["a", "b"]}, "a": {"fork": ["c", "d"]}, "c": {"end": true}, "d": {"do": "x.y", "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`,
		`"S": {"fork": ["a", "b"]}, "a": {"choose": [{"if": "input.n", "to": "j"}], "else": "t"}, "t": {"terminate": true}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`,
		`"S": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "j", "on": [{"error": "*", "to": "t"}]}, "t": {"throw": {"error": "LOST"}}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`,
		`"S": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "j", "on": [{"every": "1m", "to": "r"}, {"after": "1m", "keep": true, "to": "r"}]}, "r": {"do": "x.y"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all"}`,
		`"S": {"fork": ["a", "b", "c"]}, "a": {"do": "x.y", "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all", "to": "k"}, "c": {"do": "x.y", "to": "k"}, "k": {"join": "all", "to": "x"},
			"x": {"choose": [{"if": "input.n", "to": "S"}], "else": "e"}, "e": {"end": true}`,
		`"S": {"choose": [{"if": "input.n", "to": "f"}], "else": "e"}, "e": {"end": true}, "f": {"fork": ["a", "b"]}, "a": {"do": "x.y", "to": "j"}, "b": {"do": "x.y", "to": "j"}, "j": {"join": "all", "to": "S"}`,
		`"S": {"fork": ["a", "b"]}, "a": {"race": ["c", "d"]}, "c": {"wait": "1m", "to": "j"}, "d": {"await": {"signal": "go"}, "to": "j"}, "b": {"do": "x.y", "to": "m"}, "m": {"do": "x.y", "to": "k"},
			"j": {"do": "x.y", "to": "k"}, "k": {"join": "all"}`,

		`"S": {"do": "x.y", "on": [{"after": "1m", "to": "e"}, {"after": "2m", "to": "e"}, {"after": "1m", "keep": true, "to": "r"}, {"every": "1m", "to": "r"},
			{"every": "1m", "to": "r"}, {"message": "m", "key": "input.n", "to": "e"}, {"message": "m", "key": "input.m", "to": "e"}]}, "e": {"end": true}, "r": {"do": "x.y"}`,
		`"S": {"choose": [{"if": "input.n", "to": "a"}], "else": "e"}, "a": {"call": {"process": "p", "undo": "none"}}, "e": {"end": true}`,
		`"S": {"choose": [{"if": "input.n", "to": "s"}], "else": "e"}, "s": {"scope": {"start": "a", "nodes": {"a": {"call": {"process": "p", "undo": "none"}}}}}, "e": {"end": true}`,
		`"S": {"do": "x.y", "to": "a", "on": [{"error": "LAST", "to": "e"}]}, "a": {"call": {"process": "p", "undo": "none"}}, "e": {"end": true}`,
	} {
		d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "S", "nodes": {` + nodes + `}}`))
		if err != nil {
			t.Fatalf("%s: %v", nodes, err)
		}
		if _, all, err := graph.Compile(d); err != nil || len(all) > 0 {
			t.Errorf("%s: %v", nodes, all)
		}
	}
}

// A finding about a mistyped name suggests the most similar name.
func TestNearestName(t *testing.T) {
	for _, row := range []struct{ nodes, want string }{
		{`"charge": {"do": "x.y", "to": "colect"}, "collect": {"end": true}`, `/nodes/charge/to: UNKNOWN_NODE: there is no node "colect"; did you mean "collect"?`},
		{`"charge": {"do": "x.y", "to": "Collect"}, "collect": {"end": true}`, `did you mean "collect"?`},
		{`"charge": {"do": "x.y", "in": {"a": "steps.chrage.id"}}`, `/nodes/charge/in/a: UNKNOWN_STEP: there is no node "chrage" whose result could be read; did you mean "charge"?`},
		{`"charges": {"do": "x.y"}`, `/start: NO_START: there is no node "charge"; did you mean "charges"?`},
		{`"charge": {"do": "x.y", "to": "refund"}, "collect": {"end": true}`, `there is no node "refund"; name a node, or leave to out for an end`},
	} {
		d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "charge", "nodes": {` + row.nodes + `}}`))
		if err != nil {
			t.Fatal(err)
		}
		if _, all, _ := graph.Compile(d); !strings.Contains(fmt.Sprint(all), row.want) {
			t.Errorf("%s: %v, want %s", row.nodes, all, row.want)
		}
	}
}

// inRow returns a sequence of n nodes, which begins at n1.
func inRow(n int) string {
	var nodes []string
	for k := 1; k < n; k++ {
		nodes = append(nodes, fmt.Sprintf(`"n%d": {"do": "x.y", "to": "n%d"}`, k, k+1))
	}
	return strings.Join(append(nodes, fmt.Sprintf(`"n%d": {"end": true}`, n)), ",")
}

// Definitions at the limits of size have no findings.
func TestLargeEnough(t *testing.T) {
	branches := `"n1"` + strings.Repeat(`, "n1"`, 999)
	small := `{"process": "p", "version": 1, "start": "n1", "nodes": {` + inRow(1) + `}}`
	for _, text := range []string{
		`{"process": "p", "version": 1, "start": "n1", "nodes": {` + inRow(2_000) + `}}`,
		`{"process": "p", "version": 1, "start": "f", "nodes": {"f": {"fork": [` + branches + `]}, ` + inRow(1) + `}}`,
		`{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"each": {"list": "input.l", "do": "x.y", "limit": 1000}}}}`,
		small + strings.Repeat(" ", 1<<20-len(small)),
	} {
		d, err := graph.Parse([]byte(text))
		if err != nil {
			t.Fatalf("%.100s: %v", text, err)
		}
		if _, all, err := graph.Compile(d); err != nil || len(all) > 0 {
			t.Errorf("%.100s: %v", text, all)
		}
	}
}

func checkFinding(t *testing.T, text string, want found) {
	t.Helper()
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatalf("%.300s: %v", text, err)
	}
	p, all, err := graph.Compile(d)
	if !slices.ContainsFunc(all, func(f graph.Finding) bool {
		return f.Code == want.code && f.Path == want.path && f.Note == want.note && f.Reason != "" && f.Fix != ""
	}) {
		t.Errorf("%.300s: found %v, want %s at %s", text, all, want.code, want.path)
	}
	var invalid *graph.InvalidError
	if want.note != (err == nil) || want.note != (p != nil) || errors.As(err, &invalid) == want.note {
		t.Errorf("%.300s: error %v", text, err)
	}
}

// Every finding code that Compile uses occurs in a test of this file.
func TestFindingsAreComplete(t *testing.T) {
	codes := regexp.MustCompile(`c\.(?:bad|note)\("([A-Z_]+)"`)
	test, err := os.ReadFile("definition_test.go")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, code := range codes.FindAllSubmatch(text, -1) {
			if n++; !bytes.Contains(test, fmt.Appendf(nil, "%q", code[1])) {
				t.Errorf("%s gives %s, for which no test has a definition", file, code[1])
			}
		}
	}
	if n == 0 {
		t.Error("there are no codes: does Compile still call bad and note?")
	}
}

// Compile reports all findings at once, in order of their paths. The error has all of them except the notes.
func TestAllFindingsAtOnce(t *testing.T) {
	d, err := graph.Parse([]byte(`{"process": "an order", "version": 0, "start": "b", "nodes": {
		"a": {"do": "Charge", "attempts": -1, "to": "c", "on": [{"error": "E", "to": "d"}]},
		"x": {"call": {"process": "p"}}, "z": {}}}`))
	if err != nil {
		t.Fatal(err)
	}
	_, all, err := graph.Compile(d)
	var got, notes []string
	for _, f := range all {
		if got = append(got, f.Path); f.Note {
			notes = append(notes, f.Path)
		}
	}
	want := []string{"/nodes/a/attempts", "/nodes/a/do", "/nodes/a/on/0/to", "/nodes/a/to", "/nodes/x/call/undo", "/nodes/z", "/process", "/start", "/version"}
	if !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	var invalid *graph.InvalidError
	if !errors.As(err, &invalid) || len(invalid.Findings) != len(all)-1 || !slices.Equal(notes, []string{"/nodes/x/call/undo"}) {
		t.Errorf("error %v, notes %v", err, notes)
	}
	for _, f := range invalid.Findings {
		if !strings.Contains(err.Error(), f.String()) {
			t.Errorf("the error lacks %s", f)
		}
	}
}
