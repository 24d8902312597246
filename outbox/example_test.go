package outbox_test

import (
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
)

// An order and the event about it are stored together, or not at all.
func ExampleAppend() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE orders (id uuid PRIMARY KEY, cents int CHECK (cents > 0))`)

	place := func(order uuid.UUID, cents int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			event := outbox.Event{Aggregate: order, Type: "order.placed.v1", Payload: map[string]int{"cents": cents}}
			if err := outbox.Append(ctx, tx, event); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, $2)`, order, cents)
			return err
		})
	}
	fmt.Println(place(uuid.New(), 4900), place(uuid.New(), 0) != nil)
	var events int
	_ = pool.QueryRow(ctx, `SELECT count(*) FROM outbox_event`).Scan(&events)
	fmt.Println("events:", events)
	// Output:
	// <nil> true
	// events: 1
}

// A program that uses database/sql appends in its own transaction, too.
func ExampleAppendSQL() {
	ctx, pool, done := pgtest.Example()
	defer done()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	defer func() { _ = tx.Rollback() }()
	order := uuid.New()
	err = outbox.AppendSQL(ctx, tx,
		outbox.Event{Aggregate: order, Type: "order.placed.v1", Payload: map[string]int{"cents": 4900}},
		outbox.Event{Aggregate: order, Type: "order.paid.v1", Headers: map[string]string{"team": "billing"}})
	fmt.Println(err, tx.Commit())

	rows, _ := pool.Query(ctx, `SELECT event_type FROM outbox_event WHERE aggregate_id = $1 ORDER BY id`, order)
	types, _ := pgx.CollectRows(rows, pgx.RowTo[string])
	fmt.Println(types)
	// Output:
	// <nil> <nil>
	// [order.placed.v1 order.paid.v1]
}
