package run_test

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
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

// The same in a program that uses database/sql, here with an idempotency key.
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
