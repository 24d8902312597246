package sql_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// handedOn returns a leased run that goes on elsewhere, and the token that its handler got.
func (s *session) handedOn(typ string) (id, token string) {
	s.t.Helper()
	id = s.held(typ)
	s.expect("handed on", s.do(`SELECT workflow_accepted_v1('`+id+`', '`+aToken+`', 60)`), "t")
	return id, s.do(`SELECT workflow_handed('` + id + `', '` + aToken + `')`)
}

func complete(id, token, rest string) string {
	return `SELECT workflow_complete('` + id + `', '` + token + `'` + rest + `)`
}

// Only a caller with the token of this start can complete a run, once it is handed on, and with one outcome.
// Everything else is refused with a message.
func TestCompleting(t *testing.T) {
	s, _ := psql(t)
	id, token := s.handedOn("a.b")
	other := s.held("a.b")
	const nobody = "00000000-0000-4000-8000-000000000000"
	s.refused(complete(nobody, token, ``), "P0002", "retention", "there is no run "+nobody)
	s.refused(complete(id, aToken, ``), "42501", "another run", "not leased with this token") // the token of the lease is not accepted
	s.refused(complete(other, token, ``), "42501", "another run", "not leased with this token")
	s.refused(complete(other, s.do(`SELECT workflow_handed('`+other+`', '`+aToken+`')`), ``), "55006", "again in a second", "not handed on")
	s.refused(`SELECT workflow_complete(NULL, '`+token+`')`, "22004", "Workflow-Token", "run is null")
	s.refused(`SELECT workflow_complete('`+id+`', NULL)`, "22004", "Workflow-Token", "token is null")
	s.refused(complete(id, token, `, '1', '{}'`), "23514", "one of the two", "a result and an error")
	s.refused(complete(id, token, `, NULL, '"no"'`), "23514", "CARD_DECLINED", "error is a JSON string")
	for _, bad := range []string{`{"code": "no code"}`, `{"code": 1}`, `{"message": 1}`, `{"permanent": "yes"}`, `{"retry_after": -1}`, `{"again_after": 1e9}`, `{"Message": "x"}`, `{"message": "` + strings.Repeat("x", 5000) + `"}`} {
		s.refused(complete(id, token, `, NULL, '`+bad+`'`), "23514", "retry_after", "is not what may stand there")
	}
	s.refused(complete(id, token, `, to_jsonb(repeat('x', 1048576))`), "23514", "reference", "result has 1048578 bytes")
	s.refused(complete(id, token, `, (repeat('[', 65) || repeat(']', 65))::jsonb`), "23514", "flatter", "64 levels")
	s.refused(complete(id, token, `, '1e309'`), "23514", "Round it", "result: a number")

	s.expect("first", s.do(complete(id, token, `, '{"a": 1, "b": 2}'`)), "completed")
	s.expect("again", s.do(complete(id, token, `, '{"b": 2, "a": 1.0}'`)), "completed already")
	s.refused(complete(id, token, `, '2'`), "23505", "first counts", "another outcome")
	s.refused(complete(id, token, `, NULL, '{"code": "x"}'`), "23505", "first counts", "another outcome")
	s.expect("kept", s.do(`SELECT concat_ws(' ', verdict, result, told, worker) FROM workflow_kept`), `succeeded {"a": 1, "b": 2} t w`)
	s.expect("elsewhere", s.do(`SELECT count(*) FROM workflow_accepted`), "0")
	s.expect("why", s.do(`SELECT left(workflow_why('`+id+`'), 26)`), "it was completed elsewhere")
	s.expect("recorded", s.do(`SELECT data FROM workflow_history WHERE workflow_id = '`+id+`'`), `{"completed_elsewhere": "succeeded"}`)
	if told := s.do(`SELECT string_agg(to_jsonb(h)::text, '') FROM workflow_history h`); strings.Contains(told, token) {
		t.Errorf("the history has the token: %s", told)
	}
	s.expect("settled", s.do(`SELECT workflow_settle_v1('{`+id+`}', '{`+aToken+`}', '{succeeded}', ARRAY['{"a": 1, "b": 2}'::jsonb], '{NULL}', '{NULL}', '{0}', 'w')`), "{1}")
	s.expect("after that", s.do(complete(id, token, `, '{"a": 1, "b": 2}'`)), "completed already")
	s.refused(complete(id, token, `, '2'`), "23505", "first counts", "another outcome")
}

// Errors are stored with the verdict that most likely results from them.
func TestCompletingWithErrors(t *testing.T) {
	s, _ := psql(t)
	for given, verdict := range map[string]string{`{}`: "retried", `{"code": "x", "retry_after": 1}`: "retried", `{"permanent": true}`: "failed", `{"permanent": false}`: "retried", `{"again_after": 0}`: "postponed"} {
		id, token := s.handedOn("a.b")
		s.expect(given, s.do(complete(id, token, `, NULL, '`+given+`'`)), "completed")
		s.expect(given, s.do(`SELECT verdict || ' ' || error::text FROM workflow_kept WHERE run = '`+id+`'`), verdict+" "+given)
		s.expect(given+" again", s.do(complete(id, token, `, error => '`+given+`'`)), "completed already")
	}
}

// A role that may enqueue, or that works, can complete runs whose token it has; a role that is bound to prefixes only
// plain runs of these prefixes. A call without the token locks nothing. A role that may do neither is refused.
func TestWhoCompletes(t *testing.T) {
	g := withRoles(t)
	media := g.as("media")
	for role, s := range map[string]*session{"enqueue": g.as("enqueue"), "media": media, "engine": g.as("engine"), "operator": g.as("operator")} {
		id, token := g.handedOn("media.x")
		s.do(`BEGIN`)
		s.refused(complete(id, aToken, ``), "42501", "", "not leased with this token")
		s.do(`ROLLBACK; BEGIN`)
		_, _ = s.try(complete(id, aToken, ``))
		g.do(`BEGIN; SET LOCAL lock_timeout = '1s'; SELECT id FROM workflow_run WHERE id = '` + id + `' FOR UPDATE; COMMIT`)
		s.do(`ROLLBACK`)
		s.expect(role, s.do(complete(id, token, ``)), "completed")
		s.denied(`SELECT workflow_handed('`+id+`', '`+aToken+`')`, `INSERT INTO workflow_accepted (run, token, type, until) VALUES ('`+id+`', '`+aToken+`', 'x', now())`)
	}
	id, token := g.handedOn("billing.x")
	media.refused(complete(id, token, ``), "P0002", "your role", "there is no run")
	other := g.held("billing.x")
	media.expect("another's", media.do(`SELECT workflow_accepted_v1('`+other+`', '`+aToken+`', 60)`), "f")
	g.handedOn("media.y")
	media.expect("of its own", media.do(`SELECT workflow_elsewhere_v1('{media.,billing.}')`), "1")
	g.expect("of all", g.do(`SELECT workflow_elsewhere_v1('{media.,billing.}')`), "2")
	for _, role := range []string{"viewer", "dispatcher"} {
		g.as(role).denied(complete(id, token, ``))
	}
	g.as("console").refused(complete(id, token, ``), "42501", "Say for whom", "names nobody")
}

// A run that was handed on is not released with its worker's leases, and does not count as running there. It is
// reclaimed once its time is over, even if its worker lives, and the worker does not count as dead because of it.
func TestHandedOnIsNoWorkers(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid) VALUES ('` + aToken + `', 'w', '{a.}', '{a.}', true, 1, 0, 'v', 'h', 1)`)
	id, _ := s.handedOn("a.b")
	s.expect("released", s.do(`SELECT workflow_release('w', 'why')`), "0")
	s.expect("running", s.do(`SELECT running FROM workflow_live_worker`), "0")
	s.expect("working", s.do(`SELECT elsewhere IS NOT NULL FROM workflow_working`), "t")
	s.expect("a day at most", s.do(`SELECT count(*) FROM workflow_accepted WHERE until > now() + interval '1 minute'`), "0")
	s.byHand(`UPDATE workflow_run SET lease_until = now() - interval '1 second', deadline_at = now() - interval '1 second', started_at = now() - interval '1 minute'`)
	s.expect("taken back", s.do(`SELECT count(id) FROM workflow_take_back_v1('-infinity', true, 10, '{1}', gen_random_uuid(), 'x', 30)`), "1")
	s.expect("as", s.do(`SELECT concat_ws(' ', status, attempt, suspect, last_error) FROM workflow_run WHERE id = '`+id+`'`), "pending 1 f lease_expired: not completed in time elsewhere, where it was handed on to by w")
	s.expect("left", s.do(`SELECT count(*) FROM workflow_accepted`), "0")
	s.expect("lives", s.do(`SELECT count(*) FROM workflow_live_worker`), "1")
}

// If a run that was handed on ends in another way than by its completion or its time, its row in workflow_accepted is
// removed later, and is not counted until then.
func TestLeftoversOfElsewhere(t *testing.T) {
	s, _ := psql(t)
	id, _ := s.handedOn("a.b")
	s.handedOn("a.c")
	s.do(`UPDATE workflow_run SET status = 'cancelled', finished_at = now(), lease_token = NULL, lease_until = NULL, leased_by = NULL WHERE id = '` + id + `'`)
	s.expect("counted", s.do(`SELECT workflow_elsewhere_v1('{a.}')`), "1")
	s.expect("too early", s.do(`SELECT workflow_try_again_v1(); SELECT count(*) FROM workflow_accepted`), "2")
	s.byHand(`UPDATE workflow_accepted SET until = now() - interval '2 minutes'`)
	s.expect("what is over", s.do(`SELECT workflow_try_again_v1(); SELECT string_agg(type, ' ') FROM workflow_accepted`), "a.c")
}

// A completion locks the kept outcome of an earlier lease before the run, as a cancel does, so the two cannot
// deadlock.
func TestCompletingBesideACancel(t *testing.T) {
	s, pool := psql(t)
	id, token := s.handedOn("a.b")
	s.byHand(`INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) VALUES ('` + id + `', gen_random_uuid(), 'succeeded', 0, false, 'w')`)
	s.do(`BEGIN; SELECT 1 FROM workflow_kept WHERE run = '` + id + `' FOR UPDATE`) // as workflow_cancel begins
	other, done := connect(t, pool.Config().ConnString()), make(chan error)
	go func() {
		_, err := other.try(complete(id, token, ``))
		done <- err
	}()
	pgtest.Await(t, "the other to wait", func() bool {
		return s.do(`SELECT cardinality(pg_blocking_pids(`+strconv.Itoa(int(other.conn.PgConn().PID()))+`))`) == "1"
	})
	s.expect("cancel", s.do(`SELECT workflow_cancel('`+id+`')`), "cancelled")
	s.do(`COMMIT`)
	if err := <-done; err == nil || !strings.Contains(err.Error(), "not leased with this token") {
		t.Errorf("completed after it was cancelled: %v", err)
	}
}
