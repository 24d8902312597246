package worker_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Settle transactions are READ COMMITTED, whatever the database's default is: a transaction that has waited for
// a lock must see what the holder wrote.
func TestSettlesAreReadCommitted(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	admin := pgtest.Open(t, url)
	execute(t, admin, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), 'repeatable read'); END $$`)
	pool := pgtest.Open(t, url)
	mux := worker.NewMux()
	isolation := make(chan string, 10)
	handle(mux, "test.effect.v1", func(ctx context.Context) error {
		return worker.InSettle(ctx, func(tx pgx.Tx) error {
			var is string
			err := tx.QueryRow(ctx, `SHOW transaction_isolation`).Scan(&is)
			isolation <- is
			return err
		})
	})
	work(t, pool, mux, nil)
	if r := finished(t, pool, enqueue(t, pool, "test.effect.v1", empty{})); r.Status != run.Succeeded {
		t.Fatalf("the run is %s", r.Status)
	}
	if is := <-isolation; is != "read committed" {
		t.Errorf("it is settled in %s, want read committed", is)
	}
}
