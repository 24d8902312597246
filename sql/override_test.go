package sql_test

import "testing"

// The owner can do what guards refuse, by one setting that gives a reason, for one transaction, and each row is
// recorded. Nobody else can, whatever they set, and the record stays.
func TestOverride(t *testing.T) {
	g := withRoles(t)
	s := g.session
	one, two := g.in("succeeded"), g.in("succeeded")
	forge := `UPDATE workflow_run SET result = '{"forged": true}' WHERE status = 'succeeded'`
	g.refused(forge, "23514", "Leave them as they are", "has succeeded")
	g.refused(`SET LOCAL workflow.override = ' '; `+forge, "23514", "", "has succeeded") // a blank reason is not accepted
	g.do(`SET application_name = 'psql'; BEGIN; SET LOCAL workflow.override = 'ticket 7'; ` + forge + `; COMMIT`)
	g.expect("record", g.do(`SELECT string_agg(concat_ws(' ', actor, reason, table_name, operation, row_key->>'id', statement LIKE '%`+"forged"+`%'), '; ' ORDER BY row_key->>'id') FROM workflow_override WHERE table_name = 'workflow_run'`),
		g.do(`SELECT format('%1$s [psql] ticket 7 workflow_run UPDATE %2$s t; %1$s [psql] ticket 7 workflow_run UPDATE %3$s t', session_user, least('`+one+`', '`+two+`'), greatest('`+one+`', '`+two+`'))`))
	g.do(forge) // nothing changes, so nothing is refused
	g.refused(`UPDATE workflow_run SET result = '{}' WHERE status = 'succeeded'`, "23514", "", "has succeeded")

	// The record itself cannot be overridden.
	for _, setting := range []string{"", "SET LOCAL workflow.override = 'why'; ", "SET LOCAL workflow.advance = 'on'; "} {
		for _, statement := range []string{`UPDATE workflow_override SET reason = 'none'`, `DELETE FROM workflow_override`, `TRUNCATE workflow_override`,
			`INSERT INTO workflow_override (actor, reason, table_name, operation, statement) VALUES ('the pope', 'x', 'x', 'x', 'x')`} {
			s.refused(setting+statement, "23000", "", "workflow_override")
		}
	}

	// Other roles: first the statements they may execute, then those they may not.
	before := g.do(`SELECT count(*) FROM workflow_override`)
	id := g.do(`INSERT INTO workflow_run (type) VALUES ('media.x') RETURNING id`)
	for _, role := range []string{"enqueue", "media", "engine", "dispatcher", "operator", "viewer"} {
		r := g.as(role)
		r.do(`SET workflow.override = 'because I say so'; SET workflow.advance = 'on'; SET workflow.retry = 'on'; SET workflow.audit = 'self'`)
		r.denied(`UPDATE workflow_override SET reason = 'none'`, `TRUNCATE workflow_override`, `SELECT workflow_overrides('workflow_run', 'UPDATE', '{}')`)
		r.denied(`DELETE FROM workflow_override`, `INSERT INTO workflow_override (actor, reason, table_name, operation, statement) VALUES ('x', 'x', 'x', 'x', 'x')`)
		switch role {
		case "engine":
			r.denied(`UPDATE workflow_run SET result = '{}' WHERE status = 'succeeded'`)
			continue
		case "media":
			r.denied(`UPDATE workflow_run SET run_at = 'infinity' WHERE id = '` + id + `'`)
		}
		r.denied(`DELETE FROM process_token`, `DELETE FROM workflow_history`, `INSERT INTO process_instance (process_definition_id) VALUES (gen_random_uuid())`)
	}
	g.expect("overrides", g.do(`SELECT count(*) FROM workflow_override`), before)
}

// No guard depends on a setting alone: a role without the engine's rights may set anything, and is still refused, and
// recorded.
func TestSettingsGrantNothing(t *testing.T) {
	g := withRoles(t)
	o := g.as("operator")
	g.do(`GRANT UPDATE (attempt) ON workflow_run TO ` + g.named + `_operator`)
	for _, setting := range []string{`workflow.advance = 'on'`, `workflow.transition = 'on'`, `workflow.retry = 'on'`, `workflow.audit = 'self'`, `workflow.audit = 'off'`} {
		id := g.do(`INSERT INTO workflow_run (type) VALUES ('media.x') RETURNING id`)
		o.do(`SET ` + setting)
		o.do(`UPDATE workflow_run SET held_at = now() WHERE id = '` + id + `'`)
		o.refused(`UPDATE workflow_run SET attempt = 2 WHERE id = '`+id+`'`, "23514", "raise max_attempts", "attempt goes from 0 to 2")
		o.do(`RESET ALL`)
		g.expect(setting+": history", g.events(id), "created held")
	}
}
