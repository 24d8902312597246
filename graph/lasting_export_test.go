package graph

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Last is last, and reports whether the transaction lasts.
func Last(ctx context.Context, tx pgx.Tx) (pgx.Tx, bool, error) {
	tx, err := last(ctx, tx)
	_, lasts := tx.(lasting)
	return tx, lasts, err
}

// Outlive makes the plans of a connection too old to be kept.
func Outlive(conn *pgx.Conn) {
	conn.PgConn().CustomData()[sessionKey].(*session).planned = time.Now().Add(-keptFor - time.Second)
}
