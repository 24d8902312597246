package graph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A site is a database and its workers, on which processes run.
type site struct {
	t    *testing.T
	pool *pgxpool.Pool
	mux  *worker.Mux

	mu    sync.Mutex
	calls []string                      // names of steps, in the order of their starts
	runs  map[string]map[uuid.UUID]bool // the runs that called a step, by its name

	undoWorks bool // undo steps succeed, even those with "undo_fails"

	happens func(name string, call int) // if not nil, called at the start of each step or undo step

	engine worker.Processes
	worker *mortal
	hired  []*mortal
	change func(*worker.Config) // changes the config of workers that are hired from now on
	fate   *fate                // nil: its workers are not cut off
	log    *testWriter
}

// newSite returns a site with one worker, which has the engine and two handlers. test.step.v1 notes payload.name and
// returns the payload; it sleeps for payload.ms before, fails its first payload.fails calls, and fails for good with
// the code payload.fail. test.undo.v1 notes "undo " and the name of the step that it undoes.
func newSite(t *testing.T) *site {
	t.Helper()
	t.Parallel() // each test has a database and a worker of its own, and mostly waits
	s := newEmptySite(t)
	s.worker = s.hire()
	return s
}

// newEmptySite returns a site without a worker.
func newEmptySite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, pool: pgtest.New(t), mux: worker.NewMux(), runs: map[string]map[uuid.UUID]bool{}, fate: newFate(t), log: &testWriter{t: t}}
	t.Cleanup(s.log.close)
	worker.Handle(s.mux, "test.step.v1", s.perform)
	worker.Handle(s.mux, "test.undo.v1", func(ctx context.Context, in struct {
		Input   map[string]any `json:"input"`
		Output  any            `json:"output"`
		Run     uuid.UUID      `json:"run"`
		Certain bool           `json:"certain"`
	}) (struct{}, error) {
		s.called(ctx, "undo "+fmt.Sprint(in.Input["name"]))
		s.mu.Lock()
		defer s.mu.Unlock()
		if in.Input["undo_fails"] == true && !s.undoWorks {
			return struct{}{}, run.Permanent(fmt.Errorf("it was told to fail"))
		}
		return struct{}{}, nil
	})
	s.engine = copied(t, s.pool)
	return s
}

// perform is the handler of test.step.v1.
func (s *site) perform(ctx context.Context, in map[string]any) (map[string]any, error) {
	call := s.called(ctx, fmt.Sprint(in["name"]))
	if ms, err := strconv.Atoi(fmt.Sprint(in["ms"])); err == nil {
		if ms >= 10_000 { // the test cuts this step off; shorter steps ignore ctx and report late
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		time.Sleep(time.Duration(ms) * time.Millisecond)
	}
	if n, err := strconv.Atoi(fmt.Sprint(in["fails"])); err == nil && call <= n {
		return nil, fmt.Errorf("not now")
	}
	if code, ok := in["fail"].(string); ok {
		return nil, run.Permanent(run.WithCode(code, fmt.Errorf("it was told to fail")))
	}
	return in, nil
}

// altered is an engine whose parts a test changes with by.
type altered struct {
	worker.Processes
	by func(*hook.Engine)
}

func (a altered) Parts() hook.Engine {
	parts := a.Processes.Parts()
	a.by(&parts)
	return parts
}

// afterAnswers makes each handler of the engine call do when it is done, before its run is settled.
func afterAnswers(e *hook.Engine, do func()) {
	for typ, answer := range e.Handlers {
		e.Handlers[typ] = func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
			result, err := answer(ctx, payload)
			do()
			return result, err
		}
	}
}

// leaseLength is the lease of the workers of a site. A slow machine may stall for seconds.
const leaseLength = 5 * time.Second

// hire starts another worker.
func (s *site) hire(look ...func(*mortal, *pgxpool.Config)) *mortal {
	s.t.Helper()
	if s.fate != nil {
		look = append(look, s.doom)
	}
	m := employ(s.t, s.pool, func(pool *pgxpool.Pool) worker.Config {
		c := worker.Config{
			Pool: pool, Mux: s.mux, Prefixes: []string{"test."}, Processes: s.engine, Retention: worker.Retention{Off: true},
			Lease: leaseLength, PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
			Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond},
		}
		if s.change != nil {
			s.change(&c)
		}
		return c
	}, look...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hired = append(s.hired, m)
	return m
}

// releaseAll stops all workers and waits until they have ended.
func (s *site) releaseAll() {
	s.mu.Lock()
	hired := slices.Clone(s.hired)
	s.mu.Unlock()
	for _, m := range hired {
		m.release()
	}
}

// A testWriter writes the logs of workers to the test's log until the test is over.
type testWriter struct {
	t *testing.T

	mu   sync.Mutex
	over bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.t.Logf("%s", p[:len(p)-1])
	}
	return len(p), nil
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
}

// called notes a call of a step, and returns how many calls of it there have been.
func (s *site) called(ctx context.Context, name string) (n int) {
	s.mu.Lock()
	s.calls = append(s.calls, name)
	if s.runs[name] == nil {
		s.runs[name] = map[uuid.UUID]bool{}
	}
	s.runs[name][run.FromContext(ctx).ID] = true
	for _, c := range s.calls {
		if c == name {
			n++
		}
	}
	s.mu.Unlock()
	if s.happens != nil {
		s.happens(name, n)
	}
	return n
}

// count returns how often a step was called. If workers are cut off, it counts runs instead of calls, because a cut
// makes a run call its step again.
func (s *site) count(name string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fate != nil {
		return len(s.runs[name])
	}
	for _, c := range s.calls {
		if c == name {
			n++
		}
	}
	return n
}

// step returns the JSON of a node that executes test.step.v1 with its name.
func step(name, to string, more ...string) string {
	text := fmt.Sprintf(`%q: {"do": "test.step.v1", "in": {"name": "'%s'"`, name, name)
	for _, m := range more {
		text += ", " + m
	}
	text += "}"
	if to != "" {
		text += fmt.Sprintf(`, "to": %q`, to)
	}
	return text + "}"
}

// deploy deploys nodes as a process with a new name, which it returns. The process begins at the node start.
func (s *site) deploy(start string, nodes string) string {
	s.t.Helper()
	return s.deployAs("p"+uuid.NewString()[:8], start, nodes)
}

func (s *site) deployAs(name, start, nodes string) string {
	s.t.Helper()
	define(s.t, s.pool, fmt.Sprintf(`{"process": %q, "version": 1, "start": %q, "nodes": {%s}}`, name, start, nodes))
	return name
}

// define deploys a definition.
func define(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := graph.Deploy(t.Context(), pool, d); err != nil {
		t.Fatal(err)
	}
}

// start starts an instance with an SQL INSERT, and returns its id.
func (s *site) start(process, input string) uuid.UUID {
	s.t.Helper()
	return query[uuid.UUID](s.t, s.pool, `
		INSERT INTO workflow_run (type, payload)
		VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'input', $2::jsonb)) RETURNING id`, process, input)
}

func query[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	rows, _ := pool.Query(context.Background(), sql, args...)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// status waits until an instance has a status.
func (s *site) status(id uuid.UUID, want graph.Status) {
	s.t.Helper()
	s.t.Cleanup(func() {
		if s.t.Failed() {
			s.t.Logf("instance %s: %s", id, query[string](s.t, s.pool, `SELECT coalesce(jsonb_agg(to_jsonb(x))::text, 'no incident') FROM incident x WHERE instance_id = $1`, id))
		}
	})
	await(s.t, fmt.Sprintf("instance %s to be %s", id, want), func() bool {
		return query[string](s.t, s.pool, `SELECT coalesce((SELECT status FROM process_instance WHERE id = $1), '')`, id) == string(want)
	})
}

// invariants are the views that are empty unless the engine has a bug.
var invariants = []string{
	"process_without_mover", "process_miscounted", "process_undead", "process_untimed", "process_misjoined", "process_misundone", "process_unearned",
	"process_mismatched", "process_misrecorded",
}

// healthy checks that the invariants hold, and that the history is what the core has decided.
func (s *site) healthy() {
	s.t.Helper()
	retold(s.t, s.pool)
	for _, view := range invariants {
		if n := query[int](s.t, s.pool, "SELECT count(*) FROM "+view); n > 0 {
			s.t.Errorf("%s has %d rows: %s", view, n, query[string](s.t, s.pool, "SELECT jsonb_agg(v)::text FROM "+view+" v"))
		}
	}
}

func (s *site) want(calls map[string]int) {
	s.t.Helper()
	for name, n := range calls {
		if got := s.count(name); got != n {
			s.t.Errorf("step %s was started %d times, want %d", name, got, n)
		}
	}
}

// A sequence of steps runs to its end, and a step can read the results of the steps before it.
func TestSequence(t *testing.T) {
	s := newSite(t)
	p := s.deploy("a", step("a", "b", `"x": "input.x"`)+","+step("b", "", `"y": "steps.a.x + 1.0"`))
	id := s.start(p, `{"x": 41}`)
	s.status(id, graph.Completed)
	if y := query[string](t, s.pool, `SELECT output->>'y' FROM activity_instance WHERE instance_id = $1 AND node_id = 'b'`, id); y != "42" {
		t.Errorf("y = %s, want 42", y)
	}
	got := query[string](t, s.pool, `SELECT string_agg(concat(from_status, '>', to_status), ' ' ORDER BY id) FROM process_state_history WHERE instance_id = $1`, id)
	if want := "CREATED>IN_PROGRESS IN_PROGRESS>COMPLETED"; got != want {
		t.Errorf("history %q, want %q", got, want)
	}
	s.healthy()
}

// S01: the token that leaves an inner join is in the group of the outer fork again.
func TestNestedForks(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "G"]}, "G": {"fork": ["B1", "B2"]}, "J2": {"join": "all", "to": "J1"}, "J1": {"join": "all", "to": "C"},`+
		step("A", "J1")+","+step("B1", "J2")+","+step("B2", "J2")+","+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B1": 1, "B2": 1, "C": 1})
	if n := query[int](t, s.pool, `SELECT count(*) FROM parallel_join WHERE instance_id = $1 AND fired`, id); n != 2 {
		t.Errorf("%d joins have fired, want 2", n)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE instance_id = $1 AND node = 'C' AND parallel_group_id IS NULL`, id); n != 1 {
		t.Error("the token at C is in a group")
	}
	s.healthy()
}

// S05: each pass of a loop through a fork and its join joins on its own.
func TestLoopThroughFork(t *testing.T) {
	s := newSite(t)
	p := s.deploy("S", step("S", "F")+`,"F": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "N"}, "X": {"choose": [{"if": "steps.N.n < 3", "to": "F"}], "else": "E"},`+
		`"E": {"end": true},`+step("A", "J")+","+step("B", "J", `"ms": "50"`)+","+step("N", "X", `"n": "'N' in steps ? steps.N.n + 1.0 : 1.0"`))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"S": 1, "A": 3, "B": 3, "N": 3})
	s.healthy()
}

// S07: joins work without a matching fork each: one fork of three branches ends in two nested joins.
func TestUnbalancedJoins(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["one", "two", "three"]}, "J1": {"join": "all", "to": "four"}, "J2": {"join": "all", "to": "E"},`+
		step("one", "J1")+","+step("two", "J1")+","+step("three", "J2", `"ms": "300"`)+","+step("four", "J2")+","+step("E", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"one": 1, "two": 1, "three": 1, "four": 1, "E": 1})
	s.healthy()
}

// S08: if a branch ends before its join, so that the join can never fire, an incident is opened.
func TestBranchEndsBeforeJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "X": {"choose": [{"if": "input.ok", "to": "J"}], "else": "over"}, "over": {"end": true},
		"J": {"join": "all", "to": "C"},`+step("A", "X")+","+step("B", "J")+","+step("C", ""))
	id := s.start(p, `{"ok": false}`)
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'join_unsatisfiable'`, id) == 1
	})
	s.status(id, graph.Waiting)
	s.want(map[string]int{"A": 1, "B": 1, "C": 0})
	s.healthy()
	ok := s.start(p, `{"ok": true}`)
	s.status(ok, graph.Completed)
	s.want(map[string]int{"C": 1})
}

// S10: an inclusive join waits for exactly the branches that were taken.
func TestInclusiveJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("O", `"O": {"any": [{"if": "input.a", "to": "A"}, {"if": "input.b", "to": "B"}, {"if": "input.c", "to": "C"}]}, "o": {"join": "taken", "to": "D"},`+
		step("A", "o", `"ms": "100"`)+","+step("B", "o")+","+step("C", "o")+","+step("D", ""))
	id := s.start(p, `{"a": true, "b": false, "c": true}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 0, "C": 1, "D": 1})
	s.healthy()
}

// S11: an exclusive gateway opens an incident if no condition is true, and if a condition cannot be evaluated.
func TestNoBranch(t *testing.T) {
	s := newSite(t)
	p := s.deploy("X", `"X": {"choose": [{"if": "input.a > 1", "to": "A"}]},`+step("A", ""))
	for input, code := range map[string]string{`{"a": 1}`: "no_branch_taken", `{}`: "expression_failed"} {
		id := s.start(p, input)
		await(t, code, func() bool {
			return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = $2`, id, code) == 1
		})
	}
	s.healthy()
}

// S12: an inclusive join fires when the last token that could still arrive takes another way.
func TestInclusiveJoinWhenATokenLeaves(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]}, "o": {"join": "taken", "to": "D"},
		"B": {"do": "test.step.v1", "in": {"name": "'B'", "fail": "'gone'", "ms": "200"}, "to": "o", "on": [{"error": "gone", "to": "R"}]},`+
		step("A", "o")+","+step("R", "", `"ms": "300"`)+","+step("D", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "R": 1, "D": 1})
	s.healthy()
}

// S14: an ordinary node with several incoming edges is not a join: it is visited once for each token.
func TestMergeIsNoJoin(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]},`+step("A", "C")+","+step("B", "C")+","+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1, "B": 1, "C": 2})
	s.healthy()
}

// S15: terminate ends all tokens at once and completes the instance. The outcome of a step that was running then is
// refused.
func TestTerminate(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B", "T"]}, "T": {"wait": "PT1H", "to": "never"}, "over": {"terminate": true},`+
		step("A", "over", `"ms": "100"`)+","+step("B", "never", `"ms": "700"`)+","+step("never", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Completed)
	await(t, "the worker to report late", func() bool { return s.count("B") == 1 })
	time.Sleep(time.Second)
	s.want(map[string]int{"never": 0})
	if got := query[string](t, s.pool, `SELECT string_agg(concat(node_id, ' ', status), ', ' ORDER BY node_id) FROM activity_instance WHERE instance_id = $1`, id); got != "A succeeded, B cancelled, T cancelled" {
		t.Errorf("activities: %s", got)
	}
	s.healthy()
}

// S16: a cancelled instance stays cancelled, and a second cancel changes nothing.
func TestCancel(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "B", `"ms": "10000"`)+","+step("B", ""))
	id := s.start(p, `{}`)
	await(t, "A to start", func() bool { return s.count("A") == 1 })
	for range 2 {
		query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.cancel.v1', jsonb_build_object('instance', $1::text, 'reason', 'no more')) RETURNING id`, id.String())
	}
	s.status(id, graph.Cancelled)
	time.Sleep(time.Second)
	s.want(map[string]int{"B": 0})
	if n := query[int](t, s.pool, `SELECT count(*) FROM outbox_event WHERE aggregate_id = $1 AND event_type = 'process.cancelled'`, id); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
	s.healthy()
}

// A declared failure of a step fails its instance, with the error as failure_reason, and the other branches end.
func TestFailure(t *testing.T) {
	s := newSite(t)
	p := s.deploy("F", `"F": {"fork": ["A", "B"]},`+step("A", "", `"fail": "'declined'"`)+","+step("B", "C", `"ms": "400"`)+","+step("C", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Failed)
	if why := query[string](t, s.pool, `SELECT failure_reason FROM process_instance WHERE id = $1`, id); why != "A: declined: it was told to fail" {
		t.Errorf("failure_reason = %q", why)
	}
	time.Sleep(600 * time.Millisecond)
	s.want(map[string]int{"C": 0})
	s.healthy()
}

// An instance whose only token waits for a timer is WAITING, and continues when the timer is due.
func TestWait(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", "T")+`,"T": {"wait": "PT1H", "to": "B"},`+step("B", ""))
	id := s.start(p, `{}`)
	s.status(id, graph.Waiting)
	if got := query[string](t, s.pool, `SELECT status FROM timer t JOIN token k ON k.id = t.token_id WHERE k.instance_id = $1`, id); got != "Scheduled" {
		t.Errorf("the timer is %s", got)
	}
	pgtest.Elapse(t, s.pool, time.Hour)
	s.status(id, graph.Completed)
	s.want(map[string]int{"B": 1})
	s.healthy()
}

// Any number of starts with one key make one instance.
func TestKey(t *testing.T) {
	s := newSite(t)
	p := s.deploy("A", step("A", ""))
	for range 20 {
		query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'key', 'order-7')) RETURNING id`, p)
	}
	await(t, "all starts", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.start.v1' AND status = 'succeeded'`) == 20
	})
	id := query[uuid.UUID](t, s.pool, `SELECT id FROM process_instance`)
	s.status(id, graph.Completed)
	s.want(map[string]int{"A": 1})
}

// A start of a process that is not deployed fails with a message that says so.
func TestUnknownProcess(t *testing.T) {
	s := newSite(t)
	id := s.start("missing", `{}`)
	await(t, "the start to fail", func() bool {
		return query[string](t, s.pool, `SELECT coalesce(last_error, '') FROM workflow_run WHERE id = $1`, id) == `process: "missing" is not deployed; deploy it with: workflowctl define FILE`
	})
}

// S45: a token in an endless loop of gateways is stopped with an incident.
func TestEndlessGateways(t *testing.T) {
	s := newSite(t)
	p := s.deploy("X", `"X": {"choose": [{"if": "input.go", "to": "Y"}], "else": "E"}, "Y": {"choose": [{"if": "input.go", "to": "X"}], "else": "E"}, "E": {"end": true}`)
	id := s.start(p, `{"go": true}`)
	await(t, "an incident", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM incident WHERE instance_id = $1 AND code = 'loop_limit'`, id) == 1
	})
	s.healthy()
}
