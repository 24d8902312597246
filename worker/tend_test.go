package worker_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A census counts what is sent to the server, by its text.
type census struct {
	mu   sync.Mutex
	sent map[string]int
}

func (c *census) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent[data.SQL]++
	return ctx
}

func (c *census) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// take returns what was sent since the last call.
func (c *census) take() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	sent := c.sent
	c.sent = map[string]int{}
	return sent
}

// An idle worker sends fewer than five statements a second: a poll, a look for expired leases, a look for
// whatever else there is, and some that are rarer.
func TestIdle(t *testing.T) {
	t.Parallel()
	seen := &census{sent: map[string]int{}}
	config := pgtest.New(t).Config()
	config.ConnConfig.Tracer = seen
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	mux := worker.NewMux()
	handle(mux, "test.idle.v1", func(context.Context) error { return nil })
	work(t, pool, mux, func(c *worker.Config) { c.PollInterval = time.Second })
	time.Sleep(3 * time.Second) // to start
	seen.take()
	const seconds = 10
	time.Sleep(seconds * time.Second)
	all := 0
	sent := seen.take()
	for _, n := range sent {
		all += n
	}
	if all < seconds || all >= 5*seconds {
		t.Errorf("%d statements in %d s:", all, seconds)
		for text, n := range sent {
			t.Errorf("%3d × %.60q", n, text)
		}
	}
}
