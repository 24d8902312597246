package graph_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Setting or clearing deleted_at of an instance that is over increments its version and sets updated_at. Marking it and
// clearing the mark each write a process event.
func TestMarkedAsDeleted(t *testing.T) {
	pool := pgtest.New(t)
	pgtest.ByHand(t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "e", "nodes": {"e": {"end": true}}}')`)
	pgtest.ByHand(t, pool, `INSERT INTO process_instance (process_definition_id, status, completed_at, updated_at, version) SELECT id, 'COMPLETED', now(), now() - interval '1 day', 5 FROM process_definition`)
	for _, sql := range []string{
		`UPDATE process_instance SET deleted_at = now()`,
		`UPDATE process_instance SET deleted_at = now() - interval '1 hour'`, // the instance is marked already: no event
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if got := query[string](t, pool, `SELECT version || ' ' || (updated_at > now() - interval '1 hour') FROM process_instance`); got != "7 true" {
		t.Errorf("version, and whether updated_at has moved: %s", got)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE process_instance SET deleted_at = NULL`); err != nil {
		t.Fatal(err)
	}
	got := query[string](t, pool, `SELECT string_agg(concat_ws(' ', event_type, version, data->>'actor' LIKE current_user || '%'), ', ' ORDER BY id) FROM process_event`)
	if want := "instance.deleted 6 t, instance.undeleted 8 t"; got != want {
		t.Errorf("told is %s, want %s", got, want)
	}
}
