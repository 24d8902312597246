// Package cleanup removes rows whose retention is over: finished runs with their history, soft-deleted runs,
// published events, and finished processes. Every worker does this for its own prefixes. It writes the periods that it
// asks for into workflow_retention, and the longest period that any worker asks for applies. Workers take turns, which
// are rows of workflow_retention_turn, so that one worker at a time removes rows of a prefix and kind.
package cleanup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// Type is the type of runs that clean up at once. Workers of an earlier version enqueue one from time to time.
// A worker that covers Type also removes runs of types for which no worker has asked for a retention.
const Type = "default.cleanup.v1"

// uncovered is the prefix of rows without a type, and of types for which no worker has asked for a retention.
const uncovered = "*"

// atWork is a condition that is always true. Evaluating it sets workflow.advance, so that the guards of the
// tables permit the statement. It is evaluated before any row is read.
const atWork = `(SELECT set_config('workflow.advance', 'on', true)) = 'on'`

// batch is how many rows one statement removes. It is small, so that no lock is held for long.
const batch = 1000

// Keep says how long rows are kept. Zero or less means for ever.
type Keep struct {
	Finished  time.Duration // succeeded and cancelled runs, with their history
	Failed    time.Duration // failed runs, with their history
	Deleted   time.Duration // soft-deleted runs, with their history, counted from the deletion
	Published time.Duration // published outbox events
	Processes time.Duration // finished process instances with their steps and history, and expired messages

	Logger *slog.Logger // logs what is refused, but not why, since that may quote a row; nil: slog.Default()
}

// Removed counts the removed rows. It is the result of a run of Type.
type Removed struct {
	Finished  int `json:"finished"`
	Failed    int `json:"failed"`
	Deleted   int `json:"deleted"`
	Published int `json:"published"`
	Processes int `json:"processes"`
	Messages  int `json:"messages"`
	Refused   int `json:"refused,omitempty"` // rows that the database refuses to remove; they are in workflow_set_aside
}

// One rule decides what may be removed: retention keeps a row while something alive may still read it. A run is alive
// while it is pending or leased. An instance is alive until it is over, even if it is paused. These rows are read later
// by their id:
//
//   - the run of a signal, by tokens to which it is being delivered or owed; a step that sends one keeps its whole instance
//   - a message, by the token to which it is being delivered, however long ago it expired
//   - an instance, by the instance that called it, directly or not: for its output, and to undo what it has done
//   - all rows of an instance that is not over: its runs are its facts
//
// A command may arrive after the row that it names is removed. It is then treated like one that arrives too
// late, which is no failure.
//
// Every reference to a row is written in the transaction that makes the row old, or before. So a row that is
// old and has no reader will never have one.

// arriving selects, as text, the runs of signals that are being delivered to tokens, or owed to them.
// workflow_retention_where has the same condition for plain runs.
const arriving = `
	SELECT a.payload->>'signal'
	FROM process_token t JOIN workflow_run a ON a.token_id = t.id
	WHERE t.state IN ('Created', 'Ready', 'Waiting') AND a.type = 'graph.arrive.v1' AND a.finished_at IS NULL AND a.payload->>'signal' IS NOT NULL
	UNION ALL
	SELECT u.signal_id::text FROM process_unreached u`

// A kind is a kind of row that retention removes. A position is a pair of a time and an id, which is a text
// here.
type kind struct {
	name  string // in errors
	table string
	count func(*Removed) *int
	// find selects at most $4 rows older than $1 seconds, in order, that come after the position $2, $3. It
	// returns the id, the time, whether the row may be removed (it has no reader and is not set aside), and
	// whether there are more rows.
	find string
	// remove deletes those of the ids $1 that are still older than $2 seconds and are not locked, and returns
	// how many.
	remove string
	// make holds statements that insert a row which counts as old at once, for control. The first returns its id,
	// which is $1 of the others.
	make []string
}

// kinds are the kinds by their names in workflow_retention. Those of plain runs have no statements here:
// functions of the database remove runs, since a worker's role may be bound to prefixes.
var kinds = map[string]kind{
	"succeeded": {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Finished }},
	"cancelled": {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Finished }},
	"failed":    {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Failed }},
	"deleted":   {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Deleted }},
	"events":    {"outbox event", "outbox_event", func(r *Removed) *int { return &r.Published }, publishedEvents, removeEvents, makeEvent},
	"messages":  {"message", "message", func(r *Removed) *int { return &r.Messages }, oldMessages, removeMessages, makeMessage},
	"processes": {"process instance", "process_instance", func(r *Removed) *int { return &r.Processes }, finishedProcesses, removeProcesses, makeProcess},
}

// periods returns the kinds and their periods in seconds; 0 means for ever.
func (k Keep) periods() (kinds []string, periods []float64) {
	for _, p := range []struct {
		kind string
		keep time.Duration
	}{
		{"succeeded", k.Finished}, {"cancelled", k.Finished}, {"failed", k.Failed}, {"deleted", k.Deleted},
		{"events", k.Published}, {"messages", k.Processes}, {"processes", k.Processes},
	} {
		kinds, periods = append(kinds, p.kind), append(periods, max(p.keep, 0).Seconds())
	}
	return kinds, periods
}

// A Cleaner removes old rows for one worker.
type Cleaner struct {
	pool     *pgxpool.Pool
	prefixes []string
	every    time.Duration
	keep     Keep
	faults   *faults
	limit    time.Duration // of a turn; what is left is for the next one
}

// New returns a Cleaner for a worker with these prefixes. Each prefix and kind has a turn once in the time
// every. keep is what the worker asks for.
func New(pool *pgxpool.Pool, prefixes []string, every time.Duration, keep Keep) *Cleaner {
	if keep.Logger == nil {
		keep.Logger = slog.Default()
	}
	prefixes = slices.Clone(prefixes)
	if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(Type, p) }) {
		prefixes = append(prefixes, uncovered)
	}
	return &Cleaner{pool: pool, prefixes: prefixes, every: every, keep: keep, faults: newFaults(keep.Logger), limit: 5 * time.Minute}
}

// look is the longest time between two searches for a turn that is due.
const look = time.Minute

// Run takes turns until ctx ends. It keeps no connection open between turns, because the role's connections may
// be few. While the database is out of reach, it waits and tries again.
func (c *Cleaner) Run(ctx context.Context) {
	for ctx.Err() == nil {
		removed, soon, err := c.briefly(ctx)
		wait := min(look, c.every)
		switch log := c.keep.Logger; {
		case ctx.Err() != nil:
			return
		case soon:
			wait = min(wait, pause) // round has logged it
		case err != nil:
			log.Warn("retention cannot remove what is old; trying again", "err", fault.Loggable(err))
			wait = min(wait, 2*pause)
		case removed != Removed{}:
			log.Info("retention has removed what is old", "runs", removed.Finished+removed.Failed+removed.Deleted,
				"events", removed.Published, "messages", removed.Messages, "processes", removed.Processes, "refused", removed.Refused)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// briefly takes the turns that are due, on a connection that it closes afterwards.
func (c *Cleaner) briefly(ctx context.Context) (r Removed, soon bool, err error) {
	config := c.pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 1, 0, 0
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // there may be a pooler
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return r, false, err
	}
	defer pool.Close()
	return c.round(ctx, pool, func() *float64 { return nil })
}

// Handle is the handler of Type. It takes all turns at once, even if they are not due.
func (c *Cleaner) Handle(ctx context.Context, _ struct{}) (Removed, error) {
	begun := time.Now()
	r, soon, err := c.round(ctx, c.pool, func() *float64 { since := time.Since(begun).Seconds(); return &since })
	if soon {
		return r, run.Again(pause)
	}
	return r, err
}

// A turn is the right to remove rows of one prefix and kind. The database gives it to one worker at a time.
type turn struct {
	kind
	pool *pgxpool.Pool

	Prefix, Kind string
	Period       float64    // in seconds: older rows are removed
	Reached      *time.Time // all that finished before this is removed
	Until        time.Time  // all that finished before this is old

	removed int
	behind  *time.Time // when the first row finished that is old and stays
	left    bool       // there are more rows, for the next turn
	failed  bool
}

// take returns a turn that is due, or nil if there is none.
func (c *Cleaner) take(ctx context.Context, pool *pgxpool.Pool, since *float64) (*turn, error) {
	names, periods := c.keep.periods()
	var prefix, kind *string
	var period *float64
	var reached, until *time.Time
	err := pool.QueryRow(ctx, `SELECT * FROM workflow_retention_v1($1, $2, $3, $4, $5)`, c.prefixes, names, periods, c.every.Seconds(), since).
		Scan(&prefix, &kind, &period, &reached, &until)
	if err != nil || prefix == nil {
		return nil, err
	}
	return &turn{kind: kinds[*kind], pool: pool, Prefix: *prefix, Kind: *kind, Period: *period, Reached: reached, Until: *until}, nil
}

// done records the result of a turn. again, unless nil, is the number of seconds after which the turn is due
// again.
func (t *turn) done(ctx context.Context, again *float64) error {
	reached := t.Reached
	switch {
	case t.failed:
	case t.behind != nil && t.behind.Before(t.Until):
		reached = t.behind
	default:
		reached = &t.Until
	}
	_, err := t.pool.Exec(ctx, `SELECT workflow_retention_done_v1($1, $2, $3, $4, $5)`, t.Prefix, t.Kind, reached, t.removed, again)
	return err
}

// round takes each turn that is due once. It works in batches, and stops between two batches when ctx ends; the
// next round continues. Steps of process graphs are removed with their process. A row that the database refuses
// to remove is set aside, and the others are removed.
//
// soon reports that the caller should repeat the round after a short pause. It is true if no row of some kind can be
// removed and no single row is the cause, or if the database reports passing trouble.
func (c *Cleaner) round(ctx context.Context, pool *pgxpool.Pool, since func() *float64) (r Removed, soon bool, err error) {
	var problems []error
	var unfinished []*turn // made due again after the round, so that this round does not take them again
	again := 0.0
	for ctx.Err() == nil {
		t, err := c.take(ctx, pool, since())
		if err != nil {
			problems = append(problems, err)
		}
		if t == nil {
			break
		}
		refused, err := t.removeAll(ctx, time.Now().Add(c.limit), func(err error) bool { return c.faults.lasting(t.Prefix+" "+t.Kind, err) })
		*t.count(&r) += t.removed
		if r.Refused += refused; refused > 0 {
			c.keep.Logger.Warn("the database refuses to have rows removed; they are set aside: see workflow_set_aside", "kind", t.name, "rows", refused)
		}
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("%ss: %w", t.name, err))
			t.failed = true
			unfinished, again = append(unfinished, t), pause.Seconds()
		case t.left:
			unfinished = append(unfinished, t)
		default:
			if err := t.done(ctx, nil); err != nil {
				problems = append(problems, err)
			}
		}
	}
	err = errors.Join(problems...)
	broken, passing := nobodys(problems)
	switch {
	case err == nil:
		c.faults.over(ctx, pool)
	case ctx.Err() != nil || broken == nil && !passing:
		err = fmt.Errorf("clean up: %w", err)
	default:
		c.faults.tell(ctx, pool, broken, err)
		soon, err = true, nil
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer stop()
	for _, t := range unfinished {
		if t.done(last, &again) != nil { // if that fails, they are due at their usual time
			break
		}
	}
	return r, soon, err
}

// pause is the pause before another try when nothing of a kind could be removed.
const pause = 5 * time.Second

// nobodys sorts the errors that are no single row's fault. It returns the first one that is a statement's (fault.Error),
// and whether one is passing trouble of the database. If any error is neither, it returns nil and false.
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

// faults logs and records that nothing of some kind can be removed.
type faults struct {
	log *slog.Logger

	mu     sync.Mutex
	told   time.Time                // when it was last logged
	noted  bool                     // it is in workflow_fault
	series map[string]*fault.Series // by prefix and kind, over all turns of this process
}

func newFaults(log *slog.Logger) *faults {
	return &faults{log: log, series: map[string]*fault.Series{}}
}

// lasting notes the result of removing rows of a kind, and reports whether that has failed for longer than
// fault.Patience.
func (f *faults) lasting(kind string, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.series[kind] == nil {
		f.series[kind] = &fault.Series{}
	}
	_, lasting := f.series[kind].Of(err)
	return lasting
}

// tell logs and records that nothing of a kind can be removed. broken is the statement's error, or nil if the
// trouble may pass.
func (f *faults) tell(ctx context.Context, pool *pgxpool.Pool, broken *fault.Error, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.told) >= time.Minute {
		f.told = time.Now()
		f.log.Error("retention can remove nothing of a kind; no row is blamed for it, and it is tried again: see workflowctl doctor", "sqlstate", fault.State(err))
	}
	if broken != nil {
		f.noted = true
		_, _ = pool.Exec(ctx, `SELECT workflow_fault_v1('retention', $1, $2)`, fault.State(broken), strings.ToValidUTF8(broken.Error(), "")) // if this fails too, the error is in the log
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

// tooMany is how many rows of a kind may be newly refused in a turn, since each costs several statements. After
// that the rest of the kind waits for the next turn, which passes over the refused rows.
const tooMany = 1000

// removeAll removes rows until there are no more or the turn ends, and returns how many were refused. lasting
// notes each result, and reports whether the removal has failed for so long that any SQLSTATE may be an answer
// about a row.
//
// Of the rows that were set aside for the same reason one is tried again. If that succeeds, removeAll tries the
// others, too.
func (t *turn) removeAll(ctx context.Context, end time.Time, lasting func(error) bool) (refused int, err error) {
	var from time.Time // the oldest
	if t.Reached != nil {
		from = *t.Reached
	}
	for range 10 {
		n, err := t.removeOnce(ctx, from, end, lasting)
		if refused += n; err != nil {
			return refused, err
		}
		lasting(nil)
		var released int
		if err := t.pool.QueryRow(ctx, `SELECT workflow_unremoved_v1($1, '{}', '{}', '{}', '{}')`, t.table).Scan(&released); err != nil || released == 0 || t.left {
			return refused, err
		}
		from, t.behind = time.Time{}, nil
	}
	return refused, nil
}

func (t *turn) removeOnce(ctx context.Context, from, end time.Time, lasting func(error) bool) (refused int, err error) {
	type old struct {
		ID   string
		At   time.Time
		Free *bool // nil: the row has another prefix, and only shows how far the search has come
		More bool
	}
	last := old{At: from}
	for {
		var found []old
		if err := uncompiled(ctx, t.pool, func(tx pgx.Tx) (err error) {
			var rows pgx.Rows
			if t.find == "" {
				rows, _ = tx.Query(ctx, `SELECT * FROM workflow_removable_v1($1, $2, $3, coalesce(nullif($4::text, ''), '00000000-0000-0000-0000-000000000000')::uuid, $5)`,
					t.Prefix, t.Kind, last.At, last.ID, 10*batch) // some rows have other prefixes
			} else {
				rows, _ = tx.Query(ctx, t.find, t.Period, last.At, last.ID, batch)
			}
			found, err = pgx.CollectRows(rows, pgx.RowToStructByPos[old])
			return err
		}); err != nil {
			return refused, fault.OfStatement("retention", err)
		}
		var ids []string
		stays := false
		for _, o := range found {
			last = o
			switch {
			case o.Free == nil:
			case *o.Free:
				ids = append(ids, o.ID)
			default:
				stays = true
			}
		}
		before := t.removed
		for some := range slices.Chunk(ids, batch) {
			n, err := t.removeBatch(ctx, some, lasting)
			refused += n
			if err != nil {
				return refused, err
			}
		}
		if (stays || t.removed-before < len(ids)) && t.behind == nil {
			t.behind = &found[0].At
		}
		switch over := time.Now().After(end); {
		case len(found) == 0 || !last.More:
			return refused, nil
		case over || refused > tooMany:
			t.left = over
			if t.behind == nil {
				t.behind = &last.At
			}
			return refused, nil
		}
	}
}

// removeBatch removes a batch. Rows that the database refuses to remove are set aside, and the others are
// removed.
func (t *turn) removeBatch(ctx context.Context, ids []string, lasting func(error) bool) (refused int, err error) {
	removal := fault.Statement[string]{
		Name: "retention",
		Do: func(ctx context.Context, ids []string) error {
			var gone int
			err := uncompiled(ctx, t.pool, func(tx pgx.Tx) error {
				if t.remove == "" {
					return tx.QueryRow(ctx, `SELECT workflow_remove_v1($1, $2, $3)`, t.Prefix, t.Kind, ids).Scan(&gone)
				}
				return tx.QueryRow(ctx, t.remove, ids, t.Period).Scan(&gone)
			})
			if err == nil {
				t.removed += gone
			}
			return err
		},
		Control: t.control,
	}
	err = removal.Do(ctx, ids)
	for n := 0; n < 5 && (fault.Of(err) == fault.Again || fault.Of(err) == fault.Anew) && ctx.Err() == nil; n++ { // a deadlock, for example
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
		errors.As(b.Err, &said) // otherwise said stays as it is
		for i, text := range []string{b.Row, said.Code, said.Message, said.ConstraintName} {
			columns[i] = append(columns[i], strings.ToValidUTF8(strings.ReplaceAll(text, "\x00", ""), ""))
		}
	}
	_, problem := t.pool.Exec(ctx, `SELECT workflow_unremoved_v1($1, $2, $3, $4, $5)`, t.table, columns[0], columns[1], columns[2], columns[3])
	return len(blamed), errors.Join(err, problem)
}

// errUndo rolls back a transaction that succeeded.
var errUndo = errors.New("undone")

// control makes a row and removes it, in a transaction that is rolled back.
func (t *turn) control(ctx context.Context) error {
	err := uncompiled(ctx, t.pool, func(tx pgx.Tx) error {
		if t.make == nil {
			_, err := tx.Exec(ctx, `SELECT workflow_removes_v1($1)`, t.Kind)
			return cmp.Or(err, errUndo)
		}
		if _, err := tx.Exec(ctx, `SELECT set_config('workflow.advance', 'on', true)`); err != nil {
			return err
		}
		var id string
		if err := tx.QueryRow(ctx, t.make[0]).Scan(&id); err != nil {
			return err
		}
		for _, more := range t.make[1:] {
			if _, err := tx.Exec(ctx, more, id); err != nil {
				return err
			}
		}
		var gone int
		if err := tx.QueryRow(ctx, t.remove, []string{id}, -time.Hour.Seconds()).Scan(&gone); err != nil {
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

// Statements that make a row for a control.
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

// uncompiled calls f in a transaction without JIT. The server overestimates the cost of statements on some
// hundred rows, and would spend seconds compiling each of them anew.
func uncompiled(ctx context.Context, pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: `begin; SET LOCAL jit = off`}, f)
}

// first returns a query for the first old rows behind a position. The query selects the rows by index. Only then it
// evaluates, for each of them, free (the row has no reader) and whether the row is set aside.
func first(table, at, which, free string) string {
	zero, typ := "00000000-0000-0000-0000-000000000000", "uuid"
	columns := "xmin AS row_version, id, " + at // and not the payload
	switch table {
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
	       AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'retention' AND a.id = workflow_unremoved_id(i.id::text) AND a.row_version = i.row_version AND NOT a.due),
	       (SELECT count(*) FROM old) >= $4
	FROM old i
	ORDER BY 2, i.id`
}

// removeProcesses deletes finished instances. What belongs to them goes by the cascade of that one statement,
// so that a user's BEFORE trigger on the instance still finds all of it.
const removeProcesses = `
	WITH gone AS (
		DELETE FROM process_instance
		WHERE ` + atWork + ` AND id = ANY (ARRAY(SELECT id FROM process_instance WHERE id = ANY ($1::text[]::uuid[]) AND completed_at < now() - $2 * interval '1 second' ORDER BY id FOR UPDATE SKIP LOCKED))
		RETURNING id
	)
	SELECT count(*) FROM gone`

// finishedProcesses finds finished instances, children first. An instance stays while an instance that it
// called exists. It also stays while an instance that called it, directly or not, is not over, because that one
// may still undo it. If somebody made a cycle of callers, UNION ends the recursion.
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

// oldMessages finds expired messages, consumed or not, whose ids need not be remembered any more.
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
