package graph_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// outcome waits until a run has finished, and returns its status with the error code and message, or with the version
// of the instance.
func (s *site) outcome(id uuid.UUID) string {
	s.t.Helper()
	s.finished(id)
	return query[string](s.t, s.pool, `SELECT concat_ws(' ', status, error->>'code', last_error, 'v'||(result->>'version')) FROM workflow_run WHERE id = $1`, id)
}

// A start whose key or id is taken succeeds if its process, tenant and input, and its version if it names one, are
// those of the existing instance. Otherwise it fails with the code conflict and a message that names the field and says
// what to do. Priority and metadata are not compared. What became of the first start and its instance does not matter.
func TestStartWithAnotherInput(t *testing.T) {
	s := newSite(t)
	p := s.deploy("H", `"H": {"human": {}, "to": "A"},`+step("A", ""))
	id := uuid.New()
	const input = `"input": {"n": 1, "list": ["x"]}`
	start := func(what string) string {
		s.t.Helper()
		return s.outcome(s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, %s}`, p, what)))
	}
	keyed := fmt.Sprintf(`failed conflict key: an instance of %q with key "7" was started with another input; use another key, or the same input`, p)
	named := fmt.Sprintf(`failed conflict id: instance %s was started with another input; use another id, or the same input`, id)
	theirs := fmt.Sprintf(`failed conflict id: %s is an instance of another tenant; choose another id, or leave it out`, id)
	all := func(when string) {
		t.Helper()
		for _, c := range []struct{ what, want string }{
			{`"key": "7", ` + input, "succeeded v1"},
			{`"key": "7", "input": {"list": ["x"], "n": 1.0}`, "succeeded v1"},
			{`"key": "7", "priority": 9, ` + input, "succeeded v1"},
			{`"key": "7", "version": 1, ` + input, "succeeded v1"},
			{`"key": "7", "input": {"n": 2, "list": ["x"]}`, keyed},
			{`"key": "7", "input": {"n": 1}`, keyed},
			{`"key": "7"`, keyed},
			{fmt.Sprintf(`"id": %q, "tenant": "a"`, id), "succeeded v1"},
			{fmt.Sprintf(`"id": %q, "tenant": "a", "input": {}`, id), "succeeded v1"},
			{fmt.Sprintf(`"id": %q, "tenant": "a", "input": {"secret": "x"}`, id), named},
			{fmt.Sprintf(`"id": %q, "tenant": "b"`, id), theirs},
			{fmt.Sprintf(`"id": %q`, id), theirs},
		} {
			if got := start(c.what); got != c.want {
				t.Errorf("%s, a start with %s\n%s, want\n%s", when, c.what, got, c.want)
			}
		}
		if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 2 {
			t.Errorf("%s, there are %d instances, want 2", when, n)
		}
	}
	all("at first")
	define(t, s.pool, fmt.Sprintf(`{"process": %q, "version": 2, "start": "A", "nodes": {%s}}`, p, step("A", "")))
	all("with a second version")
	other := fmt.Sprintf(`failed conflict key: an instance of %q with key "7" was started with version 1; use another key, or that version`, p)
	if got := start(`"key": "7", "version": 2, ` + input); got != other {
		t.Errorf("with another version\n%s, want\n%s", got, other)
	}
	if got := start(`"key": "8", "version": 2, ` + input); got != "succeeded v2" {
		t.Errorf("with another version and key: %s", got)
	}
	pgtest.ByHand(t, s.pool, `DELETE FROM process_instance WHERE business_key = '8'`)
	query[string](t, s.pool, `SELECT process_correct(id, 'H', '{"n": 2}', 'a mistake') FROM process_instance WHERE business_key = '7'`)
	if _, err := s.pool.Exec(t.Context(), `INSERT INTO workflow_run (type, payload) SELECT 'graph.complete_task.v1', jsonb_build_object('task', id, 'by', 'anna') FROM user_task`); err != nil {
		t.Fatal(err)
	}
	s.completed(2)
	pgtest.ByHand(t, s.pool, `DELETE FROM workflow_run WHERE type = 'graph.start.v1'`)
	all("without the first runs")
	if quotes := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE concat(error, last_error) LIKE '%secret%'`); quotes > 0 {
		t.Errorf("%d errors quote an input", quotes)
	}
	s.healthy()
}

// hesitant blocks the engine's handlers until n of them have read the database. The value it returns becomes true if
// two starts with one key are settled in one batch.
func (s *site) hesitant(n int32) (together *atomic.Bool) {
	var looked atomic.Int32
	goOn := make(chan struct{})
	s.mux = worker.NewMux()
	together = &atomic.Bool{}
	s.engine = altered{s.engine, func(e *hook.Engine) {
		afterAnswers(e, func() {
			if looked.Add(1) == n {
				close(goOn)
			}
			<-goOn
		})
		begin := e.Hook.Begin
		e.Hook.Begin = func(first *pgx.Batch, batch []leasing.Settlement) (hook.Act, error) {
			keys := map[string]bool{}
			for _, settled := range batch {
				var p struct{ Key string }
				if json.Unmarshal(settled.Payload, &p) == nil && p.Key != "" {
					if keys[p.Key] {
						together.Store(true)
					}
					keys[p.Key] = true
				}
			}
			return begin(first, batch)
		}
	}}
	return together
}

// If several starts with one key and different inputs are handled before any of them is settled, one makes the
// instance, those with its input succeed, and the others fail with the code conflict. Other runs of the same batch
// succeed, and none is executed twice.
func TestStartsWithAnotherInputAtOnce(t *testing.T) {
	const keys, each = 10, 6
	for name, workers := range map[string]int{"in one batch": 1, "in two workers": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newEmptySite(t)
			together := s.hesitant(keys * (each + 1))
			var log strings.Builder
			var mu sync.Mutex
			p := s.deploy("E", `"E": {"end": true}`)
			s.change = func(c *worker.Config) {
				c.Lease = 10 * time.Second
				c.Logger = slog.New(slog.NewTextHandler(writer(func(line []byte) { mu.Lock(); defer mu.Unlock(); log.Write(line) }), &slog.HandlerOptions{Level: slog.LevelDebug}))
				if workers > 1 {
					c.Concurrency, c.Batch = keys*(each+1)/workers, 7
				}
			}
			if _, err := s.pool.Exec(t.Context(), `
				INSERT INTO workflow_run (type, payload)
				SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input', jsonb_build_object('secret', g % 3)) || CASE WHEN g > 0 THEN jsonb_build_object('key', k::text) ELSE '{}' END
				FROM generate_series(1, $2) k, generate_series(0, $3) g ORDER BY random()`, p, keys, each); err != nil {
				t.Fatal(err)
			}
			for range workers {
				s.hire()
			}
			s.completed(2 * keys)
			await(t, "all to be answered", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
			})
			got := query[string](t, s.pool, `
				SELECT string_agg(concat_ws(' ', n, keyed, same, status, code), ', ' ORDER BY keyed, same, status, code)
				FROM (SELECT count(*) AS n, CASE WHEN r.payload ? 'key' THEN 'with a key' ELSE 'without' END AS keyed, CASE WHEN r.payload->'input' = i.input_payload THEN 'same' ELSE 'other' END AS same,
				             r.status, r.error->>'code' AS code
				      FROM workflow_run r JOIN process_instance i ON i.business_key = r.payload->>'key' OR i.id = r.id AND NOT r.payload ? 'key'
				      WHERE r.type = 'graph.start.v1' GROUP BY 2, 3, 4, 5) x`)
			if want := fmt.Sprintf("%d with a key other failed conflict, %d with a key same succeeded, %d without same succeeded", keys*each*2/3, keys*each/3, keys); got != want {
				t.Errorf("starts: %s; want %s", got, want)
			}
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1`); n > 0 {
				t.Errorf("%d runs were tried again", n)
			}
			if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run r WHERE type = 'graph.start.v1' AND status = 'succeeded' AND NOT EXISTS (SELECT FROM process_instance WHERE id = (r.result->>'instance')::uuid)`); n > 0 {
				t.Errorf("%d starts answer an instance that is not there", n)
			}
			if workers == 1 && !together.Load() {
				t.Error("no two starts with one key came to be settled together")
			}
			s.releaseAll()
			mu.Lock()
			defer mu.Unlock()
			if strings.Contains(log.String(), "another input") {
				t.Errorf("the log has words of payloads: %s", log.String())
			}
			s.healthy()
		})
	}
}

// A start whose outcome is kept (workflow_kept), because the database refuses it, fails with the code conflict when it
// is settled, if another start has used its key meanwhile.
func TestKeptStartMeetsAnother(t *testing.T) {
	s := newSite(t)
	p := s.deploy("E", `"E": {"end": true}`)
	spoil(s, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON process_instance FOR EACH ROW WHEN (NEW.input_payload ? 'odd') EXECUTE FUNCTION refuse()`)
	odd := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "input": {"odd": 1}}`, p))
	pgtest.Await(t, "it to be kept", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM workflow_kept WHERE run = $1`, odd) == 1
	})
	if got := s.outcome(s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7"}`, p))); got != "succeeded v1" {
		t.Errorf("the other one has %s", got)
	}
	spoil(s, `DROP TRIGGER refuse ON process_instance`)
	query[string](t, s.pool, `SELECT workflow_settle_again($1)`, odd)
	if got, want := s.outcome(odd), "failed conflict key: an instance of "; !strings.HasPrefix(got, want) {
		t.Errorf("%s, want %s…", got, want)
	}
	if n := query[int](t, s.pool, `SELECT (SELECT count(*) FROM workflow_kept) + (SELECT count(*) FROM workflow_set_aside)`); n != 0 {
		t.Errorf("%d things are still kept", n)
	}
	s.healthy()
}

// A writer is called with each line that a logger writes.
type writer func([]byte)

func (w writer) Write(line []byte) (int, error) {
	w(line)
	return len(line), nil
}

// A start with "again" makes a new instance with a key whose instance is over, and from then on the key means the new
// instance. While the instance with the key is open, "again" changes nothing. A start without "again" never makes a
// second instance.
func TestKeyAgain(t *testing.T) {
	s := newSite(t)
	p := s.deploy("H", `"H": {"human": {}, "to": "A"},`+step("A", ""))
	q := s.deploy("E", `"E": {"end": true}`)
	start := func(what string) (string, uuid.UUID) {
		t.Helper()
		id := s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, %s}`, p, what))
		got := s.outcome(id)
		if !strings.HasPrefix(got, "succeeded") {
			return got, uuid.Nil
		}
		return got, query[uuid.UUID](t, s.pool, `SELECT (result->>'instance')::uuid FROM workflow_run WHERE id = $1`, id)
	}
	if got, _ := start(`"again": true`); !strings.Contains(got, "again: there is no key to use again") {
		t.Errorf("without a key: %s", got)
	}
	// Instances of another process or tenant with this key do not matter, nor one whose key somebody wrote by hand.
	s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7"}`, q))
	s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "tenant": "t"}`, p))
	named := s.start(p, `{}`)
	s.at("H", 2)
	if _, err := s.pool.Exec(t.Context(), `UPDATE process_instance SET business_key = '7' WHERE id = $1`, named); err != nil {
		t.Fatal(err)
	}
	ids := map[uuid.UUID]bool{}
	var last uuid.UUID
	for round := 1; round <= 4; round++ {
		got, id := start(fmt.Sprintf(`"key": "7", "again": true, "input": {"round": %d}`, round))
		if got != "succeeded v1" || ids[id] || id == uuid.Nil {
			t.Fatalf("round %d: %s, instance %s of %v", round, got, id, ids)
		}
		ids[id], last = true, id
		for what, want := range map[string]string{
			fmt.Sprintf(`"key": "7", "input": {"round": %d}`, round):                "succeeded v1",
			fmt.Sprintf(`"key": "7", "again": true, "input": {"round": %d}`, round): "succeeded v1",
			`"key": "7", "input": {"round": 9}`:                                     "failed conflict",
			`"key": "7", "again": true, "input": {"round": 9}`:                      "failed conflict",
		} {
			got, same := start(what)
			if !strings.HasPrefix(got, want) || same != uuid.Nil && same != id {
				t.Errorf("round %d, while it is open, %s: %s, instance %s; want %s, %s", round, what, got, same, want, id)
			}
		}
		task := query[uuid.UUID](t, s.pool, `SELECT id FROM user_task WHERE instance_id = $1`, id)
		s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna"}`, task))
		s.status(id, graph.Completed)
		if got, same := start(fmt.Sprintf(`"key": "7", "input": {"round": %d}`, round)); got != "succeeded v1" || same != id {
			t.Errorf("round %d, once it is over, without again: %s, instance %s, want %s", round, got, same, id)
		}
	}
	// Retention removes the oldest ones, although the ids of later ones are derived from theirs.
	pgtest.ByHand(t, s.pool, `DELETE FROM process_instance WHERE business_key = '7' AND completed_at IS NOT NULL AND id <> $1 AND process_definition_id = (SELECT process_definition_id FROM process_instance WHERE id = $1)`, last)
	if got, same := start(`"key": "7", "input": {"round": 4}`); got != "succeeded v1" || same != last {
		t.Errorf("without the first ones: %s, instance %s, want %s", got, same, last)
	}
	if got, id := start(`"key": "7", "again": true`); got != "succeeded v1" || ids[id] {
		t.Errorf("without the first ones, again: %s, instance %s", got, id)
	}
	s.healthy()
}

// If several starts with "again" and one key are handled before any of them is settled, one makes the instance, those
// with its input return that instance, and the others fail with the code conflict.
func TestKeyAgainAtOnce(t *testing.T) {
	const keys, each = 8, 6
	for name, workers := range map[string]int{"in one batch": 1, "in two workers": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newEmptySite(t)
			p := s.deploy("E", `"E": {"end": true}`)
			first := s.hire()
			if _, err := s.pool.Exec(t.Context(), `INSERT INTO workflow_run (type, payload)
				SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'key', k::text) FROM generate_series(1, $2) k`, p, keys); err != nil {
				t.Fatal(err)
			}
			s.completed(keys)
			first.release()
			s.hesitant(keys * each)
			s.change = func(c *worker.Config) {
				c.Lease = 10 * time.Second
				if workers > 1 {
					c.Concurrency, c.Batch = keys*each/workers, 7
				}
			}
			if _, err := s.pool.Exec(t.Context(), `INSERT INTO workflow_run (type, payload)
				SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'key', k::text, 'again', true, 'input', jsonb_build_object('n', g % 3)) FROM generate_series(1, $2) k, generate_series(1, $3) g ORDER BY random()`,
				p, keys, each); err != nil {
				t.Fatal(err)
			}
			for range workers {
				s.hire()
			}
			s.completed(2 * keys)
			await(t, "all to be answered", func() bool {
				return query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
			})
			got := query[string](t, s.pool, `SELECT string_agg(concat_ws(' ', n, same, status, code), ', ' ORDER BY same, status) FROM (
				SELECT count(*) AS n, CASE WHEN r.payload->'input' = i.input_payload THEN 'same' ELSE 'other' END AS same, r.status, r.error->>'code' AS code
				FROM workflow_run r JOIN process_instance i ON i.business_key = r.payload->>'key' AND i.input_payload ? 'n'
				WHERE r.payload ? 'again' GROUP BY 2, 3, 4) x`)
			if want := fmt.Sprintf("%d other failed conflict, %d same succeeded", keys*each*2/3, keys*each/3); got != want {
				t.Errorf("starts: %s; want %s", got, want)
			}
			if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 2*keys {
				t.Errorf("%d instances, want %d", n, 2*keys)
			}
			s.releaseAll()
			s.healthy()
		})
	}
}

// A start with "again" fails with the code conflict and makes no instance if retention removes the previous instance
// before the start is settled, because another start may have found the key free.
func TestKeyAgainAfterRetention(t *testing.T) {
	s := newEmptySite(t)
	p := s.deploy("E", `"E": {"end": true}`)
	first := s.hire()
	s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7"}`, p))
	s.completed(1)
	first.release()
	s.mux = worker.NewMux()
	s.engine = altered{s.engine, func(e *hook.Engine) {
		afterAnswers(e, func() { pgtest.ByHand(t, s.pool, `DELETE FROM process_instance`) })
	}}
	s.hire()
	if got := s.outcome(s.enqueue("graph.start.v1", fmt.Sprintf(`{"process": %q, "key": "7", "again": true}`, p))); !strings.HasPrefix(got, "failed conflict key: instance ") {
		t.Errorf("it has %s", got)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM process_instance`); n != 0 {
		t.Errorf("%d instances are there", n)
	}
}
