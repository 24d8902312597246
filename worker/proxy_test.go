package worker_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
)

// A proxy stands between a worker and its database. It forwards everything until it is told to stall, or to cut
// connections at a certain statement.
type proxy struct {
	listener net.Listener
	target   string
	closed   chan struct{}
	running  sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool
	open  chan struct{} // closed while data flows
	cut   cut
	mute  string // connections go silent at statements that contain it
	muted int    // how many connections are to go silent
	cuts  int    // how many connections it has cut
}

// A cut ends connections at statements that contain text: before a statement is forwarded, or after the server
// has answered, in which case the answer is dropped.
type cut struct {
	text    string // empty: none
	forward bool
	times   int
}

// newProxy starts a proxy in front of a database and returns it with the connection string that leads through
// it.
func newProxy(t *testing.T, databaseURL string) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: u.Host, closed: make(chan struct{}), conns: map[net.Conn]bool{}, open: make(chan struct{})}
	close(p.open)
	p.running.Go(p.accept)
	t.Cleanup(p.close)
	u.Host = listener.Addr().String()
	return p, u.String()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	if !p.flows() || !p.track(client) {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil || !p.track(server) {
		return
	}
	defer server.Close()
	answered := make(chan struct{}) // closed when the server has answered a statement to be cut at
	dropping := make(chan struct{}) // closed when answers are no longer forwarded
	p.running.Go(func() {
		defer client.Close()
		p.answer(client, server, dropping, answered)
	})
	_ = p.ask(client, server, dropping, answered)
}

// track remembers c, to close it with the proxy.
func (p *proxy) track(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.closed:
		c.Close()
		return false
	default:
		p.conns[c] = true
		return true
	}
}

// answer forwards what the server sends.
func (p *proxy) answer(client, server net.Conn, dropping, answered chan struct{}) {
	chunk := make([]byte, 64<<10)
	for {
		n, err := server.Read(chunk)
		if err != nil || !p.flows() {
			return
		}
		select {
		case <-dropping:
			close(answered)
			return
		default:
		}
		if _, err := client.Write(chunk[:n]); err != nil {
			return
		}
	}
}

// ask forwards what the client sends, message by message.
func (p *proxy) ask(client, server net.Conn, dropping, answered chan struct{}) error {
	if err := p.forward(client, server, nil); err != nil { // the start-up message has no type
		return err
	}
	var message bytes.Buffer
	marked := false // the statement that was parsed last is one to cut at
	kind := make([]byte, 1)
	for {
		if _, err := io.ReadFull(client, kind); err != nil {
			return err
		}
		message.Reset()
		if err := p.forward(client, &message, kind); err != nil {
			return err
		}
		execute := false
		switch kind[0] {
		case 'P': // parse
			marked = p.matches(message.Bytes())
		case 'E': // execute
			execute = marked
		case 'Q': // a simple query
			execute = p.matches(message.Bytes())
		}
		if p.silent(kind[0], message.Bytes()) {
			<-p.closed
			return net.ErrClosed
		}
		forward, now := p.cutNow(execute)
		if now && !forward {
			return errors.New("cut before the statement")
		}
		if now {
			close(dropping)
		}
		if !p.flows() {
			return net.ErrClosed
		}
		if _, err := server.Write(message.Bytes()); err != nil {
			return err
		}
		if now {
			if kind[0] == 'E' {
				if _, err := server.Write([]byte{'S', 0, 0, 0, 4}); err != nil { // sync
					return err
				}
			}
			<-answered
			return errors.New("cut after the statement")
		}
	}
}

// forward copies one message: its type, if it has one, its length and the rest.
func (p *proxy) forward(from io.Reader, to io.Writer, kind []byte) error {
	length := make([]byte, 4)
	if _, err := io.ReadFull(from, length); err != nil {
		return err
	}
	if _, err := to.Write(append(kind[:len(kind):len(kind)], length...)); err != nil {
		return err
	}
	_, err := io.CopyN(to, from, int64(binary.BigEndian.Uint32(length))-4)
	return err
}

// flows waits while the proxy stalls. It reports false once the proxy is closed.
func (p *proxy) flows() bool {
	p.mu.Lock()
	open := p.open
	p.mu.Unlock()
	select {
	case <-open:
		return true
	case <-p.closed:
		return false
	}
}

// stall makes the proxy hold back everything, like a network that loses all packets.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = make(chan struct{})
}

func (p *proxy) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.open)
}

// cutAt makes the proxy cut connections at the next statements that contain text.
func (p *proxy) cutAt(text string, forward bool, times int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut{text, forward, times}
}

func (p *proxy) matches(message []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cut.text != "" && bytes.Contains(message, []byte(p.cut.text))
}

func (p *proxy) cutNow(execute bool) (forward, now bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !execute || p.cut.times == 0 {
		return false, false
	}
	p.cut.times--
	p.cuts++
	return p.cut.forward, true
}

// silence makes the proxy forward nothing more on the next connection on which a statement contains text. Other
// connections are not affected.
func (p *proxy) silence(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute, p.muted = text, 1
}

func (p *proxy) silent(kind byte, message []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.muted == 0 || kind != 'P' && kind != 'Q' || !bytes.Contains(message, []byte(p.mute)) {
		return false
	}
	p.muted--
	return true
}

func (p *proxy) cutCount() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	close(p.closed)
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
}
