package graph_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// The tests in this file check details of scenarios (S..) whose main test is elsewhere.

// S09: a join of all branches behind an exclusive gateway, which would wait for ever, is refused by Deploy. If such a
// definition is inserted by SQL, without that check, a start of it fails and makes no instance.
func TestJoinAfterChoice(t *testing.T) {
	s := newSite(t)
	text := fmt.Sprintf(`{"process": "p", "version": 1, "start": "X", "nodes": {"X": {"choose": [{"if": "input.a", "to": "A"}], "else": "B"}, "J": {"join": "all", "to": "C"}, %s}}`,
		step("A", "J")+","+step("B", "J")+","+step("C", ""))
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var invalid *graph.InvalidError
	if _, err := graph.Deploy(t.Context(), s.pool, d); !errors.As(err, &invalid) || !strings.Contains(err.Error(), "/nodes/J: JOIN_AFTER_EXCLUSIVE") {
		t.Errorf("deployed: %v", err)
	}
	if _, err := s.pool.Exec(t.Context(), `INSERT INTO process_definition (definition) VALUES ($1)`, text); err != nil {
		t.Fatal(err)
	}
	id := s.start("p", `{"a": true}`)
	if got := s.finished(id); got != "failed" {
		t.Errorf("the start has %s, want failed", got)
	}
	if why := query[string](t, s.pool, `SELECT last_error FROM workflow_run WHERE id = $1`, id); !strings.Contains(why, "JOIN_AFTER_EXCLUSIVE") {
		t.Errorf("last_error = %q", why)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 0 {
		t.Errorf("%d instances have begun", n)
	}
}

// S11: an inclusive gateway (any) without a true condition and without else opens an incident. After the fact is
// corrected, a retry continues the instance. With else, only else is taken.
func TestAnyWithoutATrueCondition(t *testing.T) {
	s := newSite(t)
	any := func(more string) string {
		return s.deploy("A", step("A", "O", `"n": "1"`)+`, "O": {"any": [{"if": "steps.A.n > 1", "to": "B"}, {"if": "steps.A.n > 2", "to": "C"}]`+more+`},`+
			step("B", "")+","+step("C", ""))
	}
	id := s.start(any(""), `{}`)
	s.retry(s.stopped(id, "no_branch_taken", 1), "") // nothing was corrected: it stops again
	incident := s.stopped(id, "no_branch_taken", 1)
	s.want(map[string]int{"B": 0, "C": 0})
	s.correct(id, "A", `{"n": 3}`)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "C": 1})
	s.status(s.start(any(`, "else": "D"}, `+strings.TrimSuffix(step("D", ""), "}")), `{}`), graph.Completed)
	s.want(map[string]int{"A": 2, "B": 1, "C": 1, "D": 1})
	s.healthy()
}

// S16: a second cancel has the same result as the first, and does not change the instance.
func TestCancelTwice(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("W", `"W": {"wait": "PT1H"}`), `{}`)
	s.status(id, graph.Waiting)
	answer := func() string {
		run := s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "reason": "no more"}`, id))
		s.done(run)
		return query[string](t, s.pool, `SELECT result::text FROM workflow_run WHERE id = $1`, run)
	}
	instance := func() string {
		return query[string](t, s.pool, `SELECT concat_ws(' ', status, version, failure_reason, completed_at) FROM process_instance WHERE id = $1`, id)
	}
	before := query[int](t, s.pool, `SELECT version FROM process_instance WHERE id = $1`, id)
	first, is := answer(), instance()
	if version := query[int](t, s.pool, `SELECT version FROM process_instance WHERE id = $1`, id); version != before+1 {
		t.Errorf("version %d becomes %d, want one more", before, version)
	}
	if second := answer(); second != first {
		t.Errorf("answers %s and %s, want the same", first, second)
	}
	if now := instance(); now != is {
		t.Errorf("the second cancel makes %q of %q", now, is)
	}
	s.healthy()
}

// S18: a step that was leased before its instance was paused runs to its end and is settled. The next step is held
// until the instance is resumed.
func TestStepThatIsPaused(t *testing.T) {
	s := newSite(t)
	goOn := make(chan struct{})
	s.happens = func(name string, _ int) {
		if name == "A" {
			<-goOn
		}
	}
	id := s.start(s.deploy("A", step("A", "B")+","+step("B", "")), `{}`)
	s.begun("A", 1)
	if got := query[string](t, s.pool, `SELECT process_pause($1)`, id); got != "paused" {
		t.Fatal(got)
	}
	close(goOn)
	s.succeeded("A", 1)
	await(t, "B to be held", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE node = 'B' AND status = 'pending' AND held_at IS NOT NULL`) == 1
	})
	s.want(map[string]int{"A": 1, "B": 0})
	if got := query[string](t, s.pool, `SELECT process_resume($1)`, id); got != "resumed" {
		t.Fatal(got)
	}
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1})
	s.healthy()
}

// The row of an instance is inserted as its first token leaves it. It stays as it is while a token goes from step to step,
// and changes once more at the end.
func TestStepsLeaveTheInstanceAlone(t *testing.T) {
	s := newSite(t)
	goOn := make(chan struct{})
	s.happens = func(name string, _ int) {
		if name == "C" {
			<-goOn
		}
	}
	id := s.start(s.deploy("A", step("A", "B")+","+step("B", "C")+","+step("C", "")), `{}`)
	s.begun("C", 1)
	row := func() string {
		return query[string](t, s.pool, `SELECT concat_ws(' ', status, version, live_tokens, ready_tokens, updated_at = created_at, started_at IS NOT NULL) FROM process_instance WHERE id = $1`, id)
	}
	if got := row(); got != "IN_PROGRESS 1 1 1 t t" {
		t.Errorf("at the third step, the row is %q", got)
	}
	close(goOn)
	s.status(id, graph.Completed)
	if got := row(); !strings.HasPrefix(got, "COMPLETED 2 0 0 f") {
		t.Errorf("in the end, the row is %q", got)
	}
	s.healthy()
}

// A pause or a correction in a REPEATABLE READ transaction fails if a token has moved since its snapshot, although the row of
// the instance has not changed. Tried again, it takes effect.
func TestOldSnapshots(t *testing.T) {
	for name, act := range map[string]string{"pause": `SELECT process_pause($1)`, "correct": `SELECT process_correct($1, 'A', '{"n": 2}', 'by test')`} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			goOn := make(chan struct{})
			s.happens = func(name string, _ int) {
				if name == "A" {
					<-goOn
				}
			}
			id := s.start(s.deploy("A", step("A", "B")+`,"B": {"do": "elsewhere.step.v1"}`), `{}`)
			s.begun("A", 1)
			try := func(between func()) error {
				return pgx.BeginTxFunc(t.Context(), s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), `SELECT count(*) FROM workflow_run`); err != nil {
						t.Fatal(err)
					}
					between()
					_, err := tx.Exec(t.Context(), act, id)
					return err
				})
			}
			err := try(func() {
				close(goOn)
				await(t, "B to be due", func() bool { return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE node = 'B'`) == 1 })
			})
			if fault.State(err) != pgerrcode.SerializationFailure {
				t.Errorf("%s: %v, want a serialization failure", act, err)
			}
			if err := try(func() {}); err != nil {
				t.Errorf("%s, tried again: %v", act, err)
			}
		})
	}
}

// S28: cancelling an instance that is compensating fails with the code conflict and changes nothing.
func TestCancelIsRefused(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", undoable("A", "B", `"undo_fails": "true"`)+","+step("B", "", `"fail": "'no'"`)), `{}`)
	s.stopped(id, "compensation_failed", 1)
	version := query[int](t, s.pool, `SELECT version FROM process_instance WHERE id = $1`, id)
	for _, compensate := range []bool{false, true} {
		cancel := s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "compensate": %v}`, id, compensate))
		if got := s.finished(cancel); got != "failed" {
			t.Errorf("the cancel has %s, want failed", got)
		}
		if got := query[string](t, s.pool, `SELECT error->>'code' FROM workflow_run WHERE id = $1`, cancel); got != "conflict" {
			t.Errorf("code %q, want conflict", got)
		}
	}
	if now := query[int](t, s.pool, `SELECT version FROM process_instance WHERE id = $1 AND completed_at IS NULL`, id); now != version {
		t.Errorf("version %d became %d", version, now)
	}
	s.healthy()
}

// S39: if two tokens of one instance wait for the same message, exactly one gets it.
func TestTwoTokensWait(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("F", `"F": {"fork": ["M", "M"]},`+awaitPaid+step("B", "")), `{"order": "o-1"}`)
	s.waitsFor(2)
	for k := 1; k <= 2; k++ {
		s.done(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-1"}`))
		s.succeeded("B", k)
		s.waitsFor(2 - k)
	}
	s.status(id, graph.Completed)
	s.want(map[string]int{"B": 2})
	s.healthy()
}

// S41: completing a task fails with the code conflict if the task has changed since the version that the person saw.
func TestTaskHasChanged(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("U", `"U": {"human": {}}`), `{}`)
	s.at("U", 1)
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task`)
	query[string](t, s.pool, `SELECT process_task_assign($1, 'anna')`, task)
	for by, version := range map[string]int{"anna": 1, "bob": 2} {
		run := s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": %q, "version": %d}`, task, by, version))
		if got := s.finished(run); got != "failed" {
			t.Errorf("%s, who has seen version %d: %s, want failed", by, version, got)
		}
		if got := query[string](t, s.pool, `SELECT error->>'code' FROM workflow_run WHERE id = $1`, run); got != "conflict" {
			t.Errorf("%s: code %q, want conflict", by, got)
		}
	}
	s.status(id, graph.Waiting)
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', state, assignee, version) FROM user_task`); got != "open anna 2" {
		t.Errorf("the task is %s", got)
	}
	s.done(s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna", "version": 2}`, task)))
	s.status(id, graph.Completed)
	s.healthy()
}

// S43: if a called instance fails and no error edge of the caller takes it, the caller gets an incident with the
// reason. A second report of the end of a called instance does not move the caller again.
func TestChildStopsItsCaller(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", step("X", "", `"fail": "'broken'"`))
	id := s.start(s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}, "to": "A"},`, child)+step("A", "")), `{}`)
	incident := s.stopped(id, "child_failed", 1)
	if why := query[string](t, s.pool, `SELECT message FROM incident WHERE id = $1`, incident); !strings.HasPrefix(why, "instance ") || !strings.HasSuffix(why, "FAILED X: broken: it was told to fail") {
		t.Errorf("the incident says %q", why)
	}
	s.want(map[string]int{"A": 0})

	good := s.deploy("Y", step("Y", ""))
	loop := s.start(s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}, "to": "U"}, "U": {"human": {}, "to": "B"},`, good)+step("B", "")), `{}`)
	s.at("U", 1)
	again := uuid.New()
	pgtest.ByHand(t, s.pool, `
		INSERT INTO workflow_run (id, type, payload, token_id, node)
		SELECT $1, type, payload, token_id, node FROM workflow_run r
		WHERE type = 'graph.arrive.v1' AND token_id IN (SELECT id FROM process_token WHERE instance_id = $2)`, again, loop)
	s.done(again)
	s.at("U", 1)
	s.want(map[string]int{"B": 0})
	s.finish("U")
	s.status(loop, graph.Completed)
	s.want(map[string]int{"B": 1})
	s.healthy()
}

// S44 (a) and (b): each over an empty list completes at once with an empty list as its result. A value that is not a
// list opens an incident.
func TestEachOfNothing(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"each": {"list": "input.items", "do": "test.step.v1"}, "in": {"name": "'item'"}, "to": "B"},`+step("B", "", `"all": "steps.E"`))
	empty := s.start(p, `{"items": []}`)
	s.status(empty, graph.Completed)
	if got := query[string](t, s.pool, `SELECT input->>'all' FROM activity_instance WHERE instance_id = $1 AND node_id = 'B'`, empty); got != "[]" {
		t.Errorf("the result is %s, want []", got)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE instance_id = $1`, empty); n != 1 {
		t.Errorf("%d tokens, want the one that visits", n)
	}
	for _, items := range []string{`null`, `7`, `"abc"`, `{"a": 1}`} {
		id := s.start(p, `{"items": `+items+`}`)
		s.stopped(id, "expression_failed", 1)
		s.status(id, graph.Waiting)
	}
	s.want(map[string]int{"item": 0, "B": 1})
	s.healthy()
}

// A payload that is too large for a step opens an incident, and no run is enqueued.
func TestPayloadTooLarge(t *testing.T) {
	s := newSite(t)
	large, err := json.Marshal(map[string]string{"text": strings.Repeat("x", 200_000)})
	if err != nil {
		t.Fatal(err)
	}
	id := s.start(s.deploy("A", step("A", "", `"text": "input.text + input.text"`)), string(large))
	s.stopped(id, "payload_too_large", 1)
	s.status(id, graph.Waiting)
	s.want(map[string]int{"A": 0})
	s.healthy()
}

// A process that calls itself without end is stopped with an incident after a hundred nested calls.
func TestTooDeep(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deployAs("itself", "C", `"C": {"call": {"process": "itself", "undo": "none"}}`), `{}`)
	pgtest.Await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE code = 'too_deep'`) == 1
	})
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 101 {
		t.Errorf("%d instances, want one, and a hundred that were called", n)
	}
	s.status(id, graph.Waiting)
	s.healthy()
}

// A stored definition cannot be changed, and cannot be deleted while it has instances.
func TestDefinitionsStay(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", ""))
	s.status(s.start(p, `{}`), graph.Completed)
	for sql, says := range map[string]string{
		`UPDATE process_definition SET definition = jsonb_set(definition, '{start}', '"B"')`: "version 1 cannot be changed",
		`UPDATE process_definition SET hash = ''`:                                            "version 1 cannot be changed",
		`DELETE FROM process_definition`:                                                     "version 1 cannot be deleted: 1 instances are of it",
	} {
		if _, err := s.pool.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", sql, err, says)
		}
	}
	s.deploy("U", `"U": {"human": {}}`)
	if tag, err := s.pool.Exec(t.Context(), `DELETE FROM process_definition WHERE name <> $1`, p); err != nil || tag.RowsAffected() != 1 {
		t.Errorf("one without instances is deleted: %v, %v", tag, err)
	}
}

// A run that belongs to no process is settled without a transaction in which the engine takes part, and the engine
// executes no statement for it.
func TestPlainRunsPayNothing(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	s.fate = nil
	r := &reaper{inside: map[*pgx.Conn]bool{}}
	s.hire(func(m *mortal, c *pgxpool.Config) { r.worker, c.ConnConfig.Tracer = m, r })
	for range 20 {
		s.done(s.enqueue("test.step.v1", `{"name": "plain"}`))
	}
	if _, places := r.rest(); len(places) > 0 {
		t.Errorf("plain runs are settled in a transaction:\n%s", strings.Join(places, "\n"))
	}
	s.status(s.start(s.deploy("A", step("A", "")), `{}`), graph.Completed)
	if _, places := r.rest(); len(places) == 0 {
		t.Error("no statement of a process was seen")
	}
}
