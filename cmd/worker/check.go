package main

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/cmd/internal/database"
	"github.com/simple-workflow/simple-workflow/cmd/internal/env"
	"github.com/simple-workflow/simple-workflow/cmd/internal/probe"
	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/worker"
)

// ownConnections is how many connections the process needs besides the worker's own.
const ownConnections = 2

// A settings is a config that is in order, with what was read because of it.
type settings struct {
	config
	prefixes []string
	bindings []handlers.Binding
	pool     *pgxpool.Config
	warnings []string
}

// load reads the environment and checks it without connecting to anything. If problems
// are returned, the settings are of no use.
func load() (s *settings, problems []string) {
	s = &settings{}
	report := env.Load(&s.config, "WORKER_")
	s.checkDatabase(report)
	s.checkPrefixes(report)
	s.checkName(report)
	s.checkTimes(report)
	probe.Check(report, &s.HTTPAddr, &s.HTTPToken)
	s.checkHandlers(report)
	s.checkFiles(report)
	s.warnings = report.Warnings
	if s.Strict.Good() && s.Strict.Value {
		report.Problems = slices.Concat(report.Problems, report.Warnings, s.unserved())
	}
	return s, report.Problems
}

func (s *settings) checkDatabase(report *env.Report) {
	pool, address := database.FromSettings(report, &s.WorkerDatabaseURL, &s.DatabaseURL, "workflow-worker")
	if pool == nil {
		return
	}
	if need := worker.Connections + ownConnections; strings.Contains(address.Value, "pool_max_conns") && int(pool.MaxConns) < need {
		report.Refuse(address, "pool_max_conns is %d; use %d or more (%d for the worker, %d for the rest), or remove it",
			pool.MaxConns, need, worker.Connections, ownConnections)
	}
	pool.MaxConns = ownConnections
	pool.MinConns, pool.MinIdleConns = 0, 0
	s.pool = pool
}

func (s *settings) checkPrefixes(report *env.Report) {
	if !s.Prefixes.Good() {
		return
	}
	prefixes, err := worker.Prefixes(s.Prefixes.Value)
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

// unserved returns the prefixes whose runs have no handler here.
func (s *settings) unserved() (list []string) {
	for _, prefix := range s.prefixes {
		served := slices.ContainsFunc(builtIn, func(b string) bool { return overlap(b, prefix) })
		for _, b := range s.bindings {
			served = served || overlap(b.Pattern, prefix)
		}
		if !served {
			list = append(list, fmt.Sprintf("WORKER_TYPE_PREFIXES: no handler is registered for %s; add one to the file WORKER_HANDLERS, "+
				"or remove it", prefix))
		}
	}
	return list
}

// covers reports whether runs of the pattern can be leased.
func (s *settings) covers(pattern string) bool {
	return slices.ContainsFunc(s.prefixes, func(prefix string) bool { return overlap(pattern, prefix) })
}

// overlap reports whether a type can be under the prefix and belong to the pattern.
func overlap(pattern, prefix string) bool {
	return strings.HasPrefix(pattern, prefix) || strings.HasSuffix(pattern, ".") && strings.HasPrefix(prefix, pattern)
}

// patterns returns the types and prefixes that handlers are registered for.
func (s *settings) patterns() (list []string) {
	for _, b := range builtIn {
		if s.covers(b) {
			list = append(list, b)
		}
	}
	if s.Processes.Value {
		list = append(list, graph.Prefix)
	}
	for _, b := range s.bindings {
		list = append(list, b.Pattern)
	}
	return list
}
