// Package dispatcher publishes the events of the outbox. Delivery is at least once, with the same id and bytes
// each time, and in order within an aggregate. An event that cannot be published delays only its aggregate.
//
// A [Dispatcher] claims lanes that have due events (delivery.Acquire), converts the rows to CloudEvents (event.go),
// has a [Sink] publish them, and marks the outcome of each (delivery.Mark). No transaction is open while the sink
// publishes. Several dispatchers share the lanes; if one dies, others take its lanes over when its claim expires.
package dispatcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Config configures a Dispatcher. Pool, Source and Sinks are required.
type Config struct {
	Pool   *pgxpool.Pool
	Source string // the CloudEvents source of all events: a URI reference, the same for all dispatchers of a database
	Sinks  []Target
	Name   string // shown in outbox_lane.claimed_by, with a random suffix; empty: dispatcher

	Batch        int           // most events in a batch, for each sink; 0: 1000
	BatchBytes   int           // most bytes of payloads and headers in a batch; a larger event is a batch of its own; 0: 8 MiB
	PollInterval time.Duration // shortest pause after a poll that finds nothing due; 0: 20 ms
	Claim        time.Duration // how long lanes are claimed for, 1 s to 1 h; after a crash they stay blocked for as long; 0: a minute
	MaxAttempts  int           // number of failures after which an event is parked; 0: 20
	Backoff      run.Backoff   // between the attempts to publish an event
	Grace        time.Duration // how long running batches may take once Run's context has ended; 0: 10 s

	Observe Observer
	Logger  *slog.Logger // nil: slog.Default()
}

// A Target is a sink with a name. The database keeps the sink's progress under that name.
type Target struct {
	Name  string
	Sink  Sink
	Types []string // prefixes of the event types it gets; nil: all types
	Rate  float64  // most events per second; 0: no limit
}

// An Observer receives measurements. Any function may be nil. None may block.
type Observer struct {
	Published func(sink string, events int, took time.Duration)          // events of a batch that were acknowledged
	Failed    func(sink string, events int)                              // events whose attempt failed
	Parked    func(sink string, events int)                              // events that were parked
	Down      func(sink string, down bool)                               // a sink is paused, or no longer paused
	Lag       func(sink string, open, parked int, oldest time.Duration)  // every 5 s or so: events the sink has yet to get, counted up to 100,000, and the age of the oldest; events parked for it
	Polled    func(sink string, events int, took time.Duration, e error) // a poll of the outbox
	Fault     func(sink string, failing bool)                            // true: no event can be marked; false: events can be marked again
}

// A Dispatcher publishes events from the outbox to its sinks.
type Dispatcher struct {
	config Config
	name   string
	log    *slog.Logger
	wrote  atomic.Pointer[time.Time] // when the last write succeeded
}

// LastWrite returns when this dispatcher last wrote to the database. A dispatcher records every 2.5 s that it
// serves its sinks. The time is zero before the first such write.
func (d *Dispatcher) LastWrite() time.Time {
	if at := d.wrote.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// New returns a Dispatcher, or an error that lists every problem of the configuration, one per line.
func New(c Config) (*Dispatcher, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	c.Batch, c.BatchBytes = cmp.Or(c.Batch, shipped.EventBatch), cmp.Or(c.BatchBytes, shipped.EventBatchBytes)
	c.PollInterval, c.Claim = cmp.Or(c.PollInterval, shipped.EventPollInterval), cmp.Or(c.Claim, shipped.EventClaim)
	c.MaxAttempts, c.Grace = cmp.Or(c.MaxAttempts, shipped.EventAttempts), cmp.Or(c.Grace, shipped.EventGrace)
	c.Observe = c.Observe.filled()
	d := &Dispatcher{config: c, name: cmp.Or(c.Name, "dispatcher") + "-" + uuid.NewString()[:8], log: c.Logger}
	if d.log == nil {
		d.log = slog.Default()
	}
	return d, nil
}

func (c *Config) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("dispatcher: "+format, args...)) }
	if c.Pool == nil {
		bad("Pool: it is nil")
	}
	if c.Source == "" {
		bad("Source: it is empty; consumers tell events apart by source and id")
	}
	if len(c.Sinks) == 0 {
		bad("Sinks: there is none")
	}
	names := map[string]bool{}
	for _, t := range c.Sinks {
		if t.Name == "" || t.Sink == nil {
			bad("Sinks: %q lacks a name or a sink", t.Name)
		}
		if names[t.Name] {
			bad("Sinks: two have the name %q", t.Name)
		}
		names[t.Name] = true
		if len(t.Types) > 1000 {
			bad("Sinks: %q wants %d prefixes of types, the limit is 1000", t.Name, len(t.Types))
		}
		if t.Rate < 0 {
			bad("Sinks: %q has a rate of %g", t.Name, t.Rate)
		}
	}
	if min(c.Batch, c.BatchBytes, c.MaxAttempts) < 0 || min(c.PollInterval, c.Claim, c.Grace) < 0 {
		bad("a size, number or duration is negative")
	}
	if c.Claim != 0 && c.Claim < time.Second {
		bad("Claim: %s is less than a second", c.Claim)
	}
	if c.Claim > delivery.LongestClaim {
		bad("Claim: %s is more than %s; a crash would hold up what was claimed for as long", c.Claim, delivery.LongestClaim)
	}
	if len(c.Name) > 200 {
		bad("Name: it has %d bytes, the limit is 200", len(c.Name))
	}
	return errors.Join(errs...)
}

func (o Observer) filled() Observer {
	if o.Published == nil {
		o.Published = func(string, int, time.Duration) {}
	}
	if o.Failed == nil {
		o.Failed = func(string, int) {}
	}
	if o.Parked == nil {
		o.Parked = func(string, int) {}
	}
	if o.Down == nil {
		o.Down = func(string, bool) {}
	}
	if o.Lag == nil {
		o.Lag = func(string, int, int, time.Duration) {}
	}
	if o.Polled == nil {
		o.Polled = func(string, int, time.Duration, error) {}
	}
	if o.Fault == nil {
		o.Fault = func(string, bool) {}
	}
	return o
}

// Run registers the sinks and publishes until ctx ends. Then it claims nothing more, lets running batches
// finish for up to Config.Grace, and closes the sinks. Events that were not acknowledged by then are
// published again later. Run waits for a database that is unavailable. It returns an error only if the
// database refuses to register a sink, for example because it has no outbox.
func (d *Dispatcher) Run(ctx context.Context) error {
	defer d.closeSinks()
	var late []Target
	for _, t := range d.config.Sinks { // register all before any gets an event: a sink that is not registered yet would miss what the others have got
		apart, err := d.register(ctx, t, false)
		if err != nil {
			return err
		}
		if apart {
			late = append(late, t)
		}
	}
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var all sync.WaitGroup
	feed := func(t Target) {
		f := newFeed(d, t)
		sweep := f.setRight(ctx)
		all.Go(func() { f.run(ctx, sending) })
		all.Go(func() { f.keep(ctx, sweep) })
		all.Go(func() { f.appear(ctx) })
	}
	for _, t := range d.config.Sinks {
		if !slices.ContainsFunc(late, func(l Target) bool { return l.Name == t.Name }) {
			feed(t)
			continue
		}
		all.Go(func() {
			if _, _ = d.register(ctx, t, true); ctx.Err() == nil {
				feed(t)
			}
		})
	}
	d.log.Info("dispatcher starts", "dispatcher", d.name, "sinks", d.names())
	<-ctx.Done()
	grace := time.AfterFunc(d.config.Grace, stop)
	defer grace.Stop()
	all.Wait()
	d.log.Info("dispatcher stopped", "dispatcher", d.name)
	return nil
}

func (d *Dispatcher) closeSinks() {
	for _, t := range d.config.Sinks {
		if err := t.Sink.Close(); err != nil {
			d.log.Warn("cannot close a sink", "sink", t.Name, "err", err)
		}
	}
}

const registerTimeout = 3 * time.Second

// register registers a sink. After an error it does one of three things:
//
//   - If only the row of this sink is the problem, it returns apart = true. That is so if the sink is in the database
//     already and another sink could be registered. The other sinks start without this one, and the caller calls
//     register for it again with late set.
//   - Otherwise, if the error is temporary, it tries again.
//   - Otherwise it returns the error.
//
// With late set, it retries after all errors. When ctx ends it returns no error, because a stop is not a failure.
func (d *Dispatcher) register(ctx context.Context, t Target, late bool) (apart bool, _ error) {
	var told time.Time
	for n := 0; ; n++ {
		call, done := context.WithTimeout(ctx, registerTimeout) // the row may be locked
		err := delivery.Register(call, d.config.Pool, t.Name, t.Types)
		done()
		switch {
		case err == nil, ctx.Err() != nil:
			return false, nil
		case time.Since(told) > quietFor:
			told = time.Now()
			d.log.Warn("cannot register a sink; trying again", "sink", t.Name, "err", fault.Loggable(err))
		}
		if !late {
			if works, problem := delivery.Registers(ctx, d.config.Pool, t.Name); works && problem == nil {
				return true, nil
			}
			if fault.Of(err) == fault.Halve {
				return false, err
			}
		}
		sleep(ctx, run.Backoff{Base: 100 * time.Millisecond, Cap: 5 * time.Second}.Delay(n))
	}
}

func (d *Dispatcher) names() (names []string) {
	for _, t := range d.config.Sinks {
		names = append(names, t.Name)
	}
	return names
}
