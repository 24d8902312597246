package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/internal/schema"
	"github.com/simple-workflow/simple-workflow/sql"
)

// remindAfter is how long a migration may take before up prints what it may be waiting for.
const remindAfter = 3 * time.Second

func newMigrateUp() *cobra.Command {
	var t target
	up := &cobra.Command{
		Use:   "up",
		Short: "Apply the migrations that are missing",
		Long: `Apply the migrations that are missing, each in a transaction of its own. Any number of
these commands may be started at once: one does the work, the others wait for it.`,
		Args: takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.with(cmd.Context(), func(conn *pgx.Conn) error { return migrateUp(cmd.Context(), cmd.OutOrStdout(), conn, t.schema) })
		},
	}
	t.flags(up.Flags())
	return up
}

func migrateUp(ctx context.Context, out io.Writer, conn *pgx.Conn, into string) error {
	if into != "" {
		if err := createSchema(ctx, conn, into); err != nil {
			return err
		}
	}
	name, err := current(ctx, conn)
	if err != nil {
		return err
	}
	before, err := sql.Status(ctx, conn)
	if err != nil {
		return err
	}
	if before[0].AppliedAt.IsZero() {
		others, err := schema.Installations(ctx, conn)
		if err != nil {
			return err
		}
		if len(others) > 0 {
			fmt.Fprintf(out, "note: this database has an installation in %s, too\n", printable(strings.Join(others, ", ")))
		}
	}
	reminder := time.AfterFunc(remindAfter, func() {
		fmt.Fprintln(out, "still running; perhaps waiting for another migration, or for a lock that a session holds")
	})
	err = sql.Up(ctx, conn)
	reminder.Stop()
	// What was applied before an error stays applied.
	after, statusErr := sql.Status(context.WithoutCancel(ctx), conn)
	if statusErr == nil {
		report(out, before, after)
	}
	if err != nil {
		return err
	}
	if statusErr != nil {
		return statusErr
	}
	fmt.Fprintf(out, "schema %q is at version %d\n", name, len(after))
	if name != "public" {
		fmt.Fprintf(out, "programs and psql find it by ?%s in the address\n", schema.InAddress(name))
	}
	return nil
}

func report(out io.Writer, before, after []sql.Step) {
	for i, s := range after {
		if before[i].AppliedAt.IsZero() && !s.AppliedAt.IsZero() {
			fmt.Fprintf(out, "applied %s\n", s.Name)
		}
	}
}

// createSchema creates the schema unless it exists. If several processes do so at once, one creates it while the
// others wait.
func createSchema(ctx context.Context, conn *pgx.Conn, name string) error {
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `
			SELECT pg_advisory_xact_lock(hashtextextended('simple-workflow schema ' || $1, 0))`, name); err != nil {
			return err
		}
		var there bool
		if err := tx.QueryRow(ctx, `
			SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, name).Scan(&there); err != nil || there {
			return err
		}
		_, err := tx.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{name}.Sanitize())
		return err
	})
	if err != nil {
		return fmt.Errorf("create schema %q: %w", name, err)
	}
	return nil
}
