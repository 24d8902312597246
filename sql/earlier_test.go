package sql_test

import (
	"strings"
	"testing"
)

// A worker of an earlier version works beside new ones, although it does not say that it is at work when it starts an
// instance, stores a message, or has written history in the statement that settles. Writes that do not belong to
// something it has settled are refused.
func TestEarlierWorkers(t *testing.T) {
	g := withRoles(t)
	g.do(`INSERT INTO process_definition (id, definition) VALUES ('` + nobody + `', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}')`)
	const settle = `UPDATE workflow_run SET status = 'succeeded', result = '{}', finished_at = statement_timestamp(), settled_token = lease_token, settled_by = 'w', updated_at = statement_timestamp(),
		lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL WHERE id = '$'`
	writes := []string{
		`INSERT INTO process_instance (process_definition_id, business_key) VALUES ('` + nobody + `', 'k')`,
		`INSERT INTO message (id, message_id, name, key, payload, expires_at) VALUES ('` + nobody + `', 'm', 'm', 'k', '{}', now())`,
	}
	for _, s := range []*session{g.session, g.as("engine")} {
		for _, write := range writes {
			if err := s.undone(write); err == nil {
				t.Errorf("done although nothing was settled: %s", write)
			}
			id := s.do(`INSERT INTO workflow_run (type) VALUES ('graph.start.v1') RETURNING id`)
			s.lease(id)
			// No start is enqueued for the instance that it has started.
			if err := s.undone(strings.ReplaceAll(settle, "$", id) + `; ` + write + `; SELECT 1 / (NOT EXISTS (SELECT FROM workflow_run r JOIN process_instance i USING (id)))::int`); err != nil {
				t.Errorf("%s: %v", write, err)
			}
		}
		id := s.do(`INSERT INTO workflow_run (type) VALUES ('a.b') RETURNING id`)
		s.lease(id)
		for set, want := range map[string]bool{`WHERE id = '` + id + `'`: true, `WHERE false`: false} {
			err := s.undone(`WITH u AS (UPDATE workflow_run SET status = 'pending', run_at = now(), lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, updated_at = statement_timestamp() ` + set + ` RETURNING id)
				INSERT INTO workflow_history (workflow_id, event_type) SELECT '` + id + `', 'retried' FROM (SELECT count(*) FROM u) AS x`)
			if (err == nil) != want {
				t.Errorf("history of what was changed %s: %v", set, err)
			}
		}
	}
}
