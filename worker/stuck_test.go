package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A handler that listens is stopped at its type's time limit; that is a failure.
func TestTimeLimit(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.slow.v1", func(ctx context.Context) error {
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), run.ErrDeadline) {
			t.Errorf("cause = %v, want %v", context.Cause(ctx), run.ErrDeadline)
		}
		return ctx.Err()
	}, worker.Options{Timeout: 200 * time.Millisecond, MaxAttempts: 1})
	work(t, pool, mux, nil)
	r := finished(t, pool, enqueue(t, pool, "test.slow.v1", empty{}))
	if f := failureOf(t, r); r.Status != run.Failed || r.Attempt != 1 || f.Code != settling.CodeTimeLimit || !strings.Contains(f.Message, "200ms") {
		t.Errorf("run is %s after %d attempts, %s; want failed after 1, %s", r.Status, r.Attempt, r.Error, settling.CodeTimeLimit)
	}
}

// A run whose handler never listens is executed again at its time limit, however deaf that
// handler is; other runs do not notice.
func TestDeafHandler(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	gate, returned := make(chan bool), make(chan bool)
	handle(mux, "test.deaf.v1", func(ctx context.Context) error {
		if run.FromContext(ctx).Attempt == 1 {
			defer close(returned)
			<-gate
		}
		return nil
	}, worker.Options{Timeout: 300 * time.Millisecond})
	neighbour := make(chan bool)
	handle(mux, "test.neighbour.v1", func(context.Context) error { <-neighbour; return nil })
	var s seen
	work(t, pool, mux, s.observe)
	other := enqueue(t, pool, "test.neighbour.v1", empty{})
	deaf := finished(t, pool, enqueue(t, pool, "test.deaf.v1", empty{}))
	if deaf.Status != run.Succeeded || deaf.Attempt != 2 {
		t.Errorf("run is %s, attempt %d; want succeeded, 2", deaf.Status, deaf.Attempt)
	}
	pgtest.Await(t, "the deaf handler to be counted", func() bool { return s.get(&s.stuck) == 1 })
	close(neighbour)
	if r := finished(t, pool, other); r.Status != run.Succeeded || r.Attempt != 1 {
		t.Errorf("its neighbour is %s, attempt %d; want succeeded, 1", r.Status, r.Attempt)
	}
	close(gate)
	<-returned
}

// The slot of a deaf handler is given to the next run; once there are more of them than
// slots, Run ends with ErrStuck, because only a new process helps.
func TestStuck(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	gate, started := make(chan bool), make(chan bool, 10)
	handle(mux, "test.deaf.v1", func(context.Context) error { started <- true; <-gate; return nil }, worker.Options{Timeout: 100 * time.Millisecond})
	config := worker.Config{
		Pool: pool, Mux: mux, Prefixes: []string{"test."}, Concurrency: 1, Lease: shipped.MinLease, PollInterval: 50 * time.Millisecond,
		ShutdownGrace: -1, Backoff: run.Backoff{Base: time.Hour, Cap: time.Hour}, Logger: (&journal{}).logger(),
	}
	addMany(t, pool, "test.deaf.v1", 3)
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(t.Context(), config) }()
	err := <-ended
	if n := len(started); !errors.Is(err, worker.ErrStuck) || n < 2 {
		t.Errorf("Run = %v after %d starts, want %v after 2 or 3", err, n, worker.ErrStuck)
	}
	close(gate)
}
