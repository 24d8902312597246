package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A payload that does not fit the handler's input fails the run at its first start, with a
// message that names the place. Unknown members are ignored.
func TestPayloads(t *testing.T) {
	t.Parallel()
	type line struct {
		Amount int `json:"amount"`
	}
	type input struct {
		Lines []line         `json:"lines"`
		When  map[string]int `json:"when"`
	}
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.in.v1", func(_ context.Context, in input) (int, error) { return len(in.Lines), nil })
	work(t, pool, mux, nil)
	for payload, where := range map[string]string{
		`{"lines": [{"amount": 1}, {"amount": "12"}]}`: "input.lines.1.amount ",
		`{"lines": {"amount": 1}}`:                     "input.lines ",
		`{"lines": [{"amount": 1.5}]}`:                 "input.lines.0.amount ",
		`{"lines": [{"amount": 1e30}]}`:                "input.lines.0.amount ",
		`{"when": {"now": []}}`:                        "input.when.now ",
		`{"more": {"lines": "x"}, "lines": []}`:        "",
		`{}`:                                           "",
	} {
		r := finished(t, pool, enqueue(t, pool, "test.in.v1", json.RawMessage(payload)))
		switch {
		case where == "" && r.Status != run.Succeeded:
			t.Errorf("%s: run is %s, %s; want succeeded", payload, r.Status, r.Error)
		case where == "":
		case r.Status != run.Failed || r.Attempt != 1 || failureOf(t, r).Code != settling.CodePayload || !strings.Contains(*r.LastError, where):
			t.Errorf("%s: run is %s after %d attempts, %s; want failed after 1, %s, %s", payload, r.Status, r.Attempt, r.Error, settling.CodePayload, where)
		}
	}
}

// Numbers keep all their digits on the way through a handler, and members are told apart by
// case.
func TestPayloadsSurvive(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.any.v1", func(_ context.Context, in map[string]any) (any, error) { return in, nil })
	worker.Handle(mux, "test.typed.v1", func(_ context.Context, in struct {
		A int64 `json:"a"`
		B json.Number
	}) (any, error) {
		return []any{in.A, in.B}, nil
	})
	work(t, pool, mux, nil)
	const numbers = `{"a": 9223372036854775807, "A": 5, "b": 1.10, "c": 9007199254740993, "d": [12345678901234567890, {"e": 0.000001}]}`
	r := finished(t, pool, enqueue(t, pool, "test.any.v1", json.RawMessage(numbers)))
	if same := query[bool](t, pool, `SELECT result = payload AND result::text = payload::text FROM workflow_run WHERE id = $1`, r.ID); !same {
		t.Errorf("payload %s became %s", r.Payload, r.Result)
	}
	r = finished(t, pool, enqueue(t, pool, "test.typed.v1", json.RawMessage(`{"A": 5, "a": 9223372036854775807, "B": 1.10, "b": 2}`)))
	if string(r.Result) != `[9223372036854775807, 1.10]` {
		t.Errorf("result = %s, want [9223372036854775807, 1.10]", r.Result)
	}
}

// Nothing of a payload, a result, an event or an error is ever logged, whatever goes wrong.
func TestLogsAreSilent(t *testing.T) {
	t.Parallel()
	const canary = "XCANARYX"
	pool := pgtest.New(t)
	execute(t, pool, `
		CREATE TABLE fact (n int UNIQUE);
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not % or %', NEW.result, NEW.last_error; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW
			WHEN (NEW.type IN ('test.refused.v1', 'test.refused_failure.v1') AND NEW.status <> 'leased') EXECUTE FUNCTION refuse()`)
	mux := worker.NewMux()
	for typ, fn := range map[string]func(context.Context) (any, error){
		"test.error.v1":           func(context.Context) (any, error) { return nil, errors.New(canary) },
		"test.permanent.v1":       func(context.Context) (any, error) { return nil, run.Permanent(errors.New(canary)) },
		"test.panic.v1":           func(context.Context) (any, error) { panic(canary) },
		"test.result.v1":          func(context.Context) (any, error) { return canary + "\x00", nil },
		"test.refused.v1":         func(context.Context) (any, error) { return canary, nil },
		"test.refused_failure.v1": func(context.Context) (any, error) { return nil, errors.New(canary) },
		"test.event.v1": func(ctx context.Context) (any, error) {
			return nil, worker.Emit(ctx, outbox.Event{Type: canary + " is not a type", Payload: canary})
		},
		"test.effect.v1": func(ctx context.Context) (any, error) {
			return nil, worker.InSettle(ctx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `SELECT $1::text::int`, canary)
				return err
			})
		},
		"test.broken_effect.v1": func(ctx context.Context) (any, error) {
			return nil, worker.InSettle(ctx, func(tx pgx.Tx) error {
				_ = tx.Conn().Close(ctx)
				return errors.New(canary)
			})
		},
	} {
		worker.Handle(mux, run.Task[struct{ Secret string }](typ), func(ctx context.Context, _ struct{ Secret string }) (any, error) { return fn(ctx) })
		add(t, pool, run.New{Type: typ, Payload: map[string]string{"Secret": canary}, MaxAttempts: 2})
	}
	worker.Handle(mux, "test.payload.v1", func(context.Context, struct{ Secret int }) (any, error) { return nil, nil })
	add(t, pool, run.New{Type: "test.payload.v1", Payload: map[string]string{"Secret": canary}})
	add(t, pool, run.New{Type: "test.unknown.v1", Payload: map[string]string{"Secret": canary}})
	var lines journal
	var s seen
	work(t, pool, mux, func(c *worker.Config) { c.Logger = lines.logger(); s.observe(c); c.ShutdownGrace = -1 })
	pgtest.Await(t, "all that can finish to finish, and the rest to be tried again", func() bool {
		return query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'failed'`) == 8 &&
			strings.Count(lines.String(), "cannot settle") >= 6
	})
	for line := range strings.Lines(lines.String()) {
		if strings.Contains(line, canary) {
			t.Errorf("the log tells too much: %s", line)
		}
	}
}
