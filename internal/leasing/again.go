package leasing

import (
	"context"
	"fmt"

	"github.com/simple-workflow/simple-workflow/run"
)

// TryAgain makes runs that are set aside eligible again when they are due for another try: each after ten minutes, and
// every ten seconds one run for all that were refused for the same reason. Call it every second while something is set
// aside, see Look.
func TryAgain(ctx context.Context, db run.DB) error {
	if _, err := db.Exec(ctx, `SELECT workflow_try_again_v1()`); err != nil {
		return fmt.Errorf("retry what is set aside: %w", err)
	}
	return nil
}
