package delivery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DB is a pool, a connection or a transaction.
type DB interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, query string, args ...any) pgx.Row
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Lanes is the number of lanes. All events of an aggregate are in one of them.
const Lanes = 64

// Register records that a sink is served, and that it wants the events whose types start with one of the prefixes in
// types; nil: all events. A new sink gets the events that are open at that time and all later ones. outbox_replay
// gives it events that were published before.
func Register(ctx context.Context, db DB, sink string, types []string) error {
	if types == nil {
		types = []string{}
	}
	// If types changed, events below the floors may be wanted now, so the floors are reset.
	_, err := db.Exec(ctx, `
		WITH before AS (
			SELECT types FROM outbox_sink WHERE name = $1
		), sink AS (
			INSERT INTO outbox_sink (name, types) VALUES ($1, $2)
			ON CONFLICT (name) DO UPDATE SET types = excluded.types, seen_at = now()
			RETURNING name
		), lanes AS (`+missingLanes+`)
		UPDATE outbox_lane l SET floor = least(l.floor, 0), next_floor = NULL, next_xid = NULL
		FROM before
		WHERE l.sink = $1 AND l.lane BETWEEN 0 AND 63 AND before.types IS DISTINCT FROM $2`, sink, types)
	if err != nil {
		return fmt.Errorf("register sink %q: %w", sink, err)
	}
	return nil
}

// Registers reports whether another sink could be registered although the sink refused could not. It registers one with
// a name of its own, and rolls back. It returns false if refused is not in the database yet: such a sink would miss the
// events that others get before it is registered, so they have to wait for it.
func Registers(ctx context.Context, db DB, refused string) (works bool, err error) {
	var known bool
	if err := db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_sink WHERE name = $1)`, refused).Scan(&known); err != nil || !known {
		return false, err
	}
	tx, err := db.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // always
	name := "control-" + strings.ReplaceAll(uuid.NewString(), "-", "")
	for range 2 { // the first call inserts the row, the second updates it, as for the refused sink
		if Register(ctx, tx, name, nil) != nil {
			return false, nil
		}
	}
	return true, nil
}

// missingLanes inserts the lane rows that a sink lacks.
const missingLanes = `
	INSERT INTO outbox_lane (sink, lane)
	SELECT sink.name, n FROM sink, generate_series(0, 63) AS n
	WHERE NOT EXISTS (SELECT FROM outbox_lane l WHERE l.sink = sink.name AND l.lane = n)
	ON CONFLICT DO NOTHING`

// Seen records that a dispatcher serves the sink. It creates the sink and its lanes if they are missing.
func Seen(ctx context.Context, db DB, sink string, types []string) error {
	var there bool
	err := db.QueryRow(ctx, `
		WITH sink AS (
			UPDATE outbox_sink SET seen_at = now() WHERE name = $1 RETURNING name
		), lanes AS (`+missingLanes+`)
		SELECT EXISTS (SELECT FROM sink)`, sink).Scan(&there)
	if err != nil {
		return fmt.Errorf("note that sink %q is served: %w", sink, err)
	}
	if !there {
		return Register(ctx, db, sink, types)
	}
	return nil
}

// Pause keeps all dispatchers from publishing to the sink for d. reason is shown in outbox_sink.
func Pause(ctx context.Context, db DB, sink string, d time.Duration, reason string) error {
	_, err := db.Exec(ctx, `
		UPDATE outbox_sink
		SET paused_until = greatest(paused_until, now() + $2 * interval '1 second'), last_error = $3, down_since = coalesce(down_since, now())
		WHERE name = $1`, sink, d.Seconds(), reason)
	if err != nil {
		return fmt.Errorf("pause sink %q: %w", sink, err)
	}
	return nil
}

// Back records that a sink accepts events again. It reports whether the sink was recorded as down, and for how long it
// was. If the sink's row is locked, Back does not wait: it records nothing and reports false, and should be called
// again later.
func Back(ctx context.Context, db DB, sink string) (down time.Duration, was bool, err error) {
	var seconds float64
	err = db.QueryRow(ctx, `
		WITH down AS (
			SELECT name, down_since FROM outbox_sink WHERE name = $1 AND down_since IS NOT NULL FOR UPDATE SKIP LOCKED
		)
		UPDATE outbox_sink s SET down_since = NULL, back_at = now(), last_error = NULL
		FROM down WHERE s.name = down.name
		RETURNING extract(epoch FROM now() - down.down_since)::float8`, sink).Scan(&seconds)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("note that sink %q is back: %w", sink, err)
	}
	return time.Duration(max(min(seconds, 1e9), 0) * float64(time.Second)), true, nil
}

// ErrNoSink means that no sink has the name; ErrServed means that a dispatcher serves it.
var (
	ErrNoSink = errors.New("no such sink")
	ErrServed = errors.New("the sink is served")
)

// seenWithin returns a condition: a dispatcher has recorded within so many seconds that it serves a sink. A time more
// than a minute in the future does not count.
func seenWithin(seconds string) string {
	return `(seen_at > now() - ` + seconds + ` * interval '1 second' AND seen_at < now() + interval '1 minute')`
}

// Abandon removes a sink that no dispatcher has served for at least idle. It returns the number of events that were
// open for the sink, counted up to a million. An event that no other sink still has to get will be marked published.
// Abandon returns ErrNoSink if the sink does not exist, and ErrServed if a dispatcher has served it within idle.
func Abandon(ctx context.Context, db DB, sink string, idle time.Duration) (open int64, err error) {
	if _, err := SetRight(ctx, db, ""); err != nil { // the floor of a damaged lane may be impossible to lower
		return 0, err
	}
	var gone bool
	err = db.QueryRow(ctx, `
		WITH open AS (
			SELECT count(*) AS n
			FROM (SELECT FROM outbox_event e JOIN outbox_sink s ON s.name = $1 AND `+isOpen("s")+`
			      WHERE e.published_at IS NULL AND e.parked_at IS NULL LIMIT 1000000) AS counted
		), gone AS (
			DELETE FROM outbox_sink WHERE name = $1 AND NOT `+seenWithin("$2")+` RETURNING name
		), lowered AS (
			UPDATE outbox_lane l SET floor = least(l.floor, 0), next_floor = NULL, next_xid = NULL FROM gone WHERE l.sink <> gone.name AND l.lane BETWEEN 0 AND 63
		), forgiven AS ( -- what only this one has given up is not parked any more
			UPDATE outbox_event e SET parked_by = nullif(ARRAY(SELECT p FROM unnest(e.parked_by) AS p WHERE p <> gone.name), '{}'), parked_at = NULL
			FROM gone
			WHERE gone.name = ANY (e.parked_by)
		)
		SELECT n, EXISTS (SELECT FROM gone) FROM open JOIN outbox_sink ON name = $1`, sink, idle.Seconds()).Scan(&open, &gone)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, fmt.Errorf("%w: %q", ErrNoSink, sink)
	case err != nil:
		return 0, fmt.Errorf("abandon sink %q: %w", sink, err)
	case !gone:
		return 0, fmt.Errorf("%w: %q, within the last %v", ErrServed, sink, idle)
	}
	return open, nil
}

// Unserved returns the names of the sinks that no dispatcher has served for at least since, except those in served.
func Unserved(ctx context.Context, db DB, served []string, since time.Duration) ([]string, error) {
	rows, _ := db.Query(ctx, `
		SELECT name FROM outbox_sink
		WHERE name <> ALL ($1) AND NOT `+seenWithin("$2")+`
		ORDER BY name`, served, since.Seconds())
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look for sinks that nobody serves: %w", err)
	}
	return names, nil
}

// A Lag is how far a sink is behind.
type Lag struct {
	Open   int           // events that the sink has to get, counted up to 100,000
	Oldest time.Duration // age of the oldest of them; 0: there is none
	Parked int           // events that are parked for the sink
}

// LagOf returns how far a sink is behind.
func LagOf(ctx context.Context, db DB, sink string) (l Lag, err error) {
	var seconds float64
	// Lanes whose row is missing are counted, too.
	const lanes = `generate_series(0, 63) AS g (lane) LEFT JOIN outbox_lane r ON r.sink = s.name AND r.lane = g.lane
		              CROSS JOIN LATERAL (SELECT g.lane, coalesce(r.floor, -9223372036854775808) AS floor) AS l`
	err = db.QueryRow(ctx, `
		SELECT (SELECT count(*)
		        FROM (SELECT
		              FROM `+lanes+` CROSS JOIN LATERAL (SELECT FROM outbox_event e WHERE `+openInLane+` ORDER BY e.id LIMIT 100000) AS o
		              LIMIT 100000) AS counted),
		       coalesce(extract(epoch FROM now() - (
		           SELECT greatest(least(min(o.created_at), now()), now() - interval '1000000 days')
		           FROM `+lanes+` CROSS JOIN LATERAL (SELECT e.created_at FROM outbox_event e WHERE `+openInLane+` ORDER BY e.id LIMIT 1) AS o
		           HAVING count(*) > 0))::float8, 0),
		       (SELECT count(*) FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NOT NULL)
		FROM outbox_sink s
		WHERE s.name = $1`, planned, sink).Scan(&l.Open, &seconds, &l.Parked)
	l.Oldest = time.Duration(max(seconds, 0) * float64(time.Second))
	if err != nil {
		return l, fmt.Errorf("measure the lag of sink %q: %w", sink, err)
	}
	return l, nil
}
