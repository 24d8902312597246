// Package kafka is a sink that produces events to a topic of Kafka.
//
// An event is acknowledged when all in-sync replicas of its partition have it. Its key is the attribute
// partitionkey, so that all events of an aggregate are in one partition. The sink creates no topics.
//
// An event is produced only after the previous event of its subject was acknowledged. An idempotent
// producer alone is not enough, because it orders only what succeeds: if the broker refuses one batch for
// good, it still accepts the next one of the partition, and a later event would overtake an earlier one.
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
	"github.com/simple-workflow/simple-workflow/internal/unsent"
)

const (
	atOnce      = 256              // most subjects that are sent concurrently, for each batch
	retryWithin = 10 * time.Second // how long the client retries an event that is known not to be stored
	ackWithin   = 20 * time.Second // time limit for an acknowledgement; then the clients are closed with all they hold
	pingWithin  = 5 * time.Second  // time limit for connecting, and for an answer to a ping
)

// A Config configures a sink. URL is required.
type Config struct {
	// URL is kafka://host:port,host:port/TOPIC, or kafkas:// for the same with TLS; user:password@
	// before the first host is for SASL.
	URL    string
	SASL   string      // SASL mechanism: plain, scram-sha-256 or scram-sha-512; empty: plain if the URL has a user
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

// New returns a sink, or an error that describes what is wrong with the configuration. The sink connects when
// it has events to publish.
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

// Publish produces an event once the previous event of its subject was acknowledged.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	c, err := s.connection(ctx)
	if err != nil {
		return unsent.Errors(ctx, len(events), err)
	}
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
		// Either the event is too large for a batch of ordinary size, or the batch that it was in was too
		// large for the topic, perhaps because of other events. Producing it alone shows which.
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

// errUnknown means that an event may have been stored, or may be stored later.
var errUnknown = errors.New("no acknowledgement")

// produce produces a record and waits for the result. If ctx ends or ackWithin passes first, it closes
// the clients: they would retry, and might produce the record after another dispatcher has.
func (s *sink) produce(ctx context.Context, c *clients, client *kgo.Client, record *kgo.Record) error {
	fate := make(chan error, 1)
	// Without the caller's cancellation: if the context of one record ended, other records of its partition would fail.
	go client.Produce(context.WithoutCancel(ctx), record, func(_ *kgo.Record, err error) { fate <- err })
	late := time.NewTimer(ackWithin)
	defer late.Stop()
	select {
	case err := <-fate:
		return err
	case <-ctx.Done():
		s.drop(c)
		return fmt.Errorf("%w before time ran out: %w", errUnknown, ctx.Err())
	case <-late.C:
		s.drop(c)
		return fmt.Errorf("%w within %s", errUnknown, ackWithin)
	}
}

// trouble classifies an error of produce: Unavailable if Kafka accepts nothing at present, otherwise an error that
// may be about the event.
func (s *sink) trouble(ctx context.Context, c *clients, err error) error {
	switch {
	case errors.Is(err, errUnknown):
		return err
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.UnknownTopicID):
		return dispatcher.Unavailable(fmt.Errorf("there is no topic %s; create it, or correct the sink's URL", s.topic), 0)
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed), errors.Is(err, kerr.SaslAuthenticationFailed):
		return dispatcher.Unavailable(fmt.Errorf("topic %s: %w", s.topic, err), 0)
	case errors.Is(err, kgo.ErrClientClosed), errors.Is(err, context.Canceled):
		return dispatcher.Unavailable(errors.New("the connections were closed, because Kafka did not answer for another event"), 0)
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
