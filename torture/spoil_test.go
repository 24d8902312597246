package main

import (
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// Each way to spoil rows keeps them from being leased, and is recorded in the ledger as an enqueue.
func TestSpoil(t *testing.T) {
	conn := judged(t)
	pool, err := pgxpool.New(t.Context(), conn.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	l := &lab{admin: pool, dir: t.TempDir()}
	if l.ledger, err = openLedger(l.dir); err != nil {
		t.Fatal(err)
	}
	for i, how := range spoils {
		if whom, err := spoil(t.Context(), l, rand.New(rand.NewPCG(uint64(i), 1))); whom == noOne || err != nil {
			t.Fatalf("%s: hit %q, error %v", how, whom, err)
		}
		p := &leasing.Poller{DB: pool, Prefixes: []string{"chaos."}, Worker: "w1", Terms: func(string) leasing.Terms { return leasing.Terms{Length: leaseLength, Room: -1} }}
		leases, _, err := p.Acquire(t.Context(), 100, 100)
		t.Logf("%s: %v", how, err)
		var open, all int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE status = 'pending'), count(*) FROM workflow_run`).Scan(&open, &all); err != nil {
			t.Fatal(err)
		}
		if len(leases) > 0 || open != all || all == 0 {
			t.Errorf("%s: %d leases; %d of %d rows are pending", how, len(leases), open, all)
		}
		// The next way must be detected independently.
		if _, err := pool.Exec(t.Context(), `BEGIN; SET LOCAL session_replication_role = replica; DELETE FROM workflow_run; COMMIT`); err != nil {
			t.Fatal(err)
		}
	}
	entries := 0
	if err := l.eachLine("ledger.jsonl", func([]byte) error { entries++; return nil }); err != nil || entries < len(spoils) {
		t.Errorf("%d entries, error %v", entries, err)
	}
}
