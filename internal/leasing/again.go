package leasing

import (
	"context"
	"fmt"

	"github.com/simple-workflow/simple-workflow/run"
)

// TryAgain makes runs that are set aside eligible again when their time has come: each after ten minutes, and after ten seconds
// one of all that were refused for the same reason. Call it every second.
func TryAgain(ctx context.Context, db run.DB) error {
	if _, err := db.Exec(ctx, `SELECT workflow_try_again_v1()`); err != nil {
		return fmt.Errorf("have what is set aside tried again: %w", err)
	}
	return nil
}
