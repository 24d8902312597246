// Package settling records the outcomes of leased runs: one fenced statement for a batch of them.
//
// The settle transaction around that statement, with effects, events and moves of processes, is in worker/commit.go
// (Worker.record). A batch that needs none of these is settled by the statement alone.
package settling

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/clean"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Verdict is the kind of an outcome. Its text is the event_type in workflow_event.
type Verdict string

// The verdicts. Those that lead back to pending make the run due after Outcome.Delay.
const (
	Succeed  Verdict = "succeeded" // leased → succeeded, with Result
	Fail     Verdict = "failed"    // leased → failed, with Failure
	TryAgain Verdict = "retried"   // leased → pending, with Failure
	Postpone Verdict = "postponed" // leased → pending, the attempt is given back, and postponed is increased
	Release  Verdict = "released"  // leased → pending, the attempt is given back: the worker stops or, with Failure, the run has met an outage

	// HandOn leaves the run leased for Delay, because an outside system completes it. leasing.HandOn records this
	// verdict, not Settle.
	HandOn Verdict = "elsewhere"
)

// An Outcome is what a worker reports about a run that it leased.
type Outcome struct {
	ID      uuid.UUID
	Token   uuid.UUID // of the lease: the fence
	Verdict Verdict
	Result  json.RawMessage // with Succeed; nil is stored as null
	Failure *Failure        // with Fail and TryAgain; with Release after an outage
	Delay   time.Duration   // with TryAgain, Postpone and Release: the run is due after it; with HandOn: the run is taken back after it
	Most    int             // new max_attempts of a run that follows the policy of its type; 0: leave max_attempts unchanged
}

// A Failure is stored as JSON in the run's error column. Its Message is stored as last_error too.
type Failure struct {
	Code      string `json:"code"`
	Message   string `json:"message"` // cleaned and cut to 4 KiB
	Attempt   int    `json:"attempt"`
	Permanent bool   `json:"permanent,omitempty"`
	Declared  bool   `json:"declared,omitempty"` // permanent and not Technical: the handler says that the work has failed
	Stack     string `json:"stack,omitempty"`    // of a panic, cut to 16 KiB
	Worker    string `json:"worker,omitempty"`
	LeaseNo   int64  `json:"lease_no,omitempty"`
}

// maxStack is the most bytes of a panic's stack that are stored.
const maxStack = 16 << 10

// NewFailure returns the failure that describes err, the error of the attempt in info. Its code is the
// one that run.WithCode has set, if any, or otherwise CodePanic, CodeUnavailable or CodeHandler.
func NewFailure(err error, info run.Info) *Failure {
	f := &Failure{
		Code:      clean.Code(run.Code(err)),
		Message:   clean.Text(err.Error(), clean.MaxMessage),
		Attempt:   info.Attempt,
		Permanent: run.IsPermanent(err),
		Declared:  run.IsPermanent(err) && !errors.As(err, new(*technicalError)),
		Worker:    info.Worker,
		LeaseNo:   info.LeaseNo,
	}
	if p := (*run.PanicError)(nil); errors.As(err, &p) {
		f.Code = cmp.Or(f.Code, CodePanic)
		f.Stack = clean.Text(string(p.Stack), maxStack)
	}
	if run.IsUnavailable(err) {
		f.Code = cmp.Or(f.Code, CodeUnavailable)
	}
	f.Code = cmp.Or(f.Code, CodeHandler)
	return f
}

// Settle records outcomes of leased runs in one statement, in order of id. It returns the outcomes that were refused
// because their leases are lost; these have changed nothing. Recorded reports whether a refused outcome was recorded
// by an earlier call whose answer was lost. worker names the caller in the history. A success has no row in the
// history, because the run's own row has all of it.
//
// A release gives the attempt back, except for an exhausted run, for which the lease charged no attempt.
//
// After an error nothing was recorded, unless the connection broke before the answer arrived. Settle sorts outcomes in
// place.
func Settle(ctx context.Context, db run.DB, worker string, outcomes []Outcome) (refused []Outcome, err error) {
	if len(outcomes) == 0 {
		return nil, nil
	}
	sql, args, err := settlement(worker, outcomes)
	if err != nil {
		return nil, err
	}
	rows, _ := db.Query(ctx, sql, args...)
	return refusedOf(rows, outcomes)
}

// Queue queues Settle onto a batch, to be sent with other statements. It sets refused when the batch's results
// are read.
func Queue(batch *pgx.Batch, worker string, outcomes []Outcome, refused *[]Outcome) error {
	if len(outcomes) == 0 {
		return nil
	}
	sql, args, err := settlement(worker, outcomes)
	if err != nil {
		return err
	}
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) (err error) {
		*refused, err = refusedOf(rows, outcomes)
		return err
	})
	return nil
}

// settlement returns the statement that settles, and its arguments. It sorts outcomes.
func settlement(worker string, outcomes []Outcome) (sql string, args []any, err error) {
	slices.SortFunc(outcomes, func(a, b Outcome) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	columns, err := outcomeColumns(outcomes)
	if err != nil {
		return "", nil, err
	}
	columns = append(columns, worker)
	if slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Most > 0 }) {
		return `SELECT workflow_settle_v2($1, $2, $3, $4, $5, $6, $7, $8, $9)`, append(columns, column.Of(outcomes, func(o Outcome) int { return o.Most })), nil
	}
	return `SELECT workflow_settle_v1($1, $2, $3, $4, $5, $6, $7, $8)`, columns, nil
}

// refusedOf reads the answer, which has the positions of the settled outcomes, and returns the other outcomes.
func refusedOf(rows pgx.Rows, outcomes []Outcome) (refused []Outcome, err error) {
	settled, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]int32])
	if err != nil {
		return nil, fmt.Errorf("settle %d runs: %w", len(outcomes), err)
	}
	if len(settled) == len(outcomes) {
		return nil, nil
	}
	// By position, not by id: a batch may have a lost lease and the current lease of the same run.
	recorded := make([]bool, len(outcomes))
	for _, place := range settled {
		recorded[place-1] = true
	}
	for i, o := range outcomes {
		if !recorded[i] {
			refused = append(refused, o)
		}
	}
	return refused, nil
}

// outcomeColumns returns the outcomes as the first seven arguments of the statement.
func outcomeColumns(outcomes []Outcome) ([]any, error) {
	failures, messages := make([]json.RawMessage, len(outcomes)), make([]*string, len(outcomes))
	for i, o := range outcomes {
		if o.Failure == nil {
			continue
		}
		var err error
		if failures[i], err = json.Marshal(o.Failure); err != nil {
			return nil, fmt.Errorf("encode failure of run %s: %w", o.ID, err)
		}
		messages[i] = &o.Failure.Message
	}
	return []any{
		column.Of(outcomes, func(o Outcome) [16]byte { return o.ID }),
		column.Of(outcomes, func(o Outcome) [16]byte { return o.Token }),
		column.Of(outcomes, func(o Outcome) string { return string(o.Verdict) }),
		column.Of(outcomes, func(o Outcome) json.RawMessage { return o.Result }),
		failures,
		messages,
		column.Of(outcomes, func(o Outcome) float64 { return max(o.Delay, 0).Seconds() }),
	}, nil
}

// Recorded returns those of the outcomes that were recorded as the last outcomes of their runs. After a lost answer, a
// worker calls Settle again, and then Recorded with the refused outcomes.
func Recorded(ctx context.Context, db run.DB, outcomes []Outcome) (recorded []Outcome, err error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_recorded_v1($1, $2)`,
		column.Of(outcomes, func(o Outcome) [16]byte { return o.ID }), column.Of(outcomes, func(o Outcome) [16]byte { return o.Token }))
	places, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err != nil {
		return nil, fmt.Errorf("look up %d outcomes: %w", len(outcomes), err)
	}
	for _, place := range places {
		recorded = append(recorded, outcomes[place-1])
	}
	return recorded, nil
}
