package worker

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	reclaimPause     = 400 * time.Millisecond // between two looks for expired leases
	idleReclaimPause = 900 * time.Millisecond // when nothing was leased
	maxReclaimPause  = 700 * time.Millisecond // after a look that took long: expired leases wait no longer than a second
	reclaimBatch     = 500
	// reconnectPause is how long leases are left alone after the database was out of reach:
	// living owners try to extend theirs every quarter of a second meanwhile.
	reconnectPause = 2 * time.Second
)

// reclaim takes back expired leases, of any type, until ctx ends. Exhausted runs become
// jobs of this worker, whose only act is to fail them.
func (w *Worker) reclaim(ctx context.Context) {
	r := &leasing.Reclaimer{DB: w.db, Worker: w.name, Backoff: w.config.Backoff, Length: w.config.Lease, Steps: w.steps(), SetAside: w.tellAside, Doubts: &w.doubts}
	for ctx.Err() == nil {
		if !w.calm(reconnectPause) {
			sleep(ctx, reclaimPause)
			continue
		}
		start := time.Now()
		call, done := w.lingering(ctx, callTimeout)
		again, exhausted, err := r.Reclaim(call, reclaimBatch)
		done()
		took := time.Since(start)
		if err != nil && ctx.Err() == nil {
			w.note(err)
			w.complain("cannot look for expired leases; trying again", "err", err)
		}
		if again+len(exhausted) > 0 {
			w.config.Logger.Info("took back expired leases", "due_again", again, "exhausted", len(exhausted))
			if w.config.Observe.Reclaimed != nil {
				w.config.Observe.Reclaimed(again, len(exhausted))
			}
		}
		for i := range exhausted {
			w.start(&exhausted[i])
		}
		if again+len(exhausted) == reclaimBatch {
			continue
		}
		// About a twentieth of the time, and not in step with other workers.
		pause := min(max(reclaimPause, 20*took), maxReclaimPause)
		if r.Idle() {
			pause = idleReclaimPause // no lease that is taken meanwhile can expire before
		}
		sleep(ctx, pause-rand.N(pause/4))
	}
}
