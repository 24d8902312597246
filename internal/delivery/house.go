package delivery

import (
	"context"
	"fmt"
)

// nearest is the highest id that the sequence follows: 2^40 above d.last, the id that was drawn last.
const nearest = `least(d.last, 9223372036854775807 - 1099511627776) + 1099511627776`

// raisedFloor is the floor of the lane l by now; notesNext is a condition: the next floor may be noted. n.free is one
// below the lane's first open event, or lower. See RaiseFloors.
const (
	raisedFloor = `CASE WHEN l.next_floor IS NOT NULL AND l.next_xid <= pg_snapshot_xmin(pg_current_snapshot()) THEN greatest(l.floor, least(l.next_floor, n.free)) ELSE l.floor END`
	notesNext   = `(l.next_floor IS NULL OR l.next_xid IS NULL OR l.next_xid <= pg_snapshot_xmin(pg_current_snapshot())
		OR l.next_xid > pg_snapshot_xmax(pg_current_snapshot()))`
)

// RaiseFloors raises the sink's floors past the events that it is done with, so that reading starts later. Without it,
// reading would skip every event that other sinks have not got, and every event published since the last vacuum.
//
// An id is drawn before its transaction ends, so an event may still appear below the first open one. RaiseFloors
// therefore works in two steps. It notes the last id drawn together with the number of its own transaction. Once all
// transactions with a lower number have ended, no event can appear up to that id any more, and a later call raises the
// floor up to it, or up to the first event that is open then. (The xmax of a snapshot cannot take the place of that
// number: it is one above the last transaction that has ended, and running transactions may have higher numbers.) If
// the database was restored from another cluster, a number from there means nothing here, and is replaced. Locked lanes
// keep their floors until the next call. Acquire does the same for the lanes that it claims.
//
// A floor never passes the last id that was drawn from the sequence, although an event may have a higher id that was
// inserted by hand. If a floor is above that id, or if an event is that the sequence may follow (see nearest),
// RaiseFloors calls SetRight.
func RaiseFloors(ctx context.Context, db DB, sink string) error {
	var wrong bool
	// The last drawn id is read before the first lock gives this transaction its number. A transaction has a number
	// before it draws, so those that drew up to that id have lower numbers.
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
			WHERE l.sink = $1 AND n.free > l.floor AND `+notesNext+`
			FOR NO KEY UPDATE OF l SKIP LOCKED
		), raised AS (
			UPDATE outbox_lane l
			SET floor = `+raisedFloor+`, next_floor = (SELECT last FROM d), next_xid = pg_current_xact_id()
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

// SetRight repairs the lanes of a sink, or of all sinks if sink is "". It creates missing lanes, resets values that no
// lane can have, and lowers floors below open events. (An event is open below a floor if its id was not drawn from the
// sequence, or was drawn by a transaction that was slow to begin writing.) It also advances the sequence past the
// existing ids. It returns what it did; "": nothing was wrong.
//
// SetRight reads every open event below the floors, so it should run rarely.
func SetRight(ctx context.Context, db DB, sink string) (did string, err error) {
	if err := db.QueryRow(ctx, `SELECT outbox_set_right_v1(nullif($1, ''))`, planned, sink).Scan(&did); err != nil {
		return "", fmt.Errorf("set right the outbox of sink %q: %w", sink, err)
	}
	if did == "nothing was wrong" {
		did = ""
	}
	return did, nil
}
