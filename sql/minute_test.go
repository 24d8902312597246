package sql_test

import (
	"fmt"
	"testing"
)

// The counts of workers are added up by role, type and minute. A value out of range counts as nothing. Types beyond
// two hundred of a role in a minute are counted as one.
func TestCounting(t *testing.T) {
	s, _ := psql(t)
	count := `SELECT workflow_count_v1('{a.x,a.y}', '{3,1}', '{2,0}', '{0,1}', '{1,0}', '{0.5,0}', '{10,NaN}')`
	s.do(`SET lock_timeout = 0`)
	s.expect("answer", s.do(count), "t")
	s.expect("again", s.do(count), "t")
	all := `SELECT string_agg(concat_ws(' ', type, leased, succeeded, failed, retried, seconds, waited), ', ' ORDER BY type)
		FROM (SELECT type, sum(leased) leased, sum(succeeded) succeeded, sum(failed) failed, sum(retried) retried, sum(seconds) seconds, sum(waited) waited FROM workflow_minute GROUP BY type) x`
	s.expect("sums", s.do(all), "a.x 6 4 0 2 1 20, a.y 2 0 2 0 0 0")
	s.expect("nothing", s.do(`SELECT workflow_count_v1('{}', '{}', '{}', '{}', '{}', '{}', '{}')`), "t")
	s.do(`SELECT workflow_count_v1('{a.x}', '{-5}', '{9223372036854775807}', '{0}', '{0}', '{-1}', '{Infinity}')`)
	s.expect("beyond all bounds", s.do(`SELECT concat_ws(' ', sum(leased), sum(succeeded), sum(seconds), sum(waited)) FROM workflow_minute WHERE type = 'a.x'`), "6 1000000000004 1 20")
	s.do(`SELECT count(workflow_count_v1(ARRAY(SELECT 'b.' || k || '.' || g FROM generate_series(1, 100) g), array_fill(1, '{100}'), array_fill(0, '{100}'), array_fill(0, '{100}'), array_fill(0, '{100}'), array_fill(0.0, '{100}'), array_fill(0.0, '{100}'))) FROM generate_series(1, 5) k`)
	s.expect("all are counted, most by their names", s.do(`SELECT concat_ws(' ', sum(leased), max(n) <= 201, min(n) FILTER (WHERE true) > 0) FROM (SELECT minute, sum(leased) leased, count(*) n FROM workflow_minute WHERE type ~ '^b|other' GROUP BY minute) x`), "500 t t")
	s.expect("the rest", s.do(`SELECT count(*) > 0 FROM workflow_minute WHERE type = 'other'`), "t")

	// A week later.
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_minute SET minute = minute - interval '8 days'; COMMIT`)
	s.do(count)
	s.expect("kept for a week", s.do(`SELECT count(*) FROM workflow_minute WHERE minute < now() - interval '7 days'`), "0")
	s.refused(`UPDATE workflow_minute SET leased = 0`, "23000", "workflow_count_v1", "engine alone")
}

// counted stores the counts of a type as workers would have reported them ago minutes ago.
func (s *session) counted(typ string, ago, leased, succeeded, failed, retried, due, oldest int) {
	s.t.Helper()
	s.do(fmt.Sprintf(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_minute (minute, role, type, leased, succeeded, failed, retried, counted_at, due, oldest)
		VALUES (date_trunc('minute', now()) - %d * interval '1 minute', 'r', '%s', %d, %d, %d, %d, now() - %[1]d * interval '1 minute', nullif(%[7]d, 0), nullif(%[8]d, 0)); COMMIT`,
		ago, typ, leased, succeeded, failed, retried, due, oldest))
}

// The views of these counts show the rates of the last minutes, types with many failed attempts, and types that are
// covered but do not keep up.
func TestViewsOfMinutes(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid)
		VALUES (gen_random_uuid(), 'w1', '{a.}', '{a.}', true, 10, 3, '', '', 1)`)
	s.expect("no rate", s.do(`SELECT string_agg(concat_ws(' ', status, of_runs, per_second), ', ' ORDER BY status) FROM workflow_rate`), "failed 0 0.00, leased 0 0.00, retried 0 0.00, succeeded 0 0.00")
	s.counted("a.x", 3, 100, 90, 6, 4, 200, 61)
	s.counted("a.x", 0, 50, 50, 0, 0, 300, 120)
	s.counted("a.x", 40, 1000, 0, 1000, 0, 0, 0)
	s.expect("rate", s.do(`SELECT string_agg(concat_ws(' ', status, type, of_runs, per_second BETWEEN of_runs / 241.0 - 0.01 AND of_runs / 180.0 + 0.01), ', ' ORDER BY status) FROM workflow_rate`),
		"failed a.x 6 t, leased a.x 150 t, retried a.x 4 t, succeeded a.x 140 t")
	s.expect("six of a hundred fail", s.do(`SELECT count(*) FROM workflow_erring`), "0")
	s.counted("a.few", 1, 4, 0, 4, 0, 0, 0)
	s.expect("four are few", s.do(`SELECT count(*) FROM workflow_erring`), "0")
	s.counted("a.y", 1, 30, 10, 3, 7, 0, 0)
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_run (type, run_at, attempt, last_error) VALUES ('a.y', now() + interval '1 minute', 1, 'timeout: no'), ('a.y', now(), 0, NULL); COMMIT`)
	s.expect("ten of twenty fail", s.do(`SELECT concat_ws(' ', type, percent, failed, retried, succeeded, last_error, such_as = (SELECT id FROM workflow_run WHERE attempt = 1)) FROM workflow_erring`), "a.y 50 3 7 10 timeout: no t")

	growing := `SELECT coalesce(string_agg(concat_ws(' ', type, due, due_before, covered_by, oldest, within), ', ' ORDER BY type), '') FROM workflow_growing`
	s.expect("growing", s.do(growing), "a.x 300 200 w1 00:02:00 00:03:00")
	s.counted("b.nobody", 3, 1, 1, 0, 0, 200, 61)
	s.counted("b.nobody", 0, 1, 1, 0, 0, 400, 120)
	s.counted("a.shrinks", 3, 1, 1, 0, 0, 400, 61)
	s.counted("a.shrinks", 0, 1, 1, 0, 0, 200, 240)
	s.counted("a.limit", 4, 1, 1, 0, 0, 10000, 100)
	s.counted("a.limit", 0, 1, 1, 0, 0, 10000, 340)
	s.counted("a.lanes", 4, 1, 1, 0, 0, 1016, 100) // one lane is counted up to the limit, another has a few
	s.counted("a.lanes", 0, 1, 1, 0, 0, 1008, 340)
	s.counted("a.drains", 4, 1, 1, 0, 0, 3000, 100)
	s.counted("a.drains", 0, 1, 1, 0, 0, 2000, 340)
	s.counted("a.quick", 4, 1, 1, 0, 0, 200, 2)
	s.counted("a.quick", 0, 1, 1, 0, 0, 400, 3)
	s.expect("who is not covered, shrinks, or waits for seconds does not grow", s.do(growing), "a.lanes 1008 1016 w1 00:05:40 00:04:00, a.limit 10000 10000 w1 00:05:40 00:04:00, a.x 300 200 w1 00:02:00 00:03:00")
	s.do(`SELECT workflow_pause('a.x', 'why'), workflow_pause('a.limit', 'why'), workflow_pause('a.lanes', 'why')`)
	s.expect("nor who is paused", s.do(growing), "")

	// Times in the future, and the largest counts.
	s.do(`BEGIN; SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_minute (minute, role, type, leased, succeeded, failed, retried, counted_at, due, oldest, seconds)
		SELECT m, 'r' || n, 'a.z', 1000000000000000, 1000000000000000, 1000000000000000, 1000000000000000, '2199-12-31', 1000000000000000, 1e15, 1e15
		FROM unnest('{2199-12-31,2000-01-02}'::timestamptz[] || now()) AS m, generate_series(1, 20) n; COMMIT`)
	for _, view := range []string{"workflow_rate", "workflow_erring", "workflow_growing", "workflow_prefix", "workflow_stalled"} {
		s.do(`SELECT jsonb_agg(to_jsonb(v)) FROM ` + view + ` v`)
	}
}

// workflow_backlog returns one row for a prefix or type, without what is paused, held, set aside or due later, and
// counts up to a limit.
func TestBacklog(t *testing.T) {
	s, _ := psql(t)
	due := func(prefix string) string {
		return s.do(`SELECT concat_ws(' ', due, or_more, round(seconds::numeric, -1)) FROM workflow_backlog('` + prefix + `')`)
	}
	s.expect("nothing", due("a."), "0 f 0")
	s.do(`INSERT INTO workflow_run (type, priority, run_at) SELECT t, p, now() - interval '100 seconds' FROM unnest('{a.x,a.y,a.xx,ab.x}'::text[]) t, generate_series(0, 1) p, generate_series(1, 3);
		INSERT INTO workflow_run (type, run_at) VALUES ('a.x', now() + interval '1 hour'); INSERT INTO workflow_run (type, run_at, held_at) VALUES ('a.x', now() - interval '1 hour', now())`)
	s.expect("prefix", due("a."), "18 f 100")
	s.expect("type", due("a.x"), "6 f 100")
	s.do(`SELECT workflow_pause('a.y', 'why')`)
	s.expect("without what is paused", due("a."), "12 f 100")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version, due)
		SELECT 'run', id, type, 'lease', 'P0001', 'x', '', xmin::text::xid, false FROM workflow_run WHERE type = 'a.xx' LIMIT 2; COMMIT`)
	s.expect("without what is set aside", due("a."), "10 f 100")
	s.do(`BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM workflow_set_aside; INSERT INTO workflow_run (type, run_at) SELECT 'b.x', now() - interval '1 hour' FROM generate_series(1, 10001); COMMIT`)
	s.expect("many", due("b."), "10000 t 3600")
	s.refused(`SELECT * FROM workflow_backlog('a')`, "23514", "Use billing. for all its types", "'a' is neither a type nor a prefix")
	s.refused(`SELECT * FROM workflow_backlog(NULL)`, "23514", "Use billing. for all its types", "null is neither a type nor a prefix")
	s.expect("for workers", s.do(`SELECT string_agg(concat_ws(' ', prefix, due, or_more), ', ' ORDER BY prefix) FROM workflow_backlog_v1('{a.,b.,c.}')`), "a. 12 f, b. 2000 t, c. 0 f")
	s.expect("noted", s.do(`SELECT string_agg(concat_ws(' ', type, due, leased, counted_at), ', ' ORDER BY type) FROM workflow_minute`), "a.x 6 0, a.xx 6 0, b.x 2000 0")
	s.do(`INSERT INTO workflow_run (type) VALUES ('a.x')`)
	s.do(`SELECT workflow_backlog_v1('{a.}')`)
	s.expect("once a minute", s.do(`SELECT min(due) FROM workflow_minute WHERE type = 'a.x'`), "6")
}

// A role that is bound to prefixes counts only types under these, and no transaction of another role's worker blocks
// it.
func TestRolesCountForThemselves(t *testing.T) {
	g := withRoles(t)
	media, billing := g.as("media"), g.as("billing")
	count := func(types string) string {
		return `SELECT workflow_count_v1('` + types + `', '{1,1,1}', '{0,0,0}', '{0,0,0}', '{0,0,0}', '{0,0,0}', '{0,0,0}')`
	}
	media.do(`BEGIN`)
	media.expect("answer", media.do(count(`{media.x,billing.x,other}`)), "t")
	billing.expect("beside a transaction that is open", billing.do(count(`{media.x,billing.x,other}`)), "t")
	media.do(`COMMIT`)
	g.expect("counted", g.do(`SELECT string_agg(concat_ws(' ', role, type, n), ', ' ORDER BY role, type) FROM (SELECT regexp_replace(role, '.*_', '') AS role, type, sum(leased) n FROM workflow_minute GROUP BY 1, 2) x`),
		"billing billing.x 1, billing other 1, media media.x 1, media other 1")
	g.do(`INSERT INTO workflow_run (type) VALUES ('media.x'), ('billing.x')`)
	media.expect("sees what is due of its own", media.do(`SELECT string_agg(prefix || due, ' ') FROM workflow_backlog_v1('{media.,billing.}')`), "media.1")
	media.denied(`SELECT * FROM workflow_minute`, `INSERT INTO workflow_minute (minute, role, type) VALUES (now(), 'x', 'a.b')`, `SELECT workflow_backlog('media.')`, `SELECT workflow_due_types('{billing.}')`)
	viewer := g.as("viewer")
	viewer.expect("a viewer looks", viewer.do(`SELECT due FROM workflow_backlog('billing.')`), "1")
}
