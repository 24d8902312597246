package worker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/internal/told"
	"github.com/simple-workflow/simple-workflow/run"
)

// Token returns what run.Complete and workflow_complete ask for, if the handler with this context hands its run on (run.ErrElsewhere). It is
// of this start of this run alone, and a secret: whoever has it says what becomes of the run. Pass it on to who does the work, and keep it out of logs.
// Token returns ErrNoRun as InSettle does.
func Token(ctx context.Context) (string, error) {
	x, err := extrasOf(ctx)
	if err != nil {
		return "", err
	}
	return handed(x.lease.ID, x.lease.Token).String(), nil
}

// handed makes a token for others of a lease's own, as workflow_handed does: with that, which other runs have, too, a worker could settle them.
func handed(run, token uuid.UUID) (made uuid.UUID) {
	sum := sha256.Sum256(append(token[:], run[:]...))
	copy(made[:], sum[:])
	return made
}

// handsOn reports whether err hands a run on. One that cannot be asked does not.
func handsOn(err error) (on bool) {
	defer func() { _ = recover() }()
	_, on = run.IsElsewhere(err)
	return on
}

// handOn records that a run goes on elsewhere.
func (w *Worker) handOn(ctx context.Context, j *job) (lost []settling.Outcome, err error) {
	ctx, done := context.WithTimeout(ctx, min(settleTimeout, j.Length/3))
	defer done()
	ours, err := leasing.HandOn(ctx, w.db, j.ID, j.Token, j.outcome.Delay)
	if err == nil && !ours {
		lost = []settling.Outcome{j.outcome}
	} else if err == nil {
		w.hasWritten(ctx)
	}
	return lost, err
}

// saidElsewhere is an error that whoever completes a run has told of.
func saidElsewhere(text json.RawMessage) error {
	var said told.Told
	if json.Unmarshal(text, &said) != nil { // workflow_complete has looked at it
		said = told.Told{}
	}
	return said.Apply(errors.New(cmp.Or(said.Message, "failed elsewhere")), false, false)
}

// countElsewhere tells how many runs of this worker's prefixes go on elsewhere.
func (w *Worker) countElsewhere(ctx context.Context) error {
	if w.config.Observe.Elsewhere == nil {
		return nil
	}
	n, err := leasing.Elsewhere(ctx, w.db, w.config.Prefixes)
	if err == nil {
		w.config.Observe.Elsewhere(n)
	}
	return err
}
