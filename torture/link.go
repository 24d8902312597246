package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/google/uuid"
	"github.com/rs/zerolog"

	"github.com/simple-workflow/simple-workflow/torture/wire"
)

// A link is the path of one client to the server: first through a proxy that cuts commits off, then through one that
// makes the network bad.
type link struct {
	name string
	wire *wire.Proxy

	mu    sync.Mutex // for redirect
	toxic *toxiproxy.Proxy
}

func (l *link) toxics() *toxiproxy.ToxicCollection {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.toxic.Toxics
}

func init() { zerolog.SetGlobalLevel(zerolog.Disabled) } // toxiproxy logs what its toxics do

func newLink(name, upstream string, l *ledger) (*link, error) {
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	toxic := toxiproxy.NewProxy(server, name, "127.0.0.1:0", upstream)
	if err := toxic.Start(); err != nil {
		return nil, fmt.Errorf("start the proxy of %s: %w", name, err)
	}
	w, err := wire.Listen(toxic.Listen, func(e wire.Event) {
		l.add(entry{Kind: "cut", At: e.At, Worker: name, Fault: e.Cut.String(), Statement: e.Statement, Committed: e.Committed})
	})
	if err != nil {
		return nil, err
	}
	return &link{name: name, wire: w, toxic: toxic}, nil
}

// poison makes the network bad in one way, until ctx ends or d has passed.
func (l *link) poison(ctx context.Context, kind, stream string, attributes map[string]int, d time.Duration) error {
	name := uuid.NewString() // unique, because another strike may have added the same kind
	body, err := json.Marshal(map[string]any{"name": name, "type": kind, "stream": stream, "attributes": attributes})
	if err != nil {
		return err
	}
	toxics := l.toxics()
	if _, err := toxics.AddToxicJson(strings.NewReader(string(body))); err != nil {
		return fmt.Errorf("%s on the link of %s: %w", kind, l.name, err)
	}
	sleep(ctx, d)
	return toxics.RemoveToxic(context.WithoutCancel(ctx), name)
}

// heal removes everything that was made bad.
func (l *link) heal() {
	l.wire.Disarm()
	l.toxics().ResetToxics(context.Background())
}

// redirect leads new connections to another server.
func (l *link) redirect(upstream string) error {
	next := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	toxic := toxiproxy.NewProxy(next, l.name, "127.0.0.1:0", upstream)
	if err := toxic.Start(); err != nil {
		return fmt.Errorf("start the proxy of %s: %w", l.name, err)
	}
	l.mu.Lock()
	old := l.toxic
	l.toxic = toxic
	l.mu.Unlock()
	l.wire.Redirect(toxic.Listen)
	old.Stop()
	return nil
}

func (l *link) close() {
	l.wire.Close()
	l.toxic.Stop()
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
