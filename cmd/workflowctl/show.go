package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// A look is a query of what there is to see.
type look struct{ about, query string }

// looks are by the names under which show knows them. All but stuck, which looks at every process that
// is open, are bounded by themselves or by LIMIT.
var looks = map[string]look{
	"waiting":   {"what waits, by type, and who covers it", `SELECT * FROM workflow_waiting ORDER BY oldest DESC NULLS LAST, type`},
	"coverage":  {"due runs that nobody takes, workers without work, prefixes that overlap", `SELECT * FROM workflow_coverage`},
	"working":   {"what is leased, the longest first", `SELECT * FROM workflow_working`},
	"failing":   {"the last thousand failures, by type and code", `SELECT * FROM workflow_failing ORDER BY failed DESC`},
	"prefix":    {"how each prefix stands that workers are bound to", `SELECT * FROM workflow_prefix ORDER BY prefix`},
	"rate":      {"how many runs end in a second, by type", `SELECT * FROM workflow_rate ORDER BY status, of_runs DESC, type`},
	"workers":   {"who lives", `SELECT name, prefixes, handlers, running, concurrency, version, host, pid, started_at, unseen FROM workflow_live_worker ORDER BY name`},
	"pauses":    {"types and prefixes that are paused", `SELECT prefix, reason, paused_at, paused_by FROM workflow_pause WHERE resumed_at IS NULL ORDER BY paused_at`},
	"lag":       {"how far behind each sink of the outbox is", `SELECT * FROM outbox_lag ORDER BY sink`},
	"parked":    {"events that were given up", `SELECT event_id, sink, attempt, last_error, parked_at FROM outbox_delivery WHERE parked_at IS NOT NULL ORDER BY parked_at DESC`},
	"blockers":  {"who keeps dead rows from being removed, or our tables locked", `SELECT * FROM workflow_blocker ORDER BY since DESC NULLS LAST`},
	"bloat":     {"dead rows and sizes of our tables", `SELECT * FROM workflow_bloat`},
	"stuck":     {"processes that somebody should look at", `SELECT * FROM process_stuck ORDER BY since`},
	"incidents": {"incidents that are open", `SELECT id, instance_id, node, code, message, created_at FROM incident WHERE resolved_at IS NULL ORDER BY created_at`},
	"tasks":     {"what waits for people", `SELECT id, instance_id, node, assignee, groups, due_at, created_at FROM user_task WHERE state = 'open' ORDER BY created_at`},
}

func newShow() *cobra.Command {
	var t target
	limit, asJSON := 50, false
	names := slices.Sorted(maps.Keys(looks))
	var about strings.Builder
	for _, name := range names {
		fmt.Fprintf(&about, "  %-10s %s\n", name, looks[name].about)
	}
	show := &cobra.Command{
		Use:       "show WHAT",
		Short:     "Show what waits, runs, fails, lags or is in the way",
		Long:      "Show what there is to see; each is a view that psql can read, too:\n\n" + about.String(),
		Args:      cobra.MatchAll(takes(1), known(names)),
		ValidArgs: names,
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit < 1 || limit > 100_000 {
				return fmt.Errorf("--limit=%d: use 1 to 100000", limit)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				return printQuery(cmd.Context(), cmd.OutOrStdout(), conn, fmt.Sprintf("%s LIMIT %d", looks[args[0]].query, limit), asJSON)
			})
		},
	}
	show.Flags().IntVar(&limit, "limit", limit, "at most so many rows")
	show.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	t.flags(show.Flags())
	return show
}

// known refuses what there is not, and says what there is.
func known(names []string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if !slices.Contains(names, args[0]) {
			return fmt.Errorf("show %.120q: there is no such thing; there are %s", args[0], strings.Join(names, ", "))
		}
		return nil
	}
}

// printQuery prints what a query gives: as a table with the values as psql has them, or as JSON.
func printQuery(ctx context.Context, out io.Writer, conn *pgx.Conn, query string, asJSON bool, args ...any) error {
	if asJSON {
		var text string
		if err := conn.QueryRow(ctx, `SELECT coalesce(jsonb_agg(to_jsonb(q)), '[]')::text FROM (`+query+`) AS q`, args...).Scan(&text); err != nil {
			return inWords(err)
		}
		fmt.Fprintln(out, text)
		return nil
	}
	rows, _ := conn.Query(ctx, query, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
	defer rows.Close()
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	var names []string
	for _, f := range rows.FieldDescriptions() {
		names = append(names, strings.ToUpper(f.Name))
	}
	fmt.Fprintln(table, strings.Join(names, "\t"))
	n := 0
	for rows.Next() {
		var cells []string
		for _, v := range rows.RawValues() {
			cells = append(cells, cell(string(v)))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
		n++
	}
	if err := rows.Err(); err != nil {
		return inWords(err)
	}
	if n == 0 {
		fmt.Fprintln(out, "nothing")
		return nil
	}
	return table.Flush()
}

// cell keeps a value short and on its line.
func cell(text string) string {
	const widest = 120
	text = printable(text)
	if runes := []rune(text); len(runes) > widest {
		return string(runes[:widest-1]) + "…"
	}
	return text
}
