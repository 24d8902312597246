package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	feeders   = 2
	feedBatch = 1000
	feedAhead = 10_000 // how many runs wait for the workers at most
)

// A feed stores runs in bulk as fast as workers handle them.
type feed struct {
	made atomic.Int64
	halt context.CancelFunc
	all  sync.WaitGroup
	errs chan error
}

func startFeed(ctx context.Context, p producer, ps processes) *feed {
	ctx, halt := context.WithCancel(ctx)
	f := &feed{halt: halt, errs: make(chan error, feeders)}
	for range feeders {
		f.all.Go(func() { f.errs <- f.produce(ctx, p, ps) })
	}
	return f
}

func (f *feed) produce(ctx context.Context, p producer, ps processes) error {
	ns := make([]int, feedBatch)
	for ctx.Err() == nil {
		if handled, _ := ps.handled(); f.made.Load()-handled >= feedAhead {
			time.Sleep(time.Millisecond)
			continue
		}
		end := int(f.made.Add(feedBatch))
		for i := range ns {
			ns[i] = end - i
		}
		// A batch that was begun is stored, so it counts.
		if err := p.many(context.WithoutCancel(ctx), ns); err != nil {
			return err
		}
	}
	return nil
}

// stop ends the feed and returns how many runs were stored.
func (f *feed) stop() (made int, err error) {
	f.halt()
	f.all.Wait()
	for range feeders {
		err = errors.Join(err, <-f.errs)
	}
	return int(f.made.Load()), err
}

// perSecond waits for d and returns how many runs were handled in each second of it.
func perSecond(ctx context.Context, ps processes, d time.Duration) (series []float64, err error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	before, _ := ps.handled()
	for range int(d.Seconds()) {
		select {
		case <-ctx.Done():
			return series, ctx.Err()
		case <-tick.C:
		}
		now, _ := ps.handled()
		series = append(series, float64(now-before))
		before = now
		if err := ps.alive(); err != nil {
			return series, err
		}
	}
	return series, nil
}
