package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Handler executes one run: it takes the payload and returns the result, both JSON. A nil result is stored as
// null. Most programs register typed functions with Handle instead.
//
// An error is a failure: the run is retried until its attempts are used up. run.Permanent, run.Again and
// run.RetryAfter ask for something else. The context ends with one of the causes run.ErrLost, run.ErrCancelled,
// run.ErrDeadline or run.ErrShutdown.
type Handler func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)

// A Middleware wraps a Handler, for logging, tracing, metrics or checks.
type Middleware func(next Handler) Handler

// NoTimeout sets no time limit: a handler may run for as long as its worker lives.
const NoTimeout time.Duration = -1

// Options are the settings of one type or prefix. A zero field means the worker's default.
type Options struct {
	Lease       time.Duration // how long a lease lasts without a heartbeat; 2 s to 24 h
	Timeout     time.Duration // the longest time that one attempt may take, from when its handler begins, or NoTimeout
	Concurrency int           // leases held at once by this process, and so runs executed; 0: limited by Config.Concurrency only
	MaxAttempts int           // lowers a run's own max_attempts, never raises it
	Backoff     run.Backoff   // pause between attempts
}

// A Mux maps types to handlers. The zero value is not usable; call NewMux. Register handlers at start-up,
// before the worker runs. Registration panics on misuse.
type Mux struct {
	middleware []Middleware
	types      map[string]*entry
	prefixes   []*entry // longest first
}

type entry struct {
	pattern string
	handler Handler // wrapped by the middleware
	options Options
}

// NewMux returns an empty Mux.
func NewMux() *Mux {
	return &Mux{types: map[string]*entry{}}
}

// Use adds middleware around the handlers that are registered after it. The first one added is the outermost.
func (m *Mux) Use(middleware ...Middleware) {
	m.middleware = append(m.middleware, middleware...)
}

// HandleRaw registers h for a type, or for all types under a prefix if pattern ends with a dot. The longest
// pattern that matches a run wins. At most one Options may be given. HandleRaw panics if pattern is neither a
// type nor a prefix, if it is registered already, if h is nil, or if the options are invalid.
func (m *Mux) HandleRaw(pattern string, h Handler, options ...Options) {
	if h == nil {
		panic(fmt.Sprintf("worker: handler of %q is nil", pattern))
	}
	if len(options) > 1 {
		panic(fmt.Sprintf("worker: more than one Options for %q", pattern))
	}
	e := &entry{pattern: pattern, handler: h}
	if len(options) == 1 {
		e.options = options[0]
	}
	if err := e.options.validate(); err != nil {
		panic(fmt.Sprintf("worker: options of %q: %v", pattern, err))
	}
	for _, wrap := range slices.Backward(m.middleware) {
		e.handler = wrap(e.handler)
	}
	switch {
	case naming.IsType(pattern):
		if m.types[pattern] != nil {
			panic(fmt.Sprintf("worker: type %q is registered twice", pattern))
		}
		m.types[pattern] = e
	case naming.IsPrefix(pattern):
		if slices.ContainsFunc(m.prefixes, func(p *entry) bool { return p.pattern == pattern }) {
			panic(fmt.Sprintf("worker: prefix %q is registered twice", pattern))
		}
		m.prefixes = append(m.prefixes, e)
		slices.SortFunc(m.prefixes, func(a, b *entry) int { return len(b.pattern) - len(a.pattern) })
	default:
		panic(fmt.Sprintf("worker: %q is neither a type such as billing.charge.v1 nor a prefix such as billing.", pattern))
	}
}

// lookup returns the entry of a type, or nil.
func (m *Mux) lookup(typ string) *entry {
	if e := m.types[typ]; e != nil {
		return e
	}
	for _, e := range m.prefixes {
		if strings.HasPrefix(typ, e.pattern) {
			return e
		}
	}
	return nil
}

// entries returns all entries, in no particular order.
func (m *Mux) entries() []*entry {
	return slices.AppendSeq(slices.Clone(m.prefixes), maps.Values(m.types))
}

// limited reports whether some entry has a concurrency limit of its own.
func (m *Mux) limited() bool {
	return slices.ContainsFunc(m.entries(), func(e *entry) bool { return e.options.Concurrency > 0 })
}

// Patterns returns the types and prefixes that have a handler, sorted.
func (m *Mux) Patterns() []string {
	var all []string
	for _, e := range m.entries() {
		all = append(all, e.pattern)
	}
	slices.Sort(all)
	return all
}

func (o Options) validate() error {
	switch {
	case o.Lease != 0 && (o.Lease < shipped.MinLease || o.Lease > shipped.MaxLease):
		return fmt.Errorf("Lease %s is outside %s to %s", o.Lease, shipped.MinLease, shipped.MaxLease)
	case o.Timeout < 0 && o.Timeout != NoTimeout:
		return fmt.Errorf("Timeout %s is negative; use NoTimeout for none", o.Timeout)
	case o.Concurrency < 0:
		return fmt.Errorf("Concurrency %d is negative", o.Concurrency)
	case o.MaxAttempts < 0 || o.MaxAttempts > 1000:
		return fmt.Errorf("MaxAttempts %d is outside 1 to 1000", o.MaxAttempts)
	case o.Backoff.Base < 0 || o.Backoff.Cap < 0 || o.Backoff.Cap != 0 && o.Backoff.Base > o.Backoff.Cap:
		return fmt.Errorf("Backoff from %s to %s is not a range", o.Backoff.Base, o.Backoff.Cap)
	}
	return nil
}
