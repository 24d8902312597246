package main

import (
	"context"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/protocol"
)

// What the engine's functions do in the database breaks no rule of the replay, even if another worker settles a kept
// outcome. A lease that is reclaimed before it has expired, or although its outcome is kept, breaks I51. Runs that
// were spoilt where no trigger looks are left out, and counted.
func TestReplay(t *testing.T) {
	conn := judged(t)
	pool, err := pgxpool.New(t.Context(), conn.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	do := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	if err := protocol.Install(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	do(`CREATE TABLE IF NOT EXISTS t.enqueue (run uuid, kase text)`)
	l := &lab{plan: &plan{Strikes: []strike{{Fault: "unleasable"}}}, admin: pool}
	look := func() (broken []string, left float64) {
		t.Helper()
		var v verdict
		if err := l.replay(context.Background(), &v); err != nil {
			t.Fatal(err)
		}
		for _, b := range v.Broken {
			broken = append(broken, b.Rule)
		}
		return broken, v.value("runs left out, which were spoilt where no trigger looks")
	}
	one := uuid.New()
	do(`INSERT INTO workflow_run (id, type) VALUES ($1, 'chaos.effect')`, one)
	do(`UPDATE workflow_run SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'w1-x', started_at = now(), lease_until = now() + interval '1 minute' WHERE id = $1`, one)
	do(`SELECT workflow_cancel($1)`, one)
	if broken, _ := look(); len(broken) > 0 {
		t.Errorf("broken: %v, want nothing", broken)
	}
	bad := uuid.New()
	do(`INSERT INTO workflow_run (id, type) VALUES ($1, 'chaos.effect')`, bad)
	do(`SET session_replication_role = replica; UPDATE workflow_run SET lease_no = 7 WHERE id = '`+bad.String()+`'; RESET session_replication_role`, pgx.QueryExecModeSimpleProtocol)
	do(`SELECT workflow_cancel($1)`, bad)
	if broken, _ := look(); !slices.Equal(broken, []string{ruleStep}) {
		t.Errorf("broken: %v, want %s: it was spoilt", broken, ruleStep)
	}
	do(`INSERT INTO t.enqueue (run, kase) VALUES ($1, 'unleasable')`, bad)
	if broken, left := look(); len(broken) > 0 || left != 1 {
		t.Errorf("broken: %v, %v left out, want one", broken, left)
	}
	// A broken function of the engine: it does not check that the lease has expired.
	do(`CREATE OR REPLACE FUNCTION workflow_take_back_v9(run uuid) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN UPDATE workflow_run SET status = 'pending', suspect = true, lease_token = NULL, lease_until = NULL, leased_by = NULL WHERE id = run; END $$`)
	early := uuid.New()
	do(`INSERT INTO workflow_run (id, type) VALUES ($1, 'chaos.effect')`, early)
	do(`UPDATE workflow_run SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'w1-x', started_at = now(), lease_until = now() + interval '1 minute' WHERE id = $1`, early)
	do(`SELECT workflow_take_back_v9($1)`, early)
	if broken, _ := look(); !slices.Equal(broken, []string{ruleStep}) {
		t.Errorf("broken: %v, want %s: its lease was valid", broken, ruleStep)
	}
	do(`DELETE FROM workflow_trace WHERE run = $1`, early)
	settled, taken := uuid.New(), uuid.New()
	for _, id := range []uuid.UUID{settled, taken} {
		do(`INSERT INTO workflow_run (id, type) VALUES ($1, 'chaos.effect')`, id)
		do(`UPDATE workflow_run SET status = 'leased', attempt = 1, lease_no = 1, lease_token = id, leased_by = 'w1-x', started_at = now(), lease_until = now() WHERE id = $1`, id)
		do(`SELECT workflow_unsettled_v2($1, $1, 'succeeded', NULL, NULL, NULL, 0, NULL, false, 'w1-x', 'XX000', 'no', '')`, id)
	}
	do(`BEGIN; SELECT workflow_kept_over_v1('{`+settled.String()+`}', '{`+settled.String()+`}', '{succeeded}', '{f}');
		SELECT workflow_settle_v1('{`+settled.String()+`}', '{`+settled.String()+`}', '{succeeded}', '{null}', '{null}', '{null}', '{0}', 'w2-x'); COMMIT`, pgx.QueryExecModeSimpleProtocol)
	if broken, _ := look(); len(broken) > 0 {
		t.Errorf("broken: %v, want nothing: another has settled what is kept", broken)
	}
	do(`SELECT workflow_take_back_v9($1)`, taken)
	if broken, _ := look(); !slices.Equal(broken, []string{ruleStep}) {
		t.Errorf("broken: %v, want %s: its outcome is kept", broken, ruleStep)
	}
	var v verdict
	for _, kind := range []protocol.Kind{protocol.Step, protocol.Crowded, protocol.Crowded, protocol.Together} {
		v.wrong(protocol.Wrong{Kind: kind, Run: early})
	}
	if len(v.Broken) != 3 || v.Broken[1].Rule != ruleSlots || v.Broken[1].N != 2 || len(v.Broken[0].Story) == 0 {
		t.Errorf("they are told as %+v", v.Broken)
	}
}
