// Command workflowctl looks after the database of simple-workflow.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFailed = 1 // it was tried, and the answer is no
	exitUsage  = 2 // the command line or the environment is wrong; nothing was tried
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	root := newRoot()
	err := root.ExecuteContext(ctx)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "workflowctl:", err)
	var failed *failure
	if errors.As(err, &failed) {
		os.Exit(exitFailed)
	}
	os.Exit(exitUsage)
}

// A failure is an error of the work itself. All others are about how it was asked for.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "workflowctl",
		Short: "Look after the database of simple-workflow",
		Long: `Look after the database of simple-workflow.

Exit codes: 0 done; 1 it was tried and failed, or the schema is behind; 2 the command line
or the environment is wrong.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(newMigrate(), newDefine(), newGraph(), newShow(), newTop(), newWhy(), newRedrive(), newDoctor(), newRoles(), newVersion())
	root.AddCommand(newActions()...)
	return root
}
