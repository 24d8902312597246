package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// person creates a role that cannot log in, and grants roles to it.
func (g guarded) person(name string, roles ...string) string {
	g.t.Helper()
	name = g.named + "_" + name
	g.do(`CREATE ROLE ` + name + ` NOLOGIN`)
	for _, role := range roles {
		g.do(`GRANT ` + g.named + `_` + role + ` TO ` + name)
	}
	return name
}

// Rights and histories go by the role in effect: after SET ROLE to a role with fewer rights, the session has only
// these, and what it does is recorded under both roles.
func TestActorIsTheRoleInEffect(t *testing.T) {
	g := withRoles(t)
	anna := g.person("anna", "operator")
	id := g.do(`SELECT workflow_enqueue('billing.x')`)
	s := g.as("operator")
	login := g.named + "_login_operator"
	g.do(`GRANT ` + anna + ` TO ` + login)

	s.do(`SET application_name = 'psql'; SET ROLE ` + g.named + `_enqueue`)
	s.refused(`SELECT workflow_enqueue('graph.cancel.v1')`, "42501", "operators", g.named+"_enqueue may not enqueue")
	s.denied(`SELECT workflow_cancel('` + id + `')`)
	s.do(`SET ROLE ` + anna)
	s.do(`SELECT workflow_prioritize('` + id + `', 3); SELECT workflow_pause('billing.', 'why'); UPDATE workflow_run SET held_at = now(); UPDATE workflow_run SET held_at = NULL;
		SELECT workflow_cancel('` + id + `', 'because'); SELECT workflow_resume('billing.')`)
	both := anna + " by " + login + " [psql]"
	g.expect("recorded", g.do(`SELECT string_agg(DISTINCT actor, ', ') FROM workflow_history WHERE workflow_id = '`+id+`'`), both)
	g.expect("how much", g.do(`SELECT string_agg(event_type, ' ' ORDER BY id) FROM workflow_history WHERE workflow_id = '`+id+`'`), "edited held resumed cancelled")
	g.expect("paused", g.do(`SELECT concat_ws(', ', paused_by, resumed_by) FROM workflow_pause`), both+", "+both)
	s.do(`RESET ROLE`)
	s.do(`SELECT workflow_enqueue('graph.cancel.v1')`)
}

// A console acts for people, with their rights and under their names, and each call names the person. It cannot act
// for nobody, for a person without the rights, or for a console, and it can do nothing that an operator could do
// without a function.
func TestConsole(t *testing.T) {
	g := withRoles(t)
	anna, carl := g.person("anna", "operator"), g.person("carl", "viewer")
	eve := g.person("eve", "enqueue")
	s := g.as("console")
	login := g.named + "_login_console"
	s.do(`SET application_name = 'page'`)
	id := g.do(`SELECT workflow_enqueue('billing.x', '{"card": 1}')`)
	cancel := func(rest string) string { return `SELECT workflow_cancel('` + id + `', 'why'` + rest + `)` }

	s.refused(cancel(``), "42501", "Say for whom", "names nobody")
	s.refused(cancel(`, '`+carl+`'`), "42501", "operator", carl+" may not execute")
	s.refused(cancel(`, on_behalf_of => 'nobody at all'`), "42704", "Name the database role", "no role")
	s.refused(cancel(`, '`+login+`'`), "42501", "Name the database role", "is a console")
	s.refused(cancel(`, '`+g.named+`_console'`), "42501", "Name the database role", "is a console")
	// What an earlier call or a setting said has no effect.
	s.refused(`BEGIN; SELECT workflow_prioritize('`+id+`', 1, '`+anna+`'); `+cancel(``), "42501", "Say for whom", "names nobody")
	s.do(`ROLLBACK`)
	s.refused(`SET workflow.on_behalf_of = '`+anna+`'; `+cancel(``), "42501", "Say for whom", "names nobody")
	s.refused(`SELECT workflow_enqueue('graph.cancel.v1', on_behalf_of => '`+eve+`')`, "42501", "operators", eve+" may not enqueue")
	s.denied(`SELECT payload FROM workflow_run`, `UPDATE workflow_run SET held_at = now()`, `INSERT INTO workflow_run (type) VALUES ('a.b')`,
		`INSERT INTO process_definition (definition) VALUES ('{}')`, `SELECT * FROM workflow_history`, `SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}')`)
	s.denied(forbidden...)
	g.expect("as it was", g.do(`SELECT status || priority FROM workflow_run`), "pending0")

	s.expect("sees", s.do(`SELECT status FROM workflow_overview`), "pending")
	s.do(`BEGIN; SELECT workflow_prioritize('` + id + `', 1, '` + anna + `'); SELECT workflow_pause('billing.', 'why', on_behalf_of => '` + anna + `'); SELECT workflow_resume('billing.', '` + anna + `')`)
	s.do(cancel(`, '`+anna+`'`) + `; COMMIT`)
	who := anna + " by " + login + " [page]"
	g.expect("recorded", g.do(`SELECT string_agg(event_type || ': ' || actor, ', ' ORDER BY id) FROM workflow_history`), "edited: "+who+", cancelled: "+who)
	g.expect("paused", g.do(`SELECT concat_ws(', ', paused_by, resumed_by) FROM workflow_pause`), who+", "+who)
	g.failed("billing.x", "timeout", 3)
	s.expect("looks first", s.do(`SELECT count(*) FROM workflow_redrive('billing.', on_behalf_of => '`+anna+`')`), "3")
	s.expect("redrives", s.do(`SELECT count(*) FROM workflow_redrive('billing.', dry_run => false, on_behalf_of => '`+anna+`')`), "3")
	g.expect("recorded, too", g.do(`SELECT count(*) FROM workflow_history WHERE event_type = 'requeued' AND actor = '`+who+`'`), "3")
	enqueued := s.do(`SELECT workflow_enqueue('graph.cancel.v1', on_behalf_of => '` + anna + `')`)
	g.expect("by whom", g.do(`SELECT created_by FROM workflow_run WHERE id = '`+enqueued+`'`), login+" [page] for "+anna)
	s.do(`SELECT workflow_enqueue('billing.x', on_behalf_of => '` + eve + `')`)
}

// Neither the parameter nor the setting lets an operator act as another person.
func TestOnBehalfOfOthers(t *testing.T) {
	g := withRoles(t)
	anna := g.person("anna", "operator")
	s := g.as("operator")
	id := g.do(`SELECT workflow_enqueue('billing.x')`)
	s.refused(`SELECT workflow_cancel('`+id+`', 'why', '`+anna+`')`, "42501", "docs/roles.md", "may not act for others")
	s.do(`SET workflow.on_behalf_of = '` + anna + `'; UPDATE workflow_run SET held_at = now(); SELECT workflow_prioritize('` + id + `', 1); SELECT workflow_cancel('` + id + `')`)
	g.expect("recorded", g.do(`SELECT string_agg(DISTINCT actor, ', ') FROM workflow_history`), g.named+"_login_operator")
	s.do(`BEGIN; SET LOCAL workflow.on_behalf_of = '` + anna + `'; SELECT workflow_pause('billing.', 'why'); COMMIT`)
	g.expect("paused", g.do(`SELECT paused_by FROM workflow_pause`), g.named+"_login_operator")

	// The owner may act for others. The next call is the owner's own again.
	g.do(`BEGIN; SELECT workflow_resume('billing.', '` + anna + `'); SELECT workflow_pause('media.', 'why'); COMMIT`)
	me := g.do(`SELECT session_user`)
	g.expect("resumed", g.do(`SELECT resumed_by FROM workflow_pause WHERE resumed_at IS NOT NULL`), anna+" by "+me)
	g.expect("paused by the owner", g.do(`SELECT paused_by FROM workflow_pause WHERE resumed_at IS NULL`), me)
}

// Every function that acts with the owner's rights for its caller says for whom: its last parameter is on_behalf_of,
// it calls workflow_behalf first, and it refuses a console that names nobody.
func TestEveryFunctionThatActs(t *testing.T) {
	g := withRoles(t)
	s := g.as("console")
	g.expect("without on_behalf_of", g.do(`
		SELECT string_agg(p.proname, ', ' ORDER BY p.proname) FROM pg_proc p
		WHERE p.oid IN (SELECT workflow_functions()) AND p.prosecdef AND p.prorettype <> 'trigger'::regtype
		  AND p.proname !~ '_v[0-9]+$' -- programs' own, which act for nobody
		  AND p.proargnames[p.pronargs] IS DISTINCT FROM 'on_behalf_of'`),
		"outbox_behind, outbox_emit, workflow_backlog, workflow_console, workflow_earlier, workflow_out_of_bounds, workflow_overrides, workflow_run_refuse_insert, workflow_stalled_types") // an event belongs to its writer; guards and views call these, people do not
	calls := strings.Split(g.do(`
		SELECT string_agg(format('SELECT %s(%s)', p.oid::regproc, (SELECT string_agg('NULL::' || format_type(a, NULL), ', ') FROM unnest(p.proargtypes) a)), ';')
		FROM pg_proc p WHERE p.oid IN (SELECT workflow_functions()) AND 'on_behalf_of' = ANY (p.proargnames)`), ";")
	if len(calls) < 18 {
		t.Errorf("%d functions act, want 18 or more", len(calls))
	}
	for _, call := range calls {
		s.refused(call, "42501", "Say for whom", "names nobody")
	}
}

// An upgrade revokes nothing: roles that could act before it can act right after it, before workflowctl roles runs
// again. The same holds for roles whose changes are recorded, and for roles that only look.
func TestUpgradeKeepsRights(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	s.do(`CREATE TABLE workflow_schema (version integer PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())`)
	for _, m := range sql.Migrations() {
		if strings.Contains(m.Name, "_operator.sql") && m.Version > 6 {
			break
		}
		s.do(`BEGIN; ` + m.SQL + `; COMMIT`)
		s.do(fmt.Sprintf(`INSERT INTO workflow_schema (version, name, sha256) VALUES (%d, '%s', '%s')`, m.Version, m.Name, m.SHA256))
	}
	s.do(`INSERT INTO outbox_sink (name) VALUES ('s')`)
	named := pgtest.RolesName(t, s.conn.Config().ConnString())
	s.do(fmt.Sprintf(`CREATE ROLE %[1]s_owner; CREATE ROLE %[1]s_op; CREATE ROLE %[1]s_hand; CREATE ROLE %[1]s_look; GRANT USAGE, CREATE ON SCHEMA public TO %[1]s_owner; GRANT USAGE ON SCHEMA public TO %[1]s_op, %[1]s_hand, %[1]s_look;
		DO $$ DECLARE f text; BEGIN
			FOR f IN SELECT workflow_functions()::text LOOP EXECUTE format('ALTER FUNCTION %%s OWNER TO %[1]s_owner', f); END LOOP;
			FOR f IN SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid IN (SELECT workflow_relations()) LOOP EXECUTE format('ALTER TABLE %%s OWNER TO %[1]s_owner', f); END LOOP;
			FOR f IN SELECT workflow_functions()::text LOOP EXECUTE format('GRANT EXECUTE ON FUNCTION %%s TO %[1]s_op', f); END LOOP;
			EXECUTE format('GRANT EXECUTE ON FUNCTION %%s TO %[1]s_hand', (SELECT p.oid::regprocedure FROM pg_proc p WHERE p.proname = 'workflow_lease_v1'));
			EXECUTE format('GRANT EXECUTE ON FUNCTION %%s TO %[1]s_hand', (SELECT p.oid::regprocedure FROM pg_proc p WHERE p.proname = 'workflow_settle_v1'));
			EXECUTE format('GRANT EXECUTE ON FUNCTION %%s TO %[1]s_look', (SELECT p.oid::regprocedure FROM pg_proc p WHERE p.proname = 'workflow_span'));
		END $$;
		GRANT SELECT ON workflow_working TO %[1]s_look; GRANT SELECT ON ALL TABLES IN SCHEMA public TO %[1]s_op; GRANT SELECT, UPDATE (held_at) ON workflow_run TO %[1]s_hand; GRANT INSERT (type) ON workflow_run TO %[1]s_hand; GRANT EXECUTE ON FUNCTION workflow_uuid() TO %[1]s_hand; GRANT UPDATE (delivered_to) ON outbox_event TO %[1]s_hand`, named))
	up(t, s)
	id := s.do(`SELECT workflow_enqueue('billing.x')`)
	s.expect("may lease suspects", s.do(`SELECT has_function_privilege('`+named+`_hand', p.oid, 'EXECUTE') FROM pg_proc p WHERE p.proname = 'workflow_lease_v2'`), "t")
	s.expect("may look", s.do(`SELECT has_function_privilege('`+named+`_hand', 'workflow_look_v1()', 'EXECUTE')`), "t")
	s.expect("owner", s.do(`SELECT DISTINCT p.proowner::regrole::text FROM pg_proc p WHERE p.proname IN ('workflow_cancel', 'process_pause', 'outbox_replay', 'workflow_enqueue')`), named+"_owner")
	s.expect("somebody else's", s.do(`SELECT string_agg(o.name, ' ' ORDER BY o.name) FROM (SELECT p.oid::regprocedure::text AS name, p.proowner AS owner FROM pg_proc p WHERE p.oid IN (SELECT workflow_functions())
		UNION ALL SELECT c.oid::regclass::text, c.relowner FROM pg_class c WHERE c.oid IN (SELECT workflow_relations()) AND c.relname <> 'workflow_schema') AS o WHERE o.owner <> '`+named+`_owner'::regrole`), "")
	s.expect("everybody", s.do(`SELECT count(*) FROM pg_proc p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
		WHERE p.oid IN (SELECT workflow_functions()) AND a.grantee = 0`), "0")
	s.do(`SET ROLE ` + named + `_hand; UPDATE workflow_run SET held_at = now(); UPDATE workflow_run SET held_at = NULL; SELECT outbox_last_id_v1(), outbox_set_right_v1(); BEGIN; INSERT INTO workflow_run (type) VALUES ('a.b'); INSERT INTO workflow_run (type) VALUES ('graph.message.v1'); ROLLBACK; RESET ROLE`)
	s.do(`SET ROLE ` + named + `_look; SELECT * FROM workflow_working; RESET ROLE`) // a role that may call no function that acts
	s.do(`SET ROLE ` + named + `_op; SELECT * FROM workflow_waiting; SELECT * FROM workflow_working; SELECT * FROM outbox_lag; SELECT outbox_set_right_v1(); SELECT workflow_why('` + id + `')`)
	s.expect("can act", s.do(`SELECT workflow_cancel('`+id+`', 'why')`), "cancelled")
	s.do(`SELECT process_pause('` + id + `'); SELECT outbox_replay_parked(); SELECT * FROM workflow_redrive('billing.'); SELECT workflow_enqueue('a.b')`)
	s.do(`RESET ROLE`)
}
