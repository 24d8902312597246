package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

const (
	rareEvents = "one event after the other"
	busyEvents = "%s events a second"

	rarePause = 50 * time.Millisecond // plus up to one poll interval, so that appends do not synchronize with polls
	busyRate  = 2000
	busyHands = 8 // concurrent commits
)

// eventDelays measures the time from the commit of an event to the call of the sink with it.
func (b *bench) eventDelays(ctx context.Context, templates map[string]string, rep int) error {
	var all []backlog
	if b.has(ours{}) {
		all = append(all, backlog{engine: oursEvents{}, template: templates["empty"]})
	}
	if b.watermill {
		all = append(all, backlog{engine: forwarded{}, template: templates["forwarded empty"], task: task{Batch: forwardBatch}})
	}
	for _, w := range all {
		for _, variant := range []string{rareEvents, fmt.Sprintf(busyEvents, thousands(busyRate))} {
			s := sample{Engine: w.engine.name(), Variant: variant, Rep: rep, More: map[string]float64{}}
			err := b.onCopy(ctx, w.template, func(db *database) error { return b.eventDelay(ctx, db, w, &s) })
			if err != nil {
				return fmt.Errorf("%s, %s: %w", s.Engine, variant, err)
			}
			b.record(s)
		}
	}
	return nil
}

func (b *bench) eventDelay(ctx context.Context, db *database, w backlog, s *sample) error {
	if _, gated := w.engine.(oursEvents); gated {
		if err := openGate(ctx, db); err != nil {
			return err
		}
	}
	p, err := w.engine.producer(w.task, db.Pool)
	if err != nil {
		return err
	}
	w.task.Do, w.task.URL, w.task.Told = "publish", db.url, true
	ps, err := start(w.engine, w.task, 1)
	if err != nil {
		return err
	}
	ps.say("go")
	err = pause(ctx, b.sizes.warmUp)
	if err == nil {
		err = b.delays(ctx, db, w.engine, p, ps, s)
	}
	return errors.Join(err, ps.stop())
}

func (b *bench) delays(ctx context.Context, db *database, e engine, p producer, ps processes, s *sample) error {
	b.calm()
	from, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	var committed []int64
	if s.Variant == rareEvents {
		committed, err = appendRarely(ctx, p, b.sizes.rareEvents)
	} else {
		committed, err = appendEvenly(ctx, p, int(busyRate*b.sizes.busyEvents.Seconds()))
	}
	if err != nil {
		return err
	}
	s.Runs = len(committed)
	if err := awaitDrained(ctx, db, e, ps, int64(s.Runs)); err != nil {
		return err
	}
	to, err := b.server.read(ctx, ps)
	if err != nil {
		return err
	}
	s.costs(from, to, s.Runs)
	s.Rate = float64(s.Runs) / s.Seconds
	var all []float64
	for i, at := range committed {
		seen, err := awaitSeen(ctx, ps, i+1, 10*time.Second)
		if err != nil {
			return err
		}
		all = append(all, max(0, float64(seen-at)/1e6))
	}
	for _, g := range gapShares {
		s.More[g.name+" ms"] = percentile(all, g.share)
	}
	if s.Variant == rareEvents {
		s.Series = all
	}
	return publishedOnce(ctx, db, e, ps, s.Runs)
}

// appendRarely commits n events, each long after the previous one was published, and returns the times of the
// commits.
func appendRarely(ctx context.Context, p producer, n int) (committed []int64, err error) {
	for i := range n {
		if err := pause(ctx, rarePause+rand.N(shipped.EventPollInterval)); err != nil {
			return nil, err
		}
		if err := p.one(ctx, i+1); err != nil {
			return nil, err
		}
		committed = append(committed, clock())
	}
	return committed, nil
}

// appendEvenly commits n events at an even rate, and returns the times of the commits. Late events are not left out.
func appendEvenly(ctx context.Context, p producer, n int) (committed []int64, err error) {
	committed = make([]int64, n)
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make(chan error, busyHands)
	begin := time.Now()
	for range busyHands {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				err := pause(ctx, time.Until(begin.Add(time.Duration(i)*time.Second/busyRate)))
				if err == nil {
					err = p.one(ctx, i+1)
				}
				if err != nil {
					errs <- err
					return
				}
				committed[i] = clock()
			}
		})
	}
	all.Wait()
	close(errs)
	return committed, <-errs
}

func jsonOf(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // texts and numbers only
	}
	return text
}
