package amqp

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/simple-workflow/simple-workflow/dispatcher"
)

// A link is a connection with one channel in confirm mode. If either ends, the link is of no more use.
type link struct {
	host    string
	conn    *amqp.Connection
	channel *amqp.Channel
	ended   chan *amqp.Error // receives once why the channel ended

	mu    sync.Mutex
	why   error             // why the channel ended; nil: not read from ended yet
	came  map[string]string // why the broker returned messages, by message id
	block *block
}

// A block is a period in which the broker accepts nothing. A link always has one: if it is not active, it is the next
// one.
type block struct {
	begun  chan struct{} // closed when the block begins
	active bool
	reason string
}

// connect opens a link. It gives up when ctx ends, or after dialWithin.
func connect(ctx context.Context, b broker, secure *tls.Config) (*link, error) {
	ctx, done := context.WithTimeout(ctx, dialWithin)
	defer done()
	giveUp := func() bool { return true }
	if secure = secure.Clone(); secure != nil {
		secure.ServerName = cmp.Or(secure.ServerName, b.name)
	}
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName("simple-workflow")
	conn, err := amqp.DialConfig(b.url, amqp.Config{
		Heartbeat: heartbeat, TLSClientConfig: secure, Properties: properties, Locale: "en_US",
		Dial: func(network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			giveUp = context.AfterFunc(ctx, func() { conn.Close() })
			return impatient{conn}, nil
		},
	})
	if err != nil {
		giveUp()
		return nil, cause(ctx, err)
	}
	l := &link{host: b.host, conn: conn, ended: make(chan *amqp.Error, 1), came: map[string]string{}, block: &block{begun: make(chan struct{})}}
	if err := l.open(); err != nil || !giveUp() {
		conn.Close()
		return nil, cause(ctx, err)
	}
	return l, nil
}

// cause returns the error of ctx if it has ended, as err is then only its consequence. Otherwise it returns err.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer: %w", ctx.Err())
	}
	return err
}

// An impatient connection fails a write if the peer does not read within writeWithin.
type impatient struct{ net.Conn }

func (c impatient) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(writeWithin)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

// open opens the channel and begins to watch it.
func (l *link) open() (err error) {
	if l.channel, err = l.conn.Channel(); err != nil {
		return err
	}
	if err := l.channel.Confirm(false); err != nil {
		return err
	}
	l.channel.NotifyClose(l.ended)
	go l.watchBlocks(l.conn.NotifyBlocked(make(chan amqp.Blocking)))
	go l.watchReturns(l.channel.NotifyReturn(make(chan amqp.Return)), l.channel.NotifyReturn(make(chan amqp.Return)))
	return nil
}

// watchReturns records the messages that the broker returns, until the channel ends. Each return is delivered twice,
// and the second is received only after the first was recorded. The goroutine that delivers it also reads the
// confirmation, which follows the return. So a return is recorded before its confirmation is seen.
func (l *link) watchReturns(first, second <-chan amqp.Return) {
	for r := range first {
		l.mu.Lock()
		l.came[r.MessageId] = fmt.Sprintf("%d %s", r.ReplyCode, r.ReplyText)
		l.mu.Unlock()
		<-second
	}
}

// returned returns why the broker returned a message, and removes the record. It returns "" if the broker has not
// returned it.
func (l *link) returned(id string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	why := l.came[id]
	delete(l.came, id)
	return why
}

// watchBlocks records when the broker accepts nothing because it lacks memory or disk, until the connection ends.
func (l *link) watchBlocks(blocks <-chan amqp.Blocking) {
	for b := range blocks {
		l.mu.Lock()
		switch {
		case b.Active && !l.block.active:
			l.block.active, l.block.reason = true, b.Reason
			close(l.block.begun)
		case !b.Active && l.block.active:
			l.block = &block{begun: make(chan struct{})}
		}
		l.mu.Unlock()
	}
}

// blockage returns the active block, or the next one if none is active.
func (l *link) blockage() *block {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.block
}

// err returns why the broker accepts nothing.
func (b *block) err() error {
	return fmt.Errorf("the broker takes nothing now: %s", b.reason)
}

// ending returns why the channel ended.
func (l *link) ending() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case e := <-l.ended:
		if e != nil && l.why == nil {
			l.why = e
		}
	default:
	}
	if l.why == nil {
		return errors.New("the connection is closed")
	}
	return l.why
}

// close ends the connection, without waiting for a broker that does not answer.
func (l *link) close() { _ = l.conn.CloseDeadline(time.Now().Add(time.Second)) }

// lost returns the error for a message whose channel ended. The broker ends a channel because of one message;
// most of the others in flight are innocent.
func (s *sink) lost(l *link, m amqp.Publishing) error {
	why := l.ending()
	var e *amqp.Error
	switch {
	case !errors.As(why, &e):
	case e.Code == amqp.PreconditionFailed && strings.Contains(e.Reason, fmt.Sprintf("message size %d ", len(m.Body))):
		return dispatcher.RejectForGood(fmt.Errorf("%d bytes are too many for the broker: %s", len(m.Body), e.Reason))
	case e.Code == amqp.NotFound:
		return dispatcher.Unavailable(fmt.Errorf("there is no exchange %s; create it, or correct the sink's options: %s", s.config.Exchange, e.Reason), 0)
	}
	return dispatcher.Unavailable(fmt.Errorf("connection to %s lost: %w", l.host, why), 0)
}
