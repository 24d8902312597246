package main

import (
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/probe"
	"github.com/simple-workflow/simple-workflow/internal/secret"
)

// A settings is a valid config, with the values derived from it.
type settings struct {
	config
	targets  []dispatcher.Target
	pool     *pgxpool.Config
	warnings []string
	notes    []string
}

// load reads and checks the environment without connecting to anything. If it returns problems, s must not
// be used.
func load() (s *settings, problems []string) {
	s = &settings{}
	report := env.Load(&s.config, "DISPATCHER_")
	s.checkSource(report)
	s.checkNames(report)
	probe.Check(report, &s.HTTPAddr, &s.HTTPToken)
	pool, address := database.FromSettings(report, &s.DispatcherURL, &s.DatabaseURL, "workflow-dispatcher")
	s.checkSinks(report)
	if pool != nil && !strings.Contains(address.Value, "pool_max_conns") {
		pool.MaxConns = s.connections()
	}
	s.pool = pool
	s.warnings, s.notes = report.Warnings, report.Notes
	return s, report.Problems
}

// connections returns how many connections a dispatcher needs: for each sink, one that claims, two that
// mark, and one for housekeeping.
func (s *settings) connections() int32 { return int32(4 * max(len(s.targets), 1)) }

func (s *settings) checkSource(report *env.Report) {
	u, err := url.Parse(s.Source.Value)
	if strings.Contains(s.Source.Value, "@") {
		s.Source.Show("(hidden)")
	}
	switch {
	case s.Source.Value == "":
		report.Refuse(&s.Source, "set it to a URI that no other database's events have, such as https://shop.example/billing")
	case err != nil || strings.ContainsFunc(s.Source.Value, func(r rune) bool { return r <= ' ' || r > '~' }):
		report.Refuse(&s.Source, "it is no URI; write it like https://shop.example/billing or /billing")
	case u.User != nil:
		report.Refuse(&s.Source, "it holds a password, and every consumer would see it")
	}
}

func (s *settings) checkNames(report *env.Report) {
	unfit := func(text string) bool {
		return len(text) > 64 || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
	}
	if unfit(s.ID.Value) {
		report.Refuse(&s.ID, "use at most 64 printable characters")
	}
	if unfit(s.WebhookKeyID.Value) {
		report.Refuse(&s.WebhookKeyID, "use at most 64 printable characters")
	}
	if _, err := secret.Key(s.WebhookSecret.Value); err != nil {
		report.Refuse(&s.WebhookSecret, "%s", err)
	}
	for _, name := range s.Elsewhere.Value {
		if !sinkName.MatchString(name) {
			report.Refuse(&s.Elsewhere, "%.60q is no name of a sink", name)
		}
	}
	if s.BackoffBase.Good() && s.BackoffCap.Good() && s.BackoffBase.Value > s.BackoffCap.Value {
		report.Refuse(&s.BackoffBase, "use at most DISPATCHER_BACKOFF_CAP, %s, or raise that", s.BackoffCap.Value)
	}
}

func (s *settings) checkSinks(report *env.Report) {
	specs, problems := parseSinks(s.Sinks.Value)
	for _, problem := range problems {
		report.Refuse(&s.Sinks, "%s", problem)
	}
	if claim := s.Claim.Value; slices.ContainsFunc(specs, func(spec sinkSpec) bool { return claim < 3*quiet[spec.url.Scheme]/2 }) {
		report.Warn(&s.Claim, "only two thirds of it are for publishing, so sinks that are slow to answer are never heard")
	}
	for _, spec := range specs {
		if _, ok := quiet[spec.url.Scheme]; !ok && len(report.Problems) > 0 {
			continue // contact nobody while there are problems
		}
		target, err := spec.target(s)
		if err != nil {
			report.Refuse(&s.Sinks, "%s", err)
			continue
		}
		s.targets = append(s.targets, target)
	}
}
