package graph_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

func declined(context.Context) error {
	return run.Permanent(run.WithCode("declined", errors.New("it is declined")))
}

// restart restarts a failed instance, and returns the new instance, or uuid.Nil and the reason of the refusal.
func (s *site) restart(id uuid.UUID) (uuid.UUID, string) {
	s.t.Helper()
	of := s.enqueue("graph.restart.v1", fmt.Sprintf(`{"instance": %q, "by": "anna"}`, id))
	got := s.outcome(of)
	if !strings.HasPrefix(got, "succeeded") {
		return uuid.Nil, got
	}
	return query[uuid.UUID](s.t, s.pool, `SELECT (result->>'instance')::uuid FROM workflow_run WHERE id = $1`, of), got
}

// Restarting a failed instance starts a new one, with the same key, input, tenant and priority, which continues where
// the old one failed. Nodes that are done are not done again, and later nodes read their results. This holds for
// conditions, forks and joins, scopes, lists, calls, user tasks, messages, timers and races.
func TestRestart(t *testing.T) {
	child := func(s *site) string { return s.deployOut("K", step("K", "", `"k": "input.n"`), `{'k': steps.K.k}`) }
	a := func(next string) string { return step("A", next, `"n": "5"`) }
	x := fmt.Sprintf(brokenStep, "")
	z := func(n string) string { return step("Z", "", `"n": "`+n+` + steps.X.n"`) }
	for name, c := range map[string]struct {
		start, nodes string
		during       func(s *site, id uuid.UUID)
		want         map[string]int
		n            string
	}{
		"a sequence":  {start: "A", nodes: a("X") + "," + x + "," + z("steps.A.n"), want: map[string]int{"A": 1}, n: "12"},
		"a condition": {start: "A", nodes: a("C") + `, "C": {"choose": [{"if": "steps.A.n > 4", "to": "X"}], "else": "Z"},` + x + "," + z("steps.A.n"), want: map[string]int{"A": 1}, n: "12"},
		"a fork": {start: "F", nodes: `"F": {"fork": ["A", "S"]},` + a("B") + "," + step("B", "J") + `, "S": {"await": {"signal": "go"}, "to": "X"}, "J": {"join": "all", "to": "Z"},
			"X": {"do": "test.broken.v1", "in": {"n": "7"}, "to": "J"},` + z("steps.A.n"), during: func(s *site, id uuid.UUID) {
			s.at("J", 1)
			s.enqueue("graph.signal.v1", `{"name": "go"}`)
		}, want: map[string]int{"A": 1, "B": 1}, n: "12"},
		"a scope": {start: "S", nodes: `"S": {"scope": {"start": "A", "nodes": {` + a("X") + `, "X": {"do": "test.broken.v1", "in": {"n": "7"}}}}, "to": "Z"},` + z("steps.A.n"), want: map[string]int{"A": 1}, n: "12"},
		"a list":  {start: "E", nodes: `"E": {"each": {"list": "[1, 2, 3]", "do": "test.step.v1"}, "in": {"name": "'e'", "item": "item"}, "to": "X"},` + x + "," + z("steps.E[2].item"), want: map[string]int{"e": 3}, n: "10"},
		"a person": {start: "H", nodes: `"H": {"human": {}, "to": "X"},` + x + "," + z("steps.H.n"), during: func(s *site, id uuid.UUID) {
			s.at("H", 1)
			s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "bob", "output": {"n": 4}}`, query[uuid.UUID](s.t, s.pool, `SELECT id FROM user_task`)))
		}, n: "11"},
		"a message": {start: "M", nodes: `"M": {"await": {"message": "m", "key": "'k'"}, "to": "X"},` + x + "," + z("steps.M.n"), during: func(s *site, id uuid.UUID) {
			s.waitsFor(1)
			s.enqueue("graph.message.v1", `{"name": "m", "key": "k", "payload": {"n": 3}}`)
		}, n: "10"},
		"a time": {start: "W", nodes: `"W": {"wait": "1ms", "to": "X"},` + x + "," + z("1.0"), n: "8"},
		"a race": {start: "R", nodes: `"R": {"race": ["M", "W"]}, "M": {"await": {"message": "m", "key": "'k'"}, "to": "X"}, "W": {"wait": "1h", "to": "Z"},` + x + "," + z("steps.M.n"), during: func(s *site, id uuid.UUID) {
			s.waitsFor(1)
			s.enqueue("graph.message.v1", `{"name": "m", "key": "k", "payload": {"n": 3}}`)
		}, n: "10"},
		"a call": {start: "A", nodes: a("C") + `, "C": {"call": {"process": "CHILD"}, "in": {"n": "steps.A.n"}, "to": "X"},` + x + "," + z("steps.C.k"), want: map[string]int{"A": 1, "K": 1}, n: "12"},
		"a correction": {start: "A", nodes: a("H") + `, "H": {"human": {}, "to": "X"},` + x + "," + z("steps.A.n"), during: func(s *site, id uuid.UUID) {
			s.at("H", 1)
			s.correct(id, "A", `{"n": 50}`)
			s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "bob"}`, query[uuid.UUID](s.t, s.pool, `SELECT id FROM user_task`)))
		}, want: map[string]int{"A": 1}, n: "57"},
		"what was not undone": {start: "A", nodes: a("U") + "," + undoable("U", "B") + "," + step("B", "X") + "," + x + "," + z("steps.A.n"), want: map[string]int{"A": 1, "U": 2, "undo U": 1, "B": 2}, n: "12"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, mend := broken(t, declined)
			p := s.deploy(c.start, strings.ReplaceAll(c.nodes, "CHILD", child(s)))
			begun := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "input": {"a": 1}, "priority": 3, "tenant": "acme"}`, p))
			s.finished(begun)
			old := query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE business_key = '7'`)
			if c.during != nil {
				c.during(s, old)
			}
			s.status(old, graph.Failed)
			if why := query[string](t, s.pool, `SELECT process_why($1)`, old); !strings.HasPrefix(why, "FAILED ") || !strings.Contains(why, `'graph.restart.v1', '{"instance": "`+old.String()+`"}'`) {
				t.Errorf("of one that has failed process_why says %q", why)
			}
			for range 2 { // the new instance fails, too; the next restart takes over what it has taken over
				id, how := s.restart(old)
				if id == uuid.Nil {
					t.Fatal(how)
				}
				if why := query[string](t, s.pool, `SELECT process_why($1)`, old); !strings.Contains(why, "started again as "+id.String()) {
					t.Errorf("of the first one process_why says %q", why)
				}
				s.status(id, graph.Failed)
				if _, how := s.restart(old); !strings.Contains(how, "failed conflict instance: "+old.String()+" was started again already") {
					t.Errorf("once more: %s", how)
				}
				old = id
			}
			mend()
			id, how := s.restart(old)
			if id == uuid.Nil {
				t.Fatal(how)
			}
			s.status(id, graph.Completed)
			s.called(t.Context(), "") // its result does not matter
			want := map[string]int{"broken": 4, "Z": 1}
			for node, n := range c.want {
				if n > 1 || strings.HasPrefix(node, "undo") { // steps that are done again by each restart, and list e
					n = map[string]int{"U": 4, "undo U": 3, "B": 4, "e": 3}[node]
				}
				want[node] = n
			}
			s.want(want)
			if n := query[string](t, s.pool, `SELECT result->>'n' FROM workflow_run WHERE node = 'Z' AND status = 'succeeded'`); n != c.n {
				t.Errorf("behind it %s is read, want %s", n, c.n)
			}
			if got := query[string](t, s.pool, `SELECT string_agg(DISTINCT concat_ws(' ', business_key, input_payload, priority, tenant_id), ', ') FROM process_instance WHERE parent_token_id IS NULL`); got != `7 {"a": 1} 3 acme` {
				t.Errorf("they are %s", got)
			}
			if got := query[string](t, s.pool, `SELECT string_agg(concat_ws(' ', event_type, data->>'from' = $2::text, data->>'by'), ', ') FROM process_event WHERE instance_id = $1 AND event_type LIKE 'instance.restart%'`, id, old.String()); got != "instance.restarts t anna" {
				t.Errorf("it is told %s", got)
			}
			if got := s.outcome(s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "input": {"a": 1}, "tenant": "acme"}`, p))); got != "succeeded v1" {
				t.Errorf("a start with its key: %s", got)
			}
			s.healthy()
		})
	}
}

// A restart is refused with a message, and starts nothing, if it is not certain what the failed instance has done.
func TestRestartRefused(t *testing.T) {
	x := fmt.Sprintf(brokenStep, "")
	for name, c := range map[string]struct {
		start, nodes, want string
		during             func(s *site, id uuid.UUID)
	}{
		"a loop":                              {start: "A", nodes: step("A", "C") + `, "C": {"choose": [{"if": "has(steps.B)", "to": "X"}], "else": "B"},` + step("B", "A") + "," + x + "," + step("Z", ""), want: "node A was visited more than once"},
		"an error edge":                       {start: "A", nodes: `"A": {"do": "test.step.v1", "in": {"name": "'A'", "fail": "'no'"}, "on": [{"error": "no", "to": "B"}], "to": "X"}` + "," + step("B", "X") + "," + x + "," + step("Z", ""), want: "it has come to node B by a path that a restart does not repeat"},
		"an error edge before what is undone": {start: "A", nodes: `"A": {"do": "test.step.v1", "in": {"name": "'A'", "fail": "'no'"}, "on": [{"error": "no", "to": "B"}], "to": "U"}` + "," + step("B", "U") + "," + undoable("U", "X") + "," + x + "," + step("Z", ""), want: "it has come to node B by a path that a restart does not repeat"},
		"a timer's edge":                      {start: "H", nodes: `"H": {"human": {}, "on": [{"after": "1ms", "to": "B"}]},` + step("B", "X") + "," + x + "," + step("Z", ""), want: "it has come to node B by a path that a restart does not repeat"},
		"a list in part":                      {start: "E", nodes: `"E": {"each": {"list": "[1, 2, 3]", "do": "test.step.v1", "limit": 1}, "in": {"name": "'e'", "fail": "item == 2.0 ? dyn('no') : dyn(1)"}, "to": "X"},` + x + "," + step("Z", ""), want: "1 of the 3 elements of list E are done"},
		"a call in part": {start: "C", nodes: `"C": {"call": {"process": "CHILD"}, "to": "Z"},` + step("Z", ""), want: "has done K, which is not undone", during: func(s *site, id uuid.UUID) {
			s.stopped(id, "child_failed", 1)
			s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))
		}},
		"a call that failed, and that retention has removed": {start: "C", nodes: `"C": {"call": {"process": "CHILD"}, "to": "Z"},` + step("Z", ""), want: "the instance that node C called was removed", during: func(s *site, id uuid.UUID) {
			s.stopped(id, "child_failed", 1)
			s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))
			s.status(id, graph.Failed)
			pgtest.ByHand(s.t, s.pool, `DELETE FROM process_instance WHERE parent_token_id IS NOT NULL`)
		}},
		"a call that was cut off, and that retention has removed": {start: "F", nodes: `"F": {"fork": ["C", "S"]}, "C": {"call": {"process": "LASTING"}, "to": "Z"}, "S": {"await": {"signal": "go"}, "to": "X"},` + x + "," + step("Z", ""), want: "the instance that node C called was removed", during: func(s *site, id uuid.UUID) {
			s.at("H", 1)
			s.enqueue("graph.signal.v1", `{"name": "go"}`)
			s.status(id, graph.Failed)
			await(s.t, "the one that was called to end", func() bool {
				return query[int](s.t, s.pool, `SELECT count(*) FROM process_instance WHERE completed_at IS NULL`) == 0
			})
			pgtest.Elapse(s.t, s.pool, 3*time.Minute)
			pgtest.ByHand(s.t, s.pool, `DELETE FROM process_instance WHERE parent_token_id IS NOT NULL`)
		}},
		"one that was started again, as one that is gone": {start: "X", nodes: x + "," + step("Z", ""), want: "it was started again already", during: func(s *site, id uuid.UUID) {
			s.status(id, graph.Failed)
			again, how := s.restart(id)
			if again == uuid.Nil {
				s.t.Fatal(how)
			}
			s.status(again, graph.Failed)
			pgtest.ByHand(s.t, s.pool, `DELETE FROM process_instance WHERE id = '`+again.String()+`'`)
		}},
		"a step that was cut off": {start: "F", nodes: `"F": {"fork": ["L", "S"]},` + step("L", "", `"ms": "20000"`) + `, "S": {"await": {"signal": "go"}, "to": "X"},` + x + "," + step("Z", ""), want: "step L was cut off", during: func(s *site, id uuid.UUID) {
			s.begun("L", 1)
			s.enqueue("graph.signal.v1", `{"name": "go"}`)
		}},
		"one that completes": {start: "H", nodes: `"H": {"human": {}}`, want: "is WAITING; retry its incident"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := broken(t, declined)
			child := s.deploy("K", step("K", "X")+","+fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
			lasting := s.deploy("K", step("K", "H")+`, "H": {"human": {}}`)
			id := s.start(s.deploy(c.start, strings.NewReplacer("CHILD", child, "LASTING", lasting).Replace(c.nodes)), `{}`)
			if c.during != nil {
				c.during(s, id)
			}
			if name != "one that completes" {
				s.status(id, graph.Failed)
			} else {
				s.at("H", 1)
			}
			n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`)
			if _, how := s.restart(id); !strings.HasPrefix(how, "failed conflict instance: "+id.String()) || !strings.Contains(how, c.want) {
				t.Errorf("it is %s, want %s", how, c.want)
			}
			if now := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); now != n {
				t.Errorf("%d instances, want %d", now, n)
			}
			if name == "a call in part" {
				if _, how := s.restart(query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE parent_token_id IS NOT NULL`)); !strings.Contains(how, "was called by another instance") {
					t.Errorf("the one that was called: %s", how)
				}
			}
			if name == "a step that was cut off" {
				pgtest.Elapse(t, s.pool, 3*time.Minute)
				if again, how := s.restart(id); again == uuid.Nil {
					t.Errorf("three minutes later: %s", how)
				}
			}
			s.healthy()
		})
	}
	s := newSite(t)
	if _, how := s.restart(uuid.New()); !strings.Contains(how, "instance: there is no instance ") {
		t.Errorf("one that is not there: %s", how)
	}
}

// A restart takes over a call whose first called instance failed and whose retry completed. The steps of neither are
// done again.
func TestRestartAfterACallTriedAgain(t *testing.T) {
	s, mend := broken(t, declined)
	child := s.deploy("K", step("K", "X")+","+fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
	old := s.start(s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q}, "to": "Y"},`, child)+step("Y", "", `"fail": "'no'"`)), `{}`)
	first := s.stopped(old, "child_failed", 1)
	mend()
	s.retry(first, "")
	s.status(old, graph.Failed)
	id, how := s.restart(old)
	if id == uuid.Nil {
		t.Fatal(how)
	}
	s.status(id, graph.Failed) // at Y again
	s.want(map[string]int{"K": 2, "Z": 1})
	s.healthy()
}

// Of several restarts and starts with "again" of one key at the same time, exactly one makes an instance.
func TestRestartsAtOnce(t *testing.T) {
	s, mend := broken(t, declined)
	p := s.deploy("A", step("A", "X")+","+fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
	s.finished(s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7"}`, p)))
	old := query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance`)
	s.status(old, graph.Failed)
	s.releaseAll()
	mend()
	s.hesitant(8)
	for range 4 {
		s.enqueue("graph.restart.v1", fmt.Sprintf(`{"instance": %q}`, old))
		s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "again": true}`, p))
	}
	s.hire()
	await(t, "all to be answered", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type LIKE 'graph.%' AND finished_at IS NULL`) == 0
	})
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 2 {
		t.Errorf("%d instances, want 2", n)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.restart.v1' AND status = 'succeeded'`); n > 1 {
		t.Errorf("%d restarts have succeeded", n)
	}
	s.healthy()
}

// workflow_retry does not retry the run of a step. It says what to do instead: retry the incident that holds the step,
// restart the instance if that has failed, or nothing if the process has gone on. For a step that has not failed it
// says so.
func TestRetryOfAStep(t *testing.T) {
	s, mend := broken(t, bug)
	retry := func(id uuid.UUID, node string) string {
		return query[string](t, s.pool, `SELECT workflow_retry(r.id) FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE t.instance_id = $1 AND r.node = $2 ORDER BY r.id LIMIT 1`, id, node)
	}
	x := fmt.Sprintf(brokenStep, "") + "," + step("Z", "H") + `, "H": {"human": {}}`
	held := s.start(s.deploy("X", x), `{}`)
	incident := s.stopped(held, "handler_error", 1)
	if got, want := retry(held, "X"), fmt.Sprintf("not retried: incident %s, handler_error, holds this step; retry that: workflowctl retry-incident %[1]s", incident); got != want {
		t.Errorf("held: %s, want %s", got, want)
	}
	taken := s.start(s.deploy("X", fmt.Sprintf(brokenStep, `, "on": [{"error": "*", "to": "Z"}]`)+","+step("Z", "H")+`, "H": {"human": {}}`), `{}`)
	s.at("H", 1)
	if got, want := retry(taken, "X"), "not retried: a step of a process, which has gone on"; got != want {
		t.Errorf("with an edge: %s, want %s", got, want)
	}
	if got, want := retry(taken, "Z"), "not failed: succeeded"; got != want {
		t.Errorf("of a success: %s, want %s", got, want)
	}
	mend()
	s.retry(incident, "")
	s.at("H", 2)
	if got, want := retry(held, "X"), "not retried: a step of a process, which has gone on"; got != want {
		t.Errorf("retried: %s, want %s", got, want)
	}
	s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, held))
	s.status(held, graph.Cancelled)
	if got, want := retry(held, "X"), fmt.Sprintf("not retried: a step of instance %s, which is CANCELLED", held); got != want {
		t.Errorf("cancelled: %s, want %s", got, want)
	}
	s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, taken))
	s.status(taken, graph.Failed)
	if got, want := retry(taken, "X"), fmt.Sprintf("not retried: a step of instance %s, which is FAILED; start that again: workflowctl restart %[1]s", taken); got != want {
		t.Errorf("failed: %s, want %s", got, want)
	}
	s.healthy()
}
