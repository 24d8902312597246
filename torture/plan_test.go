package main

import (
	"reflect"
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

// Each mutant still applies to the product's source, and names rules that exist.
func TestMutantsApply(t *testing.T) {
	rules, err := scripts.ReadFile("verdict.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutants {
		if _, err := m.overlay("..", t.TempDir()); err != nil {
			t.Errorf("%s: %v", m.name, err)
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
