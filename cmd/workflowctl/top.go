package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// pieces are what top shows, one below the other.
var pieces = []struct{ title, query string }{
	{"ends, by the second", `SELECT status, sum(per_second) AS per_second, sum(of_runs) AS of_runs, min(latest) AS latest FROM workflow_rate GROUP BY status ORDER BY status DESC`},
	{"waits", `SELECT type, due || CASE WHEN or_more THEN '+' ELSE '' END AS due, workflow_span(oldest) AS oldest, coalesce(covered_by, 'NOBODY') AS covered_by, paused_by
	           FROM workflow_waiting WHERE due > 0 ORDER BY workflow_waiting.oldest DESC LIMIT 10`},
	{"works, the longest first", `SELECT id, type, leased_by, workflow_span(since) AS since, attempt || ' of ' || max_attempts AS attempt FROM workflow_working LIMIT 8`},
	{"fails", `SELECT type, code, failed, workflow_span(workflow_age(latest)) AS ago, left(last_error, 60) AS last_error FROM workflow_failing ORDER BY latest DESC LIMIT 5`},
	{"workers", `SELECT name, array_to_string(prefixes, ',') AS prefixes, running || ' of ' || concurrency AS running, host, workflow_span(unseen) AS unseen FROM workflow_live_worker ORDER BY name LIMIT 12`},
	{"outbox", `SELECT sink, CASE WHEN at_least THEN 'at least ' ELSE '' END || open AS open, workflow_span(oldest) AS oldest, failing, parked FROM outbox_lag ORDER BY sink LIMIT 6`},
	{"needs you", `SELECT instance_id, code, node, workflow_span(workflow_age(created_at)) AS since FROM incident WHERE resolved_at IS NULL ORDER BY created_at LIMIT 5`},
}

func newTop() *cobra.Command {
	var t target
	every, once := 2*time.Second, false
	top := &cobra.Command{
		Use:   "top",
		Short: "Watch what waits, runs and fails, live",
		Args:  takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 200*time.Millisecond {
				return fmt.Errorf("--every=%v: use 200ms or more", every)
			}
			if !once && !isTerminal(cmd.OutOrStdout()) {
				return errors.New("top wants a terminal; use --once, or workflowctl show WHAT")
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				for {
					screen, err := drawTop(cmd.Context(), conn)
					if err != nil && cmd.Context().Err() != nil {
						return nil // it was ended
					}
					if err != nil {
						return err
					}
					if once {
						fmt.Fprint(cmd.OutOrStdout(), screen)
						return nil
					}
					fmt.Fprint(cmd.OutOrStdout(), "\x1b[H\x1b[2J"+screen)
					select {
					case <-cmd.Context().Done():
						return nil
					case <-time.After(every):
					}
				}
			})
		},
	}
	top.Flags().DurationVar(&every, "every", every, "how often it is drawn anew")
	top.Flags().BoolVar(&once, "once", once, "draw it once and end")
	t.flags(top.Flags())
	return top
}

func drawTop(ctx context.Context, conn *pgx.Conn) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s\n", conn.Config().Database, time.Now().Format(time.TimeOnly))
	for _, p := range pieces {
		fmt.Fprintf(&b, "\n%s\n", p.title)
		if err := printQuery(ctx, &b, conn, p.query, false); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

// isTerminal reports whether somebody watches.
func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
