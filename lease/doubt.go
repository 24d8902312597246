package lease

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/run"
)

// A doubt is a request for leases whose answer was lost: they may have been taken, or may
// still be while the server works on the request.
type doubt struct {
	token uuid.UUID
	sent  time.Time
	next  time.Time // when to look for them
}

// settleDoubts gives back leases whose answer was lost: at once, and then each second until
// the server is sure to be done with the request.
func (p *Poller) settleDoubts(ctx context.Context) error {
	for i := range p.doubts {
		d := &p.doubts[i]
		if now := time.Now(); !now.Before(d.next) {
			if err := giveBack(ctx, p.DB, *d, p.Worker); err != nil {
				return err
			}
			d.next = now.Add(time.Second)
		}
	}
	p.doubts = slices.DeleteFunc(p.doubts, func(d doubt) bool { return d.next.Sub(d.sent) > 2*lag })
	return nil
}

// giveBack returns the leases in doubt, if there are any, with no attempt charged: their
// handlers were never started. Exhausted ones, whose deadline is their start, were not
// charged in the first place. A row that someone else has locked is left out.
func giveBack(ctx context.Context, db run.DB, d doubt, worker string) error {
	audit, done := run.Audit("returned")
	_, err := db.Exec(ctx, `
		WITH `+audit+`, mine AS MATERIALIZED (
			SELECT id
			FROM workflow_run
			WHERE status = 'leased' AND started_at > now() - $1 * interval '1 second' AND lease_token = $2
			FOR UPDATE SKIP LOCKED
		), returned AS (
			UPDATE workflow_run w
			SET status = 'pending', run_at = now(), updated_at = now(),
			    attempt = w.attempt - CASE WHEN w.deadline_at = w.started_at THEN 0 ELSE 1 END,
			    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
			FROM audit
			WHERE w.id = ANY (ARRAY(SELECT id FROM mine))
			RETURNING w.id, least(w.attempt + 1, w.max_attempts) AS attempt, w.lease_no, w.started_at
		), history AS (
			INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
			SELECT r.id, 'released', r.attempt, r.lease_no, r.started_at, $3, '{"reason": "the answer to the lease was lost"}'
			FROM returned r, audit
			WHERE audit.writer = 'self'
			RETURNING 1
		), `+done+`
		SELECT FROM done`,
		(time.Since(d.sent) + time.Hour).Seconds(), d.token, worker)
	if err != nil {
		return fmt.Errorf("give back leases in doubt: %w", err)
	}
	return nil
}
