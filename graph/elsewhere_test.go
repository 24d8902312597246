package graph_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A step that was handed on (run.ErrElsewhere) moves its process when it is completed with run.Complete: with its
// result, or along the edge of its error. Until then process_why reports that it continues elsewhere.
func TestStepElsewhere(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	tokens := make(chan string, 10)
	worker.Handle(s.mux, "test.away.v1", func(ctx context.Context, _ struct{}) (struct{}, error) {
		token, err := worker.Token(ctx)
		if err != nil {
			return struct{}{}, err
		}
		tokens <- run.FromContext(ctx).ID.String() + " " + token
		return struct{}{}, run.ErrElsewhere
	})
	s.hire()
	p := s.deploy("A", `"A": {"do": "test.away.v1", "on": [{"error": "CARD_DECLINED", "to": "C"}], "to": "B"}, `+step("B", "", `"n": "steps.A.n"`)+`, `+step("C", ""))
	for _, c := range []struct {
		result json.RawMessage
		err    error
		then   string
	}{
		{json.RawMessage(`{"n": 7}`), nil, "B"},
		{nil, run.Permanent(run.WithCode("CARD_DECLINED", errors.New("no money left"))), "C"},
	} {
		id := s.start(p, `{}`)
		at, token, _ := strings.Cut(<-tokens, " ")
		await(t, "it to be told", func() bool {
			return strings.HasPrefix(query[string](t, s.pool, `SELECT process_why($1)`, id), "A: goes on elsewhere")
		})
		if err := run.Complete(t.Context(), s.pool, uuid.MustParse(at), token, c.result, c.err); err != nil {
			t.Fatal(err)
		}
		s.status(id, graph.Completed)
		if s.count(c.then) != 1 {
			t.Errorf("after %s, %v it went to %v, want %s", c.result, c.err, s.calls, c.then)
		}
	}
	if n := query[string](t, s.pool, `SELECT string_agg(output->>'n', ' ') FROM activity_instance WHERE node_id = 'B'`); n != "7" {
		t.Errorf("B was given %s", n)
	}
}

// run.FromContext has the instance, its key and the node for handlers of steps, of list elements and of undo steps. For
// other runs these fields are zero.
func TestHandlersKnowTheirStep(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	told := make(chan run.Info, 20)
	for _, typ := range []string{"test.told.v1", "test.untold.v1"} {
		worker.Handle(s.mux, run.Task[any](typ), func(ctx context.Context, _ any) (struct{}, error) {
			told <- run.FromContext(ctx)
			return struct{}{}, nil
		})
	}
	s.hire()
	p := s.deploy("A", `"A": {"do": "test.told.v1", "undo": "test.untold.v1", "to": "L"}, "L": {"each": {"list": "[1]", "do": "test.told.v1"}, "to": "F"}, `+step("F", "", `"fail": "'NO'"`))
	query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'key', 'order 17')) RETURNING id`, p)
	await(t, "it to be started", func() bool { return query[int](t, s.pool, `SELECT count(*) FROM process_instance`) == 1 })
	id := query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance`)
	s.status(id, graph.Failed)
	for _, node := range []string{"A", "L/item", "A/undo"} {
		if got := <-told; got.Instance != id || got.BusinessKey != "order 17" || got.Node != node {
			t.Errorf("it is told of %s, %q, %q; want %s, order 17, %s", got.Instance, got.BusinessKey, got.Node, id, node)
		}
	}
	query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type) VALUES ('test.told.v1') RETURNING id`)
	if got := <-told; got.Instance != uuid.Nil || got.BusinessKey != "" || got.Node != "" {
		t.Errorf("a plain run is told of %s, %q, %q", got.Instance, got.BusinessKey, got.Node)
	}
}
