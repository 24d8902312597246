package graph_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Each change of a task writes an event with who made it. Taking a task from its assignee, or releasing it for the
// assignee, requires the current version of the task; the assignee needs none.
func TestTaskIsHandedOn(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("U", `"U": {"human": {"groups": ["support"]}}`), `{}`)
	s.status(id, graph.Waiting)
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task`)
	version := query[int](t, s.pool, `SELECT version FROM process_instance`)
	changes := 0
	for _, c := range []struct{ call, want string }{
		{`'anna', by => 'anna'`, "assigned to anna"},
		{`'anna', by => 'anna'`, "assigned to anna"},                    // no change
		{`'bob', by => 'bob'`, "conflict: assigned to anna, version 2"}, // the task is another person's
		{`NULL`, "conflict: assigned to anna, version 2"},
		{`NULL, by => 'bob'`, "conflict: assigned to anna, version 2"},
		{`'bob', 1, 'carla'`, "conflict: assigned to anna, version 2"}, // an old version
		{`NULL, 1, 'carla'`, "conflict: assigned to anna, version 2"},
		{`'bob', 2, 'carla'`, "assigned to bob"},
		{`NULL, by => 'anna'`, "conflict: assigned to bob, version 3"}, // the task is not hers any more
		{`NULL, by => 'bob'`, "released"},
		{`'carla'`, "assigned to carla"},
		{`'dave', by => 'carla'`, "assigned to dave"}, // she passes on her own task
		{`NULL, 6, 'carla'`, "released"},
		{`'dave', 7, 'dave'`, "assigned to dave"},
	} {
		before := query[int](t, s.pool, `SELECT version FROM user_task`)
		if got := query[string](t, s.pool, `SELECT process_task_assign($1, `+c.call+`)`, task); got != c.want {
			t.Errorf("%s: %s, want %s", c.call, got, c.want)
		}
		changes += query[int](t, s.pool, `SELECT version FROM user_task`) - before
	}
	for _, done := range []struct{ by, status string }{{"carla", "failed"}, {"dave", "succeeded"}} {
		if got := s.finished(s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": %q, "version": 8}`, task, done.by))); got != done.status {
			t.Errorf("the completion by %s has %s", done.by, got)
		}
	}
	s.status(id, graph.Completed)
	got := query[string](t, s.pool, `
		SELECT string_agg(concat_ws(' ', event_type, CASE WHEN data->>'by' LIKE current_user || '%' THEN 'role' ELSE data->>'by' END,
		                  coalesce(data->>'assignee', '-'), data->>'version', version - $2), ', ' ORDER BY id)
		FROM process_event WHERE instance_id = $1 AND node = 'U' AND token_id IS NOT NULL AND event_type LIKE 'task.%'`, id, version)
	if want := "task.claimed anna anna 2 1, task.assigned carla bob 3 2, task.released bob - 4 3, task.claimed role carla 5 4, " +
		"task.assigned carla dave 6 5, task.released carla - 7 6, task.claimed dave dave 8 7, task.completed dave dave 9 8"; got != want {
		t.Errorf("events are %s\nwant %s", got, want)
	}
	if got := query[int](t, s.pool, `SELECT version FROM process_instance`); got != version+8 || changes != 7 {
		t.Errorf("the instance's version is %d after %d changes of the task, and was %d", got, changes, version)
	}
	if got := query[string](t, s.pool, `SELECT process_task_assign($1, 'anna')`, task); got != "too late: completed" {
		t.Errorf("of a task that is done: %s", got)
	}
	s.healthy()
}

// A database role with the privileges of _tasks can claim and complete a task of its group, and the task records the
// name of the role. A role that is not in the group finds no task.
func TestOwnTasks(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("U", `"U": {"human": {"groups": ["support"]}}`), `{}`)
	s.status(id, graph.Waiting)
	task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task`)
	named := pgtest.Roles(t, s.pool)
	anna, bob := pgtest.As(t, s.pool, named, "tasks"), pgtest.As(t, s.pool, named, "tasks", "viewer")
	me := named + "_login_tasks"
	query[string](t, s.pool, `SELECT workflow_join_group($1, 'support')`, me)
	if n := query[int](t, bob, `SELECT count(*) FROM process_tasks()`); n != 0 {
		t.Errorf("bob, who is in no group, sees %d tasks", n)
	}
	if got := query[string](t, bob, `SELECT process_task_complete($1, '{"by": "bob"}')`, task); got != "not found" {
		t.Errorf("bob completes it: %s", got)
	}
	if got := query[uuid.UUID](t, anna, `SELECT task FROM process_tasks()`); got != task {
		t.Errorf("anna sees %s, want %s", got, task)
	}
	for _, c := range []struct{ call, want string }{
		{`process_task_claim($1)`, "assigned to " + me},
		{`process_task_complete($1, '{"ok": true}', 2)`, "to be completed"},
	} {
		if got := query[string](t, anna, `SELECT `+c.call, task); got != c.want {
			t.Errorf("%s: %s, want %s", c.call, got, c.want)
		}
	}
	s.status(id, graph.Completed)
	if got, want := query[string](t, s.pool, `SELECT completed_by || ' ' || output::text FROM user_task`), me+` {"ok": true}`; got != want {
		t.Errorf("the task: %s, want %s", got, want)
	}
	if got := query[string](t, anna, `SELECT process_task_complete($1)`, task); got != "too late: completed" {
		t.Errorf("again: %s", got)
	}
	s.healthy()
}
