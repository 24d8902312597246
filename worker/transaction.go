package worker

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A transaction begins with its first batch, in the same round trip. A transaction of pgx takes a round trip to begin.
// It takes statements and batches, and nothing else that the effects of users may need.
type transaction struct {
	conn  *pgxpool.Conn
	start *pgx.Batch // what begins it; nil: it has begun
}

// transactAtOnce is like transact, with a transaction that begins with its first batch.
func (w *Worker) transactAtOnce(ctx context.Context, start []string, f func(pgx.Tx) error) error {
	conn, err := w.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // closes a connection on which the transaction is still open
	t := &transaction{conn: conn, start: &pgx.Batch{}}
	for _, statement := range start {
		t.start.Queue(statement)
	}
	return finish(ctx, t, f)
}

// begin begins the transaction unless it has begun.
func (t *transaction) begin(ctx context.Context) error {
	if t.start == nil {
		return nil
	}
	return t.SendBatch(ctx, &pgx.Batch{}).Close()
}

// SendBatch sends a batch. The first one begins the transaction.
func (t *transaction) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if t.start != nil {
		t.start.QueuedQueries = append(t.start.QueuedQueries, b.QueuedQueries...)
		t.start, b = nil, t.start
	}
	return t.conn.SendBatch(ctx, b)
}

// Exec executes a statement.
func (t *transaction) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.begin(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	return t.conn.Exec(ctx, sql, args...)
}

// Query executes a query.
func (t *transaction) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	return t.conn.Query(ctx, sql, args...)
}

// QueryRow executes a query that returns one row.
func (t *transaction) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.begin(ctx); err != nil {
		return noRow{err}
	}
	return t.conn.QueryRow(ctx, sql, args...)
}

// A noRow is the answer to a query that was not sent.
type noRow struct{ err error }

func (r noRow) Scan(...any) error { return r.err }

// Commit commits, if the transaction has begun. An error may leave it unknown whether it did.
func (t *transaction) Commit(ctx context.Context) error {
	if t.start != nil {
		return nil
	}
	tag, err := t.conn.Exec(ctx, `commit`)
	if err == nil && tag.String() == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	return err
}

// Rollback rolls back.
func (t *transaction) Rollback(ctx context.Context) error {
	if t.start != nil || t.conn.Conn().IsClosed() || t.conn.Conn().PgConn().TxStatus() == 'I' {
		return nil
	}
	_, err := t.conn.Exec(ctx, `rollback`)
	return err
}

// Conn returns the connection.
func (t *transaction) Conn() *pgx.Conn { return t.conn.Conn() }

var errOnlyStatements = errors.New("this transaction takes only statements, one at a time or in batches")

// Begin returns an error.
func (t *transaction) Begin(context.Context) (pgx.Tx, error) { return nil, errOnlyStatements }

// Prepare returns an error.
func (t *transaction) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, errOnlyStatements
}

// CopyFrom returns an error.
func (t *transaction) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, errOnlyStatements
}

// LargeObjects returns none.
func (t *transaction) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }
