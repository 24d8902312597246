package run

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// ErrTooLate means that the run's state no longer allows the change. The error that wraps it
// names the state.
var ErrTooLate = errors.New("run: too late")

// Cancel cancels a pending or leased run for good. What its worker reports afterwards is
// dropped. The context of a handler that is executing ends at the next heartbeat, with the
// cause ErrCancelled. last_error becomes "cancelled: reason", or "cancelled"
// if reason is empty.
//
// Cancel returns nil if this call cancelled the run, ErrTooLate if the run had already
// finished or been cancelled, and ErrNotFound if there is no such run.
func Cancel(ctx context.Context, db DB, id uuid.UUID, reason string) error {
	answer, err := call(ctx, db, `SELECT workflow_cancel($1, nullif($2, ''))`, id, reason)
	if err != nil {
		return fmt.Errorf("cancel run %s: %w", id, err)
	}
	return answered(answer, id, "cancelled")
}

// Retry gives a failed run further attempts (at least 1) and makes it due now. It returns
// ErrTooLate if the run is not failed, and ErrNotFound if there is no such run.
func Retry(ctx context.Context, db DB, id uuid.UUID, attempts int) error {
	answer, err := call(ctx, db, `SELECT workflow_retry($1, $2)`, id, attempts)
	if err != nil {
		return fmt.Errorf("retry run %s: %w", id, err)
	}
	return answered(answer, id, "pending")
}

// Delete soft-deletes a run: it is never leased again, and its idempotency key is free. A
// leased run is cancelled by the same statement. Deleting a run twice is not an error; the
// first reason stays. Delete returns ErrNotFound if there is no such run.
func Delete(ctx context.Context, db DB, id uuid.UUID, reason string) error {
	answer, err := call(ctx, db, `SELECT workflow_delete($1, $2)`, id, reason)
	if err != nil {
		return fmt.Errorf("delete run %s: %w", id, err)
	}
	return answered(strings.TrimPrefix(answer, "already "), id, "deleted")
}

func call(ctx context.Context, db DB, query string, args ...any) (string, error) {
	rows, _ := db.Query(ctx, query, args...)
	answer, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	return answer, fault.Hinted(err)
}

func answered(answer string, id uuid.UUID, want string) error {
	switch answer {
	case want:
		return nil
	case "not found":
		return fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	return fmt.Errorf("%w: run %s: %s", ErrTooLate, id, strings.TrimPrefix(answer, "too late: "))
}
