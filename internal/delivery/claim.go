// Package delivery is what a dispatcher does in the database: it claims lanes of events for a sink, reads what is due in them, and marks what became of it.
// Package outbox appends the events.
package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
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
	Refused   string // why it cannot be sent: it is larger than any event may be. Payload and Headers are nil then
	Attempt   int    // how often this sink was tried with it before
	Rejected  int    // how often it said that it does not want it
	Wanted    bool   // false: no sink wants it; it is only to be marked
	Lane      int16
	Round     int64 // of its lane: grows with each replay, after which what was delivered before counts no more
}

// A Claim is the right to publish the events of some lanes to a sink.
type Claim struct {
	Sink  string
	Token uuid.UUID     // drawn for this claim
	Lanes int           // claimed; 0: nothing is due
	Ahead time.Duration // how far the database's clock is ahead of this machine's
	Rows  []Row         // in order of id

	// AnyState has MarkApart take any SQLSTATE for an answer about an event. Set it when one of the events could not be marked for a minute,
	// whatever marking failed with: a trigger of the user's may raise any.
	AnyState bool
}

// LongestClaim is how long a claim may last. One that is to last longer was not made by a dispatcher, and is over.
const LongestClaim = time.Hour

// What an event may have at most, as text, in bytes. One from before there was a limit is not sent.
const (
	mostPayload = 8 << 20
	mostHeaders = 64 << 10
)

// Limits bound a claim.
type Limits struct {
	Events int           // at most
	Bytes  int           // of payloads and headers at most, but one event always
	Lanes  int           // at most, so that others find some, too
	Length time.Duration // how long the claim lasts, LongestClaim at most; after that it is anybody's

	Except []int64     // events that are not read
	Apart  []uuid.UUID // aggregates of which none is read
}

// readable says which events e are not excepted, as a condition to be added, and what its two
// parameters are, the first of which has the number n.
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

// isOpen says whether a sink still has to do something about the event e. It is no function of the
// database: that would take the event as a whole row, and where a plan keeps rows it then reads all
// payloads to keep them.
func isOpen(sink string) string {
	return strings.ReplaceAll(`((cardinality(S.types) = 0 OR e.event_type ^@ ANY (S.types))
		AND (S.name = ANY (e.delivered_to)) IS NOT TRUE AND (S.name = ANY (e.parked_by)) IS NOT TRUE)`, "S.", sink+".")
}

// planned has the database plan a statement each time. A plan that was made while the outbox was
// empty, and kept, reads all of it for each lane until the next ANALYZE.
const planned = pgx.QueryExecModeCacheDescribe

// notParked says that the sink s has not given up the event e. A row that refuses every change still says open
// when its delivery was parked. It is no anti-join: that would be one more way to plan for. And it does not end
// with IS NULL: the planner believes that hardly any row is so, and sorts all there are to get the first.
const notParked = `(SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE`

// openInLane are the events e that the sink s has to get, or that nobody has to get any more, from
// the floor of a lane l on. To the letter it holds what outbox_event_open_idx is about.
var openInLane = `e.lane = l.lane AND e.id > l.floor AND e.published_at IS NULL AND e.parked_at IS NULL
	AND (` + isOpen("s") + ` OR NOT EXISTS (SELECT FROM outbox_sink o WHERE ` + isOpen("o") + `)) AND ` + notParked

// dueInLane are those of them whose aggregates do not wait for another try. Nothing waits longer than the longest
// backoff there can be.
var dueInLane = openInLane + `
	AND NOT EXISTS (SELECT FROM outbox_delivery d
	                WHERE d.sink = s.name AND d.aggregate_id = e.aggregate_id AND d.parked_at IS NULL
	                  AND d.next_attempt_at > now() AND d.next_attempt_at < now() + interval '2 years')`

// sizeOfHeaders is the size of an event's headers as text. What is stored may be compressed to a hundredth of that. Only what is
// small, and not compressed, is not read for it: of that the text is hardly larger.
const sizeOfHeaders = `CASE WHEN e.headers IS NULL THEN 0
		WHEN pg_column_size(e.headers) <= 300 AND pg_column_compression(e.headers) IS NULL THEN pg_column_size(e.headers)
		ELSE octet_length(e.headers::text) END`

// Open reports whether there is anything above the sink's floors that anybody still has to get: a look
// that costs little where there is nothing.
func Open(ctx context.Context, db DB, sink string) (open bool, err error) {
	err = db.QueryRow(ctx, `
		SELECT EXISTS (
			SELECT
			FROM outbox_lane l CROSS JOIN LATERAL (
				SELECT FROM outbox_event e
				WHERE e.lane = l.lane AND e.id > l.floor AND e.published_at IS NULL AND e.parked_at IS NULL
				ORDER BY e.id
				LIMIT 1) AS first
			WHERE l.sink = $1)`, planned, sink).Scan(&open)
	if err != nil {
		return false, fmt.Errorf("look at the outbox: %w", err)
	}
	return open, nil
}

// Acquire claims lanes in which something is due, those served longest ago first, and reads it.
// What is claimed is published, then marked: that gives the lanes back.
func Acquire(ctx context.Context, db DB, sink, dispatcher string, limits Limits) (*Claim, error) {
	c := &Claim{Sink: sink, Token: uuid.New()}
	var now time.Time
	readable, excepted := limits.readable(6)
	err := db.QueryRow(ctx, `
		WITH claimed AS (
			UPDATE outbox_lane
			SET claim_token = $2, claimed_by = $3, claim_until = clock_timestamp() + $4 * interval '1 second', served_at = clock_timestamp()
			WHERE (sink, lane) IN (
				SELECT l.sink, l.lane
				FROM outbox_lane l JOIN outbox_sink s ON s.name = l.sink
				  CROSS JOIN LATERAL (SELECT FROM outbox_event e WHERE `+dueInLane+readable+` ORDER BY e.id LIMIT 1) AS first
				WHERE l.sink = $1 AND l.lane BETWEEN 0 AND 63
				  AND (l.claim_until IS NULL OR l.claim_until < clock_timestamp() OR l.claim_until > clock_timestamp() + interval '61 minutes') -- LongestClaim, and a little for clocks
				  AND (s.paused_until IS NULL OR s.paused_until < clock_timestamp())
				ORDER BY CASE WHEN l.served_at <= clock_timestamp() THEN l.served_at ELSE '-infinity' END
				LIMIT $5
				FOR NO KEY UPDATE OF l SKIP LOCKED)
			RETURNING lane
		)
		SELECT count(*), clock_timestamp() FROM claimed`, append([]any{planned, sink, c.Token, dispatcher, limits.Length.Seconds(), limits.Lanes}, excepted...)...).Scan(&c.Lanes, &now)
	if err != nil {
		return nil, fmt.Errorf("claim lanes of sink %q: %w", sink, err)
	}
	if c.Lanes == 0 {
		return c, nil
	}
	c.Ahead = time.Until(now)
	// A statement of its own: it sees what was marked before the lanes were free. The first of all
	// lanes come before the second of any, so none waits for a long one.
	perLane := max(1, limits.Events/c.Lanes)
	readable, excepted = limits.readable(7)
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
		_, _ = Mark(back, db, c, nil) // or the lanes wait for the claim to run out
		return nil, fmt.Errorf("read events for sink %q: %w", sink, err)
	}
	return c, nil
}

// stringsOf returns the headers that are texts, which all are that Append has written.
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
