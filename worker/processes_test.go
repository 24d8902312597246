package worker_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// parts are those of an engine for tests.
type parts hook.Engine

func (p parts) Parts() hook.Engine { return hook.Engine(p) }

// A worker with Processes executes the engine's own types, even if none of the configured prefixes covers them,
// and calls the engine's hook when it settles. A worker without Processes does neither.
func TestProcesses(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	mux.Use(func(worker.Handler) worker.Handler {
		return func(context.Context, json.RawMessage) (json.RawMessage, error) {
			t.Error("the user's middleware is called")
			return nil, nil
		}
	})
	var settled atomic.Int32
	engine := parts{
		Prefix: "engine.",
		Handlers: map[string]hook.Handler{"engine.own.v1": func(context.Context, json.RawMessage) (json.RawMessage, error) {
			return json.RawMessage(`"its own"`), nil
		}},
		Hook: hook.Hook{Begin: func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) {
			return func(_ context.Context, _ pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
				settled.Add(int32(len(batch)))
				return nil
			}, nil
		}},
	}
	id := enqueue(t, pool, "engine.own.v1", empty{})
	_, stop := work(t, pool, mux, nil)
	finished(t, pool, enqueue(t, pool, "test.unknown.v1", empty{}))
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Status != run.Pending {
		t.Fatalf("without processes it is %s", r.Status)
	}
	w, _ := work(t, pool, mux, func(c *worker.Config) { c.Processes = engine })
	if r := finished(t, pool, id); r.Status != run.Succeeded || string(r.Result) != `"its own"` || settled.Load() != 1 {
		t.Errorf("it is %s with %s, and the hook has seen %d", r.Status, r.Result, settled.Load())
	}
	if got := w.Patterns(); !slices.Equal(got, []string{"engine.own.v1"}) {
		t.Errorf("it has handlers of %v", got)
	}
}

// New returns an error if the program has registered one of the engine's types.
func TestProcessesHaveTheirTypes(t *testing.T) {
	t.Parallel()
	mux := worker.NewMux()
	handle(mux, "engine.mine.v1", func(context.Context) error { return nil })
	_, err := worker.New(worker.Config{Pool: pgtest.New(t), Mux: mux, Processes: parts{Prefix: "engine."}})
	if err == nil || !strings.Contains(err.Error(), "Mux has a handler of engine.mine.v1, which is a type of Processes: remove it") {
		t.Errorf("err = %v", err)
	}
}
