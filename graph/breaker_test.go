package graph_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The circuit breaker works for steps of processes: while the dependency of a type is down, steps of that type are
// leased one at a time as probes, no attempt is charged, and no incident is opened. When the dependency is back, every
// instance completes, and each step has moved its instance once.
func TestBreakerOfSteps(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	var down atomic.Bool
	down.Store(true)
	worker.Handle(s.mux, "test.down.v1", func(context.Context, map[string]any) (map[string]any, error) {
		if down.Load() {
			return nil, run.Unavailable(errors.New("nobody answers"))
		}
		return map[string]any{}, nil
	})
	s.worker = s.hire()
	process := s.deploy("a", `"a": {"do": "test.down.v1", "to": "b"}, "b": {"do": "test.step.v1", "in": {"name": "'b'"}}`)
	var instances []uuid.UUID
	for range 8 {
		instances = append(instances, s.start(process, `{}`))
	}
	probes := func(n int) func() bool {
		return func() bool {
			return query[int](t, s.pool, `SELECT coalesce(max(probes), -1) FROM workflow_breaker WHERE type = 'test.down.v1' AND NOT bound`) >= n
		}
	}
	pgtest.Await(t, "the breaker to open, and a probe", probes(1))
	pgtest.Await(t, "nothing to be leased", func() bool {
		return query[int](t, s.pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`) == 0
	})
	charged := `SELECT coalesce(sum(attempt), 0)::int FROM workflow_run WHERE type = 'test.down.v1'`
	before := query[int](t, s.pool, charged)
	pgtest.Await(t, "further probes", probes(3))
	pgtest.Await(t, "nothing to be leased", func() bool {
		return query[int](t, s.pool, `SELECT count(*)::int FROM workflow_run WHERE status = 'leased'`) == 0
	})
	if after := query[int](t, s.pool, charged); after != before {
		t.Errorf("%d attempts are charged after probes, %d before", after, before)
	}
	if n := query[int](t, s.pool, `SELECT count(*)::int FROM incident`); n != 0 {
		t.Errorf("%d incidents", n)
	}
	down.Store(false)
	for _, id := range instances {
		s.status(id, graph.Completed)
	}
	if n := s.count("b"); n != len(instances) {
		t.Errorf("the step after it was done %d times, want %d", n, len(instances))
	}
	s.healthy()
}
