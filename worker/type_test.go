package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A run without a registered handler fails at once. Types outside of the worker's prefixes, even similar ones,
// are left alone.
func TestUnknownType(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.known.v1", func(context.Context) error { return nil })
	work(t, pool, mux, func(c *worker.Config) { c.Prefixes = []string{"test.", "team_a."} })
	foreign := enqueue(t, pool, "tests.unknown.v1", empty{})
	similar := enqueue(t, pool, "teamxa.unknown.v1", empty{})
	r := finished(t, pool, enqueue(t, pool, "test.unknown.v1", empty{}))
	if r.Status != run.Failed || r.Attempt != 1 || failureOf(t, r).Code != settling.CodeNoHandler || *r.LastError != settling.CodeNoHandler {
		t.Errorf("run is %s after %d attempts, %s; want failed after 1, %s", r.Status, r.Attempt, r.Error, settling.CodeNoHandler)
	}
	if r := finished(t, pool, enqueue(t, pool, "team_a.unknown.v1", empty{})); r.Status != run.Failed {
		t.Errorf("team_a's run is %s, want failed", r.Status)
	}
	for _, id := range []any{foreign, similar} {
		if n := query[int64](t, pool, `SELECT lease_no FROM workflow_run WHERE id = $1`, id); n != 0 {
			t.Errorf("a run of another prefix was leased")
		}
	}
}

// With UnknownTypeGrace a worker leaves runs without a handler to a worker that has it, and fails them only
// after they have been due for that long.
func TestUnknownTypeGrace(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	old, next := worker.NewMux(), worker.NewMux()
	handle(old, "test.old.v1", func(context.Context) error { return nil })
	handle(next, "test.new.v1", func(context.Context) error { return nil })
	grace := func(c *worker.Config) { c.UnknownTypeGrace = time.Minute }
	work(t, pool, old, grace)
	id := enqueue(t, pool, "test.new.v1", empty{})
	finished(t, pool, enqueue(t, pool, "test.old.v1", empty{})) // so that a poll came after both
	if r := read(t, pool, id); r.Status != run.Pending || r.LeaseNo != 0 {
		t.Errorf("run is %s, lease %d; want pending, 0", r.Status, r.LeaseNo)
	}
	_, stop := work(t, pool, next, grace)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("run is %s, attempt %d; want succeeded, 1", r.Status, r.Attempt)
	}
	_ = stop()
	orphan := enqueue(t, pool, "test.orphan.v1", empty{})
	pgtest.Elapse(t, pool, 61*time.Second)
	if r := finished(t, pool, orphan); r.Status != run.Failed || failureOf(t, r).Code != settling.CodeNoHandler {
		t.Errorf("orphan is %s, want failed after the grace", r.Status)
	}
}

// The longest registered pattern that matches a type handles it.
func TestPrefixHandlers(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	answer := func(text string) worker.Handler {
		return func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
			return json.Marshal(text + " for " + run.FromContext(ctx).Type)
		}
	}
	mux.HandleRaw("test.", answer("any"))
	mux.HandleRaw("test.mail.", answer("mail"))
	mux.HandleRaw("test.mail.send.v1", answer("send"))
	work(t, pool, mux, nil)
	for typ, want := range map[string]string{
		"test.mail.send.v1": "send", "test.mail.send.v2": "mail", "test.mail.x.y": "mail", "test.mails.x": "any", "test.x": "any",
	} {
		if r := finished(t, pool, enqueue(t, pool, typ, empty{})); string(r.Result) != `"`+want+" for "+typ+`"` {
			t.Errorf("%s was handled by %s, want %s", typ, r.Result, want)
		}
	}
}

// Middleware wraps the handlers registered after it. The first one added is the outermost.
func TestMiddleware(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	wrap := func(name string) worker.Middleware {
		return func(next worker.Handler) worker.Handler {
			return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
				result, err := next(ctx, payload)
				return json.RawMessage(strings.Replace(string(result), `"`, `"`+name+"(", 1)), err
			}
		}
	}
	mux.Use(wrap("a"), wrap("b"))
	worker.Handle(mux, "test.wrapped.v1", func(context.Context, empty) (string, error) { return "x", nil })
	work(t, pool, mux, nil)
	if r := finished(t, pool, enqueue(t, pool, "test.wrapped.v1", empty{})); string(r.Result) != `"a(b(x"` {
		t.Errorf("result = %s, want a around b", r.Result)
	}
}

// A type may have its own lease, time limit, backoff, attempts and concurrency. A run's lower max_attempts
// still applies.
func TestTypeOptions(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var now, most atomic.Int32
	handle(mux, "test.narrow.v1", func(context.Context) error {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		return nil
	}, worker.Options{Concurrency: 2})
	started, gate := make(chan bool, 1), make(chan bool)
	handle(mux, "test.own.v1", func(context.Context) error { started <- true; <-gate; return nil },
		worker.Options{Lease: time.Hour, Timeout: 2 * time.Hour})
	handle(mux, "test.unlimited.v1", func(context.Context) error { started <- true; <-gate; return nil }, worker.Options{Timeout: worker.NoTimeout})
	handle(mux, "test.few.v1", func(ctx context.Context) error {
		if run.FromContext(ctx).MaxAttempts > 2 {
			t.Errorf("handler sees max attempts %d, want at most 2", run.FromContext(ctx).MaxAttempts)
		}
		return errors.New("no")
	}, worker.Options{MaxAttempts: 2})
	work(t, pool, mux, nil)
	addMany(t, pool, "test.narrow.v1", 100)
	own := enqueue(t, pool, "test.own.v1", empty{})
	<-started
	r := read(t, pool, own)
	if lease, limit := r.LeaseUntil.Sub(*r.StartedAt), r.DeadlineAt.Sub(*r.StartedAt); lease != time.Hour || limit != 2*time.Hour+2*time.Second {
		t.Errorf("leased for %s, limited to %s; want 1h, and 2h with a second to wait in line and a second to report", lease, limit)
	}
	unlimited := enqueue(t, pool, "test.unlimited.v1", empty{})
	<-started
	if r := read(t, pool, unlimited); r.DeadlineAt != nil {
		t.Errorf("deadline_at = %s, want none", r.DeadlineAt)
	}
	close(gate)
	few := finished(t, pool, enqueue(t, pool, "test.few.v1", empty{}))
	fewer := finished(t, pool, add(t, pool, run.New{Type: "test.few.v1", MaxAttempts: 1}))
	if few.Attempt != 2 || fewer.Attempt != 1 {
		t.Errorf("failed after %d and %d attempts, want 2 and 1", few.Attempt, fewer.Attempt)
	}
	drained(t, pool)
	if most.Load() > 2 {
		t.Errorf("%d at once, want at most 2", most.Load())
	}
}

// A type with a concurrency limit continues as soon as one of its runs ends, and not at the next idle poll,
// however long the worker has been idle.
func TestLimitedTypeGoesOn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	started, gate := make(chan bool, 2), make(chan bool)
	handle(mux, "test.one.v1", func(context.Context) error { started <- true; <-gate; return nil }, worker.Options{Concurrency: 1})
	addMany(t, pool, "test.one.v1", 2)
	work(t, pool, mux, func(c *worker.Config) { c.PollInterval = time.Minute; c.NoWakeUp = true })
	<-started
	// By now the pauses between two idle polls have doubled to more than five seconds.
	time.AfterFunc(5500*time.Millisecond, func() { gate <- true })
	<-time.After(5500 * time.Millisecond)
	select {
	case <-started:
	case <-time.After(2 * time.Second):
		t.Error("the second run has not started two seconds after the first has ended")
	}
	close(gate)
}
