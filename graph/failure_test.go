package graph_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// broken returns a site on which steps of type test.broken.v1 fail with the error of how until mend is called.
func broken(t *testing.T, how func(context.Context) error) (s *site, mend func()) {
	var mended atomic.Bool
	s = newEmptySite(t)
	s.fate.spare() // an attempt that a dead worker had would have another error
	worker.Handle(s.mux, "test.broken.v1", func(ctx context.Context, in map[string]any) (map[string]any, error) {
		s.called(ctx, "broken")
		if mended.Load() {
			return in, nil
		}
		return nil, how(ctx)
	}, worker.Options{Timeout: 300 * time.Millisecond})
	s.worker = s.hire()
	return s, func() { mended.Store(true) }
}

const brokenStep = `"X": {"do": "test.broken.v1", "in": {"n": "7"}, "attempts": 2, "to": "Z"%s}`

func bug(context.Context) error { return errors.New("a bug") }

// failure returns the status and the failure_reason of an instance.
func (s *site) failure(id uuid.UUID) string {
	s.t.Helper()
	return query[string](s.t, s.pool, `SELECT concat_ws(' ', status, failure_reason) FROM process_instance WHERE id = $1`, id)
}

// A step that fails for good without a declared failure stops its token with an incident, for every kind of error:
// nothing is undone, other branches continue, and the instance does not fail. After the cause is gone, a retry
// completes the instance.
func TestFailureOpensIncident(t *testing.T) {
	for name, c := range map[string]struct {
		how  func(context.Context) error
		code string
	}{
		"an error":     {bug, "handler_error"},
		"a code":       {func(context.Context) error { return run.WithCode("busy", errors.New("it is busy")) }, "busy"},
		"a panic":      {func(context.Context) error { panic("a bug") }, "panic"},
		"a time limit": {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, "time_limit"},
		"a status": {func(context.Context) error {
			return run.Permanent(settling.Technical(run.WithCode("unauthorized", errors.New("status 401"))))
		}, "unauthorized"},
	} {
		t.Run(name, func(t *testing.T) {
			s, mend := broken(t, c.how)
			p := s.deploy("U", undoable("U", "F")+`, "F": {"fork": ["X", "O"]},`+fmt.Sprintf(brokenStep, "")+","+step("O", "P")+","+step("P", "")+","+step("Z", "", `"n": "steps.X.n"`))
			id := s.start(p, `{}`)
			incident := s.stopped(id, c.code, 1)
			s.status(id, graph.Waiting) // when the other branches are done
			s.want(map[string]int{"U": 1, "O": 1, "P": 1, "Z": 0, "undo U": 0})
			if got := s.failure(id); got != "WAITING" {
				t.Errorf("the instance is %s", got)
			}
			mend()
			s.retry(incident, "")
			s.status(id, graph.Completed)
			s.want(map[string]int{"U": 1, "O": 1, "P": 1, "Z": 1, "undo U": 0})
			if n := query[string](t, s.pool, `SELECT result->>'n' FROM workflow_run WHERE node = 'Z'`); n != "7" {
				t.Errorf("behind the step its result is %s", n)
			}
			s.healthy()
		})
	}
}

// A handler's error that has the code of one of the engine's own incidents is reported as handler_error, and a retry
// executes the step again, as after any other error.
func TestCodesOfIncidents(t *testing.T) {
	for _, code := range []string{"output_failed", "mapping_failed", "list_broken", "compensation_failed", "not_settled", "not_leased", "not_reached", settling.CodeResult} {
		s, mend := broken(t, func(context.Context) error { return run.WithCode(code, errors.New("a bug")) })
		id := s.start(s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", "")), `{}`)
		incident := s.stopped(id, "handler_error", 1)
		if got := query[string](t, s.pool, `SELECT message FROM incident WHERE id = $1`, incident); got != code+": a bug" {
			t.Errorf("%s: the incident says %q", code, got)
		}
		mend()
		s.retry(incident, "")
		s.status(id, graph.Completed)
		s.want(map[string]int{"broken": 3, "Z": 1})
		s.healthy()
	}
}

// A failure that a handler declares (run.Permanent) fails the instance, even with a code that the engine itself uses.
func TestDeclaredCodes(t *testing.T) {
	for _, code := range []string{settling.CodeRefused, settling.CodeTooLate, settling.CodeExpired, settling.CodePayload, settling.CodeResult, "output_failed"} {
		s, _ := broken(t, func(context.Context) error { return run.Permanent(run.WithCode(code, errors.New("declined"))) })
		id := s.start(s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", "")), `{}`)
		s.status(id, graph.Failed)
		if got := s.failure(id); got != "FAILED X: "+code+": declined" {
			t.Errorf("%s: %s", code, got)
		}
	}
}

// A step of a type without a handler opens an incident.
func TestUnknownTypeOpensIncident(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", `"A": {"do": "test.unknown.v1", "to": "Z"},`+step("Z", "")), `{}`)
	s.stopped(id, settling.CodeNoHandler, 1)
	s.healthy()
}

// An error edge takes any error with its code once the attempts are used up, also an undeclared one such as
// handler_error.
func TestEdgesTakeTechnicalErrors(t *testing.T) {
	for _, edge := range []string{"handler_error", "*"} {
		s, _ := broken(t, bug)
		id := s.start(s.deploy("X", fmt.Sprintf(brokenStep, fmt.Sprintf(`, "on": [{"error": %q, "to": "R"}]`, edge))+","+step("Z", "")+","+step("R", "")), `{}`)
		s.status(id, graph.Completed)
		s.want(map[string]int{"broken": 2, "R": 1, "Z": 0})
		s.healthy()
	}
}

// An undeclared error fails the instance only if "failure" of the node is "fail", or that of the definition is and the
// node has none. Otherwise it opens an incident.
func TestDeclaredFailures(t *testing.T) {
	for name, c := range map[string]struct{ process, node, want string }{
		"as shipped":     {"", "", "WAITING"},
		"of the node":    {"", "fail", "FAILED X: handler_error: a bug"},
		"of the process": {"fail", "", "FAILED X: handler_error: a bug"},
		"of both":        {"fail", "incident", "WAITING"},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := broken(t, bug)
			of := func(text string) string {
				if text == "" {
					return ""
				}
				return fmt.Sprintf(`, "failure": %q`, text)
			}
			p := "p" + strings.ReplaceAll(uuid.NewString(), "-", "")
			define(t, s.pool, fmt.Sprintf(`{"process": %q, "version": 1, "start": "U"%s, "nodes": {%s}}`, p, of(c.process), undoable("U", "X")+","+fmt.Sprintf(brokenStep, of(c.node))+","+step("Z", "")))
			id := s.start(p, `{}`)
			if strings.HasPrefix(c.want, "FAILED") {
				s.status(id, graph.Failed)
				s.want(map[string]int{"undo U": 1})
			} else {
				s.stopped(id, "handler_error", 1)
			}
			if got := s.failure(id); got != c.want {
				t.Errorf("the instance is %s, want %s", got, c.want)
			}
			s.healthy()
		})
	}
}

// graph.fail.v1 makes an instance that an incident stops undo its completed steps and fail. The failure_reason is the
// given one, or the last error of the step. The history has who asked for it. The run fails with a message if the
// instance is already compensating or does not exist, and succeeds if the instance is over.
func TestFail(t *testing.T) {
	s, _ := broken(t, bug)
	p := s.deploy("U", undoable("U", "X")+","+fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
	for more, want := range map[string]string{``: "FAILED X: handler_error: a bug", `, "reason": "the ship has sunk"`: "FAILED the ship has sunk"} {
		id := s.start(p, `{}`)
		s.stopped(id, "handler_error", 1)
		s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q%s}`, id, more)))
		s.status(id, graph.Failed)
		if got := s.undone(id); got != "U" {
			t.Errorf("undone %q, want U", got)
		}
		if got := s.failure(id); got != want {
			t.Errorf("the instance is %s, want %s", got, want)
		}
		s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))) // the instance is over
	}
	plain := s.start(s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", "")), `{}`)
	s.stopped(plain, "handler_error", 1)
	s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q, "by": "anna"}`, plain)))
	s.status(plain, graph.Failed)
	if got := query[string](t, s.pool, `SELECT actor FROM process_state_history WHERE instance_id = $1 AND to_status = 'FAILED'`, plain); got != "anna" {
		t.Errorf("it was failed by %q", got)
	}
	undoes := s.start(s.deploy("A", undoable("A", "X", `"undo_fails": "true"`)+","+fmt.Sprintf(brokenStep, "")+","+step("Z", "")), `{}`)
	s.stopped(undoes, "handler_error", 1)
	s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, undoes)))
	s.stopped(undoes, "compensation_failed", 1)
	for id, want := range map[string]string{undoes.String(): "is already undoing its completed steps", uuid.NewString(): "there is no instance"} {
		again := s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))
		if got := s.finished(again); got != "failed" {
			t.Errorf("failing %s has %s", id, got)
		}
		if got := query[string](t, s.pool, `SELECT last_error FROM workflow_run WHERE id = $1`, again); !strings.Contains(got, want) {
			t.Errorf("it says %s, want %s", got, want)
		}
	}
	s.healthy()
}

// A list element that fails stops with an incident, and the other elements are done. After its retry the list has the
// result of each element exactly once, in order.
func TestElementOpensIncident(t *testing.T) {
	s := newEmptySite(t)
	var mended atomic.Bool
	worker.Handle(s.mux, "test.item.v1", func(ctx context.Context, in struct {
		Item int `json:"item"`
	}) (int, error) {
		s.called(ctx, fmt.Sprint(in.Item))
		if in.Item == 2 && !mended.Load() {
			return 0, errors.New("a bug")
		}
		return in.Item * 10, nil
	})
	s.worker = s.hire()
	id := s.start(s.deploy("E", `"E": {"each": {"list": "[1, 2, 3, 4]", "do": "test.item.v1", "limit": 2}, "attempts": 1, "to": "Z"},`+step("Z", "", `"all": "steps.E"`)), `{}`)
	incident := s.stopped(id, "handler_error", 1)
	await(t, "the others", func() bool { return s.count("1") == 1 && s.count("3") == 1 && s.count("4") == 1 })
	mended.Store(true)
	s.retry(incident, "")
	s.status(id, graph.Completed)
	if got := query[string](t, s.pool, `SELECT result->>'all' FROM workflow_run WHERE node = 'Z'`); got != "[10, 20, 30, 40]" {
		t.Errorf("the results are %s", got)
	}
	s.healthy()
}

// While an incident stops a called instance, its caller waits. If the called instance fails, the caller gets an
// incident, and a retry calls a new instance.
func TestCalledOpensIncident(t *testing.T) {
	s, mend := broken(t, bug)
	child := s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
	id := s.start(s.deploy("U", undoable("U", "C")+fmt.Sprintf(`, "C": {"call": {"process": %q, "undo": "none"}, "to": "D"},`, child)+step("D", "")), `{}`)
	called := func(n int) (c uuid.UUID) {
		t.Helper()
		pgtest.Await(t, "the call", func() bool {
			return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE parent_process_instance_id = $1`, id) == n
		})
		return query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance WHERE parent_process_instance_id = $1 ORDER BY created_at DESC LIMIT 1`, id)
	}
	first := called(1)
	s.stopped(first, "handler_error", 1)
	if got := s.failure(id); got != "WAITING" {
		t.Errorf("the caller is %s", got)
	}
	s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, first)))
	incident := s.stopped(id, "child_failed", 1)
	s.want(map[string]int{"undo U": 0, "D": 0})
	mend()
	s.retry(incident, "")
	s.status(called(2), graph.Completed)
	s.status(id, graph.Completed)
	s.want(map[string]int{"undo U": 0, "D": 1})
	s.healthy()
}

// A step that somebody cancels stops its token with an incident, and nothing is undone.
func TestCancelledStepOpensIncident(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("U", undoable("U", "A")+","+step("A", "", `"ms": "'10000'"`)), `{}`)
	s.begun("A", 1)
	if got := query[string](t, s.pool, `SELECT workflow_cancel(id, 'not today') FROM workflow_run WHERE node = 'A' AND status = 'leased'`); got != "cancelled" {
		t.Fatal(got)
	}
	s.stopped(id, "cancelled", 1)
	s.want(map[string]int{"undo U": 0})
	s.healthy()
}

// process_retry_incidents retries the incidents that its arguments select, at most as many as asked for and none twice.
// Without dry_run => false it only shows them.
func TestRetryInBulk(t *testing.T) {
	s, mend := broken(t, bug)
	p, q := s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", "")), s.deploy("X", fmt.Sprintf(brokenStep, "")+","+step("Z", ""))
	for range 12 {
		s.start(p, `{}`)
	}
	other := s.start(q, `{}`)
	await(t, "the incidents", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE resolved_at IS NULL`) == 13
	})
	mend()
	retry := func(args string) (n int) {
		t.Helper()
		return query[int](t, s.pool, `SELECT count(*) FROM process_retry_incidents(`+args+`)`)
	}
	mine := fmt.Sprintf(`'%s', 'X', 'handler_error', 1`, p)
	for args, want := range map[string]int{mine: 12, `most => 5`: 5, ``: 13, mine + `, most => 5`: 5, fmt.Sprintf(`'%s', version => 2`, p): 0, `code => 'other'`: 0, `node => 'Z'`: 0} {
		if n := retry(args); n != want {
			t.Errorf("process_retry_incidents(%s) shows %d, want %d", args, n, want)
		}
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.retry.v1'`); n != 0 {
		t.Errorf("%d were retried by looking", n)
	}
	if n := retry(mine + `, most => 2, dry_run => false`); n != 2 {
		t.Errorf("%d canaries, want 2", n)
	}
	s.completed(2)
	if n := retry(mine + `, per_second => 0.001, most => 4, dry_run => false`); n != 4 { // the second one is due in 1000 s
		t.Errorf("%d were retried slowly, want 4", n)
	}
	s.completed(3)
	if n := retry(mine + `, dry_run => false`); n != 6 {
		t.Errorf("%d were retried, want the 6 that nobody has asked for yet", n)
	}
	s.completed(9)
	if got := s.failure(other); got != "WAITING" {
		t.Errorf("another process is %s", got)
	}
	if _, err := s.pool.Exec(t.Context(), `SELECT process_retry_incidents(per_second => -1)`); err == nil || !strings.Contains(err.Error(), "per_second above 0") {
		t.Errorf("a negative rate: %v", err)
	}
}
