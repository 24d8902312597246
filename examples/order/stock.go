package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// An undoing is the part that we need of the payload of an undo step: the run to be undone, which may have had no
// effect.
type undoing struct {
	Run uuid.UUID `json:"run"`
}

type reservation struct {
	Order  string `json:"order"`
	Item   string `json:"item"`
	Pieces int    `json:"pieces"`
}

var errOutOfStock = run.Permanent(run.WithCode("OUT_OF_STOCK", errors.New("there are not enough pieces")))

// reserve takes pieces from the stock. The change of the stock, the reservation, and the step's success are committed
// together.
func reserve(ctx context.Context, in reservation) (struct{}, error) {
	if in.Order == "" || in.Pieces < 1 {
		return struct{}{}, run.Permanent(fmt.Errorf("order %q, %d pieces: what is to be reserved?", in.Order, in.Pieces))
	}
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		taken, err := tx.Exec(ctx, `
			UPDATE order_stock
			SET free = free - $2
			WHERE item = $1 AND free >= $2`, in.Item, in.Pieces)
		if err == nil && taken.RowsAffected() == 0 {
			return errOutOfStock
		}
		if err == nil {
			_, err = tx.Exec(ctx, `
				INSERT INTO order_reservation (run, order_id, item, pieces)
				VALUES ($1, $2, $3, $4)`, run.FromContext(ctx).ID, in.Order, in.Item, in.Pieces)
		}
		return err
	})
}

// release gives back what a run has reserved.
func release(ctx context.Context, in undoing) (struct{}, error) {
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			WITH back AS (
				UPDATE order_reservation
				SET released = true
				WHERE run = $1 AND NOT released
				RETURNING item, pieces
			)
			UPDATE order_stock s
			SET free = s.free + back.pieces
			FROM back
			WHERE s.item = back.item`, in.Run)
		return err
	})
}
