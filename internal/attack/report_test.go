//go:build attack

package attack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A finding is something that must not happen.
type finding struct {
	kind  string // of what went wrong
	by    string
	place string
	name  string
	sql   string // reproduces it
	words string
	open  int // its index in known; -1: none
}

// A report collects and counts findings, one for each place, kind and actor.
type report struct {
	mu       sync.Mutex
	out      *os.File // receives findings as they are found; nil: none
	progress *os.File // nil: none
	found    []finding
	seen     map[string]bool
	open     map[int]finding // the entries of known that have failed
	touched  map[int]bool    // the entries of known that were tried
	accepted map[string]int
	refused  map[string]int
	trials   int
	behind   int // deeds that were not done, because their place has failed before
}

// newReport prints progress if a person watches. ATTACK_OUT names a file that receives findings as they are found.
func newReport(t *testing.T) *report {
	r := &report{seen: map[string]bool{}, open: map[int]finding{}, touched: map[int]bool{}, accepted: map[string]int{}, refused: map[string]int{}}
	if path := os.Getenv("ATTACK_OUT"); path != "" {
		var err error
		if r.out, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if testing.Verbose() {
		r.progress = os.Stderr
	}
	return r
}

func (r *report) log(format string, args ...any) {
	if r.progress != nil {
		fmt.Fprintf(r.progress, time.Now().Format(time.TimeOnly)+" "+format+"\n", args...)
	}
}

func (r *report) add(f finding) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.open >= 0 {
		if _, ok := r.open[f.open]; !ok {
			r.open[f.open] = f
		}
		return
	}
	key := f.kind + " " + f.by + " " + f.place
	if r.seen[key] {
		return
	}
	r.seen[key] = true
	r.found = append(r.found, f)
	r.log("%s", f)
	if r.out != nil {
		fmt.Fprintf(r.out, "%s\n", f)
	}
}

func (f finding) String() string {
	return fmt.Sprintf("- **%s**, by %s: %s\n  %s\n  `%s`", f.kind, f.by, f.name, shown(f.words, 600), shown(f.sql, 500))
}

func shown(text string, most int) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		return text[:most] + " …"
	}
	return text
}

func (r *report) number() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.found)
}

func (r *report) failed(d deed, v verdict) {
	entry := knownOf(d.by.name, d.mutation)
	if entry < 0 {
		r.mu.Lock()
		r.seen["trial "+d.place()] = true
		r.mu.Unlock()
	}
	r.add(finding{v.kind(), d.by.name, d.place(), d.name(), d.script(), v.String(), entry})
}

// script is what to paste into psql to do the deed.
func (d deed) script() string { return d.by.begin() + d.sql(d.row) + "; COMMIT" }

// A hunt finds out which deeds of a batch cause a failure.
type hunt struct {
	w        *world
	report   *report
	baseline end
	limit    time.Duration // for a trial
}

// narrow finds the guilty deeds by halving the batch.
func (h *hunt) narrow(ctx context.Context, batch []deed) error {
	batch = h.fresh(batch)
	if len(batch) == 0 {
		return nil
	}
	v, err := h.try(ctx, batch, h.limit)
	if err != nil || !v.bad() {
		return err
	}
	if len(batch) == 1 {
		return h.confirm(ctx, batch)
	}
	if h.tellsWhose(v, batch) {
		return nil
	}
	before := h.report.number()
	half := len(batch) / 2
	if err := errors.Join(h.narrow(ctx, batch[:half]), h.narrow(ctx, batch[half:])); err != nil || h.report.number() > before {
		return err
	}
	if rest := h.fresh(batch); len(rest) < len(batch) { // the place of one of them has failed elsewhere meanwhile
		return h.narrow(ctx, rest)
	}
	return h.confirm(ctx, batch) // none alone: perhaps all together
}

// fresh leaves out deeds of places that have failed before.
func (h *hunt) fresh(batch []deed) (rest []deed) {
	h.report.mu.Lock()
	defer h.report.mu.Unlock()
	for _, d := range batch {
		if h.report.seen["trial "+d.place()] {
			h.report.behind++
		} else {
			rest = append(rest, d)
		}
	}
	return rest
}

func (h *hunt) try(ctx context.Context, batch []deed, limit time.Duration) (verdict, error) {
	v, _, err := h.w.try(ctx, batch, h.baseline, limit)
	h.report.mu.Lock()
	h.report.trials++
	h.report.mu.Unlock()
	h.report.log("%d deeds in %.1f s: %s", len(batch), v.took.Seconds(), shown(v.String(), 200))
	return v, err
}

// confirm tries again with more time: on a busy machine things may be late although no deed is guilty.
func (h *hunt) confirm(ctx context.Context, batch []deed) error {
	v, err := h.try(ctx, batch, 2*h.limit)
	if err == nil && v.bad() {
		for k, d := range batch {
			if len(batch) > 1 {
				v.harm = append(v.harm, fmt.Sprintf("(only together with others, %d of %d)", k+1, len(batch)))
			}
			h.report.failed(d, v)
		}
	}
	return err
}

// again tries the deeds of known findings one at a time, a few of each entry, until one fails.
func (h *hunt) again(ctx context.Context, deeds []deed) error {
	of := map[int][]deed{}
	for _, d := range deeds {
		if k := knownOf(d.by.name, d.mutation); len(of[k]) < 3 {
			of[k] = append(of[k], d)
		}
	}
	entries := slices.Sorted(maps.Keys(of))
	return concurrently(atOnce, len(entries), func(k int) error {
		for _, batch := range h.w.batches(of[entries[k]], 1) {
			h.report.mu.Lock()
			_, failed := h.report.open[entries[k]]
			h.report.mu.Unlock()
			if failed {
				return nil
			}
			if err := h.confirm(ctx, batch); err != nil {
				return err
			}
		}
		return nil
	})
}

// tellsWhose reports whether everything that is wrong is a thing that waits unreported and belongs to one deed. It
// then records these deeds as guilty.
func (h *hunt) tellsWhose(v verdict, batch []deed) bool {
	guilty := map[string]deed{}
	for _, d := range batch {
		guilty[d.row.specimen] = d
	}
	delete(guilty, "")
	for _, words := range v.silence {
		if _, known := guilty[specimen(words)]; !known {
			return false
		}
	}
	if len(v.harm)+len(v.tools) > 0 {
		return false
	}
	for _, words := range v.silence {
		h.report.failed(guilty[specimen(words)], verdict{silence: []string{words}})
	}
	return true
}

func specimen(words string) string {
	first, _, _ := strings.Cut(words, " ")
	return first
}

// batches packs deeds so that no two rows of a batch belong to the same specimen. The first specimen of each kind is
// reserved for calls, which name it.
func (w *world) batches(deeds []deed, most int) (all [][]deed) {
	rows := map[string][]row{}
	for _, r := range w.rows {
		if r.ours() && (!strings.HasSuffix(r.specimen, "/0") || r.table == "workflow_pause" || r.table == "workflow_binding") {
			rows[r.class] = append(rows[r.class], r)
		}
	}
	for len(deeds) > 0 {
		var batch, later []deed
		used, calls := map[string]bool{}, 0
		for _, d := range deeds {
			if len(batch) >= most {
				later = append(later, d)
				continue
			}
			if d.class == "" {
				if calls++; calls <= 30 {
					batch = append(batch, d)
				} else {
					later = append(later, d)
				}
				continue
			}
			placed := false
			for _, r := range rows[d.class] {
				if !used[r.specimen] {
					used[r.specimen], placed = true, true
					batch = append(batch, deed{d.mutation, d.by, r})
					break
				}
			}
			if !placed {
				later = append(later, d)
			}
		}
		if len(batch) == 0 {
			panic("no row for " + deeds[0].name())
		}
		all, deeds = append(all, batch), later
	}
	return all
}
