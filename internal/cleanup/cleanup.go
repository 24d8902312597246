// Package cleanup removes what retention no longer wants: old finished runs with their
// history, soft-deleted runs, published events. It is itself a run, default.cleanup.v1,
// which the workers enqueue once per interval for the whole fleet.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/run"
)

// Type is the type of the runs that clean up.
const Type = "default.cleanup.v1"

// atWork is true, and says for its statement that the engine is at work: the guards of the tables let it pass. It is
// evaluated before any row is looked at.
const atWork = `(SELECT set_config('workflow.advance', 'on', true)) = 'on'`

// batch is how many rows one statement removes: few enough to hold no lock for long.
const batch = 1000

// Keep says how long things are kept. Zero or less means for ever.
type Keep struct {
	Finished  time.Duration // succeeded and cancelled runs, with their history
	Failed    time.Duration // failed runs, with their history
	Deleted   time.Duration // soft-deleted runs, with their history, counted from the deletion
	Published time.Duration // published outbox events
	Processes time.Duration // finished process instances, with their steps and history, and messages whose time is over
}

// Removed is how many rows a cleanup has removed; it becomes the run's result.
type Removed struct {
	Finished  int `json:"finished"`
	Failed    int `json:"failed"`
	Deleted   int `json:"deleted"`
	Published int `json:"published"`
	Processes int `json:"processes"`
	Messages  int `json:"messages"`
}

// Handler returns the handler of Type. It works in batches and stops between two of them
// when its context ends; what is left is for the next time. Steps of process graphs go with
// their process.
func Handler(pool *pgxpool.Pool, keep Keep) func(context.Context, struct{}) (Removed, error) {
	return func(ctx context.Context, _ struct{}) (Removed, error) {
		var r Removed
		for _, job := range []struct {
			keep  time.Duration
			count *int
			query string
		}{
			{keep.Finished, &r.Finished, finishedRuns("succeeded")},
			{keep.Finished, &r.Finished, finishedRuns("cancelled")},
			{keep.Failed, &r.Failed, finishedRuns("failed")},
			{keep.Deleted, &r.Deleted, deletedRuns},
			{keep.Published, &r.Published, publishedEvents},
			{keep.Processes, &r.Messages, oldMessages},
		} {
			if job.keep <= 0 {
				continue
			}
			removed, err := inBatches(ctx, pool, job.query, job.keep)
			*job.count += removed
			if err != nil {
				return r, fmt.Errorf("clean up: %w", err)
			}
		}
		if keep.Processes > 0 { // last: an error may mean that all went which could
			var err error
			if r.Processes, err = removeProcesses(ctx, pool, keep.Processes); err != nil {
				return r, fmt.Errorf("clean up: %w", err)
			}
		}
		return r, nil
	}
}

// inBatches repeats query, which removes a batch of what is older than keep and lies at or
// behind a position, until nothing is left.
func inBatches(ctx context.Context, pool *pgxpool.Pool, query string, keep time.Duration) (total int, err error) {
	type progress struct {
		Seen int
		Gone int
		Last *time.Time
	}
	var from time.Time
	for {
		rows, _ := pool.Query(ctx, query, keep.Seconds(), from, batch)
		p, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[progress])
		if err != nil {
			return total, err
		}
		total += p.Gone
		if p.Seen < batch {
			return total, nil
		}
		from = *p.Last
	}
}

// finishedRuns removes runs of one status by the time they finished. Locked rows are left for
// next time.
func finishedRuns(status run.Status) string {
	return `
	WITH old AS MATERIALIZED (
		SELECT id, finished_at AS at
		FROM workflow_run
		WHERE status = '` + string(status) + `' AND token_id IS NULL
		  AND finished_at < now() - $1 * interval '1 second' AND finished_at >= $2
		ORDER BY finished_at
		LIMIT $3
		FOR UPDATE SKIP LOCKED
	)` + removeOld
}

const deletedRuns = `
	WITH old AS MATERIALIZED (
		SELECT id, deleted_at AS at
		FROM workflow_run
		WHERE deleted_at < now() - $1 * interval '1 second' AND deleted_at >= $2
		  AND status <> 'leased' AND token_id IS NULL
		ORDER BY deleted_at
		LIMIT $3
		FOR UPDATE SKIP LOCKED
	)` + removeOld

// removeProcesses removes finished instances with everything that belongs to them, by their own
// deletion alone, so that a trigger of the user's before it still finds all of that. A batch of
// which it refuses one is halved until that one stands alone: it stays, and the others go. All
// that were refused are in the error.
func removeProcesses(ctx context.Context, pool *pgxpool.Pool, keep time.Duration) (total int, err error) {
	type old struct {
		ID uuid.UUID
		At time.Time
	}
	var last old
	var refused []error
	for {
		rows, _ := pool.Query(ctx, finishedProcesses, keep.Seconds(), last.At, last.ID, batch)
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[old])
		if err != nil {
			return total, errors.Join(append(refused, err)...)
		}
		ids := make([]uuid.UUID, len(found))
		for i, o := range found {
			ids[i], last = o.ID, o
		}
		gone, problems, err := removeInstances(ctx, pool, ids)
		total += gone
		refused = append(refused, problems...)
		if err != nil || len(found) < batch {
			return total, errors.Join(append(refused, err)...)
		}
	}
}

// removeInstances returns how many went, and why others were refused; err: nothing more can be done.
func removeInstances(ctx context.Context, pool *pgxpool.Pool, ids []uuid.UUID) (gone int, refused []error, err error) {
	if len(ids) == 0 {
		return 0, nil, nil
	}
	tag, err := pool.Exec(ctx, `
		DELETE FROM process_instance
		WHERE `+atWork+` AND id = ANY (ARRAY(SELECT id FROM process_instance WHERE id = ANY ($1) ORDER BY id FOR UPDATE SKIP LOCKED))`, ids)
	var problem *pgconn.PgError
	switch {
	case err == nil:
		return int(tag.RowsAffected()), nil, nil
	case ctx.Err() != nil || !errors.As(err, &problem) || strings.HasPrefix(problem.Code, "57"):
		return 0, nil, err
	case len(ids) == 1:
		return 0, []error{fmt.Errorf("process instance %s stays: %w", ids[0], err)}, nil
	}
	for _, half := range [][]uuid.UUID{ids[:len(ids)/2], ids[len(ids)/2:]} {
		n, problems, err := removeInstances(ctx, pool, half)
		gone, refused = gone+n, append(refused, problems...)
		if err != nil {
			return gone, refused, err
		}
	}
	return gone, refused, nil
}

// finishedProcesses finds instances, children first: an instance stays for as long as one that it
// has called, and for as long as one that has called it, directly or not, goes on: that may still
// undo it.
const finishedProcesses = `
	SELECT i.id, i.completed_at
	FROM process_instance i
	WHERE i.completed_at < now() - $1 * interval '1 second' AND i.completed_at >= $2 AND (i.completed_at, i.id) > ($2, $3)
	  AND NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_process_instance_id = i.id)
	  AND NOT EXISTS (
		WITH RECURSIVE up AS (
			SELECT i.parent_process_instance_id AS id
			UNION ALL
			SELECT p.parent_process_instance_id FROM up JOIN process_instance p ON p.id = up.id
		)
		SELECT FROM up JOIN process_instance p ON p.id = up.id WHERE p.completed_at IS NULL)
	ORDER BY i.completed_at, i.id
	LIMIT $4`

// oldMessages removes messages, consumed or not, whose ids need not be remembered any more.
const oldMessages = `
	WITH old AS MATERIALIZED (
		SELECT id, expires_at AS at
		FROM message
		WHERE expires_at < now() - $1 * interval '1 second' AND expires_at >= $2
		ORDER BY expires_at
		LIMIT $3
		FOR UPDATE SKIP LOCKED
	), gone AS (
		DELETE FROM message WHERE ` + atWork + ` AND id IN (SELECT id FROM old) RETURNING id
	)
	SELECT (SELECT count(*)::int FROM old), (SELECT count(*)::int FROM gone), (SELECT max(at) FROM old)`

const removeOld = `, gone AS (
		DELETE FROM workflow_run
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM old))
		RETURNING id
	), history AS (
		DELETE FROM workflow_history
		WHERE ` + atWork + ` AND workflow_id = ANY (ARRAY(SELECT id FROM gone))
	)
	SELECT (SELECT count(*) FROM old), (SELECT count(*) FROM gone), (SELECT max(at) FROM old)`

const publishedEvents = `
	WITH old AS MATERIALIZED (
		SELECT id, published_at AS at
		FROM outbox_event
		WHERE published_at < now() - $1 * interval '1 second' AND published_at >= $2
		ORDER BY published_at
		LIMIT $3
		FOR UPDATE SKIP LOCKED
	), gone AS (
		DELETE FROM outbox_event
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM old))
		RETURNING id
	)
	SELECT (SELECT count(*) FROM old), (SELECT count(*) FROM gone), (SELECT max(at) FROM old)`

// Schedule enqueues one cleanup per interval until ctx ends. All workers do; the idempotency
// key, made of the interval's number by the database's clock, lets one of them through.
// While the database is out of reach it waits and tries again.
func Schedule(ctx context.Context, pool *pgxpool.Pool, every time.Duration, log *slog.Logger) {
	for {
		wait, err := enqueue(ctx, pool, every)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			log.Warn("cannot enqueue the cleanup; trying again", "err", err)
			wait = min(every, 10*time.Second)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// enqueue enqueues the cleanup of the current interval and returns how long that lasts.
func enqueue(ctx context.Context, db run.DB, every time.Duration) (rest time.Duration, err error) {
	rows, _ := db.Query(ctx, `SELECT extract(epoch FROM now())::float8`)
	now, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[float64])
	if err != nil {
		return 0, err
	}
	number := int64(now / every.Seconds())
	_, err = run.Enqueue(ctx, db, run.New{
		Type:           Type,
		Priority:       -50,
		IdempotencyKey: fmt.Sprintf("%s every %s no %d", Type, every, number),
	})
	return time.Duration((float64(number+1)*every.Seconds() - now) * float64(time.Second)), err
}
