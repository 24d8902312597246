package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	// command finds commands for the reader to type; it captures what follows the program's name.
	command  = regexp.MustCompile(`(?:^|[\s/(|])workflowctl((?:[ \t]+[^\s|;&#>)]+)+)`)
	listed   = regexp.MustCompile(`(?m)^  ([a-z][a-z-]*) +\S`)
	flag     = regexp.MustCompile(`--[a-z][a-z-]*`)
	ofMake   = regexp.MustCompile(`(?:^|\s)make ((?:[a-z][a-z-]+ ?)+)`)
	target   = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	showable = regexp.MustCompile(`\bshow ([a-z][a-z-]*)`)
)

// A ctl knows the commands of workflowctl from its --help.
type ctl struct {
	t    *testing.T
	said map[string]string
}

func (c *ctl) help(path ...string) string {
	key := strings.Join(path, " ")
	if c.said[key] == "" {
		c.said[key] = run(c.t, "workflowctl", append(path, "--help")...)
	}
	return c.said[key]
}

// below returns the subcommands of a command.
func (c *ctl) below(path ...string) map[string]bool {
	all := map[string]bool{}
	_, text, _ := strings.Cut(c.help(path...), "Available Commands:\n")
	text, _, _ = strings.Cut(text, "\n\n")
	for _, m := range listed.FindAllStringSubmatch(text, -1) {
		all[m[1]] = true
	}
	return all
}

// check reports what is wrong with the words that follow the program's name.
func (c *ctl) check(at string, words []string) {
	var path []string
	for len(words) > 0 && c.below(path...)[words[0]] {
		path, words = append(path, words[0]), words[1:]
	}
	if len(words) > 0 && len(c.below(path...)) > 0 && regexp.MustCompile(`^[a-z][a-z-]*$`).MatchString(words[0]) {
		c.t.Errorf("%s: workflowctl has no command %s", at, strings.Join(append(path, words[0]), " "))
		return
	}
	help := c.help(path...)
	for _, word := range words {
		if name := flag.FindString(word); strings.HasPrefix(word, "--") && name != "" && !regexp.MustCompile(name+`\b[^-]`).MatchString(help) {
			c.t.Errorf("%s: workflowctl %s has no flag %s", at, strings.Join(path, " "), name)
		}
	}
	if len(path) == 1 && path[0] == "show" && len(words) > 0 && regexp.MustCompile(`^[a-z][a-z-]*$`).MatchString(words[0]) && !strings.Contains(help, "\n  "+words[0]+" ") {
		c.t.Errorf("%s: workflowctl show has no %s", at, words[0])
	}
}

// Each command of workflowctl that a page shows exists, with its flags. So does each make target.
func TestCommands(t *testing.T) {
	t.Parallel()
	c := &ctl{t, map[string]string{}}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range target.FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	n := 0
	for _, p := range pages(t) {
		typed := p.inline()
		for _, b := range p.blocks("sh") {
			for line := range strings.Lines(b.text) {
				line, _, _ = strings.Cut(line, " #")
				typed = append(typed, block{b.at, line})
			}
		}
		for _, b := range typed {
			for _, m := range command.FindAllStringSubmatch(b.text, -1) {
				n++
				c.check(b.at, strings.Fields(m[1]))
			}
			for _, m := range ofMake.FindAllStringSubmatch(b.text, -1) {
				for _, name := range strings.Fields(m[1]) {
					if !targets[name] {
						t.Errorf("%s: the Makefile has no target %s", b.at, name)
					}
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("found only %d commands", n)
	}
}

// The tables of docs/operations.md have every command in their last column, and nothing else there. The page names
// everything that show can show.
func TestOperationsHaveEveryCommand(t *testing.T) {
	t.Parallel()
	c := &ctl{t, map[string]string{}}
	named, shown := map[string]bool{}, map[string]bool{}
	for _, p := range pages(t) {
		if p.path != "docs/operations.md" {
			continue
		}
		_, tables, _ := strings.Cut(p.text, "| psql | workflowctl |\n")
		tables, _, _ = strings.Cut(tables, "\n## ")
		for line := range strings.Lines(tables) {
			columns := strings.Split(line, "|")
			if len(columns) != 5 {
				continue
			}
			for _, m := range quoted.FindAllStringSubmatch(columns[3], -1) {
				words := strings.Fields(m[1])
				if strings.HasPrefix(words[0], "--") {
					continue // belongs to the command before it
				}
				if !c.below()[words[0]] {
					t.Errorf("docs/operations.md names %s, which is no command", m[1])
				}
				named[words[0]] = true
				c.check("docs/operations.md", words)
			}
		}
		for _, m := range showable.FindAllStringSubmatch(p.text, -1) {
			shown[m[1]] = true
		}
	}
	elsewhere := map[string]bool{"completion": true, "help": true, "version": true, "define": true, "graph": true, "migrate": true, "roles": true} // not for emergencies
	for name := range c.below() {
		if !named[name] && !elsewhere[name] {
			t.Errorf("the tables of docs/operations.md lack %s", name)
		}
	}
	_, text, _ := strings.Cut(c.help("show"), "psql can read, too:\n\n")
	text, _, _ = strings.Cut(text, "\n\n")
	for _, m := range listed.FindAllStringSubmatch(text, -1) {
		if !shown[m[1]] {
			t.Errorf("docs/operations.md does not say what show %s is for", m[1])
		}
	}
}
