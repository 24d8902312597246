package worker

import (
	"context"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/run"
)

// The bounds of what HandleBatch accepts. A longer wait would leave no time to report: see reportTime.
const (
	mostInBatch       = 10_000
	shortestBatchWait = time.Millisecond
	longestBatchWait  = time.Second
)

// batchReport is how long a run whose context has ended waits for the call that it is part of. It can still report that it
// has reached its time limit, and does not count as a handler that ignores the end of its context.
const batchReport = reportTime / 2

// A Result is the outcome of one run of a batch: a value, or an error, which means what the error of a Handler means. The
// zero Result is a success with the zero value.
type Result[Out any] struct {
	Value Out
	Err   error
}

// HandleBatch registers a function that takes many runs of a type in one call. It is for work that costs less in bulk, such
// as an INSERT of many rows, or a request that takes a list.
//
//	worker.HandleBatch(mux, "search.index.v1", 50, 20*time.Millisecond, search.Index)
//
// A call gets between one and most payloads, 10,000 at most. It is made once most runs have come together, or wait after
// the first of them: 1 ms to 1 s. Each run of a batch takes a slot, and begins when it takes it. So a batch is full with
// Config.Concurrency runs, or Options.Concurrency, if that is fewer. Several calls may run at once.
//
// fn returns one result for each payload, in their order, and each run is settled by itself. If fn panics, or returns
// another number of results, it is called again for each run of the batch alone. A run at its last attempt shares its
// call with no other, so that no run uses up its attempts because of another. Nor does a suspect, which has perhaps
// killed its process.
//
// The context of the call ends when one of its runs has reached its time limit, or when the contexts of all have ended. It
// carries no values, and belongs to no run. BatchContexts returns the contexts of the runs.
//
// Payloads are decoded and results encoded as by Handle. HandleBatch panics as Handle does, and if most or wait is out
// of range, or not shorter than the time limit in the options.
func HandleBatch[In, Out any](m *Mux, task run.Task[In], most int, wait time.Duration, fn func(ctx context.Context, batch []In) []Result[Out], options ...Options) {
	typ := typeOf(task, fn == nil)
	switch {
	case most < 1 || most > mostInBatch:
		panic(fmt.Sprintf("worker: a batch of at most %d runs for %q: it is 1 to %d", most, typ, mostInBatch))
	case wait < shortestBatchWait || wait > longestBatchWait:
		panic(fmt.Sprintf("worker: a wait of %s for a batch of %q: it is %s to %s", wait, typ, shortestBatchWait, longestBatchWait))
	case len(options) == 1 && options[0].Timeout > 0 && options[0].Timeout <= wait:
		panic(fmt.Sprintf("worker: a wait of %s for a batch of %q, whose time limit is %s", wait, typ, options[0].Timeout))
	}
	g := &gatherer[In, Out]{most: most, wait: wait, fn: fn, open: map[*Worker]*batch[In, Out]{}}
	m.HandleRaw(typ, func(ctx context.Context, payload stdjson.RawMessage) (stdjson.RawMessage, error) {
		in, err := decode[In](payload)
		if err != nil {
			return nil, err
		}
		out := g.handle(ctx, in)
		if out.Err != nil {
			return nil, out.Err
		}
		return encode(out.Value)
	}, options...)
}

type batchKey struct{}

// BatchContexts returns the contexts of the runs of a batch, in the order of the payloads, if ctx is the context of a
// call by HandleBatch. run.FromContext, InSettle, Emit and Token take them. Each ends when that of a handler of its run
// would end, although the call may continue for the others. For any other context BatchContexts returns nil.
func BatchContexts(ctx context.Context) []context.Context {
	all, _ := ctx.Value(batchKey{}).([]context.Context)
	return slices.Clone(all)
}

// A member is one run of a batch.
type member[In, Out any] struct {
	ctx  context.Context
	in   In
	done chan struct{} // closed once out, or alone, is set

	out   Result[Out]
	alone bool // the call failed as a whole: the run is to be called alone
}

// A gatherer brings runs together. The first run of a batch leads it: its goroutine waits for the others, and calls fn.
type gatherer[In, Out any] struct {
	most int
	wait time.Duration
	fn   func(context.Context, []In) []Result[Out]

	mu   sync.Mutex
	open map[*Worker]*batch[In, Out] // that further runs may join, by the worker that has them
}

// A batch is guarded by the gatherer's mu until it is full.
type batch[In, Out any] struct {
	worker  *Worker // of all members
	members []*member[In, Out]
	full    chan struct{} // closed when no more may join
}

// handle returns the outcome of a run once it is known.
func (g *gatherer[In, Out]) handle(ctx context.Context, in In) Result[Out] {
	x, err := extrasOf(ctx)
	if err != nil || x.worker == nil || x.lease.Suspect || x.lease.Attempt >= x.lease.MaxAttempts {
		return g.alone(ctx, in)
	}
	one := &member[In, Out]{ctx: ctx, in: in, done: make(chan struct{})}
	b, leads := g.join(one, x)
	if leads {
		g.gather(b, ctx)
		g.call(b.members)
	}
	var late <-chan time.Time
	for ended := ctx.Done(); ; {
		select {
		case <-one.done:
			if one.alone {
				return g.alone(ctx, in)
			}
			return one.out
		case <-ended:
			ended, late = nil, time.After(batchReport)
		case <-late:
			return Result[Out]{Err: context.Cause(ctx)} // the call goes on for the others
		}
	}
}

// alone calls fn for one run.
func (g *gatherer[In, Out]) alone(ctx context.Context, in In) Result[Out] {
	one := &member[In, Out]{ctx: ctx, in: in, done: make(chan struct{})}
	g.call([]*member[In, Out]{one})
	return one.out
}

// join adds a run to the open batch of its worker, or to a new one, which it then leads.
func (g *gatherer[In, Out]) join(one *member[In, Out], x *extras) (b *batch[In, Out], leads bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b = g.open[x.worker]
	if leads = b == nil; leads {
		b = &batch[In, Out]{worker: x.worker, full: make(chan struct{})}
		g.open[x.worker] = b
	}
	if b.members = append(b.members, one); len(b.members) >= min(g.most, x.worker.slots(x.lease.Type)) {
		g.closeLocked(b)
	}
	return b, leads
}

// closeLocked lets no more runs join.
func (g *gatherer[In, Out]) closeLocked(b *batch[In, Out]) {
	if g.open[b.worker] == b {
		delete(g.open, b.worker)
		close(b.full)
	}
}

// gather waits until the batch is full, or for as long as a batch waits, or until its leader may not go on.
func (g *gatherer[In, Out]) gather(b *batch[In, Out], leader context.Context) {
	timer := time.NewTimer(g.wait)
	defer timer.Stop()
	select {
	case <-b.full:
	case <-timer.C:
	case <-leader.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closeLocked(b)
}

// call passes to fn those whose contexts have not ended meanwhile, and tells all what became of them.
func (g *gatherer[In, Out]) call(all []*member[In, Out]) {
	var members []*member[In, Out]
	var payloads []In
	var contexts []context.Context
	for _, one := range all {
		if one.ctx.Err() != nil {
			one.out.Err = context.Cause(one.ctx)
			close(one.done)
			continue
		}
		members, payloads, contexts = append(members, one), append(payloads, one.in), append(contexts, one.ctx)
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
			switch {
			case err == nil:
				one.out = results[i]
			case len(members) > 1:
				one.alone = true
			default:
				one.out.Err = err
			}
			close(one.done)
		}
	}()
	ctx, done := together(contexts)
	defer done()
	results = g.fn(context.WithValue(ctx, batchKey{}, contexts), payloads)
	if err = nil; len(results) != len(payloads) {
		err = fmt.Errorf("the handler returned %d results for a batch of %d", len(results), len(payloads))
	}
}

// together returns a context that ends when the first of all reaches its time limit, or when all of them have ended.
func together(all []context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	var mu sync.Mutex
	left := len(all)
	stops := make([]func() bool, len(all))
	for i, one := range all {
		stops[i] = context.AfterFunc(one, func() {
			mu.Lock()
			defer mu.Unlock()
			if left--; left == 0 || errors.Is(context.Cause(one), run.ErrDeadline) {
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
