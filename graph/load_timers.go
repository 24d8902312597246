package graph

import (
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// askTimers queries which scopes have a boundary timer that has yet to fire. Only timers that fire a limited number of
// times need the query: the others fire for as long as the token is there.
func (s *scene) askTimers(asked *statements) {
	scopes := map[uuid.UUID]*token{}
	var ids []uuid.UUID
	for _, i := range s.instances {
		for _, t := range i.loaded {
			if t.node.kind == scope && slices.ContainsFunc(t.node.boundaries, func(h boundary) bool { return h.Error == "" && !h.endless() }) {
				scopes[t.id], ids = t, append(ids, t.id)
			}
		}
	}
	if len(ids) == 0 {
		return
	}
	asked.plan(keptPlans)
	asked.ask(func(rows pgx.Rows) error {
		var id uuid.UUID
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
			scopes[id].ticks = true
			return nil
		})
		return err
	}, `SELECT token_id FROM workflow_run WHERE token_id = ANY ($1) AND type = $2 AND finished_at IS NULL AND deleted_at IS NULL`, ids, timerType)
}
