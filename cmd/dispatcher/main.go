// Command dispatcher publishes the events of the outbox. Its settings come from the environment: see
// dispatcher --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/build"
	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/logs"
)

func main() { os.Exit(start(os.Args[1:])) }

// start runs the program and returns its exit code.
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
	for _, note := range settings.notes {
		log.Info(note)
	}
	for _, warning := range settings.warnings {
		log.Warn(warning)
	}
	p, problems := newProcess(settings, log)
	if len(problems) > 0 {
		return refuse(problems)
	}
	return p.run()
}

// answer handles command-line arguments and returns the exit code.
func answer(args []string) int {
	switch {
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		help(os.Stdout)
	case len(args) == 1 && args[0] == "--version":
		fmt.Println("dispatcher", build.Version())
	case len(args) == 2 && args[0] == "--abandon":
		return abandon(args[1])
	default:
		return refuse([]string{fmt.Sprintf("argument %s: use --abandon NAME, --help or --version; settings come from the environment",
			env.Quote(strings.Join(args, " ")))})
	}
	return exitStopped
}

// unserved is how long nobody must have served a sink before it can be abandoned. A dispatcher records every 2.5 s that
// it serves its sinks.
const unserved = 20 * time.Second

// abandon removes a sink that nobody serves, and returns the exit code.
func abandon(sink string) int {
	variable := "DISPATCHER_DATABASE_URL"
	if os.Getenv(variable) == "" {
		variable = "DATABASE_URL"
	}
	config, err := database.Parse(os.Getenv(variable))
	if err != nil {
		return refuse([]string{variable + ": " + err.Error()})
	}
	ctx, done := context.WithTimeout(context.Background(), 10*time.Minute)
	defer done()
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		fmt.Fprintln(os.Stderr, "dispatcher:", err)
		return exitDatabase
	}
	defer conn.Close(ctx)
	open, err := delivery.Abandon(ctx, conn, sink, unserved)
	if errors.Is(err, delivery.ErrServed) {
		fmt.Fprintf(os.Stderr, "dispatcher: %v; stop its dispatchers, or take it out of their DISPATCHER_SINKS, and try again\n", err)
		return exitConfig
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dispatcher:", err)
		return exitDatabase
	}
	fmt.Printf("sink %s is gone; %d events were open for it\n", sink, open)
	return exitStopped
}

// refuse prints problems of the configuration and returns the exit code for them.
func refuse(problems []string) int {
	env.Refuse(os.Stderr, "dispatcher", problems)
	return exitConfig
}
