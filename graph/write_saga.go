package graph

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// records writes compensation records: of steps that may have to be undone, and of what was undone.
func (w *writer) records(all []*instance) {
	w.owe(all)
	var undone, failed, again, lenders []uuid.UUID
	for _, i := range all {
		if i.changes.unknown || i.lends && i.status == statusCompleted {
			w.unknown(i)
		}
		undone = append(undone, i.changes.undone...)
		for _, t := range i.changes.throws {
			w.cutOff(i, t)
		}
		for _, t := range i.changes.notUndone {
			failed = append(failed, t.id)
		}
		if i.changes.undoAgain {
			again = append(again, i.id)
		}
		if i.lends && i.status == statusCompleted {
			lenders = append(lenders, i.id)
		}
	}
	if len(undone) > 0 {
		w.do(`UPDATE compensation_record SET status = 'Completed' WHERE undo_run_id = ANY ($1) AND status = 'Pending'`, undone)
	}
	if len(failed) > 0 { // at most one record of a token is pending with a run, because a token undoes one step at a time
		w.do(`
			UPDATE compensation_record SET status = 'Failed'
			WHERE undo_run_id = ANY (ARRAY(SELECT id FROM workflow_run WHERE token_id = ANY ($1))) AND status = 'Pending'`, failed)
	}
	if len(again) > 0 { // a new record for each record that failed; the failed one does not change
		w.do(`
			INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref, certain, not_before, retry_of)
			SELECT r.instance_id, r.token_id, r.run_id, r.node_id, r.handler_ref, r.certain, r.not_before, r.id
			FROM compensation_record r
			WHERE r.instance_id = ANY ($1) AND r.status = 'Failed' AND NOT EXISTS (SELECT FROM compensation_record n WHERE n.retry_of = r.id)
			ORDER BY r."order"`, again)
	}
	if len(lenders) > 0 {
		w.do(lend, lenders, maxDepth)
	}
}

// owe inserts records of completed steps that can be undone.
func (w *writer) owe(all []*instance) {
	var owners, tokens, runs []uuid.UUID
	var nodes, undos []string
	for _, i := range all {
		for _, r := range i.changes.records {
			owners, tokens, runs = append(owners, i.id), append(tokens, r.token.id), append(runs, r.run)
			nodes, undos = append(nodes, r.node.name), append(undos, r.node.Undo)
		}
	}
	if len(owners) == 0 {
		return
	}
	w.do(`
		INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref)
		SELECT n.instance, n.token, n.run, n.node, n.undo
		FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[]) WITH ORDINALITY AS n (instance, token, run, node, undo, place)
		ORDER BY n.place`, owners, tokens, runs, nodes, undos)
}

// lend copies the records of completed instances to their callers, so that a caller can undo the steps of the instance.
// If the caller has completed, too, and lends its records as well, they are copied to the nearest caller above that
// does not.
const lend = `
	WITH RECURSIVE heir AS (
		SELECT i.id AS lender, i.parent_process_instance_id AS id, i.parent_token_id AS token, t.node AS path, 1 AS steps
		FROM process_instance i JOIN process_token t ON t.id = i.parent_token_id
		WHERE i.id = ANY ($1)
		UNION ALL
		SELECT h.lender, p.parent_process_instance_id, p.parent_token_id, t.node || '/' || h.path, h.steps + 1
		FROM heir h
		JOIN process_instance p ON p.id = h.id AND p.status = 'COMPLETED' AND p.undone_with_parent
		JOIN process_token t ON t.id = p.parent_token_id
		WHERE h.steps <= $2 -- so deep is no call: a ring would have no end
	)
	INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref, certain, not_before)
	SELECT h.id, h.token, r.run_id, h.path || '/' || r.node_id, r.handler_ref, r.certain, r.not_before
	FROM heir h
	JOIN process_instance p ON p.id = h.id AND NOT (p.status = 'COMPLETED' AND p.undone_with_parent)
	JOIN compensation_record r ON r.instance_id = h.lender
	WHERE r.status = 'Pending' OR r.status = 'Failed' AND NOT EXISTS (SELECT FROM compensation_record n WHERE n.retry_of = r.id)
	ORDER BY r."order"`

// unheard is an SQL condition: an attempt of the run r was cancelled while it was leased, or its lease expired. It may
// have taken effect although nobody recorded an outcome.
const unheard = `(r.error->>'code' = 'lease_expired'
		            OR EXISTS (SELECT FROM workflow_history h WHERE h.workflow_id = r.id
		                       AND (h.event_type = 'expired' OR h.event_type = 'cancelled' AND h.data->>'was' = 'leased')))`

// cutOff inserts records of steps that may have taken effect without a recorded outcome, whose tokens have left them,
// and that lie in the scope which the token at a throw undoes. It also covers runs of tokens that leave in this batch;
// these runs are still pending or leased, because ends cancels them later.
func (w *writer) cutOff(i *instance, thrower *token) {
	w.uncertain(i, `process_undoes($4, t.id)
		  AND (r.status IN ('failed', 'cancelled') OR t.id = ANY ($5) AND r.status IN ('pending', 'leased'))
		  AND (r.status = 'leased' OR `+unheard+`)`, thrower.id, append([]uuid.UUID{}, i.changes.gone()...))
}

// unknown inserts records of all steps of the instance that may have taken effect without a recorded outcome: steps
// that are leased now, and those that are unheard. Records whose undo step was begun are undone again.
func (w *writer) unknown(i *instance) {
	w.do(`UPDATE compensation_record SET undo_run_id = NULL WHERE instance_id = $1 AND status = 'Pending' AND undo_run_id IS NOT NULL`, i.id)
	w.uncertain(i, `(r.status = 'leased' OR r.status IN ('pending', 'failed', 'cancelled') AND `+unheard+`)`)
}

// uncertain inserts a record, marked as not certain, for each run r of a token t whose node has an undo step and for
// which condition holds, unless there is a record of the run. $4 and the parameters after it in condition are args.
func (w *writer) uncertain(i *instance, condition string, args ...any) {
	var nodes, undos []string
	for name, n := range i.process.nodes {
		if n.Undo != "" {
			nodes, undos = append(nodes, name), append(undos, n.Undo)
		}
	}
	w.do(`
		INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref, certain, not_before)
		SELECT t.instance_id, t.id, r.id, u.node, u.undo, false, r.lease_until
		FROM process_token t
		JOIN workflow_run r ON r.token_id = t.id
		JOIN unnest($2::text[], $3::text[]) AS u (node, undo) ON u.node = r.node
		WHERE t.instance_id = $1 AND `+condition+`
		  AND NOT EXISTS (SELECT FROM compensation_record c WHERE c.instance_id = t.instance_id AND c.run_id = r.id)
		ORDER BY r.started_at, r.id`, append([]any{i.id, nodes, undos}, args...)...)
}

// leasesEnd returns, for each instance that begins to compensate, when the last lease of the runs that are cut off
// ends. No undo step starts before that time, because a handler may work until its lease ends.
func (w *writer) leasesEnd(ctx context.Context, tx pgx.Tx, all []*instance) (map[uuid.UUID]time.Time, error) {
	var ids []uuid.UUID
	for _, i := range all {
		if i.changes.unknown {
			ids = append(ids, i.id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, _ := query(ctx, tx, `
		SELECT t.instance_id, max(r.lease_until)
		FROM process_token t JOIN workflow_run r ON r.token_id = t.id
		WHERE t.instance_id = ANY ($1) AND r.status = 'leased'
		GROUP BY t.instance_id`, ids)
	after := map[uuid.UUID]time.Time{}
	var id uuid.UUID
	var end time.Time
	if _, err := pgx.ForEachRow(rows, []any{&id, &end}, func() error { after[id] = end; return nil }); err != nil {
		return nil, fmt.Errorf("look for leases that are cut off: %w", err)
	}
	return after, nil
}
