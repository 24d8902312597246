package leasing_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// Under an old snapshot, which keeps the index entries of runs that were leased long ago, a lease touches
// no more buffers than before, because a poll continues where the last one stopped.
func TestOldSnapshot(t *testing.T) {
	pool := pgtest.New(t)
	const n, rounds = 200, 25
	for priority := range 2 {
		addMany(t, pool, n*rounds, "a.x", priority)
		addMany(t, pool, n*rounds, "a.y", priority)
	}
	exec(t, pool, "VACUUM ANALYZE workflow_run")
	holder, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close(t.Context())
	tx, err := holder.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	exec(t, tx, "SELECT FROM workflow_run LIMIT 1")

	watch(t, pool)
	session := newWatched(t, pool)
	p := newPoller(pool, "a.")
	take := func() plan {
		t.Helper()
		p.DontDiscover()
		sent := record(t, pool, func(db run.DB) {
			q := *p
			q.DB = db
			if leases := acquire(t, &q, 1); len(leases) != 1 {
				t.Fatalf("leased %d", len(leases))
			}
		})
		p.Discover()
		return session.explain(t, sent[len(sent)-1])
	}
	p.Discover()
	settle(t, pool, acquire(t, p, n)...)
	first := take().buffers()
	for range 2*rounds - 2 {
		leases, _, err := p.Acquire(t.Context(), n, 0)
		if err != nil || len(leases) != n {
			t.Fatalf("leased %d, %v", len(leases), err)
		}
		settle(t, pool, leases...)
	}
	last := take()
	if last.buffers() > first+100 {
		t.Errorf("leasing one run touches %d buffers, at first %d\n%s", last.buffers(), first, strings.Join(last.texts, "\n"))
	}
	// This shows something only if a look from the start touches many times more.
	fresh := newPoller(nil, "a.")
	sent := record(t, pool, func(db run.DB) {
		fresh.DB = db
		acquire(t, fresh, 1)
	})
	if walk := session.explain(t, sent[0]).buffers(); walk < 10*first {
		t.Errorf("discovery touches %d buffers: no dead entries, so this shows nothing", walk)
	}
	t.Logf("first %d, last %d buffers", first, last.buffers())
}
