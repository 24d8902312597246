package graph_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cleanup"
)

// anyPeriod makes the database accept retention periods of less than a minute.
const anyPeriod = `ALTER TABLE workflow_retention DROP CONSTRAINT IF EXISTS workflow_retention_period_check`

// clean removes everything that retention may remove.
func (s *site) clean() {
	s.t.Helper()
	if err := s.cleanIn(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) cleanIn(ctx context.Context) error {
	const little = time.Millisecond
	keep := cleanup.Keep{Finished: little, Failed: little, Deleted: little, Published: little, Processes: little}
	if _, err := s.pool.Exec(ctx, anyPeriod); err != nil {
		return err
	}
	for range 3 { // called instances are removed before their callers, one level in each pass
		if _, err := cleanup.New(s.pool, []string{"default."}, time.Hour, keep).Handle(ctx, struct{}{}); err != nil {
			return err
		}
	}
	return nil
}

// A life is a process with several stages at which it waits, the moves that lead from stage to stage, and its end.
type life struct {
	name  string
	nodes func(s *site) string // starts at A; Z is the last step
	moves []move
	end   graph.Status
}

// idle waits until no run is leased, and none is due within a minute unless it is held or deleted.
func (s *site) idle() {
	s.t.Helper()
	await(s.t, "all to wait", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM workflow_run WHERE status = 'leased' OR status = 'pending' AND held_at IS NULL AND deleted_at IS NULL AND run_at < now() + interval '1 minute'`) == 0
	})
}

// A move makes a process continue.
type move func(*site, uuid.UUID)

// then returns a move that also executes a statement by hand, when the first move is done.
func (m move) then(sql string) move {
	return func(s *site, id uuid.UUID) {
		s.t.Helper()
		m(s, id)
		s.idle()
		byHand(sql)(s, id)
	}
}

func say(typ, payload string) move {
	return func(s *site, id uuid.UUID) { s.enqueue(typ, strings.ReplaceAll(payload, "$id", id.String())) }
}

// byHand returns a move that executes a statement by hand, as time or an operator would change the rows. $1 is the
// instance.
func byHand(sql string) move {
	return func(s *site, id uuid.UUID) {
		s.t.Helper()
		if err := pgx.BeginFunc(s.t.Context(), s.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(s.t.Context(), `SET LOCAL workflow.override = 'time goes by'`); err != nil {
				return err
			}
			_, err := tx.Exec(s.t.Context(), sql, id)
			return err
		}); err != nil {
			s.t.Fatal(err)
		}
	}
}

func completeTask(s *site, id uuid.UUID) {
	s.t.Helper()
	s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna", "output": {"ok": true}}`, query[uuid.UUID](s.t, s.pool, `
		WITH RECURSIVE tree AS (SELECT id FROM process_instance WHERE id = $1 UNION SELECT c.id FROM process_instance c JOIN tree ON c.parent_process_instance_id = tree.id)
		SELECT u.id FROM user_task u JOIN tree ON tree.id = u.instance_id WHERE u.state = 'open'`, id)))
}

const (
	due     = `UPDATE workflow_run SET run_at = now() WHERE token_id IN (SELECT id FROM process_token WHERE instance_id = $1) AND status = 'pending' AND type = 'graph.timer.v1'`
	expired = `UPDATE message SET expires_at = now() WHERE $1 <> '00000000-0000-0000-0000-000000000000'::uuid`
	deleted = `SELECT workflow_delete(id, 'no') FROM workflow_run WHERE type = 'graph.signal.v1' AND token_id IS NULL AND $1 <> '00000000-0000-0000-0000-000000000000'::uuid`
)

var lifetimes = []life{
	{"signal", func(*site) string {
		return `"A": {"await": {"signal": "news"}, "to": "Z"},` + step("Z", "", `"v": "steps.A.n"`)
	}, []move{say("graph.signal.v1", `{"name": "news", "payload": {"n": 1}}`)}, graph.Completed},
	{"deleted signal", func(*site) string {
		return `"A": {"await": {"signal": "news"}, "to": "Z"},` + step("Z", "", `"v": "steps.A.n"`)
	}, []move{say("graph.signal.v1", `{"name": "news", "payload": {"n": 1}}`).then(deleted)}, graph.Completed},
	{"signal of a process", func(*site) string {
		return `"A": {"await": {"signal": "news"}, "to": "Z"},` + step("Z", "", `"v": "steps.A.n"`)
	}, []move{func(s *site, _ uuid.UUID) {
		s.status(s.start(s.deploy("S", `"S": {"do": "graph.signal.v1", "in": {"name": "'news'", "payload": "{'n': 1}"}}`), `{}`), graph.Completed)
	}}, graph.Completed},
	{"message", func(*site) string {
		return `"A": {"await": {"message": "paid", "key": "input.key"}, "to": "B"}, "B": {"await": {"message": "sent", "key": "input.key"}, "to": "Z"},` + step("Z", "", `"v": "steps.A.n + steps.B.n"`)
	}, []move{say("graph.message.v1", `{"name": "paid", "key": "k", "payload": {"n": 1}}`).then(expired),
		say("graph.message.v1", `{"name": "sent", "key": "k", "payload": {"n": 1}}`).then(expired)}, graph.Completed},
	{"message before it is awaited", func(*site) string {
		return `"A": {"wait": "P1D", "to": "B"}, "B": {"await": {"message": "paid", "key": "input.key"}, "to": "Z"},` + step("Z", "", `"v": "steps.B.n"`)
	}, []move{say("graph.message.v1", `{"name": "paid", "key": "k", "payload": {"n": 1}}`), byHand(due)}, graph.Completed},
	{"race", func(*site) string {
		return `"A": {"race": ["M", "S", "W"]}, "M": {"await": {"message": "never", "key": "'k'"}, "to": "Z"}, "S": {"await": {"signal": "news"}, "to": "Z"}, "W": {"wait": "P1D", "to": "Z"},` +
			step("Z", "", `"v": "steps.S.n"`)
	}, []move{say("graph.signal.v1", `{"name": "news", "payload": {"n": 1}}`)}, graph.Completed},
	{"timer and message beside a task", func(*site) string {
		return `"A": {"human": {}, "on": [{"message": "hint", "key": "'k'", "keep": true, "to": "H"}, {"every": "P1D", "to": "T"}], "to": "Z"},` +
			step("H", "") + "," + step("T", "") + "," + step("Z", "", `"v": "steps.A.ok"`)
	}, []move{say("graph.message.v1", `{"name": "hint", "key": "k"}`).then(expired), byHand(due), byHand(due), completeTask}, graph.Completed},
	{"call", func(s *site) string {
		return fmt.Sprintf(`"A": {"call": {"process": %q, "undo": "none"}, "to": "Z"},`, s.deployOut("U", `"U": {"human": {}}`, "{'ok': steps.U.ok}")) + step("Z", "", `"v": "steps.A.ok"`)
	}, []move{completeTask}, graph.Completed},
	{"call within a call, undone", func(s *site) string {
		inner := s.deploy("I", `"I": {"do": "test.step.v1", "in": {"name": "'I'"}, "undo": "test.undo.v1"}`)
		outer := s.deploy("O", fmt.Sprintf(`"O": {"call": {"process": %q, "undo": "propagate"}, "to": "P"}, "P": {"do": "test.step.v1", "in": {"name": "'P'"}, "undo": "test.undo.v1"}`, inner))
		return fmt.Sprintf(`"A": {"call": {"process": %q, "undo": "propagate"}, "to": "U"}, "U": {"human": {}, "to": "F"},`, outer) + step("F", "", `"fail": "'no'"`)
	}, []move{completeTask}, graph.Failed},
	{"list", func(*site) string {
		return `"A": {"each": {"list": "[1, 2, 3]", "do": "test.step.v1", "limit": 1}, "in": {"name": "'each'", "n": "item"}, "to": "U"}, "U": {"human": {}, "to": "Z"},` + step("Z", "", `"v": "steps.A[2].n"`)
	}, []move{completeTask}, graph.Completed},
	{"scope and throw", func(*site) string {
		return `"A": {"scope": {"start": "I", "nodes": {"I": {"do": "test.step.v1", "in": {"name": "'I'"}, "undo": "test.undo.v1", "to": "J"}, "J": {"human": {}, "to": "K"}, "K": {"throw": {"compensate": true}}}}, "to": "U"},
			"U": {"human": {}, "to": "Z"},` + step("Z", "", `"v": "steps.J.ok"`)
	}, []move{completeTask, completeTask}, graph.Completed},
	{"fork and join", func(*site) string {
		return `"A": {"fork": ["B", "C"]}, "B": {"human": {}, "to": "J"}, "C": {"await": {"signal": "news"}, "to": "J"}, "J": {"join": "all", "to": "Z"},` + step("Z", "", `"v": "[steps.B.ok, steps.C.n]"`)
	}, []move{say("graph.signal.v1", `{"name": "news", "payload": {"n": 1}}`), completeTask}, graph.Completed},
	{"cancelled with compensation", func(*site) string {
		return `"A": {"do": "test.step.v1", "in": {"name": "'A'"}, "undo": "test.undo.v1", "to": "U"}, "U": {"human": {}}`
	}, []move{say("graph.cancel.v1", `{"instance": "$id", "compensate": true}`)}, graph.Cancelled},
}

// deployOut deploys a process with an output, and returns its name.
func (s *site) deployOut(start, nodes, output string) string {
	s.t.Helper()
	name := "p" + uuid.NewString()[:8]
	define(s.t, s.pool, fmt.Sprintf(`{"process": %q, "version": 1, "start": %q, "output": %q, "nodes": {%s}}`, name, start, output, nodes))
	return name
}

// Retention keeps everything that an open instance may still read: a process of any kind that is paused at each of its
// stages, while retention removes everything that it may after a millisecond, ends as it would without retention.
func TestRetentionKeepsWhatIsRead(t *testing.T) {
	for _, l := range lifetimes {
		t.Run(l.name, func(t *testing.T) {
			s := newSite(t)
			p := s.deploy("A", l.nodes(s))
			id := s.start(p, `{"key": "k"}`)
			s.idle()
			for _, move := range l.moves {
				s.pause(id)
				s.clean()
				move(s, id) // the runs it leads to are held
				s.idle()
				s.clean()
				s.resume(id)
				s.idle()
				s.clean()
			}
			if got := query[string](t, s.pool, `SELECT coalesce((SELECT status FROM process_instance WHERE id = $1), 'gone with its end')`, id); got != "gone with its end" {
				t.Errorf("it is %s, %s", got, query[string](t, s.pool, `SELECT coalesce(string_agg(data::text, ' '), '') FROM process_event WHERE instance_id = $1`, id))
			}
			last := query[string](t, s.pool, `SELECT string_agg(event_type, ' ' ORDER BY id) FROM outbox_event WHERE aggregate_id = $1`, id)
			if !strings.HasSuffix(last, "process."+strings.ToLower(string(l.end))) {
				t.Errorf("its events are %s; want its end as %s", last, l.end)
			}
			if n := s.count("Z"); n != 1 && l.end == graph.Completed {
				t.Errorf("the last step was done %d times", n)
			}
			s.healthy()
			s.clean()
			if n := query[int](t, s.pool, `SELECT (SELECT count(*) FROM workflow_run) + (SELECT count(*) FROM process_instance) + (SELECT count(*) FROM process_token)`); n > 0 {
				t.Errorf("%d rows are left although nothing lives", n)
			}
		})
	}
}

func (s *site) pause(id uuid.UUID)  { s.ask(`SELECT process_pause($1)`, id, "paused") }
func (s *site) resume(id uuid.UUID) { s.ask(`SELECT process_resume($1)`, id, "resumed") }

func (s *site) ask(sql string, id uuid.UUID, want string) {
	s.t.Helper()
	if got := query[string](s.t, s.pool, sql, id); got != want && !strings.HasPrefix(got, "too late") {
		s.t.Fatalf("%s: %s", sql, got)
	}
}

// The engine cancels a called instance whose caller has ended without it. That run succeeds although the instance has
// ended by then and retention has removed it, or is undoing its steps: it is nobody's mistake. What a client cancels has
// to exist.
func TestCancelledTooLate(t *testing.T) {
	for name, l := range map[string]struct {
		nodes, left, refusal string
		ends                 move
	}{
		"removed": {`"U": {"human": {}}`, "0", "there is no instance", completeTask},
		"undoing": {`"U": {"do": "test.step.v1", "in": {"name": "'U'"}, "undo": "test.undo.v1", "to": "V"}, "V": {"human": {}}`, "1", "is already undoing its completed steps",
			func(s *site, id uuid.UUID) {
				query[string](t, s.pool, `SELECT workflow_pause('test.undo.', 'a test')`)
				byHand(`INSERT INTO workflow_run (type, payload, priority)
					SELECT 'graph.fail.v1', jsonb_build_object('instance', id), 1 FROM process_instance WHERE parent_process_instance_id = $1`)(s, id)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			id := s.start(s.deploy("A", fmt.Sprintf(`"A": {"call": {"process": %q, "undo": "none"}}`, s.deployOut("U", l.nodes, "{}"))), `{}`)
			s.idle()
			query[string](t, s.pool, `SELECT workflow_pause('graph.cancel.', 'a test')`)
			s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))
			s.status(id, graph.Failed)
			l.ends(s, id)
			await(t, "the called instance to end, or to undo its steps", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1 AND (completed_at IS NOT NULL OR ending IS NOT NULL)`, id) == 1
			})
			s.clean()
			if n := query[string](t, s.pool, `SELECT count(*)::text FROM process_instance WHERE parent_process_instance_id = $1`, id); n != l.left {
				t.Fatalf("%s called instances are left; want %s", n, l.left)
			}
			cancelled := query[uuid.UUID](t, s.pool, `SELECT id FROM workflow_run WHERE type = 'graph.cancel.v1'`)
			query[string](t, s.pool, `SELECT workflow_resume('graph.cancel.')`)
			await(t, "the run that cancels it to end", func() bool {
				return query[bool](t, s.pool, `SELECT finished_at IS NOT NULL FROM workflow_run WHERE id = $1`, cancelled)
			})
			if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, last_error) FROM workflow_run WHERE id = $1`, cancelled); got != "succeeded" {
				t.Errorf("the run that cancels it: %s", got)
			}
			again := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) SELECT type, payload - 'reason' FROM workflow_run WHERE id = $1 RETURNING id`, cancelled)
			await(t, "the run of a client to end", func() bool {
				return query[bool](t, s.pool, `SELECT finished_at IS NOT NULL FROM workflow_run WHERE id = $1`, again)
			})
			if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, last_error) FROM workflow_run WHERE id = $1`, again); !strings.HasPrefix(got, "failed ") || !strings.Contains(got, l.refusal) {
				t.Errorf("the run of a client: %s; want it failed: %s", got, l.refusal)
			}
		})
	}
}

// A run that refers to a token which retention has removed succeeds and does nothing.
func TestTokenThatIsGone(t *testing.T) {
	s := newSite(t)
	called := s.deploy("A", step("A", ""))
	for typ, payload := range map[string]string{
		"graph.start.v1":   fmt.Sprintf(`{"process": %q, "parent": {"instance": %q, "token": %q, "visit": 2, "depth": 1}}`, called, uuid.New(), uuid.New()),
		"graph.cut_off.v1": fmt.Sprintf(`{"token": %q, "visit": 2}`, uuid.New()),
	} {
		id := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) SELECT $1, $2::jsonb FROM set_config('workflow.advance', 'on', true) RETURNING id`, typ, payload)
		s.idle()
		if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, last_error) FROM workflow_run WHERE id = $1`, id); got != "succeeded" {
			t.Errorf("%s: %s", typ, got)
		}
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n > 0 {
		t.Errorf("%d instances were started", n)
	}
}
