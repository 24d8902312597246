// Package service gives a worker program of one's own what the binary worker has: settings from the
// environment, metrics, probes, logs, handlers from a file, retention, processes, and a start that waits for
// the database.
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
// The program's --help lists all settings. To combine the parts differently, use package worker, which reads no
// environment.
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

// A Program describes a worker program. The zero value is the binary worker.
type Program struct {
	// Name is the name of the program in its messages, and the default of WORKER_ID, which is shown in
	// leased_by. Default: the name of the executable file.
	Name string
	// Prefixes are the type prefixes to execute if WORKER_TYPE_PREFIXES is not set. If there are none, the
	// program executes the types under "default.".
	Prefixes []string
	// Setup registers the handlers. If it is nil, the only handlers are those of the file WORKER_HANDLERS.
	Setup func(*Setup) error
}

// A Setup is what a program needs to make its handlers. Program.Setup is called before the program has
// connected to the database. It must not wait for the database: the program starts without one, and waits
// later.
//
// Each line of Setup's error is printed together with all other problems of the settings, and the program exits
// with code 2. Without a readable database address there is no pool, and Setup is not called.
//
// The program's own variables should not start with WORKER_: unknown variables with that prefix cause warnings.
type Setup struct {
	// Mux takes the handlers. The built-in types are registered already.
	Mux *worker.Mux
	// Pool is for handlers to use. It opens connections on demand, in addition to the worker's own, up to
	// pool_max_conns of the address. It is closed when the program ends.
	Pool *pgxpool.Pool
	// Metrics registers collectors that are served at /metrics.
	Metrics prometheus.Registerer
	// Log is the program's logger. It is also slog's default.
	Log *slog.Logger
}

// Main is the whole main function of a program. It works until SIGTERM or SIGINT, and exits.
func Main(p Program) { os.Exit(Run(p, os.Args[1:])) }

// Run is Main for programs that have something to do afterwards. It returns the exit code. args are the command
// line arguments without the program's name.
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
