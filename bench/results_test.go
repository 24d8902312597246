package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		rates []float64
		want  float64
	}{
		{nil, 0}, {[]float64{7}, 7}, {[]float64{9, 1}, 5}, {[]float64{3, 100, 1}, 3}, {[]float64{4, 1, 2, 3}, 2.5},
	} {
		var ss samples
		for _, r := range c.rates {
			ss = append(ss, sample{Rate: r})
		}
		if got := ss.median(rate); got != c.want {
			t.Errorf("median of %v = %v, want %v", c.rates, got, c.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i))
	}
	for share, want := range map[float64]float64{0: 1, 0.50: 51, 0.99: 100, 1: 100} {
		if got := percentile(hundred, share); got != want {
			t.Errorf("percentile %v = %v, want %v", share, got, want)
		}
	}
	if got := percentile(nil, 0.5); got != 0 {
		t.Errorf("percentile of nothing = %v", got)
	}
}

func TestThousands(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 999.4: "999", 1000: "1,000", 1234567.8: "1,234,568", -1234: "-1,234", math.Inf(1): "–"} {
		if got := thousands(x); got != want {
			t.Errorf("thousands(%v) = %q, want %q", x, got, want)
		}
	}
}

func TestGoal(t *testing.T) {
	for _, c := range []struct {
		goal goal
		want bool
	}{
		{ratio("", 3, 2, 1.5, false), true}, {ratio("", 2.9, 2, 1.5, false), false},
		{ratio("", 1.2, 1, 1.2, true), true}, {ratio("", 1.3, 1, 1.2, true), false},
	} {
		if got := c.goal.reached(); got != c.want {
			t.Errorf("%v %s is reached: %v, want %v", c.goal.value, c.goal.wanted(), got, c.want)
		}
	}
}

// Every section is reported, and drawn as valid XML.
func TestWrite(t *testing.T) {
	r := &results{}
	for i := len(scenarios) - 1; i >= 0; i-- {
		r.file(everything(scenarios[i].name))
		r.file(everything(scenarios[i].name)) // replaces the other
	}
	dir := t.TempDir()
	if err := r.write(dir, dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "RESULTS.md"))
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for _, s := range scenarios {
		title := "\n## " + chapters[s.name].title + "\n"
		at := strings.Index(string(text), title)
		if at < last || strings.Count(string(text), title) != 1 {
			t.Errorf("%q is missing, there twice, or in the wrong place", title)
		}
		last = at
	}
	pictures, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil || len(pictures) == 0 {
		t.Fatalf("%d pictures, %v", len(pictures), err)
	}
	for _, name := range pictures {
		if err := wellFormed(name); err != nil {
			t.Errorf("%s: %v", filepath.Base(name), err)
		}
	}
	if again, err := readResults(dir); err != nil || len(again.Sections) != len(scenarios) {
		t.Errorf("%d sections are read back, %v", len(again.Sections), err)
	}
}

func wellFormed(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	for d := xml.NewDecoder(f); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// everything has a sample of each engine and variant, for any scenario.
func everything(name string) *section {
	s := &section{Name: name, Engines: map[string]string{}, SetUp: map[string]string{}}
	for _, e := range []engine{ours{}, riverQueue{}, graphile{}} {
		s.Engines[e.name()] = "1"
		for _, variant := range []string{bulkVariant, singleVariant, oneProcess, twoProcesses, wakeUpVariant, nobody, "1 <other> row",
			oneType, thirtyType, shortVariant, longVariant, fourVariant, urgentVariant, killedVariant, heldVariant, freeVariant, peakVariant, soakMinutes,
			sequenceVariant, forkVariant, plainVariant, evenVariant, aloneVariant, fmt.Sprintf(wideFork, "10"), fmt.Sprintf(longEach, "10"), waitFree, fmt.Sprintf(waitFull, "10"),
			fmt.Sprintf(oneDispatcher, "10"), fmt.Sprintf(twoDispatchers, "10"), fmt.Sprintf(behindPoison, "10"), rareEvents, fmt.Sprintf(busyEvents, "10")} {
			s.Samples = append(s.Samples, sample{Engine: e.name(), Variant: variant, Rep: 1, Runs: 10, Seconds: 1, Rate: 10, ServerCPU: 1,
				Series: []float64{1, 2, 3}, More: map[string]float64{lastKey: 1}})
		}
	}
	return s
}

// Without another engine, the goals that compare are left out.
func TestGoalsWithoutRivals(t *testing.T) {
	s := everything("enqueue")
	if got := len(s.goals()); got != 2 {
		t.Errorf("%d goals, want 2", got)
	}
	s.Engines = map[string]string{ours{}.name(): "1"}
	if got := s.goals(); len(got) != 0 {
		t.Errorf("goals without rivals: %v", got)
	}
}
