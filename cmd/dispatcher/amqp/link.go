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

// A link is a connection with a channel that confirms. If one of them ends, so does the link.
type link struct {
	host    string
	conn    *amqp.Connection
	channel *amqp.Channel
	ended   chan *amqp.Error // why the channel has ended, once

	mu    sync.Mutex
	why   error             // the channel has ended for; nil: not read from ended yet
	came  map[string]string // messages that the broker has returned, by id, and why
	block *block
}

// A block is a time in which the broker takes nothing, or the time before it.
type block struct {
	begun  chan struct{} // closed when it has
	active bool
	reason string
}

// connect makes a link, or gives up with ctx.
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

// cause prefers what ended ctx to what followed from it.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer: %w", ctx.Err())
	}
	return err
}

// An impatient connection gives up a peer that does not read.
type impatient struct{ net.Conn }

func (c impatient) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(writeWithin)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

// open makes the channel.
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

// watchReturns notes what the broker returns, until the channel ends. Each comes twice, and the
// second time it is taken only after it was noted. So a return is known when the confirmation is,
// which follows it and is read by the same goroutine that waits here.
func (l *link) watchReturns(first, second <-chan amqp.Return) {
	for r := range first {
		l.mu.Lock()
		l.came[r.MessageId] = fmt.Sprintf("%d %s", r.ReplyCode, r.ReplyText)
		l.mu.Unlock()
		<-second
	}
}

// returned says why the broker has returned a message, and forgets it. Empty: it has not.
func (l *link) returned(id string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	why := l.came[id]
	delete(l.came, id)
	return why
}

// watchBlocks notes when the broker takes nothing, because it lacks memory or disk, until the
// connection ends.
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

// blockage returns the present block, or the next one.
func (l *link) blockage() *block {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.block
}

// err says why the broker takes nothing.
func (b *block) err() error {
	return fmt.Errorf("the broker takes nothing now: %s", b.reason)
}

// ending says why the channel has ended.
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

// lost says what it means for a message that the channel has ended. The broker ends it for what
// one message has done; most of those that were under way are innocent.
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
