package protocol

import "testing"

// Within the first 6,000 states, each planted fault that shows breaks the rule that it is meant to break, at least 30 of
// them show, and no other variant breaks a rule. make model explores all states.
func TestVerdicts(t *testing.T) {
	broken := 0
	for _, v := range Variants(true) {
		f := v.Explore(6_000)
		switch {
		case f.Full: // it shows only after more states, which make model explores
		case f.Wrong != v.Want:
			t.Errorf("%s: %q, want %q: %q", v.Name, f.Wrong, v.Want, f.Story)
		case f.Wrong != "":
			broken++
			if len(f.Story) != f.Depth || f.Depth == 0 {
				t.Errorf("%s: the story has %d steps, want %d: %q", v.Name, len(f.Story), f.Depth, f.Story)
			}
		}
	}
	if broken < 30 {
		t.Errorf("%d planted faults were found within few states, want 30", broken)
	}
}

// The search finds deep violations and stuck states, and reports when it gives up.
func TestSearch(t *testing.T) {
	count := func(wrong, done int) design[int] {
		return design[int]{
			next:  func(s int, do func(string, int)) { do("next", min(s+1, 5000)) },
			wrong: func(s int) string { return map[int]string{wrong: "too far"}[s] },
			done:  func(s int) bool { return s == done },
		}
	}
	if f := explore(count(3000, 5000), 10_000); f.Wrong != "too far" || f.Depth != 3000 || len(f.Story) != 3000 {
		t.Errorf("a fault at 3000: %q at %d", f.Wrong, f.Depth)
	}
	if f := explore(count(-1, 5000), 10_000); f.Wrong != "" || f.States != 5001 || f.Depth != 5000 {
		t.Errorf("no fault: %q, %d states", f.Wrong, f.States)
	}
	if f := explore(count(-1, 4000), 10_000); f.Wrong != stuck || f.Depth != 4001 {
		t.Errorf("the end cannot be reached from 4001 on: %q at %d", f.Wrong, f.Depth)
	}
	if f := explore(count(-1, 5000), 1000); !f.Full {
		t.Error("it did not give up after 1000 states")
	}
}
