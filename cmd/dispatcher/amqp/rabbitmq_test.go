//go:build rabbitmq

package amqp_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	rabbit "github.com/rabbitmq/amqp091-go"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/amqp"
	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

// A broker is a RabbitMQ server for one test, on loopback only.
type broker struct {
	t      *testing.T
	dir    string
	env    []string
	port   int
	server *child.Process
	output *os.File
}

// newBroker runs a RabbitMQ until the test ends.
func newBroker(t *testing.T) *broker {
	t.Helper()
	dir, err := child.TempDir("rabbitmq-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	port := func() int {
		p, err := child.Port()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	b := &broker{t: t, dir: dir, port: port()}
	names := port() // the port of a private epmd, which ends with the test
	conf := fmt.Sprintf("listeners.tcp.local = 127.0.0.1:%d\nmax_message_size = 100000\ndisk_free_limit.absolute = 1MB\nlog.console = true\n", b.port)
	if err := os.WriteFile(filepath.Join(dir, "rabbitmq.conf"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	if b.output, err = os.Create(filepath.Join(dir, "output")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.output.Close() })
	b.env = []string{
		fmt.Sprintf("RABBITMQ_NODENAME=test%d@localhost", b.port), "RABBITMQ_CONFIG_FILE=" + dir + "/rabbitmq",
		"RABBITMQ_MNESIA_BASE=" + dir + "/mnesia", "RABBITMQ_LOG_BASE=" + dir + "/log", "RABBITMQ_PID_FILE=" + dir + "/pid",
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + dir + "/plugins", fmt.Sprintf("RABBITMQ_DIST_PORT=%d", port()),
		fmt.Sprintf("ERL_EPMD_PORT=%d", names), "ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
	}
	epmd := b.start("epmd", "-address", "127.0.0.1", "-port", fmt.Sprint(names))
	t.Cleanup(epmd.End)
	b.up()
	t.Cleanup(b.down)
	return b
}

func (b *broker) start(program string, args ...string) *child.Process {
	b.t.Helper()
	p, err := child.Start(child.Command{Path: "/usr/bin/env", Args: append(append(b.env, program), args...), Dir: b.dir, Last: syscall.SIGTERM, Output: b.output})
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

func (b *broker) up() {
	b.t.Helper()
	b.server = b.start("/usr/lib/rabbitmq/bin/rabbitmq-server")
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		conn, err := rabbit.Dial(b.url())
		if err == nil {
			conn.Close()
			return
		}
		if time.Since(begun) > time.Minute {
			b.down()
			said, _ := os.ReadFile(b.output.Name())
			b.t.Fatalf("RabbitMQ does not start (is the package rabbitmq-server installed?): %v\n%s", err, said)
		}
	}
}

func (b *broker) down() { b.server.End() }

// control runs rabbitmqctl against the broker.
func (b *broker) control(args ...string) {
	b.t.Helper()
	p := b.start("/usr/lib/rabbitmq/bin/rabbitmqctl", args...)
	if !p.Gone(time.Minute) {
		b.t.Fatal("rabbitmqctl does not end")
	}
	p.End()
}

func (b *broker) url() string { return fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", b.port) }

// channel opens a connection of the test's own.
func (b *broker) channel(t *testing.T) *rabbit.Channel {
	t.Helper()
	conn, err := rabbit.Dial(b.url())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// queue declares an exchange, and a queue of the same name that is bound to it with key.
func queue(t *testing.T, c *rabbit.Channel, exchange, key string, arguments rabbit.Table) {
	t.Helper()
	if err := c.ExchangeDeclare(exchange, "topic", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.QueueDeclare(exchange, true, false, false, false, arguments); err != nil {
		t.Fatal(err)
	}
	if err := c.QueueBind(exchange, key, exchange, false, nil); err != nil {
		t.Fatal(err)
	}
}

// get takes n messages from a queue, which must have no more.
func get(t *testing.T, c *rabbit.Channel, queue string, n int) (messages []rabbit.Delivery) {
	t.Helper()
	for range n {
		m, ok, err := c.Get(queue, true)
		if err != nil || !ok {
			t.Fatalf("%d messages of %d: %v", len(messages), n, err)
		}
		messages = append(messages, m)
	}
	if _, ok, _ := c.Get(queue, true); ok {
		t.Fatalf("there are more than %d messages", n)
	}
	return messages
}

func TestRabbitMQ(t *testing.T) {
	b := newBroker(t)
	// A published event is in the queue: as a persistent message with its type as the routing key, in the CloudEvents
	// format.
	t.Run("delivered", func(t *testing.T) {
		c := b.channel(t)
		queue(t, c, "one", "invoice.*", rabbit.Table{"x-queue-type": "quorum"})
		e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
		sinktest.Delivered(t, open(t, amqp.Config{URL: b.url(), Exchange: "one"}).Publish(t.Context(), []event.Event{e}), 1)
		m := get(t, c, "one", 1)[0]
		sinktest.Same(t, sinktest.Read(t, m.Body), e)
		if m.RoutingKey != "invoice.created" || m.MessageId != e.ID() || m.DeliveryMode != rabbit.Persistent || m.ContentType != "application/cloudevents+json" {
			t.Errorf("%+v", m)
		}
	})
	// If the first of several brokers cannot be reached, the second is used.
	t.Run("second host", func(t *testing.T) {
		queue(t, b.channel(t), "second", "#", nil)
		both := strings.Replace(b.url(), "@", "@"+sinktest.Refused(t)+",", 1)
		e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
		sinktest.Delivered(t, open(t, amqp.Config{URL: both, Exchange: "second"}).Publish(t.Context(), []event.Event{e}), 1)
	})
	// In binary mode the attributes are headers and the payload is the body.
	t.Run("binary", func(t *testing.T) {
		c := b.channel(t)
		queue(t, c, "two", "#", nil)
		e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
		sinktest.Delivered(t, open(t, amqp.Config{URL: b.url(), Exchange: "two", Binary: true}).Publish(t.Context(), []event.Event{e}), 1)
		m := get(t, c, "two", 1)[0]
		if string(m.Body) != `{"total":5}` || m.ContentType != "application/json" {
			t.Errorf("%s: %q", m.ContentType, m.Body)
		}
		for name, want := range map[string]string{
			"specversion": "1.0", "id": e.ID(), "type": "invoice.created", "source": "/test", "subject": "order-1",
			"time": "2026-05-04T03:02:01.123456Z", "partitionkey": "order-1", "note": `5 % of "Zürich"`,
		} {
			if got := m.Headers["cloudEvents_"+name]; got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
	})
	// The events of a subject arrive in order, in a batch of 1000.
	t.Run("order", func(t *testing.T) {
		c := b.channel(t)
		queue(t, c, "order", "#", nil)
		var events []event.Event
		for n := range 1000 {
			events = append(events, sinktest.Event(n, fmt.Sprint("order-", n%50), "order.changed", fmt.Sprint(n)))
		}
		sinktest.Delivered(t, open(t, amqp.Config{URL: b.url(), Exchange: "order"}).Publish(t.Context(), events), 1000)
		next := map[string]int{}
		for _, m := range get(t, c, "order", 1000) {
			e := sinktest.Read(t, m.Body)
			if want := fmt.Sprint(50*next[e.Subject()] + place(e)); string(e.Data()) != want {
				t.Fatalf("%s: %s comes instead of %s", e.Subject(), e.Data(), want)
			}
			next[e.Subject()]++
		}
	})
	// An event that no queue takes is not acknowledged, although the broker confirms it. Others are.
	t.Run("unroutable", func(t *testing.T) {
		c := b.channel(t)
		queue(t, c, "picky", "known.#", nil)
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "picky"})
		var events []event.Event
		for n := range 500 {
			kind := "known.a"
			if n%2 == 1 {
				kind = "unknown.b"
			}
			events = append(events, sinktest.Event(n, fmt.Sprint("order-", n), kind, "1"))
		}
		for k, err := range sink.Publish(t.Context(), events) {
			if k%2 == 0 {
				sinktest.Delivered(t, []error{err}, 1)
			} else {
				sinktest.Failed(t, err, sinktest.Plain, "exchange picky", "unknown.b", "NO_ROUTE")
			}
		}
		get(t, c, "picky", 250)
		if err := c.QueueBind("picky", "unknown.#", "picky", false, nil); err != nil {
			t.Fatal(err)
		}
		sinktest.Delivered(t, sink.Publish(t.Context(), events[1:2]), 1)
	})
	// If the exchange does not exist, the sink is unavailable. Once it exists, events are acknowledged.
	t.Run("no exchange", func(t *testing.T) {
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "later"})
		events := []event.Event{sinktest.Event(1, "o", "a", "1"), sinktest.Event(2, "o", "a", "2")}
		errs := sink.Publish(t.Context(), events)
		sinktest.Failed(t, errs[0], sinktest.Unavailable, "no exchange later", "create it")
		sinktest.Failed(t, errs[1], sinktest.NotTried)
		queue(t, b.channel(t), "later", "#", nil)
		sinktest.Delivered(t, sink.Publish(t.Context(), events), 2)
	})
	// An event that is too large is rejected for good, with both sizes in the error. The broker ends the channel, but
	// the next event is acknowledged.
	t.Run("too large", func(t *testing.T) {
		queue(t, b.channel(t), "small", "#", nil)
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "small"})
		large := sinktest.Event(1, "o", "a", `"`+strings.Repeat("x", 200_000)+`"`)
		sinktest.Failed(t, sink.Publish(t.Context(), []event.Event{large})[0], sinktest.ForGood, "200238 bytes", "100000")
		sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{sinktest.Event(2, "o", "a", "1")}), 1)
	})
	// If a full queue refuses an event, the error is an ordinary one, so that the event is retried.
	t.Run("full", func(t *testing.T) {
		queue(t, b.channel(t), "full", "#", rabbit.Table{"x-max-length": int32(1), "x-overflow": "reject-publish"})
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "full"})
		var errs []error
		for n := range 3 {
			errs = append(errs, sink.Publish(t.Context(), []event.Event{sinktest.Event(n, "o", "a", "1")})...)
		}
		sinktest.Delivered(t, errs[:1], 1)
		sinktest.Failed(t, errs[2], sinktest.Plain, "nack")
	})
	// While the broker lacks memory, the sink is unavailable with that reason. Later events are acknowledged again.
	t.Run("blocked", func(t *testing.T) {
		queue(t, b.channel(t), "blocked", "#", nil)
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "blocked"})
		events := []event.Event{sinktest.Event(1, "o", "a", "1")}
		sinktest.Delivered(t, sink.Publish(t.Context(), events), 1)
		b.control("set_vm_memory_high_watermark", "absolute", "1")
		for range 2 {
			sinktest.Failed(t, sink.Publish(t.Context(), events)[0], sinktest.Unavailable, "takes nothing", "memory")
		}
		b.control("set_vm_memory_high_watermark", "0.8")
		for begun := time.Now(); sink.Publish(t.Context(), events)[0] != nil; time.Sleep(100 * time.Millisecond) {
			if time.Since(begun) > 20*time.Second {
				t.Fatal("it takes nothing any more")
			}
		}
	})
	// With a wrong password the sink is unavailable, and the error does not contain the password.
	t.Run("password", func(t *testing.T) {
		url := fmt.Sprintf("amqp://guest:hunter2@127.0.0.1:%d/", b.port)
		err := open(t, amqp.Config{URL: url, Exchange: "one"}).Publish(t.Context(), []event.Event{sinktest.Event(1, "o", "a", "1")})[0]
		sinktest.Failed(t, err, sinktest.Unavailable)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q has the password", err)
		}
	})
	// While the broker is down the sink is unavailable. Once it is back, the sink connects again, and the events that
	// failed meanwhile do not appear late.
	t.Run("restart", func(t *testing.T) {
		queue(t, b.channel(t), "restart", "#", nil)
		sink := open(t, amqp.Config{URL: b.url(), Exchange: "restart"})
		publish := func(ctx context.Context, n int) error {
			return sink.Publish(ctx, []event.Event{sinktest.Event(n, "o", "a", "1")})[0]
		}
		sinktest.Delivered(t, []error{publish(t.Context(), 1)}, 1)
		b.down()
		for n := range 2 {
			sinktest.Failed(t, publish(t.Context(), n+2), sinktest.Unavailable, "127.0.0.1")
		}
		b.up()
		sinktest.Delivered(t, []error{publish(t.Context(), 4)}, 1)
		get(t, b.channel(t), "restart", 2)
	})
}

// place returns the number in an event's subject, which is that of the first event of this subject.
func place(e event.Event) (n int) {
	_, _ = fmt.Sscanf(e.Subject(), "order-%d", &n)
	return n
}
