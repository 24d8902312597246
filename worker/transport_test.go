package worker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Runs are executed, retried, taken back, cancelled and settled with effects and events in the same way over a
// plain connection and without wake-ups.
func TestTransports(t *testing.T) {
	t.Parallel()
	transports(t, func(url string) string { return url })
}

// transports runs the suite with and without wake-ups, over the address that through returns.
func transports(t *testing.T, through func(url string) string) {
	for name, change := range map[string]func(*worker.Config){
		"wake-up":    nil,
		"no wake-up": func(c *worker.Config) { c.NoWakeUp = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := pgtest.URL(t)
			suite(t, pgtest.Open(t, direct), pgtest.Open(t, through(direct)), change)
		})
	}
}

func suite(t *testing.T, look, pool *pgxpool.Pool, change func(*worker.Config)) {
	execute(t, look, `CREATE TABLE ledger (n int)`)
	mux := worker.NewMux()
	worker.Handle(mux, "test.add.v1", func(_ context.Context, in struct{ A, B int }) (int, error) { return in.A + in.B, nil })
	handle(mux, "test.retry.v1", func(ctx context.Context) error {
		if run.FromContext(ctx).Attempt == 1 {
			return errors.New("not yet")
		}
		return nil
	})
	handle(mux, "test.effect.v1", func(ctx context.Context) error {
		return errors.Join(worker.Emit(ctx, outbox.Event{Type: "test.booked", Payload: 1}),
			worker.InSettle(ctx, func(tx pgx.Tx) error { return book(ctx, 1)(tx) }))
	})
	started := make(chan bool, 1)
	handle(mux, "test.wait.v1", func(ctx context.Context) error { started <- true; <-ctx.Done(); return ctx.Err() })
	handle(mux, "test.many.v1", func(context.Context) error { return nil })
	work(t, pool, mux, change)

	cancelled := enqueue(t, look, "test.wait.v1", empty{})
	<-started
	if err := run.Cancel(t.Context(), look, cancelled, ""); err != nil {
		t.Fatal(err)
	}
	sum := enqueue(t, look, "test.add.v1", map[string]int{"A": 2, "B": 3})
	retried := enqueue(t, look, "test.retry.v1", empty{})
	effect := enqueue(t, look, "test.effect.v1", empty{})
	expired := add(t, look, run.New{Type: "test.many.v1", Delay: time.Hour})
	expire(t, look, expired)
	addMany(t, look, "test.many.v1", 500)
	drained(t, look)
	if r := read(t, look, sum); string(r.Result) != "5" || r.Attempt != 1 {
		t.Errorf("sum is %s after %d attempts, want 5 after 1", r.Result, r.Attempt)
	}
	if r := read(t, look, retried); r.Status != run.Succeeded || r.Attempt != 2 {
		t.Errorf("retried run is %s after %d attempts, want succeeded after 2", r.Status, r.Attempt)
	}
	if r := read(t, look, expired); r.Status != run.Succeeded || r.Attempt != 2 {
		t.Errorf("expired run is %s after %d attempts, want succeeded after 2", r.Status, r.Attempt)
	}
	if r := read(t, look, effect); r.Status != run.Succeeded || booked(t, look) != 1 || query[int](t, look, `SELECT count(*) FROM outbox_event`) != 1 {
		t.Errorf("run with effects is %s, %d entries", r.Status, booked(t, look))
	}
	if r := read(t, look, cancelled); r.Status != run.Cancelled {
		t.Errorf("cancelled run is %s", r.Status)
	}
}

// A wake-up makes an idle worker poll at once, however long its poll interval is.
func TestWakeUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t, pgtest.URL(t)) // never through a pooler
	mux := worker.NewMux()
	handle(mux, "test.woken.v1", func(context.Context) error { return nil })
	w, _ := work(t, pool, mux, func(c *worker.Config) { c.PollInterval = 30 * time.Second })
	// Its pauses double. One of more than 5.2 s lasts 10 s, and so 4 s more.
	pgtest.Await(t, "the worker to listen, and to be idle for a while", func() bool {
		listening := query[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%')`)
		return listening && !w.LastPoll().IsZero() && time.Since(w.LastPoll()) > 5200*time.Millisecond
	})
	r := finished(t, pool, enqueue(t, pool, "test.woken.v1", empty{}))
	if late := r.StartedAt.Sub(r.CreatedAt); late > 4*time.Second {
		t.Errorf("started %s after it was enqueued", late)
	}
}

// Polling alone finds every run: without wake-ups no run waits longer than the poll interval, plus what a busy
// machine adds.
func TestPollingAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	handle(mux, "test.polled.v1", func(context.Context) error { return nil })
	w, _ := work(t, pool, mux, func(c *worker.Config) { c.PollInterval = time.Second; c.NoWakeUp = true })
	pgtest.Await(t, "the worker to be idle for a while", func() bool {
		return !w.LastPoll().IsZero() && time.Since(w.LastPoll()) > 500*time.Millisecond
	})
	r := finished(t, pool, enqueue(t, pool, "test.polled.v1", empty{}))
	if late := r.StartedAt.Sub(r.CreatedAt); late > 10*time.Second {
		t.Errorf("started %s after it was enqueued", late)
	}
	due := finished(t, pool, add(t, pool, run.New{Type: "test.polled.v1", Delay: 300 * time.Millisecond}))
	if late := due.StartedAt.Sub(due.RunAt); late < 0 || late > 10*time.Second {
		t.Errorf("started %s after it became due", late)
	}
}
