package sql_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/sql"
)

// guarded is a database with roles. The session is the owner's.
type guarded struct {
	*session
	pool  *pgxpool.Pool
	named string
}

func withRoles(t *testing.T) guarded {
	t.Helper()
	s, pool := psql(t)
	g := guarded{s, pool, pgtest.Roles(t, pool)}
	for kind, prefixes := range map[string][]string{"media": {"media.", "email."}, "billing": {"billing."}} {
		if err := sql.BindWorker(t.Context(), s.conn, g.named, g.named+"_"+kind, prefixes); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

// as opens a session of a login that was granted roles.
func (g guarded) as(roles ...string) *session {
	g.t.Helper()
	conn, err := pgtest.As(g.t, g.pool, g.named, roles...).Acquire(g.t.Context())
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(conn.Release)
	return &session{g.t, conn.Conn()}
}

// denied expects that every statement is refused for lack of a privilege.
func (s *session) denied(statements ...string) {
	s.t.Helper()
	for _, statement := range statements {
		if value, err := s.try(statement); codeOf(err) != "42501" {
			s.t.Errorf("%s: %q, %v; want insufficient_privilege", statement, value, err)
		}
	}
}

// forbidden is what only the owner may do, whatever role a login has.
var forbidden = []string{
	`TRUNCATE workflow_run`, `TRUNCATE workflow_history CASCADE`, `DROP TABLE workflow_run CASCADE`, `ALTER TABLE workflow_run DISABLE TRIGGER ALL`,
	`ALTER TABLE workflow_run DISABLE ROW LEVEL SECURITY`, `CREATE TABLE mine (a int)`, `CREATE FUNCTION workflow_uuid(a int) RETURNS int LANGUAGE sql AS 'SELECT 1'`,
	`CREATE POLICY mine ON workflow_run USING (true)`, `UPDATE workflow_history SET actor = 'nobody'`, `UPDATE process_event SET data = NULL`,
	`UPDATE process_state_history SET reason = ''`, `UPDATE workflow_schema SET name = 'x'`, `INSERT INTO workflow_schema (version, name, sha256) VALUES (99, 'x', 'x')`,
	`SET session_replication_role = replica`, `UPDATE workflow_run SET payload = '{}'`, `UPDATE workflow_run SET type = 'media.y'`,
}

// A role that only enqueues can read nothing, and change nothing that exists.
func TestRoleEnqueue(t *testing.T) {
	g := withRoles(t)
	s := g.as("enqueue")
	id := s.do(`INSERT INTO workflow_run (type, payload) VALUES ('billing.x', '{"card": 1}') RETURNING id`)
	s.do(`INSERT INTO workflow_run (type) VALUES ('media.x')`)
	key := s.do(`SELECT workflow_enqueue('billing.x', '{"card": 1}', idempotency_key => 'k')`)
	s.expect("the same again", s.do(`SELECT workflow_enqueue('billing.x', '{"card": 1}', idempotency_key => 'k')`), key)
	s.do(`SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}')`)
	s.denied(`SELECT outbox_emit(gen_random_uuid(), 'run.failed', '{}')`, `INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'a.b', '{}')`,
		`INSERT INTO outbox_event (id, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE VALUES (1, gen_random_uuid(), 'a.b', '{}')`)
	s.expect("who", g.do(`SELECT created_by FROM workflow_run WHERE id = '`+key+`'`), g.named+"_login_enqueue")
	s.expect("sees", s.do(`SELECT count(id) FROM workflow_run`), "0")
	s.refused(`INSERT INTO workflow_run (type) VALUES ('Bad Type')`, "23514", "Use segments", "dotted")
	s.denied(forbidden...)
	for _, typ := range []string{"graph.start.v1", "graph.message.v1", "graph.signal.v1", "graph.complete_task.v1"} {
		s.do(`SELECT workflow_enqueue('` + typ + `'); INSERT INTO workflow_run (type) VALUES ('` + typ + `')`)
	}
	s.denied(`SELECT workflow_enqueue('graph.restart.v1')`, `INSERT INTO workflow_run (type) VALUES ('graph.restart.v1')`, `SELECT workflow_enqueue('graph.cancel.v1')`, `INSERT INTO workflow_run (type) VALUES ('graph.cancel.v1')`, `SELECT workflow_enqueue('graph.cut_off.v1')`,
		`SELECT * FROM workflow_run`, `SELECT payload FROM workflow_run`, `SELECT * FROM workflow_history`, `SELECT * FROM workflow_event`, `SELECT * FROM outbox_event`,
		`SELECT * FROM workflow_overview`, `SELECT * FROM process_instance`, `SELECT * FROM workflow_lane`, `UPDATE workflow_run SET priority = 1`, `DELETE FROM workflow_run`,
		`INSERT INTO workflow_run (type, status) VALUES ('a.b', 'pending')`, `INSERT INTO workflow_history (workflow_id, event_type) VALUES (gen_random_uuid(), 'x')`,
		`SELECT workflow_cancel('`+id+`')`, `SELECT workflow_retry('`+id+`')`, `SELECT workflow_delete('`+id+`', 'why')`, `SELECT workflow_why('`+id+`')`,
		`SELECT workflow_pause('billing.', 'why')`, `SELECT process_pause('`+id+`')`, `SELECT outbox_replay(now(), now())`, `SELECT * FROM workflow_redrive('billing.')`)
}

// A role that may enqueue may insert an instance, which is started like one that it starts by a run. The role reads
// nothing by that, can set only columns that an instance has before its start, and cannot pass for the engine.
func TestRoleEnqueueInsertsInstances(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO process_definition (id, definition) VALUES ('` + nobody + `', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}')`)
	s := g.as("enqueue")
	const id = "00000000-0000-4000-8000-000000000007"
	s.do(`INSERT INTO process_instance (id, process_definition_id, status, tenant_id, priority, input_payload, metadata, version) VALUES ('` + id + `', '` + nobody + `', 'CREATED', 'acme', 7, '{"card": 1}', '{"a": "b"}', 1)`)
	s.do(`INSERT INTO process_instance (process_definition_id) VALUES ('` + nobody + `')`)
	g.expect("its run", g.do(`SELECT concat_ws(' ', type, payload, tenant_id, priority, metadata, status, created_by) FROM workflow_run WHERE id = '`+id+`'`),
		`graph.start.v1 {"id": "`+id+`", "input": {"card": 1}, "process": "p", "version": 1, "priority": 7} acme 7 {"a": "b"} pending `+g.named+`_login_enqueue`)
	g.expect("runs", g.do(`SELECT count(*) FROM workflow_run r JOIN process_instance i USING (id)`), "2")
	s.denied(`SELECT id FROM process_instance`, `INSERT INTO process_instance (process_definition_id) VALUES ('`+nobody+`') RETURNING id`, `INSERT INTO process_instance (process_definition_id, business_key) VALUES ('`+nobody+`', 'k')`,
		`INSERT INTO process_instance (process_definition_id, live_tokens) VALUES ('`+nobody+`', 1)`, `UPDATE process_instance SET priority = 1`, `DELETE FROM process_instance`)
	s.refused(`INSERT INTO process_instance (process_definition_id, status) VALUES ('`+nobody+`', 'IN_PROGRESS')`, "23000", "Leave status out", "status is", "CREATED")
	s.refused(`BEGIN; SET LOCAL workflow.advance = 'on'; INSERT INTO process_instance (process_definition_id, status) VALUES ('`+nobody+`', 'IN_PROGRESS')`, "23000", "workflow.advance", "engine alone")
	s.do(`ROLLBACK`)
	s.refused(`INSERT INTO process_instance (process_definition_id) VALUES ('`+id+`')`, "23000", "define FILE", id)
	for _, other := range []string{"worker", "dispatcher", "viewer"} {
		if g.do(`SELECT has_any_column_privilege('`+g.named+`_`+other+`', 'process_instance', 'INSERT')`) != "f" {
			t.Errorf("%s may insert", other)
		}
	}
	g.expect("instances", g.do(`SELECT count(*) FROM process_instance`), "2")
}

// A bound worker cannot forge anything through the functions that it may execute: no event that is not an outcome,
// and no other name. It locks no run of another prefix, delays nobody's retries, and learns nothing about ids.
func TestBoundWorkerForgesNothing(t *testing.T) {
	g := withRoles(t)
	media, billing := g.as("media"), g.as("billing")
	own, other := g.do(`INSERT INTO workflow_run (type) VALUES ('media.x') RETURNING id`), g.do(`INSERT INTO workflow_run (type) VALUES ('billing.x') RETURNING id`)
	const lease = `SELECT id FROM workflow_lease_v1('{f}', '{media.x}', '{0}', '{1901-01-01}', '{00000000-0000-0000-0000-000000000000}', '{0}', '{1}', '{NULL}', '{NULL}',
		false, 0, 1, false, false, false, '7d1f0f0e-0000-4000-8000-000000000001', 'anna by con psql', '{media.x}', '{60}', '{NULL}')`
	media.expect("leases", media.do(lease), own)
	settle := func(verdict string) string {
		return `SELECT workflow_settle_v1('{` + own + `}', '{7d1f0f0e-0000-4000-8000-000000000001}', '{` + verdict + `}', '{NULL}', '{NULL}', '{NULL}', '{0}', 'anna by con psql')`
	}
	for _, verdict := range []string{"cancelled", "deleted", "NULL", ""} {
		media.refused(settle(verdict), "23514", "", "each run needs one verdict")
	}
	media.do(settle("retried"))
	g.expect("told as", g.do(`SELECT actor FROM workflow_history`), g.named+"_login_media/anna_by_con_psql")

	media.do(`BEGIN; SELECT workflow_locked_v1('{` + own + `,` + other + `}')`)
	g.expect("cancelled meanwhile", g.do(`SET lock_timeout = '1s'; SELECT workflow_cancel('`+other+`')`), "cancelled")
	media.do(`ROLLBACK`)
	media.expect("what there is", media.do(`SELECT count(*) FROM workflow_held_v1('{`+other+`}', '{`+other+`}')`), "0")
	g.byHand(`INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version, last_tried_at)
		SELECT 'run', id, type, 'lease', 'P0001', 'x', '', xmin, now() - interval '1 hour' FROM workflow_run`)
	for _, id := range []string{own, other} {
		media.expect("told of", media.do(`SELECT workflow_unsettled_v1('`+id+`', '7d1f0f0e-0000-4000-8000-000000000001', 'P0001', 'forged', '')`), "f")
	}
	for _, id := range []string{own, other} { // neither is leased with this token
		media.expect("kept", media.do(`SELECT workflow_unsettled_v2('`+id+`', '7d1f0f0e-0000-4000-8000-000000000001', 'failed', NULL, NULL, NULL, 0, NULL, false, 'w', 'P0001', 'forged', '')`), "f")
		media.expect("kept no more", media.do(`SELECT count(*) FROM workflow_kept_over_v1('{`+id+`}', '{7d1f0f0e-0000-4000-8000-000000000001}', '{failed}', '{f}')`), "0")
		media.expect("refused again", media.do(`SELECT workflow_kept_refused_v1('`+id+`', '7d1f0f0e-0000-4000-8000-000000000001', 'P0001', 'forged', '')`), "f")
	}
	g.byHand(`INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) VALUES ('` + other + `', '7d1f0f0e-0000-4000-8000-000000000001', 'failed', 0, false, 'w')`)
	media.expect("of others", media.do(`SELECT count(*) FROM workflow_kept_over_v1('{`+other+`}', '{7d1f0f0e-0000-4000-8000-000000000001}', '{failed}', '{f}')`), "0")
	media.expect("of others", media.do(`SELECT count(id) FROM workflow_kept_v1('{media.,billing.}', true, 10)`), "0")
	media.refused(`SELECT * FROM workflow_control_v1()`, "42501", "", "may not settle steps of processes")
	media.do(`BEGIN; SELECT workflow_try_again_v1()`)
	billing.do(`SET lock_timeout = '1s'; SELECT workflow_try_again_v1()`)
	media.do(`COMMIT`)
}

// A worker's row can be written only with the secret that the worker drew. It reports only prefixes that its role may
// lease.
func TestPresenceIsItsOwn(t *testing.T) {
	g := withRoles(t)
	media, billing := g.as("media"), g.as("billing")
	present := func(s *session, secret string, prefixes string) string {
		return s.do(`SELECT workflow_present_v1('7d1f0f0e-0000-4000-8000-000000000001', '` + secret + `', 'w', '` + prefixes + `', '{media.}', true, 10, 1, 'v', 'h', 1, 0)`)
	}
	const secret, guess = "7d1f0f0e-0000-4000-8000-0000000000aa", "7d1f0f0e-0000-4000-8000-0000000000bb"
	media.expect("its own", present(media, secret, "{media.,billing.}"), "t")
	media.expect("prefixes", g.do(`SELECT prefixes || steps::text FROM workflow_worker`), "{media.,false}")
	billing.expect("another's", present(billing, guess, "{billing.}"), "f")
	billing.do(`SELECT workflow_absent_v1('7d1f0f0e-0000-4000-8000-000000000001', '` + guess + `')`)
	media.expect("rows", g.do(`SELECT count(*) FROM workflow_worker`), "1")
	media.do(`SELECT workflow_absent_v1('7d1f0f0e-0000-4000-8000-000000000001', '` + secret + `')`)
	media.expect("rows", g.do(`SELECT count(*) FROM workflow_worker`), "0")
}

// No role can make another role's worker count as dead. A bound worker reclaims only leases of its prefixes, whose
// holders are named by their roles, whatever name it leases under; and it writes no row by hand.
func TestPresenceIsRetiredByNoOther(t *testing.T) {
	g := withRoles(t)
	pgtest.Await(t, "the server has been up for two seconds", func() bool {
		return g.do(`SELECT pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'`) == "t"
	})
	media, billing := g.as("media"), g.as("billing")
	billing.do(`SELECT workflow_present_v1('7d1f0f0e-0000-4000-8000-000000000001', '7d1f0f0e-0000-4000-8000-0000000000aa', 'w', '{billing.}', '{billing.}', true, 10, 1, 'v', 'h', 1, 0)`)
	name := g.do(`SELECT name FROM workflow_worker`)
	lose := func(s *session, typ, name string) {
		g.do(`INSERT INTO workflow_run (type) VALUES ('` + typ + `')`)
		s.expect("leases", s.do(`SELECT count(id) FROM workflow_lease_v1('{f}', '{`+typ+`}', '{0}', '{1901-01-01}', '{00000000-0000-0000-0000-000000000000}', '{0}', '{1}', '{NULL}', '{NULL}',
			false, 0, 1, false, false, false, gen_random_uuid(), '`+name+`', '{`+typ+`}', '{0.001}', '{NULL}')`), "1")
		s.do(`SELECT pg_sleep(0.002)`)
	}
	takeBack := func(s *session) string {
		return s.do(`SELECT count(id) FROM workflow_take_back_v1('1900-01-01', false, 10, '{1}', gen_random_uuid(), 'taker', 60)`)
	}
	lives := func(what, want string) {
		t.Helper()
		g.expect(what, g.do(`SELECT count(*) FROM workflow_live_worker`), want)
	}
	lose(media, "media.x", name)
	lose(media, "media.y", "w")
	lose(billing, "billing.x", "w")
	media.expect("taken back by one that is bound elsewhere", takeBack(media), "2")
	lives("lives, whatever others do", "1")
	media.denied(`UPDATE workflow_worker SET lost_at = now()`)
	billing.expect("taken back by one of its own role", takeBack(billing), "1")
	lives("lives after its lease was taken back", "0")
}

// What a bound worker reports about itself is bounded: prefixes and handlers are within its binding, numbers and
// times within what views can show, and texts are truncated. Its secret is in no column, and what is stored instead
// cannot be used as the secret.
func TestPresenceIsBounded(t *testing.T) {
	g := withRoles(t)
	media := g.as("media")
	const secret = "7d1f0f0e-0000-4000-8000-0000000000aa"
	present := func(name, prefixes, rest string) string {
		g.byHand(`DELETE FROM workflow_worker`)
		return media.do(`SELECT workflow_present_v1('7d1f0f0e-0000-4000-8000-000000000001', '` + secret + `', ` + name + `, ` + prefixes + `, ` + prefixes + `, true, ` + rest + `)`)
	}
	const usual = `10, 1, 'v', 'h', 1, 0`
	for prefixes, told := range map[string]string{
		`'{media.,email.x.}'`: "{media.,email.x.}", `'{media,m,"",billing.,graph.,NULL}'`: "{}", `'{media.,billing.}'`: "{media.}", `'{{media.,billing.},{m,email.}}'`: "{media.,email.}", `NULL`: "{}",
	} {
		present(`'w'`, prefixes, usual)
		g.expect("prefixes of "+prefixes, g.do(`SELECT prefixes FROM workflow_worker`), told)
		g.expect("handlers of "+prefixes, g.do(`SELECT handlers FROM workflow_worker`), told)
		g.expect("steps", g.do(`SELECT steps FROM workflow_worker`), "f")
	}
	within := `SELECT started_at BETWEEN now() - interval '32 years' AND now() AND seen_at <= now() AND concurrency >= 0 AND running >= 0 AND length(name) <= 400
		AND octet_length(version) <= 800 AND octet_length(host) <= 800 AND cardinality(prefixes) <= 1000 AND cardinality(handlers) <= 10000 AND pg_column_size(w) < 1000000 FROM workflow_worker w`
	for _, uptime := range []string{`'NaN'`, `'infinity'`, `'-infinity'`, `1e300`, `-1e300`, `NULL`} {
		present(`'w'`, `'{media.}'`, `10, 1, 'v', 'h', 1, `+uptime)
		g.expect("bounded at uptime "+uptime, g.do(within), "t")
	}
	present(`repeat('x', 1000000)`, `array_fill('media.' || repeat('x', 1000), ARRAY[20])`, `-2147483648, -2147483648, repeat('x', 1000000), repeat('x', 1000000), 1, 0`)
	g.expect("all that is huge", g.do(within), "t")
	media.refused(`SELECT workflow_present_v1('7d1f0f0e-0000-4000-8000-000000000002', '`+secret+`', 'w', '{media.}', '{media.}', true, 2147483647, 0, 'v', 'h', 1, 0)`, "23514", "")
	g.do(`SELECT * FROM workflow_live_worker; SELECT * FROM workflow_coverage; SELECT * FROM workflow_waiting`)

	present(`'w'`, `'{media.}'`, usual)
	g.expect("the secret is shown", g.do(`SELECT to_jsonb(w)::text ~ '7d1f0f0e-0000-4000-8000-0000000000aa|0000000000aa"' FROM workflow_worker w`), "f")
	media.do(`SELECT workflow_absent_v1(id, substr(encode(secret_hash, 'hex'), 1, 32)::uuid) FROM workflow_worker`)
	g.expect("rows, after the hash was tried", g.do(`SELECT count(*) FROM workflow_worker`), "1")
}

// A bound role has at most three hundred rows, however many workers it reports, alive or not; the call for another
// one returns false. A row without a secret, which nobody could change, cannot exist.
func TestPresenceIsNoFlood(t *testing.T) {
	g := withRoles(t)
	media, billing := g.as("media"), g.as("billing")
	present := func(n string) string {
		return `SELECT count(*) FROM generate_series(1, ` + n + `) AS g WHERE workflow_present_v1(gen_random_uuid(), gen_random_uuid(), 'w' || g, '{media.}', '{media.}', true, 10, 1, 'v', 'h', 1, 0)`
	}
	media.do(present("300"))
	media.expect("one more", media.do(`SET client_min_messages = error; `+present("1")), "0")
	g.expect("rows", g.do(`SELECT count(*) FROM workflow_worker`), "300")
	billing.expect("another's", billing.do(present("1")), "1")
	first := g.do(`SELECT id FROM workflow_worker WHERE name ~ '/w1$' AND name ~ 'media'`)
	g.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_worker SET seen_at = now() - interval '50 seconds' WHERE id <> '` + first + `'; COMMIT`)
	media.do(present("250"))
	g.expect("rows", g.do(`SELECT count(*) FROM workflow_worker WHERE name ~ 'media'`), "300")
	g.expect("rows of one that lives", g.do(`SELECT count(*) FROM workflow_worker WHERE id = '`+first+`'`), "1")
	for _, s := range []*session{media, g.session} {
		s.refused(`SELECT workflow_present_v1(gen_random_uuid(), NULL, 'w', '{media.}', '{media.}', true, 10, 1, 'v', 'h', 1, 0)`, "22004", "uuid", "secret is null")
	}
}

// settleRun is a statement that tries to settle a run without its lease.
const settleRun = `WITH u AS (UPDATE workflow_run SET status = 'succeeded', result = '{}', lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL,
	finished_at = now() WHERE id = '%s' RETURNING 1) SELECT count(*) FROM u`

// A worker that is bound to prefixes sees, leases and settles only runs of these prefixes, whatever prefixes it asks
// for and whatever tokens it presents. It updates nothing by hand, and reads no token.
func TestRoleWorker(t *testing.T) {
	g := withRoles(t)
	s := g.as("media")
	own, other := g.do(`INSERT INTO workflow_run (type) VALUES ('media.x') RETURNING id`), g.do(`INSERT INTO workflow_run (type, payload) VALUES ('billing.x', '{"card": 1}') RETURNING id`)
	g.do(`BEGIN; SET LOCAL session_replication_role = replica; INSERT INTO workflow_run (type, token_id) VALUES ('media.step', gen_random_uuid()); COMMIT`)
	s.expect("sees", s.do(`SELECT string_agg(type, ' ') FROM workflow_run`), "media.x")
	leaseAll := func(s *session, steps bool) []leasing.Lease {
		t.Helper()
		p := &leasing.Poller{DB: s.conn, Prefixes: []string{"media.", "billing."}, Worker: "w", Steps: steps, Terms: func(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Room: -1} }}
		leases, _, err := p.Acquire(t.Context(), 10, 1)
		if err != nil {
			t.Fatal(err)
		}
		return leases
	}
	mine := leaseAll(s, true)
	if len(mine) != 1 || mine[0].ID.String() != own {
		t.Fatalf("leased %d", len(mine))
	}
	theirs := leaseAll(g.session, false) // leases of the owner
	if len(theirs) != 1 || theirs[0].ID.String() != other {
		t.Fatalf("the owner leased %d", len(theirs))
	}
	stolen := leasing.Held{ID: theirs[0].ID, Token: theirs[0].Token, Length: time.Hour}
	if kept, _, err := leasing.Extend(t.Context(), s.conn, []leasing.Held{stolen}); err != nil || len(kept) != 0 {
		t.Errorf("extends another's: %v, %v", kept, err)
	}
	for _, l := range []leasing.Lease{mine[0], theirs[0]} {
		refused, err := settling.Settle(t.Context(), s.conn, "w", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.TryAgain}})
		if err != nil || (len(refused) == 1) == (l.Type == "media.x") {
			t.Errorf("settles %s: %d refused, %v", l.Type, len(refused), err)
		}
	}
	g.do(`UPDATE workflow_run SET run_at = now() WHERE type = 'media.x'`)
	g.do(`SET session_replication_role = replica; UPDATE workflow_run SET lease_until = now() WHERE type = 'billing.x'; SET session_replication_role = origin`)
	r := &leasing.Reclaimer{DB: s.conn, Worker: "w", Length: time.Minute}
	if again, exhausted, err := r.Reclaim(t.Context(), 10); err != nil || again+len(exhausted) != 0 {
		t.Errorf("takes back %d of others: %v", again+len(exhausted), err)
	}
	for _, setting := range []string{"workflow.audit = off", "workflow.advance = on", "workflow.retry = on"} { // what it sets for itself exempts it from nothing
		s.do("SET " + setting)
	}
	for _, l := range leaseAll(s, false) {
		if _, err := settling.Settle(t.Context(), s.conn, "w", []settling.Outcome{{ID: l.ID, Token: l.Token, Verdict: settling.Fail}}); err != nil {
			t.Error(err)
		}
	}
	s.expect("its history", g.do(`SELECT string_agg(event_type, ' ' ORDER BY id) FROM workflow_history WHERE workflow_id = '`+own+`'`), "retried failed")
	s.do(`RESET ALL`)
	tell := func(aggregate, typ string) string {
		return `SELECT outbox_append_v1(ARRAY[NULL::uuid], '{` + aggregate + `}', '{` + typ + `}', ARRAY['{}'::jsonb])`
	}
	s.do(tell(own, "a.b"))
	s.denied(tell(other, "a.b"), tell("01890a5d-ac96-774b-bcce-b302099a8057", "a.b"), tell(own+","+other, "a.b,a.b"), tell(own, "run.failed"), tell(own, "process.completed"),
		`SELECT outbox_emit('`+own+`', 'a.b', '{}')`, `INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES ('`+own+`', 'a.b', '{}')`,
		`SELECT outbox_append_v1(ARRAY[NULL::uuid], ARRAY[id], '{a.b}', ARRAY['{}'::jsonb]) FROM unnest(ARRAY(SELECT '`+other+`'::uuid)) AS id`)
	s.denied(forbidden...)
	s.denied(fmt.Sprintf(settleRun, own), fmt.Sprintf(settleRun, other), `SELECT lease_token FROM workflow_run`, `SELECT settled_token FROM workflow_run`, `SELECT * FROM workflow_run`,
		`UPDATE workflow_run SET run_at = '-infinity'`, `UPDATE workflow_run SET attempt = 2147483647`, `SELECT FROM workflow_run FOR UPDATE`,
		`INSERT INTO workflow_history (workflow_id, event_type) VALUES ('`+own+`', 'retried')`, `UPDATE workflow_worker SET seen_at = 'infinity'`, `UPDATE workflow_worker SET lost_at = now()`, `DELETE FROM workflow_worker`,
		`INSERT INTO workflow_set_aside VALUES ('run', '`+other+`', 'billing.x', 'lease', 'P0001', '', '', now(), now(), false, '1')`, `SELECT * FROM workflow_set_aside`,
		`INSERT INTO workflow_binding VALUES ('`+g.named+`_media', '{billing.}')`, `SELECT workflow_isolate('{}', '{}', 'lease', true, 'x', '{}', '{}', '{}')`, `SELECT workflow_put_back('{}')`,
		`INSERT INTO workflow_history (workflow_id, event_type) VALUES ('`+other+`', 'retried')`, `SELECT * FROM workflow_history`, `SELECT * FROM workflow_event`,
		`INSERT INTO workflow_run (type) VALUES ('media.x')`, `DELETE FROM workflow_run`, `SELECT * FROM outbox_event`, `SELECT * FROM workflow_overview`, `SELECT * FROM workflow_failing`,
		`SELECT workflow_cancel('`+other+`')`, `SELECT workflow_retry('`+other+`')`, `SELECT workflow_why('`+other+`')`, `SELECT workflow_edit('`+other+`', now(), 1)`,
		`SELECT * FROM process_instance`, `UPDATE workflow_pause SET resumed_at = now()`, `UPDATE workflow_run SET deleted_at = now()`)

	both := g.as("media", "enqueue") // a worker whose handlers enqueue
	both.do(`SELECT workflow_enqueue('billing.y')`)
	both.expect("sees", both.do(`SELECT string_agg(type, ' ') FROM workflow_run`), "media.x")
	both.do(tell(other, "a.b"))
	nobody := g.as("worker") // bound to nothing
	nobody.denied(tell(own, "a.b"))
	nobody.expect("sees", nobody.do(`SELECT count(*) FROM workflow_run`), "0")
	if err := sql.BindWorker(t.Context(), g.conn, g.named, g.named+"_media", []string{"email."}); err != nil {
		t.Fatal(err)
	}
	s.expect("sees after it was bound anew", s.do(`SELECT count(*) FROM workflow_run`), "0")
	s.denied(tell(own, "a.b"))
	for _, bad := range [][]string{nil, {"media"}, {""}, {"media.", "m'; DROP TABLE workflow_run; --"}} {
		if err := sql.BindWorker(t.Context(), g.conn, g.named, g.named+"_media", bad); err == nil {
			t.Errorf("bound to %q", bad)
		}
	}
}

// An engine may do everything that the programs do, to all runs, and cannot rewrite history.
func TestRoleEngine(t *testing.T) {
	g := withRoles(t)
	s := g.as("engine")
	s.do(`INSERT INTO workflow_run (type) VALUES ('billing.x')`)
	s.expect("sees", s.do(`SELECT string_agg(type, ' ') FROM workflow_run`), "billing.x")
	s.do(`SELECT * FROM workflow_event; SELECT * FROM process_without_mover; BEGIN; SET LOCAL workflow.advance = 'on'; DELETE FROM workflow_history; DELETE FROM workflow_run; COMMIT`)
	s.denied(forbidden[:len(forbidden)-2]...) // a payload never changes, whoever writes it
}

// Only the engine stores runs as leased, only for tokens of processes, and only as a first lease that begins now. Such an
// insert wakes no worker, and an insert after it in the same transaction does.
func TestOnlyTheEngineCarriesOn(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO process_definition (id, definition) VALUES ('` + nobody + `', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"do": "billing.x"}}}')`)
	g.byHand(`INSERT INTO process_instance (id, process_definition_id, status) VALUES ('` + nobody + `', '` + nobody + `', 'IN_PROGRESS')`)
	g.byHand(`INSERT INTO process_token (id, instance_id, node, state) VALUES ('` + nobody + `', '` + nobody + `', 'a', 'Ready')`)
	carry := func(token string) string {
		return `SELECT concat_ws(' ', type, attempt, lease_no, started_at >= now(), token) FROM workflow_carry_v1('{` + token + `}', '{billing.x}', '{a}', '{"{}"}', '{3}', '{0}', '{NULL}', '{NULL}',
			'{7d1f0f0e-0000-4000-8000-000000000001}', '{60}', '{NULL}', 'w')`
	}
	s := g.as("engine")
	s.refused(carry(nobody), "23514", "Leave status out", "status 'leased'")
	s.do(`BEGIN; SET LOCAL workflow.advance = 'on'`)
	s.expect("carried", s.do(carry(nobody)), "billing.x 1 1 t 7d1f0f0e-0000-4000-8000-000000000001")
	s.expect("woken", s.do(`SELECT coalesce(current_setting('workflow.woken', true), '')`), "")
	s.do(`INSERT INTO workflow_run (type) VALUES ('billing.x')`)
	s.expect("woken", s.do(`SELECT coalesce(current_setting('workflow.woken', true), '')`), "on")
	s.do(`COMMIT`)
	g.expect("row", g.do(`SELECT concat_ws(' ', status, attempt, lease_no, leased_by, lease_until - started_at, deadline_at, created_by) FROM workflow_run WHERE token_id IS NOT NULL`), "leased 1 1 w 00:01:00 "+g.named+"_login_engine")
	const leased = `BEGIN; SET LOCAL workflow.advance = 'on'; INSERT INTO workflow_run (type, token_id, node, status, attempt, lease_no, lease_token, leased_by, started_at, lease_until) VALUES ('billing.x', `
	for what, values := range map[string]string{
		"no token":       `NULL, NULL, 'leased', 1, 1, gen_random_uuid(), 'w', statement_timestamp(), now()`,
		"second attempt": `'` + nobody + `', 'a', 'leased', 2, 1, gen_random_uuid(), 'w', statement_timestamp(), now()`,
		"second lease":   `'` + nobody + `', 'a', 'leased', 1, 2, gen_random_uuid(), 'w', statement_timestamp(), now()`,
		"begun earlier":  `'` + nobody + `', 'a', 'leased', 1, 1, gen_random_uuid(), 'w', now() - interval '1 minute', now()`,
		"pending":        `'` + nobody + `', 'a', 'pending', 1, 1, gen_random_uuid(), 'w', statement_timestamp(), now()`,
	} {
		s.refused(`/* `+what+` */ `+leased+values+`)`, "23514", "", "workflow_run")
		s.do(`ROLLBACK`)
	}
	for _, other := range []string{"enqueue", "media", "worker", "operator", "dispatcher", "viewer"} {
		o := g.as(other)
		o.denied(carry(nobody), `BEGIN; SET LOCAL workflow.advance = 'on'; `+carry(nobody))
	}
}

// A dispatcher has access to events only.
func TestRoleDispatcher(t *testing.T) {
	g := withRoles(t)
	g.do(`SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}')`)
	s := g.as("dispatcher")
	s.do(`INSERT INTO outbox_sink (name) VALUES ('s'); INSERT INTO outbox_lane (sink, lane) VALUES ('s', 1); UPDATE outbox_event SET published_at = now(); SELECT outbox_last_id_v1(), outbox_set_right_v1('s')`)
	s.denied(forbidden...)
	s.denied(`UPDATE outbox_event SET payload = '{}'`, `INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'a.b', '{}')`, `DELETE FROM outbox_event`,
		`SELECT * FROM workflow_run`, `SELECT * FROM process_instance`, `SELECT * FROM workflow_history`, `SELECT outbox_replay(now(), now())`)
}

// An operator sees everything and acts through functions, which record who called and how, and can do nothing else.
func TestRoleOperator(t *testing.T) {
	g := withRoles(t)
	id := g.do(`INSERT INTO workflow_run (type, payload) VALUES ('billing.x', '{"card": 1}') RETURNING id`)
	s := g.as("operator")
	s.do(`SET application_name = 'psql'`)
	s.expect("sees", s.do(`SELECT payload FROM workflow_run`), `{"card": 1}`)
	s.do(`SELECT workflow_prioritize('` + id + `', 5); SELECT workflow_reschedule('` + id + `', now()); SELECT workflow_why('` + id + `'); SELECT workflow_pause('billing.', 'why'); SELECT workflow_resume('billing.');
		UPDATE workflow_run SET held_at = now(); SELECT * FROM workflow_redrive('billing.', dry_run => false); SELECT workflow_release('w', 'why')`)
	s.do(`SELECT workflow_cancel('` + id + `', 'because')`)
	s.do(`INSERT INTO workflow_run (type, payload) VALUES ('graph.cancel.v1', '{"instance": "01890a5d-ac96-774b-bcce-b302099a8057"}')`)
	s.do(`SELECT workflow_enqueue('graph.restart.v1'); INSERT INTO workflow_run (type) VALUES ('graph.restart.v1')`)
	s.do(`SELECT process_pause('` + id + `'); SELECT process_why('` + id + `'); SELECT outbox_replay_parked()`)
	s.expect("recorded", s.do(`SELECT actor || ': ' || (data->>'statement') FROM workflow_event WHERE event_type = 'cancelled'`),
		g.named+`_login_operator [psql]: SELECT workflow_cancel('`+id+`', 'because')`)
	for _, view := range strings.Fields(s.do(`SELECT string_agg(c.relname, ' ') FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'v'`)) {
		s.do(`SELECT * FROM ` + view)
	}
	s.denied(forbidden...)
	s.denied(`UPDATE workflow_run SET status = 'pending'`, `UPDATE workflow_run SET attempt = 0`, `DELETE FROM workflow_run`, `DELETE FROM workflow_history`,
		`INSERT INTO workflow_history (workflow_id, event_type) VALUES ('`+id+`', 'x')`, `UPDATE process_instance SET status = 'FAILED'`, `DELETE FROM outbox_event`, `UPDATE outbox_sink SET types = '{}'`)
}

// A viewer sees the state of things, but no payloads, keys or error texts.
func TestRoleViewer(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO workflow_run (type, payload, idempotency_key, metadata) VALUES ('billing.x', '{"card": "tell-nobody"}', 'tell-nobody', '{"a": "tell-nobody"}')`)
	g.failed("billing.x", "timeout", 1)
	g.byHand(`UPDATE workflow_run SET last_error = 'card tell-nobody', error = error || '{"message": "card tell-nobody"}' WHERE status = 'failed'`)
	s := g.as("viewer")
	s.expect("runs", s.do(`SELECT string_agg(concat_ws(' ', type, status, error_code), ', ' ORDER BY status) FROM workflow_overview`), "billing.x failed timeout, billing.x pending")
	s.expect("failing", s.do(`SELECT concat_ws(' ', type, code, last_error) FROM workflow_failing`), "billing.x timeout (hidden)")
	g.do(`INSERT INTO outbox_sink (name, last_error) VALUES ('s', 'tell-nobody')`)
	readable := 0
	for _, name := range strings.Fields(g.do(`SELECT string_agg(c.relname, ' ') FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('v', 'r')`)) {
		all, err := s.try(`SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM ` + name + ` x`)
		switch {
		case err != nil && codeOf(err) != "42501":
			t.Errorf("%s: %v", name, err)
		case err == nil:
			readable++
			if strings.Contains(all, "tell-nobody") {
				t.Errorf("%s shows what is secret: %s", name, all)
			}
		}
	}
	if readable != 30 {
		t.Errorf("%d views and tables can be read, want 30", readable)
	}
	both := g.as("viewer", "media") // a worker of another prefix
	both.expect("failing", both.do(`SELECT concat_ws(' ', type, code, last_error) FROM workflow_failing`), "billing.x timeout (hidden)")
	s.denied(forbidden...)
	s.denied(`SELECT payload FROM workflow_run`, `SELECT * FROM workflow_event`, `SELECT workflow_cancel(gen_random_uuid())`, `SELECT workflow_pause('a.', 'why')`,
		`INSERT INTO workflow_run (type) VALUES ('a.b')`)
}

// From the migrations on, nothing of ours can be called by a role that was granted nothing. Everything that runs with
// its owner's rights has a fixed search_path.
func TestNobody(t *testing.T) {
	s, _ := psql(t)
	s.expect("executable by everybody", s.do(`
		SELECT string_agg(p.oid::regprocedure::text, ', ')
		FROM pg_proc p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
		WHERE p.pronamespace = current_schema()::regnamespace AND a.grantee = 0`), "")
	s.expect("without a search_path", s.do(`
		SELECT string_agg(p.oid::regprocedure::text, ', ')
		FROM pg_proc p
		WHERE p.pronamespace = current_schema()::regnamespace AND p.prosecdef
		  AND NOT EXISTS (SELECT FROM unnest(p.proconfig) c WHERE c ~ '^search_path=.*, pg_temp$')`), "")
	g := withRoles(t)
	g.expect("owned by others", g.do(`
		SELECT string_agg(x.name, ', ') FROM (
			SELECT c.relname::text, c.relowner FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'v')
			UNION ALL SELECT p.proname::text, p.proowner FROM pg_proc p WHERE p.pronamespace = current_schema()::regnamespace) x (name, owner)
		WHERE owner <> (SELECT oid FROM pg_roles WHERE rolname = '`+g.named+`_owner')`), "")
	s.expect("which of ours are not listed", s.do(`
		SELECT string_agg(x.name, ', ') FROM (
			SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'v') AND c.oid NOT IN (SELECT workflow_relations())
			UNION ALL SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = current_schema()::regnamespace AND p.oid NOT IN (SELECT workflow_functions())) x (name)`), "")
}

// Tables and functions of an application beside ours stay its own, whatever they are called.
func TestRolesLeaveOthersAlone(t *testing.T) {
	s, pool := psql(t)
	s.do(`CREATE TABLE process_steps (a int); CREATE PROCEDURE process_batch() LANGUAGE sql AS 'SELECT 1'; CREATE FUNCTION process_x() RETURNS int LANGUAGE sql AS 'SELECT 1'`)
	named := pgtest.Roles(t, pool)
	s.expect("owner", s.do(`SELECT relowner::regrole::text FROM pg_class WHERE relname = 'process_steps'`), s.do(`SELECT current_user`))
	s.expect("theirs", s.do(`SELECT has_table_privilege('`+named+`_engine', 'process_steps', 'SELECT')::text || has_function_privilege('`+named+`_viewer', 'process_x()', 'EXECUTE')`), "falsetrue")
}

// A role that could create functions in the schema could make the owner's functions call them: Roles refuses that.
// The previous owner of the tables keeps its rights, and no superuser is needed.
func TestRolesOfAnOrdinaryOwner(t *testing.T) {
	g, pool := psql(t)
	named := pgtest.RolesName(t, pool.Config().ConnString())
	g.do(fmt.Sprintf(`CREATE ROLE %[1]s_dba LOGIN PASSWORD 'secret' CREATEROLE; CREATE ROLE %[1]s_evil;
		CREATE SCHEMA flows AUTHORIZATION %[1]s_dba; GRANT CREATE, USAGE ON SCHEMA flows TO %[1]s_evil`, named))
	config := pool.Config().ConnConfig.Copy()
	config.User, config.Password = named+"_dba", "secret"
	config.RuntimeParams["search_path"] = "flows"
	dba, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Close(context.Background())
	if err := sql.Up(t.Context(), dba); err != nil {
		t.Fatal(err)
	}
	if err := sql.Roles(t.Context(), dba, named); err == nil || !strings.Contains(hintOf(err), "REVOKE CREATE ON SCHEMA flows FROM "+named+"_evil") {
		t.Errorf("roles in a schema where others can create functions: %v, %s", err, hintOf(err))
	}
	s := &session{t, dba}
	s.do(`REVOKE CREATE ON SCHEMA flows FROM ` + named + `_evil`)
	for range 2 {
		if err := sql.Roles(t.Context(), dba, named); err != nil {
			t.Fatal(err, hintOf(err))
		}
	}
	s.expect("owner", s.do(`SELECT relowner::regrole::text FROM pg_class WHERE oid = 'workflow_run'::regclass`), named+"_owner")
	id := s.do(`INSERT INTO workflow_run (type) VALUES ('a.b') RETURNING id`) // still works
	s.expect("as before", s.do(`SELECT workflow_cancel('`+id+`')`), "cancelled")
	s.do(`ALTER TABLE workflow_run ADD COLUMN later int; DROP FUNCTION workflow_why(uuid)`) // a migration would do this
}
