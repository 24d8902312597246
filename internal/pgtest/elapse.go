package pgtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Elapse lets d pass for every row: in one transaction, it moves all timestamptz columns of all tables of the current
// schema back by d, to the microsecond. It does not change null, infinity and the table workflow_schema.
//
// Triggers of users do not fire, and are enabled afterwards. While other sessions write, Elapse waits for them to
// finish, up to as long as Await does; it gives way rather than make them fail in a deadlock. It cannot move a
// timestamp that a foreign key refers to.
func Elapse(t testing.TB, pool *pgxpool.Pool, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	poll(patience, func() bool {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			return moveBack(ctx, tx, d)
		})
		return !locked(err)
	})
	if err != nil {
		t.Fatalf("let %v elapse: %v", d, err)
	}
}

// locked reports whether err only means that other sessions hold locks.
func locked(err error) bool {
	const notAvailable, deadlock = "55P03", "40P01"
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == notAvailable || pg.Code == deadlock)
}

type table struct {
	Name    string
	Columns []string
}

func moveBack(ctx context.Context, tx pgx.Tx, d time.Duration) error {
	tables, err := timedTables(ctx, tx)
	if err != nil || len(tables) == 0 {
		return err
	}
	var names, statements []string
	for _, t := range tables {
		names = append(names, t.Name)
		statements = append(statements, t.moveBack(d))
	}
	// The timeout is well below PostgreSQL's deadlock_timeout, after which PostgreSQL would choose a victim.
	script := fmt.Sprintf(`
		SET LOCAL lock_timeout = '100ms';
		LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE;
		SET CONSTRAINTS ALL DEFERRED;
		%s`, strings.Join(names, ", "), strings.Join(statements, "\n"))
	_, err = tx.Exec(ctx, script, pgx.QueryExecModeSimpleProtocol)
	return err
}

// timedTables returns the tables that have timestamps. A partition is moved
// with its parent.
func timedTables(ctx context.Context, tx pgx.Tx) ([]table, error) {
	rows, err := tx.Query(ctx, `
		SELECT
			format('%I.%I', n.nspname, c.relname) AS name,
			array_agg(quote_ident(a.attname) ORDER BY a.attnum) AS columns
		FROM pg_namespace n
			JOIN pg_class c ON c.relnamespace = n.oid
			JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE n.nspname = current_schema()
			AND c.relname <> 'workflow_schema'
			AND c.relkind IN ('r', 'p')
			AND NOT c.relispartition
			AND a.atttypid = 'timestamptz'::regtype
			AND a.attnum > 0
			AND NOT a.attisdropped
			AND a.attgenerated = ''
		GROUP BY n.nspname, c.relname
		ORDER BY c.relname`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[table])
}

func (t table) moveBack(d time.Duration) string {
	var sets []string
	for _, column := range t.Columns {
		sets = append(sets, fmt.Sprintf("%s = %[1]s - '%d microseconds'::interval", column, d.Microseconds()))
	}
	return fmt.Sprintf(`
		ALTER TABLE %[1]s DISABLE TRIGGER USER;
		UPDATE %[1]s SET %[2]s;
		SET CONSTRAINTS ALL IMMEDIATE;
		ALTER TABLE %[1]s ENABLE TRIGGER USER;`, t.Name, strings.Join(sets, ", "))
}
