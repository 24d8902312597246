package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// prepare has the work that precedes some migrations, in transactions of its own. A migration is one transaction, and
// must not hold tables, or a snapshot, for as long as reading all rows takes.
var prepare = map[string]func(context.Context, *pgx.Conn) error{
	"0022_bounded.sql":      addBounds,
	"0023_bounds_valid.sql": validateBounds,
}

const (
	mendBatch  = 1000                   // rows that one transaction looks at
	mendTries  = 3                      // how often a table is scanned while some of its rows are locked
	lockPause  = 500 * time.Millisecond // lets others continue
	namedStuck = 5                      // the most rows that an error names
)

var lockTries = 60 // of two seconds each

// addBounds brings rows back within the bounds of their columns, and adds the CHECKs that keep them there, one table
// after another. A value out of bounds becomes the nearest value within them. If a row that is not over has a value for
// which there is no nearest one, addBounds returns an error that names such rows, and what to do about each.
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

// validateBounds validates the CHECKs for existing rows. A CHECK that some of them violate stays not valid, and
// doctor reports it.
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

// mend goes through a table, one batch per transaction.
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
			after = next // only once it is committed
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

// stuckRows returns an error that names rows beyond a bound, and what to do about each.
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

// patiently calls do in a transaction of its own, while no other process migrates. It repeats the call if a row or
// table stays locked for two seconds, because all others would wait behind this transaction, and after a deadlock,
// because programs that run meanwhile take locks in another order.
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
		if !errors.As(err, &pg) || !slices.Contains([]string{pgerrcode.LockNotAvailable, pgerrcode.DeadlockDetected}, pg.Code) {
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
