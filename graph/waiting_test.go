package graph_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// enqueue inserts a run with SQL, and returns its id.
func (s *site) enqueue(typ, payload string) uuid.UUID {
	s.t.Helper()
	return query[uuid.UUID](s.t, s.pool, `INSERT INTO workflow_run (type, payload) VALUES ($1, $2) RETURNING id`, typ, payload)
}

// finished waits until a run has finished, and returns its status.
func (s *site) finished(id uuid.UUID) (status string) {
	s.t.Helper()
	await(s.t, "run "+id.String()+" to finish", func() bool {
		status = query[string](s.t, s.pool, `SELECT status FROM workflow_run WHERE id = $1`, id)
		return status != "pending" && status != "leased"
	})
	return status
}

// waitsFor waits until there are n waits for messages or signals.
func (s *site) waitsFor(n int) {
	s.t.Helper()
	await(s.t, "tokens to wait for messages", func() bool { return query[int](s.t, s.pool, `SELECT count(*) FROM message_wait`) == n })
}

const awaitPaid = `"M": {"await": {"message": "paid", "key": "input.order"}, "to": "B"},`

// S36: a message that arrives before a token waits for it is kept until its TTL has passed.
func TestMessageBeforeTheWait(t *testing.T) {
	s := newSite(t)
	p := s.deploy("M", awaitPaid+step("B", "", `"amount": "steps.M.amount"`))
	s.finished(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-1", "payload": {"amount": 7}, "ttl": "1h"}`))
	s.finished(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-2", "ttl": "1s"}`))
	first := s.start(p, `{"order": "o-1"}`)
	s.status(first, graph.Completed)
	if got := query[string](t, s.pool, `SELECT output->>'amount' FROM activity_instance WHERE instance_id = $1 AND node_id = 'B'`, first); got != "7" {
		t.Errorf("amount = %s, want 7", got)
	}
	pgtest.Elapse(t, s.pool, time.Minute)
	late := s.start(p, `{"order": "o-2"}`)
	s.waitsFor(1)
	s.status(late, graph.Waiting)
	s.healthy()
}

// S37: sending a message with the same id again changes nothing, both before and after it is taken.
func TestMessageTwice(t *testing.T) {
	s := newSite(t)
	p := s.deploy("M", awaitPaid+step("B", "X")+`, "X": {"choose": [{"if": "'once' in input", "to": "Z"}], "else": "M"}, "Z": {"end": true}`)
	send := func() {
		s.finished(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-1", "id": "m1"}`))
	}
	send()
	send()
	id := s.start(p, `{"order": "o-1"}`)
	await(t, "B to run", func() bool { return s.count("B") == 1 })
	send()
	s.waitsFor(1)
	time.Sleep(200 * time.Millisecond)
	s.want(map[string]int{"B": 1})
	s.status(id, graph.Waiting)
	s.healthy()
}

// No role but the engine's can delay a message by taking locks, and a row left in message_key by hand delays none.
func TestNobodyHoldsAMessage(t *testing.T) {
	s := newSite(t)
	named := pgtest.Roles(t, s.pool)
	p := s.deploy("M", awaitPaid+step("B", ""))
	stranger := pgtest.As(t, s.pool, named)
	lock, err := stranger.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Rollback(t.Context()) }()
	if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended('paid' || chr(1) || 'o-1', 5))`); err != nil {
		t.Fatal(err)
	}
	query[int64](t, s.pool, `INSERT INTO message_key VALUES (hashtextextended('paid' || chr(1) || 'o-1', 5)) RETURNING hash`)
	id := s.start(p, `{"order": "o-1"}`)
	s.waitsFor(1)
	s.done(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-1"}`))
	s.status(id, graph.Completed)
	if n := query[int](t, s.pool, `SELECT count(*) FROM message_key`); n != 0 {
		t.Errorf("%d keys are left", n)
	}
	for _, pool := range []*pgxpool.Pool{stranger, pgtest.As(t, s.pool, named, "enqueue"), pgtest.As(t, s.pool, named, "worker"), pgtest.As(t, s.pool, named, "dispatcher"), pgtest.As(t, s.pool, named, "operator")} {
		for _, try := range []string{`INSERT INTO message_key VALUES (1)`, `DELETE FROM message_key`, `SELECT FROM message_key FOR KEY SHARE`, `SELECT process_hold_v1('{paid}', '{o-1}')`} {
			var refused *pgconn.PgError
			if _, err := pool.Exec(t.Context(), try); !errors.As(err, &refused) || refused.Code != "42501" {
				t.Errorf("%s: %v", try, err)
			}
		}
	}
	query[string](t, pgtest.As(t, s.pool, named, "engine"), `SELECT process_hold_v1('{paid}', '{o-1}')::text`)
	s.healthy()
}

// S39: of two tokens that wait for one message, the one that has waited longer gets it. A signal reaches both.
func TestTwoWaits(t *testing.T) {
	s := newSite(t)
	p := s.deploy("M", awaitPaid+step("B", "S")+`, "S": {"await": {"signal": "go"}, "to": "C"},`+step("C", ""))
	first := s.start(p, `{"order": 1}`)
	s.waitsFor(1)
	second := s.start(p, `{"order": 1}`)
	s.waitsFor(2)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	await(t, "one to move on", func() bool { return s.count("B") == 1 })
	if node := query[string](t, s.pool, `SELECT node_id FROM token WHERE instance_id = $1`, second); node != "M" {
		t.Errorf("the later one is at %s", node)
	}
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	await(t, "both to wait for the signal", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM message_wait WHERE name = 'go'`) == 2
	})
	s.enqueue("graph.signal.v1", `{"name": "go"}`)
	s.status(first, graph.Completed)
	s.status(second, graph.Completed)
	s.healthy()
}

// S40: the first event of a race wins, and the waits and timers of the others are removed.
func TestRace(t *testing.T) {
	s := newSite(t)
	p := s.deploy("R", `"R": {"race": ["M", "T"]}, "M": {"await": {"message": "paid", "key": "input.order"}, "to": "A"}, "T": {"wait": "PT1H", "to": "B"},`+
		step("A", "", `"amount": "steps.M.amount"`)+","+step("B", ""))
	paid := s.start(p, `{"order": "o-1"}`)
	s.waitsFor(1)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-1", "payload": {"amount": 7}}`)
	s.status(paid, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 0})
	late := s.start(p, `{"order": "o-2"}`)
	s.waitsFor(1)
	pgtest.Elapse(t, s.pool, time.Hour)
	s.status(late, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1})
	s.waitsFor(0)
	s.finished(s.enqueue("graph.message.v1", `{"name": "paid", "key": "o-2"}`))
	if n := query[int](t, s.pool, `SELECT count(*) FROM message WHERE key = 'o-2' AND token_id IS NULL`); n != 1 {
		t.Error("the message was consumed, though the timer had won")
	}
	s.healthy()
}

// A repeating, non-interrupting timer sends a token of its own each time, as often as "times" says.
func TestRepeatedTimer(t *testing.T) {
	s := newSite(t)
	p := s.deploy("U", `"U": {"human": {}, "to": "C", "on": [{"every": "PT10M", "times": 3, "to": "remind"}]},`+step("remind", "")+","+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	for k := 1; k <= 3; k++ {
		await(t, "the timer", func() bool {
			return query[int](t, s.pool, `SELECT count(*) FROM timer WHERE status = 'Scheduled'`) == 1
		})
		pgtest.Elapse(t, s.pool, 10*time.Minute)
		await(t, "a reminder", func() bool { return s.count("remind") == k })
	}
	pgtest.Elapse(t, s.pool, time.Hour)
	time.Sleep(300 * time.Millisecond)
	s.want(map[string]int{"remind": 3})
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE state = 'open'`)
	s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna"}`, task))
	s.status(id, graph.Completed)
	s.healthy()
}

// S41: a task that is assigned to one person cannot be completed by another. The assignee completes it, and later steps
// read the output.
func TestTask(t *testing.T) {
	s := newSite(t)
	p := s.deploy("U", `"U": {"human": {"groups": ["support"]}, "in": {"order": "input.order"}, "to": "C"},`+step("C", "", `"ok": "steps.U.ok"`))
	id := s.start(p, `{"order": 7}`)
	s.status(id, graph.Waiting)
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE state = 'open' AND payload->>'order' = '7'`)
	if got := query[string](t, s.pool, `SELECT process_task_assign($1, 'anna')`, task); got != "assigned to anna" {
		t.Errorf("assign: %s", got)
	}
	if got := query[string](t, s.pool, `SELECT process_task_assign($1, 'bob')`, task); got != "conflict: assigned to anna, version 2" {
		t.Errorf("assign: %s", got)
	}
	bob := s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "bob"}`, task))
	if got := s.finished(bob); got != "failed" {
		t.Errorf("bob's completion is %s, want failed", got)
	}
	anna := s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna", "version": 2, "output": {"ok": true}}`, task))
	if got := s.finished(anna); got != "succeeded" {
		t.Errorf("anna's completion is %s, want succeeded", got)
	}
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT output->>'ok' FROM activity_instance WHERE instance_id = $1 AND node_id = 'C'`, id); got != "true" {
		t.Errorf("ok = %s", got)
	}
	s.healthy()
}

// S18: no run of a paused instance is leased. A timer that became due meanwhile fires when the instance is resumed.
func TestPause(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", `"A": {"human": {}, "to": "C", "on": [{"after": "PT1M", "to": "B"}]},`+step("B", "")+","+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	if got := query[string](t, s.pool, `SELECT process_pause($1)`, id); got != "paused" {
		t.Fatal(got)
	}
	pgtest.Elapse(t, s.pool, 5*time.Minute)
	time.Sleep(300 * time.Millisecond)
	s.want(map[string]int{"B": 0})
	if got := query[string](t, s.pool, `SELECT process_resume($1)`, id); got != "resumed" {
		t.Fatal(got)
	}
	s.status(id, graph.Completed)
	s.want(map[string]int{"B": 1, "C": 0})
	s.healthy()
}

// Instances that a paused instance has called, at any depth, or calls while it is paused, are paused and resumed with
// it. One that was paused on its own before stays paused.
func TestPauseReachesCalls(t *testing.T) {
	s := newSite(t)
	calls := func(process string) string {
		return fmt.Sprintf(`"call": {"call": {"process": %q, "undo": "none"}}`, process)
	}
	last := s.deploy("W", `"W": {"wait": "PT1M", "to": "X"},`+step("X", ""))
	middle := s.deploy("call", calls(last))
	p := s.deploy("A", `"A": {"wait": "PT1M", "to": "call"},`+calls(middle))
	act := func(function string, id uuid.UUID, want string) {
		t.Helper()
		if got := query[string](t, s.pool, `SELECT `+function+`($1)`, id); got != want {
			t.Fatalf("%s: %s, want %s", function, got, want)
		}
	}
	called := func(id uuid.UUID) (child uuid.UUID) {
		t.Helper()
		await(t, "an instance to be called", func() bool {
			child = query[uuid.UUID](t, s.pool, `SELECT coalesce((SELECT id FROM process_instance WHERE parent_process_instance_id = $1), $2)`, id, uuid.Nil)
			return child != uuid.Nil
		})
		return child
	}
	still := func() {
		t.Helper()
		pgtest.Elapse(t, s.pool, 5*time.Minute)
		time.Sleep(300 * time.Millisecond)
	}
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	pgtest.Elapse(t, s.pool, 2*time.Minute)
	child := called(id)
	s.status(called(child), graph.Waiting)
	act("process_pause", id, "paused")
	act("process_pause", called(child), "already paused")
	still()
	s.want(map[string]int{"X": 0})
	act("process_resume", id, "resumed")
	s.status(id, graph.Completed)
	s.want(map[string]int{"X": 1})

	// The instance calls another one while it is paused: the run that starts it was enqueued before.
	id = s.start(s.deploy("A", `"A": {"wait": "PT1M", "to": "call"},`+calls(s.deploy("X", step("X", "")))), `{}`)
	s.status(id, graph.Waiting)
	query[string](t, s.pool, `SELECT workflow_pause('graph.start.', 'test')`)
	time.Sleep(500 * time.Millisecond)
	pgtest.Elapse(t, s.pool, 2*time.Minute)
	await(t, "the call", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_starting WHERE instance_id = $1`, id) == 1
	})
	act("process_pause", id, "paused")
	query[string](t, s.pool, `SELECT workflow_resume('graph.start.')`)
	if with := query[string](t, s.pool, `SELECT data->>'with' FROM process_event WHERE instance_id = $1 AND event_type = 'instance.paused'`, called(id)); with != id.String() {
		t.Errorf("it is told to have been paused with %s, want %s", with, id)
	}
	still()
	s.want(map[string]int{"X": 1})
	act("process_resume", id, "resumed")
	s.status(id, graph.Completed)
	s.want(map[string]int{"X": 2})

	// An instance that was paused on its own before stays paused.
	id = s.start(p, `{}`)
	s.status(id, graph.Waiting)
	pgtest.Elapse(t, s.pool, 2*time.Minute)
	grandchild := called(called(id))
	s.status(grandchild, graph.Waiting)
	act("process_pause", grandchild, "paused")
	act("process_pause", id, "paused")
	act("process_resume", id, "resumed")
	still()
	s.want(map[string]int{"X": 2})
	act("process_resume", grandchild, "resumed")
	s.status(id, graph.Completed)
	s.want(map[string]int{"X": 3})
	s.healthy()
}

// If an instance ends while it is paused, resuming it still resumes the instances it has called, which then undo their
// steps.
func TestResumeAfterTheEnd(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", undoable("X", "W")+`, "W": {"wait": "PT1H"}`)
	id := s.start(s.deploy("F", fmt.Sprintf(`"F": {"fork": ["call", "U"]}, "call": {"call": {"process": %q, "undo": "propagate"}}, "U": {"human": {}, "to": "T"}, "T": {"terminate": true}`, child)), `{}`)
	var called uuid.UUID
	await(t, "the child to wait", func() bool {
		called = query[uuid.UUID](t, s.pool, `SELECT coalesce((SELECT id FROM process_instance WHERE parent_process_instance_id = $1 AND status = 'WAITING'), $2)`, id, uuid.Nil)
		return called != uuid.Nil
	})
	if got := query[string](t, s.pool, `SELECT process_pause($1)`, id); got != "paused" {
		t.Fatal(got)
	}
	if got := query[string](t, s.pool, `SELECT process_why($1)`, called); !strings.Contains(got, "process_resume('"+id.String()) {
		t.Errorf("the child: %s; want the pause of %s", got, id)
	}
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE instance_id = $1`, id)
	s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna"}`, task))
	await(t, "the task to be completed", func() bool {
		return query[string](t, s.pool, `SELECT state FROM user_task WHERE id = $1`, task) == "completed"
	})
	await(t, "what it leads to, if anything, to be held or over", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL AND held_at IS NULL`) == 0
	})
	if got := query[string](t, s.pool, `SELECT process_resume($1)`, id); got != "resumed" {
		t.Fatal(got)
	}
	s.status(id, graph.Completed)
	s.status(called, graph.Cancelled)
	if got := s.undone(called); got != "X" {
		t.Errorf("%q of what was called is undone, want X", got)
	}
	s.healthy()
}

// S43: the end of a called instance moves the token that waits for it: to the next node, or along the error edge for
// child_failed. A call of a process that is not deployed opens an incident.
func TestCall(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", step("X", "", `"fail": "input.fail"`))
	p := s.deploy("call", fmt.Sprintf(`"call": {"call": {"process": %q, "undo": "none"}, "to": "A", "on": [{"error": "child_failed", "to": "B"}]},`, child)+step("A", "")+","+step("B", ""))
	s.status(s.start(p, `{"fail": null}`), graph.Completed)
	s.want(map[string]int{"A": 1, "B": 0})
	s.status(s.start(p, `{"fail": "broken"}`), graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1})
	missing := s.deploy("call", `"call": {"call": {"process": "missing", "undo": "none"}}`)
	s.stopped(s.start(missing, `{}`), "child_not_started", 1)
	s.healthy()
}

// Cancelling an instance also cancels the instances it has called.
func TestCancelChildren(t *testing.T) {
	s := newSite(t)
	child := s.deploy("W", `"W": {"wait": "PT1H"}`)
	p := s.deploy("call", fmt.Sprintf(`"call": {"call": {"process": %q, "undo": "none"}}`, child))
	id := s.start(p, `{}`)
	await(t, "the child to wait", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1 AND status = 'WAITING'`, id) == 1
	})
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id))
	s.status(id, graph.Cancelled)
	await(t, "the child to be cancelled", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1 AND status = 'CANCELLED'`, id) == 1
	})
	s.healthy()
}

// S44: an each executes a step for each element of a list. The result has the results in the order of the elements. A
// declared error takes the error edge, and with "need" the list completes with that many results.
func TestEach(t *testing.T) {
	s := newSite(t)
	each := func(more string) string {
		return s.deploy("E", `"E": {"each": {"list": "input.items", "do": "test.step.v1"`+more+`}, "in": {"name": "'item'", "n": "item.n", "ms": "item.ms", "fail": "has(item.fail) ? item.fail : null"}, "to": "B", "on": [{"error": "bad", "to": "X"}]},`+
			step("B", "", `"all": "steps.E"`)+","+step("X", ""))
	}
	all := func(id uuid.UUID) string {
		return query[string](t, s.pool, `SELECT (SELECT string_agg(coalesce(x->>'n', '-'), ' ' ORDER BY o) FROM jsonb_array_elements(output->'all') WITH ORDINALITY AS a (x, o))
			FROM activity_instance WHERE instance_id = $1 AND node_id = 'B'`, id)
	}
	id := s.start(each(""), `{"items": [{"n": 1, "ms": 80}, {"n": 2, "ms": 40}, {"n": 3, "ms": 1}]}`)
	s.status(id, graph.Completed)
	if got := all(id); got != "1 2 3" {
		t.Errorf("results %q, want them in the order of the elements", got)
	}
	s.status(s.start(each(""), `{"items": []}`), graph.Completed)
	bad := s.start(each(""), `{"items": null}`)
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1`, bad) == 1
	})
	failed := s.start(each(""), `{"items": [{"n": 1, "ms": 500}, {"n": 2, "ms": 1, "fail": "bad"}]}`)
	s.status(failed, graph.Completed)
	s.want(map[string]int{"X": 1})
	need := s.start(each(`, "need": 2, "rest": "cancel"`), `{"items": [{"n": 1, "ms": 1}, {"n": 2, "ms": 900}, {"n": 3, "ms": 1}]}`)
	s.status(need, graph.Completed)
	if got := all(need); got != "1 - 3" {
		t.Errorf("results %q, want 1 - 3", got)
	}
	s.healthy()
}

// If a list is visited twice, interrupting the second visit does not end the elements that the first one has left under
// way.
func TestListVisitedTwice(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"each": {"list": "'N' in steps ? [60000, 60000] : [1, 3000]", "do": "test.step.v1", "need": 1}, "in": {"name": "'item'", "ms": "item"},
			"to": "N", "on": [{"message": "stop", "key": "'k'", "to": "B"}]},`+step("N", "E")+","+step("B", ""))
	id := s.start(p, `{}`)
	await(t, "the second visit", func() bool { return s.count("item") == 4 })
	s.enqueue("graph.message.v1", `{"name": "stop", "key": "k"}`)
	s.status(id, graph.Completed)
	got := query[string](t, s.pool, `SELECT string_agg(concat(input->>'ms', ' ', status), ', ' ORDER BY input->>'ms', status) FROM activity_instance WHERE node_id = 'E/item'`)
	if want := "1 succeeded, 3000 succeeded, 60000 cancelled, 60000 cancelled"; got != want {
		t.Errorf("elements: %s, want %s", got, want)
	}
	s.want(map[string]int{"B": 1})
	s.healthy()
}

// When a list has the results it needs, its other elements continue unless "rest" is "cancel". Their outcomes, failures
// included, change neither the result of the list nor the instance.
func TestEachGoesOn(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"each": {"list": "[[1, ''], [2000, ''], [2, ''], [1200, 'bad']]", "do": "test.step.v1", "need": 2},
			"in": {"name": "'item'", "ms": "item[0]", "fail": "item[1] == '' ? null : item[1]"}, "to": "S", "on": [{"error": "*", "to": "X"}]},
		"S": {"scope": {"start": "A", "nodes": {`+step("A", "W", `"n": "steps.E.filter(r, r != null).size()"`)+`, "W": {"human": {}}}}, "to": "B"},`+
		step("B", "", `"n": "steps.E.filter(r, r != null).size()"`)+","+step("X", ""))
	id := s.start(p, `{}`)
	s.at("W", 1)
	s.want(map[string]int{"A": 1})
	await(t, "the other elements to end", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM activity_instance WHERE node_id = 'E/item' AND status IN ('succeeded', 'failed')`) == 4
	})
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE node = 'S' AND state = 'Waiting'`); n != 1 {
		t.Error("the end of the last element has led the token on from where it is now")
	}
	s.status(id, graph.Waiting)
	s.finish("W")
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "X": 0})
	if got := query[string](t, s.pool, `SELECT string_agg(input->>'n', ' ' ORDER BY node_id) FROM activity_instance WHERE node_id IN ('A', 'B')`); got != "2 2" {
		t.Errorf("there are %s results, want 2 whenever they are read", got)
	}
	s.healthy()
}

// S44 (g): no more than "limit" elements of a list are under way at once.
func TestEachLimit(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"each": {"list": "input.items", "do": "test.step.v1", "limit": 7}, "to": "B"},`+step("B", ""))
	id := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input',
		jsonb_build_object('items', (SELECT jsonb_agg(g) FROM generate_series(1, 300) g))) RETURNING id`, p)
	most := 0
	pgtest.Await(t, "the end", func() bool {
		most = max(most, query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE instance_id = $1 AND item IS NOT NULL AND state = 'Ready'`, id))
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED'`) == 1
	})
	if most > 7 {
		t.Errorf("%d elements at once, want 7 at most", most)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE item IS NOT NULL AND state = 'Completed'`); n != 300 {
		t.Errorf("%d elements, want 300", n)
	}
	s.healthy()
}

// A boundary event ends a scope with all its tokens. A terminate in a scope ends the scope, and not the instance.
func TestScope(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["A", "W"]}, "W": {"wait": "PT1H"},`+
		`"A": {"do": "test.step.v1", "in": {"name": "'A'", "fail": "input.fail"}, "to": "X"}, "X": {"choose": [{"if": "input.all", "to": "over"}], "else": "last"},`+
		`"over": {"terminate": true}, "last": {"end": true}}}, "to": "B", "on": [{"error": "bad", "to": "E"}, {"after": "PT30M", "to": "T"}]},`+
		step("B", "")+","+step("E", "")+","+step("T", ""))
	s.status(s.start(p, `{"all": true, "fail": null}`), graph.Completed)
	s.want(map[string]int{"B": 1})
	s.status(s.start(p, `{"all": true, "fail": "bad"}`), graph.Completed)
	s.want(map[string]int{"B": 1, "E": 1})
	late := s.start(p, `{"all": false, "fail": null}`)
	await(t, "A", func() bool { return s.count("A") == 3 })
	s.status(late, graph.Waiting)
	pgtest.Elapse(t, s.pool, 40*time.Minute)
	s.status(late, graph.Completed)
	s.want(map[string]int{"B": 1, "E": 1, "T": 1})
	s.healthy()
}

// A called instance that ends in a transaction that overlaps with the end of the waiting token enqueues no arrival for
// that token, because the arrival would belong to an instance that is over.
func TestChildEndsWhileItsCallerDoes(t *testing.T) {
	s := newSite(t)
	child := s.deploy("A", step("A", "", `"ms": "500"`))
	id := s.start(s.deploy("call", fmt.Sprintf(`"call": {"call": {"process": %q, "undo": "none"}}`, child)), `{}`)
	await(t, "the child to begin", func() bool { return s.count("A") == 1 })
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SET LOCAL workflow.advance = 'on'`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE process_token SET state = 'Terminated', version = version + 1 WHERE instance_id = $1`, id); err != nil {
		t.Fatal(err)
	}
	pgtest.Blocked(t, s.pool, 1)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.status(query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE parent_process_instance_id = $1`, id), graph.Completed)
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'`); n != 0 {
		t.Errorf("%d runs bring the child's result to a token that has ended", n)
	}
}

// A message that arrives in a transaction that overlaps with the leaving of the first waiting token goes to the next
// token.
func TestMessageMeetsWhoLeaves(t *testing.T) {
	s := newSite(t)
	p := s.deploy("M", awaitPaid+step("B", ""))
	first := s.start(p, `{"order": 1}`)
	s.waitsFor(1)
	second := s.start(p, `{"order": 1}`)
	s.waitsFor(2)
	pgtest.Unbound(t, s.pool.Config().ConnString())
	leaving, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer leaving.Rollback(t.Context())
	for _, statement := range []string{`SET LOCAL session_replication_role = replica`, `DELETE FROM message_wait WHERE instance_id = '` + first.String() + `'`} {
		if _, err := leaving.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	pgtest.Blocked(t, s.pool, 1)
	if err := leaving.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.status(second, graph.Completed)
}
