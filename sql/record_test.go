package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/sql"
)

// step stores an instance with one waiting step, as the engine leaves them.
func (s *session) step() (instance, id string) {
	s.t.Helper()
	s.do(`INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"do": "a.x"}}}') ON CONFLICT DO NOTHING`)
	instance = s.do(`SELECT gen_random_uuid()`)
	token := s.do(`SELECT gen_random_uuid()`)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO process_instance (id, process_definition_id, status, started_at, live_tokens, ready_tokens) SELECT '` + instance + `', id, 'IN_PROGRESS', now(), 1, 1 FROM process_definition;
		INSERT INTO process_token (id, instance_id, node, state) VALUES ('` + token + `', '` + instance + `', 'a', 'Ready')`)
	id = s.do(`INSERT INTO workflow_run (type, token_id, node) VALUES ('a.x', '` + token + `', 'a') RETURNING id`)
	s.do(`COMMIT`)
	return instance, id
}

// A person's change of a run is recorded with the statement that made it, even if the session has set the settings by
// which the engine marks its own changes.
func TestStatementIsRecorded(t *testing.T) {
	g := withRoles(t)
	o := g.as("operator")
	for _, setting := range []string{`workflow.advance = 'on'`, `workflow.transition = 'on'`, `workflow.audit = 'self'`, `workflow.audit = 'off'`, `workflow.retry = 'on'`} {
		plain := g.enqueue()
		instance, step := g.step()
		o.do(`SET ` + setting)
		o.do(`UPDATE workflow_run SET held_at = now() WHERE id = '` + plain + `'`)
		o.do(`SELECT process_pause('` + instance + `')`)
		o.do(`SELECT process_resume('` + instance + `')`)
		o.do(`SELECT process_pause('` + instance + `')`)
		o.do(`RESET ALL`)
		told := `SELECT string_agg(concat_ws(' ', event_type, split_part(data->>'statement', ' ', 1)), ', ' ORDER BY id) FROM workflow_history WHERE workflow_id = '`
		g.expect(setting+": by hand", g.do(told+plain+`'`), "held UPDATE")
		g.expect(setting+": by functions", g.do(told+step+`'`), "held SELECT, resumed SELECT, held SELECT")
	}
}

// A record names the role that acts, followed by the application_name in brackets. Whatever name an application chooses,
// the role can be told apart from it.
func TestApplicationIsTold(t *testing.T) {
	g := withRoles(t)
	s, c := g.as("operator"), g.as("console")
	anna := g.person("anna", "operator")
	login, console := g.named+"_login_operator", g.named+"_login_console"
	for app, told := range map[string]string{"": "", "psql": " [psql]", "by postgres psql": " [by postgres psql]", "a] for anna": " [a) for anna]", "[[x]]": " [((x))]"} {
		for _, x := range []*session{s, c, g.session} {
			x.do(`SELECT set_config('application_name', '` + app + `', false)`)
		}
		s.expect("actor", s.do(`SELECT workflow_actor()`), login+told)
		id := s.do(`SELECT workflow_enqueue('billing.x')`)
		plain := s.do(`INSERT INTO workflow_run (type) VALUES ('billing.x') RETURNING id`)
		person := c.do(`SELECT workflow_enqueue('billing.x', on_behalf_of => '` + anna + `')`)
		g.expect("enqueued", g.of(id, `created_by`), login+told)
		g.expect("inserted", g.of(plain, `created_by`), login+told)
		g.expect("for a person", g.of(person, `created_by`), console+told+" for "+anna)
		g.do(`UPDATE workflow_run SET status = 'cancelled' WHERE id = '` + id + `'`)
		me := g.do(`SELECT session_user`)
		g.expect("cancelled", g.of(id, `last_error`), "cancelled: by "+me+told)
		s.do(`SELECT workflow_pause('z.', 'why')`)
		g.expect("paused", g.do(`SELECT paused_by FROM workflow_pause ORDER BY id DESC LIMIT 1`), login+told)
		s.do(`SELECT workflow_resume('z.')`)
		s.do(`INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": ` + fmt.Sprint(len(app)+1) + `, "start": "a", "nodes": {"a": {"do": "a.x"}}}')`)
		g.expect("deployed", g.do(`SELECT created_by FROM process_definition ORDER BY created_at DESC LIMIT 1`), login+told)
	}

	// By hand, nobody can write anything else, not even their own name with more text behind it.
	g.do(`SET application_name = 'psql'`)
	me := g.do(`SELECT session_user`)
	for _, forged := range []string{me + " psql", me, me + "a", me + " [psql] for " + anna, "the pope"} {
		g.refused(`INSERT INTO workflow_run (type, created_by) VALUES ('a.b', '`+forged+`')`, "23514", "Leave created_by out", "is not you")
		g.refused(`SET LOCAL workflow.on_behalf_of = 'the pope'; INSERT INTO workflow_run (type, created_by) VALUES ('a.b', '`+forged+`')`, "23514", "Leave created_by out", "is not you")
		g.refused(`INSERT INTO process_definition (definition, created_by) VALUES ('{"process": "q", "version": 1, "start": "a", "nodes": {"a": {"do": "a.x"}}}', '`+forged+`')`, "23514", "Leave created_by out", "is not you")
	}
	g.refused(`INSERT INTO workflow_pause (prefix, reason, paused_by) VALUES ('z.', 'x', '`+me+` psql')`, "23000", "give prefix and reason alone", "workflow_pause")
	g.do(`INSERT INTO workflow_pause (prefix, reason, paused_by) VALUES ('z.', 'x', '` + me + ` [psql]')`)
	g.refused(`UPDATE workflow_pause SET resumed_at = now(), resumed_by = '`+me+` psql' WHERE resumed_at IS NULL`, "23000", "workflow_resume", "workflow_pause")
}

// Each replay leaves a row that says who called it and for what. The row stays.
func TestReplaysAreRecorded(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO outbox_sink (name) VALUES ('crm'); SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}')`)
	s, c := g.as("operator"), g.as("console")
	anna := g.person("anna", "operator")
	s.do(`SET application_name = 'psql'`)
	s.expect("replayed", s.do(`SELECT outbox_replay('2020-01-01', '2100-01-01', '{a.}', 'crm')`), "1")
	s.do(`SET workflow.advance = 'on'; SELECT outbox_replay_parked('crm', '{a.}'); RESET workflow.advance`)
	c.do(`SELECT outbox_replay_parked(on_behalf_of => '` + anna + `')`)
	s.expect("recorded", s.do(`SELECT string_agg(concat_ws(' ', actor, coalesce(sink, 'all'), EXTRACT(year FROM since), EXTRACT(year FROM until), types, events, created_at > now() - interval '1 minute'), ', ' ORDER BY id) FROM outbox_replayed`),
		g.named+"_login_operator [psql] crm 2020 2100 {a.} 1 t, "+g.named+"_login_operator [psql] crm {a.} 0 t, "+anna+" by "+g.named+"_login_console all {} 0 t")
	forge := []string{`INSERT INTO outbox_replayed (actor, types, events) VALUES ('x', '{}', 1)`, `UPDATE outbox_replayed SET actor = 'x'`, `DELETE FROM outbox_replayed`, `TRUNCATE outbox_replayed`}
	for _, role := range []string{"operator", "engine", "dispatcher"} {
		x := g.as(role, "viewer")
		x.do(`SET workflow.advance = 'on'; SET workflow.override = 'why'`)
		x.denied(forge...)
	}
	for _, statement := range forge {
		g.refused(statement, "23000", "on record", "outbox_replayed")
	}
}

// A person who assigns a task gives a name of their own choice; the role that called is recorded beside it.
func TestWhoAssigns(t *testing.T) {
	g := withRoles(t)
	c := g.as("console")
	anna, otto := g.person("anna", "operator"), g.person("otto", "operator")
	instance, _ := g.step()
	g.do(`BEGIN; SET LOCAL session_replication_role = replica; INSERT INTO user_task (instance_id, token_id, node, payload) SELECT instance_id, id, 'a', '{}' FROM process_token; COMMIT`)
	task := g.do(`SELECT id FROM user_task`)
	// The on_behalf_of of an earlier call in the transaction has no effect on a later one.
	c.do(`BEGIN; SELECT workflow_pause('z.', 'why', on_behalf_of => '` + otto + `'); SELECT process_task_assign('` + task + `', 'maria', by => 'the pope', on_behalf_of => '` + anna + `'); COMMIT`)
	c.do(`BEGIN; SELECT workflow_resume('z.', on_behalf_of => '` + otto + `'); SELECT process_task_assign('` + task + `', NULL, 2, on_behalf_of => '` + anna + `'); COMMIT`)
	who := anna + " by " + g.named + "_login_console"
	g.expect("told", g.do(`SELECT string_agg(concat_ws(', ', event_type, data->>'by', data->>'actor'), '; ' ORDER BY id) FROM process_event WHERE instance_id = '`+instance+`'`),
		"task.claimed, the pope, "+who+"; task.released, "+who+", "+who)
}

// Settings of the database decide which events of runs are emitted. Only the owner and the engine's role can override
// them for their own changes.
func TestRunEventsAreNotSuppressed(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO outbox_sink (name) VALUES ('crm')`)
	o, w, e := g.as("operator"), g.as("media"), g.as("engine")
	told := func(what, want string) {
		t.Helper()
		g.expect(what, g.do(`SELECT coalesce(string_agg(event_type, ' ' ORDER BY id), '') FROM outbox_event`), want)
		g.do(`BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM outbox_event; COMMIT`)
	}
	set := func(s *session, level, types string) {
		s.do(`SELECT set_config('workflow.run_events', '` + level + `', false), set_config('workflow.run_event_types', '` + types + `', false)`)
	}
	cancel := func(s *session) { s.do(`SELECT workflow_cancel('` + g.enqueue() + `', 'why')`) }
	settled := func(s *session, verdict settling.Verdict) {
		t.Helper()
		id := g.do(`INSERT INTO workflow_run (type) VALUES ('media.x') RETURNING id`)
		g.lease(id)
		token := g.of(id, `lease_token`)
		s.expect("settled", s.do(fmt.Sprintf(`SELECT workflow_settle_v1('{%s}', '{%s}', '{%s}', ARRAY['{}'::jsonb], ARRAY['{"code": "x"}'::jsonb], '{x}', '{0}', 'w')`, id, token, verdict)), "{1}")
	}
	database := func(level, types string) {
		for name, value := range map[string]string{"run_events": level, "run_event_types": types} {
			set := `RESET workflow.` + name
			if value != "" {
				set = `SET workflow.` + name + ` = ''` + value + `''`
			}
			g.do(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I ` + set + `', current_database()); END $$`)
		}
	}

	for _, forged := range [][2]string{{"none", ""}, {"", "z."}, {"all", ""}, {"failed", ""}, {"NONE", "z."}} {
		set(w, forged[0], forged[1])
		settled(w, settling.Fail)
		settled(w, settling.Succeed)
		told("a worker settles, having set "+strings.Join(forged[:], " "), "run.failed")
		set(o, forged[0], forged[1])
		cancel(o)
		told("an operator cancels, having set "+strings.Join(forged[:], " "), "")
		database("all", "")
		cancel(o)
		settled(w, settling.Fail)
		settled(w, settling.Succeed)
		told("of a database that tells all, "+strings.Join(forged[:], " "), "run.cancelled run.failed run.succeeded")
		database("all", "a.")
		cancel(o)
		settled(w, settling.Fail)
		told("of a database that tells all of a., "+strings.Join(forged[:], " "), "run.cancelled")
		database("none", "")
		cancel(o)
		settled(w, settling.Fail)
		told("of a database that tells nothing, "+strings.Join(forged[:], " "), "")
		database("", "")
	}
	set(e, "none", "")
	settled(e, settling.Fail)
	told("the engine is believed", "")
	set(e, "all", "media.")
	settled(e, settling.Succeed)
	told("the engine is believed", "run.succeeded")
	set(g.session, "all", "a.")
	cancel(g.session)
	told("the owner is believed", "run.cancelled")
}

// Bindings of roles to prefixes, and which roles are consoles, can be changed by the owner alone, and each change is
// recorded: once per change, also by the scripts.
func TestBindingsAreRecorded(t *testing.T) {
	g := withRoles(t)
	record := `SELECT coalesce(string_agg(concat_ws(' ', table_name, operation, reason), ', ' ORDER BY id), '') FROM workflow_override WHERE id > `
	last := func() string { return g.do(`SELECT coalesce(max(id), 0) FROM workflow_override`) }
	g.expect("at first", g.do(record+`0`+` AND table_name = 'workflow_console_role'`), "workflow_console_role INSERT workflowctl roles: "+g.named+"_console is a console")
	before := last()
	bind := func(prefixes ...string) {
		t.Helper()
		if err := sql.BindWorker(t.Context(), g.conn, g.named, g.named+"_media", prefixes); err != nil {
			t.Fatal(err)
		}
	}
	bind("media.", "email.")
	if err := sql.Roles(t.Context(), g.conn, g.named); err != nil {
		t.Fatal(err)
	}
	g.expect("the same again", g.do(record+before), "")
	bind("media.", "billing.")
	g.expect("others", g.do(record+before), "workflow_binding UPDATE workflowctl roles: "+g.named+"_media is bound to {media.,billing.}")
	g.expect("which", g.do(`SELECT row_key FROM workflow_override WHERE id > `+before), `{"role": "`+g.named+`_media"}`)
	before = last()
	for _, setting := range []string{"", "SET LOCAL workflow.advance = 'on'; "} {
		for table, change := range map[string]string{"workflow_binding": `SET prefixes = '{z.}'`, "workflow_console_role": `SET role = 'pg_monitor'`} {
			g.refused(setting+`UPDATE `+table+` `+change, "23000", "on record", table)
			g.refused(setting+`DELETE FROM `+table, "23000", "on record", table)
			g.refused(setting+`INSERT INTO `+table+` SELECT * FROM `+table+` ON CONFLICT DO NOTHING`, "23000", "on record", table)
		}
	}
	g.byHand(`DELETE FROM workflow_binding`)
	g.expect("by hand", g.do(record+before), "workflow_binding DELETE a test needs it, workflow_binding DELETE a test needs it")
}
