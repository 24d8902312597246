package graph_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// An INSERT into process_instance starts an instance: with a definition alone, with the status CREATED and input,
// metadata and version, with an id, a tenant and a priority, or with many rows at once. Each instance is started
// exactly once, with its tenant and priority, and completes like one that a run started.
func TestInsertStarts(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "", `"n": "has(input.n) ? input.n : 0"`))
	id := uuid.New()
	for _, insert := range []string{
		`INSERT INTO process_instance (process_definition_id) SELECT id FROM process_definition WHERE name = $1`,
		`INSERT INTO process_instance (process_definition_id, status, input_payload, metadata, version)
			SELECT id, 'CREATED', '{"customerId": "cust_123", "n": 99.99}', '{"correlationId": "web_request_456", "source": "web-checkout"}', 1 FROM process_definition WHERE name = $1`,
		`INSERT INTO process_instance (id, process_definition_id, tenant_id, priority, input_payload) SELECT '` + id.String() + `', id, 'acme', 7, '{"n": 5}' FROM process_definition WHERE name = $1`,
		`INSERT INTO process_instance (process_definition_id, input_payload) SELECT id, jsonb_build_object('n', n) FROM process_definition, generate_series(1, 20) n WHERE name = $1`,
	} {
		if _, err := s.pool.Exec(t.Context(), insert, p); err != nil {
			t.Fatalf("%s: %v", insert, err)
		}
	}
	s.completed(23)
	for what, c := range map[string]struct{ sql, want string }{
		"steps": {`SELECT string_agg(n || '×' || c, ' ') FROM (SELECT r.payload->>'n' AS n, count(*) AS c FROM workflow_run r WHERE r.token_id IS NOT NULL GROUP BY 1 ORDER BY r.payload->>'n') x`,
			"0×1 1×1 10×1 11×1 12×1 13×1 14×1 15×1 16×1 17×1 18×1 19×1 2×1 20×1 3×1 4×1 5×2 6×1 7×1 8×1 9×1 99.99×1"},
		"tenant and priority": {`SELECT string_agg(DISTINCT concat_ws(' ', r.type, r.tenant_id, r.priority), ', ') FROM workflow_run r WHERE r.tenant_id IS NOT NULL`, "graph.start.v1 acme 7, test.step.v1 acme 7"},
		"starts":              {`SELECT concat_ws(' ', count(*), count(*) FILTER (WHERE r.id = i.id AND r.status = 'succeeded' AND r.attempt = 1)) FROM workflow_run r LEFT JOIN process_instance i USING (id) WHERE r.type = 'graph.start.v1'`, "23 23"},
		"history":             {`SELECT string_agg(DISTINCT x.h, '; ') FROM (SELECT string_agg(from_status || ' to ' || to_status, ', ' ORDER BY id) AS h FROM process_state_history GROUP BY instance_id) x`, "CREATED to IN_PROGRESS, IN_PROGRESS to COMPLETED"},
		"metadata":            {`SELECT metadata->>'source' FROM process_instance WHERE metadata <> '{}'`, "web-checkout"},
	} {
		if got := query[string](t, s.pool, c.sql); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
	}
	s.healthy()
}

// An inserted instance can be paused, cancelled, or started by a run with its id, before its own start is executed. Its
// own start then changes nothing, and no instance is started twice. Until it is started, process_why names the run that
// will start it, and process_without_mover does not list it unless that run is cancelled.
func TestInsertedBeforeItStarts(t *testing.T) {
	s := newEmptySite(t)
	p := s.deploy("A", step("A", ""))
	insert := func() uuid.UUID {
		return query[uuid.UUID](t, s.pool, `INSERT INTO process_instance (process_definition_id, input_payload) SELECT id, '{"n": 1}' FROM process_definition WHERE name = $1 RETURNING id`, p)
	}
	paused, cancelled, twice, lost := insert(), insert(), insert(), insert()
	s.pause(paused)
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, cancelled))
	again := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "id": %q, "input": {"n": 1}}`, p, twice))
	other := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "id": %q, "input": {"n": 2}}`, p, twice))
	if got := query[string](t, s.pool, `SELECT process_why($1)`, twice); !strings.HasPrefix(got, "about to be started: ") {
		t.Errorf("process_why says %q", got)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_without_mover`); n != 0 {
		t.Errorf("%d instances have nothing that moves them", n)
	}
	query[string](t, s.pool, `SELECT workflow_cancel($1, 'a test')`, lost)
	if got := query[string](t, s.pool, `SELECT process_why($1)`, lost); !strings.Contains(got, "cancelled or gone") || !strings.Contains(got, lost.String()) {
		t.Errorf("process_why says %q of one whose start is cancelled", got)
	}
	if got := query[uuid.UUID](t, s.pool, `SELECT instance_id FROM process_without_mover`); got != lost {
		t.Errorf("%s has nothing that moves it", got)
	}
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, lost))
	ended := make(chan struct{})
	s.happens = func(string, int) { <-ended } // or the step of the cancelled one may succeed before the cancel comes
	s.hire()
	s.status(cancelled, graph.Cancelled)
	s.status(lost, graph.Cancelled)
	close(ended)
	s.status(twice, graph.Completed)
	if got := s.outcome(again); got != "succeeded v1" {
		t.Errorf("the start with its id: %s", got)
	}
	if got := s.outcome(other); !strings.Contains(got, "failed conflict") {
		t.Errorf("the start with its id and another input: %s", got)
	}
	pgtest.Await(t, "the paused one to be started", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_token k JOIN workflow_run r ON r.token_id = k.id WHERE k.instance_id = $1 AND r.held_at IS NOT NULL`, paused) == 1
	})
	s.resume(paused)
	s.status(paused, graph.Completed)
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.step.v1' AND status = 'succeeded'`); n != 2 {
		t.Errorf("%d steps, want 2", n)
	}
	s.healthy()
}

// An INSERT into process_instance is refused if it sets a column that only the engine sets, or a key, or a value that a
// start by a run would be refused for. The error names the column and has a hint, and the whole transaction stores and
// starts nothing.
func TestInsertRefused(t *testing.T) {
	pool := pgtest.New(t)
	pgtest.ByHand(t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "e", "nodes": {"e": {"end": true}}}')`)
	values := map[string]string{
		"business_key": `'k'`, "tenant_id": `repeat('x', 201)`, "priority": `101`, "input_payload": `'[1]'`, "process_definition_id": `'00000000-0000-4000-8000-000000000001'`,
		"status": `'IN_PROGRESS'`, "parent_process_instance_id": `gen_random_uuid()`, "parent_token_id": `gen_random_uuid()`, "parent_visit": `1`, "depth": `1`, "undone_with_parent": `true`,
		"output_payload": `'{}'`, "failure_reason": `'x'`, "version": `2`, "live_tokens": `1`, "ready_tokens": `1`, "joining_tokens": `1`, "open_incidents": `1`, "ending": `'x'`, "ending_reason": `'x'`,
		"created_at": `now() - interval '1 hour'`, "updated_at": `now() - interval '1 hour'`, "started_at": `now()`, "completed_at": `now()`, "paused_at": `now()`, "deleted_at": `now()`, "corrected": `true`,
	}
	rows, _ := pool.Query(t.Context(), `SELECT attname FROM pg_attribute WHERE attrelid = 'process_instance'::regclass AND attnum > 0 AND NOT attisdropped`)
	var column string
	var columns []string
	for rows.Next() {
		if err := rows.Scan(&column); err != nil {
			t.Fatal(err)
		}
		columns = append(columns, column)
	}
	var refused *pgconn.PgError
	for _, column := range columns {
		if column == "id" || column == "metadata" {
			continue
		}
		value, ok := values[column]
		if !ok {
			t.Errorf("say what a value of %s is that cannot be inserted", column)
			continue
		}
		sql := fmt.Sprintf(`INSERT INTO process_instance (process_definition_id) SELECT id FROM process_definition, generate_series(1, 8); INSERT INTO process_instance (process_definition_id, %s) SELECT id, %s FROM process_definition`, column, value)
		if column == "process_definition_id" {
			sql = `INSERT INTO process_instance (process_definition_id) SELECT CASE n WHEN 9 THEN ` + value + ` ELSE d.id END FROM process_definition d, generate_series(1, 9) n`
		}
		_, err := pool.Exec(t.Context(), sql)
		if err == nil || !strings.Contains(err.Error(), "process_instance: "+column+" ") || !errors.As(err, &refused) || refused.Hint == "" {
			t.Errorf("%s: %v", column, err)
		}
	}
	if n := query[int](t, pool, `SELECT (SELECT count(*) FROM process_instance) + (SELECT count(*) FROM workflow_run)`); n != 0 {
		t.Errorf("%d rows are there", n)
	}
	for what, sql := range map[string]string{
		"a large input": `INSERT INTO process_instance (process_definition_id, input_payload) SELECT id, jsonb_build_object('x', repeat('x', 261000)) FROM process_definition`,
		"another with the id of a run": `INSERT INTO workflow_run (id, type) VALUES ('00000000-0000-4000-8000-000000000001', 'a.b');
			INSERT INTO process_instance (id, process_definition_id) SELECT '00000000-0000-4000-8000-000000000001', id FROM process_definition`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "process_instance: i") {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The largest input that is accepted fits into the payload of the start.
	if _, err := pool.Exec(t.Context(), `INSERT INTO process_instance (process_definition_id, input_payload) SELECT id, jsonb_build_object('x', repeat('x', 260989)) FROM process_definition`); err != nil {
		t.Errorf("the largest: %v", err)
	}
	// A role that may only insert cannot bypass this by setting workflow.advance in the same statement.
	if _, err := pool.Exec(t.Context(), `BEGIN; CREATE ROLE test_inserts; GRANT SELECT ON process_definition TO test_inserts; GRANT INSERT, SELECT ON process_instance TO test_inserts; SET ROLE test_inserts;
		INSERT INTO process_instance (id, process_definition_id, status) SELECT gen_random_uuid(), id, CASE WHEN set_config('workflow.advance', 'on', true) <> '' THEN 'COMPLETED' END FROM process_definition; COMMIT`); err == nil || !strings.Contains(err.Error(), "process_instance: status is") {
		t.Errorf("one that says that it is the engine: %v", err)
	}
	// An instance that the owner inserts with workflow.override is not started.
	pgtest.ByHand(t, pool, `INSERT INTO process_instance (process_definition_id, business_key) SELECT id, 'by hand' FROM process_definition`)
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run`); n != 1 {
		t.Errorf("%d runs, want 1", n)
	}
}

// Each change of an instance that people may make by hand, or that the owner makes with workflow.override, increments
// version by one and sets updated_at. An UPDATE that changes nothing does not.
func TestVersionMovesByHand(t *testing.T) {
	pool := pgtest.New(t)
	pgtest.ByHand(t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "e", "nodes": {"e": {"end": true}}}')`)
	pgtest.ByHand(t, pool, `INSERT INTO process_instance (process_definition_id, updated_at) SELECT id, now() - interval '1 day' FROM process_definition`)
	for k, set := range []string{"priority = 3", "business_key = 'k'", `metadata = '{"a": 1}'`, "business_key = NULL, priority = 4"} {
		if _, err := pool.Exec(t.Context(), `UPDATE process_instance SET `+set); err != nil {
			t.Fatal(err)
		}
		if got, want := query[string](t, pool, `SELECT version || ' ' || (updated_at > now() - interval '1 hour') FROM process_instance`), fmt.Sprintf("%d true", k+2); got != want {
			t.Errorf("after %s: version, and whether updated_at is new: %s, want %s", set, got, want)
		}
		pgtest.ByHand(t, pool, `UPDATE process_instance SET updated_at = now() - interval '1 day', version = version`)
		pgtest.ByHand(t, pool, `UPDATE process_instance SET version = $1, updated_at = now() - interval '1 day'`, k+2)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE process_instance SET priority = priority`); err != nil {
		t.Fatal(err)
	}
	pgtest.ByHand(t, pool, `UPDATE process_instance SET status = 'CANCELLED', completed_at = now()`)
	if got := query[string](t, pool, `SELECT version || ' ' || (updated_at > now() - interval '1 hour') FROM process_instance`); got != "6 true" {
		t.Errorf("after the owner's change: %s, want 6 true", got)
	}
}
