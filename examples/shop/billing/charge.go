// Package billing charges invoices.
package billing

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// An Invoice is what one order costs.
type Invoice struct {
	Order uuid.UUID `json:"order"`
	Cents int64     `json:"cents"`
}

// A Receipt is a charged invoice.
type Receipt struct {
	Entry uuid.UUID `json:"entry"` // in the ledger
	Cents int64     `json:"cents"`
}

// Charge books an invoice and emits an event. The ledger entry, the event and the run's success are committed
// together: none exists without the others.
func Charge(ctx context.Context, in Invoice) (Receipt, error) {
	switch {
	case in.Order == uuid.Nil:
		return Receipt{}, run.Permanent(errors.New(`the payload has no "order", the id of what is charged`))
	case in.Cents <= 0:
		return Receipt{}, run.Permanent(fmt.Errorf(`the payload has "cents": %d, which must be more than 0`, in.Cents))
	}
	info := run.FromContext(ctx)
	if err := askBank(info); err != nil {
		return Receipt{}, err
	}
	receipt := Receipt{Entry: info.ID, Cents: in.Cents}
	if err := worker.Emit(ctx, outbox.Event{Aggregate: in.Order, Type: "invoice.charged.v1", Payload: receipt}); err != nil {
		return Receipt{}, err
	}
	return receipt, worker.InSettle(ctx, func(tx pgx.Tx) error { return book(ctx, tx, info.ID, in) })
}

// book writes the ledger entry. Its key is the run's id, which is the same at every attempt.
func book(ctx context.Context, tx pgx.Tx, entry uuid.UUID, in Invoice) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO shop_ledger (entry, order_id, cents)
		VALUES ($1, $2, $3)
		ON CONFLICT (entry) DO NOTHING`, entry, in.Order, in.Cents)
	if err != nil {
		return fmt.Errorf("book entry %s: %w", entry, err)
	}
	_, err = tx.Exec(ctx, `
		UPDATE shop_order
		SET paid_at = now()
		WHERE id = $1 AND paid_at IS NULL`, in.Order)
	if err != nil {
		return fmt.Errorf("mark order %s paid: %w", in.Order, err)
	}
	return nil
}

var errBank = errors.New("the bank does not answer")

// askBank stands for an external service. Every tenth call fails, always the same ones, but never the third attempt
// of a run.
func askBank(info run.Info) error {
	if info.Attempt > 2 {
		return nil
	}
	sum := fnv.New32a()
	fmt.Fprint(sum, info.ID, info.Attempt)
	if sum.Sum32()%10 == 0 {
		return errBank
	}
	return nil
}
