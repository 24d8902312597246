package amqp_test

// The tests that need RabbitMQ are in rabbitmq_test.go; make test-rabbitmq runs them.

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/amqp"
	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

func open(t *testing.T, c amqp.Config) dispatcher.Sink {
	t.Helper()
	s, err := amqp.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// If the broker cannot be reached, the sink is unavailable, and the error does not contain the password.
func TestNotThere(t *testing.T) {
	address := sinktest.Refused(t)
	sink := open(t, amqp.Config{URL: "amqp://u:hunter2@" + address + "/v", Exchange: "events"})
	for range 2 {
		err := sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "o", "a", "1")})[0]
		sinktest.Failed(t, err, sinktest.Unavailable, address)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q has the password", err)
		}
	}
}

// Several brokers are tried in turn, and the error names each.
func TestSeveral(t *testing.T) {
	one, other := sinktest.Refused(t), sinktest.Refused(t)
	sink := open(t, amqp.Config{URL: "amqp://u:hunter2@" + one + "," + other + "/v", Exchange: "events"})
	sinktest.Failed(t, sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "o", "a", "1")})[0], sinktest.Unavailable, one, other)
}

// If the broker accepts the connection and sends nothing, Publish returns when its context ends, or when connecting
// takes too long.
func TestSilent(t *testing.T) {
	sink := open(t, amqp.Config{URL: "amqp://" + sinktest.Silent(t), Exchange: "events"})
	ctx, done := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer done()
	begun := time.Now()
	sinktest.Failed(t, sink.Publish(ctx, []event.Event{sinktest.Event(1, "o", "a", "1")})[0], sinktest.NotTried)
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	sinktest.Failed(t, sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "o", "a", "1")})[0], sinktest.Unavailable, "no answer")
}

// New refuses a wrong configuration, and the error does not contain the password.
func TestConfig(t *testing.T) {
	for _, url := range []string{"", "http://h/v", "amqp://u:hunter2@h:port/v", "amqp://u:hunt er2@h", "amqp://u:hunter2@h:1,h:port/v"} {
		_, err := amqp.New(amqp.Config{URL: url, Exchange: "events"})
		if err == nil || strings.Contains(err.Error(), "hunt") {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, err := amqp.New(amqp.Config{URL: "amqp://h"}); err == nil || !strings.Contains(err.Error(), "exchange") {
		t.Errorf("no exchange: %v", err)
	}
}
