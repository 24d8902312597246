package sql_test

import (
	"fmt"
	"testing"
)

// A look-up by a key of several columns has no other index to go by that has only some of them. While a table is nearly
// empty the planner may take either, and that plan is kept: once the table is full, each look-up reads all the rows
// that have the first column in common.
func TestKeysHaveOneIndex(t *testing.T) {
	s, _ := psql(t)
	for _, other := range s.list(`
		WITH index AS (
			SELECT i.indrelid AS of, i.indexrelid::regclass::text AS name, i.indisunique AS key, i.indpred IS NULL AS whole,
			       i.indnkeyatts AS n, (i.indkey::int2[])[0:i.indnkeyatts - 1] AS columns -- a slice counts from 1
			FROM pg_index i WHERE i.indrelid IN (SELECT workflow_relations())
		)
		SELECT format('%s instead of %s', o.name, k.name)
		FROM index k JOIN index o ON o.of = k.of AND o.name <> k.name AND o.whole
		WHERE k.key AND k.n > 1 AND o.columns[1] = ANY (k.columns) AND NOT o.columns[1:k.n] @> k.columns
		  AND o.name <> 'join_arrival_token_idx' -- a token arrives at few joins`) {
		t.Errorf("the planner may take %s", other)
	}
}

// With plans that were kept from when one run was set aside, no call reads ten thousand rows for each of ten thousand,
// and none reads all of them to see which is next.
func TestSetAsideAmongMany(t *testing.T) {
	s, pool := psql(t)
	s.do(`SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off`) // as for those who call these functions
	other := connect(t, pool.Config().ConnString())
	other.do(`SET session_replication_role = replica; ALTER TABLE workflow_set_aside SET (autovacuum_enabled = off)`) // no triggers
	aside := func(n int) {
		other.do(fmt.Sprintf(`
			WITH made AS (INSERT INTO workflow_run (type) SELECT 'a.x' FROM generate_series(1, %d) RETURNING id)
			INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version)
			SELECT 'run', id, 'a.x', 'lease', 'P0001', 'no', '', pg_current_xact_id()::xid FROM made`, n))
	}
	calls := map[string]int{ // and how many buffers they may touch
		`SELECT * FROM workflow_lanes('{a.}')`:         100_000, // it walks past each
		`SELECT workflow_aside_some('run')`:            2_000,   // 500 of them
		`SELECT workflow_aside_turn('run', '{a.,b.}')`: 200,
	}
	aside(1)
	other.do(`ANALYZE workflow_set_aside`)
	for call := range calls {
		s.do(call)
	}
	aside(10_000)
	for call, most := range calls {
		if n, _, plan := s.buffers(call); n > most {
			t.Errorf("%s touches %d buffers, at most %d expected:\n%s", call, n, most, plan)
		}
	}
}
