package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// A report is a verdict together with what is needed to repeat it.
type report struct {
	Seed    uint64    `json:"seed"`
	Plan    string    `json:"plan"`
	Commit  string    `json:"commit"`
	Machine string    `json:"machine"`
	At      time.Time `json:"at"`
	verdict
	Invalid []string `json:"invalid,omitempty"` // what the run should have seen and has not
}

// commitOf returns the commit of a source tree.
func commitOf(root string) string {
	out, err := exec.Command("git", "-C", root, "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

func newReport(p *plan, v verdict, commit string) *report {
	r := &report{Seed: p.Seed, Plan: p.Name, Commit: commit, Machine: machine(), At: time.Now().UTC().Truncate(time.Second), verdict: v}
	for _, m := range v.Must {
		if m.N == 0 && p.demands(m.What) {
			r.Invalid = append(r.Invalid, "never happened: "+m.What)
		}
	}
	hits := 0
	for _, f := range faults {
		hits += v.Struck[f.key]
		if p.count(f.key) > 0 && v.Struck[f.key] == 0 {
			r.Invalid = append(r.Invalid, "never hit anybody: "+f.name)
		}
	}
	if p.Name == "long" && !p.Narrowed {
		if hits < 400 {
			r.Invalid = append(r.Invalid, fmt.Sprintf("%d strikes hit somebody, want 400", hits))
		}
		if runs := v.value("runs that ended"); runs < 30_000 {
			r.Invalid = append(r.Invalid, fmt.Sprintf("%.0f runs, want 30000", runs))
		}
		if finished := v.value("instances finished"); finished < 800 {
			r.Invalid = append(r.Invalid, fmt.Sprintf("%.0f instances finished, want 800", finished))
		}
		if strings.HasPrefix(v.Index, "not checked") {
			r.Troubles = append(r.Troubles, "indexes "+v.Index) // another run would not check them, either
		}
	}
	return r
}

func (p *plan) count(key string) (n int) {
	for _, s := range slices.Concat(p.Strikes, p.Singles) {
		if s.Fault == key {
			n++
		}
	}
	return n
}

func machine() string {
	return fmt.Sprintf("%d CPUs, %s/%s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version())
}

// errInvalid means that a run broke no rule, but has not seen everything it should, so it proves nothing.
var errInvalid = errors.New("invalid")

// judgement returns nil if every rule held in a valid run, and errInvalid if they held in an invalid one.
func (r *report) judgement() error {
	var problems []string
	for _, b := range r.Broken {
		problems = append(problems, b.Rule)
	}
	problems = append(problems, r.Exits...)
	for _, f := range r.Figures { // strict figures count even on a noisy machine
		if f.Strict && f.Value != nil && *f.Value > *f.Goal {
			problems = append(problems, fmt.Sprintf("%s: %s, want %s", f.Name, short(*f.Value), short(*f.Goal)))
		}
	}
	problems = append(problems, r.Troubles...)
	if strings.HasPrefix(r.Index, "broken") {
		problems = append(problems, "indexes "+r.Index)
	}
	if len(problems) > 0 {
		return errors.New(strings.Join(append(problems, r.Invalid...), "; "))
	}
	if len(r.Invalid) > 0 {
		return fmt.Errorf("%w: %s", errInvalid, strings.Join(r.Invalid, "; "))
	}
	return nil
}

func (r *report) write(name string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\nseed %d · %s · commit %s · %s\n\nfaults\n", r.Seed, r.Plan, r.Commit, r.Machine)
	total := 0
	for _, key := range slices.Sorted(maps.Keys(r.Struck)) {
		fmt.Fprintf(w, "  %-52s %6d\n", findFault(key).name, r.Struck[key])
		total += r.Struck[key]
	}
	fmt.Fprintf(w, "  %-52s %6d\n\nfigures\n", "strikes that hit somebody", total)
	for _, f := range r.Figures {
		if f.Value == nil {
			fmt.Fprintf(w, "  %-52s %9s\n", f.Name, "–")
			continue
		}
		fmt.Fprintf(w, "  %-52s %9s %-2s %s\n", f.Name, short(*f.Value), f.Unit, f.goal())
	}
	fmt.Fprintf(w, "  %-52s %9s\n", "drain", r.Drained)
	fmt.Fprintf(w, "  %-52s %9s\n\nmust have happened\n", "indexes", r.Index)
	for _, m := range r.Must {
		fmt.Fprintf(w, "  %-52s %9d\n", m.What, m.N)
	}
	fmt.Fprintln(w, "\nrules, and how many runs broke them")
	for _, rule := range r.Rules {
		b := r.brokenBy(rule)
		fmt.Fprintf(w, "  %-70s %5d\n", rule, b.N)
		if b.N > 0 {
			fmt.Fprintf(w, "  BROKEN, such as %v\n", b.Examples)
		}
	}
	for _, b := range r.Broken {
		fmt.Fprintf(w, "\n  BROKEN %s, by %v\n", b.Rule, b.Examples[0])
		for _, line := range b.Story {
			fmt.Fprintf(w, "    %s\n", line)
		}
	}
	for _, e := range r.Exits {
		fmt.Fprintf(w, "  BROKEN  %s\n", e)
	}
	for _, t := range r.Troubles {
		fmt.Fprintf(w, "  TROUBLE %s\n", t)
	}
	for _, i := range r.Invalid {
		fmt.Fprintf(w, "  INVALID %s\n", i)
	}
	if r.judgement() == nil {
		fmt.Fprintf(w, "  all held\n")
	}
}

// goal returns the goal of a figure, and whether it was missed.
func (f figure) goal() string {
	switch {
	case f.Goal == nil:
		return ""
	case f.Value != nil && *f.Value > *f.Goal:
		return fmt.Sprintf("missed: ≤ %s", short(*f.Goal))
	}
	return fmt.Sprintf("(≤ %s)", short(*f.Goal))
}

func (v *verdict) value(name string) float64 {
	for _, f := range v.Figures {
		if f.Name == name && f.Value != nil {
			return *f.Value
		}
	}
	return 0
}

func (r *report) brokenBy(rule string) broken {
	for _, b := range r.Broken {
		if b.Rule == rule {
			return b
		}
	}
	return broken{Rule: rule}
}

func short(v float64) string {
	if v == float64(int64(v)) {
		return fmt.Sprint(int64(v))
	}
	return fmt.Sprintf("%.3f", v)
}
