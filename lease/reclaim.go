package lease

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Reclaimer takes back leases that have expired, whatever their type, priority or
// length. A run that has attempts left becomes due again after a backoff, as a suspect; one
// that has none is leased once more by the caller, who is to fail it.
//
// It looks at leased rows from the oldest living lease on. An old snapshot keeps the entries
// of leases long settled, so looks further back are rare: over those that may have been
// committed late every few seconds, from the very beginning a fiftieth of the time at most.
type Reclaimer struct {
	DB      run.DB
	Worker  string
	Backoff run.Backoff
	Length  time.Duration // of the leases on exhausted runs
	Steps   bool          // also lease exhausted steps of process graphs

	idle  bool
	looks [len(reach)]glance // the last look with each reach; that with the shortest is the last of all
	whole budget             // of looks from the beginning
}

// lag is how much later than its start a statement that leases runs may commit at most.
const lag = 12 * time.Second

// reach is how much later than its start a lease may be committed for a look to find it, and
// how often such looks are. Almost all leases are committed within a second. If the worker of
// one that took longer dies, it may be taken back some seconds late.
var reach = [...]struct{ back, every time.Duration }{
	{lag, 9 * time.Second},
	{4 * time.Second, 3 * time.Second},
	{time.Second, 0},
}

// A glance is a look that went well: when it began, and the time before which it left no lease
// behind; zero: unknown.
type glance struct{ at, oldest time.Time }

// maxWholePause is the longest pause between two looks from the beginning.
const maxWholePause = time.Minute

// next returns where the look that begins at start shall begin, and the index of its reach;
// -1: at the beginning. A look goes back from where the last one with its reach ended, so
// that none is missed between them.
func (r *Reclaimer) next(start time.Time) (from time.Time, reaching int) {
	if r.looks[len(r.looks)-1].oldest.IsZero() || min(49*r.whole.cost, maxWholePause) <= start.Sub(r.whole.end) {
		return time.Time{}, -1
	}
	for start.Sub(r.looks[reaching].at) < reach[reaching].every {
		reaching++
	}
	return r.looks[reaching].oldest.Add(-reach[reaching].back), reaching
}

// looked notes a look that went well. It stands for all that reach less far.
func (r *Reclaimer) looked(start time.Time, reaching int, found oldest) {
	r.idle = !found.held
	for i := max(reaching, 0); i < len(r.looks); i++ {
		r.looks[i] = glance{at: start, oldest: found.since}
	}
}

// Reclaim takes back up to n expired leases. It returns how many runs became due again, and
// the exhausted runs as leases of the caller.
func (r *Reclaimer) Reclaim(ctx context.Context, n int) (again int, exhausted []Lease, err error) {
	token, err := uuid.NewRandom()
	if err != nil {
		return 0, nil, fmt.Errorf("draw a lease token: %w", err)
	}
	start := time.Now()
	from, reaching := r.next(start)
	found, first, err := r.takeBack(ctx, from, n, 0, token)
	if refused(err) {
		found, first, err = r.takeEach(ctx, from, n, token)
	}
	if reaching < 0 { // also when it failed, or one that takes too long would be tried again and again
		r.whole = spent(start)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("take back expired leases: %w", err)
	}
	r.looked(start, reaching, first)
	for _, l := range found {
		if !l.Exhausted {
			again++
			continue
		}
		l.Token, l.Taken, l.Worker, l.Length = token, start, r.Worker, r.Length
		exhausted = append(exhausted, l)
	}
	return again, exhausted, nil
}

// takeEach takes leases back one by one, past rows whose update is refused, by a trigger of
// the user's perhaps: these are nobody else's trouble.
func (r *Reclaimer) takeEach(ctx context.Context, from time.Time, n int, token uuid.UUID) (taken []Lease, first oldest, err error) {
	for skip := 0; len(taken)+skip < n; {
		one, next, err := r.takeBack(ctx, from, 1, skip, token)
		switch {
		case refused(err):
			skip++
			continue
		case err != nil && len(taken) == 0:
			return nil, first, err
		case err != nil:
			return taken, first, nil
		case len(one) == 0:
			return taken, next, nil
		}
		taken, first = append(taken, one...), next
	}
	return taken, first, nil
}

// refused reports whether the database objects to what is to be stored.
func refused(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "23") || strings.HasPrefix(pg.Code, "P0"))
}

// oldest is since when the oldest lease is held; if there is none, since when that is so. Both
// by the database's clock.
type oldest struct {
	since time.Time
	held  bool
}

// takeBack is the one statement of Reclaim; skip is how many expired leases it passes over.
// Entries of leases long settled, up to the first that is held, are walked over but once.
//
// A server that has just come up is left alone for two seconds: living owners use them to
// reconnect and extend their leases.
func (r *Reclaimer) takeBack(ctx context.Context, from time.Time, n, skip int, token uuid.UUID) (taken []Lease, first oldest, err error) {
	audit, done := run.Audit("taken")
	rows, _ := r.DB.Query(ctx, `
		WITH `+audit+`, first AS MATERIALIZED (
			SELECT started_at
			FROM workflow_run
			WHERE status = 'leased' AND started_at >= $1
			ORDER BY started_at
			LIMIT 1
		), expired AS MATERIALIZED (
			SELECT id, started_at
			FROM workflow_run
			WHERE status = 'leased' AND started_at >= (SELECT started_at FROM first) AND lease_until < clock_timestamp()
			  AND pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'
			  AND (attempt < max_attempts OR $2 OR token_id IS NULL)
			ORDER BY started_at
			LIMIT $3 OFFSET $8
			FOR UPDATE SKIP LOCKED
		), taken AS (
			UPDATE workflow_run w
			SET status = CASE WHEN w.attempt < w.max_attempts THEN 'pending' ELSE 'leased' END,
			    suspect = true, updated_at = statement_timestamp(),
			    error = jsonb_build_object('code', 'lease_expired', 'message', 'no sign of life from ' || w.leased_by,
			                               'attempt', w.attempt, 'worker', w.leased_by, 'lease_no', w.lease_no),
			    last_error = 'lease_expired: no sign of life from ' || w.leased_by,
			    run_at = CASE WHEN w.attempt < w.max_attempts THEN statement_timestamp() + interval '1 second' * (1 + random() / 2)
			                  * ($4::float8[])[least(greatest(w.attempt, 1), cardinality($4::float8[]))] ELSE w.run_at END,
			    lease_token = CASE WHEN w.attempt >= w.max_attempts THEN $5::uuid END,
			    lease_no = w.lease_no + CASE WHEN w.attempt >= w.max_attempts THEN 1 ELSE 0 END,
			    leased_by = CASE WHEN w.attempt >= w.max_attempts THEN $6 END,
			    lease_until = CASE WHEN w.attempt >= w.max_attempts THEN clock_timestamp() + $7 * interval '1 second' END,
			    started_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() ELSE w.started_at END,
			    deadline_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() END
			FROM audit
			WHERE w.id = ANY (ARRAY(SELECT id FROM expired))
			RETURNING w.id, w.type, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
			          w.payload, w.priority, w.postponed, w.suspect, w.status = 'leased' AS exhausted, w.run_at, w.token_id,
			          w.error->>'worker' AS loser
		), history AS (
			INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by)
			SELECT t.id, statement_timestamp(), 'expired', t.attempt, t.lease_no - CASE WHEN t.exhausted THEN 1 ELSE 0 END, e.started_at, $6, t.loser
			FROM taken t JOIN expired e ON e.id = t.id, audit
			WHERE audit.writer = 'self'
			RETURNING 1
		), `+done+`
		SELECT coalesce(alive.oldest, statement_timestamp()), alive.oldest IS NOT NULL, t.id, t.type, t.attempt, t.max_attempts, t.lease_no, t.idempotency_key,
		       t.tenant_id, t.metadata, t.started_at, t.payload, t.priority, t.postponed, t.suspect, t.exhausted, t.run_at, t.token_id
		FROM (SELECT (SELECT started_at FROM first) AS oldest) AS alive
		LEFT JOIN (SELECT taken.* FROM taken, done) AS t ON true`,
		from, r.Steps, n, r.delays(), token, r.Worker, r.Length.Seconds(), skip)
	return scanReclaimed(rows)
}

// scanReclaimed reads one row for each lease taken, or a single one that only tells the
// oldest living lease.
func scanReclaimed(rows pgx.Rows) (taken []Lease, first oldest, err error) {
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Lease, error) {
		if values := row.RawValues(); values[2] == nil {
			skip := make([]any, len(values))
			skip[0], skip[1] = &first.since, &first.held
			return nil, row.Scan(skip...)
		}
		l, err := scanLease(row, &first.since, &first.held)
		return &l, err
	})
	for _, l := range found {
		if l != nil {
			taken = append(taken, *l)
		}
	}
	return taken, first, err
}

// delays are the backoffs after each attempt, in seconds; the last goes for all further ones.
func (r *Reclaimer) delays() []float64 {
	delays := make([]float64, 30)
	for i := range delays {
		delays[i] = r.Backoff.Raw(i).Seconds()
	}
	return delays
}

// Idle reports whether the last look saw nothing leased. How far back it went, see Reclaimer.
func (r *Reclaimer) Idle() bool { return r.idle }
