package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type bill struct {
	Order string `json:"order"`
	Card  string `json:"card"`
	Cents int64  `json:"cents"`
}

// charge asks the bank, and books the amount.
func charge(ctx context.Context, in bill) (struct{}, error) {
	self := run.FromContext(ctx)
	if err := askBank(in.Card, self.Attempt); err != nil {
		return struct{}{}, err
	}
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO order_payment (run, order_id, cents)
			VALUES ($1, $2, $3)`, self.ID, in.Order, in.Cents)
		return err
	})
}

// askBank stands for an external service, which declines one card, and is busy at the first attempt with another.
func askBank(card string, attempt int) error {
	switch {
	case card == "declined":
		return run.Permanent(run.WithCode("DECLINED", errors.New("the bank declines the card")))
	case card == "busy" && attempt == 1:
		return errors.New("the bank does not answer")
	}
	return nil
}

// refund pays back what a run has charged.
func refund(ctx context.Context, in undoing) (struct{}, error) {
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			UPDATE order_payment
			SET refunded = true
			WHERE run = $1`, in.Run)
		return err
	})
}
