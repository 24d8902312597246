// Package schema finds the schemas that hold an installation, and writes them into addresses.
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

// InAddress returns what a database's address needs after its ? to lead to a schema: options=-csearch_path%3Dname.
// psql and all other clients that are built on libpq accept it; only some accept search_path=name.
func InAddress(schema string) string {
	value := schema
	if !plainName.MatchString(schema) {
		value = pgx.Identifier{schema}.Sanitize()
	}
	value = regexp.MustCompile(`[\s\\]`).ReplaceAllString(value, `\$0`) // the server splits options at blanks
	return "options=" + strings.ReplaceAll(url.QueryEscape("-csearch_path="+value), "+", "%20")
}

// A querier is a connection, a pool or a transaction.
type querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// Installations returns the schemas of the database, except the first one of search_path, that hold what Up creates,
// whoever may use them.
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
