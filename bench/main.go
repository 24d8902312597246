// Command bench measures the engine as it ships, beside River, graphile-worker, DBOS and watermill, in turn on one
// private PostgreSQL with full durability. It writes the measurements to results.json, and from these RESULTS.md and
// the pictures in docs/img.
//
//	go run .                     everything but the soak
//	go run . -smoke              every bench at a small size; checks that all runs are settled
//	go run . -only drain,pickup  some scenarios; the others keep their results
//	go run . -report             writes the report again from results.json
//
// README.md explains how the numbers are measured.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"
)

// A scenario measures one thing for all engines that take part in it.
type scenario struct {
	name  string
	apart bool // only on request
	run   func(context.Context, *bench) error
}

// scenarios in the order of the report.
var scenarios = []scenario{
	{name: "enqueue", run: enqueue},
	{name: "drain", run: drain},
	{name: "pickup", run: pickUp},
	{name: "crowd", run: crowd},
	{name: "mixed", run: mixed},
	{name: "work", run: realWork},
	{name: "snapshot", run: snapshot},
	{name: "heartbeat", run: heartbeat},
	{name: "crash", run: crash},
	{name: "processes", run: processGraphs},
	{name: "events", run: events},
	{name: "soak", run: soak, apart: true},
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "child" {
		exit(child(os.Args[2]))
	}
	var o options
	only := flag.String("only", "", "comma-separated scenarios instead of all: "+names())
	engines := flag.String("engines", "", "comma-separated engines instead of all: ours, river, graphile, dbos, watermill")
	flag.BoolVar(&o.smoke, "smoke", false, "small sizes, nothing is written")
	flag.IntVar(&o.reps, "reps", 0, "repetitions instead of each scenario's own")
	flag.IntVar(&o.runs, "runs", 0, "runs to drain, or events to publish, instead of 100000")
	flag.IntVar(&o.rows, "rows", 0, "other rows in the crowd scenario, or events in the largest backlog, instead of 1000000")
	flag.DurationVar(&o.held, "held", 0, "time under an old snapshot instead of 2 minutes, and 1 for others")
	flag.DurationVar(&o.soak, "soak", 0, "length of the soak instead of 30 minutes")
	flag.StringVar(&o.out, "out", ".", "directory of results.json and RESULTS.md")
	flag.StringVar(&o.pictures, "pictures", "../docs/img", "directory of the pictures")
	report := flag.Bool("report", false, "write the report again, measure nothing")
	flag.Parse()
	if *only != "" {
		o.only = strings.Split(*only, ",")
	}
	if *engines != "" {
		o.engines = strings.Split(*engines, ",")
	}
	if *report {
		exit(rewrite(o))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	exit(measure(ctx, o))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func names() string {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return strings.Join(all, ", ")
}

type options struct {
	only, engines    []string
	smoke            bool
	reps, runs, rows int
	held, soak       time.Duration
	out, pictures    string
}

// chosen returns the scenarios to measure.
func (o options) chosen() ([]scenario, error) {
	for _, name := range o.only {
		if !slices.ContainsFunc(scenarios, func(s scenario) bool { return s.name == name }) {
			return nil, fmt.Errorf("there is no scenario %q; there are %s", name, names())
		}
	}
	return slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool {
		if len(o.only) > 0 {
			return !slices.Contains(o.only, s.name)
		}
		return s.apart && !o.smoke
	}), nil
}

// sizes returns the sizes that the options select.
func (o options) sizes() sizes {
	s := fullSize
	if o.smoke {
		s = smokeSize
	}
	if o.reps > 0 {
		s.reps, s.crowdReps, s.rivalCrowdReps, s.mixedReps = o.reps, o.reps, o.reps, o.reps
	}
	s.drain = cmp.Or(o.runs, s.drain)
	s.crowd = min(s.crowd, s.drain)
	s.extra = cmp.Or(o.rows, s.extra)
	s.backlogs[1], s.backlogs[2] = cmp.Or(o.runs, s.backlogs[1]), cmp.Or(o.rows, s.backlogs[2])
	s.poisoned = min(s.poisoned, s.backlogs[1])
	s.soak = cmp.Or(o.soak, s.soak)
	s.held, s.heldRival = cmp.Or(o.held, s.held), cmp.Or(o.held, s.heldRival)
	return s
}

// rewrite writes the report and the pictures from earlier measurements.
func rewrite(o options) error {
	r, err := readResults(o.out)
	if err != nil {
		return err
	}
	return r.write(o.out, o.pictures)
}

// measure executes the chosen scenarios, and writes the results.
func measure(ctx context.Context, o options) error {
	chosen, err := o.chosen()
	if err != nil {
		return err
	}
	if o.smoke {
		dir, err := os.MkdirTemp("", "bench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		o.out, o.pictures = dir, dir
	}
	r, err := readResults(o.out)
	if err != nil {
		return err
	}
	server, err := startServer(ctx)
	if err != nil {
		return err
	}
	defer server.stop()
	b := &bench{server: server, sizes: o.sizes(), rows: o.rows}
	if err := server.fillWAL(ctx, b.sizes.wal); err != nil {
		return err
	}
	if err := b.choose(ctx, o.engines); err != nil {
		return err
	}
	begin := time.Now()
	for _, s := range chosen {
		if err := b.carryOut(ctx, s, r); err != nil {
			return err
		}
		if err := r.write(o.out, o.pictures); err != nil {
			return err
		}
	}
	slog.Info("all is settled", "took", time.Since(begin).Round(time.Second))
	return nil
}

// A bench is what scenarios work with.
type bench struct {
	server    *server
	sizes     sizes
	engines   []engine
	dbos      bool   // takes part in measurements of processes
	watermill bool   // takes part in measurements of events
	missing   string // why an engine was left out
	rows      int    // number of other rows, in place of the scenario's own; 0: not given
	section   *section
}

// choose sets the engines that are named, or all if none is, as far as they are installed.
func (b *bench) choose(ctx context.Context, names []string) error {
	all := map[string]engine{"ours": ours{}, "river": riverQueue{}, "graphile": graphile{}}
	b.dbos = len(names) == 0 || slices.Contains(names, "dbos")
	b.watermill = len(names) == 0 || slices.Contains(names, "watermill")
	for _, name := range names {
		if all[name] == nil && name != "dbos" && name != "watermill" {
			return fmt.Errorf("there is no engine %q", name)
		}
	}
	for _, name := range []string{"ours", "river", "graphile"} {
		if len(names) > 0 && !slices.Contains(names, name) {
			continue
		}
		if name == "graphile" {
			if reason := prepareGraphile(ctx); reason != nil {
				b.missing = "graphile-worker was left out: " + reason.Error()
				slog.Warn(b.missing)
				continue
			}
		}
		b.engines = append(b.engines, all[name])
	}
	return nil
}

// has reports whether an engine takes part.
func (b *bench) has(e engine) bool {
	return slices.ContainsFunc(b.engines, func(one engine) bool { return one.name() == e.name() })
}

// carryOut executes one scenario and stores its results in r.
func (b *bench) carryOut(ctx context.Context, s scenario, r *results) (err error) {
	slog.Info("scenario", "name", s.name)
	begin := time.Now()
	if b.section, err = b.newSection(ctx, s.name); err != nil {
		return err
	}
	if err := errors.Join(s.run(ctx, b), context.Cause(ctx)); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	b.section.Seconds = time.Since(begin).Seconds()
	r.file(b.section)
	return nil
}

// record stores a sample, and prints it.
func (b *bench) record(s sample) {
	b.section.Samples = append(b.section.Samples, s)
	fmt.Println(s)
}
