// Package cleanup removes what retention no longer wants: old finished runs with their
// history, soft-deleted runs, published events, finished processes. Every worker does it, for its own
// prefixes. For how long things are kept stands in workflow_retention, as all workers ask for it; turns are rows
// (workflow_retention_turn), so that one worker at a time removes the same.
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

// Type is the type of the runs that clean up at once. Workers of an earlier version enqueue one from time to time. Who covers it removes runs
// of types that no worker asks for, too.
const Type = "default.cleanup.v1"

// uncovered is the prefix of types that no worker asks for, and of what is of no type.
const uncovered = "*"

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

// Removed is how many rows have been removed; it becomes the result of a run of Type.
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

// arriving are the runs of signals that are on the way to tokens, or owed to them, as texts. For plain runs workflow_retention_where has the same.
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
	count  func(*Removed) *int
	find   string   // some rows behind the position $2, $3, $4 at most, that are older than $1 seconds: id, time, whether nobody reads it, nor is it set aside, and whether there are more
	remove string   // those of the ids $1 that are still older than $2 seconds, and that nobody has locked; returns how many
	make   []string // make one that is old now; the first returns its id, which is $1 of the others
}

// kinds are by their names in workflow_retention. Plain runs have no statements here: the database decides about them, for roles that are bound to prefixes.
var kinds = map[string]kind{
	"succeeded": {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Finished }},
	"cancelled": {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Finished }},
	"failed":    {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Failed }},
	"deleted":   {name: "run", table: "workflow_run", count: func(r *Removed) *int { return &r.Deleted }},
	"events":    {"outbox event", "outbox_event", func(r *Removed) *int { return &r.Published }, publishedEvents, removeEvents, makeEvent},
	"messages":  {"message", "message", func(r *Removed) *int { return &r.Messages }, oldMessages, removeMessages, makeMessage},
	"processes": {"process instance", "process_instance", func(r *Removed) *int { return &r.Processes }, finishedProcesses, removeProcesses, makeProcess},
}

// periods are the kinds and their periods in seconds; 0: for ever.
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

// A Cleaner removes what is old, for one worker.
type Cleaner struct {
	pool     *pgxpool.Pool
	prefixes []string
	every    time.Duration
	keep     Keep
	faults   *faults
	limit    time.Duration // of a turn, after which what is left is for the next one
}

// New returns a Cleaner of a worker with these prefixes, which has each turn every so often. Keep is what it asks for.
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

// look is how often a Cleaner looks for a turn that is due.
const look = time.Minute

// Run takes turns until ctx ends. It keeps no connection from one time to the next: a role that may have few has them for its
// work. While the database is out of reach it waits and tries again.
func (c *Cleaner) Run(ctx context.Context) {
	for ctx.Err() == nil {
		removed, soon, err := c.briefly(ctx)
		wait := min(look, c.every)
		switch log := c.keep.Logger; {
		case ctx.Err() != nil:
			return
		case soon:
			wait = min(wait, pause) // it is told
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

// briefly takes the turns that are due, with a connection that it closes afterwards.
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

// Handle is the handler of Type: it takes all turns at once, whoever had them when.
func (c *Cleaner) Handle(ctx context.Context, _ struct{}) (Removed, error) {
	begun := time.Now()
	r, soon, err := c.round(ctx, c.pool, func() *float64 { since := time.Since(begun).Seconds(); return &since })
	if soon {
		return r, run.Again(pause)
	}
	return r, err
}

// A turn is what the database gives to one worker at a time.
type turn struct {
	kind
	pool *pgxpool.Pool

	Prefix, Kind string
	Period       float64    // in seconds: what is older is removed
	Reached      *time.Time // what finished before this is gone
	Until        time.Time  // what finished before this is old

	removed int
	behind  *time.Time // when the first finished that stays although it is old
	left    bool       // there is more, which the next turn has
	failed  bool
}

// take returns a turn that is due; nil: none is.
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

// done says what has become of a turn. What could not be finished is due again, after some seconds.
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

// round takes all turns that are due, each once. It works in batches and stops between two of them
// when its context ends; what is left is for the next time. Steps of process graphs go with
// their process. What the database refuses to have removed is set aside, and all else goes. If nothing of a kind
// can be removed that is no row's fault, and it is to be tried again after a pause: soon. So it is while the database tells of passing
// trouble.
func (c *Cleaner) round(ctx context.Context, pool *pgxpool.Pool, since func() *float64) (r Removed, soon bool, err error) {
	var problems []error
	var unfinished []*turn // they are due again once this round is over, and not within it
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
		if t.done(last, &again) != nil { // then it is due when its time has come
			break
		}
	}
	return r, soon, err
}

// pause is what comes before it is tried again to remove a kind of which nothing could be removed.
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
	told   time.Time                // in the log
	noted  bool                     // in workflow_fault
	series map[string]*fault.Series // of each prefix and kind, over all turns of this process
}

func newFaults(log *slog.Logger) *faults {
	return &faults{log: log, series: map[string]*fault.Series{}}
}

// lasting notes what came of removing what there is of a kind, and reports whether that has failed for long.
func (f *faults) lasting(kind string, err error) bool {
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

// removeAll removes what there is until the turn is over, and returns how many were refused. lasting notes what came of it, and reports whether it has
// failed for so long that any code is an answer about a row. If one goes that was tried for all that are refused for
// the same reason, these are tried once more.
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
		Free *bool // nil: it is another prefix's, and only says how far this has come
		More bool
	}
	last := old{At: from}
	for {
		var found []old
		if err := uncompiled(ctx, t.pool, func(tx pgx.Tx) (err error) {
			var rows pgx.Rows
			if t.find == "" {
				rows, _ = tx.Query(ctx, `SELECT * FROM workflow_removable_v1($1, $2, $3, coalesce(nullif($4::text, ''), '00000000-0000-0000-0000-000000000000')::uuid, $5)`,
					t.Prefix, t.Kind, last.At, last.ID, 10*batch) // of which some are other prefixes'
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

// removeBatch removes a batch. Those of which the database refuses it are set aside, and the others go.
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
	_, problem := t.pool.Exec(ctx, `SELECT workflow_unremoved_v1($1, $2, $3, $4, $5)`, t.table, columns[0], columns[1], columns[2], columns[3])
	return len(blamed), errors.Join(err, problem)
}

// errUndo undoes a transaction that went well.
var errUndo = errors.New("undone")

// control removes a row that is made for this, and undoes it.
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

// What makes rows that are removed as a control.
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
