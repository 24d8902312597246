package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/graph"
)

// Each page of docs/how-to leads to an example that can be run, and every example that a page names is in the file that it leads to.
func TestExamplesExist(t *testing.T) {
	links := regexp.MustCompile(`\[([^\]]*Example[^\]]*)\]\(([^)]+)\)`)
	names := regexp.MustCompile("`(Example\\w+)`")
	for _, p := range pages(t) {
		n := 0
		for _, m := range links.FindAllStringSubmatch(p.text, -1) {
			text, err := os.ReadFile(filepath.Join(root, filepath.Dir(p.path), m[2]))
			if err != nil {
				t.Errorf("%s: %v", p.path, err)
				continue
			}
			for _, name := range names.FindAllStringSubmatch(m[1], -1) {
				n++
				if !strings.Contains(string(text), "\nfunc "+name[1]+"() {") {
					t.Errorf("%s names %s, which %s has not", p.path, name[1], m[2])
				}
			}
		}
		if strings.HasPrefix(p.path, "docs/how-to/") && filepath.Base(p.path) != "README.md" && n == 0 {
			t.Errorf("%s leads to no example", p.path)
		}
	}
}

// A definition of a process that a page shows as a whole can be deployed.
func TestDefinitions(t *testing.T) {
	n := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks("json") {
			if !strings.Contains(b.text, `"process":`) || strings.Contains(b.text, "…") {
				continue
			}
			n++
			definition, err := graph.Parse([]byte(b.text))
			if err == nil {
				_, _, err = graph.Compile(definition)
			}
			if err != nil {
				t.Errorf("%s: %v", b.at, err)
			}
		}
	}
	if n < 5 {
		t.Errorf("found only %d definitions", n)
	}
}
