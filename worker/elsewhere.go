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

// Token returns the token that run.Complete and workflow_complete ask for, if the handler with this context
// hands its run on (run.ErrElsewhere). The token belongs to this start of this run. It is a secret: anyone who
// has it can settle the run. Pass it to the system that does the work, and keep it out of logs. Token returns
// ErrNoRun outside of a handler.
func Token(ctx context.Context) (string, error) {
	x, err := extrasOf(ctx)
	if err != nil {
		return "", err
	}
	return handed(x.lease.ID, x.lease.Token).String(), nil
}

// handed derives the token for an outside system from the run's id and the token of the lease, as
// workflow_handed does. The token of the lease is kept secret because other runs leased at the same time share
// it: with it one could settle them too.
func handed(run, token uuid.UUID) (made uuid.UUID) {
	sum := sha256.Sum256(append(token[:], run[:]...))
	copy(made[:], sum[:])
	return made
}

// handsOn reports whether err hands the run on. It reports false if err panics when it is unwrapped.
func handsOn(err error) (on bool) {
	defer func() { _ = recover() }()
	_, on = run.IsElsewhere(err)
	return on
}

// handOn records that the run is executed elsewhere from now on. The run stays leased, but this worker neither holds nor
// extends the lease. The run ends in one of three ways. workflow_complete stores an outcome in workflow_kept, and any
// worker settles it (settleKept). Or the time limit passes, and the lease is taken back as after a crash. Or the run is
// cancelled.
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

// saidElsewhere returns the error that was reported through run.Complete or workflow_complete.
func saidElsewhere(text json.RawMessage) error {
	var said told.Told
	if json.Unmarshal(text, &said) != nil { // cannot happen: workflow_complete has checked it
		said = told.Told{}
	}
	return said.Apply(errors.New(cmp.Or(said.Message, "failed elsewhere")), false, false)
}

// countElsewhere reports to Observe how many runs of this worker's prefixes are executed elsewhere.
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
