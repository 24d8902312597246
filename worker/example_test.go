package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/worktest"
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
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, string(r.Result))
	// Output: succeeded "one tea, coming up"
}

type brewing struct {
	Item  string
	Sugar int
}

// brew is the payload on which callers and handlers agree.
var brew = run.Task[brewing]("shop.brew.v1")

// With a task in place of the type's name, the compiler checks the payload where a run is enqueued and where it is handled.
func ExampleHandle_task() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, brew, func(_ context.Context, in brewing) (string, error) {
		return fmt.Sprintf("%s with %d", in.Item, in.Sugar), nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, brew.New(brewing{Item: "tea", Sugar: 2}))
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Type, r.Status, string(r.Result))
	// Output: shop.brew.v1 succeeded "tea with 2"
}

// One call does the work of many runs. Each has a result of its own.
func ExampleHandleBatch() {
	ctx, pool, done := pgtest.Example()
	defer done()

	type order struct{ Item string }
	mux := worker.NewMux()
	worker.HandleBatch(mux, "shop.pack.v1", 3, time.Second, func(_ context.Context, batch []order) []worker.Result[string] {
		fmt.Println("packing", len(batch))
		results := make([]worker.Result[string], len(batch))
		for i, in := range batch {
			if results[i].Value = in.Item + " is packed"; in.Item == "" {
				results[i].Err = run.Permanent(errors.New("an empty order"))
			}
		}
		return results
	})

	enqueued, _ := run.EnqueueMany(ctx, pool, []run.New{
		{Type: "shop.pack.v1", Payload: order{Item: "tea"}},
		{Type: "shop.pack.v1", Payload: order{Item: "cake"}},
		{Type: "shop.pack.v1", Payload: order{}},
	})
	for _, e := range enqueued {
		r := worktest.Finish(ctx, pool, mux, e.ID)
		fmt.Println(r.Status, string(r.Result))
	}
	// Output:
	// packing 3
	// succeeded "tea is packed"
	// succeeded "cake is packed"
	// failed
}

// A run that fails is tried again after a pause that grows, until its attempts are used up.
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
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, *r.LastError)
	// Output:
	// attempt 1
	// attempt 2
	// attempt 3
	// failed the number is wrong
}

// The run's id is the same at every attempt, so a system outside can tell a repeated request from a new one.
func ExampleHandle_idempotent() {
	ctx, pool, done := pgtest.Example()
	defer done()

	charged := map[uuid.UUID]int{} // stands for the bank, which keeps the keys that it has seen
	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(ctx context.Context, in struct{ Cents int }) (string, error) {
		info := run.FromContext(ctx)
		if _, seen := charged[info.ID]; !seen {
			charged[info.ID] = in.Cents
		}
		if info.Attempt == 1 {
			return "", errors.New("the bank's answer was lost")
		}
		return "charged", nil
	}, worker.Options{Backoff: run.Backoff{Base: 10 * time.Millisecond}})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.charge.v1", Payload: map[string]int{"Cents": 4900}})
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, "after", r.Attempt, "attempts; charges:", len(charged))
	// Output: succeeded after 2 attempts; charges: 1
}

// What a handler writes in the settle transaction, the events it emits and its result are
// committed together or not at all, and only if the lease still holds.
func ExampleInSettle() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE booking (amount int)`)

	type charge struct{ Amount int }
	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(ctx context.Context, in charge) (string, error) {
		return "booked", worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO booking VALUES ($1)`, in.Amount)
			return err
		})
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.charge.v1", Payload: charge{Amount: 42}})
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	var booked int
	_ = pool.QueryRow(ctx, `SELECT sum(amount) FROM booking`).Scan(&booked)
	fmt.Println(r.Status, string(r.Result), booked)
	// Output: succeeded "booked" 42
}

// A handler enqueues further runs in its settle transaction: they are there once it has succeeded, and only then.
func ExampleInSettle_fanOut() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.newsletter.v1", func(ctx context.Context, in struct{ To []string }) (int, error) {
		return len(in.To), worker.InSettle(ctx, func(tx pgx.Tx) error {
			var letters []run.New
			for _, customer := range in.To {
				letters = append(letters, run.New{Type: "shop.letter.v1", Payload: map[string]string{"To": customer}})
			}
			_, err := run.EnqueueMany(ctx, tx, letters)
			return err
		})
	})
	worker.Handle(mux, "shop.letter.v1", func(context.Context, struct{ To string }) (string, error) { return "sent", nil })

	_, err := run.Enqueue(ctx, pool, run.New{Type: "shop.newsletter.v1", Payload: map[string][]string{"To": {"Ann", "Bob"}}})
	fmt.Println(err)
	var sent int
	worktest.Until(ctx, pool, mux, func() bool {
		_ = pool.QueryRow(ctx, `SELECT count(*) FROM workflow_run WHERE result = '"sent"'`).Scan(&sent)
		return sent == 2
	})
	fmt.Println("letters sent:", sent)
	// Output:
	// <nil>
	// letters sent: 2
}

// An event is appended to the outbox together with the run's success. Without an aggregate, the event is about the run.
func ExampleEmit() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(ctx context.Context, in struct{ Cents int }) (string, error) {
		return "charged", worker.Emit(ctx, outbox.Event{Type: "invoice.charged.v1", Payload: in})
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.charge.v1", Payload: map[string]int{"Cents": 4900}})
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	var typ, payload string
	_ = pool.QueryRow(ctx, `SELECT event_type, payload::text FROM outbox_event WHERE aggregate_id = $1`, r.ID).Scan(&typ, &payload)
	fmt.Println(typ, payload)
	// Output: invoice.charged.v1 {"Cents": 4900}
}

// Middleware wraps the handlers that are registered after it; the first one is the outermost.
func ExampleMux_Use() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	mux.Use(func(next worker.Handler) worker.Handler {
		return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
			result, err := next(ctx, payload)
			fmt.Println(run.FromContext(ctx).Type, string(payload), "→", string(result), err)
			return result, err
		}
	})
	worker.Handle(mux, brew, func(_ context.Context, in brewing) (string, error) { return in.Item + " is ready", nil })

	enqueued, _ := run.Enqueue(ctx, pool, brew.New(brewing{Item: "tea"}))
	worktest.Finish(ctx, pool, mux, enqueued.ID)
	// Output: shop.brew.v1 {"Item": "tea", "Sugar": 0} → "tea is ready" <nil>
}

// Options are the settings of one type. When the time limit passes, the handler's context ends, and the attempt has failed.
func ExampleOptions() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, brew, func(ctx context.Context, _ brewing) (string, error) {
		<-ctx.Done()
		fmt.Println(context.Cause(ctx))
		return "", ctx.Err()
	}, worker.Options{
		Timeout:     100 * time.Millisecond, // of one attempt
		Concurrency: 2,                      // at once in this process
		MaxAttempts: 1,                      // the most
	})

	enqueued, _ := run.Enqueue(ctx, pool, brew.New(brewing{Item: "tea"}))
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	var code string
	_ = pool.QueryRow(ctx, `SELECT error->>'code' FROM workflow_run WHERE id = $1`, r.ID).Scan(&code)
	fmt.Println(r.Status, code)
	// Output:
	// run: time limit exceeded
	// failed time_limit
}

// A test calls a handler with its middleware, its effects and its events, in a transaction that it rolls back.
func ExampleTry() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE ledger (run_id uuid, cents int)`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(ctx context.Context, in struct{ Cents int }) (string, error) {
		if in.Cents <= 0 {
			return "", run.Permanent(run.WithCode("NOTHING_TO_CHARGE", errors.New("no cents given")))
		}
		return "charged", worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1, $2)`, run.FromContext(ctx).ID, in.Cents)
			return err
		})
	})

	tx, _ := pool.Begin(ctx)
	defer func() { _ = tx.Rollback(ctx) }()
	result, err := worker.Try(ctx, tx, mux, run.Info{Type: "shop.charge.v1"}, map[string]int{"Cents": 4900})
	var booked int
	_ = tx.QueryRow(ctx, `SELECT sum(cents) FROM ledger`).Scan(&booked)
	fmt.Println(string(result), err, booked)

	_, err = worker.Try(ctx, tx, mux, run.Info{Type: "shop.charge.v1"}, struct{}{})
	fmt.Println(err, run.IsPermanent(err), run.Code(err))
	// Output:
	// "charged" <nil> 4900
	// no cents given true NOTHING_TO_CHARGE
}

// On SIGTERM the worker leases nothing more and lets handlers finish. The contexts of those that cannot finish in time end,
// and their runs are handed back with no attempt charged.
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
