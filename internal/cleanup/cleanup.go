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
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/fault"
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

	Logger *slog.Logger // told of what is refused, and never why: that may quote a row. Nil: slog.Default()
}

// Removed is how many rows a cleanup has removed; it becomes the run's result.
type Removed struct {
	Finished  int `json:"finished"`
	Failed    int `json:"failed"`
	Deleted   int `json:"deleted"`
	Published int `json:"published"`
	Processes int `json:"processes"`
	Messages  int `json:"messages"`
	Refused   int `json:"refused,omitempty"` // rows that the database refuses to have removed; they stand in workflow_set_aside
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
	table  string
	keep   time.Duration
	count  *int
	find   string   // the first $4 that are older than $1 seconds, behind the position $2, $3: id, time, and whether nobody reads it, nor is it set aside
	remove string   // those of the ids $1 that are still older than $2 seconds, and that nobody has locked; returns how many
	make   []string // make one that is old now; the first returns its id, which is $1 of the others
}

// Handler returns the handler of Type. It works in batches and stops between two of them
// when its context ends; what is left is for the next time. Steps of process graphs go with
// their process. What the database refuses to have removed is set aside, and all else goes. If nothing of a kind
// can be removed that is no row's fault, and the run is tried again after five seconds, uncharged. So it is while the database tells of passing
// trouble.
func Handler(pool *pgxpool.Pool, keep Keep) func(context.Context, struct{}) (Removed, error) {
	if keep.Logger == nil {
		keep.Logger = slog.Default()
	}
	return handler(pool, keep, newFaults(keep.Logger))
}

func handler(pool *pgxpool.Pool, keep Keep, faults *faults) func(context.Context, struct{}) (Removed, error) {
	log := faults.log
	return func(ctx context.Context, _ struct{}) (Removed, error) {
		var r Removed
		var problems []error
		for i, k := range []kind{
			{"run", "workflow_run", keep.Finished, &r.Finished, finishedRuns(run.Succeeded), removeRuns(`status = 'succeeded' AND finished_at`), makeRun(`status = 'succeeded'`)},
			{"run", "workflow_run", keep.Finished, &r.Finished, finishedRuns(run.Cancelled), removeRuns(`status = 'cancelled' AND finished_at`), makeRun(`status = 'cancelled'`)},
			{"run", "workflow_run", keep.Failed, &r.Failed, finishedRuns(run.Failed), removeRuns(`status = 'failed' AND finished_at`), makeRun(`status = 'failed'`)},
			{"run", "workflow_run", keep.Deleted, &r.Deleted, deletedRuns, removeRuns(`status <> 'leased' AND deleted_at`), makeRun(`status = 'pending', deleted_at = now()`)},
			{"outbox event", "outbox_event", keep.Published, &r.Published, publishedEvents, removeEvents, makeEvent},
			{"message", "message", keep.Processes, &r.Messages, oldMessages, removeMessages, makeMessage},
			{"process instance", "process_instance", keep.Processes, &r.Processes, finishedProcesses, removeProcesses, makeProcess},
		} {
			if k.keep <= 0 {
				continue
			}
			refused, err := k.removeAll(ctx, pool, func(err error) bool { return faults.lasting(i, err) })
			if r.Refused += refused; refused > 0 {
				log.Warn("the database refuses to have rows removed; they are set aside: see workflow_set_aside", "kind", k.name, "rows", refused)
			}
			if err != nil {
				problems = append(problems, fmt.Errorf("%ss: %w", k.name, err))
			}
			if ctx.Err() != nil {
				break
			}
		}
		err := errors.Join(problems...)
		switch broken, passing := nobodys(problems); {
		case err == nil:
			faults.over(ctx, pool)
			return r, nil
		case ctx.Err() != nil || broken == nil && !passing:
			return r, fmt.Errorf("clean up: %w", err)
		default:
			faults.tell(ctx, pool, broken, err)
			return r, run.Again(pause)
		}
	}
}

// pause is what comes before a cleanup is tried again that could remove nothing of a kind.
const pause = 5 * time.Second

// nobodys returns the first error that is a statement's, and whether one is a code of passing trouble. If one is neither, there is nil and false.
func nobodys(problems []error) (first *fault.Error, passing bool) {
	for _, problem := range problems {
		var broken *fault.Error
		switch is := errors.As(problem, &broken); {
		case is && first == nil:
			first = broken
		case is:
		case fault.State(problem) != "" && (fault.Of(problem) == fault.Again || fault.Of(problem) == fault.Anew):
			passing = true
		default:
			return nil, false
		}
	}
	return first, passing
}

// faults tells of cleanups that can remove nothing of a kind.
type faults struct {
	log *slog.Logger

	mu     sync.Mutex
	told   time.Time             // in the log
	noted  bool                  // in workflow_fault
	series map[int]*fault.Series // of each kind, over all cleanups of this process
}

func newFaults(log *slog.Logger) *faults { return &faults{log: log, series: map[int]*fault.Series{}} }

// lasting notes what came of removing what there is of a kind, and reports whether that has failed for long.
func (f *faults) lasting(kind int, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.series[kind] == nil {
		f.series[kind] = &fault.Series{}
	}
	_, lasting := f.series[kind].Of(err)
	return lasting
}

// tell tells that nothing of a kind can be removed; broken: the statement's error, nil if it may pass by itself.
func (f *faults) tell(ctx context.Context, pool *pgxpool.Pool, broken *fault.Error, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.told) >= time.Minute {
		f.told = time.Now()
		f.log.Error("retention can remove nothing of a kind; no row is blamed for it, and it is tried again: see workflowctl doctor", "sqlstate", fault.State(err))
	}
	if broken != nil {
		f.noted = true
		_, _ = pool.Exec(ctx, `SELECT workflow_fault_v1('retention', $1, $2)`, fault.State(broken), strings.ToValidUTF8(broken.Error(), "")) // the log has it, if this fails, too
	}
}

func (f *faults) over(ctx context.Context, pool *pgxpool.Pool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.noted {
		return
	}
	_, err := pool.Exec(ctx, `SELECT workflow_fault_v1('retention', NULL, NULL)`)
	f.noted = err != nil
}

// tooMany is how many of a kind may be refused that were not before: each costs some statements of its own. Then the rest of the
// kind waits for the next time, when these are passed over.
const tooMany = 1000

// removeAll removes what there is of a kind, and returns how many were refused. lasting notes what came of it, and reports whether it has
// failed for so long that any code is an answer about a row. If one goes that was tried for all that are refused for
// the same reason, these are tried once more.
func (k kind) removeAll(ctx context.Context, pool *pgxpool.Pool, lasting func(error) bool) (refused int, err error) {
	for range 10 {
		n, err := k.removeOnce(ctx, pool, lasting)
		if refused += n; err != nil {
			return refused, err
		}
		lasting(nil)
		var released int
		if err := pool.QueryRow(ctx, `SELECT workflow_unremoved_v1($1, '{}', '{}', '{}', '{}')`, k.table).Scan(&released); err != nil || released == 0 {
			return refused, err
		}
	}
	return refused, nil
}

func (k kind) removeOnce(ctx context.Context, pool *pgxpool.Pool, lasting func(error) bool) (refused int, err error) {
	type old struct {
		ID   string
		At   time.Time
		Free bool
	}
	var last old
	for {
		var found []old
		if err := uncompiled(ctx, pool, func(tx pgx.Tx) (err error) {
			rows, _ := tx.Query(ctx, k.find, k.keep.Seconds(), last.At, last.ID, batch)
			found, err = pgx.CollectRows(rows, pgx.RowToStructByPos[old])
			return err
		}); err != nil {
			return refused, fault.OfStatement("retention", err)
		}
		var ids []string
		for _, o := range found {
			if last = o; o.Free {
				ids = append(ids, o.ID)
			}
		}
		n, err := k.removeBatch(ctx, pool, ids, lasting)
		refused += n
		if err != nil || len(found) < batch || refused > tooMany {
			return refused, err
		}
	}
}

// removeBatch removes a batch. Those of which the database refuses it are set aside, and the others go.
func (k kind) removeBatch(ctx context.Context, pool *pgxpool.Pool, ids []string, lasting func(error) bool) (refused int, err error) {
	if len(ids) == 0 {
		return 0, nil
	}
	removal := fault.Statement[string]{
		Name: "retention",
		Do: func(ctx context.Context, ids []string) error {
			var gone int
			err := uncompiled(ctx, pool, func(tx pgx.Tx) error { return tx.QueryRow(ctx, k.remove, ids, k.keep.Seconds()).Scan(&gone) })
			if err == nil {
				*k.count += gone
			}
			return err
		},
		Control: func(ctx context.Context) error { return k.control(ctx, pool) },
	}
	err = removal.Do(ctx, ids)
	for n := 0; n < 5 && (fault.Of(err) == fault.Again || fault.Of(err) == fault.Anew) && ctx.Err() == nil; n++ { // a deadlock, perhaps
		select {
		case <-ctx.Done():
		case <-time.After(run.Backoff{Base: 50 * time.Millisecond, Cap: time.Second}.Delay(n)):
		}
		err = removal.Do(ctx, ids)
	}
	if err == nil {
		return 0, nil
	}
	blamed, err := removal.Apart(ctx, ids, err, lasting(err))
	if len(blamed) == 0 {
		return 0, err
	}
	columns := make([][]string, 4)
	for _, b := range blamed {
		said := &pgconn.PgError{Message: b.Err.Error()}
		errors.As(b.Err, &said) // or it stays as it is
		for i, text := range []string{b.Row, said.Code, said.Message, said.ConstraintName} {
			columns[i] = append(columns[i], strings.ToValidUTF8(strings.ReplaceAll(text, "\x00", ""), ""))
		}
	}
	_, problem := pool.Exec(ctx, `SELECT workflow_unremoved_v1($1, $2, $3, $4, $5)`, k.table, columns[0], columns[1], columns[2], columns[3])
	return len(blamed), errors.Join(err, problem)
}

// errUndo undoes a transaction that went well.
var errUndo = errors.New("undone")

// control removes a row that is made for this, and undoes it.
func (k kind) control(ctx context.Context, pool *pgxpool.Pool) error {
	err := uncompiled(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('workflow.advance', 'on', true)`); err != nil {
			return err
		}
		var id string
		if err := tx.QueryRow(ctx, k.make[0]).Scan(&id); err != nil {
			return err
		}
		for _, more := range k.make[1:] {
			if _, err := tx.Exec(ctx, more, id); err != nil {
				return err
			}
		}
		var gone int
		if err := tx.QueryRow(ctx, k.remove, []string{id}, -time.Hour.Seconds()).Scan(&gone); err != nil {
			return err
		}
		if gone == 0 {
			return &pgconn.PgError{Code: "P0002", Message: "a row that was made to be removed is not removed"}
		}
		if _, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
			return err
		}
		return errUndo
	})
	if errors.Is(err, errUndo) {
		return nil
	}
	return err
}

// What makes rows that are removed as a control.
func makeRun(old string) []string {
	return []string{
		`INSERT INTO workflow_run (type) VALUES ('default.control.v1') RETURNING id::text`,
		`UPDATE workflow_run SET status = 'leased', lease_token = id, lease_until = now(), leased_by = 'control', lease_no = 1, started_at = now() WHERE id = $1::text::uuid`,
		`UPDATE workflow_run SET ` + old + ` WHERE id = $1::text::uuid`,
	}
}

var (
	makeEvent = []string{
		`SELECT outbox_emit(gen_random_uuid(), 'workflow.control', '{}')::text`,
		`UPDATE outbox_event SET published_at = now() WHERE id = $1::text::bigint`,
	}
	makeMessage = []string{`
		INSERT INTO message (id, message_id, name, key, payload, expires_at)
		SELECT id, id::text, 'control', id::text, '{}', now() FROM gen_random_uuid() AS id RETURNING id::text`}
	makeProcess = []string{`
		INSERT INTO process_instance (id, process_definition_id, status, completed_at)
		SELECT gen_random_uuid(), (SELECT id FROM process_definition LIMIT 1), 'COMPLETED', now() RETURNING id::text`}
)

// uncompiled calls f in a transaction whose statements the server does not compile. For some hundred rows it takes
// them for dear ones, and compiling takes it seconds, time and again: what was compiled is not kept.
func uncompiled(ctx context.Context, pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: `begin; SET LOCAL jit = off`}, f)
}

// first selects the first rows behind the position, by index, before anything is asked about them: whether free holds, and it is not set aside.
func first(table, at, which, free string) string {
	zero, typ := "00000000-0000-0000-0000-000000000000", "uuid"
	columns := "xmin AS row_version, id, " + at // and no payload
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
	SELECT i.id::text, i.` + at + `, (` + free + `)
	       AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'retention' AND a.id = workflow_unremoved_id(i.id::text) AND a.row_version = i.row_version AND NOT a.due)
	FROM old i
	ORDER BY 2, i.id`
}

// unheard are the runs that nobody reads: all but those of signals that are on the way.
const unheard = `i.type <> 'graph.signal.v1' OR i.id::text NOT IN (` + arriving + `)`

// finishedRuns finds runs of one status by the time they finished.
func finishedRuns(status run.Status) string {
	return first("workflow_run", "finished_at", `status = '`+string(status)+`' AND token_id IS NULL`, unheard)
}

var deletedRuns = first("workflow_run", "deleted_at", `status <> 'leased' AND token_id IS NULL`, unheard)

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
var finishedProcesses = first("process_instance", "completed_at", "true", `
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
	                     WHERE t.instance_id = i.id AND r.type = 'graph.signal.v1' AND r.id::text IN (`+arriving+`)))`)

// oldMessages finds messages, consumed or not, whose ids need not be remembered any more.
var oldMessages = first("message", "expires_at", "true", `
	NOT EXISTS (SELECT FROM workflow_run a
	            WHERE a.token_id = i.token_id AND a.type = 'graph.arrive.v1' AND a.finished_at IS NULL AND a.payload->>'message' = i.id::text)`)

const removeMessages = `
	WITH gone AS (
		DELETE FROM message WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM message WHERE id = ANY ($1::text[]::uuid[]) AND expires_at < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	)
	SELECT count(*) FROM gone`

var publishedEvents = first("outbox_event", "published_at", "true", "true")

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
			log.Warn("cannot enqueue the cleanup; trying again", "err", fault.Loggable(err))
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
