package graph_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// dies kills the worker of the site, and hires another one, when a step is called for the first time: the step is done,
// but no outcome is recorded.
func (s *site) dies(at string) {
	s.happens = func(name string, call int) {
		if name == at && call == 1 {
			s.worker.kill()
			s.worker = s.hire()
		}
	}
}

// startMany starts n instances at once.
func (s *site) startMany(process string, n int) {
	s.t.Helper()
	if _, err := s.pool.Exec(s.t.Context(), `
		INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', jsonb_build_object('process', $1::text) FROM generate_series(1, $2)`, process, n); err != nil {
		s.t.Fatal(err)
	}
}

// completed waits until n instances have completed.
func (s *site) completed(n int) {
	s.t.Helper()
	pgtest.Await(s.t, fmt.Sprintf("%d instances to complete", n), func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED'`) == n
	})
}

// at waits until n live tokens are at a node.
func (s *site) at(node string, n int) {
	s.t.Helper()
	pgtest.Await(s.t, fmt.Sprintf("%d tokens at %s", n, node), func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM process_token WHERE node = $1 AND state IN ('Ready', 'Waiting')`, node) == n
	})
}

// finish completes the open task at a node.
func (s *site) finish(node string) {
	s.t.Helper()
	task := query[uuid.UUID](s.t, s.pool, `SELECT id FROM user_task WHERE state = 'open' AND node = $1`, node)
	if got := s.finished(s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna"}`, task))); got != "succeeded" {
		s.t.Fatalf("the task at %s: %s", node, got)
	}
}

// S03: a branch whose step is done twice, because its worker died before the outcome was recorded, arrives at the join
// once.
func TestBranchDoneAgain(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "C"},`+step("A", "J")+","+step("B", "J")+","+step("C", ""))
	s.dies("A")
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 2, "C": 1})
	if n := query[int](t, s.pool, `SELECT count(*) FROM join_arrival`); n != 2 {
		t.Errorf("%d arrivals, want 2", n)
	}
	s.healthy()
}

// S04: a late outcome of a branch that another worker has settled is refused, and the join keeps waiting for the other
// branches.
func TestZombieArrival(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "U"]}, "U": {"human": {}, "to": "J"}, "J": {"join": "all", "to": "C"},`+step("A", "J")+","+step("C", ""))
	var stale settling.Outcome
	s.happens = func(name string, call int) {
		if name == "A" && call == 1 {
			_ = s.pool.QueryRow(context.Background(), `SELECT id, lease_token FROM workflow_run WHERE node = 'A'`).Scan(&stale.ID, &stale.Token)
			s.worker.kill()
			s.worker = s.hire()
		}
	}
	id := s.start(p, `{}`)
	s.at("J", 1)
	stale.Verdict, stale.Result = settling.Succeed, []byte(`{}`)
	lost, err := settling.Settle(t.Context(), s.pool, "zombie", []settling.Outcome{stale})
	if err != nil || len(lost) != 1 || stale.Token == uuid.Nil {
		t.Errorf("the zombie's report: %d refused, %v", len(lost), err)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM join_arrival`); n != 1 {
		t.Errorf("%d arrivals, want 1", n)
	}
	s.want(map[string]int{"A": 2, "C": 0})
	s.finish("U")
	s.status(id, graph.Completed)
	s.want(map[string]int{"C": 1})
	s.healthy()
}

// S06: if two tokens arrive at a join over one edge, it takes one of them. The other waits for the next round, which
// opens an incident when it can never fire.
func TestTwoTokensOnOneEdge(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["P", "Q"]}, "P": {"human": {}, "to": "m", "on": [{"after": "PT1M", "keep": true, "to": "m"}]}, "Q": {"human": {}, "to": "J"},
		"J": {"join": "all", "to": "E"},`+step("m", "J")+","+step("E", ""))
	id := s.start(p, `{}`)
	s.at("Q", 1)
	pgtest.Elapse(t, s.pool, time.Minute)
	s.at("J", 1)
	s.finish("P")
	s.at("J", 2)
	s.want(map[string]int{"m": 2, "E": 0})
	s.finish("Q")
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'join_unsatisfiable'`, id) == 1
	})
	s.status(id, graph.Waiting)
	s.want(map[string]int{"E": 1})
	if got := query[string](t, s.pool, `SELECT string_agg(concat(round, ' ', joined, ' ', fired), ', ' ORDER BY round) FROM parallel_join`); got != "1 2 t, 2 1 f" {
		t.Errorf("rounds %q, want one that fired, and one that waits", got)
	}
	s.healthy()
}

// S13: an inclusive join waits while a token may still reach it through a loop over its fork. It fires once for each
// execution of the fork.
func TestInclusiveJoinWithLoop(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "X": {"choose": [{"if": "steps.B.n < 2", "to": "F"}], "else": "o"}, "o": {"join": "taken", "to": "D"},`+
		step("A", "o")+","+step("B", "X", `"ms": "100"`, `"n": "'B' in steps ? steps.B.n + 1.0 : 1.0"`)+","+step("D", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 2, "B": 2, "D": 2})
	if early := query[int](t, s.pool, `
		SELECT count(*) FROM activity_instance d JOIN activity_instance b ON b.node_id = 'B' WHERE d.node_id = 'D' AND d.created_at < b.created_at`); early > 0 {
		t.Error("D began before B was over")
	}
	s.healthy()
}

// S19: a step that was lost with its worker, and whose next attempt failed for good, is undone as uncertain, before
// earlier steps.
func TestUndoWhatNobodyHeardOf(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "B")+","+undoable("B", "", `"fail": "'declined'"`))
	s.dies("B")
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "B A" {
		t.Errorf("undone %q, want B A", got)
	}
	got := query[string](t, s.pool, `SELECT string_agg(concat(node_id, ' ', certain), ', ' ORDER BY "order") FROM compensation_record`)
	if want := "A t, B f"; got != want {
		t.Errorf("records %q, want %q", got, want)
	}
	s.healthy()
}

// S23: an undo step whose worker died before the outcome was recorded is done again. Undo steps that completed before
// are not.
func TestUndoAfterCrash(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", undoable("A", "B")+","+undoable("B", "C")+","+undoable("C", "D")+","+step("D", "", `"fail": "'no'"`))
	s.dies("undo B")
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if got := s.undone(id); got != "C B A" {
		t.Errorf("undone %q, want C B A", got)
	}
	s.want(map[string]int{"undo A": 1, "undo B": 2, "undo C": 1})
	s.healthy()
}

// S31: with two workers, each timer fires exactly once.
func TestTimersFireOnce(t *testing.T) {
	s := newSite(t)
	s.hire()
	p := s.deploy("T", `"T": {"wait": "50ms", "to": "B"},`+step("B", ""))
	s.startMany(p, 100)
	s.completed(100)
	s.want(map[string]int{"B": 100})
	s.healthy()
}

// S33: a repeating timer keeps its schedule. After downtime, the missed ticks fire once together, and the next tick is
// due as if nothing had been missed.
func TestRepeatedTimerAfterDowntime(t *testing.T) {
	s := newSite(t)
	p := s.deploy("U", `"U": {"human": {}, "on": [{"every": "PT10M", "times": 3, "to": "remind"}]},`+step("remind", ""))
	id := s.start(p, `{}`)
	s.at("U", 1)
	reminded := func(n int) {
		t.Helper()
		await(t, fmt.Sprintf("reminder %d", n), func() bool { return s.count("remind") == n })
	}
	pgtest.Elapse(t, s.pool, 10*time.Minute)
	reminded(1)
	s.worker.release()
	pgtest.Elapse(t, s.pool, 35*time.Minute)
	s.hire()
	reminded(2)
	await(t, "the next timer", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM timer WHERE status = 'Scheduled' AND due_at - now() BETWEEN '4 minutes' AND '5 minutes'`) == 1
	})
	pgtest.Elapse(t, s.pool, 5*time.Minute)
	reminded(3)
	pgtest.Elapse(t, s.pool, time.Hour)
	time.Sleep(200 * time.Millisecond)
	reminded(3)
	s.status(id, graph.Waiting)
	s.healthy()
}

// S34: if two boundary timers of one node are due at the same time, the other timer is gone after the interrupting one
// has fired.
func TestTwoTimersAtOnce(t *testing.T) {
	const n = 60
	s := newSite(t)
	s.hire()
	p := s.deploy("U", `"U": {"human": {}, "on": [{"after": "PT1M", "to": "X"}, {"after": "PT1M", "keep": true, "to": "Y"}]},`+step("X", "")+","+step("Y", ""))
	s.startMany(p, n)
	s.at("U", n)
	pgtest.Elapse(t, s.pool, time.Minute)
	s.completed(n)
	s.want(map[string]int{"X": n})
	if y := s.count("Y"); y != query[int](t, s.pool, `SELECT count(*) FROM process_event WHERE event_type = 'handler.taken' AND data->>'edge' = 'U>Y'`) || y > n {
		t.Errorf("Y ran %d times", y)
	}
	if left := query[int](t, s.pool, `SELECT count(*) FROM timer WHERE status = 'Scheduled'`); left != 0 {
		t.Errorf("%d timers are left", left)
	}
	s.healthy()
}

// S35: the attempts of a step belong to one run of one token.
func TestTriedAgain(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "B", `"fails": "2"`)+","+step("B", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	got := query[string](t, s.pool, `SELECT string_agg(concat_ws(' ', node_id, status, attempts), ', ' ORDER BY created_at) FROM activity_instance WHERE instance_id = $1`, id)
	if want := "A succeeded 3, B succeeded 1"; got != want {
		t.Errorf("activities %q, want %q", got, want)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_token`); n != 1 {
		t.Errorf("%d tokens, want 1", n)
	}
	s.healthy()
}

// S42: an instance continues with the version it was started with, and a deployed version cannot be changed.
func TestVersions(t *testing.T) {
	s := newSite(t)
	deploy := func(version int, nodes string) (uuid.UUID, error) {
		d, err := graph.Parse(fmt.Appendf(nil, `{"process": "order", "version": %d, "start": "A", "nodes": {%s}}`, version, nodes))
		if err != nil {
			t.Fatal(err)
		}
		return graph.Deploy(t.Context(), s.pool, d)
	}
	one := step("A", "U") + `, "U": {"human": {}, "to": "B"},` + step("B", "")
	first, err := deploy(1, one)
	if err != nil {
		t.Fatal(err)
	}
	old := s.start("order", `{}`)
	s.at("U", 1)
	if _, err := deploy(2, step("A", "C")+","+step("C", "")); err != nil {
		t.Fatal(err)
	}
	s.status(s.start("order", `{}`), graph.Completed)
	s.want(map[string]int{"A": 2, "B": 0, "C": 1})
	if again, err := deploy(1, one); err != nil || again != first {
		t.Errorf("deployed again: %s, %v; want %s", again, err, first)
	}
	if _, err := deploy(1, step("A", "")); err == nil || !strings.Contains(err.Error(), "another text") {
		t.Errorf("an edited text under an old version: %v", err)
	}
	s.finish("U")
	s.status(old, graph.Completed)
	s.want(map[string]int{"B": 1, "C": 1})
	s.healthy()
}

// S44 (e): an each keeps the list it began with, even if the fact that the list came from changes.
func TestEachKeepsItsList(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "W"]}, "W": {"human": {}, "to": "A"},
		"E": {"each": {"list": "steps.A.items", "do": "test.step.v1", "limit": 1}, "in": {"name": "'E'", "ms": "500", "n": "item"}},`+
		step("A", "E", `"items": "'A' in steps ? [4, 5] : [1, 2, 3]"`))
	id := s.start(p, `{}`)
	await(t, "the first element", func() bool { return s.count("E") == 1 })
	s.finish("W")
	s.status(id, graph.Completed)
	got := query[string](t, s.pool, `SELECT string_agg(input->>'n', ' ' ORDER BY input->>'n') FROM activity_instance WHERE instance_id = $1 AND node_id = 'E/item'`, id)
	if got != "1 2 3 4 5" {
		t.Errorf("elements %q, want those of both lists", got)
	}
	if changed := query[int](t, s.pool, `
		SELECT count(*) FROM activity_instance e JOIN activity_instance a ON a.node_id = 'A'
		WHERE e.node_id = 'E/item' AND e.input->>'n' = '3' AND e.created_at > a.completed_at`); changed != 2 {
		t.Error("the list did not change while the each was under way")
	}
	s.healthy()
}
