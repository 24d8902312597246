package graph

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// begin queues the statements that lock the instances of a batch, in order of id, and that read these instances, their
// tokens and groups. The caller sends them first in the settle transaction, before it locks any run, because instances
// come before runs in the lock order. A transaction that advances an instance holds its row lock. begin returns the
// function that advances the instances once the runs are settled.
func (e *Engine) begin(first *pgx.Batch, batch []leasing.Settlement) (hook.Act, error) {
	of := subjects{tokens: []uuid.UUID{}, instances: []uuid.UUID{}} // empty, not nil: nil becomes NULL, and the query would find nothing
	var err error
	for _, settled := range batch {
		err = errors.Join(err, of.add(settled))
	}
	if err != nil {
		return nil, err
	}
	s := newScene()
	if len(of.tokens)+len(of.instances)+len(of.created) > 0 {
		s.lock(first, of.tokens, of.instances, of.created)
	}
	return func(ctx context.Context, tx pgx.Tx, settled []leasing.Settlement, carrier *leasing.Carrier) error {
		t, err := in(ctx, tx)
		if err != nil {
			return err
		}
		return e.advance(ctx, t, s, settled, carrier)
	}, nil
}
