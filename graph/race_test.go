package graph_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// races is how many instances race.
var races = large(4000)

// newCrowdedSite returns a site with workers that lease a few runs at a time, so that several workers settle runs of one
// instance at once.
func newCrowdedSite(t *testing.T) *site {
	t.Helper()
	t.Parallel()
	s := newEmptySite(t)
	s.crowd()
	return s
}

// crowd starts four workers. A worker that settles a fork carries on the branches that it covers. So two of the four
// cover test.step.v1 and two cover rival.step.v1, and an instance with branches of both is settled by several workers.
func (s *site) crowd() {
	s.t.Helper()
	worker.Handle(s.mux, "rival.step.v1", s.perform)
	for _, prefix := range []string{"test.", "rival.", "test.", "rival."} {
		s.change = func(c *worker.Config) {
			c.Batch, c.Lease, c.Prefixes = 7, 10*time.Second, []string{prefix}
		}
		m := s.hire()
		if s.worker == nil {
			s.worker = m
		}
	}
}

// rival returns the step that executes rival.step.v1, which does the same as test.step.v1.
func rival(step string) string {
	return strings.Replace(step, "test.step.v1", "rival.step.v1", 1)
}

// raced waits until n instances have completed.
func (s *site) raced(n int) {
	s.t.Helper()
	pgtest.Await(s.t, fmt.Sprintf("%d instances to complete", n), func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED'`) == n
	})
}

// shared fails the test if the steps at the nodes were not settled by several workers in each instance: then there was no
// race.
func (s *site) shared(nodes ...string) {
	s.t.Helper()
	if n := query[int](s.t, s.pool, `
		SELECT count(*)
		FROM (SELECT t.instance_id FROM workflow_run r JOIN process_token t ON t.id = r.token_id
		      WHERE r.node = ANY($1)
		      GROUP BY 1 HAVING count(DISTINCT r.settled_by) > 1) AS several`, nodes); n < races {
		s.t.Errorf("the steps at %v of %d instances were settled by several workers, want all %d", nodes, n, races)
	}
}

// S02: if several workers settle the branches of a join at once, the join fires exactly once. S46: the step behind it
// reads the results of all branches, whichever arrived last.
func TestLastArrivalsAtOnce(t *testing.T) {
	s := newCrowdedSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B", "C", "D"]}, "J": {"join": "all", "to": "E"},`+
		step("A", "J", `"n": "1"`)+","+rival(step("B", "J", `"n": "2"`))+","+step("C", "J", `"n": "3"`)+","+rival(step("D", "J", `"n": "4"`))+","+
		step("E", "", `"all": "[steps.A.n, steps.B.n, steps.C.n, steps.D.n]"`))
	s.startMany(p, races)
	s.raced(races)
	s.want(map[string]int{"A": races, "D": races, "E": races})
	if n := query[int](t, s.pool, `SELECT count(*) FROM activity_instance WHERE node_id = 'E' AND input->'all' = '[1, 2, 3, 4]'`); n != races {
		t.Errorf("%d read what all branches have said, want %d", n, races)
	}
	s.shared("A", "B", "C", "D")
	s.healthy()
}

// S17: if the last two tokens of an instance end at once, the instance is completed exactly once.
func TestLastTokensEndAtOnce(t *testing.T) {
	s := newCrowdedSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]},`+step("A", "")+","+rival(step("B", "")))
	s.startMany(p, races)
	s.raced(races)
	if n := query[int](t, s.pool, `SELECT count(*) FROM outbox_event WHERE event_type = 'process.completed'`); n != races {
		t.Errorf("%d events tell of an end, want %d", n, races)
	}
	s.shared("A", "B")
	s.healthy()
}

// S30: if a boundary timer fires while its step completes, exactly one of them moves the token, and no timer remains.
func TestBoundaryTimer(t *testing.T) {
	s := newCrowdedSite(t)
	p := s.deploy("A", `"A": {"do": "test.step.v1", "in": {"name": "'A'", "ms": "input.ms"}, "to": "C", "on": [{"after": "1500ms", "to": "B"}]},`+step("B", "")+","+step("C", ""))
	if _, err := s.pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input', jsonb_build_object('ms', (1200 + g % 500)::text))
		FROM generate_series(1, $2) g`, p, races); err != nil {
		t.Fatal(err)
	}
	s.raced(races)
	b, c := s.count("B"), s.count("C")
	t.Logf("the timer won %d times, and the step %d times", b, c)
	if b+c != races || b == 0 {
		t.Errorf("B ran %d times and C %d times, want %d together", b, c, races)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_event WHERE event_type = 'handler.taken' AND data->>'edge' = 'A>B'`); n != b {
		t.Errorf("%d times the timer's edge was taken, want %d", n, b)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM timer WHERE status = 'Scheduled'`); n != 0 {
		t.Errorf("%d timers are left", n)
	}
	s.healthy()
}

// S38: a message and a wait for it that come at the same time always meet.
func TestMessageAndWaitAtOnce(t *testing.T) {
	s := newCrowdedSite(t)
	p := s.deploy("M", awaitPaid+step("B", ""))
	if _, err := s.pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, payload)
		SELECT * FROM (
			SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input', jsonb_build_object('order', 'o-' || g)) FROM generate_series(1, $2) g
			UNION ALL
			SELECT 'graph.message.v1', jsonb_build_object('name', 'paid', 'key', 'o-' || g) FROM generate_series(1, $2) g) AS x (type, payload)
		ORDER BY hashtext(payload::text)`, p, races); err != nil {
		t.Fatal(err)
	}
	s.raced(races)
	s.want(map[string]int{"B": races})
	s.waitsFor(0)
	s.healthy()
}

// S32: timers that fell due while no worker ran each fire exactly once when four workers start, and no transaction
// settles more than a batch of them.
func TestOverdueTimers(t *testing.T) {
	n := large(10_000)
	s := newSite(t)
	p := s.deploy("T", `"T": {"wait": "PT1H", "to": "B"},`+step("B", ""))
	s.startMany(p, n)
	s.at("T", n)
	s.worker.release()
	pgtest.Elapse(t, s.pool, 2*time.Hour)
	s.change = func(c *worker.Config) { c.Batch, c.Lease = 20, 10*time.Second }
	for range 4 {
		s.hire()
	}
	s.raced(n)
	s.want(map[string]int{"B": n})
	if fired := query[int](t, s.pool, `SELECT count(*) FROM timer WHERE status = 'Fired'`); fired != n {
		t.Errorf("%d timers have fired, want %d", fired, n)
	}
	if most := query[int](t, s.pool, `
		SELECT max(n) FROM (SELECT count(*) AS n FROM workflow_run WHERE type = 'graph.timer.v1' GROUP BY settled_by, finished_at) x`); most > 20 {
		t.Errorf("%d timers fired in one transaction, want 20 at most", most)
	}
	s.healthy()
}

// If tasks are completed, incidents retried and instances cancelled at once by several workers, there is no deadlock,
// each completed task has one successful completion, and every cancel succeeds.
func TestActionsAtOnce(t *testing.T) {
	const n = 20
	t.Parallel()
	s := newEmptySite(t)
	// With the default deadlock_timeout a worker would cancel a statement before PostgreSQL looks for a deadlock.
	if _, err := s.pool.Exec(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 20', current_database()); END $$`); err != nil {
		t.Fatal(err)
	}
	p := s.deploy("F", `"F": {"fork": ["U", "X"]}, "U": {"human": {}, "to": "V"}, "V": {"human": {}}, "X": {"choose": [{"if": "input.missing > 1", "to": "A"}], "else": "A"},`+step("A", ""))
	s.change = func(c *worker.Config) { c.Batch, c.Lease = 3*n, 10*time.Second } // so that batches overlap in many instances
	for range 4 {
		s.hire()
	}
	s.startMany(p, n)
	s.at("U", n)
	await(t, "incidents", func() bool { return query[int](t, s.pool, `SELECT count(*) FROM incident`) == n })
	if _, err := s.pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, payload, max_attempts)
		SELECT *, 100 FROM (
			SELECT 'graph.complete_task.v1', jsonb_build_object('task', id, 'by', 'somebody ' || g) FROM user_task, generate_series(1, 10) g
			UNION ALL
			SELECT 'graph.retry.v1', jsonb_build_object('incident', id) FROM incident, generate_series(1, 10) g
			UNION ALL
			SELECT 'graph.cancel.v1', jsonb_build_object('instance', id, 'compensate', g = 1) FROM process_instance, generate_series(1, 10) g) AS x
		ORDER BY random()`); err != nil {
		t.Fatal(err)
	}
	await(t, "all to be answered", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
	})
	if got := query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'CANCELLED'`); got != n {
		t.Errorf("%d instances are cancelled, want %d", got, n)
	}
	if got := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.cancel.v1' AND status <> 'succeeded'`); got > 0 {
		t.Errorf("%d cancels have failed", got)
	}
	answered := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.complete_task.v1' AND status = 'succeeded'`)
	if done := query[int](t, s.pool, `SELECT count(*) FROM user_task WHERE state = 'completed' AND node = 'U'`); done != answered {
		t.Errorf("%d tasks are completed, and %d people were told so", done, answered)
	}
	s.releaseAll()
	if got := query[int](t, s.pool, `SELECT deadlocks::int FROM pg_stat_database WHERE datname = current_database()`); got > 0 {
		t.Errorf("%d deadlocks", got)
	}
	s.healthy()
}

// S41: of several completions of one task at once, exactly one succeeds and the others fail.
func TestTasksAtOnce(t *testing.T) {
	const n = 40
	s := newCrowdedSite(t)
	p := s.deploy("U", `"U": {"human": {}, "to": "C"},`+step("C", ""))
	s.startMany(p, n)
	s.at("U", n)
	if _, err := s.pool.Exec(t.Context(), `
		INSERT INTO workflow_run (type, payload)
		SELECT 'graph.complete_task.v1', jsonb_build_object('task', id, 'by', 'anna', 'version', 1) FROM user_task, generate_series(1, 4) ORDER BY random()`); err != nil {
		t.Fatal(err)
	}
	s.raced(n)
	await(t, "all to be answered", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
	})
	got := query[string](t, s.pool, `SELECT string_agg(concat(status, ' ', n), ', ' ORDER BY status)
		FROM (SELECT status, count(*) AS n FROM workflow_run WHERE type = 'graph.complete_task.v1' GROUP BY 1) x`)
	if want := fmt.Sprintf("failed %d, succeeded %d", 3*n, n); got != want {
		t.Errorf("%s; want %s", got, want)
	}
	s.want(map[string]int{"C": n})
	s.healthy()
}

// A worker that starts while another one works takes no run away from it: no lease expires and no run is executed
// twice.
func TestSecondEngine(t *testing.T) {
	const n = 50
	s := newSite(t)
	p := s.deploy("A", step("A", "B", `"ms": "'700'"`)+","+step("B", "", `"ms": "'100'"`))
	s.startMany(p, n)
	s.begun("A", n)
	s.hire()
	s.startMany(p, n)
	s.completed(2 * n)
	if again := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`); again > 0 {
		t.Errorf("%d runs were started again", again)
	}
	if expired := query[int](t, s.pool, `SELECT count(*) FROM workflow_history WHERE event_type = 'expired'`); expired > 0 {
		t.Errorf("%d leases have expired", expired)
	}
	s.healthy()
}

// A token is Ready before its step is leased, Executing while the step is leased, and Completed after it.
func TestTokenStates(t *testing.T) {
	s := newSite(t)
	goOn := make(chan struct{})
	s.happens = func(name string, _ int) {
		if name == "A" {
			<-goOn
		}
	}
	state := func(id uuid.UUID) string {
		return query[string](t, s.pool, `SELECT string_agg(concat(node_id, ' ', state), ', ') FROM token WHERE instance_id = $1`, id)
	}
	id := s.start(s.deploy("A", step("A", "")), `{}`)
	s.begun("A", 1)
	if got := state(id); got != "A Executing" {
		t.Errorf("while its step is executed: %s", got)
	}
	close(goOn)
	s.status(id, graph.Completed)
	if got := state(id); got != "A Completed" {
		t.Errorf("after its step: %s", got)
	}
	idle := s.start(s.deploy("N", `"N": {"do": "nobody.has.this"}`), `{}`)
	s.at("N", 1)
	if got := state(idle); got != "N Ready" {
		t.Errorf("before its step: %s", got)
	}
	s.healthy()
}
