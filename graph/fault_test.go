package graph_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// If the owner writes inconsistent references or numbers into a row of one instance, past the guards, the other
// instances complete and nothing runs without end. process_why and process_fault name the column, and the statement in
// process_fault.fix lets the instance continue.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name, nodes, change, told string
		command                   string // what moves each instance: a run type and its payload; "elapse": time; "": nothing more
	}{
		{"total", list, `UPDATE each_progress SET total = 2147483647 WHERE instance_id = '$i'`, "each_progress.total", ""},
		{"less total", list, `UPDATE each_progress SET total = 2 WHERE instance_id = '$i'`, "each_progress.total", ""},
		{"next", list, `UPDATE each_progress SET next = 0 WHERE instance_id = '$i'`, "each_progress.next", ""},
		{"next of none", list, `UPDATE each_progress SET next = 2147483647 WHERE instance_id = '$i'`, "each_progress.next", ""},
		{"done", list, `UPDATE each_progress SET done = -1 WHERE instance_id = '$i'`, "each_progress.done", ""},
		{"list's instance", list, `UPDATE each_progress SET instance_id = '$o' WHERE instance_id = '$i'`, "each_progress.instance_id", ""},
		{"wait's token", `"W": {"await": {"message": "paid", "key": "input.k"}, "to": "A"},` + step("A", ""),
			`INSERT INTO process_token (id, instance_id, node, state) VALUES ('00000000-0000-0000-0000-000000000001', '$o', 'A', 'Completed');
				UPDATE message_wait SET token_id = '00000000-0000-0000-0000-000000000001' WHERE instance_id = '$i'`, "message_wait.token_id", `graph.message.v1 {"name": "paid", "key": "$k"}`},
		{"wait's instance", `"W": {"await": {"message": "paid", "key": "input.k"}, "to": "A"},` + step("A", ""),
			`UPDATE message_wait SET instance_id = '$o' WHERE instance_id = '$i'`, "message_wait.instance_id", `graph.message.v1 {"name": "paid", "key": "$k"}`},
		{"task's instance", `"W": {"human": {}, "to": "A"},` + step("A", ""),
			`UPDATE user_task SET instance_id = '$o' WHERE instance_id = '$i'`, "user_task.instance_id", `graph.complete_task.v1 {"task": "$t", "by": "anna"}`},
		{"task's token", `"W": {"human": {}, "to": "A"},` + step("A", ""),
			`UPDATE user_task SET token_id = (SELECT id FROM process_token WHERE instance_id = '$o') WHERE instance_id = '$i'`, "user_task.token_id", `graph.complete_task.v1 {"task": "$t", "by": "anna"}`},
		{"node", `"W": {"await": {"message": "paid", "key": "input.k"}, "to": "A"},` + step("A", ""),
			`UPDATE process_token SET node = 'nowhere' WHERE instance_id = '$i'`, "process_token.node", `graph.message.v1 {"name": "paid", "key": "$k"}`},
		{"version", `"W": {"await": {"message": "paid", "key": "input.k"}, "to": "A"},` + step("A", ""),
			`UPDATE process_instance SET version = 9223372036854775807 WHERE id = '$i'`, "process_instance.version", `graph.message.v1 {"name": "paid", "key": "$k"}`},
		{"timer", `"W": {"wait": "PT1H", "to": "A"},` + step("A", ""), `UPDATE workflow_run SET payload = '[]' WHERE token_id = (SELECT id FROM process_token WHERE instance_id = '$i')`, "incident payload_invalid at W ", "elapse"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t)
			p := s.deploy(c.nodes[1:2], c.nodes)
			var ids [3]uuid.UUID
			for k := range ids {
				ids[k] = s.start(p, fmt.Sprintf(`{"k": "k%d"}`, k))
			}
			await(t, "all to wait, or to be at it", func() bool {
				return query[int](t, s.pool, `SELECT (SELECT count(*) FROM process_instance WHERE status = 'WAITING') + (SELECT count(*) FROM each_progress)`) == 3
			})
			bad := ids[1]
			fill := strings.NewReplacer("$i", bad.String(), "$o", ids[2].String()).Replace
			// The tasks, in the order of the instances, read before anything is changed.
			var tasks [3]string
			for k, id := range ids {
				tasks[k] = query[string](t, s.pool, `SELECT coalesce((SELECT id::text FROM user_task WHERE instance_id = $1), '')`, id)
			}
			unguarded(t, s.pool, fill(c.change))
			send := func(k int) {
				if typ, payload, ok := strings.Cut(c.command, " "); ok {
					s.enqueue(typ, strings.NewReplacer("$k", fmt.Sprintf("k%d", k), "$t", tasks[k]).Replace(payload))
				}
			}
			for k := range ids {
				send(k)
			}
			if c.command == "elapse" {
				pgtest.Elapse(t, s.pool, 2*60*60*1e9)
			}
			s.status(ids[0], graph.Completed)
			s.status(ids[2], graph.Completed)
			var why string
			await(t, "it to be told", func() bool {
				why = query[string](t, s.pool, `SELECT process_why($1)`, bad)
				return strings.Contains(why, c.told)
			})
			if c.command == "" {
				await(t, "the elements to stop", func() bool {
					return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, bad) == 3
				})
				if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE node = 'E/item'`); n != 9 {
					t.Errorf("%d elements were started, want 9", n)
				}
			}
			t.Log(why)
			if c.command == "elapse" { // it has an incident, and the fix is to retry that
				if !strings.HasPrefix(why, "incident payload_invalid at W ") {
					t.Errorf("why: %s", why)
				}
			} else {
				fix := query[string](t, s.pool, `SELECT fix FROM process_fault WHERE instance_id = $1 LIMIT 1`, bad)
				execute(t, s.pool, `BEGIN; SET LOCAL workflow.override = 'as doctor tells'; `+fix+`; COMMIT`)
			}
			if strings.HasPrefix(c.name, "task") {
				send(1)
			}
			for range query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, bad) {
				// Nothing refuses the kept outcome any more: a worker may have settled it and resolved its incident
				// already.
				retry := s.enqueue("graph.retry.v1", fmt.Sprintf(`{"instance": %q}`, bad))
				if got := s.finished(retry); got != "succeeded" && query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, bad) > 0 {
					t.Fatalf("run %s is %s, want succeeded", retry, got)
				}
				if c.command == "elapse" { // the retry sets the timer again
					pgtest.Elapse(t, s.pool, 2*60*60*1e9)
				}
			}
			if strings.HasPrefix(c.name, "wait") { // the message is stored already: a second one in its slot has it paired
				s.enqueue("graph.message.v1", `{"name": "paid", "key": "k1", "id": "again"}`)
			}
			pgtest.Await(t, "it to go on", func() bool {
				return query[string](t, s.pool, `SELECT status FROM process_instance WHERE id = $1`, bad) == "COMPLETED"
			})
			s.want(map[string]int{"A": 3})
		})
	}
}

// list is a process with a list of three elements, each of which takes 1.5 s.
var list = `"E": {"each": {"list": "[1, 2, 3]", "do": "test.step.v1"}, "in": {"name": "'item'", "ms": "1500"}, "to": "A"},` + step("A", "")
