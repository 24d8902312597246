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

// broken is a site whose steps of type test.broken.v1 fail in a way until they are mended.
func broken(t *testing.T, how func(context.Context) error) (s *site, mend func()) {
	var mended atomic.Bool
	s = newEmptySite(t)
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

// failure returns the status and the reason of failure of an instance.
func (s *site) failure(id uuid.UUID) string {
	s.t.Helper()
	return query[string](s.t, s.pool, `SELECT concat_ws(' ', status, failure_reason) FROM process_instance WHERE id = $1`, id)
}

// A step that fails for good, and whose handler has not declared it, stops its token with an incident, whatever the cause: nothing
// is undone, the rest goes on, and the instance has no failure. Once the cause is mended, a retry has it completed.
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
			s.status(id, graph.Waiting) // once the others are done
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

// A handler's error may have the code of an incident of the engine's: it is told of as handler_error, and a retry does the step anew, as of any other.
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

// What a handler declares fails the instance, whatever its code.
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

// A type that nobody knows opens an incident.
func TestUnknownTypeOpensIncident(t *testing.T) {
	s := newSite(t)
	id := s.start(s.deploy("A", `"A": {"do": "test.unknown.v1", "to": "Z"},`+step("Z", "")), `{}`)
	s.stopped(id, settling.CodeNoHandler, 1)
	s.healthy()
}

// Any error takes the edge for it, technical ones, too, once attempts are used up.
func TestEdgesTakeTechnicalErrors(t *testing.T) {
	for _, edge := range []string{"handler_error", "*"} {
		s, _ := broken(t, bug)
		id := s.start(s.deploy("X", fmt.Sprintf(brokenStep, fmt.Sprintf(`, "on": [{"error": %q, "to": "R"}]`, edge))+","+step("Z", "")+","+step("R", "")), `{}`)
		s.status(id, graph.Completed)
		s.want(map[string]int{"broken": 2, "R": 1, "Z": 0})
		s.healthy()
	}
}

// What fails an instance is what its handler or its definition declares: an error marked with run.Permanent, a throw, "failure": "fail" of
// the node, or of the definition where the node says nothing.
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

// An operator fails an instance that an incident has stopped: what was done is undone, and the step's last error is the reason unless another
// one is given. Whoever asked for it is told of. An instance that undoes already, and one that is not there, is refused in words.
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
		s.done(s.enqueue("graph.fail.v1", fmt.Sprintf(`{"instance": %q}`, id))) // it is over
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
	for id, want := range map[string]string{undoes.String(): "undoes what it has done", uuid.NewString(): "there is no instance"} {
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

// An element that fails stops with an incident; the others are done, and once it is retried all results are there, in their order, each once.
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

// What fails in an instance that was called stops there: its caller goes on to wait. A called instance that has failed is an
// incident of its caller, and a retry calls another one.
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

// A step that somebody has cancelled stops with an incident, and a retry does it.
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

// Retrying in bulk takes the incidents that are meant, the oldest first and no more than asked for, none twice, and shows what it would do unless
// told to do it.
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
