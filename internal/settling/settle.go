// Package settling records the outcomes of leased runs: one fenced statement for a batch of them.
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
	"github.com/simple-workflow/simple-workflow/run"
)

// Verdict says what becomes of a leased run. Its text is the event_type in workflow_event.
type Verdict string

// The verdicts. Those that lead back to pending make the run due after Outcome.Delay.
const (
	Succeed  Verdict = "succeeded" // leased → succeeded, with Result
	Fail     Verdict = "failed"    // leased → failed, with Failure
	TryAgain Verdict = "retried"   // leased → pending, with Failure
	Postpone Verdict = "postponed" // leased → pending, the attempt given back, postponed counted
	Release  Verdict = "released"  // leased → pending, the attempt given back: the worker stops; with Failure, it has met an outage

	// HandOn leaves the run leased, for as long as Delay says: it goes on elsewhere. leasing.HandOn records that, and not Settle.
	HandOn Verdict = "elsewhere"
)

// An Outcome is what a worker has to report about a run that it leased.
type Outcome struct {
	ID      uuid.UUID
	Token   uuid.UUID // of the lease: the fence
	Verdict Verdict
	Result  json.RawMessage // with Succeed; nil is stored as null
	Failure *Failure        // with Fail and TryAgain; with Release, of an outage
	Delay   time.Duration   // with TryAgain, Postpone and Release: due again after; with HandOn: taken back after
	Most    int             // of a run that follows the policy of its type: the attempts it has, which are written into its row; 0: that stays as it is
}

// A Failure is stored in the run's error column as JSON, its Message also as last_error.
type Failure struct {
	Code      string `json:"code"`
	Message   string `json:"message"` // cleaned and cut to 4 kB
	Attempt   int    `json:"attempt"`
	Permanent bool   `json:"permanent,omitempty"`
	Declared  bool   `json:"declared,omitempty"` // permanent, and not Technical: the handler says that the work has failed
	Stack     string `json:"stack,omitempty"`    // of a panic, cut to 16 kB
	Worker    string `json:"worker,omitempty"`
	LeaseNo   int64  `json:"lease_no,omitempty"`
}

// maxStack is the most bytes of a panic's stack that are stored.
const maxStack = 16 << 10

// NewFailure describes err, which ended the given attempt. A code given with run.WithCode counts
// for more than that of a panic.
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

// Settle records outcomes of leased runs in one statement, in order of id. It returns the outcomes that were refused because
// their lease is lost; for these nothing has changed. Recorded tells whether a refused one had been recorded by an earlier call
// whose answer was lost. worker names the caller in the history. A success has no row there: the run's own row says all of
// that, for good.
//
// A release gives the attempt back, unless the lease was that of an exhausted run, which is not charged.
//
// An error means that nothing was recorded, unless the connection broke before the answer had come. Settle sorts outcomes in
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

// settlement is the statement that settles, and its arguments. It sorts outcomes.
func settlement(worker string, outcomes []Outcome) (sql string, args []any, err error) {
	slices.SortFunc(outcomes, func(a, b Outcome) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	columns, err := outcomeColumns(outcomes)
	if err != nil {
		return "", nil, err
	}
	columns = append(columns, worker)
	if slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Most > 0 }) {
		return `SELECT workflow_settle_v2($1, $2, $3, $4, $5, $6, $7, $8, $9)`, append(columns, column(outcomes, func(o Outcome) int { return o.Most })), nil
	}
	return `SELECT workflow_settle_v1($1, $2, $3, $4, $5, $6, $7, $8)`, columns, nil
}

// refusedOf reads the answer: the places of those that were settled.
func refusedOf(rows pgx.Rows, outcomes []Outcome) (refused []Outcome, err error) {
	settled, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]int32])
	if err != nil {
		return nil, fmt.Errorf("settle %d runs: %w", len(outcomes), err)
	}
	if len(settled) == len(outcomes) {
		return nil, nil
	}
	// Not by id: a lost lease and the current one of the same run may be in one batch.
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

// outcomeColumns returns the outcomes as the arguments of the statement but the last.
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
		column(outcomes, func(o Outcome) [16]byte { return o.ID }),
		column(outcomes, func(o Outcome) [16]byte { return o.Token }),
		column(outcomes, func(o Outcome) string { return string(o.Verdict) }),
		column(outcomes, func(o Outcome) json.RawMessage { return o.Result }),
		failures,
		messages,
		column(outcomes, func(o Outcome) float64 { return max(o.Delay, 0).Seconds() }),
	}, nil
}

// Recorded returns those of the outcomes that are the last their runs have recorded. A worker that lost the answer to Settle
// calls Settle again, and then asks Recorded about the refused ones.
func Recorded(ctx context.Context, db run.DB, outcomes []Outcome) (recorded []Outcome, err error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_recorded_v1($1, $2)`,
		column(outcomes, func(o Outcome) [16]byte { return o.ID }), column(outcomes, func(o Outcome) [16]byte { return o.Token }))
	places, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err != nil {
		return nil, fmt.Errorf("look up %d outcomes: %w", len(outcomes), err)
	}
	for _, place := range places {
		recorded = append(recorded, outcomes[place-1])
	}
	return recorded, nil
}

// column returns one field of all rows. Ids are taken as [16]byte: for a uuid.UUID, which has
// methods for database/sql, pgx goes a way that costs twenty times as much.
func column[R, T any](rows []R, of func(R) T) []T {
	all := make([]T, len(rows))
	for i, r := range rows {
		all[i] = of(r)
	}
	return all
}
