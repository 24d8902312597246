package service

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/probe"
	"github.com/simple-workflow/simple-workflow/worker"
)

// ownConnections is how many connections the process needs besides the worker's own.
const ownConnections = 2

// A settings is a config that is in order, with what was read because of it.
type settings struct {
	config
	program  Program
	report   *env.Report
	prefixes []string
	bindings []handlers.Binding
	pool     *pgxpool.Config // for the engine's needs; nil if there is no address
	own      *pgxpool.Config // for the handlers
}

// load reads the environment and checks it without connecting to anything. If the report has problems, the settings are
// of no use but to find more of them.
func load(p Program) *settings {
	s := &settings{config: *p.config(), program: p}
	report := env.Load(&s.config, "WORKER_")
	s.report = report
	s.checkDatabase(report)
	s.checkPrefixes(report)
	s.checkName(report)
	s.checkTimes(report)
	probe.Check(report, &s.HTTPAddr, &s.HTTPToken)
	if s.HTTPComplete.Value && s.HTTPAddr.Value == "" {
		report.Refuse(&s.HTTPComplete, "there is no address to take it at; set WORKER_HTTP_ADDR, or leave this out")
	}
	s.checkHandlers(report)
	s.checkFiles(report)
	if s.strict() {
		report.Problems = append(report.Problems, report.Warnings...)
	}
	return s
}

func (s *settings) strict() bool { return s.Strict.Good() && s.Strict.Value }

func (s *settings) checkDatabase(report *env.Report) {
	pool, address := database.FromSettings(report, &s.WorkerDatabaseURL, &s.DatabaseURL, "workflow-worker")
	if pool == nil {
		return
	}
	if need := worker.Connections + ownConnections; strings.Contains(address.Value, "pool_max_conns") && int(pool.MaxConns) < need {
		report.Refuse(address, "pool_max_conns is %d; use %d or more (%d for the worker, %d for the rest), or remove it",
			pool.MaxConns, need, worker.Connections, ownConnections)
	}
	pool.MinConns, pool.MinIdleConns = 0, 0
	s.own = pool.Copy()
	pool.MaxConns = ownConnections
	s.pool = pool
}

func (s *settings) checkPrefixes(report *env.Report) {
	if !s.Prefixes.Good() {
		return
	}
	prefixes, err := naming.Prefixes(s.Prefixes.Value)
	if err != nil {
		for _, problem := range strings.Split(err.Error(), "\n") {
			report.Refuse(&s.Prefixes, "%s", problem)
		}
		return
	}
	if len(prefixes) < len(s.Prefixes.Value) {
		report.Warn(&s.Prefixes, "some are given twice or covered by others; these are enough: %s", strings.Join(prefixes, ","))
	}
	s.prefixes = prefixes
}

func (s *settings) checkName(report *env.Report) {
	id := s.ID.Value
	if len(id) > 64 || !utf8.ValidString(id) || strings.ContainsFunc(id, func(r rune) bool { return !unicode.IsPrint(r) }) {
		report.Refuse(&s.ID, "use at most 64 printable characters")
	}
}

func (s *settings) checkTimes(report *env.Report) {
	if third := s.Lease.Value / 3; s.Lease.Good() && s.Heartbeat.Good() && s.Heartbeat.Value > third {
		report.Refuse(&s.Heartbeat, "use at most a third of WORKER_LEASE, %s", third)
	}
	if s.BackoffBase.Good() && s.BackoffCap.Good() && s.BackoffBase.Value > s.BackoffCap.Value {
		report.Refuse(&s.BackoffBase, "use at most WORKER_BACKOFF_CAP, %s, or raise that", s.BackoffCap.Value)
	}
	if s.Lease.Good() && s.ShutdownGrace.Good() && s.ShutdownGrace.Value > s.Lease.Value {
		report.Warn(&s.ShutdownGrace, "it is longer than WORKER_LEASE, %s; heartbeats go on during the drain, "+
			"and whatever stops this process must wait for as long", s.Lease.Value)
	}
}

func (s *settings) checkHandlers(report *env.Report) {
	path := s.Handlers.Value
	if path == "" {
		return
	}
	bindings, err := handlers.Load(path)
	if err != nil {
		for _, problem := range strings.Split(err.Error(), "\n") {
			report.Refuse(&s.Handlers, "%s", problem)
		}
		return
	}
	s.bindings = bindings
	for _, b := range bindings {
		if slices.Contains(builtIn, b.Pattern) {
			report.Refuse(&s.Handlers, "%s is built in; remove it from the file", b.Pattern)
		}
	}
	if !s.Strict.Value || s.prefixes == nil {
		return // the worker warns by itself
	}
	for _, b := range bindings {
		if !s.covers(b.Pattern) {
			report.Warn(&s.Handlers, "%s is never used, no element of WORKER_TYPE_PREFIXES covers it", b.Pattern)
		}
	}
}

// checkFiles looks whether there are file descriptors for what may be open at once.
func (s *settings) checkFiles(report *env.Report) {
	const perRun, others = 4, 100 // pipes and a process, or a connection; the database, HTTP, logs
	need := uint64(others + perRun*s.Concurrency.Value)
	if limit, ok := fileLimit(); ok && limit < need && len(s.bindings) > 0 {
		report.Warn(&s.Concurrency, "the process may open %d files, and that many runs can need %d; "+
			"raise the limit (ulimit -n %[2]d), or execute fewer at once", limit, need)
	}
}

// unserved returns the prefixes whose runs have no handler here, and the program's handlers that no prefix covers.
func (s *settings) unserved(patterns []string) (list []string) {
	for _, prefix := range s.prefixes {
		if !slices.ContainsFunc(patterns, func(one string) bool { return naming.Overlap(prefix, one) }) {
			list = append(list, fmt.Sprintf("WORKER_TYPE_PREFIXES: no handler is registered for %s; add one to the file WORKER_HANDLERS, "+
				"or remove it", prefix))
		}
	}
	for _, one := range patterns {
		inFile := slices.ContainsFunc(s.bindings, func(b handlers.Binding) bool { return b.Pattern == one }) // warned about with the file
		if !inFile && !strings.HasPrefix(one, naming.Engine) && s.prefixes != nil && !s.covers(one) {
			list = append(list, fmt.Sprintf("WORKER_TYPE_PREFIXES: the handler of %s is never used; add a prefix that covers it", one))
		}
	}
	return list
}

// covers reports whether runs of a pattern can be leased.
func (s *settings) covers(one string) bool {
	return slices.ContainsFunc(s.prefixes, func(prefix string) bool { return naming.Overlap(prefix, one) })
}
