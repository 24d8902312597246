// Package run enqueues, reads, cancels, retries and deletes runs. It also has what a handler may
// return (such as Permanent, Again and ErrElsewhere), and what it can learn about its run (Info).
//
// A run is one row of workflow_run. Functions here take the caller's transaction, pool or
// connection (see DB) and never begin a transaction themselves.
package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Status is the state of a run.
type Status string

// The states of a run. Succeeded and Cancelled are final; Failed is left only by Retry.
const (
	Pending   Status = "pending"   // may be leased from run_at on
	Leased    Status = "leased"    // a worker holds it until lease_until
	Succeeded Status = "succeeded" // its result is recorded
	Failed    Status = "failed"    // attempts used up, or a permanent error
	Cancelled Status = "cancelled" // stopped by a person or a program
)

// Finished reports whether s is Succeeded, Failed or Cancelled.
func (s Status) Finished() bool {
	return s == Succeeded || s == Failed || s == Cancelled
}

// A Run is one row of workflow_run as Read returns it. Pointers and raw JSON are nil where
// the column is null. Times are the database's.
type Run struct {
	ID             uuid.UUID
	Type           string
	Status         Status
	Priority       int
	IdempotencyKey *string
	Tenant         *string
	Payload        json.RawMessage
	Result         json.RawMessage // result of a succeeded run; nil also if the handler returned nothing
	Error          json.RawMessage // the last failure as an object
	LastError      *string         // the last failure in one line
	Metadata       json.RawMessage
	Attempt        int // charged starts so far
	MaxAttempts    int
	Postponed      int
	RunAt          time.Time
	StartedAt      *time.Time // start of the current or latest lease
	DeadlineAt     *time.Time
	FinishedAt     *time.Time
	HeldAt         *time.Time // when it was put on hold; nil: it is not on hold
	LeaseUntil     *time.Time
	LeaseNo        int64
	LeasedBy       *string
	CreatedAt      time.Time
	UpdatedAt      time.Time
	DeletedAt      *time.Time // when it was soft-deleted; nil: it is not deleted
	DeleteReason   *string
}

// DB is what this package needs of a database. *pgxpool.Pool, *pgx.Conn and pgx.Tx implement it.
type DB interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// ErrNotFound means that no run has the given id.
var ErrNotFound = errors.New("run: not found")

// Read returns the run with the given id, soft-deleted or not, or ErrNotFound.
func Read(ctx context.Context, db DB, id uuid.UUID) (*Run, error) {
	rows, _ := db.Query(ctx, `
		SELECT id, type, status, priority, idempotency_key, tenant_id, payload, result, error, last_error, metadata,
		       attempt, max_attempts, postponed, run_at, started_at, deadline_at, finished_at, held_at,
		       lease_until, lease_no, leased_by, created_at, updated_at, deleted_at, delete_reason
		FROM workflow_run
		WHERE id = $1`, id)
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByPos[Run])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if err != nil {
		return nil, fmt.Errorf("read run %s: %w", id, err)
	}
	return r, nil
}
