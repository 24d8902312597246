// Command torture kills everything, from outside, and proves by SQL that nothing was lost or done twice. It builds
// the programs that ship, and starts a private PostgreSQL and workers as processes behind proxies that break
// connections. It enqueues, cancels and intervenes as clients do, and strikes by a schedule that one seed determines.
// What clients were told and what handlers did is kept in files. When everything has calmed down, it loads these into
// the database, and verdict.sql judges.
//
//	go run .                  ten minutes, all faults, half of the workers through pgbouncer
//	go run . -short           a minute
//	go run . -seed 7          the same workload and the same schedule again
//	go run . -mutants         breaks one rule of the product at a time: each must be caught
//	go run . -failover        primary lost, standby promoted
//
// The exit code is 0 if every rule held and everything that must happen did.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

type options struct {
	seed              uint64
	short, pooler     bool
	mutants, failover bool
	hold              bool
	only, out, keep   string
	root              string
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "burn" {
		for { //nolint:staticcheck // this is what it is for
		}
	}
	var o options
	flag.Uint64Var(&o.seed, "seed", 0, "fixes workload and faults; 0 draws one")
	flag.BoolVar(&o.short, "short", false, "a minute instead of ten")
	flag.BoolVar(&o.pooler, "pooler", false, "half of the workers through pgbouncer, also in a short run")
	flag.BoolVar(&o.mutants, "mutants", false, "break a rule of the product at a time")
	flag.BoolVar(&o.failover, "failover", false, "promote a standby under load")
	flag.StringVar(&o.only, "only", "", "comma-separated faults, or mutants, instead of all")
	flag.StringVar(&o.out, "out", "", "file for the report as JSON")
	flag.StringVar(&o.keep, "keep", "", "directory for ledgers and logs, of one run; empty: a temporary one, kept if a rule is broken")
	flag.BoolVar(&o.hold, "hold", false, "keep the server up after the verdict, until interrupted, to look at schema t")
	flag.StringVar(&o.root, "root", "..", "the product's source")
	flag.Func("table", "comma-separated reports; prints them side by side in Markdown, tortures nothing", func(names string) error {
		if err := table(os.Stdout, strings.Split(names, ",")); err != nil {
			return err
		}
		os.Exit(0)
		return nil
	})
	flag.Parse()
	if o.seed == 0 {
		o.seed = rand.Uint64N(1_000_000)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := o.run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	}
}

func (o options) run(ctx context.Context) error {
	if o.mutants {
		fmt.Printf("seed %d\n", o.seed)
		return o.runMutants(ctx)
	}
	for try := 1; ; try++ {
		err := o.once(ctx)
		if !errors.Is(err, errInvalid) || try == 3 || o.keep != "" {
			return err
		}
		fmt.Printf("%v\nThis run proves nothing. The next seed follows.\n\n", err)
		o.seed++
	}
}

// once does one run and prints the result.
func (o options) once(ctx context.Context) error {
	fmt.Printf("seed %d\n", o.seed)
	dir, err := o.place()
	if err != nil {
		return err
	}
	bin, commit := filepath.Join(dir, "bin"), commitOf(o.root)
	if err := build(ctx, o.root, bin, ""); err != nil {
		return err
	}
	p, err := o.plan()
	if err != nil {
		return err
	}
	v, err := torture(ctx, p, dir, bin, o)
	if err != nil {
		return fmt.Errorf("%w; logs are in %s", err, dir)
	}
	r := newReport(p, v, commit)
	r.print(os.Stdout)
	if o.out != "" {
		if err := r.write(o.out); err != nil {
			return err
		}
	}
	if err := r.judgement(); err != nil {
		return fmt.Errorf("%w; ledgers and logs are in %s, again with -seed %d", err, dir, o.seed)
	}
	if o.keep == "" {
		return os.RemoveAll(dir)
	}
	return nil
}

// place returns the directory for ledgers and logs.
func (o options) place() (string, error) {
	if o.keep == "" {
		return os.MkdirTemp("", "torture-")
	}
	dir, err := filepath.Abs(o.keep)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if there, err := os.ReadDir(dir); err != nil || len(there) > 0 {
		return "", cmp.Or(err, fmt.Errorf("-keep %s: it is not empty; ledgers of two runs must not mix", dir))
	}
	return dir, nil
}

func (o options) plan() (p *plan, err error) {
	switch {
	case o.failover:
		p = failoverPlan(o.seed)
	case o.short:
		p = shortPlan(o.seed)
	default:
		p = longPlan(o.seed)
	}
	if o.only != "" {
		err = p.narrow(strings.Split(o.only, ","))
	}
	return p, err
}

// torture does one run and judges it.
func torture(ctx context.Context, p *plan, dir, bin string, o options) (v verdict, err error) {
	l, err := newLab(ctx, p, dir, bin, o.pooler || !o.short && !o.failover && !o.mutants)
	if err != nil {
		return v, err
	}
	defer l.close()
	if err := l.leaveOut(ctx); err != nil {
		return v, err
	}
	s := &siege{lab: l, load: newLoad(l), struck: map[string]int{}}
	if o.failover {
		if err := l.addStandby(ctx); err != nil {
			return v, err
		}
	}
	if err := s.load.deploy(ctx); err != nil {
		return v, err
	}
	if err := s.run(ctx); err != nil {
		s.errs = append(s.errs, err)
	}
	var fresh, leaked float64
	if !o.mutants {
		if fresh, leaked, err = l.countGoroutines(ctx); err != nil {
			s.errs = append(s.errs, err)
		}
	}
	idle, err := l.countIdle(ctx)
	if err != nil {
		return v, err
	}
	l.stopWorkers(syscall.SIGTERM)
	if v, err = l.judge(ctx); err != nil {
		return v, err
	}
	v.Struck, v.Drained = s.struck, s.drained
	if v.Exits, err = l.strangeExits(ctx); err != nil {
		return v, err
	}
	none := 0.0
	v.Figures = append(v.Figures, figure{Name: "goroutines of ours in a fresh idle worker", Value: &fresh},
		figure{Name: "the same at the end, beyond that", Value: &leaked, Goal: &none, Strict: true},
		figure{Name: "sessions left idle in a transaction", Value: &idle, Goal: &none, Strict: true})
	for _, err := range s.errs {
		v.Troubles = append(v.Troubles, err.Error())
	}
	if o.hold {
		for _, b := range v.Broken {
			fmt.Printf("BROKEN %s, such as %v\n%s\n", b.Rule, b.Examples, strings.Join(b.Story, "\n"))
		}
		fmt.Printf("psql '%s'\n", l.server.URL(database))
		<-ctx.Done()
	}
	return v, nil
}

func since(start time.Time) time.Duration { return time.Since(start).Round(100 * time.Millisecond) }
