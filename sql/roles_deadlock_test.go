package sql_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// A deadlock between Roles and workers that take their locks in another order is no error: Roles repeats the
// transaction.
func TestRolesAfterADeadlock(t *testing.T) {
	pool := pgtest.New(t)
	named := pgtest.RolesName(t, pool.Config().ConnString())
	ctx := t.Context()
	maker, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer maker.Release()
	other, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Release()
	// A session that has waited for three seconds looks for a deadlock, and becomes its victim. Here that is the one
	// that makes roles.
	if _, err := maker.Exec(ctx, `SET deadlock_timeout = '3s'`); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(ctx, `SET deadlock_timeout = '30s'; BEGIN; LOCK workflow_run IN ACCESS SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() { made <- sql.Roles(ctx, maker.Conn(), named) }()
	pgtest.Blocked(t, pool, 1)
	var held string
	if err := other.QueryRow(ctx, `SELECT l.relation::regclass::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
		WHERE l.pid = $1 AND l.granted AND l.mode = 'AccessExclusiveLock' AND c.relkind = 'r' AND l.relation <> 'workflow_run'::regclass LIMIT 1`, maker.Conn().PgConn().PID()).Scan(&held); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(ctx, `LOCK `+held+` IN ACCESS SHARE MODE; COMMIT`); err != nil {
		t.Fatalf("the one that should go on: %v", err)
	}
	if err := <-made; err != nil {
		t.Error(err)
	}
}
