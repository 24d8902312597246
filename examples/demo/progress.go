package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/term"
)

// A snapshot is the progress of all runs at one moment.
type snapshot struct {
	Enqueued  int
	Succeeded int
	Failed    int // or cancelled
	Leased    int
	Held      map[string]int // leases of each worker, by its full name
	Groups    string         // finished and total runs, for each first word of a type

	Orders  int // process instances
	Waiting int // of these, waiting for a person, a message or a time
	Over    int // of these, over
}

func (s snapshot) open() int { return s.Enqueued - s.Succeeded - s.Failed }

// held returns how many leases p has. leased_by is its name with a random suffix.
func (s snapshot) held(p *process) (n int) {
	for name, leases := range s.Held {
		if strings.HasPrefix(name, p.name+"-") {
			n += leases
		}
	}
	return n
}

func (d *demo) look(ctx context.Context) (snapshot, error) {
	rows, _ := d.pool.Query(ctx, `
		WITH run AS (
			SELECT split_part(type, '.', 1) AS kind, status, leased_by, finished_at
			FROM workflow_run
		)
		SELECT count(*) AS enqueued,
		       count(*) FILTER (WHERE status = 'succeeded') AS succeeded,
		       count(*) FILTER (WHERE status IN ('failed', 'cancelled')) AS failed,
		       count(*) FILTER (WHERE status = 'leased') AS leased,
		       (SELECT coalesce(jsonb_object_agg(leased_by, leases), '{}')
		        FROM (SELECT leased_by, count(*) AS leases FROM run WHERE status = 'leased' GROUP BY leased_by) AS h) AS held,
		       (SELECT coalesce(string_agg(format('%s %s/%s', kind, done, n), '  ' ORDER BY kind), '')
		        FROM (SELECT kind, count(*) AS n, count(finished_at) AS done FROM run GROUP BY kind) AS g) AS groups,
		       i.*
		FROM run, (SELECT count(*) AS orders, count(*) FILTER (WHERE status = 'WAITING') AS waiting, count(completed_at) AS over
		           FROM process_instance) AS i
		GROUP BY i.orders, i.waiting, i.over`)
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[snapshot])
	if err != nil {
		return s, fmt.Errorf("look at the runs: %w", err)
	}
	return s, nil
}

// watch shows the progress until enough is true.
func (d *demo) watch(ctx context.Context, enough func(snapshot) bool) error {
	const often = 100 * time.Millisecond
	tick := time.NewTicker(often)
	defer tick.Stop()
	defer d.clearLine()
	for n := 0; ; n++ {
		s, err := d.look(ctx)
		if err != nil {
			return cause(ctx, err)
		}
		d.show(s, n%10 == 9)
		if enough(s) {
			return nil
		}
		if err := d.running(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// cause returns why ctx has ended, or err if it has not.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// show rewrites one line on a terminal. Elsewhere it writes one line per second.
func (d *demo) show(s snapshot, second bool) {
	line := fmt.Sprintf("%d/%d done  %d leased  %s", s.Succeeded, s.Enqueued, s.Leased, s.Groups)
	if s.Orders > 0 {
		line = fmt.Sprintf("%d/%d orders over  %d waiting  %d leased", s.Over, s.Orders, s.Waiting, s.Leased)
	}
	switch {
	case d.terminal:
		if columns, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && columns > 0 {
			line = line[:min(len(line), columns-1)] // a line that wraps would stay
		}
		fmt.Print("\r\x1b[K", line)
	case second:
		fmt.Println(line)
	}
}

func (d *demo) clearLine() {
	if d.terminal {
		fmt.Print("\r\x1b[K")
	}
}
