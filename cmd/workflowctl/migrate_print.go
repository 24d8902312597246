package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/sql"
)

func newMigratePrint() *cobra.Command {
	from := 1
	show := &cobra.Command{
		Use:   "print",
		Short: "Print the migrations as SQL, to apply them with psql",
		Long: `Print the migrations as SQL, to apply them with psql:

  workflowctl migrate print | psql -v ON_ERROR_STOP=1 "$DATABASE_URL"

Each is a transaction, which records itself in workflow_schema as migrate up does.`,
		Args: takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all := sql.Migrations()
			if from < 1 || from > len(all) {
				return fmt.Errorf("--from=%d: use 1 to %d", from, len(all))
			}
			script(cmd.OutOrStdout(), all[from-1:])
			return nil
		},
	}
	show.Flags().IntVar(&from, "from", from, "version of the first migration to print")
	return show
}

// script writes the SQL that sql.Up would execute.
func script(out io.Writer, migrations []sql.Migration) {
	for _, m := range migrations {
		fmt.Fprintf(out, "-- %s\nBEGIN;\n\n", m.Name)
		fmt.Fprintln(out, `CREATE TABLE IF NOT EXISTS workflow_schema (
	version    integer     PRIMARY KEY,
	name       text        NOT NULL,
	sha256     text        NOT NULL,
	applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);`)
		fmt.Fprintf(out, "INSERT INTO workflow_schema (version, name, sha256) VALUES (%d, '%s', '%s');\n\n", m.Version, m.Name, m.SHA256)
		fmt.Fprintf(out, "%s\nCOMMIT;\n\n", m.SQL)
	}
}
