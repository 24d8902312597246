package graph_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/run"
)

// Every Go command enqueues a run of its type with the given values, in the transaction of the caller.
func TestCommandsFromGo(t *testing.T) {
	s, _ := broken(t, func(context.Context) error { return errors.New("not now") })
	ctx, db := t.Context(), s.pool
	p := s.deploy("W", `"W": {"await": {"message": "paid", "key": "input.order"}, "to": "S"}, "S": {"await": {"signal": "go"}, "to": "H"}, "H": {"human": {}, "to": "X"},
		"X": {"do": "test.broken.v1", "in": {"n": "7"}, "attempts": 1, "to": "Z"},`+step("Z", "", `"is": "steps.W.amount + steps.H.n"`))
	done := func(id uuid.UUID, err error) uuid.UUID {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if got := s.outcome(id); !strings.HasPrefix(got, "succeeded") {
			t.Fatalf("the run %s", got)
		}
		return id
	}
	order := struct {
		Order string `json:"order"`
	}{"o-1"}
	var started graph.Started
	if err := json.Unmarshal(query[json.RawMessage](t, db, `SELECT result FROM workflow_run WHERE id = $1`, done(graph.Start(ctx, db, graph.NewInstance{Process: p, Key: "o-1", Input: order, Tenant: "t", Priority: 7}))), &started); err != nil {
		t.Fatal(err)
	}
	id := started.Instance
	if got := query[string](t, db, `SELECT concat_ws(' ', business_key, tenant_id, priority, input_payload) FROM process_instance WHERE id = $1`, id); got != `o-1 t 7 {"order": "o-1"}` {
		t.Errorf("the instance is %s", got)
	}
	done(graph.Send(ctx, db, graph.Message{Name: "paid", Key: "o-1", Payload: map[string]int{"amount": 5}, ID: "m-1", TTL: time.Hour}))
	s.at("S", 1)
	done(graph.Signal(ctx, db, "go", nil))
	s.at("H", 1)
	task := query[uuid.UUID](t, db, `SELECT id FROM user_task`)
	done(graph.Complete(ctx, db, graph.Completion{Task: task, By: "anna", Output: json.RawMessage(` {"n": 3}`), Version: 1}))
	await(t, "an incident", func() bool { return query[int](t, db, `SELECT count(*) FROM incident WHERE resolved_at IS NULL`) == 1 })
	done(graph.Retry(ctx, db, graph.Retrial{Instance: id, By: "anna"}))
	await(t, "an incident again", func() bool {
		return query[int](t, db, `SELECT count(*) FROM incident WHERE resolved_at IS NULL`) == 1 && query[int](t, db, `SELECT count(*) FROM incident`) == 2
	})
	done(graph.Fail(ctx, db, id, "it is no use", "anna"))
	s.status(id, graph.Failed)
	if got := query[string](t, db, `SELECT failure_reason FROM process_instance WHERE id = $1`, id); got != "it is no use" {
		t.Errorf("it has failed for %q", got)
	}
	if err := json.Unmarshal(query[json.RawMessage](t, db, `SELECT result FROM workflow_run WHERE id = $1`, done(graph.Restart(ctx, db, id, "anna"))), &started); err != nil || started.After != id {
		t.Fatalf("started again as %+v, %v", started, err)
	}
	done(graph.Cancel(ctx, db, graph.Cancellation{Instance: started.Instance, Reason: "enough", By: "anna", Compensate: true}))
	s.status(started.Instance, graph.Cancelled)

	other := uuid.New()
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := graph.Start(ctx, tx, graph.NewInstance{Process: p, ID: other}); err != nil {
			return err
		}
		return errors.New("no")
	})
	if n := query[int](t, db, `SELECT count(*) FROM workflow_run WHERE payload->>'id' = $1`, other.String()); err == nil || n != 0 {
		t.Errorf("%d runs are left of a transaction that was rolled back", n)
	}

	r, err := graph.NewInstance{Process: p, ID: other}.Run()
	if err != nil {
		t.Fatal(err)
	}
	m, err := graph.Message{Name: "paid", Key: "o-2"}.Run()
	if err != nil {
		t.Fatal(err)
	}
	r.Delay = time.Hour
	if _, err := run.EnqueueMany(ctx, db, []run.New{r, m}); err != nil {
		t.Fatal(err)
	}
	if n := query[int](t, db, `SELECT count(*) FROM workflow_run WHERE type = 'graph.start.v1' AND run_at > now() + interval '50 minutes'`); n != 1 {
		t.Errorf("%d starts are due in an hour", n)
	}
	s.healthy()
}

// A malformed command returns an error that names the field and says what to do, and stores nothing.
func TestCommandsThatAreMistakes(t *testing.T) {
	s := newEmptySite(t)
	ctx, db := t.Context(), s.pool
	long := strings.Repeat("x", 201)
	start := func(n graph.NewInstance) error { _, err := graph.Start(ctx, db, n); return err }
	send := func(m graph.Message) error { _, err := graph.Send(ctx, db, m); return err }
	second := func(_ uuid.UUID, err error) error { return err }
	for _, c := range []struct {
		err  error
		want string
	}{
		{start(graph.NewInstance{}), "process: it is missing"},
		{start(graph.NewInstance{Process: "p", Input: []int{1}}), `start "p": input: use a JSON object`},
		{start(graph.NewInstance{Process: "p", Input: math.Inf(1)}), "input: json: unsupported value"},
		{start(graph.NewInstance{Process: "p", Input: []byte(`{"a": "\u0000"}`)}), "input: "},
		{start(graph.NewInstance{Process: "p", Again: true}), "again: there is no key to use again"},
		{start(graph.NewInstance{Process: "p", Key: "k", ID: uuid.New()}), "id, key: give one of them"},
		{start(graph.NewInstance{Process: "p", Priority: 101}), "priority: 101 is outside"},
		{start(graph.NewInstance{Process: "p", Key: long}), "key: use 1 to 200 characters"},
		{start(graph.NewInstance{Process: "p", Tenant: long}), "tenant: use at most 200 characters"},
		{send(graph.Message{Key: "k"}), "name: use 1 to 200 bytes"},
		{send(graph.Message{Name: "m"}), "key: it is missing"},
		{send(graph.Message{Name: "m", Key: "k", TTL: -1}), "ttl: it is negative"},
		{send(graph.Message{Name: "m", Key: "k", Payload: "text"}), "payload: use a JSON object"},
		{second(graph.Signal(ctx, db, long, nil)), "name: use 1 to 200 bytes"},
		{second(graph.Signal(ctx, db, "s", 7)), "payload: use a JSON object"},
		{second(graph.Complete(ctx, db, graph.Completion{Task: uuid.New()})), "by: it is missing"},
		{second(graph.Complete(ctx, db, graph.Completion{By: "anna"})), "task: it is missing"},
		{second(graph.Complete(ctx, db, graph.Completion{Task: uuid.New(), By: "anna", Output: false})), "output: use a JSON object"},
		{second(graph.Cancel(ctx, db, graph.Cancellation{})), "instance: it is missing"},
		{second(graph.Fail(ctx, db, uuid.Nil, "", "")), "instance: it is missing"},
		{second(graph.Restart(ctx, db, uuid.Nil, "")), "instance: it is missing"},
		{second(graph.Retry(ctx, db, graph.Retrial{})), "incident, instance: name one of them"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) || !strings.HasPrefix(c.err.Error(), "graph: ") {
			t.Errorf("got %v, want %s", c.err, c.want)
		}
	}
	if n := query[int](t, db, `SELECT count(*) FROM workflow_run`); n != 0 {
		t.Errorf("%d runs are stored", n)
	}
}
