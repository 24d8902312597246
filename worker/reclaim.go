package worker

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	reclaimPause     = 400 * time.Millisecond // between two searches for expired leases
	idleReclaimPause = 900 * time.Millisecond // when no run is leased
	maxReclaimPause  = 700 * time.Millisecond // after a long search, so that an expired lease waits a second at most
	reclaimBatch     = 500
	// reconnectPause is how long leases are left alone after the database was out of reach. Meanwhile live
	// owners try to extend theirs every 250 ms.
	reconnectPause = 2 * time.Second
)

// reclaim takes back expired leases of any type, until ctx ends. Exhausted runs become jobs of this worker,
// which fails them without calling a handler.
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
		w.start(exhausted)
		if again+len(exhausted) == reclaimBatch {
			continue
		}
		// Spend about a twentieth of the time on searches, and do not search in step with other workers.
		pause := min(max(reclaimPause, 20*took), maxReclaimPause)
		if r.Idle() {
			pause = idleReclaimPause // no lease taken meanwhile can expire sooner
		}
		sleep(ctx, pause-rand.N(pause/4))
	}
}
