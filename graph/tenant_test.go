package graph_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Every run of an instance has the tenant and the priority of the instance: steps, list elements, timers, messages and
// undo steps, and the same for the instances it calls. Handlers see the tenant.
func TestTenantAndPriority(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	worker.Handle(s.mux, "test.whose.v1", func(ctx context.Context, _ struct{}) (map[string]string, error) {
		return map[string]string{"tenant": run.FromContext(ctx).Tenant}, nil
	})
	s.worker = s.hire()
	grandchild := s.deploy("A", undoable("A", ""))
	child := s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}, "to": "S"}, "S": {"await": {"signal": "open"}}`, grandchild))
	p := s.deploy("A", undoable("A", "W")+`, "W": {"do": "test.whose.v1", "in": {}, "to": "E"}, "E": {"each": {"list": "['x', 'y']", "do": "test.step.v1"}, "to": "C"},
		"C": {"call": {"process": "`+child+`", "undo": "none"}, "to": "T"}, "T": {"wait": "1ms", "to": "M"},
		"M": {"await": {"message": "paid", "key": "'k'"}, "on": [{"after": "1h", "to": "D"}], "to": "D"}, `+step("D", "", `"fail": "'no'"`))
	for _, start := range []string{
		`(type, payload) VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'priority', 7, 'tenant', 'acme'))`,
		`(type, payload, tenant_id) VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'priority', 7), 'acme')`, // the tenant of the run is the default
	} {
		id := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run `+start+` RETURNING id`, p)
		s.waitsFor(1)
		s.enqueue("graph.signal.v1", `{"name": "open"}`)
		pgtest.Await(t, "the message to be waited for", func() bool {
			return query[int](t, s.pool, `SELECT count(*) FROM message_wait WHERE name = 'paid'`) == 1
		})
		s.enqueue("graph.message.v1", fmt.Sprintf(`{"name": "paid", "key": "k", "id": %q}`, id))
		s.status(id, graph.Failed)
		const tree = `WITH RECURSIVE tree AS (SELECT id FROM process_instance WHERE id = $1
			UNION ALL SELECT c.id FROM tree p JOIN process_instance c ON c.parent_process_instance_id = p.id) `
		if got := query[string](t, s.pool, tree+`SELECT string_agg(concat_ws(' ', tenant_id, priority), ', ') FROM tree JOIN process_instance i USING (id)`, id); got != "acme 7, acme 7, acme 7" {
			t.Errorf("the instance and what it has called have %s", got)
		}
		wrong := query[string](t, s.pool, tree+`
			SELECT coalesce(string_agg(concat_ws(' ', r.type, r.node, r.priority, r.tenant_id), ', '), '')
			FROM tree JOIN process_token t ON t.instance_id = tree.id JOIN workflow_run r ON r.token_id = t.id
			WHERE (r.priority, r.tenant_id) IS DISTINCT FROM (7, 'acme')`, id)
		if wrong != "" {
			t.Errorf("these runs have another tenant or priority: %s", wrong)
		}
		kinds := query[string](t, s.pool, tree+`
			SELECT string_agg(DISTINCT r.type, ' ' ORDER BY r.type)
			FROM tree JOIN process_token t ON t.instance_id = tree.id JOIN workflow_run r ON r.token_id = t.id`, id)
		if want := "graph.arrive.v1 graph.timer.v1 graph.undo.v1 test.step.v1 test.undo.v1 test.whose.v1"; kinds != want {
			t.Errorf("it was moved by %s, want %s", kinds, want)
		}
		if got := query[string](t, s.pool, `SELECT output->>'tenant' FROM activity_instance WHERE instance_id = $1 AND node_id = 'W'`, id); got != "acme" {
			t.Errorf("the handler has seen tenant %q", got)
		}
	}
	refused := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload)
		VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'tenant', repeat('x', 201))) RETURNING id`, p)
	if s.finished(refused); !strings.Contains(query[string](t, s.pool, `SELECT last_error FROM workflow_run WHERE id = $1`, refused), "at most 200 characters") {
		t.Error("a tenant that no step could have was not refused")
	}
	s.healthy()
}
