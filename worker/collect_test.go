package worker

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// A settler takes all waiting outcomes when it is its turn. It waits for its turn while the other settler is
// busy, but not for long. It takes no more than a batch, or some megabytes of results.
func TestCollect(t *testing.T) {
	worker := func(waiting, bytes int) *Worker {
		w := &Worker{config: Config{Batch: 10}, settles: make(chan *job, 100), settling: make(chan struct{}, 1)}
		for range waiting {
			w.settles <- &job{outcome: settling.Outcome{Result: make(json.RawMessage, bytes)}}
		}
		return w
	}
	for _, c := range []struct{ waiting, bytes, want int }{{0, 2, 1}, {4, 2, 5}, {9, 2, 10}, {50, 2, 10}, {50, settleBytes / 2, 2}, {50, settleBytes, 1}} {
		w := worker(c.waiting, c.bytes)
		batch, turn := w.collect(&job{})
		if c.bytes > 2 {
			c.want++ // the first is small
		}
		if len(batch) != c.want || !turn || len(w.settling) != 1 {
			t.Errorf("%d waiting of %d bytes: %d in the batch, turn %v, want %d", c.waiting, c.bytes, len(batch), turn, c.want)
		}
	}

	w := worker(3, 2)
	w.settling <- struct{}{} // the other settler is busy, for long
	start := time.Now()
	if batch, turn := w.collect(&job{}); len(batch) != 4 || turn || time.Since(start) < settlePatience {
		t.Errorf("beside one that hangs: %d in the batch, turn %v, after %v", len(batch), turn, time.Since(start))
	}

	w.settles <- &job{}
	go func() {
		w.settles <- &job{}
		<-w.settling
	}()
	if batch, turn := w.collect(&job{}); len(batch) != 3 || !turn {
		t.Errorf("after the other: %d in the batch, turn %v, want 3 and its turn", len(batch), turn)
	}

	// While runs that were leased ahead wait for slots, it waits for half a batch, but not for long.
	w = worker(0, 2)
	w.jobs.waiting = 1
	start = time.Now()
	if batch, turn := w.collect(&job{}); len(batch) != 1 || !turn || time.Since(start) < settleGather {
		t.Errorf("with runs in line: %d in the batch, turn %v, after %v; want 1 after %v", len(batch), turn, time.Since(start), settleGather)
	}
	w = worker(1, 2)
	w.jobs.waiting = 1
	go func() {
		for range 3 {
			w.settles <- &job{}
		}
	}()
	if batch, turn := w.collect(&job{}); len(batch) != 5 || !turn {
		t.Errorf("with runs in line and outcomes on their way: %d in the batch, turn %v; want half a batch of 10", len(batch), turn)
	}
}
