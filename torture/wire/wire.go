// Package wire is a proxy that understands just enough of PostgreSQL's protocol to break a connection at the worst
// moment: when a transaction was committed and the answer is on its way, or when the commit is about to be sent.
//
// The messages are those of https://www.postgresql.org/docs/current/protocol-message-formats.html.
package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A Cut is a point at which a connection is broken.
type Cut int

const (
	// AnswerLost lets the server commit and drops its answer.
	AnswerLost Cut = iota
	// NeverSent drops the commit itself.
	NeverSent
)

func (c Cut) String() string { return [...]string{"answer lost", "never sent"}[c] }

// An Event is a connection that was broken.
type Event struct {
	At        time.Time
	Cut       Cut
	Statement string // what was being committed: settle, lease, heartbeat, enqueue, cancel or commit
	Committed bool   // what the server has answered, although nobody received it
}

// A Proxy passes connections on to one address and breaks some of them. Its methods may be called concurrently.
type Proxy struct {
	listener net.Listener
	record   func(Event)

	mu       sync.Mutex
	upstream string
	armed    map[Cut]int
	open     map[net.Conn]bool
}

// Listen starts a proxy on a free port of 127.0.0.1. record is called for each connection that was broken, from any
// goroutine.
func Listen(upstream string, record func(Event)) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for a proxy to %s: %w", upstream, err)
	}
	p := &Proxy{listener: l, record: record, upstream: upstream, armed: map[Cut]int{}, open: map[net.Conn]bool{}}
	go p.accept()
	return p, nil
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Redirect sends new connections to another address, and closes those that are open.
func (p *Proxy) Redirect(upstream string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.upstream = upstream
	for c := range p.open {
		_ = c.Close()
	}
}

// Arm cuts off the next n statements that commit something.
func (p *Proxy) Arm(cut Cut, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed[cut] += n
}

// Armed reports whether some of these cuts have not happened yet.
func (p *Proxy) Armed(cut Cut) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.armed[cut] > 0
}

// Disarm drops the cuts that have not happened yet.
func (p *Proxy) Disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.armed)
}

// Close ends the proxy and all connections through it.
func (p *Proxy) Close() {
	_ = p.listener.Close()
	p.Redirect("")
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.serve(client)
	}
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	p.mu.Lock()
	upstream := p.upstream
	p.mu.Unlock()
	server, err := net.DialTimeout("tcp", upstream, 5*time.Second)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	p.open[client], p.open[server] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, client)
		delete(p.open, server)
	}()
	s := &session{proxy: p, client: client, server: server}
	back := make(chan struct{})
	go func() {
		defer close(back)
		s.answers()
		_ = client.Close()
		_ = server.Close()
	}()
	s.questions()
	_ = server.Close()
	<-back
}

// take uses up a cut that is armed.
func (p *Proxy) take() (Cut, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, cut := range []Cut{AnswerLost, NeverSent} {
		if p.armed[cut] > 0 {
			p.armed[cut]--
			return cut, true
		}
	}
	return 0, false
}

// A session is one connection.
type session struct {
	proxy          *Proxy
	client, server net.Conn

	within atomic.Bool // a transaction is open

	mu   sync.Mutex
	lost *Event // if set, answers are dropped; this is what is known about the cut
}

// questions passes on what the client sends, until the connection ends. What belongs together, up to a Sync, is sent at
// once, so that a statement is either sent as a whole or not at all.
func (s *session) questions() {
	from := bufio.NewReader(s.client)
	if passStartup(from, s.server) != nil {
		return
	}
	prepared := map[string]string{} // by name, "" among them; a client may execute a statement long after its Parse
	var unit []byte
	var bound string
	var texts []string // of the statements that are executed in the unit
	for {
		kind, message, err := read(from)
		if err != nil {
			return
		}
		unit = append(unit, message...)
		switch kind {
		case 'P':
			name, rest, _ := bytes.Cut(message[5:], []byte{0})
			query, _, _ := bytes.Cut(rest, []byte{0})
			prepared[string(name)] = string(query)
		case 'B':
			_, rest, _ := bytes.Cut(message[5:], []byte{0}) // after the name of the portal
			name, _, _ := bytes.Cut(rest, []byte{0})
			bound = prepared[string(name)]
		case 'E':
			texts = append(texts, bound)
		case 'Q':
			texts = append(texts, string(message[5:]))
		}
		if strings.ContainsRune("PBDEC", rune(kind)) { // Parse, Bind, Describe, Execute and Close: a Sync or Flush follows
			continue
		}
		if kind == 'Q' || kind == 'S' {
			if s.cut(commits(texts, s.within.Load())) {
				return
			}
			texts = nil
		}
		if _, err := s.server.Write(unit); err != nil {
			return
		}
		unit = unit[:0]
	}
}

// cut uses up a cut, if one is armed, for what is about to be committed; "": nothing. It reports whether the commit must not
// be sent.
func (s *session) cut(name string) (never bool) {
	if name == "" {
		return false
	}
	cut, armed := s.proxy.take()
	if !armed {
		return false
	}
	event := Event{At: time.Now(), Cut: cut, Statement: name}
	if cut == NeverSent {
		s.proxy.record(event)
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = &event
	return false
}

// commits returns the name of what is committed with these statements, see nameOf, or "". In a transaction, only its end
// commits.
func commits(texts []string, within bool) (name string) {
	for _, text := range texts {
		switch n := nameOf(text); {
		case strings.HasPrefix(text, "begin"):
			within, name = true, ""
		case n == "commit":
			within, name = false, n
		case n != "" && !within:
			name = n
		}
	}
	return name
}

// answers passes on what the server sends. If the answer is to be lost, it reads the answer to its end, so that the
// result is known, and then ends the connection.
func (s *session) answers() {
	from := bufio.NewReader(s.server)
	failed := false
	for {
		kind, message, err := read(from)
		if err != nil {
			return
		}
		s.mu.Lock()
		lost := s.lost
		s.mu.Unlock()
		if lost == nil {
			if kind == 'Z' {
				s.within.Store(message[5] != 'I')
			}
			if _, err := s.client.Write(message); err != nil {
				return
			}
			continue
		}
		switch kind {
		case 'E':
			failed = true
		case 'Z': // ready for the next statement; I: outside a transaction
			lost.Committed = !failed && message[5] == 'I'
			s.proxy.record(*lost)
			return
		}
	}
}

// nameOf returns what a statement commits, or "" if it commits nothing or nothing of interest.
func nameOf(text string) string {
	switch {
	case text == "":
		return ""
	case strings.HasPrefix(text, "commit"):
		return "commit"
	case strings.Contains(text, "workflow_extend_v"):
		return "heartbeat"
	case strings.Contains(text, "workflow_settle_v"):
		return "settle"
	case strings.Contains(text, "workflow_lease_v"):
		return "lease"
	case strings.Contains(text, "INSERT INTO workflow_run") || strings.Contains(text, "workflow_enqueue("):
		return "enqueue"
	case strings.Contains(text, "workflow_cancel("):
		return "cancel"
	}
	return ""
}

// passStartup passes on the first message, which has no kind.
func passStartup(from io.Reader, to io.Writer) error {
	head := make([]byte, 4)
	if _, err := io.ReadFull(from, head); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint32(head))
	if n < 8 || n > 1<<16 {
		return errors.New("not a startup message; connections through the proxy need sslmode=disable")
	}
	message := make([]byte, n)
	copy(message, head)
	if _, err := io.ReadFull(from, message[4:]); err != nil {
		return err
	}
	_, err := to.Write(message)
	return err
}

// read returns one message: its kind, and all of its bytes.
func read(from io.Reader) (kind byte, message []byte, err error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(from, head); err != nil {
		return 0, nil, err
	}
	n := int(binary.BigEndian.Uint32(head[1:]))
	if n < 4 {
		return 0, nil, fmt.Errorf("message of %d bytes", n)
	}
	message = make([]byte, n+1)
	copy(message, head)
	_, err = io.ReadFull(from, message[5:])
	return head[0], message, err
}
