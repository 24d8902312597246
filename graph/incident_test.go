package graph_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// Opening and resolving an incident each write a process event and an outbox event. The resolving event has who did it:
// a person, or what happened to the token or the instance. The same holds for an incident without a token.
func TestIncidentsAreTold(t *testing.T) {
	s := newSite(t)
	told := func(id uuid.UUID, want string) {
		t.Helper()
		got := query[string](t, s.pool, `
			SELECT coalesce(string_agg(concat_ws(' ', event_type, node, data->>'code', (
				SELECT CASE x.resolved_by WHEN data->>'by' THEN replace(x.resolved_by, r.created_by, 'who enqueued it') ELSE 'unlike ' || x.resolved_by END
				FROM incident x, workflow_run r WHERE x.id = (data->>'incident')::uuid AND r.id = $1)), ', ' ORDER BY id), '')
			FROM process_event WHERE instance_id = $1 AND event_type LIKE 'incident.%'`, id)
		if got != want {
			t.Errorf("instance %s tells: %s\nwant %s", id, got, want)
		}
		inside := query[string](t, s.pool, `SELECT coalesce(string_agg(event_type, ' ' ORDER BY id), '') FROM process_event WHERE instance_id = $1 AND event_type LIKE 'incident.%'`, id)
		outside := query[string](t, s.pool, `SELECT coalesce(string_agg(event_type, ' ' ORDER BY id), '') FROM outbox_event WHERE aggregate_id = $1 AND event_type LIKE 'incident.%'`, id)
		if inside != outside {
			t.Errorf("outside is told %q, inside %q", outside, inside)
		}
	}
	p := s.deploy("A", `"X": {"choose": [{"if": "steps.A.n > 1", "to": "B"}], "else": "B"},`+step("A", "X")+","+step("B", ""))

	retried := s.start(p, `{}`)
	s.retry(s.stopped(retried, "expression_failed", 1), `, "by": "anna"`)
	s.retry(s.stopped(retried, "expression_failed", 1), ``)
	s.stopped(retried, "expression_failed", 1)
	told(retried, "incident.opened X expression_failed, incident.resolved X expression_failed anna, incident.opened X expression_failed, "+
		"incident.resolved X expression_failed who enqueued it, incident.opened X expression_failed")

	cancelled := s.start(p, `{}`)
	s.stopped(cancelled, "expression_failed", 1)
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "by": "bob"}`, cancelled))
	s.status(cancelled, graph.Cancelled)
	told(cancelled, "incident.opened X expression_failed, incident.resolved X expression_failed the end of the instance")
	if got := query[string](t, s.pool, `SELECT actor FROM process_state_history WHERE instance_id = $1 AND to_status = 'CANCELLED'`, cancelled); got != "bob" {
		t.Errorf("it was cancelled by %q", got)
	}

	joins := s.start(s.deploy("F", `"F": {"fork": ["A", "B", "D"]}, "X": {"choose": [{"if": "false", "to": "J"}], "else": "over"}, "over": {"end": true},
		"J": {"join": "all", "to": "C"},`+step("A", "X", `"ms": "'300'"`)+","+step("B", "J")+","+step("D", "J")+","+step("C", "")), `{}`)
	s.retry(s.stopped(joins, "join_unsatisfiable", 1), `, "force": true, "by": "carla"`)
	s.status(joins, graph.Completed)
	told(joins, "incident.opened join_unsatisfiable, incident.resolved join_unsatisfiable carla")

	moved := s.start(s.deploy("S", `"S": {"scope": {"start": "X", "nodes": {"X": {"choose": [{"if": "input.missing > 1", "to": "Y"}], "else": "Y"}, "Y": {"end": true}}},
		"on": [{"message": "give up", "key": "'k'", "to": "Z"}]}, "Z": {"end": true}`), `{}`)
	s.stopped(moved, "expression_failed", 1)
	s.enqueue("graph.message.v1", `{"name": "give up", "key": "k"}`)
	s.status(moved, graph.Completed)
	told(moved, "incident.opened X expression_failed, incident.resolved X expression_failed its token has moved on")
	s.healthy()
}

// workflow_failing counts steps that failed an instance or opened an incident. It does not count a failure that an
// error edge takes.
func TestFailingCountsSteps(t *testing.T) {
	s := newSite(t)
	told := func() string {
		return query[string](t, s.pool, `SELECT coalesce(string_agg(concat_ws(' ', type, code, failed, last_error), ', ' ORDER BY type), '') FROM workflow_failing`)
	}
	caught := `"A": {"do": "test.step.v1", "in": {"name": "'A'", "fail": "'caught'"}, "to": "B", "on": [{"error": "caught", "to": "B"}]},`
	s.status(s.start(s.deploy("A", caught+step("B", "")), `{}`), graph.Completed)
	s.stopped(s.start(s.deploy("A", caught+`"B": {"choose": [{"if": "input.n > 1", "to": "C"}], "else": "C"},`+step("C", "")), `{}`), "expression_failed", 1)
	if got := told(); got != "" {
		t.Errorf("a failure that an edge takes is told of: %s", got)
	}
	p := s.deploy("A", caught+step("B", "", `"fail": "'declined'"`))
	for range 3 {
		s.status(s.start(p, `{}`), graph.Failed)
	}
	s.stopped(s.start(s.deploy("A", undoable("A", "B", `"undo_fails": "true"`)+","+step("B", "", `"fail": "'no'"`)), `{}`), "compensation_failed", 1)
	want := "test.step.v1 declined 3 it was told to fail, test.undo.v1 handler_error 1 it was told to fail"
	if got := told(); got != want {
		t.Errorf("told of: %s\nwant %s", got, want)
	}
}
