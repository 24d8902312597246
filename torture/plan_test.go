package main

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	engine "github.com/simple-workflow/simple-workflow/graph"
)

// A seed determines the schedule and the workload, and another seed gives others.
func TestSeed(t *testing.T) {
	if !reflect.DeepEqual(longPlan(7), longPlan(7)) || reflect.DeepEqual(longPlan(7).Strikes, longPlan(8).Strikes) {
		t.Error("the schedule does not depend on the seed, and on it alone")
	}
	orders := func(seed uint64) (all []order) {
		r := longPlan(seed).random("enqueue")
		for range 1000 {
			all = append(all, draw(r, world{"http://127.0.0.1:1"}, 1))
		}
		return all
	}
	if !reflect.DeepEqual(orders(7), orders(7)) || reflect.DeepEqual(orders(7), orders(8)) {
		t.Error("the workload does not depend on the seed, and on it alone")
	}
}

// Every drawn process is valid: an invalid one would never start, and test nothing.
func TestProcessesAreValid(t *testing.T) {
	for seed := range uint64(20) {
		for _, p := range drawProcesses(longPlan(seed).random("processes")) {
			d, err := engine.Parse(p.definition)
			if err == nil {
				_, _, err = engine.Compile(d)
			}
			if err != nil {
				t.Errorf("seed %d, %s: %v", seed, p.name, err)
			}
		}
	}
}

// The long plan has what the torture promises: 400 strikes, of every fault except the failover, and enough runs.
func TestLongPlan(t *testing.T) {
	p := longPlan(1)
	if len(p.Strikes) < 400 {
		t.Errorf("%d strikes, want 400", len(p.Strikes))
	}
	for _, f := range faults {
		if p.count(f.key) == 0 && f.key != "failover" {
			t.Errorf("%s never strikes", f.name)
		}
	}
	if runs := p.Rate * (p.Warm + p.Chaos + p.Calm).Seconds(); runs < 30_000 {
		t.Errorf("%.0f runs, want 30000", runs)
	}
}

// Each mutant still applies to the product's source, and names rules that exist. What it changes in SQL is the newest
// definition of a function: an older one would break nothing.
func TestMutantsApply(t *testing.T) {
	rules, err := scripts.ReadFile("verdict.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutants {
		if _, err := m.overlay("..", t.TempDir()); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
		for _, e := range m.edits {
			if later := redefined(t, e); later != "" {
				t.Errorf("%s: %s defines what is changed in %s anew", m.name, later, e.file)
			}
		}
		for _, rule := range m.noticed {
			if !strings.Contains(string(rules), "'"+rule+" ") && !strings.HasPrefix(ruleStep, rule+" ") {
				t.Errorf("%s: there is no rule %s", m.name, rule)
			}
		}
		for key := range m.faults {
			findFault(key)
		}
	}
}

// redefined returns the migration that defines the function anew in which an edit changes something, or "".
func redefined(t *testing.T, e edit) string {
	t.Helper()
	if !strings.HasSuffix(e.file, ".sql") {
		return ""
	}
	text, err := os.ReadFile(filepath.Join("..", e.file))
	if err != nil {
		t.Fatal(err)
	}
	before, _, _ := strings.Cut(string(text), e.old)
	defined := regexp.MustCompile(`CREATE (?:OR REPLACE )?FUNCTION (\w+)\(`)
	names := defined.FindAllStringSubmatch(before, -1)
	if len(names) == 0 {
		return ""
	}
	files, err := filepath.Glob("../sql/[0-9]*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if filepath.Base(file) <= filepath.Base(e.file) {
			continue
		}
		later, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range defined.FindAllStringSubmatch(string(later), -1) {
			if name[1] == names[len(names)-1][1] {
				return filepath.Base(file)
			}
		}
	}
	return ""
}
