package worker_test

import (
	"context"
	"encoding/json"
	"math"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type panicking struct{}

func (panicking) MarshalJSON() ([]byte, error) { panic("cannot be told") }

type cycle struct{ Next *cycle }

func raw(s string) json.RawMessage { return json.RawMessage(s) }

// A result that JSON or the database cannot hold fails its run after one start, with a
// message that says what is wrong with it; every other result is stored as it is.
func TestResults(t *testing.T) {
	t.Parallel()
	loop := &cycle{}
	loop.Next = loop
	cases := []struct {
		name   string
		result any
		stored string // of a succeeded run
		reason string // in the message of a failed run
	}{
		{"nil", nil, "null", ""},
		{"number", 12345678901234567, "12345678901234567", ""},
		{"html", "<b>&</b>", `"<b>&</b>"`, ""},
		{"at the limit", strings.Repeat("x", jsondoc.MaxResult-2), "", ""},
		{"beyond the limit", strings.Repeat("x", jsondoc.MaxResult-1), "", "1048577 bytes, the limit is 1048576"},
		{"huge", strings.Repeat("x", 40<<20), "", "the limit is 1048576"},
		{"nan", math.NaN(), "", "NaN"},
		{"infinity", map[string]any{"a": math.Inf(1)}, "", "Inf"},
		{"channel", make(chan int), "", "chan int"},
		{"function", func() {}, "", "func()"},
		{"cycle", loop, "", "cycle"},
		{"nul", map[string]string{"a": "x\x00y"}, "", `$.a: the character \u0000`},
		{"nul in a key", map[string]int{"x\x00y": 1}, "", `\u0000`},
		{"lone surrogate", raw(`{"a":"\ud800"}`), "", "surrogate"},
		{"invalid UTF-8", []string{"a\xffb"}, "", "UTF-8"},
		{"duplicate keys", raw(`{"a":1,"a":2}`), "", "duplicate"},
		{"broken", raw(`{"a":`), "", "encode result"},
		{"too deep", raw(strings.Repeat("[", 65) + strings.Repeat("]", 65)), "", "nested deeper than 64"},
		{"large number", raw("1e400"), "", "1e308"},
		{"panicking marshaller", panicking{}, "", "cannot be told"},
	}
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var starts [64]atomic.Int32
	ids := make([]uuid.UUID, len(cases))
	for i, c := range cases {
		typ := "test." + strings.ToLower(strings.NewReplacer(" ", "_").Replace(c.name))
		worker.Handle(mux, run.Task[empty](typ), func(context.Context, empty) (any, error) { starts[i].Add(1); return c.result, nil })
		ids[i] = enqueue(t, pool, typ, empty{})
	}
	work(t, pool, mux, nil) // some results take long to encode
	for i, c := range cases {
		r := finished(t, pool, ids[i])
		switch {
		case starts[i].Load() != 1:
			t.Errorf("%s: %d starts, want 1", c.name, starts[i].Load())
		case c.reason == "" && (r.Status != run.Succeeded || c.stored != "" && string(r.Result) != c.stored):
			t.Errorf("%s: run is %s with result %.100s, want succeeded with %s", c.name, r.Status, r.Result, c.stored)
		case c.reason == "":
		case r.Status != run.Failed || failureOf(t, r).Code != settling.CodeResult || !strings.Contains(*r.LastError, c.reason):
			t.Errorf("%s: run is %s, error %.300s; want failed, %s, %q", c.name, r.Status, r.Error, settling.CodeResult, c.reason)
		}
	}
}

// A raw handler's nil is stored as null; its broken JSON fails the run after one start.
func TestRawResults(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	mux.HandleRaw("test.nil.v1", func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil })
	mux.HandleRaw("test.empty.v1", func(context.Context, json.RawMessage) (json.RawMessage, error) { return raw(""), nil })
	mux.HandleRaw("test.surrogate.v1", func(context.Context, json.RawMessage) (json.RawMessage, error) { return raw(`"\ud800"`), nil })
	work(t, pool, mux, nil)
	null := enqueue(t, pool, "test.nil.v1", empty{})
	nothing := enqueue(t, pool, "test.empty.v1", empty{})
	half := enqueue(t, pool, "test.surrogate.v1", empty{})
	if r := finished(t, pool, null); r.Status != run.Succeeded || r.Result != nil {
		t.Errorf("nil: run is %s with %s, %s; want succeeded with nothing", r.Status, r.Result, r.Error)
	}
	if r := finished(t, pool, nothing); failureOf(t, r).Code != settling.CodeResult || r.Attempt != 1 {
		t.Errorf("no bytes: %s after %d attempts, want %s after 1", r.Error, r.Attempt, settling.CodeResult)
	}
	if r := finished(t, pool, half); failureOf(t, r).Code != settling.CodeResult || !strings.Contains(*r.LastError, "lone surrogate") || r.Attempt != 1 {
		t.Errorf("lone surrogate: %s after %d attempts, want %s after 1", r.Error, r.Attempt, settling.CodeResult)
	}
}

// One result that cannot be stored, among two hundred that are settled with it, fails alone
// and is not executed again.
func TestBadResultFailsAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var starts atomic.Int32
	gate := make(chan bool)
	worker.Handle(mux, "test.many.v1", func(ctx context.Context, in struct{ N int }) (string, error) {
		if starts.Add(1) == 200 {
			close(gate)
		}
		<-gate
		if in.N == 77 {
			return "x\x00y", nil
		}
		return "fine", nil
	})
	addMany(t, pool, "test.many.v1", 200)
	work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 200 })
	drained(t, pool)
	good := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`)
	bad := query[string](t, pool, `SELECT (payload->>'N') || (error->>'code') FROM workflow_run WHERE status = 'failed'`)
	if good != 199 || bad != "77result_rejected" || starts.Load() != 200 {
		t.Errorf("%d succeeded, failed: %s, %d starts; want 199, 77result_rejected, 200", good, bad, starts.Load())
	}
}

// What the database itself refuses, by a CHECK or by a trigger that raises, fails its run as
// result_rejected after one start; those settled with it are not touched.
func TestDatabaseRefusesResult(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]string{
		"check": `ALTER TABLE workflow_run ADD CONSTRAINT no_77 CHECK (result <> '77')`,
		"trigger": `
			CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not 77, please'; END $$;
			CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (NEW.result = '77') EXECUTE FUNCTION refuse()`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			execute(t, pool, rule)
			mux := worker.NewMux()
			var starts atomic.Int32
			gate := make(chan bool)
			worker.Handle(mux, "test.many.v1", func(_ context.Context, in struct{ N int }) (int, error) {
				if starts.Add(1) == 200 {
					close(gate)
				}
				<-gate
				return in.N, nil
			})
			addMany(t, pool, "test.many.v1", 200)
			work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 200 })
			drained(t, pool)
			good := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE status = 'succeeded' AND attempt = 1`)
			bad := query[string](t, pool, `SELECT concat(payload->>'N', ' ', status, ' ', error->>'code', ' ', last_error) FROM workflow_run WHERE status <> 'succeeded'`)
			if good != 199 || !strings.HasPrefix(bad, "77 failed result_rejected the database refuses the result: ") || starts.Load() != 200 {
				t.Errorf("%d succeeded, failed: %s, %d starts; want 199, 77, 200", good, bad, starts.Load())
			}
		})
	}
}
