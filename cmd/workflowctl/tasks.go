package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

func newTasks() *cobra.Command {
	var t target
	limit, asJSON := 50, false
	tasks := &cobra.Command{
		Use:   "tasks",
		Short: "Show your open tasks, and those of your groups, the oldest first",
		Args:  takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > 1000 {
				return fmt.Errorf("--limit=%d: use 1 to 1000", limit)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				return printQuery(cmd.Context(), cmd.OutOrStdout(), conn, `SELECT * FROM process_tasks($1::int)`, asJSON, limit)
			})
		},
	}
	tasks.Flags().IntVar(&limit, "limit", limit, "maximum number")
	tasks.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	t.flags(tasks.Flags())
	return tasks
}

// completeOwn completes a task of the role that is logged in. That role may see no run, so the function does not wait
// for one.
func completeOwn(ctx context.Context, out io.Writer, conn *pgx.Conn, payload map[string]any) error {
	var answer string
	if err := conn.QueryRow(ctx, `SELECT process_task_complete($1, $2, $3::text::bigint)`, payload["task"], payload["output"], text(payload["version"])).Scan(&answer); err != nil {
		return inWords(err)
	}
	if answer == "not found" {
		return errors.New("not found among the tasks of this role and its groups; a role that may complete any task names the person with --by")
	}
	if !strings.HasPrefix(answer, "to be completed") {
		return errors.New(answer)
	}
	fmt.Fprintln(out, answer)
	return nil
}

// text returns a JSON number as it was written, or nil for nil.
func text(number any) *string {
	if number == nil {
		return nil
	}
	written := fmt.Sprintf("%s", number)
	return &written
}
