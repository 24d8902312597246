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

// A step is a node of a process as chaos executes it.
type step struct {
	nap
	Tag  string  `json:"tag"`  // of the instance, from its input
	Node string  `json:"node"` // so that the row has it without help of the engine
	N    float64 `json:"n"`    // passed on: loops count with it

	Times     int    `json:"times"`     // how many attempts fail first
	Fail      string `json:"fail"`      // the code of a permanent failure; empty: none
	Breaks    bool   `json:"breaks"`    // three runs in four have a bug: somebody has to retry it, with another run
	Owes      bool   `json:"owes"`      // it has an undo
	Reluctant bool   `json:"reluctant"` // when it is undone
}

// step does what its payload says, and writes one row in the transaction that records its success. It returns its
// payload.
func (c *chaos) step(ctx context.Context, in step) (step, error) {
	if _, err := c.sleep(ctx, in.nap); err != nil {
		return in, err
	}
	info := run.FromContext(ctx)
	switch {
	case in.Fail != "":
		return in, run.Permanent(run.WithCode(in.Fail, errors.New("chaos: a step that fails for good")))
	case in.Breaks && info.ID[15]%4 != 0:
		return in, errors.New("chaos: a step with a bug")
	case info.Attempt <= in.Times:
		return in, fmt.Errorf("chaos: attempt %d of the %d that fail", info.Attempt, in.Times)
	}
	return in, c.leave(ctx, in.Tag+"/"+in.Node, in, nil)
}

// An undoing is the payload of a run that undoes a step.
type undoing struct {
	Input step      `json:"input"`
	Run   uuid.UUID `json:"run"`
}

// undo writes one row, too. If it is reluctant, one run in four fails for good: somebody has to retry it, with
// another run.
func (c *chaos) undo(ctx context.Context, in undoing) (none, error) {
	if id := run.FromContext(ctx).ID; in.Input.Reluctant && id[15]%4 == 0 {
		return none{}, run.Permanent(run.WithCode("reluctant", errors.New("chaos: an undo that fails for good")))
	}
	return none{}, c.leave(ctx, "undo "+in.Input.Tag+"/"+in.Input.Node, in.Input, &in.Run)
}

func (c *chaos) leave(ctx context.Context, key string, s step, undoes *uuid.UUID) error {
	info := run.FromContext(ctx)
	return worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO chaos_effect (run_id, lease_no, key, tag, node, undoes)
			VALUES ($1, $2, $3, $4, $5, $6)`, info.ID, info.LeaseNo, key, s.Tag, s.Node, undoes)
		return err
	})
}
