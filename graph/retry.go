package graph

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// backoff returns the backoff of a step, taken from "retry" of its node; a value that the node leaves out is taken from
// own. For runs that are not steps, for undo steps and for steps of nodes without "retry" it returns own.
func (e *Engine) backoff(ctx context.Context, l *leasing.Lease, own run.Backoff) (run.Backoff, error) {
	if l.Step == uuid.Nil || strings.HasPrefix(l.Type, naming.Engine) {
		return own, nil
	}
	var id uuid.UUID
	var name string
	err := e.pool.QueryRow(ctx, `
		SELECT i.process_definition_id, coalesce(r.node, '')
		FROM workflow_run r JOIN process_token t ON t.id = r.token_id JOIN process_instance i ON i.id = t.instance_id
		WHERE r.id = $1`, unprepared, l.ID).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) {
		return own, nil // its instance was deleted
	}
	if err != nil {
		return own, fmt.Errorf("find the node of a step: %w", err)
	}
	all, err := e.processes(ctx, e.pool, []uuid.UUID{id})
	if err != nil {
		return own, err
	}
	n := all[id].nodes[strings.TrimSuffix(name, "/item")]
	if n == nil || n.Retry == nil {
		return own, nil
	}
	return lease.Policy{Base: time.Duration(n.Retry.Base), Cap: time.Duration(n.Retry.Cap)}.Backoff(own), nil
}
