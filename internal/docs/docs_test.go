package docs

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	root   = "../.."
	module = "github.com/simple-workflow/simple-workflow"
)

// bin is a directory with worker, dispatcher and workflowctl.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "docs")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		bin = dir
		if out, err := exec.Command("go", "build", "-o", bin+"/", module+"/cmd/worker", module+"/cmd/workflowctl", module+"/cmd/dispatcher").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// A page is a file that users read.
type page struct{ path, text string }

// past are pages that describe the past, or are generated.
var past = map[string]bool{"docs/decisions.md": true, "docs/faults-found.md": true, "docs/rights.md": true, "CHANGELOG.md": true}

// pages are the README, docs, and the pages beside the code, except those in past.
func pages(t *testing.T) (all []page) {
	t.Helper()
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch name := strings.TrimPrefix(path, root+"/"); {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "node_modules" || d.Name() == "bin"):
			return fs.SkipDir
		case filepath.Ext(path) == ".md" && !past[name]:
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			all = append(all, page{name, string(text)})
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("found only %d pages", len(all))
	}
	return all
}

// A block is a piece of code in a page.
type block struct{ at, text string }

var fence = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```$")

// blocks returns the blocks of a language, each with its position.
func (p page) blocks(language string) (all []block) {
	for _, m := range fence.FindAllStringSubmatchIndex(p.text, -1) {
		if p.text[m[2]:m[3]] == language {
			all = append(all, block{fmt.Sprintf("%s:%d", p.path, strings.Count(p.text[:m[4]], "\n")+1), p.text[m[4]:m[5]]})
		}
	}
	return all
}

var quoted = regexp.MustCompile("`([^`\n]+)`")

// inline returns the code in the sentences of a page.
func (p page) inline() (all []block) {
	for k, line := range strings.Split(fence.ReplaceAllStringFunc(p.text, blank), "\n") {
		for _, m := range quoted.FindAllStringSubmatch(line, -1) {
			all = append(all, block{fmt.Sprintf("%s:%d", p.path, k+1), m[1]})
		}
	}
	return all
}

// blank returns only the line breaks of text, so that later lines keep their numbers.
func blank(text string) string { return strings.Repeat("\n", strings.Count(text, "\n")) }

func run(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(bin, program), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
	return string(out)
}

// Every setting that a page names exists in a program, and every setting has a row in docs/configuration.md.
func TestSettingsExist(t *testing.T) {
	known := map[string]bool{}
	for _, program := range []string{"worker", "dispatcher"} {
		for _, m := range regexp.MustCompile(`(?m)^  ([A-Z_]+)  `).FindAllStringSubmatch(run(t, program, "--help"), -1) {
			known[m[1]] = true
		}
	}
	delete(known, "VARIABLE")
	if len(known) < 50 {
		t.Fatalf("found only %d settings", len(known))
	}
	named := regexp.MustCompile(`\b(WORKER|DISPATCHER)_[A-Z_]*[A-Z]\b`)
	rows := map[string]bool{}
	for _, p := range pages(t) {
		for _, name := range named.FindAllString(p.text, -1) {
			if !known[name] {
				t.Errorf("%s names %s, which no program reads", p.path, name)
			}
		}
		if p.path == "docs/configuration.md" {
			for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllStringSubmatch(p.text, -1) {
				rows[m[1]] = true
			}
		}
	}
	for name := range known {
		if !rows[name] {
			t.Errorf("docs/configuration.md has no row on %s", name)
		}
	}
}

// Each kind of sink that the dispatcher knows has a page, which docs/configuration.md links to. Every page of a sink
// belongs to such a kind.
func TestSinksHavePages(t *testing.T) {
	_, text, _ := strings.Cut(run(t, "dispatcher", "--help"), "\nSinks:\n")
	text, _, _ = strings.Cut(text, "Options follow")
	of := map[string]string{"http": "webhook", "exec": "program", "amqp": "amqp", "kafka": "kafka", "nats": "nats", "stdout": "stdout"}
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^    ([a-z]+):`).FindAllStringSubmatch(text, -1) {
		if of[m[1]] == "" {
			t.Errorf("the sink %s has no page: name it here", m[1])
		}
		found[of[m[1]]] = true
	}
	for _, p := range pages(t) {
		if name, ok := strings.CutPrefix(p.path, "docs/sinks/"); ok && !found[strings.TrimSuffix(name, ".md")] {
			t.Errorf("%s is about a sink that there is not", p.path)
		}
		if p.path == "docs/configuration.md" {
			for name := range found {
				if !strings.Contains(p.text, "(sinks/"+name+".md)") {
					t.Errorf("docs/configuration.md has no link to sinks/%s.md", name)
				}
			}
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// Every link between pages leads to an existing file, and to an existing heading in it.
func TestLinks(t *testing.T) {
	all := pages(t)
	for _, p := range all {
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(p.text, ""), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, ":") {
				continue
			}
			path := filepath.Join(root, p.path)
			if target != "" {
				path = filepath.Join(filepath.Dir(path), target)
			}
			text, err := os.ReadFile(path)
			if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
				continue
			}
			if err != nil {
				t.Errorf("%s leads to %s: %v", p.path, m[1], err)
			} else if anchor != "" && !headings(string(text))[anchor] {
				t.Errorf("%s leads to %s, and there is no such heading", p.path, m[1])
			}
		}
	}
}

// docs/README.md links to every page of docs once. The site takes its navigation from it.
func TestIndex(t *testing.T) {
	leads := map[string]int{}
	for _, m := range link.FindAllStringSubmatch(read(t, "docs/README.md"), -1) {
		leads["docs/"+m[1]]++
	}
	all := pages(t)
	for name := range past {
		all = append(all, page{path: name})
	}
	for _, p := range all {
		if strings.HasPrefix(p.path, "docs/") && p.path != "docs/README.md" && leads[p.path] != 1 {
			t.Errorf("docs/README.md leads to %s %d times, want once", p.path, leads[p.path])
		}
	}
}

// headings returns the anchors of a page's headings.
func headings(text string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		name := strings.ToLower(strings.TrimSpace(m[1]))
		name = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(name, "")
		all[strings.ReplaceAll(name, " ", "-")] = true
	}
	return all
}
