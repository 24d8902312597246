package sql_test

import "testing"

// workflow_look_v1 tells of everything that a worker may have to tend to, and of nothing else.
func TestLook(t *testing.T) {
	s, _ := psql(t)
	look := func() string {
		return s.do(`SELECT concat_ws(' ', faults::text, 'aside ' || aside, 'kept ' || kept, 'policies ' || (policies <> 0)) FROM workflow_look_v1()`)
	}
	const nothing = "{} aside false kept false policies false"
	s.expect("at first", look(), nothing)
	for _, c := range []struct{ what, make, want string }{
		{"a fault of this role", `INSERT INTO workflow_fault VALUES ('extend', workflow_role(), '42P01', 'x', now(), now())`, "{extend} aside false kept false policies false"},
		{"an old fault", `INSERT INTO workflow_fault VALUES ('extend', workflow_role(), '42P01', 'x', now() - interval '1 minute', now() - interval '1 minute')`, nothing},
		{"a fault of another role", `INSERT INTO workflow_fault VALUES ('extend', 'another', '42P01', 'x', now(), now())`, nothing},
		{"a run that is set aside", `INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) VALUES ('run', gen_random_uuid(), 'a.b', 'lease', '', '', '', '1')`, "{} aside true kept false policies false"},
		{"an outcome that is kept", `INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) VALUES (gen_random_uuid(), gen_random_uuid(), 'succeeded', 0, false, 'w')`, "{} aside true kept true policies false"},
		{"a run whose time elsewhere is over", `INSERT INTO workflow_accepted (run, token, type, until) VALUES (gen_random_uuid(), gen_random_uuid(), 'a.b', now() - interval '2 minutes')`, "{} aside true kept false policies false"},
		{"a run that goes on elsewhere", `INSERT INTO workflow_accepted (run, token, type, until) VALUES (gen_random_uuid(), gen_random_uuid(), 'a.b', now() + interval '2 minutes')`, nothing},
		{"a signal that has not reached somebody", `INSERT INTO process_unreached (token_id, place, signal_id, visit) VALUES (gen_random_uuid(), '', gen_random_uuid(), 1)`, "{} aside true kept false policies false"},
		{"a signal on its way", `INSERT INTO process_broadcast (signal_id, name) VALUES (gen_random_uuid(), 'go')`, "{} aside true kept false policies false"},
		{"an open incident of what was set aside", `INSERT INTO incident (instance_id, node, code, message) VALUES (gen_random_uuid(), 'n', 'not_leased', '')`, "{} aside true kept false policies false"},
		{"another open incident", `INSERT INTO incident (instance_id, node, code, message) VALUES (gen_random_uuid(), 'n', 'handler_error', '')`, nothing},
		{"an incident that is over", `INSERT INTO incident (instance_id, node, code, message, resolved_at) VALUES (gen_random_uuid(), 'n', 'not_leased', '', now())`, nothing},
		{"a policy", `INSERT INTO workflow_policy (pattern, attempts) VALUES ('a.', 7)`, "{} aside false kept false policies true"},
	} {
		s.do(`BEGIN; SET LOCAL session_replication_role = replica; ` + c.make)
		s.expect(c.what, look(), c.want)
		s.do(`ROLLBACK`)
	}
	s.do(`SELECT workflow_set_policy('a.', attempts => 7)`)
	before := s.do(`SELECT policies FROM workflow_look_v1()`)
	s.do(`SELECT workflow_set_policy('a.', attempts => 8)`)
	if after := s.do(`SELECT policies FROM workflow_look_v1()`); after == before {
		t.Errorf("a policy was changed, and %s is still %s", before, after)
	}
	s.do(`SELECT workflow_drop_policy('a.')`)
	s.expect("at last", look(), nothing)
}
