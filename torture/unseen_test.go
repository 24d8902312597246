package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

// A fault that finds nobody to hit among the others strikes again after them, at another target each time, until it
// hits or has tried five times.
func TestStrikeAgain(t *testing.T) {
	book, err := openLedger(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	struck, places := map[string]int{}, map[uint64]bool{}
	shy := func(key string, misses int) fault {
		return fault{key: key, strike: func(_ context.Context, _ *lab, r *rand.Rand) (string, error) {
			struck[key]++
			if key == "shy" {
				places[r.Uint64()] = true
			}
			return hit(key, struck[key] > misses), nil
		}}
	}
	defer func(all []fault) { faults = all }(faults)
	faults = []fault{shy("bold", 0), shy("shy", 3), shy("absent", 0), shy("idle", 1000)}
	s := &siege{lab: &lab{ledger: book, plan: &plan{Strikes: []strike{{Fault: "bold"}, {Fault: "shy"}}}}, struck: map[string]int{}}
	s.strikeAll(t.Context(), s.lab.plan.Strikes, 0)
	for range 20 { // as many were planned
		s.lab.plan.Strikes = append(s.lab.plan.Strikes, strike{Fault: "idle"})
	}
	s.strikeAgain(t.Context())
	if len(places) != 4 || struck["idle"] != 5 {
		t.Errorf("%d strikes in %d places, and %d of what never hits; want 4, each in another, and 5", struck["shy"], len(places), struck["idle"])
	}
	if s.struck["bold"] != 1 || s.struck["shy"] != 1 || struck["bold"] != 1 || struck["absent"] != 0 {
		t.Errorf("hits %v in strikes %v; want each planned fault to hit once, and none that was not planned", s.struck, struck)
	}
}

// A run that broke a rule has failed, whatever it has not seen. A run that broke none and has not seen everything is
// invalid. Only a run that saw everything has passed.
func TestInvalidIsNotPassed(t *testing.T) {
	p := shortPlan(1)
	seen := func() verdict {
		v := verdict{Struck: map[string]int{}, Must: []happens{{What: "something", N: 1}}}
		for _, f := range faults {
			v.Struck[f.key] = 1
		}
		return v
	}
	if err := newReport(p, seen(), "").judgement(); err != nil {
		t.Errorf("a run that saw all and broke nothing: %v", err)
	}
	v := seen()
	v.Must = append(v.Must, happens{What: "something else"})
	delete(v.Struck, "kill")
	if err := newReport(p, v, "").judgement(); !errors.Is(err, errInvalid) {
		t.Errorf("a run that has not seen all: %v, want %v", err, errInvalid)
	}
	for what, spoil := range map[string]func(v *verdict){
		"a broken rule":     func(v *verdict) { v.Broken = []broken{{Rule: "I1", N: 1}} },
		"a strange exit":    func(v *verdict) { v.Exits = []string{"w1"} },
		"trouble":           func(v *verdict) { v.Troubles = []string{"the drain failed"} },
		"an index broken":   func(v *verdict) { v.Index = "broken: one" },
		"a figure not kept": func(v *verdict) { v.Figures = []figure{{Strict: true, Value: new(2.0), Goal: new(1.0)}} },
	} {
		for _, unseen := range []bool{false, true} {
			v := seen()
			v.Must = slices.Clone(v.Must)
			if spoil(&v); unseen {
				v.Must[0].N = 0
			}
			if err := newReport(p, v, "").judgement(); err == nil || errors.Is(err, errInvalid) {
				t.Errorf("%s, unseen %t: %v, want it to have failed", what, unseen, err)
			}
		}
	}
}
