package kafka_test

// These tests run against kfake, which speaks Kafka's protocol, but replicates nothing and keeps records in
// memory. They prove no more about brokers than kfake implements.

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/kafka"
	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

func serve(t *testing.T, options ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func address(c *kfake.Cluster) string { return strings.Join(c.ListenAddrs(), ",") }

func open(t *testing.T, config kafka.Config) dispatcher.Sink {
	t.Helper()
	s, err := kafka.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// read returns n records of the topic events. The records of a partition are in order.
func read(t *testing.T, c *kfake.Cluster, n int, options ...kgo.Opt) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(c.ListenAddrs()...), kgo.ConsumeTopics("events"))...)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, done := context.WithTimeout(t.Context(), 20*time.Second)
	defer done()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatalf("%d records of %d: %v", len(records), n, err)
		}
		records = append(records, fetches.Records()...)
	}
	return records
}

// orders returns 1000 events of 50 subjects.
func orders() (events []event.Event) {
	for n := range 1000 {
		events = append(events, sinktest.Event(n, fmt.Sprint("order-", n%50), "order.changed", fmt.Sprint(n)))
	}
	return events
}

// inOrder fails the test unless each subject's events come in order, apart from repetitions.
func inOrder(t *testing.T, records []*kgo.Record) {
	t.Helper()
	next := map[string]int{}
	for _, r := range records {
		e := sinktest.Read(t, r.Value)
		var at int
		if err := e.DataAs(&at); err != nil {
			t.Fatal(err)
		}
		if string(r.Key) != e.Subject() {
			t.Fatalf("the key of %s is %q", e.Subject(), r.Key)
		}
		switch round := at / 50; {
		case round > next[e.Subject()]:
			t.Fatalf("%s: event %d comes before %d", e.Subject(), round, next[e.Subject()])
		case round == next[e.Subject()]:
			next[e.Subject()]++
		}
	}
	for subject, n := range next {
		if n != 20 {
			t.Errorf("%s: %d events of 20", subject, n)
		}
	}
}

// A published event is in the topic, with its partitionkey as the key, in the CloudEvents format.
func TestDelivered(t *testing.T) {
	c := serve(t, kfake.SeedTopics(3, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
	sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{e}), 1)
	r := read(t, c, 1)[0]
	sinktest.Same(t, sinktest.Read(t, r.Value), e)
	if string(r.Key) != "order-1" || header(r, "content-type") != "application/cloudevents+json" {
		t.Errorf("key %s, headers %s", r.Key, r.Headers)
	}
}

func header(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// In binary mode the attributes are headers, in the same order each time, and the payload is the
// value.
func TestBinary(t *testing.T) {
	c := serve(t, kfake.SeedTopics(1, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events", Binary: true})
	e := sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)
	for range 2 {
		sinktest.Delivered(t, sink.Publish(t.Context(), []event.Event{e}), 1)
	}
	records := read(t, c, 2)
	if fmt.Sprint(records[0].Headers) != fmt.Sprint(records[1].Headers) {
		t.Error("the headers are others the second time")
	}
	if string(records[0].Value) != `{"total":5}` {
		t.Errorf("the value is %q", records[0].Value)
	}
	for name, want := range map[string]string{
		"ce_specversion": "1.0", "ce_id": e.ID(), "ce_type": "invoice.created", "ce_source": "/test", "ce_subject": "order-1",
		"ce_time": "2026-05-04T03:02:01.123456Z", "ce_partitionkey": "order-1", "ce_note": `5 % of "Zürich"`, "content-type": "application/json",
	} {
		if got := header(records[0], name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// The events of a subject are in one partition, in order, in a batch of 1000.
func TestOrder(t *testing.T) {
	c := serve(t, kfake.SeedTopics(4, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	sinktest.Delivered(t, sink.Publish(t.Context(), orders()), 1000)
	inOrder(t, read(t, c, 1000))
}

// If the broker refuses some batches for good and accepts the next ones, no event overtakes an earlier one of its
// subject that failed. Once the failed events are sent again, all are in order.
func TestOrderAfterErrors(t *testing.T) {
	c := serve(t, kfake.SeedTopics(4, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	var seen atomic.Int32
	c.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		if n := seen.Add(1); n < 3 || n > 9 || n%2 == 0 {
			return nil, nil, false
		}
		return refuse(request.(*kmsg.ProduceRequest), kerr.InvalidRecord), nil, true
	})
	waiting, failures := orders(), 0
	for len(waiting) > 0 {
		errs := sink.Publish(t.Context(), waiting)
		bad := map[string]bool{}
		var again []event.Event
		for k, err := range errs {
			subject := waiting[k].Subject()
			if err == nil && bad[subject] {
				t.Fatalf("an event of %s was acknowledged after one that failed", subject)
			}
			if err != nil {
				if !bad[subject] {
					sinktest.Failed(t, err, sinktest.Plain, "events", "INVALID_RECORD")
					failures++
				} else {
					sinktest.Failed(t, err, sinktest.NotTried)
				}
				bad[subject] = true
				again = append(again, waiting[k])
			}
		}
		waiting = again
	}
	if failures == 0 {
		t.Fatal("nothing has failed")
	}
	inOrder(t, read(t, c, 1000))
}

// refuse returns a response to a request with an error for each partition.
func refuse(request *kmsg.ProduceRequest, err *kerr.Error) kmsg.Response {
	answer := request.ResponseKind().(*kmsg.ProduceResponse)
	for _, topic := range request.Topics {
		a := kmsg.NewProduceResponseTopic()
		a.Topic, a.TopicID = topic.Topic, topic.TopicID
		for _, partition := range topic.Partitions {
			p := kmsg.NewProduceResponseTopicPartition()
			p.Partition, p.ErrorCode = partition.Partition, err.Code
			a.Partitions = append(a.Partitions, p)
		}
		answer.Topics = append(answer.Topics, a)
	}
	return answer
}

// If a broker reports once that it is not the leader, the request is retried and no event fails.
func TestRetried(t *testing.T) {
	c := serve(t, kfake.SeedTopics(1, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	c.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		return refuse(request.(*kmsg.ProduceRequest), kerr.NotLeaderForPartition), nil, true
	})
	sinktest.Delivered(t, sink.Publish(t.Context(), orders()[:100]), 100)
}

// If the topic does not exist, it is not created, the sink is unavailable, and the event is not charged. Once the topic
// exists, the event is acknowledged.
func TestNoTopic(t *testing.T) {
	c := serve(t, kfake.AllowAutoTopicCreation())
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	events := []event.Event{sinktest.Event(1, "order-1", "a", "1"), sinktest.Event(2, "order-1", "a", "2")}
	errs := sink.Publish(t.Context(), events)
	sinktest.Failed(t, errs[0], sinktest.Unavailable, "topic events", "create it")
	sinktest.Failed(t, errs[1], sinktest.NotTried)
	if err := c.CreateTopic("events", 1, nil); err != nil {
		t.Fatal(err)
	}
	sinktest.Delivered(t, sink.Publish(t.Context(), events), 2)
}

// An event that is too large for the topic is rejected for good, with both sizes in the error. Small events that are
// too large only together are acknowledged, and so is a large event that the topic allows.
func TestTooLarge(t *testing.T) {
	c := serve(t)
	limit, high := "20000", "5000000"
	if err := c.CreateTopic("events", 1, map[string]string{"max.message.bytes": limit, "compression.type": "none"}); err != nil {
		t.Fatal(err)
	}
	if err := c.CreateTopic("large", 1, map[string]string{"max.message.bytes": high}); err != nil {
		t.Fatal(err)
	}
	noise := func(n, size int) event.Event { // does not compress
		var b strings.Builder
		for k := uint64(n + 1); b.Len() < size; k = k*6364136223846793005 + 1442695040888963407 {
			fmt.Fprintf(&b, "%016x", k)
		}
		return sinktest.Event(n, fmt.Sprint("order-", n), "a", `"`+b.String()+`"`)
	}
	var events []event.Event
	for n := range 60 {
		events = append(events, noise(n, 4000))
	}
	events = append(events, noise(60, 100_000))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	errs := sink.Publish(t.Context(), events)
	sinktest.Delivered(t, errs[:60], 60)
	sinktest.Failed(t, errs[60], sinktest.ForGood, "100", "bytes", limit, "max.message.bytes")

	large := open(t, kafka.Config{URL: "kafka://" + address(c) + "/large"})
	sinktest.Delivered(t, large.Publish(t.Context(), []event.Event{noise(61, 2_000_000)}), 1)
}

// If Kafka cannot be reached or refuses the password, the sink is unavailable, and the error does not contain the
// password. If it does not answer, Publish returns when its context ends.
func TestNotThere(t *testing.T) {
	c := serve(t, kfake.SeedTopics(1, "events"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "u", "right"))
	for _, host := range []string{sinktest.Refused(t), address(c)} {
		err := open(t, kafka.Config{URL: "kafka://u:hunter2@" + host + "/events"}).Publish(t.Context(), orders()[:1])[0]
		sinktest.Failed(t, err, sinktest.Unavailable)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q has the password", err)
		}
	}
	sinktest.Delivered(t, open(t, kafka.Config{URL: "kafka://u:right@" + address(c) + "/events"}).Publish(t.Context(), orders()[:1]), 1)

	sink := open(t, kafka.Config{URL: "kafka://" + sinktest.Silent(t) + "/events"})
	ctx, done := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer done()
	begun := time.Now()
	sinktest.Failed(t, sink.Publish(ctx, orders()[:1])[0], sinktest.NotTried)
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
}

// A user can be authenticated with SCRAM. With a wrong password or mechanism the sink is unavailable.
func TestSCRAM(t *testing.T) {
	for _, method := range []string{"SCRAM-SHA-256", "SCRAM-SHA-512"} {
		c := serve(t, kfake.SeedTopics(1, "events"), kfake.EnableSASL(), kfake.Superuser(method, "u", "right"))
		way := strings.ToLower(method)
		sink := open(t, kafka.Config{URL: "kafka://u:right@" + address(c) + "/events", SASL: way})
		sinktest.Delivered(t, sink.Publish(t.Context(), orders()[:1]), 1)
		for _, config := range []kafka.Config{{URL: "kafka://u:hunter2@" + address(c) + "/events", SASL: way}, {URL: "kafka://u:right@" + address(c) + "/events"}} {
			err := open(t, config).Publish(t.Context(), orders()[:1])[0]
			sinktest.Failed(t, err, sinktest.Unavailable)
		}
	}
}

// When its context ends, Publish returns a plain error for an event that was sent, whose outcome is unknown, and
// ErrNotTried for one that was not sent. Both are then delivered once, in order: the client that might still hold the
// first was closed.
func TestNoTime(t *testing.T) {
	c := serve(t, kfake.SeedTopics(1, "events"))
	sink := open(t, kafka.Config{URL: "kafka://" + address(c) + "/events"})
	answer := make(chan struct{})
	c.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		c.SleepControl(func() { <-answer })
		return nil, net.ErrClosed, true
	})
	events := []event.Event{sinktest.Event(1, "o", "a", "1"), sinktest.Event(2, "o", "a", "2")}
	ctx, done := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer done()
	errs := sink.Publish(ctx, events)
	sinktest.Failed(t, errs[0], sinktest.Plain, "no acknowledgement")
	sinktest.Failed(t, errs[1], sinktest.NotTried)
	close(answer)
	sinktest.Delivered(t, sink.Publish(t.Context(), events), 2)
	records := read(t, c, 2)
	if len(records) != 2 {
		t.Fatalf("%d records, so what was given up came after all", len(records))
	}
	for k, r := range records {
		if e := sinktest.Read(t, r.Value); e.ID() != events[k].ID() {
			t.Errorf("record %d is %s", k, e)
		}
	}
}

// kafkas:// uses TLS, and a broker with an unknown certificate makes the sink unavailable.
func TestTLS(t *testing.T) {
	known := httptest.NewUnstartedServer(nil)
	known.StartTLS()
	defer known.Close()
	c := serve(t, kfake.SeedTopics(1, "events"), kfake.TLS(&tls.Config{Certificates: known.TLS.Certificates}))
	roots := x509.NewCertPool()
	roots.AddCert(known.Certificate())
	url := "kafkas://" + address(c) + "/events"
	sinktest.Delivered(t, open(t, kafka.Config{URL: url, TLS: &tls.Config{RootCAs: roots}}).Publish(t.Context(), orders()[:1]), 1)
	sinktest.Failed(t, open(t, kafka.Config{URL: url}).Publish(t.Context(), orders()[:1])[0], sinktest.Unavailable, "certificate")
}

// New refuses a wrong URL, and the error does not contain the password.
func TestURL(t *testing.T) {
	for _, url := range []string{"", "http://h/t", "kafka://h:1", "kafka:///t", "kafka://h:1/a b", "kafka://h:1/a/b", "kafka://u:hunter2@h:port/t"} {
		_, err := kafka.New(kafka.Config{URL: url})
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"kafka://h:1,h2:2/t", "kafkas://u:p@h/t.s"} {
		if _, err := kafka.New(kafka.Config{URL: url}); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}
