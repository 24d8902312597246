package main

import (
	"strings"
	"testing"
)

// A file name of - means standard input.
func TestStandardInput(t *testing.T) {
	for _, row := range []struct{ command, text, want string }{
		{"define --check", `{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"fork": []}}}`, "-: error: /nodes/a/fork: NO_FORK"},
		{"define --check", `{`, "-: error: JSON: unexpected EOF"},
		{"graph", `{"start": "a", "nodes": {"a": {"do": "x.y"}}}`, `n2["a<br/>x.y"]`},
	} {
		var out strings.Builder
		root := newRoot()
		root.SetArgs(append(strings.Fields(row.command), "-"))
		root.SetIn(strings.NewReader(row.text))
		root.SetOut(&out)
		err := root.Execute()
		if !strings.Contains(out.String(), row.want) || (err == nil) != (row.command == "graph") {
			t.Errorf("%s: output %q, error %v, want %q", row.command, out.String(), err, row.want)
		}
	}
}
