package run

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Verdict says what becomes of a leased run. Its text is the event_type in workflow_event.
type Verdict string

// The verdicts. Those that lead back to pending make the run due after Outcome.Delay.
const (
	Succeed  Verdict = "succeeded" // leased → succeeded, with Result
	Fail     Verdict = "failed"    // leased → failed, with Failure
	TryAgain Verdict = "retried"   // leased → pending, with Failure
	Postpone Verdict = "postponed" // leased → pending, the attempt given back, postponed counted
	Release  Verdict = "released"  // leased → pending, the attempt given back: the worker stops
)

// An Outcome is what a worker has to report about a run that it leased.
type Outcome struct {
	ID      uuid.UUID
	Token   uuid.UUID // of the lease: the fence
	Verdict Verdict
	Result  json.RawMessage // with Succeed; nil is stored as null
	Failure *Failure        // with Fail and TryAgain
	Delay   time.Duration   // with TryAgain, Postpone and Release: due again after
}

// A Failure is stored in the run's error column as JSON, its Message also as last_error.
type Failure struct {
	Code      string `json:"code"`
	Message   string `json:"message"` // cleaned and cut to 4 kB
	Attempt   int    `json:"attempt"`
	Permanent bool   `json:"permanent,omitempty"`
	Stack     string `json:"stack,omitempty"` // of a panic, cut to 16 kB
	Worker    string `json:"worker,omitempty"`
	LeaseNo   int64  `json:"lease_no,omitempty"`
}

// Limits of what is stored about a failure, in bytes.
const (
	maxMessage = 4 << 10
	maxStack   = 16 << 10
)

// NewFailure describes err, which ended the given attempt. A code given with WithCode counts
// for more than that of a panic.
func NewFailure(err error, info Info) *Failure {
	f := &Failure{
		Code:      cleanCode(Code(err)),
		Message:   cleanText(err.Error(), maxMessage),
		Attempt:   info.Attempt,
		Permanent: IsPermanent(err),
		Worker:    info.Worker,
		LeaseNo:   info.LeaseNo,
	}
	if p := panicOf(err); p != nil {
		f.Code = cmp.Or(f.Code, CodePanic)
		f.Stack = cleanText(string(p.Stack), maxStack)
	}
	f.Code = cmp.Or(f.Code, CodeHandler)
	return f
}

// cleanCode keeps the first 100 characters that codes are made of; \x00 and the like would be
// refused by the database.
func cleanCode(code string) string {
	code = strings.Map(func(r rune) rune {
		if r == '_' || r == '.' || r == '-' || r == ':' || r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return r
		}
		return -1
	}, code[:min(len(code), 1000)])
	return code[:min(len(code), 100)]
}

// Settle records outcomes of leased runs in one statement, in id order, and returns those
// that were refused because the lease is no longer theirs: for these nothing at all has
// changed. Whether a refused one had been recorded by an earlier call whose answer was
// lost is told by Recorded. worker names the caller in the history, which has no row for a
// success: the run's own row says all of that, for good.
//
// A release gives the attempt back, unless the lease was that of an exhausted run, which is
// not charged: its deadline_at is its started_at.
//
// Any error means that nothing was recorded, unless the connection broke while the answer
// was under way. Settle sorts outcomes in place.
func Settle(ctx context.Context, db DB, worker string, outcomes []Outcome) (refused []Outcome, err error) {
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

// QueueSettle has what Settle does sent with other statements of a transaction. What was refused is
// in refused once they have been answered.
func QueueSettle(batch *pgx.Batch, worker string, outcomes []Outcome, refused *[]Outcome) error {
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
	// No condition on status: the token says it all, and the planner would be tempted into
	// the index of leased rows, which is full of dead entries while a snapshot is held. The
	// ids go through an array so that rows are found by primary key, whatever the planner
	// thinks of the table: reading all of a small one costs more than everything else here.
	// done must be read even if nothing was settled, hence the array.
	audit, done := Audit("settled")
	return `
		WITH ` + audit + `, outcome AS MATERIALIZED (
			SELECT *
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::jsonb[], $5::jsonb[], $6::text[], $7::float8[])
			  WITH ORDINALITY AS o (id, token, verdict, result, error, last_error, delay, place)
		), settled AS (
			UPDATE workflow_run w
			SET status = CASE o.verdict WHEN 'succeeded' THEN 'succeeded' WHEN 'failed' THEN 'failed' ELSE 'pending' END,
			    result = CASE o.verdict WHEN 'succeeded' THEN o.result ELSE w.result END,
			    error = coalesce(o.error, w.error),
			    last_error = coalesce(o.last_error, w.last_error),
			    attempt = w.attempt - CASE WHEN o.verdict IN ('postponed', 'released') AND w.attempt > 0
			                               AND w.deadline_at IS DISTINCT FROM w.started_at THEN 1 ELSE 0 END,
			    postponed = w.postponed + CASE o.verdict WHEN 'postponed' THEN 1 ELSE 0 END,
			    suspect = w.suspect AND o.verdict = 'released',
			    run_at = CASE WHEN o.verdict IN ('succeeded', 'failed') THEN w.run_at
			                  ELSE statement_timestamp() + o.delay * interval '1 second' END,
			    finished_at = CASE WHEN o.verdict IN ('succeeded', 'failed') THEN statement_timestamp() END,
			    settled_token = w.lease_token, settled_by = $8, updated_at = statement_timestamp(),
			    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
			FROM audit, outcome o
			WHERE w.id = ANY (ARRAY(SELECT id FROM outcome)) AND w.id = o.id AND w.lease_token = o.token
			RETURNING w.id, o.place, o.verdict, w.lease_no, w.started_at, o.error, o.delay,
			          CASE WHEN o.verdict IN ('postponed', 'released') THEN least(w.attempt + 1, w.max_attempts) ELSE w.attempt END AS attempt
		), history AS (
			INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
			SELECT s.id, s.verdict, s.attempt, s.lease_no, s.started_at, $8,
			       coalesce(s.error - 'stack', '{}') || CASE WHEN s.verdict = 'failed' THEN '{}'
			           ELSE jsonb_build_object('delay_seconds', s.delay) END
			FROM settled s, audit
			WHERE audit.writer = 'self' AND s.verdict <> 'succeeded'
			RETURNING 1
		), ` + done + `
		SELECT ARRAY(SELECT place FROM settled)
		FROM done`, append(columns, worker), nil
}

// refusedOf reads the answer: the places of those that were settled.
func refusedOf(rows pgx.Rows, outcomes []Outcome) (refused []Outcome, err error) {
	settled, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]int64])
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

// outcomeColumns returns the outcomes as the arguments of Settle's statement but the last.
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

// Recorded returns those of the outcomes that are the last which their runs have recorded. A
// worker that lost the answer to Settle calls Settle again and then asks this about the refused.
func Recorded(ctx context.Context, db DB, outcomes []Outcome) (recorded []Outcome, err error) {
	rows, _ := db.Query(ctx, `
		SELECT o.place
		FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS o (id, token, place)
		JOIN workflow_run w ON w.id = o.id AND w.settled_token = o.token
		WHERE w.id = ANY ($1)`,
		column(outcomes, func(o Outcome) [16]byte { return o.ID }), column(outcomes, func(o Outcome) [16]byte { return o.Token }))
	places, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("look up %d outcomes: %w", len(outcomes), err)
	}
	for _, place := range places {
		recorded = append(recorded, outcomes[place-1])
	}
	return recorded, nil
}
