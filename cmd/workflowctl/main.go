// Command workflowctl looks after the database of simple-workflow.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/cmd/internal/build"
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
	root.SetArgs(numbers(os.Args[1:]))
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

// usage says how a command is used.
func usage(cmd *cobra.Command) error {
	if !cmd.HasParent() {
		return fmt.Errorf("use: %s COMMAND, see %s --help", cmd.Use, cmd.Use)
	}
	return fmt.Errorf("use: %s %s, see %s --help", cmd.Parent().CommandPath(), cmd.Use, cmd.CommandPath())
}

// takes has a command take n arguments, those that its Use names.
func takes(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usage(cmd)
		}
		return nil
	}
}

// numbers has a negative number taken for what it is, and not for a flag: it comes last, after --.
func numbers(args []string) []string {
	var others, negative []string
	for i, arg := range args {
		if arg == "--" {
			others = append(others, args[i:]...)
			break
		}
		ofFlag := i > 0 && strings.HasPrefix(args[i-1], "--") && !strings.Contains(args[i-1], "=")
		if _, err := strconv.Atoi(arg); err == nil && strings.HasPrefix(arg, "-") && !ofFlag {
			negative = append(negative, arg)
		} else {
			others = append(others, arg)
		}
	}
	if len(negative) == 0 {
		return args
	}
	return append(append(others, "--"), negative...)
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
	root.Version = build.Version()
	root.SetVersionTemplate("workflowctl {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return fmt.Errorf("%w; %w", err, usage(cmd)) })
	root.AddCommand(newMigrate(), newDefine(), newGraph(), newShow(), newTop(), newWhy(), newRedrive(), newDoctor(), newRoles(), newVersion())
	root.AddCommand(newActions()...)
	return root
}
