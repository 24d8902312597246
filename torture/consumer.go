package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
)

// A consumer is the receiver of the events that leave the database. It writes what it sees into the ledger before it
// answers, together with its answer.
type consumer struct {
	server *httptest.Server
	ledger *ledger
	mood   atomic.Pointer[mood]
}

// A mood is how the consumer answers for a while.
type mood struct {
	name   string
	answer func(w http.ResponseWriter, r *http.Request, typ string) (acknowledged bool)
}

func status(code int) func(http.ResponseWriter, *http.Request, string) bool {
	return func(w http.ResponseWriter, _ *http.Request, _ string) bool { w.WriteHeader(code); return false }
}

// fine is the mood in which it accepts everything.
var fine = mood{"fine", func(http.ResponseWriter, *http.Request, string) bool { return true }}

// moods are the other moods.
var moods = []mood{
	{"error", status(http.StatusInternalServerError)},
	{"busy", func(w http.ResponseWriter, _ *http.Request, _ string) bool {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return false
	}},
	{"slow", func(_ http.ResponseWriter, r *http.Request, _ string) bool {
		sleep(r.Context(), 1500*time.Millisecond)
		return r.Context().Err() == nil
	}},
	{"silent", func(w http.ResponseWriter, r *http.Request, _ string) bool {
		sleep(r.Context(), 8*time.Second)
		hangUp(w, "")
		return false
	}},
	{"down", func(w http.ResponseWriter, _ *http.Request, _ string) bool { hangUp(w, ""); return false }},
	{"torn", func(w http.ResponseWriter, _ *http.Request, _ string) bool {
		hangUp(w, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nthe beginning")
		return true // it has kept the event, and nobody learns that
	}},
	{"picky", func(w http.ResponseWriter, _ *http.Request, typ string) bool {
		if typ == "incident.opened" {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return false
		}
		return true
	}},
}

// everyOther is a separate mood, because one event can overtake another only while some events are accepted and
// others are not.
var everyOther = mood{"moody", func(w http.ResponseWriter, _ *http.Request, _ string) bool {
	if rand.IntN(2) == 0 {
		w.WriteHeader(http.StatusBadGateway)
		return false
	}
	return true
}}

// hangUp ends the connection after some last bytes.
func hangUp(w http.ResponseWriter, last string) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return // the connection has ended already
	}
	_, _ = io.WriteString(conn, last)
	_ = conn.Close()
}

func newConsumer(l *ledger) (*consumer, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c := &consumer{ledger: l}
	c.mood.Store(&fine)
	c.server = httptest.NewUnstartedServer(c)
	c.server.Listener = listener
	c.server.Start()
	return c, nil
}

// ServeHTTP receives one event.
func (c *consumer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var event struct {
		ID, Type, Subject string
		Data              json.RawMessage
	}
	if err != nil || json.Unmarshal(body, &event) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	began := time.Now()
	m := c.mood.Load()
	e := entry{Kind: "event", Sent: &began, Run: event.ID, Type: event.Type, Key: event.Subject, Payload: bytes.Clone(event.Data), Case: m.name}
	if m.answer(w, r, event.Type) {
		e.Answer = "ok" // set only now, because the answer may fail
	}
	c.ledger.add(e)
}

func (c *consumer) close() { c.server.Close() }

// upset makes the consumer answer badly for a while.
func upset(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	return l.events.be(ctx, moods[r.IntN(len(moods))], l.plan.hold(r, 2*time.Second, 6*time.Second))
}

// moody makes it accept about every other event for a while.
func moody(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	return l.events.be(ctx, everyOther, l.plan.hold(r, 2*time.Second, 6*time.Second))
}

// be puts the consumer into a mood for the given time, unless another mood replaces it.
func (c *consumer) be(ctx context.Context, m mood, long time.Duration) (string, error) {
	c.mood.Store(&m)
	sleep(ctx, long)
	c.mood.CompareAndSwap(&m, &fine)
	return nobody, nil
}

// claimLength is how long a dispatcher claims lanes. A crash holds them up for as long.
const claimLength = 4 * time.Second

// addDispatchers starts two dispatchers, each with a link of its own, which leads to the promoted server after a
// failover.
func (l *lab) addDispatchers() (err error) {
	if l.events, err = newConsumer(l.ledger); err != nil {
		return err
	}
	for _, name := range []string{"d1", "d2"} {
		k, err := newLink(name, l.address(), l.ledger)
		if err != nil {
			return err
		}
		l.sides = append(l.sides, k)
		s, err := newSlot(l.dir, name, filepath.Join(l.bin, "dispatcher"), []string{
			"DATABASE_URL=" + clientURL(k.wire.Addr(), workerRole, name, 8),
			"DISPATCHER_SINKS=events=" + l.events.server.URL + "/#allow=127.0.0.0/8",
			"DISPATCHER_SOURCE=/torture",
			"DISPATCHER_ID=" + name,
			"DISPATCHER_CLAIM=" + claimLength.String(),
			"DISPATCHER_BACKOFF_BASE=200ms",
			"DISPATCHER_BACKOFF_CAP=3s",
			"DISPATCHER_SHUTDOWN_GRACE=1s",
			"DISPATCHER_LOG_FORMAT=json",
			"GOTRACEBACK=all",
		}, l.ledger, l.plan.random("restarts of "+name))
		if err != nil {
			return err
		}
		l.dispatchers = append(l.dispatchers, s)
		if err := s.start(); err != nil {
			return err
		}
	}
	return nil
}

// anyDispatcher returns one of them, once it runs.
func (l *lab) anyDispatcher(ctx context.Context, r *rand.Rand) *slot {
	s := l.dispatchers[r.IntN(len(l.dispatchers))]
	_, _ = soon(ctx, func() (bool, error) { return s.pid() != 0, nil })
	return s
}

func killDispatcher(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	s := l.anyDispatcher(ctx, r)
	if r.IntN(4) == 0 {
		return hit(s.name, s.signal(syscall.SIGTERM, "terminate")), nil
	}
	return hit(s.name, s.kill()), nil
}

func freezeDispatcher(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	s := l.anyDispatcher(ctx, r)
	longest := time.Duration(float64(3*claimLength) * max(l.plan.Hold, 0.5))
	return hit(s.name, s.freeze(between(r, claimLength*11/10, longest))), nil
}
