package graph

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Do executes a statement in the way the engine executes statements with kept plans.
func Do(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	t, err := in(ctx, tx)
	if err != nil {
		return err
	}
	s := t.statements()
	s.do(sql, args...)
	return s.send(ctx)
}
