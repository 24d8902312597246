package leasing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// An Aside is a run that was set aside: a constraint or a trigger refuses to let it be leased, extended, settled or
// taken back, so it is recorded in workflow_set_aside and skipped, and tried again from time to time (TryAgain) or once
// its row changes. workflow_set_aside has the database's message. That message may quote the row, so it is not repeated
// here.
type Aside struct {
	ID         uuid.UUID
	Type       string
	SQLState   string
	Constraint string // the constraint that refuses it; empty: the error names none
}

// setAside finds the runs among the first n of the chosen lanes that the database refuses to lease, and sets them
// aside. If it returns none, no row is the cause. With anyCode, every SQLSTATE counts as an answer about rows.
func (p *Poller) setAside(ctx context.Context, chosen []request, n int, anyCode bool) ([]Aside, error) {
	rows, _ := p.DB.Query(ctx, `SELECT * FROM workflow_lease_refused_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`,
		slices.Concat(laneColumns(chosen, 0)[:6], []any{p.Steps, n, anyCode, p.Worker}, termColumns(chosen))...)
	return collectAside(rows)
}

func collectAside(rows pgx.Rows) ([]Aside, error) {
	aside, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Aside])
	if err != nil {
		return nil, fmt.Errorf("find refused runs: %w", err)
	}
	return aside, nil
}

// Works reports whether a statement (lease, extend, settle, take back) succeeds. It tries the statement on runs made
// for this, and rolls back.
func Works(ctx context.Context, db run.DB, statement string) (bool, error) {
	rows, _ := db.Query(ctx, `SELECT workflow_works_v1($1)`, statement)
	works, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("try to %s test runs: %w", statement, err)
	}
	return works, nil
}

// Faults returns the statements that fail for every row, as workers of the same role have reported lately with
// TellFault. LookAround returns them, too.
func Faults(ctx context.Context, db run.DB) ([]string, error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_faults_v1()`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list the statements that fail: %w", err)
	}
	return all, nil
}

// TellFault records in workflow_fault that a statement fails for every row, and how. With a nil error it records that
// the statement works again.
func TellFault(ctx context.Context, db run.DB, statement string, f *fault.Error) error {
	var state, words *string
	if f != nil {
		answer := &pgconn.PgError{Message: f.Error()}
		errors.As(f.Err, &answer) // otherwise answer stays as it is
		said := strings.ToValidUTF8(strings.ReplaceAll(answer.Message, "\x00", ""), "")
		state, words = &answer.Code, &said
	}
	if _, err := db.Exec(ctx, `SELECT workflow_fault_v1($1, $2, $3)`, statement, state, words); err != nil {
		return fmt.Errorf("record whether %s fails for every row: %w", statement, err)
	}
	return nil
}

// String names the run and the reason. It quotes nothing from the row.
func (a Aside) String() string {
	return strings.TrimSuffix(fmt.Sprintf("run %s of type %s: SQLSTATE %s %s", a.ID, a.Type, a.SQLState, a.Constraint), " ")
}
