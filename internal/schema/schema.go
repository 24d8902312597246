// Package schema finds the schemas that contain an installation, and adds a schema to a database's address.
package schema

import (
	"context"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_]*$`)

// InAddress returns the query of a database's address that selects a schema: options=-csearch_path%3Dname. psql and
// all other clients that use libpq accept it. search_path=name is accepted by some clients only.
func InAddress(schema string) string {
	value := schema
	if !plainName.MatchString(schema) {
		value = pgx.Identifier{schema}.Sanitize()
	}
	value = regexp.MustCompile(`[\s\\]`).ReplaceAllString(value, `\$0`) // the server splits options at white space
	return "options=" + strings.ReplaceAll(url.QueryEscape("-csearch_path="+value), "+", "%20")
}

// A querier is a connection, a pool or a transaction.
type querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// Installations returns the schemas of the database that contain what sql.Up creates, except the current schema. It
// includes schemas that the role may not use.
func Installations(ctx context.Context, db querier) ([]string, error) {
	rows, _ := db.Query(ctx, `
		SELECT n.nspname::text
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relname = 'workflow_schema' AND c.relkind = 'r' AND n.nspname IS DISTINCT FROM current_schema()
		  AND EXISTS (SELECT FROM pg_catalog.pg_class r WHERE r.relnamespace = n.oid AND r.relname = 'workflow_run')
		ORDER BY 1`)
	schemas, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look for installations in other schemas: %w", err)
	}
	return schemas, nil
}
