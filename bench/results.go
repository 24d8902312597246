package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// results are all measurements, by scenario.
type results struct {
	Sections []*section `json:"sections"`
}

// A section has the measurements of one scenario, and their circumstances.
type section struct {
	Name     string            `json:"name"`
	Date     string            `json:"date"`
	Commit   string            `json:"commit"`
	Machine  string            `json:"machine"`
	Postgres string            `json:"postgres"`
	Settings string            `json:"settings"`
	Engines  map[string]string `json:"engines"` // version by name
	SetUp    map[string]string `json:"setUp"`   // settings by name
	Missing  string            `json:"missing,omitempty"`
	Rows     int               `json:"rows,omitempty"` // number of other rows, if not the scenario's own
	Seconds  float64           `json:"seconds"`
	Samples  samples           `json:"samples"`
}

// A sample is one measurement. Rates and costs are per run. CPU is in seconds per 100,000 runs.
type sample struct {
	Engine    string             `json:"engine"`
	Variant   string             `json:"variant"`
	Rep       int                `json:"rep"`
	Runs      int                `json:"runs"`
	Seconds   float64            `json:"seconds"`
	Rate      float64            `json:"rate,omitempty"`
	ServerCPU float64            `json:"serverCPU"`
	WorkerCPU float64            `json:"workerCPU"`
	WAL       float64            `json:"wal"`
	RSS       float64            `json:"rss"`
	Foreign   float64            `json:"foreign"` // cores used by other programs meanwhile
	More      map[string]float64 `json:"more,omitempty"`
	Series    []float64          `json:"series,omitempty"` // one number per second, minute, or run
}

func (s sample) String() string {
	text := fmt.Sprintf("%-16s %-40s %d  %9.0f/s  server %5.2f  worker %5.2f  WAL %5.0f  RSS %4.0f  foreign %.2f",
		s.Engine, s.Variant, s.Rep, s.Rate, s.ServerCPU, s.WorkerCPU, s.WAL, s.RSS, s.Foreign)
	names := make([]string, 0, len(s.More))
	for name := range s.More {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		text += fmt.Sprintf("  %s %.4g", name, s.More[name])
	}
	return text
}

// newSection records the circumstances.
func (b *bench) newSection(ctx context.Context, name string) (*section, error) {
	version, err := b.server.facts(ctx)
	if err != nil {
		return nil, err
	}
	s := &section{
		Name: name, Date: time.Now().Format("2 January 2006"), Commit: commit(), Machine: machine(),
		Postgres: version, Settings: settingsText(), Missing: b.missing,
		Engines: map[string]string{}, SetUp: map[string]string{},
	}
	if name == "crowd" && b.rows > 0 {
		s.Name, s.Rows = fmt.Sprintf("crowd of %d", b.rows), b.rows
	}
	for _, e := range b.engines {
		s.Engines[e.name()], s.SetUp[e.name()] = e.version(), e.settings()
	}
	return s, nil
}

// file stores a section in place of the one with the same name.
func (r *results) file(s *section) {
	if i := slices.IndexFunc(r.Sections, func(old *section) bool { return old.Name == s.Name }); i >= 0 {
		r.Sections[i] = s
		return
	}
	r.Sections = append(r.Sections, s)
}

const resultsFile = "results.json"

func readResults(dir string) (*results, error) {
	text, err := os.ReadFile(filepath.Join(dir, resultsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return &results{}, nil
	}
	if err != nil {
		return nil, err
	}
	r := &results{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	return r, nil
}

// write writes the raw results, the report and the pictures.
func (r *results) write(dir, pictures string) error {
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, resultsFile), append(text, '\n'), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(r.report()), 0o644); err != nil {
		return err
	}
	return r.draw(pictures)
}

// samples are samples of one scenario, or of one row of its table.
type samples []sample

// of returns the samples of one engine and variant.
func (ss samples) of(engine, variant string) (some samples) {
	for _, s := range ss {
		if s.Engine == engine && s.Variant == variant {
			some = append(some, s)
		}
	}
	return some
}

// rows returns the distinct engines and variants in the order of their first sample.
func (ss samples) rows() (all []samples) {
	for _, s := range ss {
		if !slices.ContainsFunc(all, func(row samples) bool { return row[0].Engine == s.Engine && row[0].Variant == s.Variant }) {
			all = append(all, ss.of(s.Engine, s.Variant))
		}
	}
	return all
}

// A number is one figure of a sample.
type number func(sample) float64

func rate(s sample) float64      { return s.Rate }
func serverCPU(s sample) float64 { return s.ServerCPU }
func workerCPU(s sample) float64 { return s.WorkerCPU }
func wal(s sample) float64       { return s.WAL }
func rss(s sample) float64       { return s.RSS }
func foreignCores(s sample) float64 {
	return s.Foreign
}
func more(name string) number { return func(s sample) float64 { return s.More[name] } }

// median returns the middle value, or the mean of the two middle ones, or 0 if there are no samples.
func (ss samples) median(of number) float64 {
	all := ss.sorted(of)
	if len(all) == 0 {
		return 0
	}
	return (all[(len(all)-1)/2] + all[len(all)/2]) / 2
}

func (ss samples) sorted(of number) (all []float64) {
	for _, s := range ss {
		all = append(all, of(s))
	}
	slices.Sort(all)
	return all
}

// percentile returns the value below which a share of the values lies.
func percentile(all []float64, share float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}

// commit is the state of the sources, as git describes it.
func commit() string { return commitOnce() }

func machine() string {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	memory, _ := os.ReadFile("/proc/meminfo")
	var kB int
	_, _ = fmt.Sscanf(string(memory), "MemTotal: %d", &kB)
	return fmt.Sprintf("%d cores (%s), %d GiB, Linux %s, %s", runtime.NumCPU(), processor(),
		(kB+1<<19)>>20, strings.TrimSpace(string(release)), runtime.Version())
}

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	_, rest, _ := strings.Cut(string(text), "model name")
	line, _, _ := strings.Cut(rest, "\n")
	return cmp.Or(strings.TrimLeft(line, "\t :"), runtime.GOARCH)
}

func moduleVersion(path string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		if module.Path == path {
			return strings.TrimPrefix(module.Version, "v")
		}
	}
	return ""
}
