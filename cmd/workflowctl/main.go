// Command workflowctl sets up, inspects and operates the database of simple-workflow.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/simple-workflow/simple-workflow/internal/build"
	"github.com/simple-workflow/simple-workflow/internal/env"
)

// Exit codes.
const (
	exitFailed = 1 // the command was tried and failed
	exitUsage  = 2 // the command line or the environment is wrong; nothing was tried
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	root := newRoot()
	root.SetArgs(numbers(root, os.Args[1:]))
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return
	}
	var failed *failure
	if errors.As(err, &failed) {
		fmt.Fprintln(os.Stderr, "workflowctl:", err)
		os.Exit(exitFailed)
	}
	env.Refuse(os.Stderr, cmd.CommandPath(), strings.Split(err.Error(), "\n"))
	os.Exit(exitUsage)
}

// usage returns an error that says how a command is used.
func usage(cmd *cobra.Command) error {
	if !cmd.HasParent() {
		return fmt.Errorf("use: %s COMMAND", cmd.Use)
	}
	return fmt.Errorf("use: %s %s", cmd.Parent().CommandPath(), cmd.Use)
}

// noCommand refuses a name that is no command of cmd, and suggests similar ones.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	text := fmt.Sprintf("there is no command %.120q", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return errors.New(text)
}

// wrongFlag formats an error about a flag like errors about settings.
func wrongFlag(cmd *cobra.Command, err error) error {
	var value *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &value):
		return fmt.Errorf("--%s=%.120q: use %s", value.GetFlag().Name, value.GetValue(), kinds[value.GetFlag().Value.Type()])
	case errors.As(err, &missing):
		return fmt.Errorf("--%s: give it a value", missing.GetSpecifiedName())
	case errors.As(err, &unknown):
		return fmt.Errorf("%.120q: there is no such flag; %w", "--"+unknown.GetSpecifiedName(), usage(cmd))
	}
	return fmt.Errorf("%w; %w", err, usage(cmd))
}

// kinds describe the values of flags, by pflag's names of their types.
var kinds = map[string]string{
	"int": "a whole number", "float64": "a number", "bool": "true or false", "duration": "a duration such as 500ms, 30s, 5m or 1h30m",
	"string": "a text", "stringSlice": "texts separated by commas",
}

// takes makes a command require n arguments, those that its Use names.
func takes(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usage(cmd)
		}
		return nil
	}
}

// numbers lets negative numbers be given as arguments: it moves flags to the front and puts -- before the arguments,
// whose order it keeps, so that a number is not parsed as a flag.
func numbers(root *cobra.Command, args []string) []string {
	cmd, rest, err := root.Find(args)
	if err != nil || !cmd.HasParent() {
		return args
	}
	path := strings.Fields(cmd.CommandPath())[1:]
	var flags, others []string
	negative := false
	for i := 0; i < len(rest); i++ {
		arg := rest[i]
		_, number := strconv.ParseFloat(arg, 64)
		switch isFlag := strings.HasPrefix(arg, "-") && number != nil; {
		case arg == "--":
			others = append(others, rest[i+1:]...)
			i = len(rest)
		case isFlag && takesValue(cmd, arg) && i+1 < len(rest):
			i++
			flags = append(flags, arg, rest[i])
		case isFlag:
			flags = append(flags, arg)
		default:
			negative = negative || strings.HasPrefix(arg, "-")
			others = append(others, arg)
		}
	}
	if !negative {
		return args
	}
	return slices.Concat(path, flags, []string{"--"}, others)
}

// takesValue reports whether the word after a flag is its value.
func takesValue(cmd *cobra.Command, arg string) bool {
	flag := cmd.Flags().Lookup(strings.TrimPrefix(arg, "--"))
	return flag != nil && flag.NoOptDefVal == ""
}

// A failure is an error of the work itself. All other errors are about the command line or the environment.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "workflowctl",
		Short: "Set up, inspect and operate the database of simple-workflow",
		Long: `Set up, inspect and operate the database of simple-workflow.

Exit codes: 0 done; 1 it was tried and failed, or the schema is behind; 2 the command line
or the environment is wrong.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.Version = build.Version()
	root.SetVersionTemplate("workflowctl {{.Version}}\n")
	root.Args = noCommand
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.SetFlagErrorFunc(wrongFlag)
	root.AddCommand(newMigrate(), newDefine(), newGraph(), newShow(), newEvents(), newTasks(), newTop(), newWhy(), newRedrive(), newRetryIncidents(), newPolicy(), newDoctor(), newRoles(), newVersion())
	root.AddCommand(newActions()...)
	root.AddCommand(newOrders()...)
	return root
}
