package graph_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
)

// Each view of the invariants reports the faults it is made for, on a database where nothing else is wrong.
func TestInvariants(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "M"}, "M": {"await": {"message": "paid", "key": "input.order"}, "to": "X"},
		"X": {"choose": [{"if": "input.fail", "to": "D"}], "else": "C"},`+
		undoable("A", "J")+","+undoable("B", "J")+","+step("C", "")+","+step("D", "", `"fail": "'no'"`))
	done := s.start(p, `{"order": 1, "fail": false}`)
	failed := s.start(p, `{"order": 2, "fail": true}`)
	open := s.start(p, `{"order": 3, "fail": false}`)
	timed := s.start(s.deploy("F", `"F": {"fork": ["R", "W", "U"]}, "R": {"race": ["T", "G"]}, "T": {"wait": "P1D", "to": "E"}, "G": {"await": {"signal": "go"}, "to": "E"},
		"W": {"wait": "P1D", "to": "E"}, "U": {"human": {}, "on": [{"after": "P1D", "to": "E"}], "to": "E"}, "E": {"end": true}`), `{}`)
	chain := s.start(s.deploy("A1", step("A1", "A2")+","+step("A2", "A3")+","+step("A3", "")), `{}`)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "2"}`)
	s.status(done, graph.Completed)
	s.status(chain, graph.Completed)
	s.status(failed, graph.Failed)
	s.waitsFor(2)
	s.status(timed, graph.Waiting)
	s.worker.release()
	s.healthy()
	seen := map[string]bool{}
	for _, c := range []struct{ view, plant string }{
		{"process_without_mover", fmt.Sprintf(`DELETE FROM message_wait WHERE instance_id = '%s'`, open)},
		{"process_without_mover", fmt.Sprintf(`DELETE FROM message_wait WHERE instance_id = '%s'`, timed) + `; ` + untimed("R", timed)},
		{"process_without_mover", untimed("W", timed)},
		{"process_without_mover", fmt.Sprintf(`UPDATE process_token SET state = 'Ready' WHERE instance_id = '%s'`, open)},
		{"process_untimed", untimed("R", timed)},
		{"process_untimed", untimed("W", timed)},
		{"process_untimed", untimed("U", timed)},
		{"process_miscounted", fmt.Sprintf(`UPDATE process_instance SET live_tokens = 2 WHERE id = '%s'`, open)},
		{"process_miscounted", fmt.Sprintf(`UPDATE process_instance SET ready_tokens = 1 WHERE id = '%s'`, open)},
		{"process_miscounted", fmt.Sprintf(`UPDATE process_instance SET open_incidents = 1 WHERE id = '%s'`, open)},
		{"process_miscounted", fmt.Sprintf(`UPDATE parallel_group SET live = 1 WHERE instance_id = '%s'`, open)},
		{"process_undead", fmt.Sprintf(`UPDATE process_token SET state = 'Waiting' WHERE instance_id = '%s' AND node = 'C'`, done)},
		{"process_undead", fmt.Sprintf(`UPDATE process_instance SET completed_at = completed_at - interval '1 hour' WHERE id = '%s'`, done)},
		{"process_undead", fmt.Sprintf(`INSERT INTO workflow_run (type, token_id) SELECT 'test.step.v1', id FROM process_token WHERE instance_id = '%s' LIMIT 1`, done)},
		{"process_undead", fmt.Sprintf(`INSERT INTO user_task (instance_id, token_id, node, payload) SELECT instance_id, id, node, '{}' FROM process_token WHERE instance_id = '%s' LIMIT 1`, done)},
		{"process_undead", fmt.Sprintf(`UPDATE message_wait SET token_id = (SELECT id FROM process_token WHERE instance_id = '%s' LIMIT 1)`, done)},
		{"process_misjoined", fmt.Sprintf(`UPDATE parallel_join SET fired = false WHERE instance_id = '%s'`, done)},
		{"process_misjoined", fmt.Sprintf(`DELETE FROM join_arrival WHERE edge = 'A>J' AND join_id = (SELECT id FROM parallel_join WHERE instance_id = '%s')`, done)},
		{"process_misjoined", fmt.Sprintf(`UPDATE join_arrival SET edge = 'A>J' WHERE join_id = (SELECT id FROM parallel_join WHERE instance_id = '%s')`, done)},
		{"process_misjoined", fmt.Sprintf(`INSERT INTO process_event (instance_id, event_type, node, version) VALUES ('%s', 'join.fired', 'J', 3)`, done)},
		{"process_misundone", fmt.Sprintf(`DELETE FROM compensation_record WHERE instance_id = '%s' AND node_id = 'A'`, done)},
		{"process_misundone", fmt.Sprintf(`UPDATE compensation_record SET status = 'Pending' WHERE instance_id = '%s' AND node_id = 'A'`, failed)},
		{"process_misundone", fmt.Sprintf(`INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref, status, retry_of)
			SELECT instance_id, token_id, run_id, node_id, handler_ref, status, id FROM compensation_record WHERE instance_id = '%s'`, failed)},
		{"process_misundone", fmt.Sprintf(`UPDATE compensation_record c SET undo_run_id = o.undo_run_id FROM compensation_record o
			WHERE c.instance_id = '%s' AND o.instance_id = c.instance_id AND o.id <> c.id`, failed)},
		{"process_unearned", fmt.Sprintf(`INSERT INTO process_event (instance_id, token_id, event_type, node, version)
			SELECT i.id, t.id, 'node.completed', t.node, i.version FROM process_instance i JOIN process_token t ON t.instance_id = i.id CROSS JOIN generate_series(1, 2)
			WHERE i.id = '%s' AND t.node = 'C'`, done)},
		{"process_unearned", fmt.Sprintf(`UPDATE workflow_run r SET status = 'pending', finished_at = NULL FROM process_token t WHERE t.instance_id = '%s' AND r.token_id = t.id AND r.node = 'A'`, done)},
		{"process_unearned", fmt.Sprintf(`UPDATE workflow_run r SET finished_at = now() FROM process_token t WHERE t.instance_id = '%s' AND r.token_id = t.id AND r.node = 'A'`, done)},
		{"process_unearned", fmt.Sprintf(`UPDATE workflow_run r SET finished_at = now() FROM process_token t WHERE t.instance_id = '%s' AND r.token_id = t.id AND r.node = 'A1'`, chain)},
		{"process_mismatched", `UPDATE message SET consumed_at = NULL WHERE key = '1'`},
		{"process_mismatched", `UPDATE message SET key = '3', token_id = NULL, consumed_at = NULL WHERE key = '1'`},
		{"process_mismatched", fmt.Sprintf(`UPDATE message SET token_id = (SELECT token_id FROM message_wait WHERE instance_id = '%s') WHERE key = '1'`, open)},
		{"process_misrecorded", fmt.Sprintf(`DELETE FROM process_state_history WHERE instance_id = '%s' AND to_status = 'COMPLETED'`, done)},
		{"process_misrecorded", fmt.Sprintf(`DELETE FROM process_state_history WHERE instance_id = '%s'`, open)},
		{"process_misrecorded", fmt.Sprintf(`UPDATE process_state_history SET from_status = 'FAILED' WHERE instance_id = '%s' AND to_status = 'COMPLETED'`, done)},
		{"process_misrecorded", fmt.Sprintf(`UPDATE process_event SET version = 1000 WHERE instance_id = '%s' AND event_type = 'node.entered'`, open)},
		{"process_misrecorded", fmt.Sprintf(`UPDATE process_token SET version = 2 WHERE instance_id = '%s' AND node = 'A3'`, chain)},
		{"process_misrecorded", fmt.Sprintf(`UPDATE process_event SET version = 1 WHERE id = (SELECT max(id) FROM process_event WHERE instance_id = '%s')`, done)},
		{"process_misrecorded", fmt.Sprintf(`UPDATE process_state_history SET version = 1000 WHERE instance_id = '%s'`, done)},
	} {
		seen[c.view] = true
		undo := errors.New("undo")
		err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SET LOCAL workflow.advance = 'on'; SET LOCAL workflow.override = 'a test plants it'`); err != nil {
				return err
			}
			if tag, err := tx.Exec(t.Context(), c.plant); err != nil || tag.RowsAffected() == 0 {
				return fmt.Errorf("nothing was planted: %w", err)
			}
			var n int
			if err := tx.QueryRow(t.Context(), "SELECT count(*) FROM "+c.view).Scan(&n); err != nil {
				return err
			}
			if n == 0 {
				t.Errorf("%s does not see it: %s", c.view, c.plant)
			}
			return undo
		})
		if !errors.Is(err, undo) {
			t.Errorf("%s: %v", c.plant, err)
		}
	}
	for _, view := range invariants {
		if !seen[view] {
			t.Errorf("nothing is planted for %s", view)
		}
	}
}

// untimed returns a statement that cancels the timer of a node's token.
func untimed(node string, instance uuid.UUID) string {
	return fmt.Sprintf(`UPDATE workflow_run SET status = 'cancelled', last_error = 'cancelled: its token has moved on'
		WHERE type = 'graph.timer.v1' AND token_id = (SELECT id FROM process_token WHERE instance_id = '%s' AND node = '%s')`, instance, node)
}
