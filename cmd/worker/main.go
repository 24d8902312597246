// Command worker leases due runs, executes their handlers and records the outcomes. Its
// settings come from the environment; see worker --help.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/simple-workflow/simple-workflow/cmd/internal/build"
	"github.com/simple-workflow/simple-workflow/cmd/internal/env"
	"github.com/simple-workflow/simple-workflow/cmd/internal/logs"
)

func main() { os.Exit(start(os.Args[1:])) }

// start returns the exit code.
func start(args []string) int {
	if len(args) > 0 {
		return answer(args)
	}
	settings, problems := load()
	if len(problems) > 0 {
		return refuse(problems)
	}
	log := logs.New(os.Stderr, settings.LogLevel.Value, settings.LogFormat.Value)
	slog.SetDefault(log)
	for _, warning := range settings.warnings {
		log.Warn(warning)
	}
	p, problems := newProcess(settings, log)
	if len(problems) > 0 {
		return refuse(problems)
	}
	return p.run()
}

func answer(args []string) int {
	switch {
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		help(os.Stdout)
	case len(args) == 1 && args[0] == "--version":
		fmt.Println("worker", build.Version())
	default:
		return refuse([]string{fmt.Sprintf("argument %s: there is none but --help and --version; settings come from the environment",
			env.Quote(strings.Join(args, " ")))})
	}
	return exitStopped
}

func refuse(problems []string) int {
	fmt.Fprintln(os.Stderr, "worker: does not start, because of its configuration:")
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, "  "+problem)
	}
	fmt.Fprintln(os.Stderr, "See worker --help.")
	return exitConfig
}
