package worker

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// A batch is full with as many runs as its worker has slots for the type: it does not wait for further ones. Runs of two
// workers do not come together. The leader's end ends the gathering.
func TestBatchIsFull(t *testing.T) {
	t.Parallel()
	type nothing struct{}
	var mu sync.Mutex
	var sizes []int
	g := &gatherer[nothing, nothing]{most: 100, wait: time.Hour, open: map[*Worker]*batch[nothing, nothing]{},
		fn: func(_ context.Context, batch []nothing) []Result[nothing] {
			mu.Lock()
			defer mu.Unlock()
			sizes = append(sizes, len(batch))
			return make([]Result[nothing], len(batch))
		}}
	enter := func(ctx context.Context, w *Worker) *member[nothing, nothing] {
		x := &extras{worker: w, slots: 3, lease: &leasing.Lease{Info: run.Info{Attempt: 1, MaxAttempts: 2}}}
		return &member[nothing, nothing]{ctx: context.WithValue(ctx, extrasKey{}, x), done: make(chan struct{})}
	}
	one, other := &Worker{}, &Worker{}
	leader, cancel := context.WithCancelCause(t.Context())
	var entered sync.WaitGroup
	entered.Go(func() {
		if out := g.handle(enter(leader, other)); out.Err == nil {
			t.Error("a run that was cancelled while it waited for others has succeeded")
		}
	})
	var full sync.WaitGroup
	for range 6 {
		full.Go(func() { g.handle(enter(t.Context(), one)) })
	}
	full.Wait() // or for an hour
	cancel(run.ErrCancelled)
	entered.Wait()
	if len(sizes) != 2 || sizes[0] != 3 || sizes[1] != 3 {
		t.Errorf("calls had %v runs, want two of 3", sizes)
	}
}

// The context of a call ends with the first time limit of its runs, and otherwise with the last of their contexts.
func TestTogether(t *testing.T) {
	t.Parallel()
	one, endOne := context.WithCancelCause(t.Context())
	other, endOther := context.WithCancelCause(t.Context())
	for cause, ends := range map[error]bool{run.ErrDeadline: true, run.ErrCancelled: false} {
		third, endThird := context.WithCancelCause(t.Context())
		ctx, done := together([]context.Context{one, third})
		endThird(cause)
		select {
		case <-ctx.Done():
		case <-time.After(map[bool]time.Duration{true: time.Minute, false: 50 * time.Millisecond}[ends]):
		}
		if ended := ctx.Err() != nil; ended != ends {
			t.Errorf("after %v of one of two, the context has ended: %v, want %v", cause, ended, ends)
		}
		done()
	}
	ctx, done := together([]context.Context{one, other})
	defer done()
	endOne(run.ErrCancelled)
	endOther(run.ErrShutdown)
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, run.ErrShutdown) && !errors.Is(cause, run.ErrCancelled) {
		t.Errorf("the cause is %v, want that of a run", cause)
	}
}
