package sql_test

import (
	"fmt"
	"testing"
)

// outage reports n outages of three runs.
func outage(typ string, n int) string {
	return fmt.Sprintf(`SELECT workflow_outage_v1('%s', false, %d, '{7d1f0f0e-0000-4000-8000-000000000001,7d1f0f0e-0000-4000-8000-000000000002,7d1f0f0e-0000-4000-8000-000000000003}', 'unavailable')`, typ, n)
}

// probe is a worker's statement that asks for a probe of a type.
func probe(typ string) string {
	return `SELECT count(id) FROM workflow_probe_v1('{f}', '{` + typ + `}', '{0}', '{1901-01-01}', '{00000000-0000-0000-0000-000000000000}', '{0}', '{1}', '{NULL}', '{NULL}',
		true, 1, 1, false, false, false, gen_random_uuid(), 'w', '{` + typ + `}', '{60}', '{NULL}', '{}', '{}', false, false, false)`
}

// Five outages of three runs without a success between them open a breaker; fewer, or outages of fewer runs, do not.
// A success restarts the count. The engine's own types have no breaker, nor has a name that is no type.
func TestOutagesAreCounted(t *testing.T) {
	s, _ := psql(t)
	one := func(run string, over bool) string {
		return s.do(fmt.Sprintf(`SELECT workflow_outage_v1('a.b', %t, 1, '{7d1f0f0e-0000-4000-8000-00000000000%s}', 'x')::text`, over, run))
	}
	for _, told := range []struct {
		runs string
		open string
	}{
		{"11111111", "false"}, {"12121212", "false"}, {"1231", "false"}, {"12311", "true"}, {"11123", "true"}, {"31415", "true"},
	} {
		open := one(told.runs[:1], true)
		for i := range told.runs[1:] {
			open = one(told.runs[i+1:i+2], false)
		}
		s.expect("after "+told.runs, open, told.open)
	}
	one("1", true)
	s.expect("at once", s.do(outage("a.b", 5)), "t")
	s.expect("after a success", s.do(`SELECT workflow_outage_v1('a.b', true, 0, NULL, NULL)`), "f")
	s.expect("rows", s.do(`SELECT count(*) FROM workflow_outage`), "0")
	for _, typ := range []string{"graph.start.v1", "A.b", "", "a", "a."} {
		s.expect(typ, s.do(outage(typ, 5)), "f")
	}
	s.expect("rows", s.do(`SELECT count(*) FROM workflow_outage`), "0")
}

// One run of a type is leased as a probe, by the first worker that asks. The next probe follows after a pause that
// grows, and not while the last one is leased. If its worker dies, the next one can be leased once the lease was
// reclaimed.
func TestProbes(t *testing.T) {
	s, _ := psql(t)
	s.do(`INSERT INTO workflow_run (type) SELECT 'a.b' FROM generate_series(1, 5)`)
	s.expect("while it is not open", s.do(probe("a.b")), "0")
	s.do(outage("a.b", 5))
	s.expect("before the first pause is over", s.do(probe("a.b")), "0")
	due := func() {
		s.do(`SET workflow.override = 'a test'; UPDATE workflow_outage SET next_probe = now(); RESET workflow.override`)
	}
	due()
	s.expect("a probe", s.do(probe("a.b")), "1")
	s.expect("its pause", s.do(`SELECT round(extract(epoch FROM next_probe - clock_timestamp()))::int FROM workflow_outage`), "2")
	due()
	s.expect("while it is leased", s.do(probe("a.b")), "0")
	s.do(`SET workflow.override = 'a test'; UPDATE workflow_run SET lease_until = now() - interval '1 second' WHERE status = 'leased'; RESET workflow.override`)
	s.do(`SELECT pg_sleep(greatest(0, 2.1 - extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())))`) // until then nothing is reclaimed
	s.do(`SELECT count(*) FROM workflow_take_back_v1('1900-01-01', true, 10, '{60}', gen_random_uuid(), 'w', 60)`)
	s.expect("once it is taken back", s.do(probe("a.b")), "1")
	s.expect("its pause", s.do(`SELECT round(extract(epoch FROM next_probe - clock_timestamp()))::int FROM workflow_outage`), "4")
	s.expect("charged", s.do(`SELECT sum(attempt) FROM workflow_run`), "2")
}

// A role that is bound to prefixes cannot note outages of other types, neither sees nor changes breakers of the
// engine's workers, is not held up by their rows, and has at most three hundred rows.
func TestBreakersOfBoundRoles(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO workflow_run (type) VALUES ('media.x'), ('billing.x')`)
	media := g.as("worker", "media")
	media.expect("another's type", media.do(outage("billing.x", 5)), "f")
	media.expect("its own", media.do(outage("media.x", 5)), "t")
	engine := g.as("engine")
	lanes := `SELECT coalesce(array_to_string(outages, ' '), 'none') FROM workflow_lanes_v2('{media.,billing.}') LIMIT 1`
	media.expect("it knows", media.do(lanes), "media.x")
	engine.expect("the engine's workers do not", engine.do(lanes), "none")
	engine.do(outage("billing.x", 5))
	engine.do(outage("media.x", 5))
	media.do(`SELECT workflow_outage_v1('media.x', true, 0, NULL, NULL), workflow_outage_v1('billing.x', true, 0, NULL, NULL)`)
	engine.expect("what is the engine's stays", engine.do(lanes), "billing.x media.x")
	media.expect("nor is it the role's", media.do(lanes), "none")

	// Nor does a bound role hold up a probe of another role.
	g.byHand(`UPDATE workflow_outage SET next_probe = now()`)
	media.do(`BEGIN`)
	media.expect("another's probe", media.do(probe("billing.x")), "0")
	engine.expect("a probe beside it", engine.do(probe("billing.x")), "1")
	media.do(`ROLLBACK`)
	media.do(outage("media.x", 5))
	g.byHand(`UPDATE workflow_outage SET next_probe = now()`)
	media.expect("its own probe", media.do(probe("media.x")), "1")

	media.do(`SELECT workflow_outage_v1('media.y' || g, false, 1, '{7d1f0f0e-0000-4000-8000-000000000001}', 'x') FROM generate_series(1, 400) g`)
	g.expect("rows of a role", g.do(`SELECT count(*) FROM workflow_outage WHERE bound`), "300")
	g.byHand(`UPDATE workflow_outage SET said_at = now() - interval '6 minutes' WHERE type <> 'billing.x'`)
	media.expect("once they are stale", media.do(outage("media.x", 5)), "t")
	g.expect("rows that are left", g.do(`SELECT string_agg(concat_ws(' ', type, bound), ', ' ORDER BY type) FROM workflow_outage`), "billing.x f, media.x f, media.x t")
	media.denied(`SELECT workflow_close_breaker('media.x')`, `DELETE FROM workflow_outage`, `SELECT * FROM workflow_outage`)
	g.refused(`DELETE FROM workflow_outage`, "23000", "workflow_close_breaker", "workflow_outage")
}
