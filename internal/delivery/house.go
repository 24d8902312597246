package delivery

import (
	"context"
	"fmt"
)

// nearest is how far the sequence follows ids that are above d.last, which was drawn last.
const nearest = `least(d.last, 9223372036854775807 - 1099511627776) + 1099511627776`

// RaiseFloors lets reading start later, past what the sink is done with. Without it reading passes
// over everything that other sinks have not got, and over what was published since the last vacuum.
//
// An id is drawn before its transaction ends, so below the first open event one may still appear.
// What is the floor's next place is therefore noted with the transactions that are under way, and
// becomes the floor when all of them have ended: all that have a lower number than this one. (The xmax of a
// snapshot is no such number: it is that of the newest one under way, if nobody has ended since.) One that was noted in another cluster, from which the
// database was restored, is noted anew. Lanes that somebody has locked keep their floors until the next time.
//
// A floor never passes what was drawn: an event may have an id that was not. Where one has, or ids are above the
// sequence that it may follow, SetRight is called.
func RaiseFloors(ctx context.Context, db DB, sink string) error {
	var wrong bool
	// What was drawn last is asked before the first lock gives this transaction its number: who draws later has a higher one.
	err := db.QueryRow(ctx, `
		WITH d AS MATERIALIZED (
			SELECT outbox_last_id_v1() AS last
		), n AS MATERIALIZED (
			SELECT l.lane, least((SELECT last FROM d), coalesce(
				(SELECT e.id - 1 FROM outbox_event e WHERE `+openInLane+` ORDER BY e.id LIMIT 1),
				(SELECT id FROM outbox_event ORDER BY id DESC LIMIT 1), 0)) AS free
			FROM outbox_lane l JOIN outbox_sink s ON s.name = l.sink
			WHERE l.sink = $1 AND l.lane BETWEEN 0 AND 63
		), rising AS MATERIALIZED (
			SELECT l.lane, n.free
			FROM outbox_lane l JOIN n USING (lane)
			WHERE l.sink = $1 AND n.free > l.floor
			  AND (l.next_floor IS NULL OR l.next_xid IS NULL OR l.next_xid <= pg_snapshot_xmin(pg_current_snapshot())
			       OR l.next_xid > pg_snapshot_xmax(pg_current_snapshot()))
			FOR NO KEY UPDATE OF l SKIP LOCKED
		), raised AS (
			UPDATE outbox_lane l
			SET floor = CASE WHEN l.next_floor IS NOT NULL AND l.next_xid <= pg_snapshot_xmin(pg_current_snapshot()) THEN greatest(l.floor, least(l.next_floor, n.free)) ELSE l.floor END,
			    next_floor = n.free, next_xid = pg_current_xact_id()
			FROM rising n
			WHERE l.sink = $1 AND l.lane = n.lane
		)
		SELECT coalesce((SELECT max(l.floor) FROM outbox_lane l WHERE l.sink = $1 AND l.lane BETWEEN 0 AND 63) > d.last
		             OR (SELECT e.id FROM outbox_event e WHERE e.id <= `+nearest+` ORDER BY e.id DESC LIMIT 1) > d.last, false)
		FROM d`, planned, sink).Scan(&wrong)
	if err != nil {
		return fmt.Errorf("raise the floors of sink %q: %w", sink, err)
	}
	if wrong {
		_, err = SetRight(ctx, db, sink)
	}
	return err
}

// SetRight makes lanes of a sink ("": of all) anew that are missing, sets back what no lane can have, lowers floors below events
// that should not be there (of ids that were not drawn from the sequence, or drawn by a transaction that was slow to begin
// writing), and has the sequence go on after the ids that there are. It answers what it did; "": nothing was wrong.
//
// It reads everything that is open below the floors, so it is for now and then.
func SetRight(ctx context.Context, db DB, sink string) (did string, err error) {
	if err := db.QueryRow(ctx, `SELECT outbox_set_right_v1(nullif($1, ''))`, planned, sink).Scan(&did); err != nil {
		return "", fmt.Errorf("set right the outbox of sink %q: %w", sink, err)
	}
	if did == "nothing was wrong" {
		did = ""
	}
	return did, nil
}
