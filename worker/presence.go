package worker

import (
	"context"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// reportEvery is how often a worker reports that it is alive, for people to read. The view
	// workflow_live_worker decides when a worker counts as dead.
	reportEvery = 5 * time.Second
	// writeEvery is the longest time between two writes of a worker. If it has nothing else to write, it
	// reports. So callers of LastWrite learn whether the database accepts changes.
	writeEvery = 2500 * time.Millisecond
	// reportAgain is the pause after a report that has failed.
	reportAgain = time.Second
	// reportTimeout is short, because a report holds a connection that settling may need.
	reportTimeout = 2 * time.Second
)

// report keeps the worker's presence, its row in workflow_worker, until ctx ends, and then removes it. The row says that
// the worker lives, what it covers and what it does. With the row, report writes what the worker has counted. No lease
// and no run depends on either, so errors are only logged, at debug level.
func (w *Worker) report(ctx context.Context) {
	id, secret := uuid.New(), uuid.New()
	host, _ := os.Hostname() // for people; it may be empty
	started := time.Now()
	var reported moment
	for ctx.Err() == nil {
		if w.wrote.ago() < writeEvery && reported.ago() < reportEvery {
			sleep(ctx, writeEvery-w.wrote.ago())
			continue
		}
		call, done := context.WithTimeout(ctx, reportTimeout)
		err := w.say(call, `SELECT workflow_count_v1($1, $2, $3, $4, $5, $6, $7) FROM workflow_present_v1($8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)`,
			id, secret, w.name, w.config.Prefixes, w.Patterns(), w.steps(), w.config.Concurrency, w.jobs.atWork(),
			w.config.Version, host, os.Getpid(), time.Since(started).Seconds())
		if err == nil {
			w.hasWritten(call)
			err = call.Err()
		}
		done()
		if err != nil {
			if ctx.Err() == nil {
				w.config.Logger.Debug("cannot say in workflow_worker that this worker is alive", "err", err)
			}
			sleep(ctx, reportAgain)
			continue
		}
		reported.now()
		sleep(ctx, writeEvery)
	}
	call, done := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer done()
	if err := w.say(call, `SELECT workflow_count_v1($1, $2, $3, $4, $5, $6, $7) FROM workflow_absent_v1($8, $9)`, id, secret); err != nil {
		w.config.Logger.Debug("cannot take this worker out of workflow_worker", "err", err)
	}
}

// hasWritten notes that the database accepted a change, unless the context of the call has ended: a server that
// waits for a standby at commit answers a cancellation as if the commit had succeeded.
func (w *Worker) hasWritten(call context.Context) {
	if call.Err() == nil {
		w.wrote.now()
	}
}

// say executes a statement that reports the worker alive or gone, and passes it what was counted since the last
// report.
func (w *Worker) say(ctx context.Context, statement string, args ...any) error {
	return w.tally.write(ctx, func(ctx context.Context, args ...any) pgx.Row { return w.db.QueryRow(ctx, statement, args...) }, args...)
}
