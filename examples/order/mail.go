package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type letter struct {
	Order string `json:"order"`
}

// regret tells the customer that there will be no parcel.
func regret(ctx context.Context, in letter) (struct{}, error) {
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO order_letter (run, order_id)
			VALUES ($1, $2)`, run.FromContext(ctx).ID, in.Order)
		return err
	})
}
