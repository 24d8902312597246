package sql_test

import (
	"fmt"
	"strings"
	"testing"
)

const tells = `INSERT INTO workflow_event (workflow_id, event_type, data) VALUES ('%s', 'app.invoice_sent', '{"no": 7}')`

// A role that sees a run may add events to its history, with a type of its own and a bounded document. The database
// sets who added the event, when, and at which attempt. Other values for these columns are refused with a message, as
// is a run that does not exist.
func TestUsersEvents(t *testing.T) {
	s, _ := psql(t)
	id := s.leased()
	s.do(`SET application_name = 'shop'`)
	s.expect("the first", s.do(fmt.Sprintf(tells, id)+` RETURNING concat_ws(' ', id > 0, attempt, lease_no, actor, created_at > now() - interval '1 minute')`), "t 1 1 "+s.do(`SELECT session_user`)+" [shop] t")
	s.do(`SET workflow.audit = off; INSERT INTO workflow_event (workflow_id, event_type) SELECT '` + id + `', e FROM unnest('{app.paid,app.a.b-c_d.v1}'::text[]) AS e; RESET workflow.audit`)
	s.do(`UPDATE workflow_run SET status = 'succeeded' WHERE id = '` + id + `'`)
	s.do(fmt.Sprintf(tells, id))
	s.expect("events", s.events(id), "created leased app.invoice_sent app.paid app.a.b-c_d.v1 succeeded app.invoice_sent")
	s.expect("data", s.do(`SELECT DISTINCT data FROM workflow_event WHERE event_type = 'app.invoice_sent'`), `{"no": 7}`)

	for _, typ := range []string{"succeeded", "app", "app.", "App.x", "apps.x", "app.x y", "application.x", "run.failed", "succeeded.x", "app." + strings.Repeat("x", 200)} {
		s.refused(`INSERT INTO workflow_event (workflow_id, event_type) VALUES ('`+id+`', '`+typ+`')`, "23514", "such as app.invoice_sent", "is not a type of yours")
	}
	s.refused(`INSERT INTO workflow_event (workflow_id) VALUES ('`+id+`')`, "23514", "such as app.invoice_sent", "event_type null")
	for _, given := range []string{"id, 7", "attempt, 7", "lease_no, 7", "actor, 'the pope'", "created_at, now()"} {
		column, value, _ := strings.Cut(given, ", ")
		s.refused(`INSERT INTO workflow_event (workflow_id, event_type, `+column+`) VALUES ('`+id+`', 'app.x', `+value+`)`, "23514", "Give workflow_id", column)
	}
	for data, words := range map[string]string{`jsonb_build_object('x', repeat('x', 16384))`: "the limit is 16384", `('1' || repeat('0', 400))::jsonb`: "data: ", `(repeat('[', 65) || repeat(']', 65))::jsonb`: "deeper than 64"} {
		s.refused(`INSERT INTO workflow_event (workflow_id, event_type, data) VALUES ('`+id+`', 'app.x', `+data+`)`, "23514", "", words)
	}
	s.refused(fmt.Sprintf(tells, unknown), "23503", "Give the id of a run", "no run "+unknown)
	s.refused(`INSERT INTO workflow_event (event_type) VALUES ('app.x')`, "23503", "Give the id of a run", "no run null")
}

// A bound worker can add events only to plain runs of its prefixes, whatever it has set, and learns nothing about
// other runs. A role that sees no run can add none. The history table itself accepts no row by hand.
func TestUsersEventsByRole(t *testing.T) {
	g := withRoles(t)
	media := g.as("media")
	own, other, step := g.held("media.x"), g.enqueue(), g.held("media.step")
	g.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET token_id = '` + aToken + `', node = 'a' WHERE id = '` + step + `'; COMMIT`)
	media.do(`SET workflow.advance = 'on'; SET workflow.audit = 'self'; SET workflow.on_behalf_of = 'anna'`)
	media.do(fmt.Sprintf(tells, own))
	g.expect("told by", g.do(`SELECT actor FROM workflow_event WHERE event_type = 'app.invoice_sent'`), g.named+"_login_media")
	for _, id := range []string{other, step, unknown} {
		media.refused(fmt.Sprintf(tells, id), "23503", "plain runs of its prefixes", "no run "+id+" that "+g.named+"_login_media may see")
	}
	g.as("operator").do(fmt.Sprintf(tells, step))
	g.as("engine").do(fmt.Sprintf(tells, other))
	media.denied(`INSERT INTO workflow_event (workflow_id, event_type, actor) VALUES ('`+own+`', 'app.x', 'anna')`, `SELECT * FROM workflow_event`, `INSERT INTO workflow_history (workflow_id, event_type) VALUES ('`+own+`', 'app.x')`)
	for _, role := range []string{"enqueue", "dispatcher", "viewer", "console", "tasks"} {
		g.as(role).denied(fmt.Sprintf(tells, own))
	}
	g.refused(`INSERT INTO workflow_history (workflow_id, event_type) VALUES ('`+own+`', 'app.x')`, "23000", "writes its history", "workflow_history")
}

// An open transaction that has added an event does not block its run: it can be leased, settled and cancelled
// meanwhile.
func TestUsersEventsLockNothing(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	other.do(`SET lock_timeout = '5s'`)
	waits, held := s.enqueue(), s.held("a.x")
	s.do(`BEGIN; ` + fmt.Sprintf(tells, waits) + `; ` + fmt.Sprintf(tells, held))
	if leased := acquire(t, pool, 1); len(leased) != 1 || leased[0].ID.String() != waits {
		t.Errorf("leased %v, want %s", leased, waits)
	}
	other.settleAs(held, "succeeded")
	other.expect("cancelled", other.do(`SELECT workflow_cancel('`+waits+`')`), "cancelled")
	s.do(`COMMIT`)
	s.expect("events", s.events(waits), "created app.invoice_sent leased cancelled")
}

// The history has a started event after each leased event, except where a worker leased a run only to fail it, or
// never knew that it had the lease.
func TestStartedIsTold(t *testing.T) {
	s, _ := psql(t)
	all := func(id string) string {
		return s.do(`SELECT string_agg(concat_ws(' ', event_type, lease_no, CASE WHEN event_type IN ('leased', 'started') THEN actor END), ', ' ORDER BY id) FROM workflow_event WHERE workflow_id = '` + id + `'`)
	}
	settled := func(verdict, code string) string {
		id := s.held("a.x")
		s.do(fmt.Sprintf(`SELECT workflow_settle_v2('{%s}', '{%s}', '{%s}', '{NULL}', ARRAY['{"code": "%s"}'::jsonb], '{no}', '{0}', 'w', '{NULL}')`, id, aToken, verdict, code))
		return id
	}
	s.expect("leased", all(s.held("a.x")), "created, leased 1 w, started 1 w")
	for verdict, code := range map[string]string{"failed": "handler_error", "retried": "handler_error", "postponed": "again", "released": "released"} {
		s.expect(verdict, all(settled(verdict, code)), "created, leased 1 w, started 1 w, "+verdict+" 1")
	}
	s.expect("succeeded", all(settled("succeeded", "")), "created, leased 1 w, started 1 w, succeeded 1")
	for _, code := range []string{"lease_expired", "too_late", "no_handler_registered"} {
		s.expect(code, all(settled("failed", code)), "created, leased 1 w, failed 1")
	}
	id := s.held("a.x")
	s.do(`UPDATE workflow_run SET deadline_at = started_at WHERE id = '` + id + `'`)
	s.expect("leased to be failed", all(id), "created, leased 1 w")
	s.do(`SELECT workflow_cancel('` + id + `')`)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET lease_token = gen_random_uuid() WHERE lease_token IS NOT NULL; COMMIT`)
	id = s.held("a.x")
	s.expect("given back", s.do(`SELECT given FROM workflow_give_back_v1('`+aToken+`', 1e6, 'w')`), "1")
	s.expect("whose answer was lost", all(id), "created, leased 1 w, released 1")
}
