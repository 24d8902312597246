package jetstream_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/jetstream"
	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

// serve runs a NATS server with JetStream until the test ends. Port -1 means any free port.
func serve(t *testing.T, dir string, port int, change func(*server.Options)) *server.Server {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true}
	if change != nil {
		change(o)
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server does not start")
	}
	t.Cleanup(func() { stop(s) })
	return s
}

func stop(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

// reader opens a connection of the test's own.
func reader(t *testing.T, address string, options ...nats.Option) natsjs.JetStream {
	t.Helper()
	conn, err := nats.Connect(address, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := natsjs.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func stream(t *testing.T, js natsjs.JetStream, c natsjs.StreamConfig) natsjs.Stream {
	t.Helper()
	c.Name = "EVENTS"
	s, err := js.CreateStream(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t *testing.T, url string, binary bool) dispatcher.Sink {
	t.Helper()
	s, err := jetstream.New(jetstream.Config{URL: url, Binary: binary})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func message(t *testing.T, s natsjs.Stream, n uint64) *natsjs.RawStreamMsg {
	t.Helper()
	m, err := s.GetMsg(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func stored(t *testing.T, s natsjs.Stream) uint64 {
	t.Helper()
	info, err := s.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

// A published event is in the stream, with its type in the subject, in the CloudEvents format. If it is sent again, it
// is acknowledged again and stored once.
func TestDelivered(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	js := reader(t, s.ClientURL())
	events := stream(t, js, natsjs.StreamConfig{Subjects: []string{"shop.>"}})
	sink := open(t, s.ClientURL()+"/shop", false)

	e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
	for range 2 {
		sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{e}), 1)
	}
	if n := stored(t, events); n != 1 {
		t.Fatalf("%d messages are stored", n)
	}
	m := message(t, events, 1)
	sinktest.Same(t, sinktest.Read(t, m.Data), e)
	if m.Subject != "shop.invoice.created" || m.Header.Get("Content-Type") != "application/cloudevents+json" {
		t.Errorf("subject %s, headers %v", m.Subject, m.Header)
	}
	ack, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: m.Subject, Data: m.Data, Header: m.Header})
	if err != nil || !ack.Duplicate {
		t.Errorf("the same again: %+v, %v; want a duplicate", ack, err)
	}
}

// The events of an aggregate arrive in order, in a batch of 1000.
func TestOrder(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	log := stream(t, reader(t, s.ClientURL()), natsjs.StreamConfig{Subjects: []string{"shop.>"}})
	sink := open(t, s.ClientURL()+"/shop", false)
	var events []event.Event
	for n := range 1000 {
		events = append(events, sinktest.Event(n, fmt.Sprint("order-", n%50), "order.changed", fmt.Sprint(n)))
	}
	sinktest.Delivered(t, sink.Publish(t.Context(), events), len(events))
	last := map[string]int{}
	for n := range uint64(1000) {
		e := sinktest.Read(t, message(t, log, n+1).Data)
		var at int
		if err := e.DataAs(&at); err != nil {
			t.Fatal(err)
		}
		if before, ok := last[e.Subject()]; ok && at != before+50 || !ok && at >= 50 {
			t.Fatalf("%s: %d comes after %d", e.Subject(), at, before)
		}
		last[e.Subject()] = at
	}
}

// In binary mode the attributes are headers, percent-encoded as in HTTP, and the payload is the message.
func TestBinary(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	log := stream(t, reader(t, s.ClientURL()), natsjs.StreamConfig{Subjects: []string{"shop.>"}})
	sink := open(t, s.ClientURL()+"/shop", true)
	e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
	sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{e}), 1)
	m := message(t, log, 1)
	if string(m.Data) != `{"total":5}` {
		t.Errorf("the message is %q", m.Data)
	}
	for name, want := range map[string]string{
		"ce-specversion": "1.0", "ce-id": e.ID(), "ce-type": "invoice.created", "ce-source": "/test", "ce-subject": "order-1",
		"ce-time": "2026-05-04T03:02:01.123456Z", "ce-datacontenttype": "application/json", "ce-partitionkey": "order-1",
		"ce-note": "5%20%25%20of%20%22Z%C3%BCrich%22", "Nats-Msg-Id": e.ID(), "Content-Type": "",
	} {
		if got := m.Header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// Characters that a NATS subject cannot hold, and empty words, become _.
func TestSubjects(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	log := stream(t, reader(t, s.ClientURL()), natsjs.StreamConfig{Subjects: []string{"shop.eu.>"}})
	sink := open(t, s.ClientURL()+"/shop.eu", false)
	kinds := map[string]string{"a b": "a_b", "a*.>": "a_._", ".a..b.": "_.a._.b._", "org:shop/paid": "org:shop/paid", "für": "für"}
	n := uint64(0)
	for kind, want := range kinds {
		n++
		sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{sinktest.Event(int(n), "o", kind, "1")}), 1)
		if got := message(t, log, n).Subject; got != "shop.eu."+want {
			t.Errorf("%q: %q, want %q", kind, got, want)
		}
	}
}

// If no stream takes the subject, the sink is unavailable and the event is not charged. Once there is a
// stream, the event is acknowledged.
func TestNoStream(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	sink := open(t, s.ClientURL()+"/shop", false)
	events := []event.Event{sinktest.Event(1, "order-1", "invoice.created", "1"), sinktest.Event(2, "order-1", "invoice.paid", "2")}
	errs := sink.Publish(t.Context(), events)
	sinktest.Failed(t, errs[0], sinktest.Unavailable, "shop.invoice.created", "nats stream add", "shop.>")
	sinktest.Failed(t, errs[1], sinktest.NotTried)
	stream(t, reader(t, s.ClientURL()), natsjs.StreamConfig{Subjects: []string{"shop.>"}})
	sinktest.Delivered(t, sink.Publish(t.Context(), events), 2)
}

// While the server is down the sink is unavailable. Once it is back, the sink connects again, and the events that
// failed meanwhile do not appear late.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, dir, -1, nil)
	address := s.ClientURL()
	port := s.Addr().String()
	stream(t, reader(t, address), natsjs.StreamConfig{Subjects: []string{"shop.>"}})
	sink := open(t, address+"/shop", false)
	publish := func(n int) error {
		return sink.Publish(t.Context(), []event.Event{sinktest.Event(n, "order-1", "invoice.created", "1")})[0]
	}
	sinktest.Delivered(t, []error{publish(1)}, 1)
	stop(s)
	sinktest.Failed(t, publish(2), sinktest.Unavailable)
	sinktest.Failed(t, publish(3), sinktest.Unavailable, "127.0.0.1")
	var number int
	if _, err := fmt.Sscanf(port[strings.LastIndex(port, ":"):], ":%d", &number); err != nil {
		t.Fatal(err)
	}
	serve(t, dir, number, nil)
	sinktest.Delivered(t, []error{publish(4)}, 1)
	log, err := reader(t, address).Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	if n := stored(t, log); n != 2 {
		t.Errorf("%d messages are stored, want those that were acknowledged", n)
	}
}

// An event that is too large is rejected for good, with both sizes in the error. The next one is acknowledged.
func TestTooLarge(t *testing.T) {
	s := serve(t, t.TempDir(), -1, func(o *server.Options) { o.MaxPayload = 4096 })
	stream(t, reader(t, s.ClientURL()), natsjs.StreamConfig{Subjects: []string{"shop.>"}, MaxMsgSize: 2048})
	sink := open(t, s.ClientURL()+"/shop", false)
	big := func(n, size int) event.Event {
		return sinktest.Event(n, fmt.Sprint("order-", n), "a", `"`+strings.Repeat("x", size)+`"`)
	}
	errs := sink.Publish(t.Context(), []event.Event{big(1, 5000), big(2, 2500), big(3, 100)})
	sinktest.Failed(t, errs[0], sinktest.ForGood, "5357 bytes", " 4096 ", "max_payload")
	sinktest.Failed(t, errs[1], sinktest.ForGood, "2857 bytes", "max_msg_size")
	sinktest.Delivered(t, errs[2:], 1)
}

// While a stream is full, the sink is unavailable. If the stream is full for one subject only, that event fails and
// others are acknowledged.
func TestFull(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	config := natsjs.StreamConfig{Subjects: []string{"shop.>"}, MaxMsgs: 2, Discard: natsjs.DiscardNew, MaxMsgsPerSubject: 1, DiscardNewPerSubject: true}
	log := stream(t, reader(t, s.ClientURL()), config)
	sink := open(t, s.ClientURL()+"/shop", false)
	publish := func(n int, kind string) error {
		return sink.Publish(t.Context(), []event.Event{sinktest.Event(n, fmt.Sprint("order-", n), kind, "1")})[0]
	}
	sinktest.Delivered(t, []error{publish(1, "a")}, 1)
	sinktest.Failed(t, publish(2, "a"), sinktest.Plain, "maximum messages per subject")
	sinktest.Delivered(t, []error{publish(3, "b")}, 1)
	sinktest.Failed(t, publish(4, "c"), sinktest.Unavailable, "maximum messages")
	if err := log.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	sinktest.Delivered(t, []error{publish(4, "c")}, 1)
}

// If the server cannot be reached or refuses the password, the sink is unavailable, and the error does not contain the
// password. If it does not answer, Publish returns when its context ends.
func TestNotThere(t *testing.T) {
	s := serve(t, t.TempDir(), -1, func(o *server.Options) { o.Username, o.Password = "u", "right" })
	for _, address := range []string{sinktest.Refused(t), s.Addr().String()} {
		sink := open(t, "nats://u:hunter2@"+address+"/shop", false)
		err := sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "o", "a", "1")})[0]
		sinktest.Failed(t, err, sinktest.Unavailable, address)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q has the password", err)
		}
	}
	sink := open(t, "nats://"+sinktest.Silent(t)+"/shop", false)
	ctx, done := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer done()
	begun := time.Now()
	sinktest.Failed(t, sink.Publish(ctx, []event.Event{sinktest.Event(1, "o", "a", "1")})[0], sinktest.NotTried)
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
}

// When its context ends, Publish returns a plain error for an event that was sent, whose outcome is unknown, and
// ErrNotTried for one that was not sent.
func TestNoTime(t *testing.T) {
	s := serve(t, t.TempDir(), -1, nil)
	conn, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Subscribe("shop.>", func(*nats.Msg) {}); err != nil { // receives events and never acknowledges them
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	sink := open(t, s.ClientURL()+"/shop", false)
	ctx, done := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer done()
	errs := sink.Publish(ctx, []event.Event{sinktest.Event(1, "o", "a", "1"), sinktest.Event(2, "o", "a", "2")})
	sinktest.Failed(t, errs[0], sinktest.Plain, "no acknowledgement")
	sinktest.Failed(t, errs[1], sinktest.NotTried)
}

// New refuses a wrong URL, and the error does not contain the password.
func TestURL(t *testing.T) {
	for _, url := range []string{"", "http://h/s", "nats://h", "nats:///s", "nats://h/a b", "nats://h/a..b", "nats://h/a.>", "nats://u:hunter2@h:port/s"} {
		_, err := jetstream.New(jetstream.Config{URL: url})
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"nats://u:p@h:1,h2:2/s", "tls://h/s.t"} {
		if _, err := jetstream.New(jetstream.Config{URL: url}); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}
