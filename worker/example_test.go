package worker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A handler is an ordinary function: payload in, result out.
func ExampleHandle() {
	ctx, pool, done := pgtest.Example()
	defer done()

	type order struct{ Item string }
	mux := worker.NewMux()
	worker.Handle(mux, "shop.greet.v1", func(_ context.Context, in order) (string, error) {
		return "one " + in.Item + ", coming up", nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.greet.v1", Payload: order{Item: "tea"}})
	r := workUntilFinished(ctx, pool, mux, enqueued)
	fmt.Println(r.Status, string(r.Result))
	// Output: succeeded "one tea, coming up"
}

type brewing struct {
	Item  string
	Sugar int
}

// brew is the payload on which callers and handlers agree.
var brew = run.Task[brewing]("shop.brew.v1")

// A task is declared once. Code that enqueues or handles it with another payload does not compile.
func ExampleHandle_task() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, brew, func(_ context.Context, in brewing) (string, error) {
		return fmt.Sprintf("%s with %d", in.Item, in.Sugar), nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, brew.New(brewing{Item: "tea", Sugar: 2}))
	r := workUntilFinished(ctx, pool, mux, enqueued)
	fmt.Println(r.Type, r.Status, string(r.Result))
	// Output: shop.brew.v1 succeeded "tea with 2"
}

// After an error the run is retried after a growing pause, until it was started max_attempts times.
// run.Permanent, run.Again and run.RetryAfter ask for something else.
func ExampleHandle_retry() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.call.v1", func(ctx context.Context, _ struct{}) (string, error) {
		attempt := run.FromContext(ctx).Attempt
		fmt.Println("attempt", attempt)
		if attempt < 3 {
			return "", errors.New("nobody answers")
		}
		return "", run.Permanent(errors.New("the number is wrong"))
	}, worker.Options{Backoff: run.Backoff{Base: 10 * time.Millisecond}})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.call.v1", MaxAttempts: 10})
	r := workUntilFinished(ctx, pool, mux, enqueued)
	fmt.Println(r.Status, *r.LastError)
	// Output:
	// attempt 1
	// attempt 2
	// attempt 3
	// failed the number is wrong
}

// The statements of InSettle, the emitted events and the result are committed together, and only if the lease
// still holds.
func ExampleInSettle() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE booking (amount int)`)

	type charge struct{ Amount int }
	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(ctx context.Context, in charge) (string, error) {
		if err := worker.Emit(ctx, outbox.Event{Type: "invoice.charged.v1", Payload: in}); err != nil {
			return "", err
		}
		return "booked", worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO booking VALUES ($1)`, in.Amount)
			return err
		})
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.charge.v1", Payload: charge{Amount: 42}})
	r := workUntilFinished(ctx, pool, mux, enqueued)
	var bookings, events int
	_ = pool.QueryRow(ctx, `SELECT (SELECT sum(amount) FROM booking), (SELECT count(*) FROM outbox_event)`).Scan(&bookings, &events)
	fmt.Println(r.Status, string(r.Result), bookings, events)
	// Output: succeeded "booked" 42 1
}

// On SIGTERM the worker leases nothing more and lets handlers finish. After the grace period their contexts
// end, and their runs are released with no attempt charged.
func ExampleRun() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.brew.v1", func(ctx context.Context, _ struct{}) (string, error) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
		<-ctx.Done()
		fmt.Println(context.Cause(ctx))
		return "", ctx.Err()
	})
	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.brew.v1"})

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	err := worker.Run(ctx, worker.Config{
		Pool: pool, Mux: mux, Prefixes: []string{"shop."}, ShutdownGrace: 100 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler),
	})
	r, _ := run.Read(context.Background(), pool, enqueued.ID)
	fmt.Println(err, r.Status, "after", r.Attempt, "attempts")
	// Output:
	// run: worker is shutting down
	// <nil> pending after 0 attempts
}

// workUntilFinished runs a worker until the run has finished.
func workUntilFinished(ctx context.Context, pool *pgxpool.Pool, mux *worker.Mux, e run.Enqueued) *run.Run {
	working, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(working, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"shop."}, Logger: slog.New(slog.DiscardHandler)})
	}()
	for {
		if r, err := run.Read(ctx, pool, e.ID); err != nil || r.Status.Finished() {
			stop()
			_ = <-ended
			return r
		}
		time.Sleep(5 * time.Millisecond)
	}
}
