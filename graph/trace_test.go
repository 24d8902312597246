package graph_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
)

const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// startTraced starts an instance with a run that has a traceparent and other metadata.
func (s *site) startTraced(process, traceparent string) uuid.UUID {
	s.t.Helper()
	return query[uuid.UUID](s.t, s.pool, `
		INSERT INTO workflow_run (type, payload, metadata)
		VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'input', '{"key": "k"}'::jsonb), jsonb_build_object('traceparent', $2::text, 'tag', 'x')) RETURNING id`, process, traceparent)
}

// without lists the runs of the engine whose metadata, and the events whose headers, differ from metadata.
func (s *site) without(metadata string) string {
	return query[string](s.t, s.pool, `
		SELECT coalesce(string_agg(DISTINCT x.what, ', ' ORDER BY x.what), '')
		FROM (SELECT concat_ws(' ', type, node), metadata FROM workflow_run
		      WHERE token_id IS NOT NULL OR payload ? 'parent' OR type IN ('graph.cut_off.v1', 'graph.cancel.v1', 'graph.retry.v1')
		      UNION ALL SELECT event_type, headers FROM outbox_event) AS x (what, has)
		WHERE x.has IS DISTINCT FROM nullif($1, '')::jsonb`, metadata)
}

// Every run and event of an instance has the traceparent of its start, and nothing else of the metadata: steps, list
// elements, timers, messages, signals, called instances and their runs, undo steps, and runs that retry, cut off or
// cancel.
func TestTraceReachesAll(t *testing.T) {
	s := newSite(t)
	child := s.deploy("X", undoable("X", "Y")+","+step("Y", ""))
	slow := s.deploy("Z", step("Z", "", `"ms": "10000"`))
	p := s.deploy("A", undoable("A", "F")+`, "F": {"fork": ["T", "M", "S", "L", "C", "H", "K"]}, "J": {"join": "all", "to": "I"},
		"T": {"wait": "10ms", "to": "J"}, "M": {"await": {"message": "paid", "key": "input.key"}, "to": "J"}, "S": {"await": {"signal": "go"}, "to": "J"},
		"L": {"each": {"list": "['x', 'y']", "do": "test.step.v1"}, "to": "J"}, `+
		fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "propagate"}, "to": "J"}, "H": {"call": {"process": %q}, "to": "HJ", "on": [{"message": "enough", "key": "input.key", "to": "HJ"}]},`, child, slow)+
		`"K": {"do": "test.step.v1", "in": {"name": "'K'", "ms": "10000"}, "to": "KJ", "on": [{"error": "cancelled", "to": "KJ"}]},
		`+step("HJ", "J")+","+step("KJ", "J")+`,
		"I": {"choose": [{"if": "input.missing > 1.0", "to": "B"}], "else": "B"},`+step("B", ""))
	id := s.startTraced(p, traceparent)
	s.waitsFor(3)
	await(t, "steps to be under way", func() bool { return s.count("Z") == 1 && s.count("K") == 1 })
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "k"}`)
	s.enqueue("graph.message.v1", `{"name": "enough", "key": "k"}`)
	s.enqueue("graph.signal.v1", `{"name": "go"}`)
	query[string](t, s.pool, `SELECT workflow_cancel(id) FROM workflow_run WHERE node = 'K'`)
	s.stopped(id, "expression_failed", 1)
	again := query[uuid.UUID](t, s.pool, `SELECT incident FROM process_retry_incidents(dry_run => false)`)
	await(t, "the incident to be retried", func() bool {
		return query[bool](t, s.pool, `SELECT resolved_at IS NOT NULL FROM incident WHERE id = $1`, again)
	})
	s.stopped(id, "expression_failed", 1)
	query[uuid.UUID](t, s.pool, `SELECT workflow_incident($1, 'I', 'not_leased', NULL, 'x' || workflow_advance('on'))`, id)
	s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))
	s.status(id, graph.Failed)
	if got, want := s.undone(id), "X A"; got != want {
		t.Errorf("undone: %q, want %q", got, want)
	}
	if got := s.without(fmt.Sprintf(`{"traceparent": %q}`, traceparent)); got != "" {
		t.Errorf("without the trace, or with more: %s", got)
	}
	for _, what := range []string{"graph.timer.v1", "graph.arrive.v1", "graph.start.v1", "graph.cancel.v1", "graph.cut_off.v1", "graph.undo.v1", "test.undo.v1"} {
		if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = $1`, what); n == 0 {
			t.Errorf("there has been no %s", what)
		}
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM outbox_event WHERE event_type = 'incident.opened' AND payload->>'code' = 'not_leased'`); n != 1 {
		t.Errorf("%d incidents of what is set aside are told", n)
	}
	s.healthy()
}

// A malformed traceparent is not passed on, and none is made up.
func TestTraceIsWellFormed(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "W")+`, "W": {"wait": "1ms", "to": "B"},`+step("B", ""))
	for name, traceparent := range map[string]string{"none": "", "words": "00-1", "a second line": traceparent + "\nx", "long": fmt.Sprintf("%016000d", 7)} {
		s.status(s.startTraced(p, traceparent), graph.Completed)
		if got := s.without(""); got != "" {
			t.Errorf("%s: with metadata: %s", name, got)
		}
	}
}
