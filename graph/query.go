package graph

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// query asks the database something.
func query(ctx context.Context, tx pgx.Tx, sql string, args ...any) (pgx.Rows, error) {
	return tx.Query(ctx, sql, plain(args)...)
}

// plain turns lists of ids into what pgx encodes directly. For uuid.UUID, which has methods for
// database/sql, it goes a way that costs twenty times as much.
func plain(args []any) []any {
	for k, arg := range args {
		if ids, ok := arg.([]uuid.UUID); ok && ids != nil {
			raw := make([][16]byte, len(ids))
			for n, id := range ids {
				raw[n] = id
			}
			args[k] = raw
		}
	}
	return args
}
