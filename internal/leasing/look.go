package leasing

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Look says what a worker has to tend to. Usually that is nothing, and one statement finds out instead of one for each.
type Look struct {
	Faults   []string // statements that fail for every row, as workers of the same role have reported lately with TellFault
	Aside    bool     // something is set aside or owed to a process: TryAgain and the hooks have work
	Kept     bool     // an outcome is kept, so ToSettle may return it
	Policies int64    // a number that changes with the policies
}

// LookAround returns what there is to tend to. Call it every second.
func LookAround(ctx context.Context, db run.DB) (Look, error) {
	rows, _ := db.Query(ctx, `SELECT faults, aside, kept, policies FROM workflow_look_v1()`)
	l, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Look])
	if err != nil {
		return Look{}, fmt.Errorf("look for what is to be tended to: %w", err)
	}
	return l, nil
}
