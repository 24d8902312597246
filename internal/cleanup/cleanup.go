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

// The rule, for all that follows: retention keeps whatever something alive may still read. Alive are runs that
// are pending or leased, and instances that are not over, paused or not. What is read later by its id is:
//
//   - the run of a signal, by tokens that it is on the way to, or owed to: steps that send one keep their whole instance
//   - a message, by the token that it is on the way to, however long its time has been over
//   - an instance, by the one that has called it, directly or not: for its output, and to undo what it has done
//   - of an instance that is not over, all that is its own: its runs are its facts
//
// But a command may come after what it names is over and removed: it is as one that comes too late, and no failure.
//
// What refers to it is written in the transaction that makes it old, or before: so who finds it without a reader
// will find it without one for ever.

// arriving are the runs of signals that are on the way to tokens, or owed to them, as texts.
const arriving = `
	SELECT a.payload->>'signal'
	FROM process_token t JOIN workflow_run a ON a.token_id = t.id
	WHERE t.state IN ('Created', 'Ready', 'Waiting') AND a.type = 'graph.arrive.v1' AND a.finished_at IS NULL AND a.payload->>'signal' IS NOT NULL
	UNION ALL
	SELECT u.signal_id::text FROM process_unreached u`

// A kind is something that retention removes. Positions are pairs of a time and an id, which is a text here.
type kind struct {
	name   string // for errors
	keep   time.Duration
	count  *int
	find   string // the first $4 that are older than $1 seconds, behind the position $2, $3: id, time, and whether nobody reads it
	remove string // those of the ids $1 that are still older than $2 seconds, and that nobody has locked; returns how many
}

// Handler returns the handler of Type. It works in batches and stops between two of them
// when its context ends; what is left is for the next time. Steps of process graphs go with
// their process. What a trigger refuses to have removed stays, and all else goes: the error, if any, names
// what has stayed.
func Handler(pool *pgxpool.Pool, keep Keep) func(context.Context, struct{}) (Removed, error) {
	return func(ctx context.Context, _ struct{}) (Removed, error) {
		var r Removed
		var problems []error
		for _, k := range []kind{
			{"run", keep.Finished, &r.Finished, finishedRuns(run.Succeeded), removeRuns(`status = 'succeeded' AND finished_at`)},
			{"run", keep.Finished, &r.Finished, finishedRuns(run.Cancelled), removeRuns(`status = 'cancelled' AND finished_at`)},
			{"run", keep.Failed, &r.Failed, finishedRuns(run.Failed), removeRuns(`status = 'failed' AND finished_at`)},
			{"run", keep.Deleted, &r.Deleted, deletedRuns, removeRuns(`status <> 'leased' AND deleted_at`)},
			{"outbox event", keep.Published, &r.Published, publishedEvents, removeEvents},
			{"message", keep.Processes, &r.Messages, oldMessages, removeMessages},
			{"process instance", keep.Processes, &r.Processes, finishedProcesses, removeProcesses},
		} {
			if k.keep <= 0 {
				continue
			}
			refused, err := k.removeAll(ctx, pool)
			problems = append(problems, refused...)
			if err != nil {
				problems = append(problems, fmt.Errorf("%ss: %w", k.name, err))
			}
			if ctx.Err() != nil {
				break
			}
		}
		if err := errors.Join(problems...); err != nil {
			return r, fmt.Errorf("clean up: %w", err)
		}
		return r, nil
	}
}

// tooMany is how many of a kind may be refused: each costs some statements of its own. Then the rest of the
// kind waits for the next time.
const tooMany = 1000

// told is how many of those the error names.
const told = 100

// removeAll removes what there is of a kind. It returns why some were refused; err: no more can be done.
func (k kind) removeAll(ctx context.Context, pool *pgxpool.Pool) (refused []error, err error) {
	type old struct {
		ID   string
		At   time.Time
		Free bool
	}
	var last old
	var n int
	defer func() {
		if n > len(refused) {
			refused = append(refused, fmt.Errorf("%d more of %ss stay", n-len(refused), k.name))
		}
	}()
	for {
		var found []old
		if err := uncompiled(ctx, pool, func(tx pgx.Tx) (err error) {
			rows, _ := tx.Query(ctx, k.find, k.keep.Seconds(), last.At, last.ID, batch)
			found, err = pgx.CollectRows(rows, pgx.RowToStructByPos[old])
			return err
		}); err != nil {
			return refused, err
		}
		var ids []string
		for _, o := range found {
			if last = o; o.Free {
				ids = append(ids, o.ID)
			}
		}
		problems, err := k.removeBatch(ctx, pool, ids)
		n += len(problems)
		refused = append(refused, problems[:min(len(problems), told-min(told, len(refused)))]...)
		switch {
		case err != nil || len(found) < batch:
			return refused, err
		case n > tooMany:
			return refused, errors.New("too many are refused; the others are for the next time")
		}
	}
}

// removeBatch removes a batch; one of which a row is refused is halved until that one stands alone: it stays,
// and the others go.
func (k kind) removeBatch(ctx context.Context, pool *pgxpool.Pool, ids []string) (refused []error, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	var gone int
	if err = uncompiled(ctx, pool, func(tx pgx.Tx) error { return tx.QueryRow(ctx, k.remove, ids, k.keep.Seconds()).Scan(&gone) }); err == nil {
		*k.count += gone
	}
	var problem *pgconn.PgError
	switch {
	case err == nil:
		return nil, nil
	case ctx.Err() != nil || !errors.As(err, &problem) || strings.HasPrefix(problem.Code, "57"):
		return nil, err
	case len(ids) == 1:
		return []error{fmt.Errorf("%s %s stays: %w", k.name, ids[0], err)}, nil
	}
	for _, half := range [][]string{ids[:len(ids)/2], ids[len(ids)/2:]} {
		problems, err := k.removeBatch(ctx, pool, half)
		refused = append(refused, problems...)
		if err != nil {
			return refused, err
		}
	}
	return refused, nil
}

// uncompiled calls f in a transaction whose statements the server does not compile. For some hundred rows it takes
// them for dear ones, and compiling takes it seconds, time and again: what was compiled is not kept.
func uncompiled(ctx context.Context, pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: `begin; SET LOCAL jit = off`}, f)
}

// first selects the first rows behind the position, by index, before anything is asked about them.
func first(table, at, which string) string {
	zero, typ := "00000000-0000-0000-0000-000000000000", "uuid"
	columns := "id, " + at // and no payload
	switch table {
	case "workflow_run":
		columns += ", type"
	case "process_instance":
		columns += ", parent_process_instance_id, process_definition_id"
	case "message":
		columns += ", token_id"
	case "outbox_event":
		zero, typ = "-1", "bigint"
	}
	return `
	WITH old AS MATERIALIZED (
		SELECT ` + columns + `
		FROM ` + table + `
		WHERE ` + at + ` < now() - $1 * interval '1 second' AND ` + at + ` >= $2
		  AND (` + at + `, id) > ($2, coalesce(nullif($3::text, ''), '` + zero + `')::` + typ + `) AND ` + which + `
		ORDER BY ` + at + `, id
		LIMIT $4
	)
	SELECT i.id::text, i.` + at + `, `
}

// unheard selects the runs that nobody reads: all but those of signals that are on the way.
const unheard = `i.type <> 'graph.signal.v1' OR i.id::text NOT IN (` + arriving + `) FROM old i ORDER BY 2, i.id`

// finishedRuns finds runs of one status by the time they finished.
func finishedRuns(status run.Status) string {
	return first("workflow_run", "finished_at", `status = '`+string(status)+`' AND token_id IS NULL`) + unheard
}

var deletedRuns = first("workflow_run", "deleted_at", `status <> 'leased' AND token_id IS NULL`) + unheard

// removeRuns removes runs with their history. Locked rows are left for next time.
func removeRuns(since string) string {
	return `
	WITH gone AS (
		DELETE FROM workflow_run
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM workflow_run WHERE id = ANY ($1::text[]::uuid[]) AND token_id IS NULL AND ` + since + ` < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	), history AS (
		DELETE FROM workflow_history
		WHERE ` + atWork + ` AND workflow_id = ANY (ARRAY(SELECT id FROM gone))
	)
	SELECT count(*) FROM gone`
}

// removeProcesses removes finished instances with everything that belongs to them, by their own
// deletion alone, so that a trigger of the user's before it still finds all of that.
const removeProcesses = `
	WITH gone AS (
		DELETE FROM process_instance
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM process_instance WHERE id = ANY ($1::text[]::uuid[]) AND completed_at < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	)
	SELECT count(*) FROM gone`

// finishedProcesses finds instances, children first: an instance stays for as long as one that it
// has called, and for as long as one that has called it, directly or not, goes on: that may still
// undo it. A ring of callers, if somebody has made one, has no end: hence UNION.
var finishedProcesses = first("process_instance", "completed_at", "true") + `
	NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_process_instance_id = i.id)
	AND NOT EXISTS (
		WITH RECURSIVE up AS (
			SELECT i.parent_process_instance_id AS id
			UNION
			SELECT p.parent_process_instance_id FROM up JOIN process_instance p ON p.id = up.id
		)
		SELECT FROM up JOIN process_instance p ON p.id = up.id WHERE p.completed_at IS NULL)
	AND NOT (i.process_definition_id IN (SELECT d.id FROM process_definition d WHERE d.definition @? '$.**.do ? (@ == "graph.signal.v1")')
	         AND EXISTS (SELECT FROM process_token t JOIN workflow_run r ON r.token_id = t.id
	                     WHERE t.instance_id = i.id AND r.type = 'graph.signal.v1' AND r.id::text IN (` + arriving + `)))
	FROM old i
	ORDER BY 2, i.id`

// oldMessages finds messages, consumed or not, whose ids need not be remembered any more.
var oldMessages = first("message", "expires_at", "true") + `
	NOT EXISTS (SELECT FROM workflow_run a
	            WHERE a.token_id = i.token_id AND a.type = 'graph.arrive.v1' AND a.finished_at IS NULL AND a.payload->>'message' = i.id::text)
	FROM old i
	ORDER BY 2, i.id`

const removeMessages = `
	WITH gone AS (
		DELETE FROM message WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM message WHERE id = ANY ($1::text[]::uuid[]) AND expires_at < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	)
	SELECT count(*) FROM gone`

var publishedEvents = first("outbox_event", "published_at", "true") + `true FROM old i ORDER BY 2, i.id`

const removeEvents = `
	WITH gone AS (
		DELETE FROM outbox_event
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM outbox_event WHERE id = ANY ($1::text[]::bigint[]) AND published_at < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	)
	SELECT count(*) FROM gone`

// Schedule enqueues one cleanup per interval until ctx ends. All workers do; the idempotency
// key, made of the interval's number by the database's clock, lets one of them through.
// While the database is out of reach it waits and tries again. It keeps no connection from one time to the
// next: a role that may have few has them for its work.
func Schedule(ctx context.Context, pool *pgxpool.Pool, every time.Duration, log *slog.Logger) {
	for {
		wait, err := schedule(ctx, pool.Config().ConnConfig, every)
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

func schedule(ctx context.Context, config *pgx.ConnConfig, every time.Duration) (rest time.Duration, err error) {
	ctx, done := context.WithTimeout(ctx, 10*time.Second)
	defer done()
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(ctx) }()
	return enqueue(ctx, conn, every)
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
