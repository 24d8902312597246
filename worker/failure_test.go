package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A brokenError panics when asked for its text, as a nil pointer in an error often does.
type brokenError struct{ text string }

func (e *brokenError) Error() string { return e.text }

// Whatever a handler fails with, the worker lives on, and the run's error column tells what
// happened in clean, short text without credentials.
func TestFailures(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		fail func(context.Context) error
		code string
		want string // all of the message, or its start if it ends with …
	}{
		{"text", func(context.Context) error { return errors.New("no luck") }, settling.CodeHandler, "no luck"},
		{"empty", func(context.Context) error { return errors.New("") }, settling.CodeHandler, "(empty error)"},
		{"long", func(context.Context) error { return errors.New(strings.Repeat("ä", 5<<20)) }, settling.CodeHandler, "ääää…"},
		{"dirty", func(context.Context) error { return errors.New("a\x00b\xff\x1b[31mred\x1b[0m") }, settling.CodeHandler, "ab\uFFFDred"},
		{"dsn", func(context.Context) error { return errors.New("dial postgres://u:hunter2@db/app") }, settling.CodeHandler, "dial postgres://u:xxxxx@db/app"},
		{"bearer", func(context.Context) error { return errors.New("sent Authorization: Bearer abc.def") }, settling.CodeHandler, "sent Authorization: xxxxx"},
		{"coded", func(context.Context) error { return run.WithCode("card_declined", errors.New("no")) }, "card_declined", "no"},
		{"own context", func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx.Err()
		}, settling.CodeHandler, "context canceled"},
		{"nil pointer", func(context.Context) error { return (*brokenError)(nil) }, settling.CodePanic, "panic: runtime error: invalid memory address…"},
		{"panic", func(context.Context) error { panic("ouch") }, settling.CodePanic, "panic: ouch"},
		{"panic nil", func(context.Context) error { panic(nil) }, settling.CodePanic, "panic: panic called with nil argument…"},
		{"goexit", func(context.Context) error { runtime.Goexit(); return nil }, settling.CodeHandler, "the handler ended its goroutine (runtime.Goexit)"},
	}
	pool := pgtest.New(t)
	mux := worker.NewMux()
	ids := make([]uuid.UUID, len(cases))
	for i, c := range cases {
		typ := "test." + strings.ReplaceAll(c.name, " ", "_")
		handle(mux, typ, c.fail)
		ids[i] = add(t, pool, run.New{Type: typ, MaxAttempts: 2})
	}
	var lines journal
	w, _ := work(t, pool, mux, func(c *worker.Config) { c.Logger = lines.logger() })
	for i, c := range cases {
		r := finished(t, pool, ids[i])
		f := failureOf(t, r)
		start, cut := strings.CutSuffix(c.want, "…")
		if r.Status != run.Failed || r.Attempt != 2 || f.Attempt != 2 || f.Code != c.code ||
			f.Message != c.want && !(cut && strings.HasPrefix(f.Message, start)) {
			t.Errorf("%s: run is %s after %d attempts, %s: %.200q; want failed after 2, %s: %q", c.name, r.Status, r.Attempt, f.Code, f.Message, c.code, c.want)
		}
		if len(*r.LastError) > 4096 || !utf8.ValidString(*r.LastError) {
			t.Errorf("%s: last_error has %d bytes", c.name, len(*r.LastError))
		}
		if (f.Code == settling.CodePanic) != strings.Contains(f.Stack, "goroutine") {
			t.Errorf("%s: stack = %.100q", c.name, f.Stack)
		}
	}
	pgtest.Await(t, "all slots to be free", func() bool { return w.InFlight() == 0 })
	if text := lines.String(); strings.Contains(text, "debug.Stack") || strings.Contains(text, "no luck") || strings.Contains(text, "hunter2") {
		t.Errorf("the log tells errors or stacks:\n%.2000s", text)
	}
}

// A result returned beside an error is dropped: the error wins.
func TestErrorWins(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.both.v1", func(context.Context, empty) (string, error) { return "half", errors.New("no") })
	work(t, pool, mux, nil)
	if r := finished(t, pool, add(t, pool, run.New{Type: "test.both.v1", MaxAttempts: 1})); r.Status != run.Failed || r.Result != nil {
		t.Errorf("run is %s with result %s, want failed without", r.Status, r.Result)
	}
}

// A permanent error, however wrapped, fails the run at once.
func TestPermanent(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.permanent.v1", func(context.Context) error {
		return fmt.Errorf("charge: %w", fmt.Errorf("card: %w", run.Permanent(errors.New("expired"))))
	})
	work(t, pool, mux, nil)
	r := finished(t, pool, enqueue(t, pool, "test.permanent.v1", empty{}))
	if f := failureOf(t, r); r.Status != run.Failed || r.Attempt != 1 || !f.Permanent || f.Message != "charge: card: expired" {
		t.Errorf("run is %s after %d attempts, %s; want failed after 1", r.Status, r.Attempt, r.Error)
	}
}

// Again spends no attempt and is counted; after MaxPostponed of them it is a failure.
func TestAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var starts atomic.Int32
	handle(mux, "test.soon.v1", func(ctx context.Context) error {
		if attempt := run.FromContext(ctx).Attempt; attempt != 1 {
			t.Errorf("attempt = %d, want 1 each time", attempt)
		}
		if starts.Add(1) < 3 {
			return fmt.Errorf("not ready: %w", run.Again(0))
		}
		return nil
	})
	handle(mux, "test.never.v1", func(context.Context) error { return run.Again(-time.Hour) })
	work(t, pool, mux, func(c *worker.Config) { c.MaxPostponed = 2 })
	soon := enqueue(t, pool, "test.soon.v1", empty{})
	never := add(t, pool, run.New{Type: "test.never.v1", MaxAttempts: 2})
	if r := finished(t, pool, soon); r.Status != run.Succeeded || r.Attempt != 1 || r.Postponed != 2 || r.LeaseNo != 3 {
		t.Errorf("run is %s, attempt %d, postponed %d, lease %d; want succeeded, 1, 2, 3", r.Status, r.Attempt, r.Postponed, r.LeaseNo)
	}
	r := finished(t, pool, never)
	if r.Status != run.Failed || r.Attempt != 2 || r.Postponed != 2 || !strings.Contains(*r.LastError, "put off 2 times") {
		t.Errorf("run is %s, attempt %d, postponed %d, %v; want failed, 2, 2", r.Status, r.Attempt, r.Postponed, *r.LastError)
	}
}

// Delays that handlers ask for are kept between none and a year; RetryAfter spends an
// attempt.
func TestDelays(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	cases := []struct {
		typ  string
		err  error
		want time.Duration
	}{
		{"test.after.v1", run.RetryAfter(errors.New("busy"), time.Hour), time.Hour},
		{"test.after_max.v1", run.RetryAfter(errors.New("busy"), math.MaxInt64), year},
		{"test.again_max.v1", run.Again(math.MaxInt64), year},
		{"test.again.v1", run.Again(time.Minute), time.Minute},
		{"test.backoff.v1", errors.New("plain"), 20 * time.Minute}, // plus half of it at most
	}
	pool := pgtest.New(t)
	pgtest.Attempts(t, pool, 3)
	mux := worker.NewMux()
	ids := make([]uuid.UUID, len(cases))
	for i, c := range cases {
		handle(mux, c.typ, func(context.Context) error { return c.err }, worker.Options{Backoff: run.Backoff{Base: 20 * time.Minute, Cap: time.Hour}})
		ids[i] = enqueue(t, pool, c.typ, empty{})
	}
	handle(mux, "test.negative.v1", func(context.Context) error { return run.RetryAfter(errors.New("busy"), math.MinInt64) })
	negative := enqueue(t, pool, "test.negative.v1", empty{})
	work(t, pool, mux, nil)
	for i, c := range cases {
		pgtest.Await(t, c.typ+" to be put off", func() bool { r := read(t, pool, ids[i]); return r.LeaseNo == 1 && r.Status == run.Pending })
		r := read(t, pool, ids[i])
		got := r.RunAt.Sub(r.UpdatedAt)
		charged := 0
		if _, free, _ := run.Delay(c.err); !free {
			charged = 1
		}
		if got < c.want || got > c.want*3/2 || r.Attempt != charged {
			t.Errorf("%s: due after %s with %d attempts spent, want %s with %d", c.typ, got, r.Attempt, c.want, charged)
		}
	}
	if r := finished(t, pool, negative); r.Status != run.Failed || r.Attempt != 3 {
		t.Errorf("negative delay: run is %s after %d attempts, want failed after 3", r.Status, r.Attempt)
	}
}

// A handler that cancels its own run does not get its result recorded.
func TestHandlerCancelsItself(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	worker.Handle(mux, "test.self.v1", func(ctx context.Context, _ empty) (string, error) {
		return "done", run.Cancel(ctx, pool, run.FromContext(ctx).ID, "never mind")
	})
	var s seen
	work(t, pool, mux, s.observe)
	id := enqueue(t, pool, "test.self.v1", empty{})
	pgtest.Await(t, "the outcome to be refused", func() bool { return s.get(&s.refused)+s.causes(run.ErrCancelled) > 0 })
	if r := read(t, pool, id); r.Status != run.Cancelled || r.Result != nil {
		t.Errorf("run is %s with %s, want cancelled without a result", r.Status, r.Result)
	}
}
