package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
)

// A result is the state of the database at the end.
type result struct {
	Enqueued  int // from the history, which is append-only
	Succeeded int
	Retried   int // succeeded after a failed attempt
	Recovered int // succeeded in another worker after the killed worker's lease had expired
	Booked    int // invoices with exactly one entry in the ledger
	Charges   int // succeeded charges
	Arrived   int // events of charges, as CloudEvents
	Lost      int // enqueued, but missing or never finished
	Files     []string

	victim   string
	thumbs   int // of Files, those on disk
	expected int // runs enqueued, counted right after enqueuing
}

func (d *demo) measure(ctx context.Context, victim *process) (*result, error) {
	rows, _ := d.pool.Query(ctx, `
		WITH created AS (
			SELECT workflow_id AS id FROM workflow_event WHERE event_type = 'created'
		), good AS (
			SELECT id, type, result FROM workflow_run WHERE status = 'succeeded'
		), entries AS (
			SELECT g.id, count(l.entry) AS n
			FROM good g
			LEFT JOIN shop_ledger l ON l.entry = g.id
			WHERE g.type = 'billing.invoice_charge.v1'
			GROUP BY g.id
		)
		SELECT (SELECT count(*) FROM created) AS enqueued,
		       (SELECT count(*) FROM good) AS succeeded,
		       (SELECT count(*) FROM good WHERE id IN
		           (SELECT workflow_id FROM workflow_event WHERE event_type = 'retried')) AS retried,
		       (SELECT count(DISTINCT g.id)
		        FROM good g
		        JOIN workflow_event e ON e.workflow_id = g.id AND e.event_type = 'expired'
		        JOIN workflow_event s ON s.workflow_id = g.id AND s.event_type = 'succeeded' AND s.id > e.id
		        WHERE e.data->>'worker' LIKE $1 || '-%' AND s.actor NOT LIKE $1 || '-%') AS recovered,
		       (SELECT count(*) FROM entries WHERE n = 1) AS booked,
		       (SELECT count(*) FROM entries) AS charges,
		       (SELECT count(*)
		        FROM created c
		        LEFT JOIN workflow_run r ON r.id = c.id
		        WHERE r.finished_at IS NULL) AS lost,
		       (SELECT coalesce(array_agg(result->>'file'), '{}')
		        FROM good WHERE type = 'media.thumbnail.v1') AS files`, victim.name)
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByNameLax[result])
	if err != nil {
		return nil, fmt.Errorf("measure the result: %w", err)
	}
	r.victim, r.expected = victim.name, d.enqueued
	arrived, err := d.arrived(ctx)
	if err != nil {
		return nil, err
	}
	r.Arrived = arrived.types["invoice.charged.v1"]
	for _, file := range r.Files {
		if info, err := os.Stat(filepath.Join(d.shop(), file)); err == nil && info.Size() > 0 {
			r.thumbs++
		}
	}
	return r, nil
}

func (r *result) print(w io.Writer) {
	table(w, []line{
		{"runs enqueued", r.Enqueued},
		{"succeeded", r.Succeeded},
		{"retried after an error", r.Retried},
		{"recovered from killed " + r.victim, r.Recovered},
		{"thumbnails on disk", r.thumbs},
		{"invoices booked exactly once", r.Booked},
		{"of these arrived as CloudEvents", r.Arrived},
		{"lost", r.Lost},
	})
}

// A line of a table.
type line struct {
	name  string
	value int
}

func table(w io.Writer, lines []line) {
	rule := strings.Repeat("─", 46)
	fmt.Fprintln(w, rule)
	for _, l := range lines {
		fmt.Fprintf(w, "%-36s %9d\n", l.name, l.value)
	}
	fmt.Fprintln(w, rule)
}

// verdict returns an error that lists what is not as expected.
func (r *result) verdict() error {
	var problems []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	check(r.Enqueued == r.expected, "the history knows %d runs, %d were enqueued", r.Enqueued, r.expected)
	check(r.Succeeded == r.Enqueued, "%d runs did not succeed", r.Enqueued-r.Succeeded)
	check(r.Lost == 0, "%d runs are lost", r.Lost)
	check(r.Recovered > 0, "no run of %s was recovered", r.victim)
	check(r.Booked == r.Charges, "%d charges are not booked exactly once", r.Charges-r.Booked)
	check(r.Arrived == r.Charges, "%d charges, of which %d arrived as events", r.Charges, r.Arrived)
	check(r.thumbs == len(r.Files), "%d thumbnails are missing", len(r.Files)-r.thumbs)
	return errors.Join(problems...)
}

func (r *result) summary() string {
	return fmt.Sprintf("demo: %d runs enqueued, %d succeeded, %d lost", r.Enqueued, r.Succeeded, r.Lost)
}
