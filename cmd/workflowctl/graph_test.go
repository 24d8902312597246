package main_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// graph prints a file as Mermaid, and nothing else.
func TestGraphFile(t *testing.T) {
	t.Parallel()
	p, code := cmdtest.Run(t, nil, "graph", save(t, "order.json", orderJSON))
	const picture = `flowchart TD
  n1(( ))
  n2["pay<br/>billing.charge.v1"]
  n3{"size<br/>choose"}
  n4(("paid<br/>end"))
  n1 --> n2
  n2 --> n3
  n3 -->|"input.n #62; 1"| n2
  n3 -->|"input.n == 1"| n4
`
	if got := p.Stdout.String(); code != 0 || got != picture {
		t.Errorf("exit code %d, picture\n%s", code, got)
	}
	want(t, cmdtest.Start(t, nil, "graph", save(t, "typo.json", `{"proces": "typo"}`)), 1, "/proces: UNKNOWN_KEY: there is no such key")
}

// For an instance, graph shows visits, live tokens with their state, and open incidents.
func TestGraphInstance(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "define", save(t, "p.json", `{"process": "p", "version": 1, "start": "a", "nodes": {
		"a": {"do": "x.a", "to": "f"}, "f": {"fork": ["b", "w", "x"]}, "b": {"do": "x.b"}, "w": {"wait": "PT1H"},
		"x": {"choose": [{"if": "input.n > 1", "to": "b"}]}}}`)), 0, "p version 1 is deployed")
	const instance = "01890a5d-ac96-774b-bcce-b302099a8057"
	// One token passed a twice and is done; others are at b, w and x.
	conn := connect(t, url)
	if _, err := conn.Exec(t.Context(), `SET session_replication_role = replica`); err != nil { // ended runs can be inserted as well
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `
		WITH instance AS (
			INSERT INTO process_instance (id, process_definition_id, status, live_tokens)
			SELECT $1, id, 'WAITING', 3
			FROM process_definition
			RETURNING id
		), place (token, node, state) AS (
			VALUES (workflow_uuid(), 'f', 'Completed'), (workflow_uuid(), 'b', 'Ready'),
			       (workflow_uuid(), 'w', 'Waiting'), (workflow_uuid(), 'x', 'Waiting')
		), tokens AS (
			INSERT INTO process_token (id, instance_id, node, state)
			SELECT token, id, node, state
			FROM place, instance
		), incidents AS (
			INSERT INTO incident (instance_id, token_id, node, code, message)
			SELECT id, token, node, 'no_branch_taken', ''
			FROM place, instance
			WHERE node = 'x'
		)
		INSERT INTO workflow_run (type, token_id, node, status, finished_at)
		SELECT v.type, p.token, v.visited, CASE p.node WHEN 'f' THEN 'succeeded' ELSE 'pending' END, CASE p.node WHEN 'f' THEN now() END
		FROM place p
		JOIN (VALUES ('f', 'a', 'x.a'), ('f', 'a', 'x.a'), ('b', 'b', 'x.b'), ('w', 'w', 'graph.timer.v1')) v (node, visited, type)
		  ON v.node = p.node`, instance); err != nil {
		t.Fatal(err)
	}
	p, code := cmdtest.Run(t, env, "graph", "--instance", instance)
	for _, line := range []string{
		`n2["a<br/>x.a<br/>2 visits, succeeded"]`, `n3[/"f<br/>fork"\]`, `n4["b<br/>x.b<br/>1 visit, 1 live, Ready"]`,
		`n5("w<br/>wait PT1H<br/>1 visit, 1 live, Waiting")`, `n6{"x<br/>choose<br/>1 live, Incident"}`, `class n4,n5 live`, `class n6 failed`, `class n2 visited`,
	} {
		if got := p.Stdout.String(); code != 0 || !strings.Contains(got, "  "+line+"\n") {
			t.Errorf("exit code %d, no line %s in\n%s", code, line, got)
		}
	}
	want(t, cmdtest.Start(t, env, "graph", "--instance", "01890a5d-0000-774b-bcce-b302099a8057"), 1, "there is no instance 01890a5d-0000")
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + pgtest.Empty(t)}, "graph", "--instance", instance), 1, "run: workflowctl migrate up")
}
