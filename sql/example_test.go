package sql_test

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// A program creates the tables when it starts, or brings them up to date, in a schema of their own.
func ExampleUp() {
	ctx, pool, done := pgtest.Example()
	defer done()
	conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
	if err != nil {
		panic(err)
	}
	defer conn.Close(ctx)
	_, _ = conn.Exec(ctx, `CREATE SCHEMA flows`)
	_, _ = conn.Exec(ctx, `SET search_path = flows`)

	fmt.Println(errors.Is(sql.Check(ctx, conn), sql.ErrBehind))
	fmt.Println(sql.Up(ctx, conn))
	fmt.Println(sql.Check(ctx, conn))
	// Output:
	// true
	// <nil>
	// <nil>
}
