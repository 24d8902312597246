package sql

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var (
	//go:embed roles/create.sql
	rolesScript string
	//go:embed roles/bind.sql
	bindScript string
)

// RolesScript returns the SQL that Roles executes, to be read, or to be run with psql by somebody who may create
// roles. An empty schema means the first one of search_path.
func RolesScript(named, schema string) string {
	path := ""
	if schema != "" {
		path = "SET LOCAL search_path = " + pgx.Identifier{schema}.Sanitize() + ";\n"
	}
	return "BEGIN;\n" + path + setting("roles", named) + "\n" + rolesScript + "COMMIT;\n"
}

// Roles creates the roles named_owner, named_enqueue, and so on for _worker, _engine, _dispatcher, _operator, _viewer,
// _tasks and _console, unless they exist. It transfers our objects in the first schema of the connection's search_path
// to the owner role, and grants each of the other roles what it needs (see roles/create.sql). It may be repeated, and
// must be repeated after migrations. The caller needs CREATEROLE, and must own these objects. Roles belong to the whole
// cluster: two installations in one cluster need two names.
func Roles(ctx context.Context, conn *pgx.Conn, named string) error {
	if err := inTx(ctx, conn, setting("roles", named)+rolesScript); err != nil {
		return fmt.Errorf("sql: create roles %s_…: %w", named, err)
	}
	return nil
}

// BindWorker makes a role a worker of plain runs of the given prefixes, each ending with a dot. They replace the
// prefixes it was bound to before. Row-level security hides all other runs from it. If the role does not exist, it is
// created without a login. Roles has to be called first.
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

// setting returns a statement that passes an argument to a script.
func setting(name, value string) string {
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `''`, "\x00", "").Replace(value)
	return fmt.Sprintf("SET LOCAL workflow.%s = E'%s';\n", name, quoted)
}

// inTx executes a script in a transaction. It repeats it after a deadlock, up to ten times: workers that run
// meanwhile take their locks in another order.
func inTx(ctx context.Context, conn *pgx.Conn, script string) (err error) {
	for range 10 {
		err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().Exec(ctx, script).ReadAll()
			return err
		})
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != pgerrcode.DeadlockDetected {
			return err
		}
	}
	return err
}
