// Package amqp is a sink that publishes events to an exchange of RabbitMQ, over AMQP 0-9-1.
//
// An event is acknowledged when the broker has confirmed it and has not returned it. (The broker also confirms
// messages that it returns because no queue takes them.) The routing key is the event's type. The sink creates no
// exchanges, queues or bindings.
package amqp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/unsent"
)

const (
	atOnce      = 256              // most subjects that are sent concurrently, for each batch
	ackWithin   = 10 * time.Second // time limit for the confirmation of an event
	dialWithin  = 5 * time.Second  // time limit for connecting and opening the channel
	writeWithin = 5 * time.Second  // time limit for a write to a broker that does not read
	heartbeat   = 10 * time.Second
	longestKey  = 255 // bytes of a routing key, by the protocol
)

// A Config configures a sink. URL and Exchange are required.
type Config struct {
	// URL is amqp://user:password@host:port/vhost, or amqps:// for the same with TLS; no vhost: /. Several
	// hosts, with commas between them, are tried in turn.
	URL      string
	Exchange string
	Binary   bool        // attributes as headers, the payload as the body
	TLS      *tls.Config // for amqps://; nil: the system's certificates
}

// A sink publishes events to an exchange.
type sink struct {
	config  Config
	brokers []broker

	lock   chan struct{} // a mutex of capacity one: waiting for it can end with a context
	link   *link         // nil: none yet
	next   int           // index of the broker to connect to next
	closed bool
}

// New returns a sink, or an error that describes what is wrong with the configuration. The sink connects when
// it has events to publish.
func New(c Config) (dispatcher.Sink, error) {
	brokers, err := c.brokers()
	if err != nil {
		return nil, errors.New("amqp: URL: use amqp://user:password@host:port/vhost or amqps://host/vhost; host:port,host:port for several brokers")
	}
	if c.Exchange == "" || len(c.Exchange) > longestKey {
		return nil, errors.New("amqp: exchange: name one, as in #exchange=events")
	}
	return &sink{config: c, brokers: brokers, lock: make(chan struct{}, 1)}, nil
}

// A broker is one of the hosts of a URL.
type broker struct{ host, url, name string } // name: the name in its certificate, if the URL has one

func (c Config) brokers() (brokers []broker, err error) {
	u, err := url.Parse(c.URL)
	if err != nil {
		return nil, err
	}
	for _, host := range strings.Split(u.Host, ",") {
		one := *u
		one.Host = host
		parsed, err := amqp.ParseURI(one.String())
		if err != nil {
			return nil, err
		}
		brokers = append(brokers, broker{fmt.Sprintf("%s:%d", parsed.Host, parsed.Port), one.String(), parsed.ServerName})
	}
	return brokers, nil
}

// Publish sends an event once the previous event of its subject was acknowledged.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	l, err := s.connection(ctx)
	if err != nil {
		return unsent.Errors(ctx, len(events), err)
	}
	return dispatcher.BySubject(ctx, events, atOnce, func(_ context.Context, e event.Event) error {
		return s.send(ctx, l, e)
	})
}

// Close ends the connection.
func (s *sink) Close() error {
	s.lock <- struct{}{}
	defer func() { <-s.lock }()
	s.closed = true
	if s.link != nil {
		s.link.close()
	}
	return nil
}

// connection returns the link to a broker. It connects, trying each broker once, if there is no link that works.
func (s *sink) connection(ctx context.Context) (*link, error) {
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.closed {
		return nil, errors.New("the sink is closed")
	}
	if s.link != nil {
		if !s.link.channel.IsClosed() {
			return s.link, nil
		}
		s.link.close()
		s.link = nil
	}
	var reasons []string
	for range s.brokers {
		b := s.brokers[s.next]
		l, err := connect(ctx, b, s.config.TLS)
		if err == nil {
			s.link = l
			return l, nil
		}
		reasons = append(reasons, fmt.Sprintf("connect to %s: %s", b.host, err))
		s.next = (s.next + 1) % len(s.brokers) // even if ctx has ended: the next call begins with it
	}
	return nil, errors.New(strings.Join(reasons, "; ")) // one line, because only the first line is shown
}

func (s *sink) send(ctx context.Context, l *link, e event.Event) error {
	m, err := s.message(e)
	if err != nil {
		return dispatcher.RejectForGood(err)
	}
	blocked := l.blockage()
	select {
	case <-blocked.begun:
		return dispatcher.Unavailable(blocked.err(), 0)
	default:
	}
	confirm, err := l.channel.PublishWithDeferredConfirmWithContext(ctx, s.config.Exchange, e.Type(), true, false, m)
	if err != nil {
		if ctx.Err() != nil {
			return dispatcher.ErrNotTried
		}
		return s.lost(l, m)
	}
	late := time.NewTimer(ackWithin)
	defer late.Stop()
	select {
	case <-confirm.Done():
		return s.verdict(l, confirm.Acked(), e, m)
	case <-blocked.begun:
		return dispatcher.Unavailable(blocked.err(), 0)
	case <-late.C:
		return fmt.Errorf("no confirmation within %s", ackWithin)
	case <-ctx.Done():
		return fmt.Errorf("no confirmation before time ran out: %w", ctx.Err())
	}
}

// verdict returns the error of a message once the broker has confirmed it, or once no confirmation can follow.
func (s *sink) verdict(l *link, acked bool, e event.Event, m amqp.Publishing) error {
	returned := l.returned(e.ID())
	switch {
	case acked && returned == "":
		return nil
	case acked:
		return fmt.Errorf("exchange %s has no queue for the routing key %s: %s", s.config.Exchange, e.Type(), returned)
	case l.channel.IsClosed():
		return s.lost(l, m)
	}
	return errors.New("the broker did not take it (nack); perhaps a queue is full, or has no leader")
}
