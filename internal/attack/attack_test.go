//go:build attack

package attack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "attack")
	if err != nil {
		panic(err)
	}
	workflowctl = filepath.Join(dir, "workflowctl")
	_, here, _, _ := runtime.Caller(0)
	build := exec.Command("go", "build", "-o", workflowctl, "./cmd/workflowctl")
	build.Dir = filepath.Join(filepath.Dir(here), "..", "..")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// Whatever a role sets any column of any row to, deletes, inserts or calls, one of two things holds: it is refused
// with a message, or the role has the right to it. Then everything else still continues, what does not continue is
// reported, and no tool fails. Open findings are listed in known. The test tries some hundreds of mutations, chosen
// by SEED. ATTACK=n tries n of them; ATTACK=all tries all, and those of known again. ATTACK_ONLY is a regular
// expression for the names of mutations, as findings print them.
func TestAttack(t *testing.T) {
	seed, err := strconv.ParseUint(os.Getenv("SEED"), 10, 64)
	if err != nil {
		seed = 1
	}
	whole := os.Getenv("ATTACK") == "all"
	many, err := strconv.Atoi(cmp.Or(os.Getenv("ATTACK"), strconv.Itoa(few)))
	if err != nil && !whole {
		t.Fatalf("ATTACK=%s: say all, or how many", os.Getenv("ATTACK"))
	}
	if !whole && many <= few {
		victims = 4
	}
	begun := time.Now()
	ctx := t.Context()
	w := newWorld(t)
	baseline, limit := w.quiet(ctx)
	t.Logf("SEED=%d: the world was made in %.0f s; left alone, all is over in time; a trial may take %.0f s", seed, time.Since(begun).Seconds(), limit.Seconds())

	all := w.generate()
	only := regexp.MustCompile(os.Getenv("ATTACK_ONLY"))
	all = slices.DeleteFunc(all, func(m *mutation) bool { return !only.MatchString(m.name()) })
	// Mutations are drawn by name, so that one more or less, which depends on how the world was made, does not change
	// which others are drawn.
	slices.SortStableFunc(all, func(a, b *mutation) int { return cmp.Compare(a.lot(seed), b.lot(seed)) })
	if !whole {
		all = all[:min(many, len(all))]
	}
	report := newReport(t)
	deeds := w.probe(ctx, all, report)
	var waiting []deed // those that wait for a fix
	deeds = slices.DeleteFunc(deeds, func(d deed) bool {
		listed := knownOf(d.by.name, d.mutation) >= 0
		if listed {
			waiting = append(waiting, d)
		}
		return listed
	})
	t.Logf("%d mutations were tried as %d actors, %d of them are done in earnest, %d more are known to fail; %.0f s", len(all), len(actors), len(deeds), len(waiting), time.Since(begun).Seconds())

	h := &hunt{w, report, baseline, limit}
	batches := w.batches(deeds, 200)
	if err := concurrently(atOnce, len(batches), func(k int) error { return h.narrow(ctx, batches[k]) }); err != nil {
		t.Fatal(err)
	}
	if whole {
		if err := h.again(ctx, waiting); err != nil {
			t.Fatal(err)
		}
	}

	for _, a := range actors {
		t.Logf("%-10s %6d accepted, %6d refused", a.name, report.accepted[a.name], report.refused[a.name])
	}
	t.Logf("%d trials; %d deeds not done, because one like them has failed; %.0f s", report.trials, report.behind, time.Since(begun).Seconds())
	for k, o := range known {
		if _, failed := report.open[k]; failed {
			t.Logf("known, open: %s", o)
		} else if whole && report.touched[k] {
			t.Errorf("it is known as open, and does not fail any more: take it out of the list. %s", o)
		}
	}
	if len(report.found) > 0 {
		t.Errorf("SEED=%d: %d findings:", seed, len(report.found))
		for _, f := range report.found {
			t.Errorf("%s", f)
		}
	}
}

// atOnce is how many trials run at a time. They wait most of the time.
const atOnce = 2

// quiet returns how everything ends if nobody interferes, and how long a trial may take at most.
func (w *world) quiet(ctx context.Context) (end, time.Duration) {
	const enough = time.Minute
	var ends [2]end
	if err := concurrently(2, 2, func(k int) (err error) {
		_, ends[k], err = w.try(ctx, nil, nil, enough)
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	baseline := ends[0].without(ends[1])
	took := make([]time.Duration, atOnce)
	if err := concurrently(atOnce, atOnce, func(k int) error {
		v, _, err := w.try(ctx, nil, baseline, enough)
		if took[k] = v.took; err == nil && v.bad() {
			err = fmt.Errorf("left alone, not all is well: %v", v)
		}
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	return baseline, max(8*time.Second, 2*slices.Max(took)+3*time.Second)
}

// few is how many mutations are tried by default.
const few = 400

// probe tries mutations as all actors. It returns as deeds those that were accepted and changed something, each by
// the weakest actor who can do it.
func (w *world) probe(ctx context.Context, all []*mutation, r *report) (deeds []deed) {
	done := make([]*deed, len(all))
	const probes = 2
	var next atomic.Int64
	err := concurrently(probes, probes, func(int) error {
		name := "probe" + strconv.FormatInt(trials.Add(1), 10)
		if err := w.copy(ctx, name); err != nil {
			return err
		}
		defer w.drop(name)
		conn, err := pgx.Connect(ctx, w.server.URL(name))
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		p := w.newProbe(conn)
		for {
			k := int(next.Add(1)) - 1
			if k >= len(all) {
				return nil
			}
			if k%100 == 99 { // rows that were rolled back stay in the tables, and are read each time
				if _, err := conn.Exec(ctx, "VACUUM"); err != nil {
					return err
				}
			}
			if k%1000 == 999 {
				r.log("%d of %d mutations tried", k+1, len(all))
			}
			if done[k], err = p.all(ctx, all[k], r); err != nil {
				return errors.Join(errors.New(all[k].name()), err)
			}
		}
	})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, d := range done {
		if d != nil {
			deeds = append(deeds, *d)
		}
	}
	slices.SortStableFunc(deeds, func(a, b deed) int { return slices.Index(actors, a.by) - slices.Index(actors, b.by) }) // what weaker actors can do is worse
	return deeds
}

// all tries a mutation as all actors.
func (p *probe) all(ctx context.Context, m *mutation, r *report) (weakest *deed, err error) {
	for _, a := range actors {
		if a.role != "" && m.op == "obstacle" {
			continue // only the owner of the database creates triggers
		}
		if a.role == "" && (m.op == "truncate" || m.op == "call" || m.op == "command") {
			continue // guards would prevent these, so they leave no rows from before
		}
		reply, err := p.try(ctx, a, m, weakest == nil)
		if err != nil {
			return nil, err
		}
		entry := knownOf(a.name, m)
		r.mu.Lock()
		if entry >= 0 {
			r.touched[entry] = true
		}
		if reply.refused != "" {
			r.refused[a.name]++
		} else {
			r.accepted[a.name]++
		}
		r.mu.Unlock()
		d := &deed{m, a, p.first[m.class]}
		if reply.problem != "" {
			kind := "rights"
			if reply.refused != "" {
				kind = "a bad refusal"
			} else if len(reply.problem) > 6 && reply.problem[:6] == "a tool" {
				kind = "a tool fails"
			}
			r.add(finding{kind, a.name, m.place(), m.name(), d.script(), reply.problem, entry})
		}
		forged := m.op == "command" && (a.name == "engine" || a.name == "owner")
		pauses := m.on == "workflow_pause" && m.op == "call" // a role that may pause stops what it pauses, including runs of others and of the engine
		if weakest == nil && (len(reply.changes) > 0 || m.op == "obstacle" && reply.refused == "") && m.op != "truncate" && !forged && !pauses {
			weakest = d
		}
	}
	return weakest, nil
}

// concurrently calls do for 0 to n-1, up to atOnce at the same time, and returns the first error.
func concurrently(atOnce, n int, do func(int) error) error {
	var group sync.WaitGroup
	var next atomic.Int64
	errs := make([]error, n)
	for range atOnce {
		group.Go(func() {
			for k := int(next.Add(1)) - 1; k < n; k = int(next.Add(1)) - 1 {
				errs[k] = do(k)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}
