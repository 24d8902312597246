package orders_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/examples/shop/orders"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

func setup(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	for range 2 { // the second time everything exists
		if _, err := pool.Exec(t.Context(), orders.Schema); err != nil {
			t.Fatal(err)
		}
	}
	return pool
}

func counts(t *testing.T, pool *pgxpool.Pool) (orders, runs int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM shop_order), (SELECT count(*) FROM workflow_run)`).Scan(&orders, &runs); err != nil {
		t.Fatal(err)
	}
	return orders, runs
}

// An order and the run that charges it are committed together.
func TestPlace(t *testing.T) {
	pool := setup(t)
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		id, err := orders.Place(t.Context(), tx, orders.Order{Customer: "Ada", Cents: 1999})
		if err != nil {
			return err
		}
		var typ string
		return tx.QueryRow(t.Context(), `
			SELECT type
			FROM workflow_run
			WHERE payload->>'order' = $1 AND (payload->>'cents')::bigint = 1999`, id.String()).Scan(&typ)
	})
	if err != nil {
		t.Fatal(err)
	}
	if orders, runs := counts(t, pool); orders != 1 || runs != 1 {
		t.Errorf("%d orders and %d runs, want 1 and 1", orders, runs)
	}
}

// A transaction that is rolled back leaves neither order nor run.
func TestPlaceRolledBack(t *testing.T) {
	pool := setup(t)
	changedMind := errors.New("changed my mind")
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := orders.Place(t.Context(), tx, orders.Order{Customer: "Ada", Cents: 1999}); err != nil {
			return err
		}
		return changedMind
	})
	if !errors.Is(err, changedMind) {
		t.Fatal(err)
	}
	if orders, runs := counts(t, pool); orders != 0 || runs != 0 {
		t.Errorf("%d orders and %d runs, want none", orders, runs)
	}
}
