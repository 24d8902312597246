package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/internal/schema"
	"github.com/simple-workflow/simple-workflow/sql"
)

func newMigrateStatus() *cobra.Command {
	var t target
	status := &cobra.Command{
		Use:   "status",
		Short: "List the migrations and when each was applied; exit with 1 if some are missing",
		Args:  takes(0),
		RunE:  func(cmd *cobra.Command, _ []string) error { return migrateStatus(cmd.Context(), cmd.OutOrStdout(), &t) },
	}
	t.flags(status.Flags())
	return status
}

func migrateStatus(ctx context.Context, out io.Writer, t *target) error {
	var steps []sql.Step
	var others []string
	if err := t.with(ctx, func(conn *pgx.Conn) (err error) {
		if steps, err = sql.Status(ctx, conn); err == nil && steps[0].AppliedAt.IsZero() {
			others, err = schema.Installations(ctx, conn)
		}
		return err
	}); err != nil {
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "MIGRATION\tAPPLIED")
	missing := 0
	for _, s := range steps {
		applied := "no"
		if s.AppliedAt.IsZero() {
			missing++
		} else {
			applied = s.AppliedAt.UTC().Format(time.RFC3339)
		}
		fmt.Fprintf(table, "%s\t%s\n", s.Name, applied)
	}
	_ = table.Flush()
	if len(others) > 0 {
		return &failure{fmt.Errorf("nothing is applied in this schema, but there is an installation in %s: name it by --schema, or by ?%s in the address; a second one is made by %s",
			printable(strings.Join(others, ", ")), schema.InAddress(others[0]), t.upCommand())}
	}
	if missing > 0 {
		return &failure{fmt.Errorf("%d of %d migrations are missing; run: %s", missing, len(steps), t.upCommand())}
	}
	return nil
}

// upCommand returns the command that applies the missing migrations. It leaves out the address, which may contain a
// password.
func (t *target) upCommand() string {
	command := "workflowctl migrate up"
	if t.url != "" {
		command += " --database-url …"
	}
	if t.schema != "" {
		command += fmt.Sprintf(" --schema %q", t.schema)
	}
	return command
}
