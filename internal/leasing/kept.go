package leasing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Kept is an outcome that is stored in workflow_kept under the token of its lease: the database refuses to record
// it, or run.Complete has reported it. The lease is neither extended nor taken back. Any worker settles the outcome
// once nothing refuses it.
type Kept struct {
	Settlement
	Events  json.RawMessage // events of the handler, as the worker wrote them; nil: none
	Effects bool            // the handler had effects, which are lost: the worker only checks whether the outcome could be recorded, see Over
	Told    json.RawMessage // an error as run.Complete reported it, from which the worker makes the outcome; nil: the outcome is complete
}

// Keep stores an outcome that cannot be recorded, and the cause: an error of the database or of a hook. It reports
// false, and stores nothing, if the lease is lost, or if the database refuses the outcomes of all runs.
func Keep(ctx context.Context, db run.DB, k Kept, cause error) (kept bool, err error) {
	var failure json.RawMessage
	var message *string
	if f := k.Failure; f != nil {
		if failure, err = json.Marshal(f); err != nil {
			return false, fmt.Errorf("encode failure of run %s: %w", k.Outcome.ID, err)
		}
		message = &f.Message
	}
	code, words, rule := inWords(cause)
	rows, _ := db.Query(ctx, `SELECT workflow_unsettled_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`,
		k.Outcome.ID, k.Outcome.Token, string(k.Verdict), k.Result, failure, message, max(k.Delay, 0).Seconds(), k.Events, k.Effects, k.Worker, code, words, rule)
	kept, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("keep the outcome of run %s: %w", k.Outcome.ID, err)
	}
	return kept, nil
}

// inWords returns what workflow_set_aside stores about an error, without bytes that a text column refuses.
func inWords(cause error) (code, words, constraint string) {
	answer := &pgconn.PgError{Message: cause.Error()}
	errors.As(cause, &answer) // otherwise answer stays as it is
	return answer.Code, strings.ToValidUTF8(strings.ReplaceAll(answer.Message, "\x00", ""), ""), answer.ConstraintName
}

// ToSettle returns up to n kept outcomes of runs under the prefixes that are due for another try, and counts the try.
// steps says whether kept outcomes of steps of processes are included.
func ToSettle(ctx context.Context, db run.DB, prefixes []string, steps bool, n int) (due []Kept, err error) {
	sent := time.Now()
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_kept_v1($1, $2, $3)`, prefixes, steps, n)
	for rows.Next() {
		var k Kept
		var failure []byte
		var seconds float64
		var worker string
		var follows, told bool
		if k.Lease, err = scanLeases((*[16]byte)(&k.Outcome.Token), &k.Verdict, (*[]byte)(&k.Result), &failure, &seconds, (*[]byte)(&k.Events), &k.Effects, &worker, &follows, &told).scan(rows); err != nil {
			rows.Close()
			return nil, fmt.Errorf("read a kept outcome: %w", err)
		}
		if told && failure != nil {
			k.Told = failure
		} else if failure != nil {
			k.Failure = new(settling.Failure)
			if err := json.Unmarshal(failure, k.Failure); err != nil {
				k.Failure = &settling.Failure{Code: settling.CodeHandler, Message: "its description cannot be read", Attempt: k.Attempt}
			}
		}
		k.Outcome.ID, k.Lease.Token, k.Lease.Worker, k.Taken = k.Lease.ID, k.Outcome.Token, worker, sent
		k.Follows = follows
		k.Delay = time.Duration(seconds * float64(time.Second))
		due = append(due, k)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("find kept outcomes: %w", err)
	}
	return due, nil
}

// RefusedAgain records that a kept outcome was refused once more, and why.
func RefusedAgain(ctx context.Context, db run.DB, k Kept, cause error) error {
	code, words, rule := inWords(cause)
	if _, err := db.Exec(ctx, `SELECT workflow_kept_refused_v1($1, $2, $3, $4, $5)`, k.Outcome.ID, k.Outcome.Token, code, words, rule); err != nil {
		return fmt.Errorf("record that run %s cannot be settled: %w", k.Outcome.ID, err)
	}
	return nil
}

// Over removes outcomes from workflow_kept, and returns those that were there. Call it first in the transaction that
// records them. An outcome with effects cannot be recorded, because its effects are lost. Remove it once a try has shown
// that nothing refuses it: its lease is then taken back as after a crash.
func Over(ctx context.Context, db run.DB, all []Kept) (were []Kept, err error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_kept_over_v1($1, $2, $3, $4)`,
		column.Of(all, func(k Kept) [16]byte { return k.Outcome.ID }), column.Of(all, func(k Kept) [16]byte { return k.Outcome.Token }),
		column.Of(all, func(k Kept) string { return string(k.Verdict) }), column.Of(all, func(k Kept) bool { return k.Effects }))
	found, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("remove kept outcomes of %d runs: %w", len(all), err)
	}
	for _, k := range all {
		if slices.Contains(found, k.Outcome.ID) {
			were = append(were, k)
		}
	}
	return were, nil
}

// Controls makes leased steps of processes in the caller's transaction, which must be rolled back. A worker settles them
// to find out whether hooks can move any process at all.
func Controls(ctx context.Context, tx pgx.Tx) ([]Lease, error) {
	rows, _ := tx.Query(ctx, `SELECT id, token FROM workflow_control_v1()`)
	made, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l Lease, err error) {
		err = row.Scan(&l.ID, &l.Token)
		l.Step, l.Type, l.Attempt, l.MaxAttempts, l.LeaseNo = l.ID, "workflow.control.v1", 1, 1, 1
		l.Payload, l.Taken, l.Length = json.RawMessage("{}"), time.Now(), time.Minute
		return l, err
	})
	if err != nil {
		return nil, fmt.Errorf("make test steps: %w", err)
	}
	return made, nil
}

// CanSettle returns an error if the caller's role may not settle runs. It records nothing.
func CanSettle(ctx context.Context, db run.DB, worker string) error {
	if _, err := db.Exec(ctx, `SELECT workflow_settle_v2('{}', '{}', '{}', '{}', '{}', '{}', '{}', $1, '{}')`, worker); err != nil {
		return fmt.Errorf("check the right to settle: %w", err)
	}
	return nil
}
