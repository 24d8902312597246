// Package service makes a worker of one's own what the binary worker is: settings from the environment, metrics,
// probes, logs, handlers from a file, retention, processes, and a start that waits for its database.
//
//	func main() {
//		service.Main(service.Program{
//			Prefixes: []string{"billing."},
//			Setup: func(s *service.Setup) error {
//				worker.Handle(s.Mux, "billing.invoice_charge.v1", charge)
//				return nil
//			},
//		})
//	}
//
// The program's --help lists all settings. Whoever wants another set of parts takes package worker, which reads no environment.
package service

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/simple-workflow/simple-workflow/internal/build"
	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/logs"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A Program is what a worker is besides its environment. The zero value is the binary worker.
type Program struct {
	// Name is what the program calls itself, in its messages and by default in leased_by (WORKER_ID). By default it is
	// the name of its file.
	Name string
	// Prefixes are the types to execute where WORKER_TYPE_PREFIXES is not set. None: default.
	Prefixes []string
	// Setup registers the handlers; nil: those of the file WORKER_HANDLERS are all.
	Setup func(*Setup) error
}

// A Setup is what a program's handlers are made with. Program.Setup gets it before the database is asked for anything:
// it must not wait for an answer, because the program starts without one and waits by itself. What its error says,
// a line each, is told together with whatever else is wrong with the settings, and the program ends with 2. (Without an address
// of a database that can be read there is no pool, and Setup is not called before there is one.) Variables
// of the program's own should not start with WORKER_, where those that are unknown are taken for slips of the pen.
type Setup struct {
	// Mux takes the handlers. The types that every worker has are in it already.
	Mux *worker.Mux
	// Pool is for what handlers ask the database for. It opens connections when they are needed, besides those of the
	// worker itself, as many as pool_max_conns in the address says, and closes them when the program ends.
	Pool *pgxpool.Pool
	// Metrics has its collectors served at /metrics.
	Metrics prometheus.Registerer
	// Log is the program's, and slog's default.
	Log *slog.Logger
}

// Main is all of a program's main function: it works as the environment says until SIGTERM or SIGINT, and exits.
func Main(p Program) { os.Exit(Run(p, os.Args[1:])) }

// Run is Main for programs that have something to do afterwards: it returns the exit code. The arguments are those of the
// command line, without the program's name.
func Run(p Program, args []string) int {
	p.Name = cmp.Or(p.Name, filepath.Base(os.Args[0]))
	if len(args) > 0 {
		return p.answer(args)
	}
	settings := load(p)
	log := logs.New(os.Stderr, settings.LogLevel.Value, settings.LogFormat.Value)
	slog.SetDefault(log)
	process, problems := newProcess(settings, log)
	if len(problems) > 0 {
		return p.refuse(problems)
	}
	for _, note := range settings.report.Notes {
		log.Info(note)
	}
	for _, warning := range settings.report.Warnings {
		log.Warn(warning)
	}
	return process.run()
}

func (p Program) answer(args []string) int {
	switch {
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		help(os.Stdout, p)
	case len(args) == 1 && args[0] == "--version":
		fmt.Println(p.Name, build.Version())
	default:
		return p.refuse([]string{fmt.Sprintf("argument %s: there is none but --help and --version; settings come from the environment",
			env.Quote(strings.Join(args, " ")))})
	}
	return exitStopped
}

func (p Program) refuse(problems []string) int {
	env.Refuse(os.Stderr, p.Name, problems)
	return exitConfig
}
