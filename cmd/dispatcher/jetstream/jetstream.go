// Package jetstream is a sink that publishes events to NATS JetStream.
//
// An event is acknowledged when a stream has confirmed that it stores it. The NATS subject is that of the sink,
// a dot, and the event's type. The event's id is sent as Nats-Msg-Id, so that the stream stores the event once,
// however often it is sent within the stream's duplicate window.
//
// The sink creates no streams: what is kept, and for how long, is not the publisher's decision.
package jetstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/internal/unsent"
)

const (
	atOnce      = 256              // most aggregates whose events are sent concurrently, for each batch
	ackWithin   = 10 * time.Second // time limit for the acknowledgement of an event
	dialWithin  = 5 * time.Second  // time limit for connecting to one server
	writeWithin = 5 * time.Second  // time limit for a write to a server that does not read
	pingEvery   = 10 * time.Second // two pings without an answer end a connection
)

// A Config configures a sink. URL is required.
type Config struct {
	// URL is nats://host:port/SUBJECT, with host:port,host:port for several servers, or tls:// for the same with TLS;
	// user:password@ or token@ goes before the first host.
	URL    string
	Binary bool        // attributes as headers, the payload as the body
	TLS    *tls.Config // for tls://; nil: the system's certificates

	// Credentials is the path of a credentials file, as nsc writes it: a user's JWT and seed. It is read
	// at each connect. Empty: none.
	Credentials string
}

// A sink publishes events to NATS JetStream.
type sink struct {
	config  Config
	servers string // for nats.Connect
	hosts   string // the same for errors, without passwords
	subject string

	lock   chan struct{} // a mutex of capacity one: waiting for it can end with a context
	conn   *nats.Conn    // nil: none yet
	closed bool
}

// New returns a sink, or an error that describes what is wrong with the configuration. The sink connects when
// it has events to publish.
func New(c Config) (dispatcher.Sink, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "nats" && u.Scheme != "tls" || u.Host == "" {
		return nil, errors.New("jetstream: URL: use nats://host:port/SUBJECT or tls://host:port/SUBJECT; host:port,host:port for several servers")
	}
	subject := strings.TrimPrefix(u.Path, "/")
	if subject == "" || subject != clean(subject) {
		return nil, fmt.Errorf("jetstream: URL: the subject %.80q is none; use words with dots between them, without blanks, * and >, as in nats://host/events", subject)
	}
	if c.Credentials != "" {
		if u.User != nil {
			return nil, errors.New("jetstream: Credentials: the URL has a user already; use one of both")
		}
		if _, err := os.ReadFile(c.Credentials); err != nil {
			return nil, fmt.Errorf("jetstream: Credentials: %w", err)
		}
	}
	var servers []string
	for _, host := range strings.Split(u.Host, ",") {
		servers = append(servers, (&url.URL{Scheme: u.Scheme, User: u.User, Host: host}).String())
	}
	return &sink{config: c, servers: strings.Join(servers, ","), hosts: u.Host, subject: subject, lock: make(chan struct{}, 1)}, nil
}

// Publish sends an event once the previous event of its aggregate was acknowledged.
func (s *sink) Publish(ctx context.Context, events []event.Event) []error {
	conn, err := s.connection(ctx)
	if err != nil {
		return unsent.Errors(ctx, len(events), err)
	}
	js, err := jetstream.New(conn)
	if err != nil {
		return unsent.Errors(ctx, len(events), err)
	}
	return dispatcher.BySubject(ctx, events, atOnce, func(_ context.Context, e event.Event) error {
		return s.send(ctx, conn, js, e)
	})
}

// Close ends the connection.
func (s *sink) Close() error {
	s.lock <- struct{}{}
	defer func() { <-s.lock }()
	s.closed = true
	if s.conn != nil {
		s.conn.Close()
	}
	return nil
}

// connection returns the connection. It connects if there is none, or if it was closed.
func (s *sink) connection(ctx context.Context) (*nats.Conn, error) {
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch {
	case s.closed:
		return nil, errors.New("the sink is closed")
	case s.conn != nil && !s.conn.IsClosed():
		return s.conn, nil
	}
	d := &dialer{ctx: ctx}
	conn, err := nats.Connect(s.servers, append(s.options(), nats.SetCustomDialer(d))...)
	if ended := d.free(); err == nil && ended {
		conn.Close()
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", s.hosts, err)
	}
	s.conn = conn
	return conn, nil
}

// options returns the options of a connection. It must not reconnect on its own: it would buffer
// messages and send them late, after another dispatcher has sent the same events.
func (s *sink) options() []nats.Option {
	options := []nats.Option{
		nats.Name("simple-workflow"), nats.NoReconnect(), nats.Timeout(dialWithin), nats.FlusherTimeout(writeWithin), nats.PingInterval(pingEvery), nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}), // the default prints the error; LastError returns it, too
	}
	if s.config.TLS != nil {
		options = append(options, nats.Secure(s.config.TLS))
	}
	if s.config.Credentials != "" {
		options = append(options, nats.UserCredentials(s.config.Credentials))
	}
	return options
}

// A dialer opens connections that are closed when ctx ends, unless free was called before.
type dialer struct {
	ctx  context.Context
	stop []func() bool
}

// Dial connects to a server.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialWithin}).DialContext(d.ctx, network, address)
	if err == nil {
		d.stop = append(d.stop, context.AfterFunc(d.ctx, func() { conn.Close() }))
	}
	return conn, err
}

// free detaches the connections from the context, and reports whether it has ended already.
func (d *dialer) free() (ended bool) {
	for _, stop := range d.stop {
		ended = !stop() || ended
	}
	return ended
}

func (s *sink) send(ctx context.Context, conn *nats.Conn, js jetstream.JetStream, e event.Event) error {
	m, err := s.message(e)
	if err != nil {
		return dispatcher.RejectForGood(err)
	}
	waiting, done := context.WithTimeout(ctx, ackWithin)
	defer done()
	_, err = js.PublishMsg(waiting, m)
	var refused *jetstream.APIError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, nats.ErrMaxPayload):
		return dispatcher.RejectForGood(fmt.Errorf("%d bytes with headers are too many for the server, which takes %d (max_payload)",
			m.Size()-len(m.Subject), conn.MaxPayload()))
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return dispatcher.Unavailable(fmt.Errorf("no stream takes the subject %s, or it has no leader; if there is none, create it, as in: nats stream add NAME --subjects '%s.>'",
			m.Subject, s.subject), 0)
	case errors.As(err, &refused):
		return s.refusal(refused, m)
	case conn.IsClosed():
		return dispatcher.Unavailable(fmt.Errorf("connection to %s lost: %w", s.hosts, last(conn, err)), 0)
	case ctx.Err() != nil:
		return fmt.Errorf("no acknowledgement before time ran out: %w", ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no acknowledgement within %s: %w", ackWithin, last(conn, err))
	}
	return err
}

// last returns the last error of the connection, which says more than the error of a call, or err if there is none.
func last(conn *nats.Conn, err error) error {
	if said := conn.LastError(); said != nil {
		return said
	}
	return err
}

// Error codes of JetStream.
const (
	tooLarge jetstream.ErrorCode = 10054 // the message exceeds the stream's max_msg_size
	full     jetstream.ErrorCode = 10077 // the stream is full, or has reached its limit per subject
)

// refusal returns the error of a message that a stream refused to store.
func (s *sink) refusal(refused *jetstream.APIError, m *nats.Msg) error {
	err := fmt.Errorf("the stream of %s does not keep it: %w", m.Subject, refused)
	switch {
	case refused.ErrorCode == tooLarge:
		return dispatcher.RejectForGood(fmt.Errorf("%d bytes with headers are too many for the stream of %s (max_msg_size): %w",
			m.Size()-len(m.Subject), m.Subject, refused))
	case refused.ErrorCode == full && strings.Contains(refused.Description, "per subject"):
		return err // events of other types are still accepted
	case refused.Code == 503: // full, no storage, no leader
		return dispatcher.Unavailable(err, 0)
	}
	return err
}
