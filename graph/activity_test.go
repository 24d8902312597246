package graph_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Every visit of a node that takes time is in activity_instance exactly once, from the start of the visit and with the
// way it ended, even if the visit has no run.
func TestVisits(t *testing.T) {
	s := newSite(t)
	visits := func(id uuid.UUID, want string) {
		t.Helper()
		got := ""
		defer func() {
			if t.Failed() {
				t.Logf("they are\n%s\nand should be\n%s", got, want)
			}
		}()
		pgtest.Await(t, "visits", func() bool {
			got = query[string](t, s.pool, `
				SELECT coalesce(string_agg(concat_ws(' ', node_id, status, CASE WHEN (status IN ('waiting', 'pending', 'leased')) <> (completed_at IS NULL) THEN 'at odd times' END), ', ' ORDER BY node_id, created_at), '')
				FROM activity_instance WHERE instance_id = $1`, id)
			return got == want
		})
	}
	const child = "child"
	define(t, s.pool, `{"process": "child", "version": 1, "start": "M", "output": "{'gives': 'the end'}", "nodes": {"M": {"await": {"signal": "over"}}}}`)
	p := s.deploy("S", `"S": {"scope": {"start": "U", "nodes": {"U": {"human": {}, "in": {"n": "1"}, "to": "X"}, "X": {"choose": [{"if": "steps.U.again", "to": "U"}], "else": "R"},
		"R": {"race": ["RM", "RT"]}, "RM": {"await": {"message": "go", "key": "'k'"}, "to": "end"}, "RT": {"wait": "P1D", "to": "end"}, "end": {"end": true}}}, "to": "E"},
		"E": {"each": {"list": "['x']", "do": "test.step.v1"}, "to": "C"}, "C": {"call": {"process": "`+child+`", "undo": "none"}, "to": "M"},
		"M": {"await": {"message": "never", "key": "'k'"}, "on": [{"message": "go on", "key": "'k'", "to": "W"}], "to": "W"}, "W": {"human": {}}`)
	id := s.start(p, `{}`)
	visits(id, "S waiting, U waiting")
	for _, again := range []bool{true, false} {
		task := query[uuid.UUID](t, s.pool, `SELECT id FROM activity_instance WHERE instance_id = $1 AND node_id = 'U' AND status = 'waiting' AND input->>'n' = '1'`, id)
		s.finished(s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna", "output": {"again": %t}}`, task, again)))
	}
	if got := query[string](t, s.pool, `SELECT string_agg(output->>'again', ' ' ORDER BY created_at) FROM activity_instance WHERE instance_id = $1 AND node_id = 'U'`, id); got != "true false" {
		t.Errorf("the tasks' outputs are %s", got)
	}
	visits(id, "R waiting, RT pending, S waiting, U succeeded, U succeeded")
	s.enqueue("graph.message.v1", `{"name": "go", "key": "k"}`)
	const before = "R succeeded, RM succeeded, RT cancelled, S succeeded, U succeeded, U succeeded"
	visits(id, "C waiting, E succeeded, E/item succeeded, "+before)
	pgtest.Await(t, "the called instance to wait", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM message_wait WHERE name = 'over'`) == 1
	})
	s.enqueue("graph.signal.v1", `{"name": "over"}`)
	visits(id, "C succeeded, E succeeded, E/item succeeded, M waiting, "+before)
	s.enqueue("graph.message.v1", `{"name": "go on", "key": "k"}`)
	visits(id, "C succeeded, E succeeded, E/item succeeded, M cancelled, M/on/0 succeeded, "+before+", W waiting")
	s.finished(s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, id)))
	s.status(id, graph.Cancelled)
	visits(id, "C succeeded, E succeeded, E/item succeeded, M cancelled, M/on/0 succeeded, "+before+", W cancelled")
	if got := query[string](t, s.pool, `
		SELECT string_agg(concat_ws(' ', a.node_id, a.output->>'gives', CASE WHEN a.created_at < r.created_at AND a.started_at = a.created_at THEN 'waited' END), ', ' ORDER BY a.node_id)
		FROM activity_instance a JOIN workflow_run r ON r.id = a.id WHERE a.node_id IN ('C', 'M') AND a.status = 'succeeded'`); got != "C the end waited, M waited" {
		t.Errorf("what came is %s", got)
	}
	s.healthy()
}
