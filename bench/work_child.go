package main

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// register adds the handlers of an effort.
func (e effort) register(mux *worker.Mux, c *conversation) {
	worker.Handle(mux, run.Task[payload](e.Type), func(ctx context.Context, p payload) (struct{}, error) {
		c.handle(p.N)
		burn(e.Burn)
		d := e.Wait
		if e.Spread > 0 {
			d += rand.N(2*e.Spread) - e.Spread
		}
		if d > 0 {
			return struct{}{}, pause(ctx, d)
		}
		return struct{}{}, nil
	})
}

// burn computes until the thread has used so much CPU. A step in which the goroutine was moved to another thread does
// not count.
func burn(d time.Duration) {
	const most = 200 * time.Microsecond // of a step
	x := uint64(1)
	for spent, last := time.Duration(0), threadTime(); spent < d && x != 0; {
		for range 10_000 {
			x = x*6364136223846793005 | 1
		}
		now := threadTime()
		if step := now - last; 0 < step && step < most {
			spent += step
		}
		last = now
	}
}

// threadTime returns the CPU time of the thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every kernel has it
	}
	return time.Duration(t.Nano())
}
