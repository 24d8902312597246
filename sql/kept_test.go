package sql_test

import (
	"fmt"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

const (
	aToken = "7d1f0f0e-0000-4000-8000-000000000001"
	keeps  = `SELECT workflow_unsettled_v2('%s', '` + aToken + `', 'succeeded', %s, NULL, NULL, 0, %s, false, 'w', 'P0001', 'no', '')`
)

// held returns a leased run with a known token.
func (s *session) held(typ string) string {
	s.t.Helper()
	id := s.do(`INSERT INTO workflow_run (type) VALUES ('` + typ + `') RETURNING id`)
	s.do(`UPDATE workflow_run SET status = 'leased', lease_token = '` + aToken + `', lease_no = 1, attempt = 1, lease_until = now() + interval '1 minute', leased_by = 'w', started_at = now() WHERE id = '` + id + `'`)
	return id
}

// Events that are kept with an outcome are appended later by any worker that settles it. So keeping accepts only the
// events that the worker could append itself, and refuses the others.
func TestKeptEventsAreJudged(t *testing.T) {
	g := withRoles(t)
	media := g.as("media")
	own, other := g.held("media.x"), g.enqueue()
	event := func(aggregate, typ string) string {
		return fmt.Sprintf(`'[{"id": "%s", "aggregate": "%s", "type": "%s", "payload": {}}]'`, aToken, aggregate, typ)
	}
	const appends = `SELECT outbox_append_v1('{NULL}', '{%s}', '{%s}', '{null}') IS NOT NULL`
	for _, e := range [][2]string{{own, "process.completed"}, {own, "run.failed"}, {own, "incident.opened"}, {own, "no_handler_registered"}, {other, "a.b"}} {
		media.refused(fmt.Sprintf(keeps, own, "NULL", event(e[0], e[1])), "42501", "own runs", "may not append")
		media.denied(fmt.Sprintf(appends, e[0], e[1]))
	}
	media.refused(fmt.Sprintf(keeps, own, "NULL", `'[{"aggregate": "`+own+`"}]'`), "42501", "own runs", "may not append") // without a type
	media.expect("appended", media.do(fmt.Sprintf(appends, own, "media.done")), "t")
	media.expect("its own", media.do(fmt.Sprintf(keeps, own, "NULL", event(own, "media.done"))), "t")
	engine, process := g.as("engine"), g.held("media.x")
	engine.expect("the engine's", engine.do(fmt.Sprintf(keeps, process, "NULL", event(other, "process.completed"))), "t")
}

// A role that may not settle a step locks nothing of its process, whatever run it names.
func TestKeepingLocksNothingOfOthers(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO process_definition (id, definition, hash) VALUES ('` + aToken + `', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}', 'x');
		BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO process_instance (id, process_definition_id) VALUES ('` + aToken + `', '` + aToken + `');
		INSERT INTO process_token (id, instance_id, node, state) VALUES ('` + aToken + `', '` + aToken + `', 'a', 'Ready');
		INSERT INTO workflow_run (id, type, token_id, node) VALUES ('` + aToken + `', 'media.x', '` + aToken + `', 'a'); COMMIT`)
	for _, role := range []string{"media", "engine"} { // neither has the lease
		s := g.as(role)
		s.do(`BEGIN`)
		s.expect("kept", s.do(fmt.Sprintf(keeps, aToken, "NULL", "NULL")), "f")
		g.do(`BEGIN; SET LOCAL lock_timeout = '1s'; SELECT id FROM process_instance FOR UPDATE; COMMIT`)
		s.do(`ROLLBACK`)
	}
}

// Any result that a run may have can be kept.
func TestAnyResultCanBeKept(t *testing.T) {
	s, _ := psql(t)
	id := s.held("a.b")
	const most = `('[' || repeat('1,', 499999) || '1]')::jsonb` // a MiB of text, six as jsonb
	s.do(`BEGIN`)
	s.expect("settled", s.do(`SELECT count(*) FROM workflow_settle_v1('{`+id+`}', '{`+aToken+`}', '{succeeded}', ARRAY[`+most+`], '{NULL}', '{NULL}', '{0}', 'w')`), "1")
	s.do(`ROLLBACK`)
	s.expect("kept", s.do(fmt.Sprintf(keeps, id, most, "NULL")), "t")
}

// Releasing a worker's leases skips a run whose outcome is kept meanwhile.
func TestReleaseWhileOutcomeIsKept(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	id := s.held("a.b")
	s.do(`BEGIN`)
	s.expect("kept", s.do(fmt.Sprintf(keeps, id, `'"precious"'`, "NULL")), "t")
	waiting := other.later(`SELECT workflow_release('w', 'it hangs')`)
	pgtest.Blocked(t, pool, 1)
	s.do(`COMMIT`)
	if a := <-waiting; a.err != nil || a.value != "0" {
		t.Errorf("released %s, %v", a.value, a.err)
	}
	s.expect("the run", s.of(id, "status"), "leased")
}

// A worker that settles a kept outcome and a person who fails or cancels its run wait for each other without a
// deadlock.
func TestSettlingAndActingOnWhatIsKept(t *testing.T) {
	for _, act := range []string{`SELECT workflow_fail('%s', 'no')`, `SELECT workflow_cancel('%s', 'no')`} {
		s, pool := psql(t)
		other := connect(t, pool.Config().ConnString())
		id := s.held("a.b")
		s.expect("kept", s.do(fmt.Sprintf(keeps, id, `'1'`, "NULL")), "t")
		s.do(`BEGIN`)
		s.expect("over", s.do(`SELECT workflow_kept_over_v1('{`+id+`}', '{`+aToken+`}', '{succeeded}', '{f}')`), id)
		waiting := other.later(fmt.Sprintf(act, id))
		pgtest.Blocked(t, pool, 1)
		s.do(`SELECT workflow_settle_v1('{` + id + `}', '{` + aToken + `}', '{succeeded}', '{1}', '{NULL}', '{NULL}', '{0}', 'w')`)
		s.do(`COMMIT`)
		if a := <-waiting; a.err != nil {
			t.Errorf("%s: %v", act, a.err)
		}
		s.expect("the run", s.of(id, "status"), "succeeded")
	}
}

// Nobody can deploy the process that workers use to check whether steps can be settled.
func TestControlIsReserved(t *testing.T) {
	g := withRoles(t)
	const deploy = `INSERT INTO process_definition (id, definition, hash) VALUES (%s, '{"process": "%s", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}', 'x')`
	for _, role := range []string{"operator", "owner"} {
		s := g.as(role)
		s.refused(fmt.Sprintf(deploy, "gen_random_uuid()", "workflow-control"), "23000", "another name")
		s.refused(fmt.Sprintf(deploy, "'6d0c2f0a-6b1e-4b43-9d0f-5a7e2f1c9b11'", "other"), "23000", "another name")
	}
	engine := g.as("engine")
	engine.do(`BEGIN`)
	engine.expect("controls", engine.do(`SELECT count(*) FROM workflow_control_v1()`), "2")
	engine.do(`ROLLBACK`)
}

// While outcomes are kept, a search for expired leases reads only rows with expired leases, however many other runs
// there are.
func TestExpiredLeasesAreFoundByKey(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_run (type) SELECT 'a.b' FROM generate_series(1, 20000); ANALYZE`)
	s.expect("kept", s.do(fmt.Sprintf(keeps, s.held("a.b"), `'1'`, "NULL")), "t")
	s.do(`UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, lease_until = now() - interval '1 minute', leased_by = 'w', started_at = now()
		WHERE id IN (SELECT id FROM workflow_run WHERE status = 'pending' ORDER BY id DESC LIMIT 5)`)
	s.do(`SELECT pg_sleep(greatest(0, 2.1 - extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())))`) // until then nothing is reclaimed
	read := `SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'workflow_run'`
	before := s.do(read)
	s.do(`BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_nestloop = off; SET LOCAL plan_cache_mode = force_generic_plan`)
	s.expect("found", s.do(`SELECT cardinality(ids) FROM workflow_expired('-infinity', true, 500)`), "5")
	s.expect("read", s.do(`SELECT (`+read+`) - `+before+` < 200`), "t")
	s.do(`ROLLBACK`)
}

// The incident of an outcome that is no longer kept is resolved, even if its instance was locked at first.
func TestIncidentEndsWithWhatIsKept(t *testing.T) {
	s, pool := psql(t)
	other := connect(t, pool.Config().ConnString())
	s.do(`INSERT INTO process_definition (id, definition, hash) VALUES ('` + aToken + `', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"do": "a.b"}}}', 'x');
		BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO process_instance (id, process_definition_id, status, started_at) VALUES ('` + aToken + `', '` + aToken + `', 'IN_PROGRESS', now());
		INSERT INTO process_token (id, instance_id, node, state) VALUES ('` + aToken + `', '` + aToken + `', 'a', 'Ready');
		INSERT INTO workflow_run (id, type, token_id, node, status, lease_token, lease_no, attempt, lease_until, leased_by, started_at)
		VALUES ('` + aToken + `', 'a.b', '` + aToken + `', 'a', 'leased', '` + aToken + `', 1, 1, now() + interval '1 minute', 'w', now()); COMMIT`)
	s.expect("kept", s.do(fmt.Sprintf(keeps, aToken, `'1'`, "NULL")), "t")
	s.expect("incidents", s.do(`SELECT open_incidents FROM process_instance`), "1")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET lease_token = gen_random_uuid(); COMMIT`)
	other.do(`BEGIN; SELECT id FROM process_instance FOR UPDATE`)
	s.do(`SET lock_timeout = '200ms'; SELECT workflow_try_again_v1()`) // it waits for no lock
	s.expect("beside a lock", s.do(`SELECT count(*) FROM workflow_kept`), "1")
	other.do(`ROLLBACK`)
	s.do(`SELECT workflow_try_again_v1()`)
	s.expect("left", s.do(`SELECT concat_ws(' ', (SELECT count(*) FROM workflow_kept), (SELECT open_incidents FROM process_instance), (SELECT count(*) FROM incident WHERE resolved_at IS NULL))`), "0 0 0")
}

// After a person has failed a run, its kept outcome is not settled any more, even by a worker that had read it
// before.
func TestFailAfterWhatIsKeptWasRead(t *testing.T) {
	s, _ := psql(t)
	id := s.held("a.b")
	s.expect("kept", s.do(fmt.Sprintf(keeps, id, `'1'`, "NULL")), "t")
	over := func(verdict string) string {
		return s.do(`SELECT count(*) FROM workflow_kept_over_v1('{` + id + `}', '{` + aToken + `}', '{` + verdict + `}', '{f}')`)
	}
	s.expect("to be failed", s.do(`SELECT workflow_fail('`+id+`', 'no')`), "to be failed")
	s.expect("as it was read before", over("succeeded"), "0")
	s.expect("as it is", over("failed"), "1")
}
