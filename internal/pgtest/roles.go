package pgtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/sql"
)

// RolesName returns a name for the roles of a test (see sql.Roles). Roles belong to the whole server, and are dropped
// when t ends. The url is that of a database made by URL or New.
func RolesName(t testing.TB, url string) (named string) {
	t.Helper()
	named = fmt.Sprintf("t%d", rand.Uint64())
	owner, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, done := context.WithTimeout(context.Background(), patience)
		defer done()
		drop := func() (err error) {
			var all *string
			if err = owner.QueryRow(ctx, `SELECT string_agg(quote_ident(rolname), ', ') FROM pg_roles WHERE rolname ^@ $1`, named+"_").Scan(&all); err == nil && all != nil {
				_, err = owner.PgConn().Exec(ctx, strings.ReplaceAll(`REASSIGN OWNED BY $ TO CURRENT_USER; DROP OWNED BY $; DROP ROLE $`, "$", *all)).ReadAll()
			}
			return err
		}
		err := drop()
		for locked(err) { // a worker of the test may still run, and locks the same tables in its own order
			err = drop()
		}
		if err != nil {
			t.Errorf("drop roles: %v", err)
		}
		_ = owner.Close(ctx)
	})
	return named
}

// Roles creates roles for a database made by New, and returns the name that their names begin with.
func Roles(t testing.TB, pool *pgxpool.Pool) (named string) {
	t.Helper()
	named = RolesName(t, pool.Config().ConnString())
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for range 2 { // it may be repeated
		if err := sql.Roles(t.Context(), conn.Conn(), named); err != nil {
			t.Fatal(err)
		}
	}
	return named
}

// As returns a pool of a new login that was granted the given roles. The roles are given without their prefix, such
// as worker.
func As(t testing.TB, pool *pgxpool.Pool, named string, roles ...string) *pgxpool.Pool {
	t.Helper()
	login := named + "_login_" + strings.Join(roles, "_")
	script := fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD 'secret'`, login)
	for _, role := range roles {
		script += fmt.Sprintf(`; GRANT %s_%s TO %s`, named, role, login)
	}
	owner, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Release()
	if _, err := owner.Conn().PgConn().Exec(t.Context(), script).ReadAll(); err != nil {
		t.Fatal(err)
	}
	config := pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password = login, "secret"
	if os.Getenv("PGTEST_BOUNCER") != "" { // a bouncer knows one user only, so connect to the server directly
		if err := owner.QueryRow(t.Context(), `SELECT host(inet_server_addr()), inet_server_port()`).Scan(&config.ConnConfig.Host, &config.ConnConfig.Port); err != nil {
			t.Fatal(err)
		}
	}
	theirs, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(theirs.Close)
	return theirs
}
