package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func newMigrate() *cobra.Command {
	migrate := &cobra.Command{
		Use:   "migrate",
		Short: "Create the schema or bring it up to date",
		Args:  noCommand,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("migrate does nothing by itself: use migrate up, migrate status or migrate print")
		},
	}
	migrate.AddCommand(newMigrateUp(), newMigrateStatus(), newMigratePrint())
	return migrate
}
