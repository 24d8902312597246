package graph

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// begin locks the instances that a batch moves, in order of id: whoever advances an instance
// holds its row. That comes first in a settle transaction, before any run is touched. With it is read
// what is needed of every instance and token; begin returns what advances them.
func (e *Engine) begin(first *pgx.Batch, batch []leasing.Settlement) (func(context.Context, pgx.Tx, []leasing.Settlement) error, error) {
	of := subjects{tokens: []uuid.UUID{}, instances: []uuid.UUID{}} // not null, in which nothing is found
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
	return func(ctx context.Context, tx pgx.Tx, settled []leasing.Settlement) error {
		t, err := in(ctx, tx)
		if err != nil {
			return err
		}
		return e.advance(ctx, t, s, settled)
	}, nil
}
