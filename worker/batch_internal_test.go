package worker

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
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
	handle := func(ctx context.Context, w *Worker) Result[nothing] {
		x := &extras{worker: w, lease: &leasing.Lease{Info: run.Info{Type: "test.batch.v1", Attempt: 1, MaxAttempts: 2}}}
		return g.handle(context.WithValue(ctx, extrasKey{}, x), nothing{})
	}
	few := NewMux()
	few.HandleRaw("test.batch.v1", func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil }, Options{Concurrency: 3})
	// One worker has few slots for the type, the other has few slots.
	one, other := &Worker{config: Config{Mux: few, Concurrency: 50}}, &Worker{config: Config{Mux: NewMux(), Concurrency: 2}}
	leader, cancel := context.WithCancelCause(t.Context())
	var entered sync.WaitGroup
	entered.Go(func() {
		if out := handle(leader, other); out.Err == nil {
			t.Error("a run that was cancelled while it waited for others has succeeded")
		}
	})
	var full sync.WaitGroup
	for range 6 {
		full.Go(func() { handle(t.Context(), one) })
	}
	full.Wait() // or for an hour
	cancel(run.ErrCancelled)
	entered.Wait()
	for range 2 {
		full.Go(func() { handle(t.Context(), other) })
	}
	full.Wait()
	if !slices.Equal(sizes, []int{3, 3, 2}) {
		t.Errorf("calls had %v runs, want two of 3 and one of 2", sizes)
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

// A run whose context has ended does not wait for the end of its call, so it does not count as one whose handler is stuck.
// It is not the first of its batch, which makes the call.
func TestBatchIsLeft(t *testing.T) {
	t.Parallel()
	type nothing struct{}
	begun, release := make(chan struct{}), make(chan struct{})
	w := &Worker{config: Config{Mux: NewMux(), Concurrency: 2}}
	g := &gatherer[nothing, nothing]{most: 2, wait: time.Hour, open: map[*Worker]*batch[nothing, nothing]{},
		fn: func(_ context.Context, batch []nothing) []Result[nothing] {
			close(begun)
			<-release
			return make([]Result[nothing], len(batch))
		}}
	x := &extras{worker: w, lease: &leasing.Lease{Info: run.Info{Type: "test.batch.v1", Attempt: 1, MaxAttempts: 2}}}
	ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), extrasKey{}, x))
	first := make(chan Result[nothing], 1)
	go func() { first <- g.handle(context.WithValue(t.Context(), extrasKey{}, x), nothing{}) }()
	for len(g.waiting()) == 0 {
		time.Sleep(time.Millisecond)
	}
	time.AfterFunc(50*time.Millisecond, func() { <-begun; cancel(run.ErrCancelled) })
	if out := g.handle(ctx, nothing{}); !errors.Is(out.Err, run.ErrCancelled) {
		t.Errorf("the run that was cancelled returned %v", out.Err)
	}
	close(release)
	if out := <-first; out.Err != nil {
		t.Errorf("the other run returned %v", out.Err)
	}
}

// waiting returns the members of all batches that gather.
func (g *gatherer[In, Out]) waiting() (all []*member[In, Out]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, b := range g.open {
		all = append(all, b.members...)
	}
	return all
}
