package leasing_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A worker whose expired leases are taken back no longer counts as alive until it is seen again. It still counts as
// alive if it was seen after the lease had expired, if the lease ended with the run's time limit, or if it takes the
// lease back itself.
func TestReclaimRetires(t *testing.T) {
	pool := settledServer(t)
	exec(t, pool, `INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, seen_at, secret_hash)
		SELECT gen_random_uuid(), name, '{a.}', '{a.}', false, 10, 0, '', '', 1, clock_timestamp() - seen * interval '1 second', sha256(uuid_send('7d1f0f0e-0000-4000-8000-0000000000aa'))
		FROM (VALUES ('died', 3), ('died, by two leases', 3), ('was seen since', 0), ('its handler hangs', 3), ('w2', 3), ('has lost nothing', 3)) AS v (name, seen)`)
	for _, loser := range []string{"died", "died, by two leases", "died, by two leases", "was seen since", "its handler hangs", "w2"} {
		id := add(t, pool, "a.x", 0, time.Minute)
		p := newPoller(pool, "a.")
		p.Worker = loser
		one(t, p)
		expire(t, pool, id)
		if loser == "its handler hangs" {
			byHand(t, pool, `UPDATE workflow_run SET deadline_at = lease_until WHERE id = $1`, id)
		}
	}
	living := func() string {
		return query[string](t, pool, `SELECT string_agg(name, '; ' ORDER BY name) FROM workflow_live_worker`)
	}
	const before = "died; died, by two leases; has lost nothing; its handler hangs; w2; was seen since"
	if got := living(); got != before {
		t.Fatalf("before, these live: %s", got)
	}
	if again, _ := reclaim(t, newReclaimer(pool), 10); again != 6 {
		t.Fatalf("%d are due again, want 6", again)
	}
	if got := living(); got != "has lost nothing; its handler hangs; w2; was seen since" {
		t.Errorf("after, these live: %s", got)
	}
	if got := query[string](t, pool, `SELECT string_agg(name, '; ' ORDER BY name) FROM workflow_worker WHERE lost_at IS NOT NULL`); got != "died; died, by two leases" {
		t.Errorf("these rows were written, and locked: %s", got)
	}
	id := query[string](t, pool, `SELECT id::text FROM workflow_worker WHERE name = 'died'`)
	exec(t, pool, `SELECT workflow_present_v1($1, '7d1f0f0e-0000-4000-8000-0000000000aa', 'died', '{a.}', '{a.}', false, 10, 0, '', '', 1, 0)`, id)
	if got := living(); got != "died; has lost nothing; its handler hangs; w2; was seen since" {
		t.Errorf("after it has reported again, these live: %s", got)
	}
}

// Leases are taken back even if the presence of their worker cannot be written: its row is locked or refuses the
// update, or the table does not exist.
func TestReclaimNeedsNoPresence(t *testing.T) {
	pool := settledServer(t)
	exec(t, pool, `INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, seen_at)
		VALUES (gen_random_uuid(), 'w1', '{a.}', '{a.}', false, 10, 0, '', '', 1, now() - interval '3 seconds')`)
	conn := func() *pgxpool.Conn {
		c, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Release)
		return c
	}
	taker := conn()
	exec(t, taker, `SET statement_timeout = '2s'`)
	lose := func(what string) {
		t.Helper()
		id := add(t, pool, "a.x", 0, time.Minute)
		one(t, newPoller(pool, "a."))
		expire(t, pool, id)
		if again, _ := reclaim(t, newReclaimer(taker), 10); again != 1 {
			t.Errorf("%s: %d are due again, want 1", what, again)
		}
		exec(t, pool, `UPDATE workflow_run SET run_at = now() + interval '1 hour' WHERE id = $1`, id)
	}
	tx, err := conn().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, tx, `SELECT FROM workflow_worker FOR UPDATE`)
	lose("while the row is locked")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE workflow_worker ADD CHECK (lost_at IS NULL)`)
	lose("while the row refuses it")
	exec(t, pool, `DROP TABLE workflow_worker CASCADE`)
	lose("without the table")
}
