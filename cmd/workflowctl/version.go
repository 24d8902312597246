package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/internal/build"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version and the schema version it works with",
		Args:  takes(0),
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "workflowctl", build.Version())
		},
	}
}
