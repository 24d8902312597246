package sql_test

import (
	"fmt"
	"regexp"
	"testing"
)

// The cost of what operators ask of processes and do to them does not grow with a hundred thousand finished
// instances, their million events and their runs, and no large table is scanned sequentially.
func TestProcessesAmongMany(t *testing.T) {
	s, _ := psql(t)
	for _, table := range []string{"workflow_run", "process_instance", "process_token", "process_event", "process_state_history", "user_task", "incident"} {
		s.do(`ALTER TABLE ` + table + ` SET (autovacuum_enabled = off)`)
	}
	s.do(`INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"do": "a.x"}}}')`)
	s.do(`CREATE TEMPORARY TABLE planted (g int, id uuid, token uuid, run uuid)`)
	over := func(n int) {
		s.do(`BEGIN`)
		s.do(`SET LOCAL session_replication_role = replica`)
		s.do(`TRUNCATE planted`)
		s.do(fmt.Sprintf(`INSERT INTO planted SELECT g, gen_random_uuid(), gen_random_uuid(), gen_random_uuid() FROM generate_series(1, %d) g`, n))
		s.do(`INSERT INTO process_instance (id, process_definition_id, status, started_at, completed_at)
			SELECT p.id, d.id, 'COMPLETED', now() - interval '1 hour', now() - p.g * interval '1 ms' FROM planted p, process_definition d`)
		s.do(`INSERT INTO process_token (id, instance_id, node, state) SELECT token, id, 'a', 'Completed' FROM planted`)
		s.do(`INSERT INTO workflow_run (id, type, token_id, node, status, finished_at) SELECT run, 'a.x', token, 'a', 'succeeded', now() FROM planted`)
		s.do(`INSERT INTO process_event (instance_id, token_id, event_type, node, version) SELECT p.id, p.token, 'node.completed', 'a', e FROM planted p, generate_series(1, 10) e`)
		s.do(`INSERT INTO process_state_history (instance_id, from_status, to_status, version, actor) SELECT id, 'CREATED', 'COMPLETED', 1, 'w' FROM planted`)
		s.do(`INSERT INTO user_task (instance_id, token_id, node, state, payload, completed_at) SELECT id, token, 'a', 'completed', '{}', now() FROM planted`)
		s.do(`INSERT INTO incident (instance_id, token_id, node, code, message, resolved_at) SELECT id, token, 'a', 'failed', '', now() FROM planted WHERE g % 10 = 0`)
		s.do(`COMMIT`)
		s.do(`VACUUM ANALYZE workflow_run, process_instance, process_token, process_event, process_state_history, user_task, incident`)
	}
	// Of the open instances, a quarter each waits for a worker, a person, a message, and the resolution of an
	// incident.
	s.do(`BEGIN`)
	s.do(`SET LOCAL session_replication_role = replica`)
	s.do(`INSERT INTO planted SELECT g, gen_random_uuid(), gen_random_uuid(), gen_random_uuid() FROM generate_series(0, 399) g`)
	s.do(`INSERT INTO process_instance (id, process_definition_id, status, started_at, live_tokens, ready_tokens, open_incidents)
		SELECT p.id, d.id, 'IN_PROGRESS', now(), 1, (p.g % 4 = 0)::int, (p.g % 4 = 3)::int FROM planted p, process_definition d`)
	s.do(`INSERT INTO process_token (id, instance_id, node, state) SELECT token, id, 'a', CASE g % 4 WHEN 0 THEN 'Ready' ELSE 'Waiting' END FROM planted`)
	s.do(`INSERT INTO workflow_run (id, type, token_id, node, run_at) SELECT run, 'a.x', token, 'a', now() - interval '2 hours' FROM planted WHERE g % 4 = 0`)
	s.do(`INSERT INTO user_task (instance_id, token_id, node, payload) SELECT id, token, 'a', '{}' FROM planted WHERE g % 4 = 1`)
	s.do(`INSERT INTO message_wait (token_id, place, instance_id, node, name, key) SELECT token, 'a', id, 'a', 'paid', g::text FROM planted WHERE g % 4 = 2`)
	s.do(`INSERT INTO incident (instance_id, token_id, node, code, message) SELECT id, token, 'a', 'failed', '' FROM planted WHERE g % 4 = 3`)
	s.do(`UPDATE process_instance SET parent_process_instance_id = (SELECT id FROM planted WHERE g = 0) WHERE id IN (SELECT id FROM planted WHERE g IN (4, 8))`)
	s.do(`COMMIT`)
	step, person, message, trouble := s.do(`SELECT id FROM planted WHERE g = 0`), s.do(`SELECT id FROM planted WHERE g = 1`), s.do(`SELECT id FROM planted WHERE g = 2`),
		s.do(`SELECT id FROM planted WHERE g = 3`)
	token, run, task := s.do(`SELECT token FROM planted WHERE g = 0`), s.do(`SELECT run FROM planted WHERE g = 0`), s.do(`SELECT id FROM user_task WHERE instance_id = '`+person+`'`)
	over(5_000)
	ended := s.do(`SELECT id FROM planted LIMIT 1`)

	looks := []struct{ name, query string }{
		{"why of a step", `SELECT process_why('` + step + `')`},
		{"why of a task", `SELECT process_why('` + person + `')`},
		{"why of a message", `SELECT process_why('` + message + `')`},
		{"why of trouble", `SELECT process_why('` + trouble + `')`},
		{"why of what ended", `SELECT process_why('` + ended + `')`},
		{"why of its run", `SELECT workflow_why('` + run + `')`},
		{"overview", `SELECT * FROM process_overview WHERE id = '` + step + `'`},
		{"tokens", `SELECT * FROM token WHERE instance_id = '` + step + `'`},
		{"activities", `SELECT * FROM activity_instance WHERE instance_id = '` + step + `'`},
		{"timers", `SELECT * FROM timer WHERE token_id = '` + token + `'`},
		{"events", `SELECT * FROM process_event WHERE instance_id = '` + step + `' ORDER BY id`},
		{"history", `SELECT * FROM process_history WHERE instance_id = '` + step + `' ORDER BY created_at, place, id`},
		{"history of what ended", `SELECT * FROM process_history WHERE instance_id = '` + ended + `' ORDER BY created_at, place, id`},
		{"activities of what ended", `SELECT * FROM activity_instance WHERE instance_id = '` + ended + `'`},
		{"tasks", `SELECT * FROM user_task WHERE state = 'open' ORDER BY created_at LIMIT 50`},
		{"incidents", `SELECT * FROM incident WHERE resolved_at IS NULL`},
		{"scopes", `SELECT process_scopes('` + token + `'), process_undoes('` + token + `', '` + token + `')`},
		{"duration", `SELECT * FROM process_duration`},
		{"rate", `SELECT * FROM process_rate`},
		{"starting", `SELECT * FROM process_starting`},
		{"without mover", `SELECT * FROM process_without_mover`},
		{"stuck", `SELECT * FROM process_stuck`},
		// Statements that act come last, or the instance would be paused when it is looked at.
		{"pause", `SELECT process_pause('` + step + `')`},
		{"resume", `SELECT process_resume('` + step + `')`},
		{"correct", `SELECT process_correct('` + step + `', 'a', '1', 'why')`},
		{"assign", `SELECT process_task_assign('` + task + `', 'anna')`},
		{"reschedule", `SELECT workflow_reschedule('` + run + `', now())`},
		{"pause of a prefix", `SELECT workflow_pause('z.', 'why')`},
		{"and its end", `SELECT workflow_resume('z.')`},
	}
	before := map[string]int{}
	for _, l := range looks {
		before[l.name], _, _ = s.buffers(l.query)
	}
	over(100_000)
	read := regexp.MustCompile(`Seq Scan on (workflow_run|process_instance|process_token|process_event|process_state_history|user_task|incident)\b`)
	for _, l := range looks {
		n, _, plan := s.buffers(l.query)
		whole := read.FindAllString(plan, -1)
		t.Logf("%s: %d buffers, %d before", l.name, n, before[l.name])
		if n > 2*before[l.name]+4000 || len(whole) > 0 { // ten for each open instance
			t.Errorf("%s touches %d buffers beside a million rows, %d without; %v\n%.6000s", l.name, n, before[l.name], whole, plan)
		}
	}
}
