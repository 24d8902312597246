package sql

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var (
	//go:embed roles/create.sql
	rolesScript string
	//go:embed roles/bind.sql
	bindScript string
)

// RolesScript returns what Roles executes, to be read, or run with psql by somebody who may create
// roles. An empty schema is the first one of search_path.
func RolesScript(named, schema string) string {
	path := ""
	if schema != "" {
		path = "SET LOCAL search_path = " + pgx.Identifier{schema}.Sanitize() + ";\n"
	}
	return "BEGIN;\n" + path + setting("roles", named) + "\n" + rolesScript + "COMMIT;\n"
}

// Roles creates the roles named_owner, _enqueue, _worker, _engine, _dispatcher, _operator, _viewer,
// _tasks and _console, unless they are there, hands what is ours in the first schema of the connection's
// search_path over to the owner, and grants each of the others what it needs: see roles/create.sql. It
// may be repeated, and has to be after migrations. Whoever calls it needs CREATEROLE, and must own
// what is there. Roles belong to the whole cluster: two installations in one need two names.
func Roles(ctx context.Context, conn *pgx.Conn, named string) error {
	if err := inTx(ctx, conn, setting("roles", named)+rolesScript); err != nil {
		return fmt.Errorf("sql: create roles %s_…: %w", named, err)
	}
	return nil
}

// BindWorker has a role be a worker of plain runs of some prefixes, each ending with a dot, instead of
// those it was bound to before. Row-level security hides all other runs from it. The role is created
// without a login if it is not there. See Roles, which comes first.
func BindWorker(ctx context.Context, conn *pgx.Conn, named, role string, prefixes []string) error {
	if len(prefixes) == 0 {
		return errors.New("sql: bind a worker: no prefix is named")
	}
	settings := setting("roles", named) + setting("bind_role", role) + setting("bind_prefixes", strings.Join(prefixes, ","))
	if err := inTx(ctx, conn, settings+bindScript); err != nil {
		return fmt.Errorf("sql: bind role %s to %s: %w", role, strings.Join(prefixes, ", "), err)
	}
	return nil
}

// setting returns a statement that gives a script its argument.
func setting(name, value string) string {
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `''`, "\x00", "").Replace(value)
	return fmt.Sprintf("SET LOCAL workflow.%s = E'%s';\n", name, quoted)
}

// inTx executes a script in a transaction. After a deadlock it does so again, ten times at most: workers that go on meanwhile take
// their locks in another order.
func inTx(ctx context.Context, conn *pgx.Conn, script string) (err error) {
	for range 10 {
		err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().Exec(ctx, script).ReadAll()
			return err
		})
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "40P01" {
			return err
		}
	}
	return err
}
