package graph_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/graph"
)

var update = flag.Bool("update", false, "write into testdata/*.txt what the core decides")

// The core decides as the scripts in testdata say. A script consists of paragraphs: commands, a line of dashes, and
// what the core writes for them. The first paragraph has the nodes of a definition, beginning with its start node,
// instead of commands. The other commands are those of Play.Do. Lines that begin with # are comments.
//
// After a change, go test ./graph -run TestScripts -update rewrites the scripts: read the diff.
func TestScripts(t *testing.T) {
	names, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			var p *graph.Play
			var written []string
			for _, paragraph := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
				commands, _, is := strings.Cut(paragraph, "\n----")
				if !is { // a paragraph of comments
					written = append(written, paragraph)
					continue
				}
				told := play(t, &p, commands)
				written = append(written, commands+"\n----\n"+told)
				if want := commands + "\n----\n" + told; paragraph != want && !*update {
					t.Errorf("%s\n\nwant:\n\n%s", want, paragraph)
				}
			}
			if *update {
				if err := os.WriteFile(name, []byte(strings.Join(written, "\n\n")+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// play executes the commands of a paragraph, and returns the decisions of the core.
func play(t *testing.T, p **graph.Play, commands string) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(commands) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if *p == nil {
		*p = begin(t, strings.Join(lines, "\n"))
		return (*p).Story[0]
	}
	told := len((*p).Story)
	for _, line := range lines {
		if err := (*p).Do(line); err != nil {
			t.Fatal(err)
		}
	}
	return strings.Join((*p).Story[told:], "\n")
}

// begin starts an instance of a process with the given nodes, the first of which is its start.
func begin(t *testing.T, nodes string) *graph.Play {
	t.Helper()
	d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": ` + nodes[:strings.Index(nodes, ":")] + `, "nodes": {` + nodes + `}}`))
	if err != nil {
		t.Fatal(err)
	}
	p, err := graph.NewPlay(d, map[string]any{"n": 1.0, "items": []any{"a", "b", "c"}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}
