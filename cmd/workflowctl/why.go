package main

import (
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

func newWhy() *cobra.Command {
	var t target
	why := &cobra.Command{
		Use:   "why ID",
		Short: "Say what a run, or an instance of a process, waits for, and what to do",
		Args:  takes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := uuid.Parse(args[0])
			if err != nil {
				return fmt.Errorf("%.120q is no id of a run or an instance: use a uuid", args[0])
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				var text string
				if err := conn.QueryRow(cmd.Context(), `
					SELECT CASE WHEN EXISTS (SELECT FROM process_instance WHERE id = $1) THEN process_why($1) ELSE workflow_why($1) END`, id).Scan(&text); err != nil {
					return inWords(err)
				}
				fmt.Fprintln(cmd.OutOrStdout(), printable(text))
				return nil
			})
		},
	}
	t.flags(why.Flags())
	return why
}
