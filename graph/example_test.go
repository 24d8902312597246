package graph_test

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The example deploys a process, stores an order and starts its instance in one transaction, and sends the message that
// the instance waits for.
func ExampleStart() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE purchase (id text PRIMARY KEY)`)

	definition := &graph.Definition{Process: "order", Version: 1, Start: "Paid", Nodes: map[string]*graph.Node{
		"Paid": {Await: &graph.Await{Message: "paid", Key: "input.order"}, To: "Ship"},
		"Ship": {Do: "shop.ship.v1", In: map[string]string{"order": "input.order", "amount": "steps.Paid.amount"}},
	}}
	if _, err := graph.Deploy(ctx, pool, definition); err != nil {
		panic(err)
	}

	type order struct {
		Order string `json:"order"`
	}
	var asked uuid.UUID
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		if _, err := tx.Exec(ctx, `INSERT INTO purchase VALUES ('o-17')`); err != nil {
			return err
		}
		asked, err = graph.Start(ctx, tx, graph.NewInstance{Process: "order", Key: "o-17", Input: order{"o-17"}})
		return err
	})
	fmt.Println("started:", err)
	_, err = graph.Send(ctx, pool, graph.Message{Name: "paid", Key: "o-17", Payload: map[string]int{"amount": 30}})
	fmt.Println("paid:", err)

	mux := worker.NewMux()
	shipped := make(chan bool)
	worker.Handle(mux, "shop.ship.v1", func(_ context.Context, in struct {
		Order  string `json:"order"`
		Amount int    `json:"amount"`
	}) (struct{}, error) {
		fmt.Println("shipping", in.Order, "for", in.Amount)
		close(shipped)
		return struct{}{}, nil
	})
	working, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() {
		ended <- worker.Run(working, worker.Config{
			Pool: pool, Mux: mux, Prefixes: []string{"shop."}, Processes: graph.New(pool), PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	<-shipped
	r, _ := run.Read(ctx, pool, asked)
	fmt.Println("the start has", r.Status)
	stop()
	_ = <-ended
	// Output:
	// started: <nil>
	// paid: <nil>
	// shipping o-17 for 30
	// the start has succeeded
}
