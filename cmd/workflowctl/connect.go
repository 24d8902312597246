package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/pflag"

	"github.com/simple-workflow/simple-workflow/internal/database"
)

// A target is the database that a command works on, as given on the command line.
type target struct {
	url    string
	schema string
	note   string // about the address
}

func (t *target) flags(flags *pflag.FlagSet) {
	flags.StringVar(&t.url, "database-url", "", "address of the database (default: the variable DATABASE_URL)")
	flags.StringVar(&t.schema, "schema", "", "schema that holds the tables (default: that of the address, or the first of search_path)")
}

// parse checks the target without connecting.
func (t *target) parse() (*pgx.ConnConfig, error) {
	where, address := "--database-url", strings.TrimSpace(t.url)
	if address == "" {
		where, address = "DATABASE_URL", strings.TrimSpace(os.Getenv("DATABASE_URL"))
	}
	config, err := database.Parse(address)
	switch {
	case errors.Is(err, database.ErrNoAddress):
		err = fmt.Errorf("no database is named: use --database-url or set DATABASE_URL, for example to %s", database.Example)
	case err != nil:
		err = fmt.Errorf("%s=%.120q: %w", where, database.Shown(address), err)
	}
	if err := errors.Join(err, checkSchema(t.schema)); err != nil {
		return nil, err
	}
	t.note = database.SearchPath(config)
	if t.schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{t.schema}.Sanitize()
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "workflowctl"
	}
	return config.ConnConfig, nil
}

// checkSchema refuses names that Postgres would refuse or truncate.
func checkSchema(name string) error {
	const longest = 63
	if len(name) > longest || !utf8.ValidString(name) || strings.ContainsRune(name, 0) || strings.HasPrefix(name, "pg_") {
		return fmt.Errorf("--schema=%.120q: use at most %d bytes of UTF-8, not starting with pg_", name, longest)
	}
	return nil
}

// connect opens a connection, and returns an error if the engine cannot work with the server.
func (t *target) connect(ctx context.Context) (*pgx.Conn, error) {
	config, err := t.parse()
	if err != nil {
		return nil, err
	}
	if t.note != "" {
		fmt.Fprintln(os.Stderr, "workflowctl: note:", t.note)
	}
	conn, err := database.Connect(ctx, config)
	if err != nil {
		return nil, &failure{err}
	}
	facts, err := database.Look(ctx, conn)
	if err == nil {
		err = facts.Supported()
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, &failure{err}
	}
	return conn, nil
}

// with calls do with a connection. An error of do is returned as a failure.
func (t *target) with(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := t.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := do(conn); err != nil {
		return &failure{err}
	}
	return nil
}

// uncompiled calls do in one transaction with JIT compilation off. JIT is on by default, and compiling a view takes
// seconds each time, while reading it takes milliseconds. The setting is local to the transaction because a pooler
// may give the session to others.
func uncompiled(ctx context.Context, conn *pgx.Conn, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL jit = off`, pgx.QueryExecModeSimpleProtocol); err != nil {
			return inWords(err)
		}
		return do(tx)
	})
}

// current returns the schema that the connection works in.
func current(ctx context.Context, conn *pgx.Conn) (string, error) {
	var schema *string
	if err := conn.QueryRow(ctx, `SELECT current_schema()`).Scan(&schema); err != nil {
		return "", fmt.Errorf("ask for the current schema: %w", err)
	}
	if schema == nil {
		return "", fmt.Errorf("no schema of search_path exists; name one with --schema")
	}
	return *schema, nil
}
