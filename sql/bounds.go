package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// prepare has what comes before some migrations, in transactions of its own: a migration is one
// transaction, which must not hold tables, or a snapshot, for as long as all rows take.
var prepare = map[string]func(context.Context, *pgx.Conn) error{
	"0022_bounded.sql":      addBounds,
	"0023_bounds_valid.sql": validateBounds,
}

const (
	mendBatch  = 1000                   // rows that are looked at in a transaction
	mendTries  = 3                      // how often a table is gone through while rows in it are locked
	lockPause  = 500 * time.Millisecond // in which others go on
	namedStuck = 5                      // rows that an error names
)

var lockTries = 60 // of two seconds each

// addBounds brings rows back within the bounds of their columns, and adds the CHECKs that keep
// them there, one table after the other. It returns an error that names rows which are not over and
// have no nearest value, and what to do about each.
func addBounds(ctx context.Context, conn *pgx.Conn) error {
	return eachTable(ctx, conn, `SELECT DISTINCT relation FROM workflow_bound_check WHERE valid IS NULL ORDER BY 1`, func(table string) error {
		if err := mend(ctx, conn, table); err != nil {
			return err
		}
		return patiently(ctx, conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT workflow_add_bounds_v1($1)`, table)
			return err
		})
	})
}

// validateBounds looks at rows from before. What some of them do not keep stays as it is:
// doctor tells of that.
func validateBounds(ctx context.Context, conn *pgx.Conn) error {
	return eachTable(ctx, conn, `SELECT DISTINCT relation FROM workflow_bound_check WHERE NOT valid ORDER BY 1`, func(table string) error {
		return patiently(ctx, conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT workflow_validate_bounds_v1($1)`, table)
			return err
		})
	})
}

func eachTable(ctx context.Context, conn *pgx.Conn, query string, do func(table string) error) error {
	rows, _ := conn.Query(ctx, query)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("read which bounds there are: %w", err)
	}
	for _, table := range tables {
		if err := do(table); err != nil {
			return fmt.Errorf("bounds of %s: %w", table, err)
		}
	}
	return nil
}

// mend goes through a table, a batch in a transaction.
func mend(ctx context.Context, conn *pgx.Conn, table string) error {
	for try := range mendTries {
		var after []byte
		stuck := 0
		for first := true; first || after != nil; first = false {
			var next []byte
			var left int
			err := patiently(ctx, conn, func(tx pgx.Tx) error {
				return tx.QueryRow(ctx, `SELECT next, stuck FROM workflow_mend_v1($1, $2, $3)`, table, after, mendBatch).Scan(&next, &left)
			})
			if err != nil {
				return fmt.Errorf("bring rows back within their bounds: %w", err)
			}
			after = next // not before it is committed
			stuck += left
		}
		if stuck == 0 {
			return nil
		}
		if try == mendTries-1 {
			break
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
	return stuckRows(ctx, conn, table)
}

// stuckRows says which rows are beyond a bound, and what to do.
func stuckRows(ctx context.Context, conn *pgx.Conn, table string) error {
	rows, _ := conn.Query(ctx, `
		SELECT format('%s %s: %s is %s, allowed is %s', "table", key, "column", value, allowed), fix
		FROM workflow_out_of_bounds($1, 1000) WHERE open`, table)
	type stuck struct{ Row, Fix string }
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[stuck])
	if err != nil {
		return fmt.Errorf("read which rows are beyond their bounds: %w", err)
	}
	if len(all) == 0 {
		return errors.New("rows were locked for long; try again")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d values of rows that are not over are beyond their bounds and cannot be mended here; do what follows, and then: workflowctl migrate up", len(all))
	for _, s := range all[:min(len(all), namedStuck)] {
		fmt.Fprintf(&b, "\n%s\n  → %s", s.Row, s.Fix)
	}
	if len(all) > namedStuck {
		fmt.Fprintf(&b, "\nand others: SELECT * FROM workflow_out_of_bounds('%s', 1000)", table)
	}
	return errors.New(b.String())
}

// patiently does something in a transaction of its own, in which no other migrates. It is done again where rows or
// tables are locked for two seconds, behind which all others would wait, or where it was in a deadlock: who works
// there meanwhile takes locks in an order of its own.
func patiently(ctx context.Context, conn *pgx.Conn, do func(tx pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := pgx.BeginTxFunc(ctx, conn, upOptions, func(tx pgx.Tx) error {
			if err := lockMigrations(ctx, tx); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'`); err != nil {
				return err
			}
			return do(tx)
		})
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || !slices.Contains([]string{"55P03", "40P01"}, pg.Code) {
			return err
		}
		if try == lockTries {
			return fmt.Errorf("locked by others, %d times in a row; end their transactions (pg_stat_activity names them) and try again: %w", try, err)
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(lockPause):
		return nil
	}
}
