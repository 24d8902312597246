package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// task stores an instance that waits for a person, and returns the task's id. The arguments are the columns groups
// and assignee, as SQL.
func (s *session) task(groups, assignee string) string {
	s.t.Helper()
	id := uuid.NewString()
	s.do(fmt.Sprintf(`
		INSERT INTO process_definition (definition) SELECT '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}' WHERE NOT EXISTS (SELECT FROM process_definition);
		BEGIN; SET LOCAL session_replication_role = replica;
		CREATE TEMPORARY TABLE made ON COMMIT DROP AS SELECT gen_random_uuid() AS id, gen_random_uuid() AS token, '%s'::uuid AS task;
		INSERT INTO process_instance (id, process_definition_id, status, started_at, live_tokens, business_key) SELECT m.id, d.id, 'WAITING', now(), 1, 'k' FROM made m, process_definition d;
		INSERT INTO process_token (id, instance_id, node, state) SELECT token, id, 'a', 'Waiting' FROM made;
		INSERT INTO user_task (id, instance_id, token_id, node, payload, groups, assignee) SELECT task, id, token, 'a', '{"secret": 1}', %s, %s FROM made;
		COMMIT`, id, groups, assignee))
	return id
}

// tasks returns the ids of the tasks that the session's role sees.
func (s *session) tasks() string {
	s.t.Helper()
	return s.do(`SELECT coalesce(string_agg(task::text, ' ' ORDER BY created_at, task), 'none') FROM process_tasks()`)
}

const unknown = "00000000-0000-4000-8000-00000000000f"

// A role with _tasks sees the open tasks of its groups, and those assigned to it, and can claim and complete only
// these. It learns nothing about other tasks: calls for them answer as if the task did not exist, name no group, wait
// for nothing and lock nothing. It can read no table or view, and call no other function.
func TestTasksRole(t *testing.T) {
	g := withRoles(t)
	anna := g.as("tasks")
	me := g.named + "_login_tasks"
	operator := g.as("operator")
	sales, both := g.task(`'{sales}'`, `NULL`), g.task(`'{sales,hr}'`, `NULL`)
	hr, given, nobody := g.task(`'{hr}'`, `NULL`), g.task(`'{hr}'`, `'`+me+`'`), g.task(`'{}'`, `NULL`)
	g.expect("before", anna.tasks(), given)
	// Through one of many roles that she was granted.
	sellers := g.person("sellers")
	g.do(`GRANT ` + sellers + ` TO ` + me)
	g.expect("joined", operator.do(`SELECT workflow_join_group('`+sellers+`', 'sales')`), "joined")
	g.expect("joined", operator.do(`SELECT workflow_join_group('`+sellers+`', 'sales')`), "already in it")
	g.expect("sees", anna.tasks(), strings.Join([]string{sales, both, given}, " "))
	g.expect("of groups", anna.do(`SELECT concat_ws(' ', process, business_key, node, groups, assignee, payload, version) FROM process_tasks() WHERE task = '`+both+`'`), `p k a {sales} {"secret": 1} 1`)

	// Another session locks tasks that are not hers: her calls do not wait for them, and lock nothing themselves.
	g.do(`BEGIN; SELECT id FROM process_instance FOR UPDATE; SELECT id FROM user_task FOR UPDATE`)
	anna.do(`SET lock_timeout = '1s'`)
	anna.tasks()
	for _, id := range []string{hr, nobody, unknown} {
		for _, act := range []string{`process_task_claim('%s')`, `process_task_release('%s')`, `process_task_complete('%s')`, `process_task_complete('%s', '{}', 1)`} {
			g.expect(fmt.Sprintf(act, id), anna.do(`SELECT `+fmt.Sprintf(act, id)), "not found")
		}
	}
	g.do(`ROLLBACK`)
	anna.do(`BEGIN`)
	anna.do(`SELECT process_task_claim('` + hr + `'), process_task_complete('` + hr + `'), count(*) FROM process_tasks()`)
	g.do(`BEGIN; SET LOCAL lock_timeout = '1s'; SELECT id FROM process_instance FOR UPDATE; SELECT id FROM user_task FOR UPDATE; ROLLBACK`)
	anna.do(`ROLLBACK`)
	g.expect("runs", g.do(`SELECT count(*) FROM workflow_run`), "0")

	g.expect("claims", anna.do(`SELECT process_task_claim('`+sales+`')`), "assigned to "+me)
	g.expect("again", anna.do(`SELECT process_task_claim('`+sales+`')`), "assigned to "+me)
	g.expect("told", g.do(`SELECT concat_ws(' ', event_type, data->>'by', data->>'actor') FROM process_event ORDER BY id DESC LIMIT 1`), "task.claimed "+me+" "+me)
	g.expect("releases", anna.do(`SELECT process_task_release('`+sales+`')`), "released")
	g.do(`SELECT process_task_assign('` + sales + `', 'bob')`)
	g.expect("of a colleague", anna.do(`SELECT process_task_claim('`+sales+`')`), "conflict: assigned to bob, version 4")
	g.expect("of a colleague", anna.do(`SELECT process_task_release('`+sales+`')`), "conflict: assigned to bob, version 4")
	g.expect("of a colleague", anna.do(`SELECT process_task_complete('`+sales+`')`), "conflict: assigned to bob, version 4")
	g.expect("given back", anna.do(`SELECT process_task_release('`+given+`')`), "released") // so it is no longer hers
	g.expect("not hers any more", anna.do(`SELECT process_task_claim('`+given+`')`), "not found")

	g.expect("stale", anna.do(`SELECT process_task_complete('`+both+`', '{}', 7)`), "conflict: assigned to nobody, version 1")
	anna.refused(`SELECT process_task_complete('`+both+`', '7')`, "23514", "Wrap the value", "output is a JSON number")
	anna.refused(`SELECT * FROM process_tasks(0)`, "23514", "oldest come first", "most 0 is outside 1 to 1000")
	g.expect("completes", anna.do(`SET application_name = 'page'; SELECT process_task_complete('`+both+`', '{"ok": null}', 1)`), "to be completed")
	g.expect("as", g.do(`SELECT concat_ws(' ', type, created_by, payload) FROM workflow_run`), fmt.Sprintf(`graph.complete_task.v1 %s [page] {"by": "%s", "task": "%s", "output": {"ok": null}, "version": 1}`, me, me, both))

	g.expect("leaves", operator.do(`SELECT workflow_leave_group('`+sellers+`', 'sales')`), "left")
	g.expect("leaves", operator.do(`SELECT workflow_leave_group('`+sellers+`', 'sales')`), "not in it")
	g.expect("sees no more", anna.tasks(), "none")
	g.expect("not found", anna.do(`SELECT process_task_claim('`+both+`')`), "not found")
	g.expect("on record", g.do(`SELECT concat_ws(' ', role, group_name, joined_by, left_by, left_at IS NOT NULL) FROM workflow_member`), fmt.Sprintf("%s sales %[2]s_login_operator %[2]s_login_operator t", sellers, g.named))

	anna.denied(forbidden...)
	for _, name := range g.list(`SELECT r::text FROM workflow_relations() AS r WHERE r::text <> 'workflow_schema'`) {
		anna.denied(`SELECT count(*) FROM ` + name)
	}
	g.expect("may call", g.do(`SELECT string_agg(p.proname, ' ' ORDER BY p.proname) FROM pg_proc p WHERE p.oid IN (SELECT workflow_functions()) AND has_function_privilege('`+g.named+`_tasks', p.oid, 'EXECUTE')`),
		"process_task_claim process_task_complete process_task_release process_tasks")
}

// If a task is taken from a person while their call waits, the call answers as for a task that is not theirs: the
// uncommitted change counts.
func TestTaskThatIsTakenAway(t *testing.T) {
	for _, act := range []string{`process_task_claim('%s')`, `process_task_release('%s')`} {
		g := withRoles(t)
		anna := g.as("tasks")
		id := g.task(`'{hr}'`, `'`+g.named+`_login_tasks'`)
		g.do(`BEGIN; SELECT process_task_assign('` + id + `', NULL, 1)`)
		waiting := anna.later(`SELECT ` + fmt.Sprintf(act, id))
		pgtest.Blocked(t, g.pool, 1)
		g.do(`COMMIT`)
		a := <-waiting
		if a.err != nil {
			t.Fatal(a.err)
		}
		g.expect(act, a.value, "not found")
		g.expect("the task", g.do(`SELECT coalesce(assignee, 'nobody') FROM user_task`), "nobody")
	}
}

// If a trigger of a user leaves a run as it is, workflow_retry fails and says so.
func TestRetryThatATriggerLeavesOut(t *testing.T) {
	s, _ := psql(t)
	s.failed("a.b", "timeout", 1)
	id := s.do(`SELECT id FROM workflow_run`)
	s.do(`CREATE FUNCTION leave_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER leave_out BEFORE UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION leave_out()`)
	s.refused(`SELECT workflow_retry('`+id+`')`, "55000", "A trigger of yours", "stays failed")
}

// Pausing an instance of which another session has a part locked fails with a message after some seconds, and delays
// nobody for longer.
func TestPauseOfWhatIsLocked(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	s.task(`'{}'`, `NULL`)
	id := s.do(`SELECT id FROM process_instance`)
	other.do(`BEGIN; SELECT id FROM process_instance FOR UPDATE`)
	s.refused(`SELECT process_pause('`+id+`')`, "55P03", "Call it again", "is being changed")
	s.refused(`SELECT process_resume('`+id+`')`, "55P03", "Call it again", "is being changed")
	other.do(`ROLLBACK`)
	s.expect("then", s.do(`SELECT process_pause('`+id+`') || ' ' || process_resume('`+id+`')`), "paused resumed")
}

// Only operators can say who is in a group, and only of roles that exist and are no consoles. Calls that make no
// sense are refused with a message. A console acts on a person's tasks with that person's groups.
func TestWhoIsInAGroup(t *testing.T) {
	g := withRoles(t)
	operator, console := g.as("operator"), g.as("console")
	anna, carl := g.person("anna", "tasks"), g.person("carl", "viewer")
	operator.refused(`SELECT workflow_join_group('nobody at all', 'sales')`, "42704", "Name the database role", "no role 'nobody at all'")
	operator.refused(`SELECT workflow_join_group(NULL, 'sales')`, "42704", "Name the database role", "no role null")
	operator.refused(`SELECT workflow_join_group('`+g.named+`_login_console', 'sales')`, "23514", "for whom it acts", "is a console")
	for _, name := range []string{`''`, `' '`, `NULL`, `repeat('x', 201)`} {
		operator.refused(`SELECT workflow_join_group('`+anna+`', `+name+`)`, "23514", "groups of a human node", "group_name")
	}
	operator.denied(`INSERT INTO workflow_member (role, group_name) VALUES ('`+anna+`', 'sales')`, `UPDATE workflow_member SET role = '`+carl+`'`, `DELETE FROM workflow_member`)
	g.as("engine").denied(`INSERT INTO workflow_member (role, group_name) VALUES ('` + anna + `', 'sales')`)
	g.as("tasks").denied(`SELECT workflow_join_group('`+anna+`', 'sales')`, `SELECT workflow_leave_group('`+anna+`', 'sales')`, `SELECT process_task_assign('`+unknown+`', 'x')`)
	g.expect("joined", operator.do(`SELECT workflow_join_group('`+anna+`', 'sales')`), "joined")

	task := g.task(`'{sales}'`, `NULL`)
	console.refused(`SELECT process_task_claim('`+task+`')`, "42501", "Say for whom", "names nobody")
	console.refused(`SELECT process_task_claim('`+task+`', '`+carl+`')`, "42501", "", carl+" may not execute")
	console.expect("sees for her", console.do(`SELECT task FROM process_tasks(on_behalf_of => '`+anna+`')`), task)
	console.expect("claims for her", console.do(`SELECT process_task_claim('`+task+`', '`+anna+`')`), "assigned to "+anna)
	console.expect("completes for her", console.do(`SELECT process_task_complete('`+task+`', on_behalf_of => '`+anna+`')`), "to be completed")
	if by := g.do(`SELECT created_by || ' ' || (payload->>'by') FROM workflow_run`); !strings.HasPrefix(by, g.named+"_login_console") || !strings.HasSuffix(by, "for "+anna+" "+anna) {
		t.Errorf("enqueued by %q", by)
	}
	// A dropped role is in no group any more, and can be removed by its remaining number.
	g.do(`DROP OWNED BY ` + anna + `; DROP ROLE ` + anna)
	g.expect("left", operator.do(`SELECT workflow_leave_group((SELECT role::text FROM workflow_member), 'sales')`), "left")
}

// The cost of listing a person's tasks does not grow with a hundred thousand tasks of others. No group or assignee is
// too long for a task.
func TestTasksAmongMany(t *testing.T) {
	g := withRoles(t)
	anna := g.as("tasks")
	g.do(`SELECT workflow_join_group('` + g.named + `_tasks', 'sales'); ALTER TABLE user_task SET (autovacuum_enabled = off)`)
	for range 3 {
		g.task(`'{sales}'`, `NULL`)
		g.task(`'{}'`, `'`+g.named+`_login_tasks'`)
	}
	few, _, _ := g.buffersOf(anna)

	g.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO user_task (instance_id, token_id, node, payload, groups, assignee) SELECT gen_random_uuid(), gen_random_uuid(), 'a', '{}', ARRAY['hr', 'g' || g % 100], 'bob' || g % 100 FROM generate_series(1, 100000) g; COMMIT`)
	many, text, n := g.buffersOf(anna)
	if many > few+60 {
		t.Errorf("%d buffers beside a hundred thousand others, %d alone:\n%s", many, few, text)
	}
	g.expect("seen", n, "6")
	const random = `(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 1500))` // which cannot be compressed
	long := g.task(`ARRAY[`+random+`, 'sales']`, random)
	g.expect("seen", anna.do(`SELECT count(*) FROM process_tasks() WHERE task = '`+long+`'`), "1")
}

func (g guarded) buffersOf(s *session) (n int, text, seen string) {
	g.t.Helper()
	for range 3 { // the first calls read catalogs and make plans
		seen = s.do(`SELECT count(*) FROM process_tasks()`)
		n, _, text = s.buffers(`SELECT * FROM process_tasks()`)
	}
	return n, text, seen
}

// After an upgrade the engine's role can still store tasks, before workflowctl roles runs again, although a function
// puts the groups of each task into an index.
func TestEngineStoresTasksAfterAnUpgrade(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	const tasks = 30
	if err := sql.UpTo(t.Context(), s.conn, tasks-1); err != nil {
		t.Fatal(err)
	}
	named := pgtest.RolesName(t, s.conn.Config().ConnString())
	s.do(fmt.Sprintf(`CREATE ROLE %[1]s_engine; GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO %[1]s_engine; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO %[1]s_engine`, named))
	up(t, s)
	s.do(`BEGIN; SET LOCAL ROLE ` + named + `_engine; SET LOCAL workflow.advance = 'on'; SET CONSTRAINTS ALL DEFERRED`)
	_, err := s.try(`INSERT INTO user_task (instance_id, token_id, node, payload, groups) VALUES (gen_random_uuid(), gen_random_uuid(), 'a', '{}', '{sales}')`)
	if codeOf(err) != "23503" { // there is no such instance: everything before that check passed
		t.Errorf("a task is stored with %v, want only that its instance is not there", err)
	}
	s.do(`ROLLBACK`)
}
