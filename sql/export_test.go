package sql

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// MigrationsOf is Migrations for other files than the embedded ones.
var MigrationsOf = migrations

// UpTo applies the migrations up to one.
func UpTo(ctx context.Context, conn *pgx.Conn, version int) error {
	for _, m := range Migrations()[:version] {
		if _, err := upOne(ctx, conn, m.Name); err != nil {
			return err
		}
	}
	return nil
}
