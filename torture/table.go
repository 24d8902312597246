package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// table prints reports side by side in Markdown.
func table(w io.Writer, names []string) error {
	var all []*report
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		r := &report{}
		if err := json.Unmarshal(text, r); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, r)
	}
	row := func(name string, of func(*report) string) {
		fmt.Fprintf(w, "| %s |", name)
		for _, r := range all {
			fmt.Fprintf(w, " %s |", of(r))
		}
		fmt.Fprintln(w)
	}
	row("", func(r *report) string { return fmt.Sprintf("seed %d", r.Seed) })
	fmt.Fprintln(w, "|---|"+strings.Repeat("---:|", len(all)))
	row("commit", func(r *report) string { return r.Commit })
	row("faults", func(r *report) string {
		n := 0
		for _, k := range r.Struck {
			n += k
		}
		return fmt.Sprint(n)
	})
	for i, f := range all[0].Figures {
		name := strings.TrimSpace(strings.Join([]string{f.Name, f.Unit, f.limit()}, " "))
		row(name, func(r *report) string {
			if v := r.Figures[i].Value; v != nil {
				return short(*v)
			}
			return "–"
		})
	}
	for _, rule := range all[0].Rules {
		row(rule, func(r *report) string { return fmt.Sprint(r.brokenBy(rule).N) })
	}
	row("invalid for", func(r *report) string { return cmp.Or(strings.Join(slices.Concat(r.Troubles, r.Invalid), "; "), "–") })
	return nil
}

func (f figure) limit() string {
	if f.Goal == nil {
		return ""
	}
	return "(≤ " + short(*f.Goal) + ")"
}
