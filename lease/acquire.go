package lease

import (
	"bytes"
	"cmp"
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
)

// discover finds the lanes that have open runs, and the first of each: nothing before it is
// open. Each lane costs a probe or two of the index, however many rows it has. What is paused
// comes with them, even if nothing is open.
func (p *Poller) discover(ctx context.Context) error {
	// Bytes are compared: everything that starts with "billing." lies below "billing/".
	highs := column(p.Prefixes, func(prefix string) string { return strings.TrimSuffix(prefix, ".") + "/" })
	start := time.Now()
	// From each lane on to the next: of the same type, or else the first of the next type. It
	// is one recursion because the planner takes two, one in the other, for so much work that
	// it would have them compiled.
	rows, _ := p.DB.Query(ctx, `
		WITH RECURSIVE lane AS (
			SELECT f.*, p.high
			FROM unnest($1::text[], $2::text[]) AS p (low, high) CROSS JOIN unnest('{f,t}'::boolean[]) AS s (suspect)
			CROSS JOIN LATERAL (
				SELECT suspect, type, priority, run_at, id FROM workflow_run
				WHERE `+open+` AND suspect = s.suspect AND type >= p.low COLLATE "C" AND type < p.high COLLATE "C"
				ORDER BY type, priority DESC, run_at, id LIMIT 1) AS f
			UNION ALL
			SELECT n.*, l.high
			FROM lane l CROSS JOIN LATERAL (
				(SELECT suspect, type, priority, run_at, id FROM workflow_run
				 WHERE `+open+` AND suspect = l.suspect AND type = l.type AND priority < l.priority
				 ORDER BY priority DESC, run_at, id LIMIT 1)
				UNION ALL
				(SELECT suspect, type, priority, run_at, id FROM workflow_run
				 WHERE `+open+` AND suspect = l.suspect AND type > l.type AND type < l.high COLLATE "C"
				 ORDER BY type, priority DESC, run_at, id LIMIT 1)
				LIMIT 1) AS n
		)
		SELECT paused, coalesce(suspect, false), coalesce(type, ''), coalesce(priority, 0), coalesce(run_at, now()),
		       coalesce(id, '00000000-0000-0000-0000-000000000000'), coalesce(extract(epoch FROM run_at - clock_timestamp()), 0)::float8
		FROM (SELECT array_agg(prefix) AS paused FROM workflow_pause WHERE resumed_at IS NULL) AS p LEFT JOIN lane ON true`, p.Prefixes, highs)
	heads, err := pgx.CollectRows(rows, pgx.RowToStructByPos[head])
	if err != nil {
		return fmt.Errorf("look for due runs: %w", err)
	}
	p.paused = heads[0].Paused // one row at least
	p.merge(slices.DeleteFunc(heads, func(h head) bool { return h.Type == "" || p.isPaused(h.Type) }), start)
	return nil
}

// isPaused reports whether an operator wants no run of the type to be leased: the type itself, or a
// prefix of it that ends with a dot, is in workflow_pause.
func (p *Poller) isPaused(typ string) bool {
	return slices.ContainsFunc(p.paused, func(prefix string) bool {
		return prefix == typ || strings.HasSuffix(prefix, ".") && strings.HasPrefix(typ, prefix)
	})
}

// A head is the first open run of a lane; no Type: there is none.
type head struct {
	Paused   []string // prefixes and types, the same in all
	Suspect  bool
	Type     string
	Priority int
	RunAt    time.Time
	ID       uuid.UUID
	DueIn    float64 // seconds
}

// merge takes over what discovery, begun at start, has found: all lanes that have open runs.
func (p *Poller) merge(heads []head, start time.Time) {
	if p.lanes == nil {
		p.lanes = make(map[lane]*position, len(heads))
	}
	for _, h := range heads {
		key := lane{h.Suspect, h.Type, h.Priority}
		at := p.lanes[key]
		wait := time.Duration(min(h.DueIn, 1e9) * float64(time.Second))
		switch {
		case at == nil && wait > 0:
			at = &position{runAt: h.RunAt.Add(-wait - slack)}
		case at == nil:
			at = &position{}
		}
		if wait <= 0 {
			at.runAt, at.id = h.RunAt, h.ID
		}
		at.seen = start
		at.dueFrom = start.Add(wait + p.Terms(h.Type).Grace)
		p.lanes[key] = at
	}
	for key, at := range p.lanes {
		if at.seen.Equal(start) {
			continue
		}
		at.dueFrom = time.Time{}
		if start.Sub(at.seen) > memory {
			delete(p.lanes, key)
		}
	}
}

// take leases up to n runs from the chosen lanes, in their order. found is how many were
// due; where lanes share their room, more than could be leased.
func (p *Poller) take(ctx context.Context, chosen []request, n, suspects int) (leases []Lease, found int, err error) {
	token, err := uuid.NewRandom()
	if err != nil {
		return nil, 0, fmt.Errorf("draw a lease token: %w", err)
	}
	sent := time.Now()
	leases, found, err = p.lease(ctx, chosen, n, suspects, token)
	if err != nil {
		var refused *pgconn.PgError // an answer, and not that of a server on its way down
		// pgx calls it safe, too, when a connection broke under a simple query that was sent.
		unsent := pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
		if !unsent && !(errors.As(err, &refused) && !strings.HasPrefix(refused.Code, "57")) {
			p.doubts = append(p.doubts, doubt{token: token, sent: sent})
		}
		return nil, 0, fmt.Errorf("lease runs: %w", err)
	}
	terms := make(map[string]Terms, len(chosen))
	for _, r := range eachType(chosen) {
		terms[r.typ] = r.Terms
	}
	for i := range leases {
		l := &leases[i]
		l.Token, l.Taken, l.Worker = token, sent, p.Worker
		l.Length, l.Timeout = terms[l.Type].Length, terms[l.Type].Timeout
		if l.Suspect && !l.Exhausted {
			p.alone = l.Attempt >= l.MaxAttempts || terms[l.Type].Limit > 0 && l.Attempt >= terms[l.Type].Limit
		}
	}
	slices.SortFunc(leases, func(a, b Lease) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.runAt.Compare(b.runAt), bytes.Compare(a.ID[:], b.ID[:]))
	})
	return leases, found, nil
}

// lease is the one statement of take.
//
// due pulls row by row: the limit outside stops it in the middle of a lane, and no row too
// many is locked, except where lanes share their room, or some suspects are passed over: chosen
// drops these. The ids go through
// an array so that the update finds its rows by primary key, whatever the planner thinks of
// the table. statement_timestamp is now(), but right in an old transaction. No history is
// written: while a run is leased its row says so, and what ends the lease tells of it.
func (p *Poller) lease(ctx context.Context, chosen []request, n, suspects int, token uuid.UUID) (leases []Lease, found int, err error) {
	rows, _ := p.DB.Query(ctx, `
		WITH due AS MATERIALIZED (
			SELECT r.id, r.run_at, r.attempt + 1 = least(r.max_attempts, l.most) AS last, l.place, l.suspect, l.room, l.team
			FROM unnest($1::boolean[], $2::text[], $3::int[], $4::timestamptz[], $5::uuid[], $6::float8[], $7::int[], $8::text[], $9::int[])
			  WITH ORDINALITY AS l (suspect, type, priority, from_at, from_id, grace, room, team, most, place)
			CROSS JOIN LATERAL (
				SELECT id, run_at, attempt, max_attempts FROM workflow_run
				WHERE `+open+` AND suspect = l.suspect AND type = l.type AND priority = l.priority
				  AND run_at <= statement_timestamp() - l.grace * interval '1 second'
				  AND (run_at, id) >= (l.from_at, l.from_id) AND ($10 OR token_id IS NULL)
				ORDER BY run_at, id
				LIMIT CASE WHEN l.suspect THEN least(l.room, $11 + 20) ELSE l.room END
				FOR UPDATE SKIP LOCKED) r
			LIMIT $12
		), chosen AS (
			`+p.withinRoom(chosen, n)+`
		), leased AS (
			UPDATE workflow_run w
			SET status = 'leased', lease_token = $13, leased_by = $14, lease_no = w.lease_no + 1,
			    attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
			    started_at = statement_timestamp(), updated_at = statement_timestamp(),
			    lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
			    deadline_at = statement_timestamp()
			        + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
			FROM unnest($15::text[], $16::float8[], $17::float8[]) AS t (type, length, timeout)
			WHERE w.id = ANY (ARRAY(SELECT id FROM chosen)) AND w.type = t.type COLLATE "C"
			RETURNING w.id, w.type, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
			          w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at AS exhausted, w.run_at, w.token_id
		)
		SELECT (SELECT count(*) FROM due), leased.*
		FROM leased`,
		slices.Concat(laneColumns(chosen, n), []any{p.Steps, suspects, n, token, p.Worker}, termColumns(chosen))...)
	for rows.Next() {
		l, err := scanLease(rows, &found)
		if err != nil {
			rows.Close()
			return nil, 0, err
		}
		if leases == nil {
			leases = make([]Lease, 0, found)
		}
		leases = append(leases, l)
	}
	return leases, found, rows.Err()
}

// withinRoom returns the query of those due rows that may be leased: all of them, unless
// lanes share a room, or the place for suspects, which their limits one by one cannot keep.
//
// A suspect at its last attempt is leased alone, when it is the first of all and none is watched;
// the others pass it over. They wait, too, once it is late, but only until one has had its turn:
// then they go first, so that neither kind waits for long.
func (p *Poller) withinRoom(chosen []request, n int) string {
	if !slices.ContainsFunc(chosen, func(r request) bool { return r.suspect || r.Room < n }) {
		return `SELECT id FROM due`
	}
	group := `NOT last AND in_group <= $11`
	fits := `CASE WHEN first THEN in_kind = 1 ELSE ` + group + ` AND late = 0 END`
	switch {
	case p.Watched && p.alone:
		fits = group
	case p.Watched:
		fits = group + ` AND late = 0`
	case p.alone:
		fits = `CASE WHEN groups = 0 THEN in_kind = 1 ELSE ` + group + ` END`
	}
	return `
			SELECT id
			FROM (SELECT id, suspect, room, last,
			             row_number() OVER (PARTITION BY team ORDER BY place, run_at, id) AS in_team,
			             row_number() OVER kind AS in_kind,
			             row_number() OVER (PARTITION BY suspect, last ORDER BY place, run_at, id) AS in_group,
			             first_value(last) OVER kind AS first,
			             count(*) FILTER (WHERE NOT last) OVER (PARTITION BY suspect) AS groups,
			             count(*) FILTER (WHERE last AND run_at < statement_timestamp() - interval '5 seconds') OVER kind AS late
			      FROM due
			      WINDOW kind AS (PARTITION BY suspect ORDER BY place, run_at, id)) AS d
			WHERE in_team <= room AND (NOT suspect OR ` + fits + `)`
}

// scanLease reads the columns of a leased run, which follow those of first.
func scanLease(row pgx.CollectableRow, first ...any) (Lease, error) {
	var l Lease
	var key, tenant *string
	var metadata, payload []byte
	var step *uuid.UUID
	id := (*[16]byte)(&l.ID) // without its Scan method, which pgx would go a long way round to call
	err := row.Scan(append(first, id, &l.Type, &l.Attempt, &l.MaxAttempts, &l.LeaseNo, &key, &tenant, &metadata,
		&l.StartedAt, &payload, &l.Priority, &l.Postponed, &l.Suspect, &l.Exhausted, &l.runAt, &step)...)
	if key != nil {
		l.IdempotencyKey = *key
	}
	if tenant != nil {
		l.Tenant = *tenant
	}
	if step != nil {
		l.Step = *step
	}
	l.Metadata, l.Payload = json.RawMessage(metadata), json.RawMessage(payload)
	return l, err
}
