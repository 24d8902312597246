package sql

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// MigrationsOf is Migrations for other files than the embedded ones.
var MigrationsOf = migrations

// SetLockTries sets how often a migration tries to get a lock, until reset is called.
func SetLockTries(n int) (reset func()) {
	was := lockTries
	lockTries = n
	return func() { lockTries = was }
}

// UpTo applies the migrations up to and including version.
func UpTo(ctx context.Context, conn *pgx.Conn, version int) error {
	for _, m := range Migrations()[:version] {
		if _, err := upOne(ctx, conn, m.Name); err != nil {
			return err
		}
	}
	return nil
}
