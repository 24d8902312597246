package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// A look is a query that show offers.
type look struct{ about, query string }

// looks are by the names that show accepts. All except stuck, which reads every open process, are bounded, either by
// their views or by LIMIT.
var looks = map[string]look{
	"waiting":  {"what waits, by type, and who covers it", `SELECT * FROM workflow_waiting ORDER BY oldest DESC NULLS LAST, type`},
	"coverage": {"due runs that no worker takes, workers without work, prefixes that overlap", `SELECT * FROM workflow_coverage`},
	"working":  {"what is leased, the longest first", `SELECT * FROM workflow_working`},
	"failing":  {"what has failed for good, by type and code", `SELECT * FROM workflow_failing ORDER BY failed DESC`},
	"erring":   {"types with many failed attempts", `SELECT * FROM workflow_erring ORDER BY percent DESC`},
	"growing":  {"types that do not keep up: more and more is due, although workers cover them", `SELECT * FROM workflow_growing ORDER BY due DESC`},
	"minutes": {"what was leased of each type in each minute, and how it ended, in the last two hours", `SELECT minute, type, sum(leased) AS leased, sum(succeeded) AS succeeded, sum(failed) AS failed, sum(retried) AS retried,
		round((sum(seconds) / nullif(sum(succeeded + failed + retried), 0))::numeric, 3) AS seconds_each, round((sum(waited) / nullif(sum(leased), 0))::numeric, 3) AS waited_each, max(due) AS due, max(oldest) AS oldest FROM workflow_minute WHERE minute > now() - interval '2 hours' GROUP BY minute, type ORDER BY minute DESC, type`},
	"prefix":  {"the state of each prefix that workers are bound to", `SELECT * FROM workflow_prefix ORDER BY prefix`},
	"rate":    {"how many runs are leased and end per second, by type", `SELECT * FROM workflow_rate ORDER BY status, of_runs DESC, type`},
	"workers": {"live workers", `SELECT name, prefixes, handlers, running, concurrency, version, host, pid, started_at, unseen FROM workflow_live_worker ORDER BY name`},
	"pauses":  {"types and prefixes that are paused", `SELECT prefix, reason, paused_at, paused_by FROM workflow_pause WHERE resumed_at IS NULL ORDER BY paused_at`},
	"policies": {"how often and how long runs are tried, by type or prefix", `SELECT pattern, attempts, backoff_base * interval '1 second' AS backoff_base, backoff_cap * interval '1 second' AS backoff_cap, curve, deadline * interval '1 second' AS deadline, dead_letter, breaker, set_at, set_by FROM workflow_policy
		UNION ALL SELECT '*', attempts, NULL, NULL, NULL, NULL, NULL, true, NULL, attempts_from FROM workflow_policy_of('') WHERE attempts_from = 'as shipped' ORDER BY pattern`},
	"policy-history": {"changes of policies, with who made them, and old and new values; times in seconds", `SELECT changed_at, actor, pattern,
			coalesce((SELECT string_agg(key || ' ' || value, ', ' ORDER BY key) FROM jsonb_each_text(was)), 'none') AS was,
			coalesce((SELECT string_agg(key || ' ' || value, ', ' ORDER BY key) FROM jsonb_each_text(became)), 'dropped') AS became
		FROM workflow_policy_history ORDER BY id DESC`},

	"breakers":  {"types with an open breaker: one run at a time is leased, as a probe", `SELECT * FROM workflow_breaker ORDER BY since, type`},
	"lag":       {"how far behind each sink of the outbox is", `SELECT * FROM outbox_lag ORDER BY sink`},
	"parked":    {"events that were given up", `SELECT event_id, sink, attempt, last_error, parked_at FROM outbox_delivery WHERE parked_at IS NOT NULL ORDER BY parked_at DESC`},
	"blockers":  {"sessions that keep dead rows from being removed, or our tables locked", `SELECT * FROM workflow_blocker ORDER BY since DESC NULLS LAST`},
	"bloat":     {"dead rows and sizes of our tables", `SELECT * FROM workflow_bloat`},
	"stuck":     {"processes that need a person", `SELECT * FROM process_stuck ORDER BY since`},
	"incidents": {"incidents that are open", `SELECT id, instance_id, node, code, message, created_at FROM incident WHERE resolved_at IS NULL ORDER BY created_at`},
	"tasks":     {"open user tasks", `SELECT id, instance_id, node, assignee, groups, due_at, created_at FROM user_task WHERE state = 'open' ORDER BY created_at`},
}

func newShow() *cobra.Command {
	var t target
	limit, asJSON := 50, false
	names := slices.Sorted(maps.Keys(looks))
	var about strings.Builder
	for _, name := range names {
		fmt.Fprintf(&about, "  %-14s %s\n", name, looks[name].about)
	}
	show := &cobra.Command{
		Use:       "show WHAT",
		Short:     "Show what waits, runs, fails, lags or is in the way",
		Long:      "Show one of these; each is a view that psql can read, too:\n\n" + about.String(),
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
	show.Flags().IntVar(&limit, "limit", limit, "maximum number of rows")
	show.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	t.flags(show.Flags())
	return show
}

func newEvents() *cobra.Command {
	var t target
	limit, asJSON := 1000, false
	events := &cobra.Command{
		Use:   "events ID",
		Short: "Show what has happened to a run, or to an instance of a process, the oldest first",
		Args:  takes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := anID(args[0])
			if err != nil {
				return fmt.Errorf("ID=%.120q: %w", args[0], err)
			}
			if limit < 1 || limit > 100_000 {
				return fmt.Errorf("--limit=%d: use 1 to 100000", limit)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				query := `SELECT created_at, event_type, attempt, lease_no, actor, data FROM (SELECT * FROM workflow_event WHERE workflow_id = $1 ORDER BY id DESC LIMIT $2::int) AS e ORDER BY id`
				var process, known bool
				if err := conn.QueryRow(cmd.Context(), `SELECT EXISTS (SELECT FROM process_instance WHERE id = $1), EXISTS (SELECT FROM workflow_event WHERE workflow_id = $1)`, id).Scan(&process, &known); err != nil {
					return inWords(err)
				}
				if !process && !known {
					return errors.New("there is no such run or instance, or retention has removed it")
				}
				if process {
					query = `SELECT created_at, event_type, node, version, data FROM (
							SELECT created_at, event_type, node, version, data, place, id FROM process_history WHERE instance_id = $1
							UNION ALL SELECT created_at, concat_ws(' to ', from_status, to_status), NULL, version, to_jsonb(reason), 3, id FROM process_state_history WHERE instance_id = $1
							ORDER BY created_at DESC, place DESC, id DESC LIMIT $2::int) AS e
						ORDER BY created_at, place, id`
				}
				return printQuery(cmd.Context(), cmd.OutOrStdout(), conn, query, asJSON, id, limit)
			})
		},
	}
	events.Flags().IntVar(&limit, "limit", limit, "maximum number, the latest ones")
	events.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	t.flags(events.Flags())
	return events
}

// known refuses a name that is not in names, and lists the names.
func known(names []string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if !slices.Contains(names, args[0]) {
			return fmt.Errorf("show %.120q: there is no such thing; there are %s", args[0], strings.Join(names, ", "))
		}
		return nil
	}
}

// printQuery prints the result of a query, as a table with the values as psql prints them, or as JSON.
func printQuery(ctx context.Context, out io.Writer, conn *pgx.Conn, query string, asJSON bool, args ...any) error {
	var text string
	var head []string
	var rows [][]string
	err := uncompiled(ctx, conn, func(tx pgx.Tx) (err error) {
		if asJSON {
			err = tx.QueryRow(ctx, `SELECT coalesce(jsonb_agg(to_jsonb(q)), '[]')::text FROM (`+query+`) AS q`, args...).Scan(&text)
			return inWords(err)
		}
		head, rows, err = readTable(ctx, tx, query, args...)
		return err
	})
	if err == nil && asJSON {
		fmt.Fprintln(out, text)
		return nil
	}
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		fmt.Fprintln(out, "nothing")
		return nil
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, cells := range append([][]string{head}, rows...) {
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	return table.Flush()
}

// readTable returns the names of a query's columns, and its rows as psql prints them.
func readTable(ctx context.Context, conn querier, query string, args ...any) (head []string, table [][]string, err error) {
	rows, err := conn.Query(ctx, query, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
	if err != nil {
		return nil, nil, inWords(err)
	}
	defer rows.Close()
	for _, f := range rows.FieldDescriptions() {
		head = append(head, strings.ToUpper(f.Name))
	}
	for rows.Next() {
		var cells []string
		for _, v := range rows.RawValues() {
			cells = append(cells, cell(string(v)))
		}
		table = append(table, cells)
	}
	if err := rows.Err(); err != nil {
		return nil, nil, inWords(err)
	}
	return head, table, nil
}

// cell shortens a value and keeps it on one line.
func cell(text string) string {
	const widest = 120
	text = printable(text)
	if runes := []rune(text); len(runes) > widest {
		return string(runes[:widest-1]) + "…"
	}
	return text
}
