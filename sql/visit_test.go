package sql_test

import (
	"context"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// beforeVisits is the last version under which every visit was stored.
const beforeVisits = 36

// An instance that has begun before the upgrade and ends after it has each visit in process_history once: what happened
// before is shown from its rows alone, also a step that succeeded without completing its node. Of a run that is over
// after the upgrade, its row is shown if a worker of the earlier version has stored one, and the run otherwise.
func TestHistoryAcrossTheUpgrade(t *testing.T) {
	url := pgtest.Empty(t)
	s := connect(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeVisits); err != nil {
		t.Fatal(err)
	}
	s.do(`SET session_replication_role = replica`)
	id := s.do(`INSERT INTO process_instance (id, process_definition_id) VALUES (workflow_uuid(), workflow_uuid()) RETURNING id`)
	token := s.do(`INSERT INTO process_token (id, instance_id, node, state) VALUES (workflow_uuid(), '` + id + `', 'D', 'Ready') RETURNING id`)
	// Seconds relative to the upgrade.
	run := func(node, status, created, finished string) {
		s.do(`INSERT INTO workflow_run (type, token_id, node, status, created_at, finished_at)
			VALUES ('a.x', '` + token + `', '` + node + `', '` + status + `', now() + interval '` + created + ` s', now() + interval '` + finished + ` s')`)
	}
	stored := func(event, node, at string) {
		s.do(`INSERT INTO process_event (instance_id, token_id, event_type, node, version, created_at)
			VALUES ('` + id + `', '` + token + `', '` + event + `', '` + node + `', 1, now() + interval '` + at + ` s')`)
	}
	run("A", "succeeded", "-60", "-50") // a boundary event led its token on in the same batch
	stored("node.entered", "A", "-59.9")
	stored("handler.taken", "A", "-49.9")
	run("B", "succeeded", "-50", "-40")
	stored("node.entered", "B", "-49.8")
	stored("node.completed", "B", "-39.9")
	run("C", "succeeded", "-40", "3600")
	stored("node.entered", "C", "-39.8")
	s.do(`SET session_replication_role = origin`)
	if err := sql.Up(t.Context(), s.conn); err != nil {
		t.Fatal(err)
	}
	history := func(want string) {
		t.Helper()
		s.expect("history", s.do(`SELECT string_agg(concat_ws(' ', event_type, node, CASE WHEN run_id IS NULL THEN 'stored' END), ', ' ORDER BY created_at, place, id) FROM process_history WHERE instance_id = '`+id+`'`), want)
	}
	const before = "node.entered A stored, handler.taken A stored, node.entered B stored, node.completed B stored, node.entered C stored, "
	history(before + "node.completed C")
	s.do(`SET session_replication_role = replica`)
	// A worker of the earlier version and one of this version move the token in turn.
	run("D", "succeeded", "3600", "3700")
	stored("node.entered", "D", "3600.1")
	run("D", "succeeded", "3700.1", "3800")
	run("D", "succeeded", "3799.9", "3900")
	stored("node.completed", "D", "3800.2")
	stored("node.entered", "D", "3800.3")
	run("D", "cancelled", "3900.1", "4000")
	history(before + "node.completed C, node.entered D stored, node.completed D, node.entered D, node.completed D stored, node.entered D stored, node.completed D, node.entered D")
}

// Who could read process_event before the upgrade can read process_history after it, and nobody else can.
func TestHistoryIsGrantedLikeEvents(t *testing.T) {
	url := pgtest.Empty(t)
	s := connect(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeVisits); err != nil {
		t.Fatal(err)
	}
	reader, other := "reader_"+s.do(`SELECT current_database()`), "other_"+s.do(`SELECT current_database()`)
	for _, role := range []string{reader, other} {
		s.do(`CREATE ROLE ` + role)
		t.Cleanup(func() {
			if _, err := s.conn.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role); err != nil {
				t.Error(err)
			}
		})
	}
	s.do(`GRANT SELECT ON process_event TO ` + reader)
	if err := sql.Up(t.Context(), s.conn); err != nil {
		t.Fatal(err)
	}
	s.expect("rights", s.do(`SELECT has_table_privilege('`+reader+`', 'process_history', 'SELECT') || ' ' || has_table_privilege('`+other+`', 'process_history', 'SELECT')`), "true false")
}
