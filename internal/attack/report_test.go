package attack

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// A finding is something that must not be.
type finding struct {
	kind  string // of what went wrong
	by    string
	place string
	name  string
	sql   string // that reproduces it
	words string
}

// A report collects findings, one for each place, kind and actor, and counts.
type report struct {
	mu       sync.Mutex
	out      *os.File // of what is found as it is found; nil: none
	progress *os.File // nil: none
	found    []finding
	seen     map[string]bool
	accepted map[string]int
	refused  map[string]int
	trials   int
	behind   int // deeds that were not done, because something of their place has failed before
	unsplit  int // batches that failed when time was up
}

// newReport tells its progress to those who watch. ATTACK_OUT names a file for what is found as it is found.
func newReport(t *testing.T) *report {
	r := &report{seen: map[string]bool{}, accepted: map[string]int{}, refused: map[string]int{}}
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

// fails reports whether a trial of something of this place has failed before.
func (r *report) fails(place string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen["trial "+place]
}

func (r *report) failed(d deed, v verdict) {
	r.mu.Lock()
	r.seen["trial "+d.place()] = true
	r.mu.Unlock()
	kind := "a tool fails"
	if len(v.harm) > 0 {
		kind = "harm to others"
	} else if len(v.silence) > 0 {
		kind = "silence"
	}
	r.add(finding{kind, d.by.name, d.place(), d.name(), d.script(), v.String()})
}

// script is what psql needs to do the deed.
func (d deed) script() string { return d.by.begin() + d.sql(d.row) + "; COMMIT" }

// A hunt finds out which deeds of a batch are to blame.
type hunt struct {
	w        *world
	report   *report
	baseline end
	limit    time.Duration // for a trial
	until    time.Time     // no more are begun then
}

func (h *hunt) narrow(ctx context.Context, batch []deed) error {
	var rest []deed
	for _, d := range batch {
		if h.report.fails(d.place()) {
			h.report.mu.Lock()
			h.report.behind++
			h.report.mu.Unlock()
			continue
		}
		rest = append(rest, d)
	}
	if len(rest) == 0 {
		return nil
	}
	if time.Now().After(h.until) {
		h.report.mu.Lock()
		h.report.unsplit += len(rest)
		h.report.mu.Unlock()
		return nil
	}
	v, _, err := h.w.try(ctx, rest, h.baseline, h.limit)
	if err != nil {
		return err
	}
	h.report.mu.Lock()
	h.report.trials++
	h.report.mu.Unlock()
	h.report.log("%d deeds in %.1f s: %s", len(rest), v.took.Seconds(), shown(v.String(), 200))
	if !v.bad() {
		return nil
	}
	if len(rest) == 1 {
		h.report.failed(rest[0], v)
		return nil
	}
	if len(v.harm)+len(v.tools) == 0 { // each tells whose it is
		left := 0
		for _, words := range v.silence {
			specimen, _, _ := strings.Cut(words, " ")
			known := false
			for _, d := range rest {
				if d.row.specimen == specimen && specimen != "" {
					h.report.failed(d, verdict{silence: []string{words}})
					known = true
				}
			}
			if !known {
				left++
			}
		}
		if left == 0 {
			return nil
		}
	}
	if time.Now().After(h.until) {
		h.report.add(finding{"harm to others", "one of several", fmt.Sprint(len(rest)), rest[0].name() + fmt.Sprintf(" or one of %d more", len(rest)-1), rest[0].script(), v.String()})
		return nil
	}
	half := len(rest) / 2
	if err := h.narrow(ctx, rest[:half]); err != nil {
		return err
	}
	return h.narrow(ctx, rest[half:])
}

// batches packs deeds so that each row belongs to another specimen. The first of each kind is for calls, which name it.
func (w *world) batches(deeds []deed, most int) (all [][]deed) {
	rows := map[string][]row{}
	for _, r := range w.rows {
		if r.ours() && (!strings.HasSuffix(r.specimen, "/0") || strings.HasPrefix(r.class, "workflow_pause")) {
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
