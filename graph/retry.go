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
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// backoff returns the pauses between the attempts of a step: those of its node, and what that leaves out as own has it. Of
// runs that are no step, or undo one, it is own.
func (e *Engine) backoff(ctx context.Context, l *leasing.Lease, own run.Backoff) (run.Backoff, error) {
	if l.Step == uuid.Nil || strings.HasPrefix(l.Type, Prefix) {
		return own, nil
	}
	var id uuid.UUID
	var name string
	err := e.pool.QueryRow(ctx, `
		SELECT i.process_definition_id, coalesce(r.node, '')
		FROM workflow_run r JOIN process_token t ON t.id = r.token_id JOIN process_instance i ON i.id = t.instance_id
		WHERE r.id = $1`, unprepared, l.ID).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) {
		return own, nil // it is nobody's any more
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
