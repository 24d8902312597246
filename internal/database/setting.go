package database

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/session"
)

// FromSettings returns the configuration of a pool for the address in own, or else in common, and which of the
// two it used. If the address is wrong, it reports that and returns a nil pool. application is the
// application_name of the sessions, unless the address sets one. All connections made with a copy of the
// configuration are paced together, see session.Pace.
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
