package worker

import (
	"context"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// The bounds of what HandleBatch accepts.
const (
	mostInBatch       = 10_000
	shortestBatchWait = time.Millisecond
	longestBatchWait  = 10 * time.Second
)

// A Result is the outcome of one run of a batch: a value, or an error, which means what the error of a Handler means.
type Result[Out any] struct {
	Value Out
	Err   error
}

// HandleBatch registers a function that takes many runs of a type in one call. It is for work that costs less in bulk, such
// as an INSERT of many rows, or a request that takes a list.
//
//	worker.HandleBatch(mux, "search.index.v1", 50, 20*time.Millisecond, search.Index)
//
// A call gets between one and most payloads. It is made once most runs have come together, or wait after the first of
// them. Each run of a batch takes a slot, so a batch never has more than Config.Concurrency runs, nor more than
// Options.Concurrency, and calls run beside each other while there are slots. most is 1 to 10,000, and wait is 1 ms to
// 10 s. wait counts as time that the handler takes.
//
// fn returns one result for each payload, in their order, and each run is settled by itself. If fn panics, or returns
// another number of results, the attempt has failed for all runs of the batch. So that no run fails for good because of
// another, a run shares its call with half as many at each further attempt, and with none at the last. Nor does a suspect,
// which has perhaps killed its process, share its call.
//
// The context of the call ends when those of all its runs have ended, with the cause of the last. It carries no run.
// BatchContexts returns the contexts of the runs.
//
// Payloads are decoded and results encoded as by Handle. HandleBatch panics as Handle does, and if most or wait is out
// of range.
func HandleBatch[In, Out any](m *Mux, task run.Task[In], most int, wait time.Duration, fn func(ctx context.Context, batch []In) []Result[Out], options ...Options) {
	typ := string(task)
	switch {
	case fn == nil:
		panic(fmt.Sprintf("worker: handler of %q is nil", typ))
	case !naming.IsType(typ):
		panic(fmt.Sprintf("worker: %q is not a type such as billing.charge.v1", typ))
	case most < 1 || most > mostInBatch:
		panic(fmt.Sprintf("worker: a batch of at most %d runs for %q: it is 1 to %d", most, typ, mostInBatch))
	case wait < shortestBatchWait || wait > longestBatchWait:
		panic(fmt.Sprintf("worker: a wait of %s for a batch of %q: it is %s to %s", wait, typ, shortestBatchWait, longestBatchWait))
	}
	g := &gatherer[In, Out]{most: most, wait: wait, fn: fn}
	m.HandleRaw(typ, func(ctx context.Context, payload stdjson.RawMessage) (stdjson.RawMessage, error) {
		one := &member[In, Out]{ctx: ctx, done: make(chan struct{})}
		if err := json.Unmarshal(payload, &one.in, decoding); err != nil {
			return nil, technical(settling.CodePayload, fmt.Errorf("decode payload: %w", err))
		}
		if err := g.handle(one); err != nil {
			return nil, err
		}
		return encode(one.out.Value)
	}, options...)
}

type batchKey struct{}

// BatchContexts returns the contexts of the runs of a batch, in the order of the payloads, if ctx is the context of a
// call by HandleBatch. run.FromContext, InSettle, Emit and Token take them. Each ends when its run is cancelled or lost,
// although the batch may continue for the others. For any other context BatchContexts returns nil.
func BatchContexts(ctx context.Context) []context.Context {
	all, _ := ctx.Value(batchKey{}).([]context.Context)
	return all
}

// A member is one run of a batch.
type member[In, Out any] struct {
	ctx  context.Context
	in   In
	out  Result[Out]   // once done is closed
	done chan struct{} // closed when the call has returned
}

// A gatherer brings runs together. The first run of a batch leads it: its goroutine waits for the others, and calls fn.
type gatherer[In, Out any] struct {
	most int
	wait time.Duration
	fn   func(context.Context, []In) []Result[Out]

	mu   sync.Mutex
	open *batch[In, Out] // that further runs may join; nil: there is none
}

// A batch is guarded by the gatherer's mu until it is full.
type batch[In, Out any] struct {
	members []*member[In, Out]
	most    int           // the least of what the members allow
	full    chan struct{} // closed when no more may join
}

// handle returns when the outcome of one is known.
func (g *gatherer[In, Out]) handle(one *member[In, Out]) error {
	b, leads := g.join(one)
	if leads {
		g.lead(b)
	}
	for ended := one.ctx.Done(); ; {
		select {
		case <-one.done:
			return one.out.Err
		case <-ended:
			if cause := context.Cause(one.ctx); errors.Is(cause, run.ErrCancelled) {
				return cause // the call goes on for the others, and its outcome for this one would be dropped
			}
			ended = nil
		}
	}
}

// join adds a run to the open batch, or to a new one, which it then leads.
func (g *gatherer[In, Out]) join(one *member[In, Out]) (b *batch[In, Out], leads bool) {
	most := sharing(one.ctx, g.most)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil && len(g.open.members) >= most {
		g.closeLocked()
	}
	if leads = g.open == nil; leads {
		g.open = &batch[In, Out]{most: most, full: make(chan struct{})}
	}
	b = g.open
	b.members, b.most = append(b.members, one), min(b.most, most)
	if len(b.members) >= b.most {
		g.closeLocked()
	}
	return b, leads
}

func (g *gatherer[In, Out]) closeLocked() {
	close(g.open.full)
	g.open = nil
}

// sharing returns how many runs may share a call with the one of ctx, itself included, if most may do so at first.
func sharing(ctx context.Context, most int) int {
	info := run.FromContext(ctx)
	x, err := extrasOf(ctx)
	if err != nil || x.lease.Suspect || info.Attempt >= info.MaxAttempts {
		return 1
	}
	return max(min(most>>(info.Attempt-1), x.slots), 1)
}

// lead waits until the batch is full, or for as long as a batch waits, and calls fn.
func (g *gatherer[In, Out]) lead(b *batch[In, Out]) {
	timer := time.NewTimer(g.wait)
	defer timer.Stop()
	select {
	case <-b.full:
	case <-timer.C:
	}
	g.mu.Lock()
	if g.open == b {
		g.closeLocked()
	}
	g.mu.Unlock()
	g.call(b.members)
}

// call passes to fn those whose contexts have not ended meanwhile, and tells all what became of them.
func (g *gatherer[In, Out]) call(all []*member[In, Out]) {
	var members []*member[In, Out]
	var batch []In
	var contexts []context.Context
	for _, one := range all {
		if one.ctx.Err() != nil {
			one.out.Err = context.Cause(one.ctx)
			close(one.done)
			continue
		}
		members, batch, contexts = append(members, one), append(batch, one.in), append(contexts, one.ctx)
	}
	if len(members) == 0 {
		return
	}
	err := errors.New("the handler ended its goroutine (runtime.Goexit)")
	var results []Result[Out]
	defer func() {
		if p := recover(); p != nil {
			err = &run.PanicError{Value: p, Stack: debug.Stack()}
		}
		for i, one := range members {
			if one.out.Err = err; err == nil {
				one.out = results[i]
			}
			close(one.done)
		}
	}()
	ctx, done := together(contexts)
	defer done()
	results = g.fn(context.WithValue(ctx, batchKey{}, contexts), batch)
	if err = nil; len(results) != len(batch) {
		err = fmt.Errorf("the handler returned %d results for a batch of %d runs", len(results), len(batch))
	}
}

// together returns a context that ends when all of them have ended.
func together(all []context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	var mu sync.Mutex
	left := len(all)
	stops := make([]func() bool, len(all))
	for i, one := range all {
		stops[i] = context.AfterFunc(one, func() {
			mu.Lock()
			defer mu.Unlock()
			if left--; left == 0 {
				cancel(context.Cause(one))
			}
		})
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}
