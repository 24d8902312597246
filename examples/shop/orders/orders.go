// Package orders takes orders.
package orders

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/examples/shop/billing"
	"github.com/simple-workflow/simple-workflow/run"
)

// Schema creates the shop's tables, unless they exist.
//
//go:embed schema.sql
var Schema string

// An Order is what a customer wants.
type Order struct {
	Customer string
	Cents    int64
}

// Place stores an order and enqueues its charge. Both exist once tx commits, or neither: there is no order without a
// charge, and no charge without an order.
func Place(ctx context.Context, tx pgx.Tx, o Order) (uuid.UUID, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return uuid.Nil, fmt.Errorf("draw an order id: %w", err)
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO shop_order (id, customer, cents)
		VALUES ($1, $2, $3)`, id, o.Customer, o.Cents)
	if err != nil {
		return uuid.Nil, fmt.Errorf("store order %s: %w", id, err)
	}
	_, err = run.Enqueue(ctx, tx, run.New{
		Type:           "billing.invoice_charge.v1",
		Payload:        billing.Invoice{Order: id, Cents: o.Cents},
		IdempotencyKey: "charge-" + id.String(),
	})
	if err != nil {
		return uuid.Nil, fmt.Errorf("enqueue charge of order %s: %w", id, err)
	}
	return id, nil
}
