package sql_test

import (
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Heartbeats are HOT updates: they write no index entry, and leave nothing for vacuum to look for in indexes, however
// many indexes there are.
func TestHeartbeatsAreHOT(t *testing.T) {
	s, pool := psql(t)
	s.do(`INSERT INTO workflow_run (type, payload) SELECT 'a.b', jsonb_build_object('n', n) FROM generate_series(1, 1000) n`)
	engine := connect(t, pool.Config().ConnString())
	var held []leasing.Held
	for _, l := range acquire(t, engine.conn, 20) {
		held = append(held, leasing.Held{ID: l.ID, Token: l.Token, Length: time.Minute})
	}
	for range 150 {
		kept, gone, err := leasing.Extend(t.Context(), engine.conn, held)
		if err != nil || len(kept) != len(held) || len(gone) != 0 {
			t.Fatalf("kept %d, gone %d: %v", len(kept), len(gone), err)
		}
	}
	engine.conn.Close(t.Context()) // closing reports its statistics
	const stats = ` FROM pg_stat_user_tables WHERE relname = 'workflow_run'`
	pgtest.Await(t, "the statistics arrive", func() bool { return s.do(`SELECT n_tup_upd >= 3020`+stats) == "t" })
	s.expect("more than 0.9 of them HOT", s.do(`SELECT n_tup_hot_upd > 0.9 * n_tup_upd`+stats), "t")
	t.Log(s.do(`SELECT n_tup_hot_upd || ' of ' || n_tup_upd` + stats))
}

// S40: rows that break our rules, written while a CHECK was missing, are not leased and do not keep other runs from
// being leased: an unknown state, a pending row that seems finished, an impossible priority or number of attempts.
// Those that wait are set aside, and reported. A lease without a token or an end is reclaimed. The rows can be
// removed, and the removal is recorded.
func TestForbiddenRows(t *testing.T) {
	s, pool := psql(t)
	s.unbound()
	s.do(`
		ALTER TABLE workflow_run DROP CONSTRAINT workflow_run_status_check, DROP CONSTRAINT workflow_run_lease_check,
			DROP CONSTRAINT workflow_run_finished_check;
		SET session_replication_role = replica;
		INSERT INTO workflow_run (type, status) VALUES ('a.b', 'garbage'), ('a.b', 'PENDING'), ('a.b', 'leased');
		INSERT INTO workflow_run (type, status, lease_until) VALUES ('a.b', 'leased', 'infinity');
		INSERT INTO workflow_run (type, priority, max_attempts, attempt, finished_at)
		VALUES ('a.b', 500, 3, 0, NULL), ('a.b', 0, 0, 0, NULL), ('a.b', 0, 3, -2, NULL), ('a.b', 0, 3, 0, now());
		SET session_replication_role = origin;
		ALTER TABLE workflow_run
			ADD CONSTRAINT workflow_run_finished_check CHECK ((status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)) NOT VALID,
			ADD CONSTRAINT workflow_run_range_check CHECK (priority BETWEEN -100 AND 100 AND attempt >= 0 AND max_attempts BETWEEN 1 AND 1000) NOT VALID,
			ADD CONSTRAINT workflow_run_status_check CHECK (status IN ('pending', 'leased', 'succeeded', 'failed', 'cancelled')) NOT VALID,
			ADD CONSTRAINT workflow_run_lease_check CHECK ((status = 'leased') = (lease_token IS NOT NULL)) NOT VALID`)
	good := s.enqueue()
	l := acquire(t, pool, 1)
	s.expect("leased", l[0].ID.String(), good)
	pgtest.Await(t, "the server has been up for two seconds", func() bool {
		return s.do(`SELECT pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'`) == "t"
	})
	r := &leasing.Reclaimer{DB: pool, Worker: "engine", Length: time.Minute}
	if again, exhausted, err := r.Reclaim(t.Context(), 10); err != nil || again != 2 || len(exhausted) != 0 {
		t.Errorf("took %d back, %d exhausted: %v; want the two that no worker has leased", again, len(exhausted), err)
	}
	settle(t, pool, settling.Succeed, l...)
	s.expect("answer", s.do(`SELECT workflow_cancel((SELECT id FROM workflow_run WHERE status = 'garbage'))`), "too late: garbage")
	s.byHand(`DELETE FROM workflow_run WHERE status IN ('garbage', 'PENDING')`)
	s.expect("set aside", s.do(`SELECT string_agg(problem, '; ' ORDER BY problem) FROM workflow_unleasable`),
		"attempt is -2; finished_at is set, though it has not finished; max_attempts is 0; priority is 500")
	s.expect("answers", s.do(`SELECT string_agg(workflow_cancel(id), ' ') FROM workflow_run WHERE suspect`), "cancelled cancelled")
}

// S47: a column or an index that somebody else adds changes nothing for anyone.
func TestForeignColumn(t *testing.T) {
	s, pool := psql(t)
	first := s.do(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`)
	l := acquire(t, pool, 1)
	s.do(`ALTER TABLE workflow_run ADD COLUMN note text NOT NULL DEFAULT 'x'; ALTER TABLE workflow_history ADD COLUMN note text DEFAULT 'x';
		CREATE INDEX ON workflow_run (note)`)
	if n := settle(t, pool, settling.Release, l...); n != 0 {
		t.Errorf("refused %d", n)
	}
	s.do(`UPDATE workflow_run SET run_at = now()`)
	settle(t, pool, settling.Fail, acquire(t, pool, 1)...)
	s.expect("retried", s.do(`SELECT workflow_retry('`+first+`')`), "pending")
	s.expect("same", s.do(`SELECT workflow_enqueue('a.b', idempotency_key => 'k')`), first)
	if _, err := run.Read(t.Context(), pool, l[0].ID); err != nil {
		t.Error(err)
	}
	s.expect("events", s.events(first), "created leased released leased failed requeued")
}

// S37: the settle of a run that was removed during its lease (past the guard) is refused, without an error.
func TestRemovedUnderLease(t *testing.T) {
	s, pool := psql(t)
	s.enqueue()
	l := acquire(t, pool, 1)
	s.do(`SET session_replication_role = replica; DELETE FROM workflow_run`)
	if n := settle(t, pool, settling.Succeed, l...); n != 1 {
		t.Errorf("refused %d, want 1", n)
	}
	_, gone, err := leasing.Extend(t.Context(), pool, []leasing.Held{{ID: l[0].ID, Token: l[0].Token, Length: time.Minute}})
	if err != nil || gone[l[0].ID] != run.ErrLost {
		t.Errorf("gone = %v, %v", gone, err)
	}
}
