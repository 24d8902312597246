// Package arrows checks that each package imports only packages below it.
package arrows

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/simple-workflow/simple-workflow"

// allowed are the imports between our packages, except those of tests. A key or a target that ends with a slash
// stands for every package below it. A new import is a design decision, and has to be added here.
var allowed = map[string][]string{
	"sql":    {"internal/schema"},
	"run":    {"internal/clean", "internal/column", "internal/fault", "internal/jsondoc", "internal/shipped"},
	"outbox": {},
	"lease":  {"internal/fault", "internal/naming", "internal/shipped", "run"},
	"worker": {"internal/cleanup", "internal/fault", "internal/hook", "internal/jsondoc", "internal/leasing", "internal/naming", "internal/session",
		"internal/settling", "internal/shipped", "internal/told", "lease", "outbox", "run"},
	"graph": {"internal/fault", "internal/hook", "internal/jsondoc", "internal/leasing", "internal/naming", "internal/session", "internal/settling",
		"internal/spelling", "lease", "outbox", "run"},
	"dispatcher":          {"internal/clock", "internal/delivery", "internal/fault", "internal/shipped", "run"},
	"dispatcher/":         {"dispatcher", "internal/shipped"},
	"dispatcher/webhook":  {"dispatcher", "internal/address", "internal/clock", "internal/cloudevent", "internal/secret", "internal/shipped"},
	"internal/clean":      {},
	"internal/clock":      {},
	"internal/cloudevent": {},
	"internal/column":     {},
	"internal/jsondoc":    {},
	"internal/naming":     {},
	"internal/schema":     {},
	"internal/shipped":    {},
	"internal/settling":   {"internal/clean", "internal/column", "run"},
	"internal/leasing":    {"internal/column", "internal/fault", "internal/naming", "internal/settling", "run"},
	"internal/delivery":   {"internal/fault"},
	"internal/cleanup":    {"internal/fault", "run"},
	"internal/fault":      {},
	"internal/hook":       {"internal/leasing", "run"},
	"internal/address":    {},
	"internal/secret":     {},
	"internal/handlers":   {"internal/address", "internal/jsondoc", "internal/settling", "internal/shipped", "internal/told", "run", "worker"},
	"internal/told":       {"internal/settling", "run"},
	"internal/unsent":     {"dispatcher"},
	"internal/sinktest":   {"dispatcher"},
	"internal/pgserver/":  {"internal/pgserver/"},
	"internal/pgbouncer":  {"internal/pgserver/child"},
	"internal/pgtest":     {"internal/pgserver", "sql"},
	"internal/api":        {},
	"internal/arrows":     {},
	"internal/attack":     {},
	"internal/model":      {},
	"internal/protocol":   {},
	"internal/protocol/":  {"internal/protocol"},
	"internal/session":    {},
	"internal/spelling":   {},
	"internal/survival":   {},
	"internal/worktest":   {"graph", "run", "worker"},
	"internal/build":      {"sql"},
	"internal/cmdtest":    {},
	"internal/compiled":   {},
	"internal/database":   {"internal/env", "internal/session", "sql"},
	"internal/docs":       {},
	"internal/env":        {"internal/spelling"},
	"internal/logs":       {},
	"internal/probe":      {"internal/database", "internal/env", "internal/secret"},
	"service": {"graph", "internal/build", "internal/cleanup", "internal/database", "internal/env", "internal/handlers", "internal/jsondoc",
		"internal/logs", "internal/naming", "internal/probe", "internal/settling", "internal/shipped", "run", "worker"},
	"cmd/worker": {"service"},
	"cmd/dispatcher": {"cmd/dispatcher/", "dispatcher", "dispatcher/", "internal/address", "internal/build", "internal/database", "internal/env",
		"internal/delivery", "internal/logs", "internal/probe", "internal/secret", "internal/shipped", "run"},
	"cmd/dispatcher/": {"dispatcher", "internal/cloudevent", "internal/unsent"},
	"cmd/workflowctl": {"graph", "internal/build", "internal/database", "internal/env", "internal/schema", "internal/session", "sql"},
	"examples/order":  {"graph", "run", "worker"},
	"examples/chaos":  {"graph", "internal/cleanup", "outbox", "run", "worker"},
	"examples/demo":   {"examples/shop/", "internal/pgserver", "sql"},
	"examples/shop/":  {"examples/shop/", "outbox", "run", "worker"},
}

// heavy are the modules that no package for users may depend on, directly or indirectly.
var heavy = []string{"testcontainers", "prometheus", "opentelemetry", "nats", "franz-go", "amqp091", "envconfig", "tint", "cobra"}

type pkg struct {
	name          string
	imports, deps []string
}

func list(t *testing.T) (all []pkg) {
	t.Helper()
	cmd := exec.Command("go", "list", "-f", `{{.ImportPath}}|{{join .Imports " "}}|{{join .Deps " "}}`, module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		part := strings.Split(strings.TrimSpace(line), "|")
		all = append(all, pkg{strings.TrimPrefix(part[0], module+"/"), strings.Fields(part[1]), strings.Fields(part[2])})
	}
	return all
}

// rule returns the entry of allowed for the package, or else the longest entry that covers it, or "".
func rule(name string) (from string) {
	if _, ok := allowed[name]; ok {
		return name
	}
	for f := range allowed {
		if strings.HasSuffix(f, "/") && strings.HasPrefix(name+"/", f) && len(f) > len(from) {
			from = f
		}
	}
	return from
}

// Imports between packages point downwards only.
func TestArrows(t *testing.T) {
	used := map[string]bool{}
	for _, p := range list(t) {
		from := rule(p.name)
		targets, ok := allowed[from]
		if !ok {
			t.Errorf("package %s has no rule", p.name)
			continue
		}
		for _, imported := range p.imports {
			to, ours := strings.CutPrefix(imported, module+"/")
			allows := func(target string) bool {
				return to == target || strings.HasSuffix(target, "/") && strings.HasPrefix(to, target)
			}
			if i := slices.IndexFunc(targets, allows); ours && i < 0 {
				t.Errorf("%s imports %s, which is not below it", p.name, to)
			} else if ours {
				used[from+" → "+targets[i]] = true
			}
		}
	}
	for from, targets := range allowed {
		for _, to := range targets {
			if !used[from+" → "+to] {
				t.Errorf("the arrow %s → %s is allowed but not used: take it out", from, to)
			}
		}
	}
}

// Packages for users depend on no broker, exporter, container or command-line library.
func TestCoreIsLight(t *testing.T) {
	core := []string{"sql", "run", "outbox", "lease", "internal/leasing", "internal/settling", "worker", "graph", "dispatcher"}
	for _, p := range list(t) {
		if !slices.Contains(core, p.name) {
			continue
		}
		for _, dep := range p.deps {
			for _, word := range heavy {
				if strings.Contains(dep, word) {
					t.Errorf("%s depends on %s", p.name, dep)
				}
			}
		}
	}
}

// A program that requires the main module gets no broker, no container library and no Docker client, not even into its
// go.sum.
func TestMainModuleIsLight(t *testing.T) {
	cmd := exec.Command("go", "list", "-m", "all")
	cmd.Dir, cmd.Env = "../..", append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		for _, word := range []string{"nats-io/", "twmb/", "amqp091", "testcontainers", "moby/", "docker/"} {
			if strings.Contains(line, word) {
				t.Errorf("the main module requires %s", strings.TrimSpace(line))
			}
		}
	}
}

// The torture test links no code of the product: the packages that it uses from here start servers, or are the
// models, which do not depend on the product either.
func TestTortureStandsOutside(t *testing.T) {
	equipment := []string{"torture", "internal/pgserver", "internal/pgbouncer", "internal/protocol"}
	cmd := exec.Command("go", "list", "-deps", "./...")
	cmd.Dir, cmd.Env = "../../torture", append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		name, ours := strings.CutPrefix(strings.TrimSpace(line), module+"/")
		if ours && !slices.ContainsFunc(equipment, func(e string) bool { return name == e || strings.HasPrefix(name, e+"/") }) {
			t.Errorf("torture depends on %s", name)
		}
	}
}

// `make test` starts no pgbouncer, which only root can install: files that import the package for it need the build
// tag pooler. Without the tag, go list shows no importer.
func TestNothingToInstall(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}`, module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		if words := strings.Fields(line); slices.Contains(words[1:], module+"/internal/pgbouncer") {
			t.Errorf("%s starts pgbouncer: have the file built by the tag pooler, and make test-pooler run it", words[0])
		}
	}
}

// A test that lacks something it needs fails. A skipped test proves nothing, and nobody would notice.
func TestNoTestIsSkipped(t *testing.T) {
	out, err := exec.Command("grep", "-rnE", `\b(t|b|f|tb)\.Skip(f|Now)?\(|testing\.Short\(`, "--include=*_test.go", "../..").Output()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 { // grep exits with 1 if it finds nothing
		t.Errorf("grep: %v\n%s", err, out)
	}
}
