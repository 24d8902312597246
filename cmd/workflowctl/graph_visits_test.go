package main_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// graph also shows visits of nodes that have no run of their own, such as user tasks.
func TestGraphOfTasks(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "define", save(t, "p.json", `{"process": "p", "version": 1, "start": "ask", "nodes": {
		"ask": {"human": {}, "to": "in"}, "in": {"scope": {"start": "wait", "nodes": {"wait": {"await": {"signal": "go"}}}}}}}`)), 0, "p version 1 is deployed")
	const instance = "01890a5d-ac96-774b-bcce-b302099a8057"
	pgtest.ByHand(t, connect(t, url), `
		WITH instance AS (
			INSERT INTO process_instance (id, process_definition_id, status, live_tokens) SELECT $1, id, 'WAITING', 2 FROM process_definition RETURNING id
		), place (token, node) AS (
			VALUES (workflow_uuid(), 'in'), (workflow_uuid(), 'wait')
		), tokens AS (
			INSERT INTO process_token (id, instance_id, node, state) SELECT token, id, node, 'Waiting' FROM place, instance
		)
		INSERT INTO process_event (instance_id, token_id, event_type, node, version)
		SELECT i.id, p.token, e.event, e.node, 1
		FROM instance i, place p
		JOIN (VALUES (1, 'in', 'node.entered', 'ask'), (2, 'in', 'node.completed', 'ask'), (3, 'in', 'node.entered', 'in'), (4, 'wait', 'node.entered', 'wait')) e (place, at, event, node) ON e.at = p.node
		ORDER BY e.place`, instance)
	p, code := cmdtest.Run(t, env, "graph", "--instance", instance)
	for _, line := range []string{`ask<br/>human<br/>1 visit, succeeded"`, `"in<br/>1 visit, 1 live, Waiting"`, `"wait<br/>signal go<br/>1 visit, 1 live, Waiting"`} {
		if got := p.Stdout.String(); code != 0 || !strings.Contains(got, line) {
			t.Errorf("exit code %d, no line with %s in\n%s", code, line, got)
		}
	}
}
