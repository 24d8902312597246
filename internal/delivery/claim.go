// Package delivery holds the database statements of a dispatcher. It claims lanes of events for a sink, reads the due
// events in them, and marks the outcome of each. Package outbox appends the events.
package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/fault"
)

// A Row is an event as it is stored.
type Row struct {
	ID        int64
	UUID      uuid.UUID
	Aggregate uuid.UUID
	Type      string
	Payload   json.RawMessage
	Headers   map[string]string // nil: none
	Created   time.Time
	Refused   string // why the event cannot be sent: it exceeds a size limit, and Payload and Headers are nil; empty: it can be sent
	Attempt   int    // attempts charged so far, for this sink
	Rejected  int    // how often this sink rejected it
	Wanted    bool   // false: no sink has to get it any more, so it only has to be marked
	Lane      int16
	Round     int64 // replays of its lane so far; after a replay, an earlier delivery no longer counts
}

// A Claim is the right to publish the events of some lanes to a sink.
type Claim struct {
	Sink  string
	Token uuid.UUID     // drawn for this claim
	Lanes int           // number of lanes claimed; 0: nothing is due
	Ahead time.Duration // how far the database's clock is ahead of this machine's
	Rows  []Row         // in order of id
	Full  bool          // Limits.Events or Limits.Lanes was reached, so more may be due

	// AnyState makes MarkApart treat every SQLSTATE as an answer about an event. Set it when one of the events could
	// not be marked for a minute, with any error: a trigger of the user's may raise any SQLSTATE.
	AnyState bool
}

// LongestClaim is the longest that a claim may last. A claim that ends later was not made by a dispatcher, and counts
// as expired.
const LongestClaim = time.Hour

// The limits of an event's payload and headers as text, in bytes. An event that exceeds them, from before they existed,
// is not sent.
const (
	mostPayload = 8 << 20
	mostHeaders = 64 << 10
)

// Limits bound a claim.
type Limits struct {
	Events int           // most events
	Bytes  int           // most bytes of payloads and headers; one event is read even if it is larger
	Lanes  int           // most lanes, so that other dispatchers find some too
	Length time.Duration // how long the claim lasts, at most LongestClaim; after that others may claim its lanes

	Except []int64     // events that are not read
	Apart  []uuid.UUID // aggregates whose events are not read
}

// readable returns a condition, to append to others, that excludes Except and Apart from the events e, and its two
// parameters. The first parameter has the number n.
func (l Limits) readable(n int) (condition string, args []any) {
	if len(l.Except)+len(l.Apart) == 0 {
		return "", nil
	}
	aggregates := make([][16]byte, len(l.Apart))
	for k, id := range l.Apart {
		aggregates[k] = id
	}
	return fmt.Sprintf(` AND e.id <> ALL ($%d::bigint[]) AND e.aggregate_id <> ALL ($%d::uuid[])`, n, n+1), []any{l.Except, aggregates}
}

// isOpen returns a condition: the sink wants the event e, and has neither got nor parked it. It is not a function of
// the database, because that would take the whole row as its argument, and a plan that stores rows would then read all
// payloads to store them.
func isOpen(sink string) string {
	return strings.ReplaceAll(`((cardinality(S.types) = 0 OR e.event_type ^@ ANY (S.types))
		AND (S.name = ANY (e.delivered_to)) IS NOT TRUE AND (S.name = ANY (e.parked_by)) IS NOT TRUE)`, "S.", sink+".")
}

// planned makes the database plan a statement at each execution. A plan that was made while the outbox was empty,
// and kept, would read the whole outbox for each lane until the next ANALYZE.
const planned = pgx.QueryExecModeCacheDescribe

// notParked is a condition: the sink s has not parked the event e in outbox_delivery. An event whose row refuses every
// update still looks open in outbox_event although its delivery was parked. The condition is not an anti-join, which
// would give the planner one more choice. And it does not end with IS NULL: the planner would expect hardly any row to
// match, and sort all rows to get the first.
const notParked = `(SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE`

// openInLane is a condition: the event e is above the floor of the lane l, and the sink s still has to get it, or no
// sink has to get it any more. It repeats the predicate of outbox_event_open_idx literally, so that the planner uses
// that index. CASE makes the planner expect that half of the events match. If it expects a few only, it reads all events of
// a lane and sorts them, to get those of one batch. And it has outbox_delivery asked last, not for each event that the
// sink has got.
var openInLane = `e.lane = l.lane AND e.id > l.floor AND e.published_at IS NULL AND e.parked_at IS NULL
	AND CASE WHEN ` + isOpen("s") + ` OR NOT EXISTS (SELECT FROM outbox_sink o WHERE ` + isOpen("o") + `) THEN ` + notParked + ` ELSE false END`

// dueInLane is openInLane for events whose aggregates do not wait for a retry. A next_attempt_at two years ahead or
// more is ignored: no backoff is that long.
var dueInLane = openInLane + `
	AND NOT EXISTS (SELECT FROM outbox_delivery d
	                WHERE d.sink = s.name AND d.aggregate_id = e.aggregate_id AND d.parked_at IS NULL
	                  AND d.next_attempt_at > now() AND d.next_attempt_at < now() + interval '2 years')`

// unclaimed returns a condition: nobody has claimed the lane. A claim that is longer than LongestClaim, and a little for
// clocks, was not made by a dispatcher.
func unclaimed(lane string) string {
	return strings.ReplaceAll(`(L.claim_until IS NULL OR L.claim_until < clock_timestamp() OR L.claim_until > clock_timestamp() + interval '61 minutes')`, "L.", lane+".")
}

// sizeOfHeaders is the size of an event's headers as text, in bytes. The stored size does not bound it, because
// compression may reduce a value to a hundredth. But the text of a small uncompressed value is hardly larger than the
// stored value, so its stored size is taken, which saves reading the value.
const sizeOfHeaders = `CASE WHEN e.headers IS NULL THEN 0
		WHEN pg_column_size(e.headers) <= 300 AND pg_column_compression(e.headers) IS NULL THEN pg_column_size(e.headers)
		ELSE octet_length(e.headers::text) END`

// Open reports whether any event above the sink's floors is open, for this sink or another, in a lane that nobody has
// claimed. It costs little if there is none.
func Open(ctx context.Context, db DB, sink string) (open bool, err error) {
	err = db.QueryRow(ctx, `
		SELECT EXISTS (
			SELECT
			FROM outbox_lane l CROSS JOIN LATERAL (
				SELECT FROM outbox_event e
				WHERE e.lane = l.lane AND e.id > l.floor AND e.published_at IS NULL AND e.parked_at IS NULL
				ORDER BY e.id
				LIMIT 1) AS first
			WHERE l.sink = $1 AND `+unclaimed("l")+`)`, planned, sink).Scan(&open)
	if err != nil {
		return false, fmt.Errorf("look at the outbox: %w", err)
	}
	return open, nil
}

// Acquire claims lanes that have due events, those served longest ago first, and reads the events. The caller publishes
// them and then calls Mark, which gives the lanes back. If nothing is due, Acquire returns a Claim with no lanes. db must
// not be a transaction that has written anything: see RaiseFloors.
func Acquire(ctx context.Context, db DB, sink, dispatcher string, limits Limits) (*Claim, error) {
	c := &Claim{Sink: sink, Token: uuid.New()}
	now, err := c.claim(ctx, db, dispatcher, limits, true)
	if fault.State(err) != "" && ctx.Err() == nil { // a floor that may not be raised keeps no lane from being claimed
		now, err = c.claim(ctx, db, dispatcher, limits, false)
	}
	if err != nil {
		return nil, fmt.Errorf("claim lanes of sink %q: %w", sink, err)
	}
	if c.Lanes == 0 {
		return c, nil
	}
	c.Ahead = time.Until(now)
	// A separate statement, so that its snapshot includes everything that was marked before the lanes were given back.
	// The first event of each lane comes before the second of any, so that no lane waits for a long one.
	perLane := max(1, limits.Events/c.Lanes)
	readable, excepted := limits.readable(7)
	rows, _ := db.Query(ctx, `
		WITH due AS (
			SELECT e.id, e.place, e.payload, e.headers, e.fits, e.wanted, l.replays, row_number() OVER upto AS n,
			       sum(CASE WHEN e.fits THEN e.payload + e.headers ELSE 0 END) OVER upto AS bytes
			FROM outbox_lane l JOIN outbox_sink s ON s.name = l.sink CROSS JOIN LATERAL (
				SELECT e.id, e.bytes AS payload, h.bytes AS headers, e.bytes <= $5 AND h.bytes <= $6 AS fits, `+isOpen("s")+` AS wanted, row_number() OVER (ORDER BY e.id) AS place
				FROM outbox_event e CROSS JOIN LATERAL (SELECT `+sizeOfHeaders+` AS bytes) AS h
				WHERE `+dueInLane+readable+`
				ORDER BY e.id
				LIMIT $3) AS e
			WHERE l.sink = $1 AND l.claim_token = $2
			WINDOW upto AS (ORDER BY e.place, e.id)
		)
		SELECT e.id, e.event_uuid, e.aggregate_id, e.event_type,
		       CASE WHEN due.fits THEN e.payload END, CASE WHEN due.fits THEN e.headers END,
		       CASE WHEN due.fits THEN NULL WHEN due.payload > $5 THEN format('payload has %s bytes, the limit is %s', due.payload, $5)
		            ELSE format('headers have %s bytes, the limit is %s', due.headers, $6) END,
		       CASE WHEN e.created_at BETWEEN '0001-01-01 00:00Z' AND '9999-12-31 00:00Z' THEN e.created_at ELSE 'epoch' END, -- RFC 3339 has no other years
		       least(greatest(coalesce(d.attempt, 0), 0), 1000000000), least(greatest(coalesce(d.rejected, 0), 0), 1000000000), due.wanted, e.lane, due.replays
		FROM due JOIN outbox_event e USING (id) LEFT JOIN outbox_delivery d ON d.event_id = e.id AND d.sink = $1
		WHERE due.bytes <= $4 OR due.n = 1
		ORDER BY e.id`, append([]any{planned, sink, c.Token, perLane, limits.Bytes, mostPayload, mostHeaders}, excepted...)...)
	c.Rows, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Row, err error) {
		var payload, headers, refused []byte
		if err = row.Scan(&r.ID, &r.UUID, &r.Aggregate, &r.Type, &payload, &headers, &refused, &r.Created, &r.Attempt, &r.Rejected, &r.Wanted, &r.Lane, &r.Round); err != nil {
			return r, err
		}
		r.Payload, r.Refused = payload, string(refused)
		r.Headers = stringsOf(headers)
		return r, nil
	})
	if err != nil {
		back, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer done()
		_, _ = Mark(back, db, c, nil) // otherwise the lanes wait for the claim to expire
		return nil, fmt.Errorf("read events for sink %q: %w", sink, err)
	}
	c.Full = c.Lanes >= limits.Lanes || len(c.Rows) >= perLane // then some lane may have more
	return c, nil
}

// claim claims lanes and, if raise is set, raises their floors, as RaiseFloors does: otherwise each claim would read
// again all events that the sink has got since RaiseFloors was last called and other sinks have not. It returns the
// database's time.
func (c *Claim) claim(ctx context.Context, db DB, dispatcher string, limits Limits, raise bool) (now time.Time, err error) {
	readable, excepted := limits.readable(7)
	// The lanes are sorted before they are looked into: each subquery needs the ones above it, so they are joined in this
	// order, and no more lanes are read than are claimed. The first due event is looked for from the first open one, so
	// that the events below are read once. A lane is locked last, and its claim is looked at once more then.
	err = db.QueryRow(ctx, `
		WITH d AS MATERIALIZED (
			SELECT outbox_last_id_v1() AS last
		), free AS MATERIALIZED (
			SELECT locked.lane, open.free
			FROM (SELECT l.sink, l.lane, l.floor, s.types
			      FROM outbox_lane l JOIN outbox_sink s ON s.name = l.sink
			      WHERE l.sink = $1 AND l.lane BETWEEN 0 AND 63 AND `+unclaimed("l")+` AND (s.paused_until IS NULL OR s.paused_until < clock_timestamp())
			      ORDER BY CASE WHEN l.served_at <= clock_timestamp() THEN l.served_at ELSE '-infinity' END
			      OFFSET 0) AS l
			  CROSS JOIN LATERAL (SELECT l.sink AS name, l.types) AS s
			  CROSS JOIN LATERAL (SELECT e.id, least((SELECT last FROM d), e.id - 1) AS free FROM outbox_event e WHERE `+openInLane+` ORDER BY e.id LIMIT 1) AS open
			  CROSS JOIN LATERAL (SELECT e.id FROM outbox_event e WHERE e.id >= open.id AND `+dueInLane+readable+` ORDER BY e.id LIMIT 1) AS first
			  CROSS JOIN LATERAL (
				SELECT r.lane FROM outbox_lane r
				WHERE r.sink = l.sink AND r.lane = l.lane AND first.id >= open.id AND `+unclaimed("r")+`
				FOR NO KEY UPDATE SKIP LOCKED) AS locked
			LIMIT $5
		), claimed AS (
			UPDATE outbox_lane l
			SET claim_token = $2, claimed_by = $3, claim_until = clock_timestamp() + $4 * interval '1 second', served_at = clock_timestamp(),
			    floor = CASE WHEN $6 THEN `+raisedFloor+` ELSE l.floor END,
			    next_floor = CASE WHEN $6 AND `+notesNext+` THEN (SELECT last FROM d) ELSE l.next_floor END,
			    next_xid = CASE WHEN $6 AND `+notesNext+` THEN pg_current_xact_id() ELSE l.next_xid END
			FROM free n
			WHERE l.sink = $1 AND l.lane = n.lane
			RETURNING l.lane
		)
		SELECT count(*), clock_timestamp() FROM claimed`, append([]any{planned, c.Sink, c.Token, dispatcher, limits.Length.Seconds(), limits.Lanes, raise}, excepted...)...).Scan(&c.Lanes, &now)
	return now, err
}

// stringsOf returns the headers whose values are strings. outbox.Append writes no others.
func stringsOf(headers []byte) map[string]string {
	if headers == nil {
		return nil
	}
	var texts map[string]string
	if json.Unmarshal(headers, &texts) == nil {
		return texts
	}
	var all map[string]any
	if json.Unmarshal(headers, &all) != nil {
		return nil
	}
	texts = make(map[string]string, len(all))
	for name, value := range all {
		if text, ok := value.(string); ok {
			texts[name] = text
		}
	}
	return texts
}
