package sql_test

import (
	"maps"
	"strings"
	"testing"
)

const nobody = "00000000-0000-7000-8000-000000000000"

// workflow_enqueue stores its arguments and returns the id. Every parameter but the type has a default.
func TestEnqueueFunction(t *testing.T) {
	s, _ := psql(t)
	id := s.do(`SELECT workflow_enqueue('a.b')`)
	s.expect("plain", s.of(id, `concat_ws(' ', type, status, payload, priority, attempt, max_attempts, run_at = created_at)`), "a.b pending {} 0 0 3 t")
	id = s.do(`SELECT workflow_enqueue('a.b', '{"a": 1}', run_at => '2030-01-01Z', delay => '5 minutes', priority => 7,
		max_attempts => 1, idempotency_key => 'k', metadata => '{"tag": "x"}', id => '` + nobody + `')`)
	s.expect("id", id, nobody)
	s.expect("full", s.of(id, `concat_ws(' ', payload, run_at AT TIME ZONE 'UTC', priority, max_attempts, idempotency_key, metadata)`),
		`{"a": 1} 2030-01-01 00:05:00 7 1 k {"tag": "x"}`)
	id = s.do(`SELECT workflow_enqueue('a.b', delay => '1 hour')`)
	s.expect("delay alone", s.of(id, `run_at - created_at`), "01:00:00")
	s.refused(`SELECT workflow_enqueue('a')`, "23514", "billing.invoice_charge.v1", "type 'a'")
	s.refused(`SELECT workflow_enqueue('a.b', 'null')`, "23514", "Wrap", "payload is a JSON null")
}

// R8, S25, S26: enqueuing the same key with the same type and payload, in any member order and spelling, returns the
// existing run. Anything else under the key is refused, with both runs and the key.
func TestEnqueueFunctionKeys(t *testing.T) {
	s, _ := psql(t)
	id := s.do(`SELECT workflow_enqueue('a.b', '{"a": 1, "b": 2}', idempotency_key => 'it''s')`)
	s.expect("same", s.do(`SELECT workflow_enqueue('a.b', '{"b":2.0,"a":1}', priority => 9, idempotency_key => 'it''s')`), id)
	const free = "', 'reason')"
	s.refused(`SELECT workflow_enqueue('a.b', '{"a": 2}', idempotency_key => 'it''s', id => '`+nobody+`')`,
		"23505", "SELECT workflow_delete('"+id+free, id, nobody, "'it''s'")
	s.refused(`SELECT workflow_enqueue('a.c', '{"a": 1, "b": 2}', idempotency_key => 'it''s')`, "23505", "another key", id)
	s.expect("finished: still the same", s.do(`SELECT workflow_cancel('`+id+`')`), "cancelled")
	s.expect("same", s.do(`SELECT workflow_enqueue('a.b', '{"a": 1, "b": 2}', idempotency_key => 'it''s')`), id)

	s.do(`SELECT workflow_delete('` + id + `', 'test')`)
	other := s.do(`SELECT workflow_enqueue('a.c', idempotency_key => 'it''s')`)
	if other == id {
		t.Error("the key of a deleted run is still taken")
	}
	s.expect("same as the living", s.do(`SELECT workflow_enqueue('a.c', idempotency_key => 'it''s')`), other)
	s.expect("distinct keys", s.do(`SELECT count(DISTINCT workflow_enqueue('a.b', idempotency_key => k))
		FROM unnest('{x,X,"x "," x"}'::text[]) k`), "4")
}

// R8, S25: the same holds for an id.
func TestEnqueueFunctionIDs(t *testing.T) {
	s, _ := psql(t)
	enqueue := func(rest string) string { return `SELECT workflow_enqueue('a.b', id => '` + nobody + `'` + rest + `)` }
	s.do(enqueue(`, idempotency_key => 'k'`))
	s.expect("again", s.do(enqueue(`, idempotency_key => 'k'`)), nobody)
	s.refused(enqueue(``), "23505", "another id", nobody, "the same id")
	s.refused(enqueue(`, idempotency_key => 'l'`), "23505", "another id", nobody, "the same id")
	s.expect("runs", s.do(`SELECT count(*) FROM workflow_run`), "1")
}

// R7: workflow_cancel ends a run that has not ended, and otherwise returns the state it found.
func TestCancelFunction(t *testing.T) {
	s, _ := psql(t)
	for status, answer := range map[string]string{
		"pending": "cancelled", "leased": "cancelled",
		"succeeded": "too late: succeeded", "failed": "too late: failed", "cancelled": "too late: cancelled",
	} {
		id := s.in(status)
		s.expect("answer", s.do(`SELECT workflow_cancel('`+id+`', 'no longer wanted')`), answer)
		if answer != "cancelled" {
			s.expect("status", s.of(id, `status`), status)
			continue
		}
		s.expect("run", s.of(id, `concat_ws(' ', status, last_error, lease_token, lease_until, leased_by, deadline_at)`),
			"cancelled cancelled: no longer wanted")
	}
	s.expect("no run", s.do(`SELECT workflow_cancel('`+nobody+`')`), "not found")
	id := s.enqueue()
	s.do(`SELECT workflow_cancel('` + id + `', repeat('x', 10000))`)
	s.expect("length of the reason", s.of(id, `length(last_error)`), "4096")
	id = s.enqueue()
	s.do(`SELECT workflow_cancel('` + id + `')`)
	s.expect("without a reason", s.of(id, `last_error`), "cancelled")
}

// workflow_retry gives a failed run new attempts, due now, and does not falsify its history.
func TestRetryFunction(t *testing.T) {
	s, _ := psql(t)
	for status, answer := range map[string]string{
		"pending": "not failed: pending", "leased": "not failed: leased", "succeeded": "not failed: succeeded",
		"cancelled": "not failed: cancelled", "failed": "pending",
	} {
		s.expect("answer", s.do(`SELECT workflow_retry('`+s.in(status)+`')`), answer)
	}
	s.expect("no run", s.do(`SELECT workflow_retry('`+nobody+`')`), "not found")

	id := s.in("failed")
	s.byHand(`UPDATE workflow_run SET attempt = 3, run_at = '2020-01-01', error = '{"code": "x"}', last_error = 'x' WHERE id = '` + id + `'`)
	s.expect("answer", s.do(`SELECT workflow_retry('`+id+`', 2)`), "pending")
	s.expect("run", s.of(id, `concat_ws(' ', status, attempt, max_attempts, last_error, run_at = updated_at OR run_at > '2020-01-02', finished_at)`), "pending 3 5 x t")

	id = s.in("failed")
	s.expect("answer", s.do(`SELECT workflow_retry('`+id+`')`), "pending")
	s.expect("never fewer", s.of(id, `max_attempts`), "3")

	for _, n := range []string{"0", "-1", "1001"} {
		s.refused(`SELECT workflow_retry('`+id+`', `+n+`)`, "23514", "how many", "attempts "+n, "1 to 1000")
	}
	id = s.in("failed")
	s.byHand(`UPDATE workflow_run SET max_attempts = 1000, attempt = 1000 WHERE id = '` + id + `'`)
	s.expect("used up", s.do(`SELECT workflow_retry('`+id+`')`), "not failed: failed, 1000 attempts used")
	id = s.in("failed")
	s.do(`SELECT workflow_delete('` + id + `', 'test')`)
	s.expect("deleted", s.do(`SELECT workflow_retry('`+id+`')`), "not failed: deleted")
}

// workflow_delete hides a run in any state, once, and cancels a leased one.
func TestDeleteFunction(t *testing.T) {
	s, _ := psql(t)
	for _, status := range statuses {
		id := s.in(status)
		del := `SELECT workflow_delete('` + id + `', 'reason `
		s.expect("answer", s.do(del+`1')`), "deleted")
		s.expect("answer", s.do(del+`2')`), "already deleted")
		if status == "leased" {
			status = "cancelled"
		}
		s.expect("run", s.of(id, `concat_ws(', ', status, delete_reason, lease_token, leased_by)`), status+", reason 1")
	}
	s.expect("no run", s.do(`SELECT workflow_delete('`+nobody+`', 'x')`), "not found")
}

// The functions find their tables whatever the caller's search_path is, even if it has tables of the same names
// first.
func TestFunctionsKeepTheirSchema(t *testing.T) {
	s, _ := psql(t)
	home := s.do(`SELECT current_schema()`)
	s.do(`CREATE TEMP TABLE workflow_run (id uuid, type text); CREATE TEMP TABLE workflow_event (id int);
		CREATE SCHEMA decoy; CREATE TABLE decoy.workflow_run (id uuid); CREATE TABLE decoy.workflow_event (id int);
		SET search_path = decoy`)
	call := func(f string) string { return s.do(`SELECT ` + home + `.` + f) }
	id := call(`workflow_enqueue('a.b', idempotency_key => 'k')`)
	s.expect("same", call(`workflow_enqueue('a.b', idempotency_key => 'k')`), id)
	s.do(`UPDATE ` + home + `.workflow_run SET held_at = now() WHERE id = '` + id + `'`)
	s.expect("answer", call(`workflow_cancel('`+id+`')`), "cancelled")
	s.expect("answer", call(`workflow_retry('`+id+`')`), "not failed: cancelled")
	s.expect("answer", call(`workflow_delete('`+id+`', 'x')`), "deleted")
	s.refused(`INSERT INTO `+home+`.workflow_run (type, payload) VALUES ('a.b', `+nested(65)+`)`, "23514", "Flatten", "64 levels")
	other := s.do(`INSERT INTO ` + home + `.workflow_run (type, idempotency_key) VALUES ('a.b', 'k') RETURNING id`)
	s.refused(`UPDATE `+home+`.workflow_run SET deleted_at = NULL WHERE id = '`+id+`'`, "23505", "other run", other)
	call(`outbox_emit('` + id + `', 'x', '{}')`)
	s.expect("decoys", s.do(`SELECT (SELECT count(*) FROM pg_temp.workflow_run) + (SELECT count(*) FROM decoy.workflow_run)
		+ (SELECT count(*) FROM pg_temp.workflow_event) + (SELECT count(*) FROM decoy.workflow_event)`), "0")
	s.do(`SET search_path = ` + home + `; DISCARD TEMP`)
	if got := s.events(id); !strings.Contains(got, "created held cancelled deleted") {
		t.Errorf("events = %q", got)
	}
}

// A function that disables plan types has JIT off. The planner's penalty for disabled plans exceeds every JIT
// threshold, and compiling such a plan takes longer than a lease lasts.
func TestUnusualPlansAreNotCompiled(t *testing.T) {
	s, _ := psql(t)
	s.expect("functions whose plans may be compiled", s.do(`
		SELECT coalesce(string_agg(p.oid::regprocedure::text, ' '), 'none') FROM pg_proc p
		WHERE p.oid IN (SELECT workflow_functions()) AND p.proconfig::text LIKE '%enable\_%=off%' AND NOT 'jit=off' = ANY (p.proconfig)`), "none")
}

// seldom are the SQL functions that are not inlined, and why that costs little. Before PostgreSQL 18 such a function
// is planned anew in each transaction, which takes longer than most of our functions take to execute.
var seldom = map[string]string{
	"process_paused_with":    "people ask why",
	"process_undoes":         "a process is undone",
	"workflow_absent_v1":     "a worker ends",
	"workflow_earlier":       "what is refused next, but for workers of an earlier version",
	"workflow_for_others":    "somebody acts for others",
	"workflow_prioritize":    "a person does it",
	"workflow_recorded_v1":   "the answer to a settle was lost",
	"workflow_relations":     "doctor and migrations",
	"workflow_reschedule":    "a person does it",
	"workflow_stalled_types": "every ten seconds",
	"workflow_stalled_v1":    "every ten seconds",
}

// Functions that workers call all the time, and the triggers they fire, keep their plans.
func TestPlansAreKept(t *testing.T) {
	s, _ := psql(t)
	unused := maps.Clone(seldom)
	for _, f := range s.list(`
		SELECT p.proname FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
		WHERE p.oid IN (SELECT workflow_functions()) AND l.lanname = 'sql' AND (p.prosecdef OR p.proconfig IS NOT NULL) ORDER BY 1`) {
		if _, ok := seldom[f]; !ok {
			t.Errorf("%s is in SQL, and cannot be inlined: write it in PL/pgSQL, or say why it is seldom called", f)
		}
		delete(unused, f)
	}
	if len(unused) > 0 {
		t.Errorf("there are no such functions: %v", unused)
	}
}
