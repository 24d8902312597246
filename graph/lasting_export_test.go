package graph

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Last is last, and reports whether the transaction lasts.
func (e *Engine) Last(ctx context.Context, tx pgx.Tx) (pgx.Tx, bool, error) {
	tx, err := e.last(ctx, tx)
	_, lasts := tx.(lasting)
	return tx, lasts, err
}
