package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// clients are the clients of a Kafka cluster.
type clients struct {
	many *kgo.Client // for records of ordinary size, many in a batch
	one  *kgo.Client // for records that were too large for many: batches of one record
	kill func()      // cancels all that they do
}

// options returns the options that both clients have.
func (c Config) options(u *url.URL) ([]kgo.Opt, error) {
	options := []kgo.Opt{
		kgo.ClientID("simple-workflow"), kgo.SeedBrokers(strings.Split(u.Host, ",")...),
		kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0), kgo.UnknownTopicRetries(1),
		kgo.RecordDeliveryTimeout(retryWithin), kgo.ProduceRequestTimeout(retryWithin / 2), kgo.RequestTimeoutOverhead(retryWithin / 2),
		kgo.DialTimeout(pingWithin), kgo.MetadataMinAge(250 * time.Millisecond), // so that a new leader is found soon
		kgo.DisableClientMetrics(),
	}
	if u.Scheme == "kafkas" {
		if c.TLS == nil {
			c.TLS = &tls.Config{}
		}
		options = append(options, kgo.DialTLSConfig(c.TLS))
	}
	mechanism, err := c.mechanism(u.User)
	if mechanism != nil {
		options = append(options, kgo.SASL(mechanism))
	}
	return options, err
}

// mechanism returns the SASL mechanism for a user; nil if there is no user.
func (c Config) mechanism(user *url.Userinfo) (sasl.Mechanism, error) {
	if user == nil {
		if c.SASL != "" {
			return nil, fmt.Errorf("kafka: SASL: %.40q needs a user; write user:password@ before the first host", c.SASL)
		}
		return nil, nil
	}
	name := user.Username()
	password, _ := user.Password()
	switch c.SASL {
	case "", "plain":
		return plain.Auth{User: name, Pass: password}.AsMechanism(), nil
	case "scram-sha-256":
		return scram.Auth{User: name, Pass: password}.AsSha256Mechanism(), nil
	case "scram-sha-512":
		return scram.Auth{User: name, Pass: password}.AsSha512Mechanism(), nil
	}
	return nil, fmt.Errorf("kafka: SASL: %.40q; use plain, scram-sha-256 or scram-sha-512", c.SASL)
}

// connection returns the clients. It creates them if there are none, and returns an error if no broker answers.
func (s *sink) connection(ctx context.Context) (*clients, error) {
	s.mu.Lock()
	c, closed := s.clients, s.closed
	s.mu.Unlock()
	if closed {
		return nil, errors.New("the sink is closed")
	}
	if c != nil {
		return c, nil
	}
	c, err := newClients(s.options)
	if err != nil {
		return nil, err
	}
	if err := c.ping(ctx); err != nil {
		s.ending.Go(c.close) // in the background: it takes long if a broker does not answer
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients != nil || s.closed { // another batch has created clients meanwhile, or the sink was closed
		s.ending.Go(c.close)
		c = s.clients
	}
	if s.closed {
		return nil, errors.New("the sink is closed")
	}
	s.clients = c
	return c, nil
}

func newClients(options []kgo.Opt) (c *clients, err error) {
	living, kill := context.WithCancel(context.Background())
	c = &clients{kill: kill}
	options = append(slices.Clip(options), kgo.WithContext(living))
	if c.many, err = kgo.NewClient(options...); err != nil {
		kill()
		return nil, err
	}
	large := append(slices.Clip(options), kgo.MaxBufferedRecords(1), kgo.ProducerBatchMaxBytes(64<<20))
	if c.one, err = kgo.NewClient(large...); err != nil {
		c.many.Close()
		kill()
		return nil, err
	}
	return c, nil
}

// drop closes clients, with all the records that they hold.
func (s *sink) drop(c *clients) {
	c.kill()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients == c {
		s.clients = nil
		s.ending.Go(c.close)
	}
}

func (c *clients) close() {
	c.kill()
	c.many.Close()
	c.one.Close()
}

// ping returns an error if no broker answers.
func (c *clients) ping(ctx context.Context) error {
	ctx, done := context.WithTimeout(ctx, pingWithin)
	defer done()
	answer := make(chan error, 1)
	go func() { answer <- c.many.Ping(ctx) }() // Ping outlasts ctx if a broker accepts the connection and says nothing
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("no broker answers: %w", ctx.Err())
	}
}

// limit returns the topic's max.message.bytes as text for an error, or "less" if it cannot be read.
func (c *clients) limit(ctx context.Context, topic string) string {
	ctx, done := context.WithTimeout(ctx, time.Second)
	defer done()
	resource := kmsg.NewDescribeConfigsRequestResource()
	resource.ResourceType, resource.ResourceName, resource.ConfigNames = kmsg.ConfigResourceTypeTopic, topic, []string{"max.message.bytes"}
	request := kmsg.NewPtrDescribeConfigsRequest()
	request.Resources = append(request.Resources, resource)
	answer, err := request.RequestWith(ctx, c.many)
	if err != nil {
		return "less"
	}
	for _, r := range answer.Resources {
		for _, config := range r.Configs {
			if config.Value != nil {
				return *config.Value
			}
		}
	}
	return "less"
}
