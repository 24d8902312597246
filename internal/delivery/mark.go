package delivery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// An Outcome is the result of publishing one event of a claim. An event without an outcome stays as it was.
type Outcome struct {
	ID        int64
	Delivered bool
	Unwanted  bool // no sink had to get it when it was read, so it was not sent

	// If it was not delivered:
	Reason   string
	Attempt  int           // attempts charged so far
	Rejected int           // rejections so far
	Again    time.Duration // until the next attempt
	Park     bool          // there is no next attempt

	refused bool // the database refuses to mark it; Reason has the database's message
}

// Mark records outcomes and gives the claim's lanes back, in one statement that waits at most 200 ms for a
// lock. It returns the number of outcomes recorded. That is zero if the claim was lost: the current owner of the
// lanes then publishes the events. If Mark fails, nothing is recorded and the lanes are still claimed: see MarkApart.
func Mark(ctx context.Context, db DB, c *Claim, outcomes []Outcome) (recorded int, err error) {
	_, ids, err := mark(ctx, db, c, outcomes, together, nil)
	if err != nil {
		return 0, fmt.Errorf("mark %d events of sink %q: %w", len(outcomes), c.Sink, err)
	}
	return len(ids), nil
}

// A locking is the part of the marking statement that selects and locks lanes (mine) and events (among).
type locking struct{ mine, among string }

var (
	// All rows, waiting for locks, and the lanes are given back. Usually another sink holds a lock, for milliseconds.
	together = locking{
		mine: `UPDATE outbox_lane SET claim_token = NULL, claimed_by = NULL, claim_until = NULL
			WHERE sink = $1 AND claim_token = $2 AND ($12::smallint IS NULL OR lane = $12) AND (SELECT set_config('lock_timeout', '200ms', true)) <> ''
			RETURNING lane`,
		among: `e.lane IN (SELECT lane FROM mine)`,
	}
	// Only rows that are not locked; the lanes are not given back.
	passingOver = locking{
		mine: `SELECT lane FROM outbox_lane
			WHERE sink = $1 AND claim_token = $2 AND ($12::smallint IS NULL OR lane = $12) AND (SELECT set_config('lock_timeout', '200ms', true)) <> ''
			ORDER BY lane FOR NO KEY UPDATE SKIP LOCKED
		), free AS MATERIALIZED (
			SELECT e.id FROM outbox_event e
			WHERE e.id = ANY ($3) AND e.lane IN (SELECT lane FROM mine)
			ORDER BY e.id FOR NO KEY UPDATE SKIP LOCKED`,
		among: `e.id IN (SELECT id FROM free)`,
	}
	// One event of any lane, which the transaction has locked already and which is rolled back.
	ofControl = locking{
		mine:  `SELECT lane FROM outbox_lane WHERE sink = $1 AND ($2::uuid IS NOT NULL OR lane = $12::smallint) LIMIT 1`,
		among: `e.id = ANY ($3)`,
	}
)

// mark marks outcomes of one lane, or of all lanes if lane is nil. It returns the lanes that are still claimed and the
// events that it recorded.
func mark(ctx context.Context, db DB, c *Claim, outcomes []Outcome, l locking, lane *int16) (lanes []int16, recorded []int64, err error) {
	n := len(outcomes)
	ids, delivered, parks, unwanted, refused := make([]int64, n), make([]bool, n), make([]bool, n), make([]bool, n), make([]bool, n)
	attempts, rejected := make([]int, n), make([]int, n)
	again, reasons := make([]float64, n), make([]string, n)
	for k, o := range outcomes {
		ids[k], delivered[k], parks[k], attempts[k], rejected[k] = o.ID, o.Delivered, o.Park, o.Attempt, o.Rejected
		again[k], reasons[k], unwanted[k], refused[k] = o.Again.Seconds(), o.Reason, o.Unwanted, o.refused
	}
	// Another sink may mark the same event at the same time. The second one sees what the first has written to the row,
	// so it finds that no sink is left, and sets published_at or parked_at. An event whose row is refused is only
	// recorded in outbox_delivery, as parked.
	err = db.QueryRow(ctx, `
		WITH mine AS MATERIALIZED (
			`+l.mine+`
		), outcome AS (
			SELECT o.* FROM unnest($3::bigint[], $4::boolean[], $5::boolean[], $6::int[], $7::int[], $8::float8[], $9::text[], $10::boolean[], $11::boolean[])
			  AS o (id, delivered, park, attempt, rejected, again, reason, unwanted, refused)
		), marked AS (
			UPDATE outbox_event e
			SET delivered_to = CASE WHEN o.delivered AND `+isOpen("s")+` THEN `+appended("e.delivered_to")+` ELSE e.delivered_to END,
			    parked_by    = CASE WHEN o.park THEN `+appended("e.parked_by")+` ELSE e.parked_by END,
			    published_at = CASE WHEN NOT o.park AND e.parked_by IS NULL AND NOT EXISTS (SELECT FROM outbox_sink x WHERE (o.unwanted OR x.name <> $1) AND `+isOpen("x")+`)
			                        THEN clock_timestamp() END,
			    parked_at    = CASE WHEN (o.park OR e.parked_by IS NOT NULL) AND NOT EXISTS (SELECT FROM outbox_sink x WHERE (o.unwanted OR x.name <> $1) AND `+isOpen("x")+`)
			                        THEN clock_timestamp() END
			FROM outcome o, outbox_sink s
			WHERE e.id = o.id AND (o.delivered OR o.park OR o.unwanted) AND NOT o.refused AND `+l.among+` AND s.name = $1
			RETURNING e.id
		), settled AS (
			DELETE FROM outbox_delivery d USING outcome o, outbox_event e
			WHERE o.delivered AND NOT o.refused AND d.event_id = o.id AND d.sink = $1 AND e.id = o.id AND `+l.among+`
		), failed AS (
			INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, rejected, next_attempt_at, last_error, parked_at)
			SELECT o.id, $1, e.aggregate_id, o.attempt, o.rejected, CASE WHEN NOT (o.park OR o.refused) THEN now() + o.again * interval '1 second' END, left(o.reason, 4096),
			       CASE WHEN o.park OR o.refused THEN now() END
			FROM outcome o JOIN outbox_event e ON e.id = o.id
			WHERE (NOT o.delivered AND NOT o.unwanted OR o.refused) AND `+l.among+`
			ON CONFLICT (event_id, sink) DO UPDATE
			SET attempt = excluded.attempt, rejected = excluded.rejected, next_attempt_at = excluded.next_attempt_at,
			    last_error = excluded.last_error, parked_at = excluded.parked_at, updated_at = now()
			RETURNING event_id
		)
		SELECT ARRAY(SELECT lane FROM mine), ARRAY(SELECT id FROM marked UNION SELECT event_id FROM failed)`,
		planned, c.Sink, c.Token, ids, delivered, parks, attempts, rejected, again, reasons, unwanted, refused, lane).Scan(&lanes, &recorded)
	return lanes, recorded, err
}

// TellFault records in workflow_fault that no event can be marked, with the database's error; nil: events can be marked
// again.
func TellFault(ctx context.Context, db DB, fails error) error {
	var state, words *string
	if said := (*pgconn.PgError)(nil); errors.As(fails, &said) {
		state, words = &said.Code, &said.Message
	} else if fails != nil {
		none, text := "", fails.Error()
		state, words = &none, &text
	}
	if _, err := db.Exec(ctx, `SELECT workflow_fault_v1('mark', $1, $2)`, state, words); err != nil {
		return fmt.Errorf("note whether events can be marked: %w", err)
	}
	return nil
}

// appended returns an expression: the array marks, with the sink $1 appended. A value that a dispatcher does not write,
// with two dimensions or with NULL, is first converted to a list.
func appended(marks string) string {
	return strings.ReplaceAll(`CASE WHEN MARKS IS NULL THEN ARRAY[$1::text]
		WHEN CASE WHEN array_ndims(MARKS) > 1 THEN true ELSE array_position(MARKS, NULL) IS NOT NULL END
		THEN array_append(ARRAY(SELECT DISTINCT m FROM unnest(MARKS) AS m WHERE m IS NOT NULL), $1)
		ELSE array_append(MARKS, $1) END`, "MARKS", marks)
}
