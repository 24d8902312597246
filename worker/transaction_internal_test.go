package worker

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Whatever comes first begins the transaction. What f does is committed if f succeeds, and undone if not, or if a
// statement failed and f ignores that.
func TestTransactionBeginsWithAnything(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE done (x int)`); err != nil {
		t.Fatal(err)
	}
	w := &Worker{db: pool}
	const insert = `INSERT INTO done VALUES (1) RETURNING x`
	failure := errors.New("no")
	for name, first := range map[string]func(context.Context, pgx.Tx) error{
		"statement": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, insert); return err },
		"query": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, insert)
			rows.Close()
			return errors.Join(err, rows.Err())
		},
		"row": func(ctx context.Context, tx pgx.Tx) error { return tx.QueryRow(ctx, insert).Scan(new(int)) },
		"batch": func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(insert)
			return tx.SendBatch(ctx, b).Close()
		},
	} {
		for _, c := range []struct {
			end  func(context.Context, pgx.Tx) error
			err  error
			rows int
		}{
			{func(context.Context, pgx.Tx) error { return nil }, nil, 1},
			{func(context.Context, pgx.Tx) error { return failure }, failure, 0},
			{func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, `SELECT 1/0`); return nil }, pgx.ErrTxCommitRollback, 0},
		} {
			err := w.transactAtOnce(t.Context(), bounded(time.Second, time.Second), func(tx pgx.Tx) error {
				if err := first(t.Context(), tx); err != nil {
					return err
				}
				return c.end(t.Context(), tx)
			})
			var rows int
			if err := pool.QueryRow(t.Context(), `WITH gone AS (DELETE FROM done RETURNING x) SELECT count(*) FROM gone`).Scan(&rows); err != nil {
				t.Fatal(err)
			}
			if !errors.Is(err, c.err) || rows != c.rows {
				t.Errorf("%s first: %v and %d rows, want %v and %d", name, err, rows, c.err, c.rows)
			}
		}
	}
	if n := pool.Stat().AcquiredConns(); n > 0 {
		t.Errorf("%d connections were not released", n)
	}
}
