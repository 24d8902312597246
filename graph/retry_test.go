package graph_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A step has the attempts and the backoff of its node, and takes what the node leaves out from the policy of its type.
// The same holds for the elements of a list.
func TestRetryOfNode(t *testing.T) {
	s := newSite(t)
	if _, err := s.pool.Exec(t.Context(), `SELECT workflow_set_policy('test.', attempts => 7, backoff_base => '1 ms', backoff_cap => '30 min')`); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // until workers have read the policy
	for name, c := range map[string]struct {
		nodes          string
		after          time.Duration // the backoff after the first attempt, without its random part
		attempts       int
		startedForGood bool
	}{
		"base":     {`"a": {"do": "test.step.v1", "in": {"name": "'base'", "fails": "1000"}, "retry": {"base": "PT10M"}}`, 10 * time.Minute, 7, false},
		"cap":      {`"a": {"do": "test.step.v1", "in": {"name": "'cap'", "fails": "1000"}, "retry": {"base": "PT1M", "cap": "PT1M", "attempts": 12}}`, time.Minute, 12, false},
		"list":     {`"a": {"each": {"list": "[1]", "do": "test.step.v1"}, "in": {"name": "'list'", "fails": "1000"}, "retry": {"base": "PT2M", "attempts": 4}}`, 2 * time.Minute, 4, false},
		"attempts": {`"a": {"do": "test.step.v1", "in": {"name": "'attempts'", "fails": "1000"}, "retry": {"attempts": 2}}`, 0, 2, true},
		"short":    {`"a": {"do": "test.step.v1", "in": {"name": "'short'", "fails": "1000"}, "attempts": 4}`, 0, 4, true},
		"policy":   {`"a": {"do": "test.step.v1", "in": {"name": "'policy'", "fails": "1000"}}`, 0, 7, true},
	} {
		id := s.start(s.deploy("a", c.nodes), `{}`)
		if c.startedForGood {
			s.stopped(id, "handler_error", 1)
			if n := query[int](t, s.pool, `SELECT attempt FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.type = 'test.step.v1'`, id); n != c.attempts {
				t.Errorf("%s: it was started %d times, want %d", name, n, c.attempts)
			}
			continue
		}
		pgtest.Await(t, name+" to have failed once", func() bool { return s.count(name) == 1 && pausedFor(t, s, id) > 0 })
		if pause := pausedFor(t, s, id); pause < c.after-5*time.Second || pause > c.after*3/2+time.Second {
			t.Errorf("%s: it is due again after %s, want %s or up to a half more", name, pause, c.after)
		}
		if n := query[int](t, s.pool, `SELECT max_attempts FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.type = 'test.step.v1'`, id); n != c.attempts {
			t.Errorf("%s: it may be started %d times, want %d", name, n, c.attempts)
		}
	}
}

// pausedFor returns the backoff of the instance's step before its second attempt; 0: it does not wait for that.
func pausedFor(t *testing.T, s *site, id uuid.UUID) time.Duration {
	return time.Duration(query[float64](t, s.pool, `
		SELECT coalesce(max(extract(epoch FROM r.run_at - r.updated_at)) FILTER (WHERE r.status = 'pending' AND r.attempt = 1), 0)::float8
		FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.type = 'test.step.v1'`, id) * float64(time.Second))
}

// An undo step follows the policy of its type if its step followed a policy, even if the step took several attempts.
func TestUndoFollowsPolicy(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("a", `"a": {"do": "test.step.v1", "in": {"name": "'a'", "fails": "2"}, "undo": "test.undo.v1", "to": "b"},
		"b": {"do": "test.step.v1", "in": {"name": "'b'", "fail": "'E'"}}`), `{}`)
	s.status(id, graph.Failed)
	if n := query[int](t, s.pool, `SELECT r.max_attempts FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.type = 'test.undo.v1'`, id); n != 3 {
		t.Errorf("the undo step has max_attempts %d, want 3, which means the policy", n)
	}
}
