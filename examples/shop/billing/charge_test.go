package billing_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/examples/shop/billing"
	"github.com/simple-workflow/simple-workflow/examples/shop/orders"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

const charge = "billing.invoice_charge.v1"

// setup returns a database with the shop's tables and a worker that charges.
func setup(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), orders.Schema); err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	worker.Handle(mux, charge, billing.Charge)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(ctx, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"billing."},
			PollInterval: 50 * time.Millisecond, Backoff: run.Backoff{Base: 10 * time.Millisecond}})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return pool
}

func count(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// id returns the same id for the same name.
func id(name string, n int) uuid.UUID {
	return uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "%s %d", name, n))
}

// Of many invoices some are tried twice, and each is booked once and has one event.
func TestCharge(t *testing.T) {
	const invoices = 100
	pool := setup(t)
	var runs []run.New
	for n := range invoices {
		runs = append(runs, run.New{ID: id("run", n), Type: charge, Payload: billing.Invoice{Order: id("order", n), Cents: 100}})
	}
	if _, err := run.EnqueueMany(t.Context(), pool, runs); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "all runs succeed", func() bool {
		return count(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == invoices
	})
	if n := count(t, pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`); n < 5 || n > 20 {
		t.Errorf("%d invoices were tried more than once, want about ten", n)
	}
	if n := count(t, pool, `
		SELECT count(*)
		FROM workflow_run r
		JOIN shop_ledger l ON l.entry = r.id AND l.order_id::text = r.payload->>'order' AND l.cents = 100`); n != invoices {
		t.Errorf("%d entries fit, want %d", n, invoices)
	}
	if n := count(t, pool, `SELECT count(*) FROM shop_ledger`); n != invoices {
		t.Errorf("%d entries, want %d", n, invoices)
	}
	if n := count(t, pool, `
		SELECT count(DISTINCT e.aggregate_id)
		FROM outbox_event e
		JOIN shop_ledger l ON l.order_id = e.aggregate_id AND l.entry::text = e.payload->>'entry'
		WHERE e.event_type = 'invoice.charged.v1'`); n != invoices {
		t.Errorf("%d invoices have an event, want %d", n, invoices)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_event`); n != invoices {
		t.Errorf("%d events, want %d", n, invoices)
	}
}

// An entry that is already in the ledger stays as it is, and is not booked again.
func TestBookedAlready(t *testing.T) {
	pool := setup(t)
	entry := id("run", 1)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO shop_ledger (entry, order_id, cents)
		VALUES ($1, $2, 7)`, entry, id("order", 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Enqueue(t.Context(), pool, run.New{ID: entry, Type: charge,
		Payload: billing.Invoice{Order: id("order", 1), Cents: 7}}); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the run succeeds", func() bool {
		return count(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded'`) == 1
	})
	if n := count(t, pool, `SELECT sum(cents) FROM shop_ledger`); n != 7 {
		t.Errorf("%d cents are booked, want 7", n)
	}
}

// An invalid invoice fails for good and books nothing.
func TestNoInvoice(t *testing.T) {
	pool := setup(t)
	for _, in := range []billing.Invoice{{Order: id("order", 1)}, {Cents: 100}, {Order: id("order", 1), Cents: -1}} {
		if _, err := run.Enqueue(t.Context(), pool, run.New{Type: charge, Payload: in}); err != nil {
			t.Fatal(err)
		}
	}
	pgtest.Await(t, "all runs fail at their first attempt", func() bool {
		return count(t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'failed' AND attempt = 1`) == 3
	})
	if n := count(t, pool, `SELECT count(*) FROM shop_ledger`); n != 0 {
		t.Errorf("%d entries, want 0", n)
	}
}
