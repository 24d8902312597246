package sql_test

import (
	"strings"
	"testing"
)

// Each change of a policy is recorded with who made it, the old and the new values, also if it is made past the
// guard. A statement that changes nothing is not recorded.
func TestPolicyHistory(t *testing.T) {
	g := withRoles(t)
	s := g.as("operator")
	s.do(`SET application_name = 'psql'; SELECT workflow_set_policy('billing.', attempts => 50, backoff_base => '10 s')`)
	s.do(`SELECT workflow_set_policy('billing.', attempts => 50, backoff_base => '10 s')`)
	s.do(`SELECT workflow_set_policy('billing.', deadline => '1 hour')`)
	s.do(`SELECT workflow_drop_policy('billing.'); SELECT workflow_drop_policy('billing.')`)
	g.do(`BEGIN; SET LOCAL workflow.override = 'why'; INSERT INTO workflow_policy (pattern, attempts) VALUES ('a.', 7); UPDATE workflow_policy SET pattern = 'b.'; COMMIT`)
	who := g.named + "_login_operator [psql]"
	want := strings.Join([]string{
		who + ` billing.: none -> {"attempts": 50, "backoff_base": 10}`,
		who + ` billing.: {"attempts": 50, "backoff_base": 10} -> {"deadline": 3600}`,
		who + ` billing.: {"deadline": 3600} -> none`,
		g.do(`SELECT workflow_actor()`) + ` a.: none -> {"attempts": 7}`,
		g.do(`SELECT workflow_actor()`) + ` a.: {"attempts": 7} -> none`,
		g.do(`SELECT workflow_actor()`) + ` b.: none -> {"attempts": 7}`,
	}, "\n")
	for name, reader := range map[string]*session{"operator": s, "viewer": g.as("viewer"), "engine": g.as("engine"), "owner": g.session} {
		reader.expect(name+" sees", reader.do(`SELECT string_agg(format('%s %s: %s -> %s', actor, pattern, coalesce(was::text, 'none'), coalesce(became::text, 'none')), E'\n' ORDER BY id) FROM workflow_policy_history`), want)
		if name != "owner" {
			reader.denied(`INSERT INTO workflow_policy_history (pattern) VALUES ('a.')`, `UPDATE workflow_policy_history SET actor = 'x'`, `DELETE FROM workflow_policy_history`, `TRUNCATE workflow_policy_history`)
		}
	}
}

// The history of policies has at most the newest thousand changes, none older than a year.
func TestPolicyHistoryIsBounded(t *testing.T) {
	g, _ := psql(t)
	g.do(`SELECT count(workflow_set_policy('billing.', attempts => n)) FROM generate_series(1, 1000) AS n; SELECT workflow_set_policy('billing.', attempts => 7)`)
	g.expect("changes", g.do(`SELECT count(*) || ' from ' || (SELECT was->>'attempts' FROM workflow_policy_history ORDER BY id LIMIT 1) FROM workflow_policy_history`), "1000 from 1")
	g.byHand(`UPDATE workflow_policy_history SET changed_at = now() - interval '366 days' WHERE id % 2 = 0`)
	g.do(`SELECT workflow_drop_policy('billing.')`)
	g.expect("changes of a year", g.do(`SELECT count(*) FROM workflow_policy_history`), "501")
}
