package sql_test

import (
	"fmt"
	"strings"
	"testing"
)

// fail settles a run of a type like a worker whose handler has failed for good, and returns its id.
func (s *session) fail(typ, payload string) string {
	s.t.Helper()
	id := s.held(typ)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET payload = ` + payload + ` WHERE id = '` + id + `'; COMMIT`)
	s.settleAs(id, "failed")
	return id
}

func (s *session) settleAs(id, verdict string) {
	s.t.Helper()
	s.expect("settled", s.do(fmt.Sprintf(`SELECT workflow_settle_v2('{%s}', '{%s}', '{%s}', '{NULL}', ARRAY['{"code": "card", "stack": "secret"}'::jsonb], '{card: refused}', '{0}', 'w', '{NULL}')`, id, aToken, verdict)), "{1}")
}

// letters returns the number of dead letters of a run, or of all runs if id is "".
func (s *session) letters(id string) string {
	s.t.Helper()
	return s.do(`SELECT count(*) FROM workflow_run WHERE type ^@ 'ops.' AND payload ? 'lease_no' AND payload->>'run' = coalesce(nullif('` + id + `', ''), payload->>'run')`)
}

// A run that fails for good gets one dead letter, which names it and has its payload, tenant, priority and trace, and
// one more each time it fails for good again. Runs with other outcomes, runs whose policy names no dead letter,
// steps, and commands to processes get none.
func TestDeadLetter(t *testing.T) {
	s, _ := psql(t)
	s.do(`SELECT workflow_set_policy('*', dead_letter => 'ops.any.v1'), workflow_set_policy('billing.', attempts => 9, dead_letter => 'ops.billing.v1'), workflow_set_policy('billing.quiet.', dead_letter => 'none')`)
	id := s.held("billing.x")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET payload = '{"order": 7}', tenant_id = 't', priority = 5, metadata = '{"traceparent": "00-a", "tag": 1}'; COMMIT`)
	s.settleAs(id, "failed")
	s.expect("letter", s.do(`SELECT concat_ws(' ', status, tenant_id, priority, metadata, max_attempts, payload - 'failed_at' - 'run') FROM workflow_run WHERE type = 'ops.billing.v1' AND payload->>'run' = '`+id+`'`),
		`pending t 5 {"traceparent": "00-a"} 3 {"code": "card", "type": "billing.x", "message": "card: refused", "payload": {"order": 7}, "attempts": 1, "lease_no": 1}`)
	s.expect("events", s.events(id), "created leased failed dead_letter")
	s.expect("told by", s.do(`SELECT actor FROM workflow_event WHERE event_type = 'dead_letter'`), "w")
	s.expect("told", s.do(`SELECT data->>'type' || ' ' || (data->>'run' = (SELECT r.id::text FROM workflow_run r WHERE r.type = 'ops.billing.v1')) FROM workflow_event WHERE event_type = 'dead_letter'`), "ops.billing.v1 true")

	s.do(`SELECT workflow_retry('` + id + `')`)
	s.do(`UPDATE workflow_run SET status = 'leased', lease_token = '` + aToken + `', lease_no = 2, attempt = 2, lease_until = now() + interval '1 minute', leased_by = 'w', started_at = now() WHERE id = '` + id + `'`)
	s.settleAs(id, "failed")
	s.expect("failed twice", s.letters(id), "2")

	for _, verdict := range []string{"succeeded", "retried", "postponed", "released"} {
		other := s.held("billing.y")
		s.settleAs(other, verdict)
		s.do(`SELECT workflow_cancel('` + other + `')`)
		s.expect(verdict, s.letters(other), "0")
	}
	for typ, letters := range map[string]string{"billing.quiet.x": "0", "graph.start.v1": "0", "media.x": "1"} {
		s.expect(typ, s.letters(s.fail(typ, "'{}'")), letters)
	}
	step := s.held("billing.step")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET token_id = '` + aToken + `', node = 'a' WHERE id = '` + step + `'; COMMIT`)
	s.settleAs(step, "failed")
	s.expect("step", s.letters(step), "0")
	s.expect("by hand", s.letters(s.in("failed")), "1")
}

// No dead letter gets a dead letter, even if policies name each other's types: a type that some policy names as
// dead_letter gets none.
func TestDeadLettersDoNotGoRound(t *testing.T) {
	s, _ := psql(t)
	s.do(`SELECT workflow_set_policy('*', dead_letter => 'ops.a.v1'), workflow_set_policy('ops.a.v1', dead_letter => 'ops.b.v1'), workflow_set_policy('ops.b.v1', dead_letter => 'ops.a.v1')`)
	s.fail("billing.x", "'{}'")
	s.expect("letters", s.letters(""), "1")
	s.fail("ops.a.v1", "'{}'")
	s.fail("ops.b.v1", "'{}'")
	s.expect("letters of letters", s.letters(""), "1")
	s.refused(`SELECT workflow_set_policy('ops.a.v1', dead_letter => 'ops.a.v1')`, "23514", "name another type", "is the pattern itself")
	s.refused(`SELECT workflow_set_policy('ops.', dead_letter => 'graph.start.v1')`, "23514", "its handler may start a process", "engine's own types")
	s.refused(`SELECT workflow_set_policy('ops.', dead_letter => 'Dead')`, "23514", "or none", "dead_letter 'Dead' is not a type")
}

// If the database refuses a dead letter, its run fails all the same, in any batch, and the run's history records the
// refusal. A transient error fails the settle, which is then tried again. A payload that does not fit into another
// payload is left out.
func TestDeadLetterIsRefused(t *testing.T) {
	s, _ := psql(t)
	s.do(`SELECT workflow_set_policy('*', dead_letter => 'ops.any.v1')`)
	deep := s.fail("a.deep", `(repeat('{"a":', 64) || '1' || repeat('}', 64))::jsonb`)
	large := s.fail("a.large", `jsonb_build_object('x', repeat('x', 262000))`)
	for _, id := range []string{deep, large} {
		s.expect("letter without the payload", s.do(`SELECT count(*) FROM workflow_run WHERE type = 'ops.any.v1' AND NOT payload ? 'payload' AND payload->>'run' = '`+id+`'`), "1")
	}
	s.do(`CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RAISE EXCEPTION 'not %', NEW.type USING ERRCODE = CASE NEW.payload->>'type' WHEN 'a.passing' THEN '40001' ELSE 'P0001' END, CONSTRAINT = 'rule'; END $$;
		CREATE TRIGGER no BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (NEW.type = 'ops.any.v1') EXECUTE FUNCTION no()`)
	id, other := s.held("a.x"), s.held("a.y")
	s.expect("settled", s.do(fmt.Sprintf(`SELECT cardinality(workflow_settle_v2('{%s,%s}', '{%s,%[3]s}', '{failed,failed}', '{NULL,NULL}', '{NULL,NULL}', '{no,no}', '{0,0}', 'w', '{NULL,NULL}'))`, id, other, aToken)), "2")
	for _, run := range []string{id, other} {
		s.expect("status", s.of(run, "status"), "failed")
		s.expect("letters", s.letters(run), "0")
		s.expect("events", s.events(run), "created leased failed dead_letter_refused")
	}
	s.expect("told", s.do(`SELECT data FROM workflow_event WHERE event_type = 'dead_letter_refused' LIMIT 1`), `{"type": "ops.any.v1", "message": "not ops.any.v1", "sqlstate": "P0001", "constraint": "rule"}`)
	s.do(`CREATE FUNCTION long() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RAISE EXCEPTION '%', repeat('x', 1000000) USING CONSTRAINT = repeat('x', 17000000); END $$; -- more than a history takes
		CREATE TRIGGER long BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (NEW.payload->>'type' = 'a.long') EXECUTE FUNCTION long()`)
	s.expect("letters", s.letters(s.fail("a.long", "'{}'")), "0")
	s.do(`CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER a_nothing BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (NEW.payload->>'type' = 'a.nothing') EXECUTE FUNCTION nothing()`)
	s.expect("left out without a word", s.events(s.fail("a.nothing", "'{}'")), "created leased failed dead_letter_refused")
	passing := s.held("a.passing")
	s.refused(fmt.Sprintf(`SELECT workflow_settle_v2('{%s}', '{%s}', '{failed}', '{NULL}', '{NULL}', '{no}', '{0}', 'w', '{NULL}')`, passing, aToken), "40001", "", "not ops.any.v1")
	s.expect("status", s.of(passing, "status"), "leased")
}

// A role that may enqueue cannot prevent a run from getting its dead letter by enqueuing any key, id, type or
// metadata before. No dead letter waits for an open transaction of such a role.
func TestDeadLetterCannotBeForged(t *testing.T) {
	g := withRoles(t)
	g.do(`SELECT workflow_set_policy('*', dead_letter => 'ops.any.v1')`)
	id := g.held("media.x")
	forger := g.as("enqueue")
	forger.do(`BEGIN`)
	for _, key := range []string{id, "dead_letter:" + id, "ops.any.v1:" + id, id + ":1"} {
		forger.do(`SELECT workflow_enqueue('ops.any.v1', jsonb_build_object('run', '` + id + `', 'lease_no', 1), idempotency_key => '` + key + `', metadata => '{"dead_letter": true}')`)
	}
	media := g.as("media") // which may not enqueue, and leases nothing of this prefix
	media.do(`SET lock_timeout = '5s'`)
	media.settleAs(id, "failed")
	forger.do(`COMMIT`)
	g.expect("letters", g.do(`SELECT count(*) FROM workflow_run WHERE payload->>'type' = 'media.x'`), "1")
	media.denied(`SELECT workflow_dead_letter(r) FROM workflow_run r`)
	if by := g.do(`SELECT created_by FROM workflow_run WHERE payload->>'type' = 'media.x'`); !strings.HasPrefix(by, g.named+"_login_media") {
		t.Errorf("created by %q, want the worker's login", by)
	}
}
