// Package kafka is a sink that produces events to a topic of Kafka.
//
// An event is acknowledged when all in-sync replicas of its partition have it. Its key is its
// partitionkey, so that those of an aggregate are in one partition. Topics are not created here.
//
// Each event of a subject is produced only after the one before it was acknowledged. An idempotent
// producer keeps the order of what succeeds, but not the gaps: if the broker refuses one batch for
// good, the next one of the partition is still taken, and an event would overtake the one it follows.
package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

const (
	atOnce      = 256              // subjects of events, for each batch
	retryWithin = 10 * time.Second // after that an event fails whose fate is known
	ackWithin   = 20 * time.Second // after that the client is given up with all it holds
	pingWithin  = 5 * time.Second
)

// A Config says where events go.
type Config struct {
	// URL is kafka://host:port,host:port/TOPIC, or kafkas:// for the same with TLS; user:password@
	// before the first host is for SASL.
	URL    string
	SASL   string      // how user and password are shown: plain, scram-sha-256 or scram-sha-512; empty: plain
	Binary bool        // attributes as headers, the payload as the value
	TLS    *tls.Config // for kafkas://; nil: the system's certificates
}

// A sink produces events to a topic of Kafka.
type sink struct {
	binary  bool
	topic   string
	options []kgo.Opt

	mu      sync.Mutex
	clients *clients // nil: none yet
	closed  bool
	ending  sync.WaitGroup
}

var topicName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,249}$`)

// New returns a sink, or an error that says what is wrong with the configuration. It connects when
// there is something to publish.
func New(c Config) (dispatcher.Sink, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "kafka" && u.Scheme != "kafkas" || u.Host == "" {
		return nil, errors.New("kafka: URL: use kafka://host:port,host:port/TOPIC or kafkas://host:port/TOPIC")
	}
	topic := strings.TrimPrefix(u.Path, "/")
	if !topicName.MatchString(topic) || topic == "." || topic == ".." {
		return nil, fmt.Errorf("kafka: URL: %.80q is no topic; use letters, digits, dots, _ and -, as in kafka://host:9092/events", topic)
	}
	options, err := c.options(u)
	if err != nil {
		return nil, err
	}
	return &sink{binary: c.Binary, topic: topic, options: options}, nil
}

// Publish produces each event after its predecessor in the subject was acknowledged.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	c, err := s.connection(ctx)
	if err != nil {
		return dispatcher.Unsent(ctx, len(events), err)
	}
	// What is under way goes on when another event finds the sink unavailable: hence not BySubject's
	// context.
	return dispatcher.BySubject(ctx, events, atOnce, func(_ context.Context, e event.Event) error {
		return s.send(ctx, c, e)
	})
}

// Close ends the connections.
func (s *sink) Close() error {
	s.mu.Lock()
	s.closed = true
	c := s.clients
	s.mu.Unlock()
	if c != nil {
		s.drop(c)
	}
	s.ending.Wait()
	return nil
}

func (s *sink) send(ctx context.Context, c *clients, e event.Event) error {
	record, err := s.record(e)
	if err != nil {
		return dispatcher.RejectForGood(err)
	}
	err = s.produce(ctx, c, c.many, record)
	if errors.Is(err, kerr.MessageTooLarge) {
		// Either it is too large for a batch of ordinary size, or the batch in which it went was too
		// large for the topic, for which it need not be to blame. By itself it shows.
		record, _ = s.record(e)
		err = s.produce(ctx, c, c.one, record)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, kerr.MessageTooLarge):
		return dispatcher.RejectForGood(fmt.Errorf("%d bytes are too many for the topic %s, which takes %s (max.message.bytes)",
			size(record), s.topic, c.limit(ctx, s.topic)))
	}
	return s.trouble(ctx, c, err)
}

// errUnknown means that an event may have been stored, or may yet be.
var errUnknown = errors.New("no acknowledgement")

// produce produces a record and waits until its fate is known, or there is no time left. Then the
// client is given up: it would go on to try, and produce the record after others have.
func (s *sink) produce(ctx context.Context, c *clients, client *kgo.Client, record *kgo.Record) error {
	fate := make(chan error, 1)
	// The context of one record ends others of its partition: hence none.
	go client.Produce(context.WithoutCancel(ctx), record, func(_ *kgo.Record, err error) { fate <- err })
	late := time.NewTimer(ackWithin)
	defer late.Stop()
	select {
	case err := <-fate:
		return err
	case <-ctx.Done():
		s.drop(c)
		return fmt.Errorf("%w before there was no time left: %w", errUnknown, ctx.Err())
	case <-late.C:
		s.drop(c)
		return fmt.Errorf("%w within %s", errUnknown, ackWithin)
	}
}

// trouble tells a Kafka that takes nothing from one that could not cope with an event.
func (s *sink) trouble(ctx context.Context, c *clients, err error) error {
	switch {
	case errors.Is(err, errUnknown):
		return err
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.UnknownTopicID):
		return dispatcher.Unavailable(fmt.Errorf("there is no topic %s; create it, or correct the sink's URL", s.topic), 0)
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed), errors.Is(err, kerr.SaslAuthenticationFailed):
		return dispatcher.Unavailable(fmt.Errorf("topic %s: %w", s.topic, err), 0)
	case errors.Is(err, kgo.ErrClientClosed), errors.Is(err, context.Canceled):
		return dispatcher.Unavailable(errors.New("the connections were given up, because Kafka did not answer for another event"), 0)
	case errors.Is(err, kgo.ErrRecordTimeout):
		if down := c.ping(ctx); down != nil {
			return dispatcher.Unavailable(down, 0)
		}
		return fmt.Errorf("topic %s: not taken within %s; perhaps its partition has no leader, or too few in-sync replicas: %w", s.topic, retryWithin, err)
	case kgo.IsRetryableBrokerErr(err):
		return dispatcher.Unavailable(err, 0)
	}
	return fmt.Errorf("topic %s: %w", s.topic, err)
}
