package graph

import (
	"github.com/google/uuid"
)

// ends terminates the tokens of instances that end, including tokens that were not loaded. For each token that ended or
// left its node, it also resolves the incidents, removes the waits, cancels the runs and tasks, frees messages that were
// paired with it, and enqueues commands that cancel the called instances.
//
// Waits are deleted before runs are cancelled. Another transaction may be pairing a message with such a wait, which
// inserts a run. The delete waits for that transaction, so the run is then found and cancelled.
func (w *writer) ends(all []*instance) {
	var instances, tokens []uuid.UUID
	stays := []uuid.UUID{} // empty, not nil: id <> ALL (NULL) is true for no row
	for _, i := range all {
		if i.changes.ended || i.changes.endedBut != nil {
			instances = append(instances, i.id)
		}
		if t := i.changes.endedBut; t != nil && !i.changes.ended {
			stays = append(stays, t.id)
		}
		tokens = append(tokens, i.changes.gone()...)
	}
	if len(w.resolved) > 0 { // first, because a retried token may leave its node, which also resolves its incidents
		w.resolve(`x.id = ANY ($1)`, asker(retryType, `r.result->>'incident' = x.id::text`), w.resolved)
	}
	if len(instances)+len(tokens) == 0 {
		return
	}
	if len(instances) > 0 {
		w.do(`
			UPDATE process_token
			SET state = 'Terminated', version = version + 1, updated_at = statement_timestamp()
			WHERE instance_id = ANY ($1) AND state IN ('Created', 'Ready', 'Waiting') AND id <> ALL ($2)`, instances, stays)
		w.resolve(`x.instance_id = ANY ($1)`, `'the end of the instance'`, instances)
	}
	if len(tokens) > 0 {
		w.resolve(`x.token_id = ANY ($1)`, `'its token has moved on'`, tokens)
	}
	w.carrier.Leave()
	gone := `(SELECT id FROM process_token WHERE instance_id = ANY ($1) OR id = ANY ($2))`
	w.do(`
		DELETE FROM message_wait w USING process_token t
		WHERE (w.instance_id = ANY ($1) OR w.token_id = ANY ($2)) AND t.id = w.token_id AND t.instance_id = w.instance_id -- both ends agree`, instances, tokens)
	w.do(`
		UPDATE workflow_run
		SET status = 'cancelled', finished_at = statement_timestamp(), updated_at = clock_timestamp(), suspect = false,
		    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, last_error = 'cancelled: its token has moved on'
		WHERE id = ANY (ARRAY(SELECT id FROM workflow_run WHERE token_id IN `+gone+` AND status IN ('pending', 'leased') ORDER BY id))
		  AND status IN ('pending', 'leased')`, instances, tokens)
	w.do(`
		UPDATE compensation_record c SET undo_run_id = NULL
		FROM workflow_run r
		WHERE c.instance_id = ANY ($1) AND c.status = 'Pending' AND r.id = c.undo_run_id AND r.status = 'cancelled'`, instances)
	w.do(`
		WITH freed AS (
			UPDATE message SET token_id = NULL
			WHERE token_id IN `+gone+` AND consumed_at IS NULL AND id <> ALL ($3)
			RETURNING name, key
		)
		INSERT INTO workflow_run (type, payload, max_attempts) SELECT DISTINCT $4, jsonb_build_object('name', name, 'key', key), 1000 FROM freed`,
		instances, tokens, append([]uuid.UUID{}, w.consumed...), matchType)
	w.do(`
		UPDATE user_task SET state = 'cancelled', version = version + 1
		WHERE (token_id, instance_id) IN (SELECT id, instance_id FROM process_token WHERE instance_id = ANY ($1) OR id = ANY ($2)) AND state = 'open'`, instances, tokens)
	w.do(`
		INSERT INTO workflow_run (type, payload, tenant_id, metadata, max_attempts)
		SELECT $3, jsonb_build_object('instance', c.id, 'reason', $4::text)
		           || CASE WHEN c.undone_with_parent AND p.status <> 'CANCELLED' THEN '{"compensate": true}' ELSE '{}' END::jsonb, c.tenant_id, process_trace(c.metadata), 1000
		FROM process_instance c JOIN process_instance p ON p.id = c.parent_process_instance_id
		WHERE c.parent_token_id IN `+gone+` AND c.completed_at IS NULL`, instances, tokens, cancelType, abandoned)
}
