package run_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/worktest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A customer and the run that sends the welcome mail are stored together, or not at all.
func ExampleEnqueue() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE customer (name text PRIMARY KEY)`)

	signUp := func(name string) (e run.Enqueued, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if e, err = run.Enqueue(ctx, tx, run.New{Type: "shop.welcome.v1", Payload: map[string]string{"name": name}}); err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `INSERT INTO customer VALUES ($1)`, name)
			return err
		})
		return e, err
	}
	ann, err := signUp("Ann")
	r, _ := run.Read(ctx, pool, ann.ID)
	fmt.Println(r.Status, string(r.Payload), err)

	again, refused := signUp("Ann")
	_, err = run.Read(ctx, pool, again.ID)
	fmt.Println(refused != nil, errors.Is(err, run.ErrNotFound))
	// Output:
	// pending {"name": "Ann"} <nil>
	// true true
}

// Two calls with one idempotency key store one run. The same key with another payload is refused.
func ExampleEnqueue_unique() {
	ctx, pool, done := pgtest.Example()
	defer done()

	charge := func(cents int) (run.Enqueued, error) {
		return run.Enqueue(ctx, pool, run.New{
			Type: "shop.charge.v1", Payload: map[string]int{"cents": cents}, IdempotencyKey: "charge-8",
		})
	}
	first, _ := charge(4900)
	second, err := charge(4900)
	fmt.Println(second.Existing, second.ID == first.ID, err)

	_, err = charge(5000)
	var conflict *run.ConflictError
	if errors.As(err, &conflict) {
		fmt.Println(conflict.Key, "belongs to the first run:", conflict.Existing == first.ID)
	}

	_ = run.Delete(ctx, pool, first.ID, "the price has changed") // frees the key
	third, err := charge(5000)
	fmt.Println(third.Existing, err)
	// Output:
	// true true <nil>
	// charge-8 belongs to the first run: true
	// false <nil>
}

// A run is due after a delay, or at a time.
func ExampleEnqueue_delayed() {
	ctx, pool, done := pgtest.Example()
	defer done()

	soon, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.remind.v1", Delay: 10 * time.Minute})
	noon := time.Now().AddDate(0, 0, 1).Truncate(24 * time.Hour).Add(12 * time.Hour)
	later, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.remind.v1", RunAt: noon})

	r, _ := run.Read(ctx, pool, soon.ID)
	fmt.Println(r.Status, "due", r.RunAt.Sub(r.CreatedAt).Round(time.Minute), "after it was enqueued")
	r, _ = run.Read(ctx, pool, later.ID)
	fmt.Println(r.Status, "due at noon:", r.RunAt.Equal(noon))
	// Output:
	// pending due 10m0s after it was enqueued
	// pending due at noon: true
}

// Many runs are stored by a statement for each thousand. A run whose key is taken counts as stored.
func ExampleEnqueueMany() {
	ctx, pool, done := pgtest.Example()
	defer done()

	var letters []run.New
	for _, customer := range []string{"Ann", "Bob", "Cleo"} {
		letters = append(letters, run.New{
			Type: "shop.letter.v1", Payload: map[string]string{"to": customer}, IdempotencyKey: "spring-" + customer,
		})
	}
	_, _ = run.Enqueue(ctx, pool, letters[1])

	enqueued, err := run.EnqueueMany(ctx, pool, letters)
	for k, e := range enqueued {
		fmt.Println(letters[k].IdempotencyKey, e.Existing)
	}
	fmt.Println(err)
	// Output:
	// spring-Ann false
	// spring-Bob true
	// spring-Cleo false
	// <nil>
}

// A program that uses database/sql enqueues in its own transaction, too.
func ExampleEnqueueSQL() {
	ctx, pool, done := pgtest.Example()
	defer done()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	_, _ = db.ExecContext(ctx, `CREATE TABLE purchase (item text)`)

	buy := func(item string) ([]run.Enqueued, error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return nil, err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.ExecContext(ctx, `INSERT INTO purchase VALUES ($1)`, item); err != nil {
			return nil, err
		}
		enqueued, err := run.EnqueueSQL(ctx, tx, []run.New{
			{Type: "shop.pack.v1", Payload: map[string]string{"item": item}},
			{Type: "shop.restock.v1", IdempotencyKey: "restock-" + item},
		})
		if err != nil {
			return nil, err
		}
		return enqueued, tx.Commit()
	}
	for range 2 {
		enqueued, err := buy("tea")
		fmt.Println(enqueued[0].Existing, enqueued[1].Existing, err)
	}
	// Output:
	// false false <nil>
	// false true <nil>
}

type charge struct {
	Order int `json:"order"`
}

// charging is a type and its payload, declared once for those who enqueue it and those who handle it.
var charging = run.Task[charge]("shop.charge.v1")

// With a task, the compiler checks the payload at both ends.
func ExampleTask() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, charging, func(_ context.Context, in charge) (string, error) {
		return fmt.Sprint("charged order ", in.Order), nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, charging.New(charge{Order: 9}))
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Type, r.Status, string(r.Result))
	// Output: shop.charge.v1 succeeded "charged order 9"
}

// A handler that has nothing to do yet is started again later, and no attempt is charged.
func ExampleAgain() {
	ctx, pool, done := pgtest.Example()
	defer done()

	looks := 0
	mux := worker.NewMux()
	worker.Handle(mux, "shop.await_parcel.v1", func(context.Context, struct{}) (string, error) {
		if looks++; looks < 3 {
			return "", run.Again(10 * time.Millisecond)
		}
		return "arrived", nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.await_parcel.v1"})
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(string(r.Result), "after", looks, "looks; attempts:", r.Attempt, "put off:", r.Postponed)
	// Output: "arrived" after 3 looks; attempts: 1 put off: 2
}

// A failure with a delay of its own spends an attempt, as a Retry-After header asks for.
func ExampleRetryAfter() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.quote.v1", func(ctx context.Context, _ struct{}) (string, error) {
		if run.FromContext(ctx).Attempt == 1 {
			return "", run.RetryAfter(errors.New("too many requests"), 20*time.Millisecond)
		}
		return "4900 cents", nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.quote.v1"})
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(string(r.Result), r.Attempt)
	// Output: "4900 cents" 2
}

// A permanent error fails the run at once, whatever attempts are left.
func ExamplePermanent() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, "shop.charge.v1", func(_ context.Context, in charge) (string, error) {
		if in.Order == 0 {
			return "", run.Permanent(errors.New("no order given"))
		}
		return "charged", nil
	})

	enqueued, _ := run.Enqueue(ctx, pool, charging.New(charge{}))
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, "after", r.Attempt, "attempt:", *r.LastError)
	// Output: failed after 1 attempt: no order given
}

// The code of an error is stored for queries, and takes the edge of a process that is for it.
func ExampleWithCode() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, charging, func(context.Context, charge) (string, error) {
		return "", run.Permanent(run.WithCode("CARD_DECLINED", errors.New("no money left")))
	})

	enqueued, _ := run.Enqueue(ctx, pool, charging.New(charge{Order: 9}))
	worktest.Finish(ctx, pool, mux, enqueued.ID)
	var code, message string
	_ = pool.QueryRow(ctx, `SELECT error->>'code', error->>'message' FROM workflow_run WHERE status = 'failed'`).Scan(&code, &message)
	fmt.Println(code, "-", message)
	// Output: CARD_DECLINED - no money left
}

// Five outages in a row, of three different runs, open the breaker of their type. Then one run at a time is started.
func ExampleUnavailable() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mux := worker.NewMux()
	worker.Handle(mux, charging, func(context.Context, charge) (string, error) {
		return "", run.Unavailable(errors.New("the bank does not answer"))
	}, worker.Options{Backoff: run.Backoff{Base: 10 * time.Millisecond}})

	for order := range 3 {
		_, _ = run.Enqueue(ctx, pool, charging.New(charge{Order: order}))
	}
	var open string
	worktest.Until(ctx, pool, mux, func() bool {
		_ = pool.QueryRow(ctx, `SELECT type FROM workflow_breaker`).Scan(&open)
		return open != ""
	})
	fmt.Println("the breaker is open:", open)
	// Output: the breaker is open: shop.charge.v1
}

// A handler starts work in another system and returns. That system reports the outcome with the token that it got.
func ExampleComplete() {
	ctx, pool, done := pgtest.Example()
	defer done()

	tokens := make(chan string, 1) // stands for the other system
	mux := worker.NewMux()
	worker.Handle(mux, "shop.render.v1", func(ctx context.Context, _ struct{}) (struct{}, error) {
		token, err := worker.Token(ctx)
		if err != nil {
			return struct{}{}, err
		}
		tokens <- token
		return struct{}{}, run.Elsewhere(time.Hour)
	})

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.render.v1"})
	go func() {
		token := <-tokens
		for run.Complete(ctx, pool, enqueued.ID, token, json.RawMessage(`{"frames": 1200}`), nil) != nil {
			time.Sleep(10 * time.Millisecond) // the handler has not returned yet
		}
	}()
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, string(r.Result))
	// Output: succeeded {"frames": 1200}
}

// A cancelled run is never started. A second cancel says that it came too late.
func ExampleCancel() {
	ctx, pool, done := pgtest.Example()
	defer done()

	enqueued, _ := run.Enqueue(ctx, pool, run.New{Type: "shop.remind.v1", Delay: time.Hour})
	fmt.Println(run.Cancel(ctx, pool, enqueued.ID, "the customer has paid"))
	r, _ := run.Read(ctx, pool, enqueued.ID)
	fmt.Println(r.Status, "-", *r.LastError)
	fmt.Println(errors.Is(run.Cancel(ctx, pool, enqueued.ID, ""), run.ErrTooLate))
	// Output:
	// <nil>
	// cancelled - cancelled: the customer has paid
	// true
}

// A failed run gets another attempt once the cause is mended.
func ExampleRetry() {
	ctx, pool, done := pgtest.Example()
	defer done()

	mended := false
	mux := worker.NewMux()
	worker.Handle(mux, charging, func(context.Context, charge) (string, error) {
		if !mended {
			return "", errors.New("column cents does not exist")
		}
		return "charged", nil
	})

	n := charging.New(charge{Order: 9})
	n.MaxAttempts = 1
	enqueued, _ := run.Enqueue(ctx, pool, n)
	r := worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, *r.LastError)

	mended = true
	fmt.Println(run.Retry(ctx, pool, enqueued.ID, 1))
	r = worktest.Finish(ctx, pool, mux, enqueued.ID)
	fmt.Println(r.Status, string(r.Result), "attempts:", r.Attempt)
	// Output:
	// failed column cents does not exist
	// <nil>
	// succeeded "charged" attempts: 2
}
