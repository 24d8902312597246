package run

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// ErrTooLate means that the run's state no longer allows the change. The error's text
// names the state.
var ErrTooLate = errors.New("run: too late")

// Cancel ends a pending or leased run for good: whatever its worker reports afterwards is
// dropped. It returns nil if the run is cancelled by this call, ErrTooLate if it had
// already finished (or had been cancelled), and ErrNotFound. reason may be empty; it is
// stored as last_error. A handler that is executing sees its context cancelled with cause
// ErrCancelled at the next heartbeat.
func Cancel(ctx context.Context, db DB, id uuid.UUID, reason string) error {
	answer, err := call(ctx, db, `SELECT workflow_cancel($1, nullif($2, ''))`, id, reason)
	if err != nil {
		return fmt.Errorf("cancel run %s: %w", id, err)
	}
	return answered(answer, id, "cancelled")
}

// Retry gives a failed run further attempts (at least 1) and makes it due now. It returns
// ErrTooLate, naming the state, if the run is not failed, and ErrNotFound.
func Retry(ctx context.Context, db DB, id uuid.UUID, attempts int) error {
	answer, err := call(ctx, db, `SELECT workflow_retry($1, $2)`, id, attempts)
	if err != nil {
		return fmt.Errorf("retry run %s: %w", id, err)
	}
	return answered(answer, id, "pending")
}

// Delete soft-deletes a run: it is never leased again and its idempotency key is free. A
// leased run is cancelled by the same statement. Deleting twice is no error; the first
// reason stays. It returns ErrNotFound if there is no such run.
func Delete(ctx context.Context, db DB, id uuid.UUID, reason string) error {
	answer, err := call(ctx, db, `SELECT workflow_delete($1, $2)`, id, reason)
	if err != nil {
		return fmt.Errorf("delete run %s: %w", id, err)
	}
	return answered(strings.TrimPrefix(answer, "already "), id, "deleted")
}

func call(ctx context.Context, db DB, query string, args ...any) (string, error) {
	rows, _ := db.Query(ctx, query, args...)
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
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
