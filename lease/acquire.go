package lease

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/run"
)

// discover replaces the known lanes by those that have rows now, keeping positions. Each
// type, and each priority of a type, costs one probe of the index, however many rows it has.
func (p *Poller) discover(ctx context.Context) error {
	lows, highs := make([]string, len(p.Prefixes)), make([]string, len(p.Prefixes))
	for i, prefix := range p.Prefixes {
		// Bytes are compared: everything that starts with "billing." lies below "billing/".
		lows[i], highs[i] = prefix, strings.TrimSuffix(prefix, ".")+"/"
	}
	type found struct {
		Suspect  bool
		Type     string
		Priority int
		RunAt    time.Time
		DueIn    float64
	}
	start := time.Now()
	rows, _ := p.DB.Query(ctx, `
		WITH RECURSIVE prefix AS (
			SELECT suspect, low, high
			FROM unnest($1::text[], $2::text[]) AS p (low, high), unnest('{f,t}'::boolean[]) AS s (suspect)
		), kind AS (
			SELECT f.suspect, f.type, p.high
			FROM prefix p CROSS JOIN LATERAL (
				SELECT suspect, type FROM workflow_run
				WHERE `+open+` AND suspect = p.suspect AND type >= p.low COLLATE "C" AND type < p.high COLLATE "C"
				ORDER BY type LIMIT 1) f
			UNION ALL
			SELECT n.suspect, n.type, k.high
			FROM kind k CROSS JOIN LATERAL (
				SELECT suspect, type FROM workflow_run
				WHERE `+open+` AND suspect = k.suspect AND type > k.type AND type < k.high COLLATE "C"
				ORDER BY type LIMIT 1) n
		), lane AS (
			SELECT h.*
			FROM kind k CROSS JOIN LATERAL (
				SELECT suspect, type, priority, run_at FROM workflow_run
				WHERE `+open+` AND suspect = k.suspect AND type = k.type
				ORDER BY priority DESC, run_at LIMIT 1) h
			UNION ALL
			SELECT n.*
			FROM lane l CROSS JOIN LATERAL (
				SELECT suspect, type, priority, run_at FROM workflow_run
				WHERE `+open+` AND suspect = l.suspect AND type = l.type AND priority < l.priority
				ORDER BY priority DESC, run_at LIMIT 1) n
		)
		SELECT suspect, type, priority, run_at, extract(epoch FROM run_at - clock_timestamp())::float8
		FROM lane`, lows, highs)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[found])
	if err != nil {
		return fmt.Errorf("look for due runs: %w", err)
	}
	lanes := make(map[lane]*position, len(all))
	for _, f := range all {
		key := lane{f.Suspect, f.Type, f.Priority}
		at := p.lanes[key]
		if at == nil {
			at = &position{}
		}
		at.head = f.RunAt
		at.dueFrom = start
		if wait := time.Duration(min(f.DueIn, 1e9) * float64(time.Second)); wait > 0 {
			at.dueFrom = start.Add(wait)
		}
		if grace := p.Terms(f.Type).Grace; grace > 0 {
			at.dueFrom = at.dueFrom.Add(grace)
		}
		lanes[key] = at
	}
	p.lanes = lanes
	return nil
}

// take leases up to n runs from the chosen lanes, in their order, in one statement.
func (p *Poller) take(ctx context.Context, chosen []request, n int) ([]Lease, error) {
	k := len(chosen)
	suspect, types, priorities := make([]bool, k), make([]string, k), make([]int, k)
	afters, afterIDs := make([]time.Time, k), make([]uuid.UUID, k)
	most, graces, lengths, timeouts := make([]int, k), make([]float64, k), make([]float64, k), make([]*float64, k)
	terms := make(map[string]Terms, k)
	for i, r := range chosen {
		suspect[i], types[i], priorities[i] = r.suspect, r.typ, r.priority
		afters[i], afterIDs[i] = r.from.runAt, r.from.id
		most[i], graces[i], lengths[i] = r.most, r.Grace.Seconds(), r.Length.Seconds()
		if r.Timeout > 0 {
			seconds := r.Timeout.Seconds()
			timeouts[i] = &seconds
		}
		terms[r.typ] = r.Terms
	}
	token, err := uuid.NewRandom()
	if err != nil {
		return nil, fmt.Errorf("draw a lease token: %w", err)
	}
	taken := time.Now()
	// due pulls row by row: the limit outside stops it in the middle of a lane, and no row
	// too many is locked. The ids go through an array so that the update finds its rows by
	// primary key, whatever the planner thinks of the table.
	rows, _ := p.DB.Query(ctx, `
		WITH `+audited+`, due AS MATERIALIZED (
			SELECT r.id, r.spent, l.length * interval '1 second' AS length, l.timeout * interval '1 second' AS timeout
			FROM unnest($1::boolean[], $2::text[], $3::int[], $4::timestamptz[], $5::uuid[],
			            $6::int[], $7::float8[], $8::float8[], $9::float8[])
			  AS l (suspect, type, priority, after_at, after_id, most, grace, length, timeout)
			CROSS JOIN LATERAL (
				SELECT id, attempt >= max_attempts AS spent FROM workflow_run
				WHERE `+open+` AND suspect = l.suspect AND type = l.type AND priority = l.priority
				  AND run_at <= now() - l.grace * interval '1 second' AND (run_at, id) > (l.after_at, l.after_id)
				  AND ($10 OR token_id IS NULL)
				ORDER BY run_at, id
				LIMIT l.most
				FOR UPDATE SKIP LOCKED) r
			LIMIT $11
		), leased AS (
			UPDATE workflow_run w
			SET status = 'leased', lease_token = $12, leased_by = $13, lease_no = w.lease_no + 1,
			    attempt = w.attempt + CASE WHEN d.spent THEN 0 ELSE 1 END,
			    started_at = now(), updated_at = now(),
			    lease_until = now() + least(d.length, d.timeout),
			    deadline_at = CASE WHEN d.spent THEN now() ELSE now() + d.timeout END
			FROM audit, due d
			WHERE w.id = ANY (ARRAY(SELECT id FROM due)) AND w.id = d.id
			RETURNING w.id, w.type, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.metadata,
			          w.started_at, w.payload, w.priority, w.postponed, w.suspect, d.spent, w.run_at
		), history AS (
			INSERT INTO workflow_event (workflow_id, event_type, attempt, lease_no, actor)
			SELECT l.id, 'leased', l.attempt, l.lease_no, $13
			FROM leased l, audit
			WHERE audit.writer = 'self'
		), done AS (
			SELECT set_config('workflow.audit', audit.before, true)
			FROM audit, (SELECT count(*) FROM leased) AS all_of_them
		)
		SELECT leased.*
		FROM leased, done`,
		suspect, types, priorities, afters, afterIDs, most, graces, lengths, timeouts, p.Steps, n, token, p.Worker)
	leases, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Lease, error) { return scanLease(row) })
	if err != nil {
		p.inDoubt = append(p.inDoubt, token)
		return nil, fmt.Errorf("lease runs: %w", err)
	}
	for i := range leases {
		l := &leases[i]
		l.Token, l.Taken, l.Worker = token, taken, p.Worker
		l.Length, l.Timeout = terms[l.Type].Length, terms[l.Type].Timeout
	}
	slices.SortFunc(leases, func(a, b Lease) int { return b.Priority - a.Priority })
	return leases, nil
}

// scanLease reads the columns of a leased run, which follow those of first.
func scanLease(row pgx.CollectableRow, first ...any) (Lease, error) {
	var l Lease
	var key *string
	var metadata, payload []byte
	err := row.Scan(append(first, &l.ID, &l.Type, &l.Attempt, &l.MaxAttempts, &l.LeaseNo, &key, &metadata,
		&l.StartedAt, &payload, &l.Priority, &l.Postponed, &l.Suspect, &l.Exhausted, &l.runAt)...)
	if key != nil {
		l.IdempotencyKey = *key
	}
	l.Metadata, l.Payload = json.RawMessage(metadata), json.RawMessage(payload)
	return l, err
}

// giveBack returns the leases taken with token, if there are any, with no attempt charged:
// their handlers were never started. Exhausted ones (their deadline is their start) were
// not charged and are left to expire.
func giveBack(ctx context.Context, db run.DB, token uuid.UUID, worker string) error {
	_, err := db.Exec(ctx, `
		WITH `+audited+`, returned AS (
			UPDATE workflow_run w
			SET status = 'pending', attempt = w.attempt - 1, run_at = now(), updated_at = now(),
			    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
			FROM audit
			WHERE w.status = 'leased' AND w.started_at > now() - interval '25 hours' AND w.lease_token = $1
			  AND w.deadline_at IS DISTINCT FROM w.started_at
			RETURNING w.id, w.attempt + 1 AS attempt, w.lease_no
		), history AS (
			INSERT INTO workflow_event (workflow_id, event_type, attempt, lease_no, actor, data)
			SELECT r.id, 'released', r.attempt, r.lease_no, $2, '{"reason": "the answer to the lease was lost"}'
			FROM returned r, audit
			WHERE audit.writer = 'self'
		)
		SELECT set_config('workflow.audit', audit.before, true)
		FROM audit, (SELECT count(*) FROM returned) AS all_of_them`, token, worker)
	if err != nil {
		return fmt.Errorf("give back leases in doubt: %w", err)
	}
	return nil
}
