package graph_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Deploy returns the id of a definition that was inserted by SQL if both have the same canonical form. It refuses
// another definition with the same name and version.
func TestDeployWhatIsThere(t *testing.T) {
	pool := pgtest.New(t)
	id := query[uuid.UUID](t, pool, `INSERT INTO process_definition (definition)
		VALUES ('{"version": 1, "nodes": {"w": {"to": "e", "wait": "90m"}, "e": {"end": true}}, "start": "w", "process": "p"}') RETURNING id`)
	for _, c := range []struct{ text, want string }{
		{`{"process": "p", "version": 1, "start": "w", "nodes": {"e": {"end": true}, "w": {"wait": "PT1H30M", "to": "e"}}}`, ""},
		{`{"process": "p", "version": 1, "start": "w", "nodes": {"e": {"end": true}, "w": {"wait": "PT1H31M", "to": "e"}}}`, "another text"},
	} {
		d, err := graph.Parse([]byte(c.text))
		if err != nil {
			t.Fatal(err)
		}
		got, err := graph.Deploy(t.Context(), pool, d)
		if c.want == "" && (err != nil || got != id) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %s, %v; want %s, %q", c.text, got, err, id, c.want)
		}
	}
}

// A definition with instances cannot be deleted, and the error says how many there are.
func TestDefinitionInUse(t *testing.T) {
	pool := pgtest.New(t)
	id := query[uuid.UUID](t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 2, "start": "e", "nodes": {"e": {"end": true}}}') RETURNING id`)
	pgtest.ByHand(t, pool, `INSERT INTO process_instance (process_definition_id, status, completed_at) SELECT $1, 'COMPLETED', now() FROM generate_series(1, 3)`, id)
	_, err := pool.Exec(t.Context(), `DELETE FROM process_definition`)
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != "23503" || refused.Message != "process_definition: p version 2 cannot be deleted: 3 instances are of it" || !strings.Contains(refused.Hint, id.String()) {
		t.Errorf("deleting a definition in use: %v", err)
	}
	pgtest.ByHand(t, pool, `DELETE FROM process_instance`)
	if _, err := pool.Exec(t.Context(), `DELETE FROM process_definition`); err != nil {
		t.Errorf("deleting one that is not in use: %v", err)
	}
}
