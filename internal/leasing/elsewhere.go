package leasing

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
)

// HandOn leaves a leased run to an outside system, which has the given time to complete it. Nobody extends the lease
// meanwhile; it is taken back when the time is over. HandOn reports false if the caller has lost the lease. Calling it
// again changes nothing.
func HandOn(ctx context.Context, db run.DB, id, token uuid.UUID, within time.Duration) (ours bool, err error) {
	rows, _ := db.Query(ctx, `SELECT workflow_accepted_v1($1, $2, $3)`, id, token, within.Seconds())
	ours, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("hand on run %s: %w", id, err)
	}
	return ours, nil
}

// Elsewhere returns how many runs under the prefixes are handed on, see HandOn.
func Elsewhere(ctx context.Context, db run.DB, prefixes []string) (n int, err error) {
	rows, _ := db.Query(ctx, `SELECT workflow_elsewhere_v1($1)`, prefixes)
	n, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	if err != nil {
		return 0, fmt.Errorf("count runs that are handed on: %w", err)
	}
	return n, nil
}
