package model

import (
	"flag"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

func TestMain(m *testing.M) {
	// Fewer and longer stories than rapid's default; the command line may override this.
	_ = flag.Set("rapid.checks", "30")
	_ = flag.Set("rapid.steps", "50")
	goleak.VerifyTestMain(m)
}

// Several workers, each with all the leases that it was ever granted, and people do what they can to one to three
// runs. After every step, the row and its history are those of the model.
func TestModelAgainstPostgres(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	settled(t, pool)
	rapid.Check(t, func(r *rapid.T) {
		w := newWorld(t, r, pool)
		r.Repeat(map[string]func(*rapid.T){
			"":          w.compare,
			"lease":     w.lease,
			"heartbeat": w.heartbeat,
			"settle":    w.settle,
			"reclaim":   w.reclaim,
			"wait":      w.wait,
			"people":    w.people,
			"policy":    w.policy,
		})
	})
}

// settled waits until the server has been up long enough for leases to be reclaimed.
func settled(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.Await(t, "the server has been up for two seconds", func() bool {
		rows, _ := pool.Query(t.Context(), `SELECT pg_postmaster_start_time() < clock_timestamp() - interval '2 seconds'`)
		up, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		if err != nil {
			t.Fatal(err)
		}
		return up
	})
}
