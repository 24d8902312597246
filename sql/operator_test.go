package sql_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// failed stores n failed runs of a type with a code, a second apart, the last of them now.
func (s *session) failed(typ, code string, n int) {
	s.t.Helper()
	s.do(fmt.Sprintf(`
		BEGIN;
		SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_run (type, status, attempt, finished_at, started_at, error, last_error)
		SELECT '%s', 'failed', 3, now() - (%d - g) * interval '1 second', now() - interval '1 hour', jsonb_build_object('code', '%s'), '%[3]s: no'
		FROM generate_series(1, %[2]d) g;
		COMMIT`, typ, n, code))
}

// Failed runs can first be looked at, then a few can be retried, and then the rest at a limited rate.
func TestRedrive(t *testing.T) {
	s, _ := psql(t)
	s.do(`SET application_name = 'ops'`)
	s.failed("billing.charge", "timeout", 20)
	s.failed("billing.charge", "declined", 5)
	s.failed("billings.charge", "timeout", 5)
	pending := `SELECT count(*) FROM workflow_run WHERE status = 'pending'`
	s.expect("what would be done", s.do(`SELECT count(*) || ' ' || min(type) || ' ' || min(code_was) || ' ' || count(run_at) FROM workflow_redrive('billing.', 'timeout')`), "20 billing.charge timeout 0")
	s.expect("nothing was done", s.do(pending), "0")
	first := s.do(`SELECT string_agg(id::text, ' ' ORDER BY finished_at) FROM (SELECT * FROM workflow_run WHERE error->>'code' = 'timeout' AND type = 'billing.charge' ORDER BY finished_at LIMIT 3) x`)
	s.expect("the canary is the oldest", s.do(`SELECT string_agg(id::text, ' ' ORDER BY failed_at) FROM workflow_redrive('billing.', 'timeout', most => 3, dry_run => false)`), first)
	s.expect("the canary", s.do(`SELECT concat_ws(' ', count(*), bool_and(run_at <= now()), min(max_attempts), min(attempt)) FROM workflow_run WHERE status = 'pending'`), "3 t 4 3")
	s.expect("the rest, five a second", s.do(`SELECT count(*) || ' ' || max(run_at) - min(run_at) FROM workflow_redrive('billing.', 'timeout', per_second => 5, attempts => 2, dry_run => false)`), "17 00:00:03.2")
	s.expect("all of them", s.do(pending), "20")
	s.expect("none is left", s.do(`SELECT count(*) FROM workflow_redrive('billing.', 'timeout')`), "0")
	s.expect("by type, and in a span of time", s.do(`SELECT count(*) FROM workflow_redrive('billing.charge', since => now() - interval '2500 ms', until => now() - interval '500 ms')`), "2")
	s.expect("history", s.do(`SELECT string_agg(DISTINCT event_type || ' ' || actor, ', ') FROM workflow_history`), "requeued postgres [ops]")
	s.refused(`SELECT * FROM workflow_redrive('billing.', per_second => 0)`, "23514", "several calls", "per_second above 0")
	s.refused(`SELECT * FROM workflow_redrive('billing.', most => NULL)`, "23514", "several calls", "most is 1 to 100000")
	s.refused(`SELECT * FROM workflow_redrive('billing.', most => 1000000)`, "23514", "several calls", "most is 1 to 100000")
	s.refused(`UPDATE workflow_run SET status = 'pending' WHERE status = 'failed'`, "23514", "workflow_retry", "not simply set to pending") // the setting does not stay
}

func TestRescheduleAndPrioritize(t *testing.T) {
	s, _ := psql(t)
	id := s.enqueue()
	s.expect("answer", s.do(`SELECT workflow_reschedule('` + id + `', '2030-01-01 12:00Z')`)[:14], "due 2030-01-01")
	s.expect("due", s.of(id, `run_at AT TIME ZONE 'UTC'`), "2030-01-01 12:00:00")
	s.expect("answer", s.do(`SELECT workflow_prioritize('`+id+`', 50)`), "priority 50")
	s.expect("run", s.of(id, `concat_ws(' ', priority, run_at AT TIME ZONE 'UTC')`), "50 2030-01-01 12:00:00")
	s.expect("history", s.do(`SELECT string_agg(concat_ws(' ', event_type, actor, data->>'priority_was', (data->>'run_at_was')::timestamptz > '2029-01-01'), ', ' ORDER BY id) FROM workflow_history`),
		"edited postgres 0 f, edited postgres 0 t")
	s.refused(`SELECT workflow_reschedule('`+id+`', NULL)`, "23514", "Say when", "neither a time nor a priority")
	s.refused(`SELECT workflow_prioritize('`+id+`', 101)`, "23514", "-100 (last) to 100", "101")
	s.refused(`SELECT workflow_reschedule('`+id+`', 'infinity')`, "23514", "from the year 2000", "infinity")
	for _, function := range []string{`workflow_reschedule('%s', now())`, `workflow_prioritize('%s', 1)`} {
		s.expect(function, s.do(`SELECT `+fmt.Sprintf(function, s.in("succeeded"))), "too late: succeeded")
		s.expect(function, s.do(`SELECT `+fmt.Sprintf(function, nobody)), "not found")
	}
}

func TestPauseFunctions(t *testing.T) {
	s, _ := psql(t)
	s.expect("pause", s.do(`SELECT workflow_pause('billing.', 'the bank is down')`), "paused")
	s.expect("again", s.do(`SELECT workflow_pause('billing.', 'still')`), "already paused")
	s.expect("another", s.do(`SELECT workflow_resume('media.')`), "not paused; paused are billing.")
	s.expect("resume", s.do(`SELECT workflow_resume('billing.')`), "resumed")
	s.expect("once more", s.do(`SELECT workflow_resume('billing.')`), "not paused")
	s.expect("and pause", s.do(`SELECT workflow_pause('billing.', 'down again')`), "paused")
	s.expect("who did what", s.do(`SELECT string_agg(concat_ws(' ', prefix, reason, paused_by, resumed_by), ', ' ORDER BY id) FROM workflow_pause`),
		"billing. the bank is down postgres postgres, billing. down again postgres")
	s.refused(`SELECT workflow_pause('Billing.*', 'why')`, "23514", "Use billing. for all its types", "'Billing.*' is neither a type nor a prefix")
	s.refused(`SELECT workflow_pause('billing', 'why')`, "23514", "Use billing. for all its types", "'billing' is neither a type nor a prefix")
	s.refused(`SELECT workflow_pause('billing.x', ' ')`, "23514", "Say why", "reason is missing")
	s.expect("one type", s.do(`SELECT workflow_pause('billing.x', 'why')`), "paused, this one type alone")
}

// workflow_release takes a worker's leases away at once. The attempts stay charged.
func TestRelease(t *testing.T) {
	s, _ := psql(t)
	a, b := s.leased(), s.leased()
	worker := s.of(a, "leased_by")
	s.expect("another's", s.do(`SELECT workflow_release('nobody', 'why')`), "0")
	s.expect("both", s.do(`SELECT workflow_release('`+worker+`', 'it hangs')`), "2")
	for _, id := range []string{a, b} {
		s.expect("run", s.of(id, `concat_ws(' ', status, attempt, lease_token, last_error)`), "pending 1 released by postgres: it hangs")
	}
	s.refused(`SELECT workflow_release('w1', '')`, "23514", "Say why", "reason is missing")
}

var (
	scanned = regexp.MustCompile(`Seq Scan on (workflow_run|workflow_history|workflow_minute|outbox_event|process_token|process_event)\b`)
	touched = regexp.MustCompile(`Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?`)
)

// buffers explains a query and returns how many buffers it touches, and which large tables it scans sequentially.
func (s *session) buffers(query string) (n int, whole []string, text string) {
	s.t.Helper()
	rows, err := s.conn.Query(s.t.Context(), "EXPLAIN (ANALYZE, BUFFERS) "+query)
	if err != nil {
		s.t.Fatal(err)
	}
	var lines []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			s.t.Fatal(err)
		}
		lines = append(lines, line)
	}
	if err := rows.Err(); err != nil {
		s.t.Fatalf("%s: %v", query, err)
	}
	text = strings.Join(lines, "\n")
	m := touched.FindStringSubmatch(text)
	if m == nil {
		s.t.Fatalf("the plan tells no buffers:\n%s", text)
	}
	hit, _ := strconv.Atoi(m[1])
	read, _ := strconv.Atoi(m[2])
	return hit + read, scanned.FindAllString(text, -1), text
}

// The cost of what operators look at does not grow with a million runs and a hundred thousand events, and no large
// table is scanned sequentially.
func TestViewsAmongMany(t *testing.T) {
	s, _ := psql(t)
	s.do(`SET jit = off`) // as docs/operations.md says
	s.do(`ALTER TABLE workflow_run SET (autovacuum_enabled = off); ALTER TABLE outbox_event SET (autovacuum_enabled = off)`)
	s.do(`INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid)
		VALUES (gen_random_uuid(), 'w1', '{a.,b.}', '{a.,b.}', true, 10, 3, '', '', 1)`)
	s.do(`INSERT INTO outbox_sink (name) VALUES ('sink'); INSERT INTO outbox_lane (sink, lane) SELECT 'sink', g FROM generate_series(0, 63) g`)
	fill := func(n int) {
		s.do(fmt.Sprintf(`
			BEGIN;
			SET LOCAL session_replication_role = replica;
			INSERT INTO workflow_run (type, priority, run_at, status, attempt, finished_at, error)
			SELECT CASE g %% 4 WHEN 0 THEN 'a.x' WHEN 1 THEN 'b.y' WHEN 2 THEN 'c.z' ELSE 'a.later' END, g / 4 %% 3, now() + (CASE g %% 4 WHEN 3 THEN 1 ELSE -1 END) * interval '1 day',
			       (ARRAY['pending', 'pending', 'succeeded', 'failed'])[1 + g / 12 %% 4], 1, CASE WHEN g / 12 %% 4 >= 2 THEN now() - g * interval '1 ms' END,
			       CASE WHEN g / 12 %% 4 = 3 THEN '{"code": "timeout"}'::jsonb END
			FROM generate_series(1, %d) g;
			INSERT INTO outbox_event (aggregate_id, event_type, payload) SELECT gen_random_uuid(), 'a.b', '{}' FROM generate_series(1, %[1]d / 10);
			COMMIT`, n))
		s.do(`VACUUM ANALYZE workflow_run, outbox_event`)
	}
	one := s.do(`INSERT INTO workflow_run (type) VALUES ('b.y') RETURNING id`)
	other := s.do(`INSERT INTO workflow_run (type) VALUES ('b.y') RETURNING id`)
	looks := map[string]string{
		"workflow_why": `SELECT workflow_why('` + one + `')`,
		"event":        `SELECT * FROM workflow_event WHERE workflow_id = '` + one + `' ORDER BY id`,
		"overview":     `SELECT * FROM workflow_overview WHERE id = '` + one + `'`,
		"enqueue":      `SELECT workflow_enqueue('b.y', '{}')`,
		"once":         `SELECT workflow_enqueue_once('b.y', idempotency_key => 'key')`,
		"cancel":       `SELECT workflow_cancel('` + other + `')`,
		"retry":        `SELECT workflow_retry('` + other + `')`,
		"delete":       `SELECT workflow_delete('` + other + `', 'why')`,
		"reschedule":   `SELECT workflow_reschedule('` + one + `', now())`,
		"pause":        `SELECT workflow_pause('z.', 'why')`,
		"resume":       `SELECT workflow_resume('z.')`,
		"parked":       `SELECT outbox_replay_parked('sink')`,
		"emit":         `SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}')`,
		"prioritize":   `SELECT workflow_prioritize('` + one + `', 1)`,
		"release":      `SELECT workflow_release('nobody', 'why')`,
		"replay":       `SELECT outbox_replay(now() - interval '10 days', now() - interval '9 days')`,
		"redrive":      `SELECT * FROM workflow_redrive('a.', 'timeout', most => 10)`,
		"redrive few":  `SELECT * FROM workflow_redrive('d.')`,
		"working":      `SELECT * FROM workflow_working LIMIT 20`,
		"backlog":      `SELECT * FROM workflow_backlog('a.')`,
		"backlogs":     `SELECT * FROM workflow_backlog_v1('{a.,b.}')`,
		"count":        `SELECT workflow_count_v1('{a.x}', '{1}', '{1}', '{1}', '{1}', '{1}', '{1}')`,
	}
	for _, view := range []string{"workflow_lane", "workflow_waiting", "workflow_coverage", "workflow_failing", "workflow_rate", "workflow_prefix", "workflow_live_worker", "outbox_lag",
		"workflow_erring", "workflow_growing", "workflow_stalled",
		"workflow_blocker", "workflow_bloat"} {
		looks[view] = "SELECT * FROM " + view
	}
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_minute (minute, role, type, leased, failed, counted_at, due, oldest) SELECT date_trunc('minute', now()) - g * interval '1 minute', 'r', 'a.' || t, 9, 9, now() - g * interval '1 minute', 20000 - g, 100
		FROM generate_series(0, 10079) g, generate_series(1, 20) t; COMMIT; ANALYZE workflow_minute`)
	names := slices.Sorted(maps.Keys(looks))              // in alphabetical order pause comes before resume
	alive := `UPDATE workflow_worker SET seen_at = now()` // filling takes longer than a live worker may go unseen
	fill(60_000)
	s.do(alive)
	before := map[string]int{}
	for _, name := range names {
		before[name], _, _ = s.buffers(looks[name])
	}
	fill(1_000_000)
	for _, name := range names {
		s.do(alive)
		n, whole, plan := s.buffers(looks[name])
		t.Logf("%s: %d buffers, %d before", name, n, before[name])
		if n > 2*before[name]+2000 || len(whole) > 0 {
			t.Errorf("%s touches %d buffers beside a million rows, %d without; %v\n%.6000s", name, n, before[name], whole, plan)
		}
	}
}

// The cost of outbox_lag does not grow with a hundred thousand events, analyzed or not: each lane is read from its
// floor, and left after the first event.
func TestLagAmongMany(t *testing.T) {
	s, _ := psql(t)
	s.do(`ALTER TABLE outbox_event SET (autovacuum_enabled = off)`)
	s.do(`INSERT INTO outbox_sink (name) VALUES ('sink'); INSERT INTO outbox_lane (sink, lane) SELECT 'sink', g FROM generate_series(0, 63) g`)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO outbox_event (aggregate_id, event_type, payload) SELECT gen_random_uuid(), 'a.b', '{}' FROM generate_series(1, 100000); COMMIT`)
	for _, then := range []string{`SELECT 1`, `VACUUM ANALYZE outbox_event`} {
		s.do(then)
		if n, whole, plan := s.buffers(`SELECT * FROM outbox_lag`); n > 10_000 || len(whole) > 0 {
			t.Errorf("outbox_lag touches %d buffers after %s; %v\n%.6000s", n, then, whole, plan)
		}
	}
}

// workflow_prefix shows the state of a bound prefix in one row: how many runs are due, running and failed, how many
// succeed per second, what is paused, and which workers cover it.
func TestPrefixes(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid)
		SELECT gen_random_uuid(), 'w' || g, CASE g WHEN 1 THEN '{a.}'::text[] ELSE '{a.,a.x.}' END, '{a.}', true, 10, 0, '', '', 1 FROM generate_series(1, 2) g`)
	s.do(`INSERT INTO workflow_run (type, run_at) SELECT t, now() - interval '1 hour' FROM unnest('{a.x.one,a.x.two,a.y,b.y}'::text[]) t, generate_series(1, 3)`)
	s.failed("a.y", "timeout", 2)
	s.do(`SET session_replication_role = replica; UPDATE workflow_run SET status = 'succeeded', attempt = 1, finished_at = now() - interval '10 s', settled_by = 'w1', updated_at = now() WHERE id IN (SELECT id FROM workflow_run WHERE type = 'a.x.one' LIMIT 2);
		RESET session_replication_role`)
	s.counted("a.x.one", 3, 200, 100, 0, 0, 0, 0)
	s.do(`SELECT workflow_pause('a.x.two', 'why'); SELECT workflow_pause('b.', 'why')`)
	s.expect("by prefix", s.do(`
		SELECT string_agg(concat_ws(' ', prefix, types, due, or_more, oldest >= '1 hour', running, failed, succeeded_per_second BETWEEN 0.4 AND 0.56, workers, coalesce(slots, 0), covered_by, 'by', paused_by, 'within', paused_within), '; ' ORDER BY prefix)
		FROM workflow_prefix`),
		"a. 3 7 f t 0 2 t 2 20 w1, w2 by within a.x.two; "+
			"a.x. 2 4 f t 0 0 t 2 20 w1, w2 by within a.x.two; "+
			"a.x.two 1 3 f t 0 0 f 2 20 w1, w2 by a.x.two within; "+
			"b. 1 3 f t 0 0 f 0 0 by b. within")
}

// The views show what is in the tables.
func TestViews(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, seen_at) VALUES
		(gen_random_uuid(), 'w1', '{a.,lost.}', '{a.x}', true, 10, 3, '', '', 1, now()),
		(gen_random_uuid(), 'w2', '{a.x.}', '{a.x.}', true, 10, 3, '', '', 1, now()),
		(gen_random_uuid(), 'dead', '{c.}', '{c.}', true, 10, 3, '', '', 1, now() - interval '1 minute')`)
	s.do(`INSERT INTO workflow_run (type, priority, run_at) VALUES ('a.x', 0, now() - interval '5 minutes'), ('a.x', 5, now()), ('a.x', 5, now()),
		('a.y', 0, now()), ('c.z', 0, now() - interval '10 minutes'), ('c.later', 0, now() + interval '1 hour')`)
	s.expect("lanes", s.do(`SELECT string_agg(concat_ws(' ', type, priority, due), ', ' ORDER BY type, priority) FROM workflow_lane`),
		"a.x 0 1, a.x 5 2, a.y 0 1, c.later 0 0, c.z 0 1")
	s.expect("waiting", s.do(`SELECT string_agg(concat_ws(' ', type, due, covered_by, to_char(oldest, 'MI')), ', ' ORDER BY type) FROM workflow_waiting`),
		"a.x 3 w1 05, a.y 1 w1 00, c.later 0, c.z 1 10")
	s.expect("coverage", s.do(`SELECT string_agg(subject || ': ' || problem, '; ' ORDER BY subject, problem) FROM workflow_coverage`),
		"a.y: no worker that covers this type has a handler for it: its runs fail as no_handler_registered; "+
			"c.z: no live worker covers this type: 1 due, for 10 min; w1: prefixes overlap: a. and a.x. of w2; w1: this worker has no handler for its prefix lost.")
	s.do(`UPDATE workflow_worker SET steps = false; BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET token_id = gen_random_uuid() WHERE type = 'a.x'; COMMIT`)
	s.expect("steps", s.do(`SELECT problem FROM workflow_coverage WHERE subject = 'a.x'`), "no live worker covers this type, whose runs are steps of processes: 3 due, for 5 min")
	s.do(`UPDATE workflow_worker SET steps = true`)
	s.expect("steps that are covered", s.do(`SELECT count(*) FROM workflow_coverage WHERE subject = 'a.x'`), "0")
	s.do(`SELECT workflow_pause('a.', 'why')`)
	s.expect("paused", s.do(`SELECT string_agg(type || ' ' || paused_by, ', ' ORDER BY type) FROM workflow_waiting`), "a.x a., a.y a.")
	s.failed("b.x", "timeout", 3)
	s.failed("b.x", "declined", 1)
	s.expect("failing", s.do(`SELECT string_agg(concat_ws(' ', type, code, failed, last_error), ', ' ORDER BY code) FROM workflow_failing`), "b.x declined 1 declined: no, b.x timeout 3 timeout: no")
	s.expect("bloat", s.do(`SELECT count(*) > 10 FROM workflow_bloat`), "t")
	s.do(`INSERT INTO outbox_sink (name, types) VALUES ('sink', '{a.}'); INSERT INTO outbox_lane (sink, lane) SELECT 'sink', g FROM generate_series(0, 63) g;
		SELECT outbox_emit(gen_random_uuid(), 'a.b', '{}'), outbox_emit(gen_random_uuid(), 'b.c', '{}')`)
	s.expect("lag", s.do(`SELECT concat_ws(' ', sink, open, failing, parked, oldest < interval '1 minute') FROM outbox_lag`), "sink 1 0 0 t")
}

// workflow_blocker names a session that keeps dead rows from being removed, or that locks a table of ours.
func TestBlockers(t *testing.T) {
	s, pool := psql(t)
	s.expect("nobody", s.do(`SELECT count(*) FROM workflow_blocker WHERE pid IS NOT NULL`), "0")
	other := connect(t, pool.Config().ConnString())
	other.do(`BEGIN; LOCK TABLE workflow_run IN SHARE MODE`)
	pid := other.do(`SELECT pg_backend_pid()`)
	s.do(`SELECT pg_sleep(1.1)`)
	s.expect("a lock", s.do(`SELECT concat_ws(' ', pid, problem, way_out) FROM workflow_blocker WHERE problem LIKE 'holds ShareLock%'`),
		pid+" holds ShareLock on workflow_run SELECT pg_terminate_backend("+pid+")")
}

// For a run that no worker leases or reclaims because of the values in its row, workflow_why says so. It does not say
// that the run is next in turn, and it always returns a text.
func TestWhyOfRowsThatNobodyTakes(t *testing.T) {
	s, _ := psql(t)
	for set, want := range map[string]string{
		`status = 'odd'`:                        `status 'odd' does not exist, so nobody takes it: set status = 'pending', past the guards if need be`,
		`status = 'leased', lease_until = NULL`: `leased by nobody without an end, so it is never taken back: lease_until is null; set lease_until = now(), past the guards if need be`,
	} {
		id := s.enqueue()
		s.do(`BEGIN; SET LOCAL session_replication_role = replica;
			ALTER TABLE workflow_run DROP CONSTRAINT IF EXISTS workflow_run_status_check, DROP CONSTRAINT IF EXISTS workflow_run_lease_check, DROP CONSTRAINT IF EXISTS workflow_run_finished_check;
			UPDATE workflow_run SET ` + set + ` WHERE id = '` + id + `'; COMMIT`)
		s.expect(set, s.do(`SELECT workflow_why('`+id+`')`), want)
	}
}

// A worker that has not been seen for 12 seconds counts as dead everywhere: workflow_stalled_types, which the metric
// and doctor use, does not name it as one with a free slot.
func TestStalledByTheLiving(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_run (type, run_at) VALUES ('a.x', now() - interval '1 minute');
		INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, started_at, seen_at)
		SELECT gen_random_uuid(), 'seen ' || ago || ' s ago', '{a.}', '{a.}', true, 10, 0, '', '', 1, now() - interval '1 hour', now() - ago * interval '1 second' FROM unnest('{5,20,40}'::int[]) AS ago`)
	s.expect("live", s.do(`SELECT string_agg(name, ', ') FROM workflow_live_worker`), "seen 5 s ago")
	s.expect("stalled at", s.do(`SELECT covered_by FROM workflow_stalled_types('{a.}')`), "seen 5 s ago")
	// A type whose short steps of processes are settled moments after they are leased does not count as stalled. No
	// index finds such steps among leased or ended runs, so the per-minute counts show that they run.
	s.counted("a.x", 0, 1, 1, 0, 0, 0, 0)
	s.expect("stalled, though a worker has just told of some", s.do(`SELECT count(*) FROM workflow_stalled_types('{a.}')`), "0")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_minute SET counted_at = now() - interval '31 seconds'; COMMIT`)
	s.expect("stalled since", s.do(`SELECT covered_by FROM workflow_stalled_types('{a.}')`), "seen 5 s ago")
	s.do(`UPDATE workflow_worker SET running = 10 WHERE name = 'seen 5 s ago'`)
	s.expect("stalled where nobody who lives has a slot free", s.do(`SELECT count(*) FROM workflow_stalled_types('{a.}')`), "0")
}

// asksWhenSeen lists the functions and views that read when a worker was last seen (workflow_worker.seen_at), each with
// its reason. Only workflow_live_worker decides whether a worker lives.
var asksWhenSeen = map[string]string{
	"workflow_live_worker":  "it says who lives",
	"workflow_bound":        "it lists columns",
	"workflow_present_v1":   "the rows that are removed are those that were not seen for longest",
	"workflow_take_back_v1": "a worker that was seen since its lease ran out has not died",
	"process_signal_v1":     "workers of an earlier version, which may be at work although they are not seen",
}

// The rule for which workers live is in one place: only the view workflow_live_worker decides it by
// workflow_worker.seen_at.
func TestOneRuleOfWhoLives(t *testing.T) {
	s, _ := psql(t)
	unused := maps.Clone(asksWhenSeen)
	for _, name := range s.list(`
		SELECT x.name FROM (
			SELECT p.proname::text, p.prosrc FROM pg_proc p WHERE p.oid IN (SELECT workflow_functions())
			UNION ALL SELECT c.relname::text, pg_get_viewdef(c.oid) FROM pg_class c WHERE c.oid IN (SELECT workflow_relations()) AND c.relkind = 'v') AS x (name, body)
		WHERE body ~ '\mworkflow_worker\M' AND body ~ '\mseen_at\M' ORDER BY 1`) {
		if _, ok := asksWhenSeen[name]; !ok {
			t.Errorf("%s asks when a worker was seen last: ask workflow_live_worker whether it lives, or say what for", name)
		}
		delete(unused, name)
	}
	for name := range unused {
		t.Errorf("%s does not ask when a worker was seen", name)
	}
}
