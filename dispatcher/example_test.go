package dispatcher_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
)

// A mailbox is a user's own sink. Publish returns one error for each event, in the same order: nil for an event that the
// mailbox has taken.
type mailbox chan event.Event

func (m mailbox) Publish(ctx context.Context, events []event.Event) []error {
	errs := make([]error, len(events))
	for k, e := range events {
		select {
		case m <- e:
		case <-ctx.Done():
			errs[k] = dispatcher.ErrNotTried
		}
	}
	return errs
}

func (m mailbox) Close() error { return nil }

// A Dispatcher publishes events of the outbox to a user's own sink, as CloudEvents.
func ExampleNew() {
	ctx, pool, done := pgtest.Example()
	defer done()
	box := make(mailbox)
	d, err := dispatcher.New(dispatcher.Config{
		Pool: pool, Source: "https://shop.example/orders", Logger: slog.New(slog.DiscardHandler),
		Sinks: []dispatcher.Target{{Name: "box", Sink: box, Types: []string{"order."}}},
	})
	if err != nil {
		panic(err)
	}
	working, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(working) }()

	_ = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return outbox.Append(ctx, tx, outbox.Event{Aggregate: uuid.New(), Type: "order.placed.v1", Payload: map[string]int{"cents": 4900}})
	})
	e := <-box
	fmt.Println(e.Type(), e.Source(), string(e.Data()))
	stop()
	fmt.Println(<-ended)
	// Output:
	// order.placed.v1 https://shop.example/orders {"cents": 4900}
	// <nil>
}
