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
// the server is sure to be done with the request. What the database refuses to have given back is left to expire.
func (p *Poller) settleDoubts(ctx context.Context) error {
	var problem error
	for i := range p.doubts {
		d := &p.doubts[i]
		now := time.Now()
		if now.Before(d.next) || problem != nil {
			continue
		}
		if err := giveBack(ctx, p.DB, *d, p.Worker); err != nil && !refused(err) {
			problem = err
			continue
		}
		d.next = now.Add(time.Second)
	}
	p.doubts = slices.DeleteFunc(p.doubts, func(d doubt) bool { return d.next.Sub(d.sent) > 2*lag })
	return problem
}

// giveBack returns the leases in doubt, if there are any, with no attempt charged: their
// handlers were never started.
func giveBack(ctx context.Context, db run.DB, d doubt, worker string) error {
	if _, err := db.Exec(ctx, `SELECT workflow_give_back_v1($1, $2, $3)`, d.token, (time.Since(d.sent) + time.Hour).Seconds(), worker); err != nil {
		return fmt.Errorf("give back leases in doubt: %w", err)
	}
	return nil
}
