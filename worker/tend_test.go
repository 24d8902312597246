package worker_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
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

// An idle worker asks the server one question a second about all that it may have to tend to, and none about each.
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
	looks := 0
	for text, n := range seen.take() {
		switch {
		case strings.Contains(text, "workflow_look_v1"):
			looks += n
		case strings.Contains(text, "workflow_lanes_v2"), strings.Contains(text, "workflow_take_back_v1"): // the poll, and expired leases
			if n > 2*seconds {
				t.Errorf("%d × %.60q in %d s", n, text, seconds)
			}
		default: // rarer than every other second
			if n > seconds/2 {
				t.Errorf("%d × %.60q in %d s", n, text, seconds)
			}
		}
	}
	if looks == 0 || looks > seconds+1 {
		t.Errorf("%d looks in %d s", looks, seconds)
	}
}

// While the look fails, a worker still learns that others cannot extend their leases, and takes none back.
func TestFaultsWithoutTheLook(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.held.v1", func(context.Context) error { return nil })
	id := enqueue(t, pool, "test.held.v1", empty{})
	lease := func(until string) {
		pgtest.ByHand(t, pool, `UPDATE workflow_run SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'another', started_at = now() - interval '1 minute',
			lease_until = now() + $2::interval, deadline_at = now() + interval '1 hour' WHERE id = $1`, id, until)
	}
	lease("1 hour")
	execute(t, pool, `ALTER FUNCTION workflow_look_v1 RENAME TO elsewhere`)
	report := func() { execute(t, pool, `SELECT workflow_fault_v1('extend', 'XX777', 'as another worker reports')`) }
	report()
	work(t, pool, mux, nil)
	for second := range 10 {
		if second == 3 {
			lease("-1 second")
		}
		time.Sleep(time.Second)
		report()
	}
	if r := read(t, pool, id); r.Status != run.Leased || r.Attempt != 1 {
		t.Errorf("it is %s at attempt %d", r.Status, r.Attempt)
	}
	execute(t, pool, `DELETE FROM workflow_fault`)
	pgtest.Await(t, "it to be taken back", func() bool { return read(t, pool, id).Status == run.Succeeded })
}
