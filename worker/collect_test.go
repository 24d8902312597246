package worker

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// A settler takes what is there when it is its turn, waits for its turn while the other is at
// work, but not for long, and takes no more than a batch or some megabytes of results.
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
	w.settling <- struct{}{} // the other is at work, for long
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
}
