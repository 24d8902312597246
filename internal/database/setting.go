package database

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/session"
)

// FromSettings returns the configuration of a pool for the address in own, or else in common, and the
// one of them that was used. It refuses an address that cannot be one, and then returns nil. The
// sessions are called by the name of the application, unless the address gives them another. All that
// connect with a copy of the configuration are paced together: see session.Pace.
func FromSettings(report *env.Report, own, common *env.String, application string) (pool *pgxpool.Config, used *env.String) {
	used = common
	if own.Value != "" {
		used = own
	}
	if used.Value != "" {
		used.Show(Shown(used.Value))
	}
	pool, err := Parse(used.Value)
	if err != nil {
		report.Refuse(used, "%s", err)
		return nil, used
	}
	if Plaintext(pool) {
		report.Warn(used, "the connection may go over the network without encryption; add sslmode=verify-full, or at least require")
	}
	if note := SearchPath(pool); note != "" {
		report.Note(used, "%s", note)
	}
	if pool.ConnConfig.RuntimeParams["application_name"] == "" {
		pool.ConnConfig.RuntimeParams["application_name"] = application
	}
	session.Pace(pool.ConnConfig)
	return pool, used
}
