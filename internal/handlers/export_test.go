package handlers

import (
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/simple-workflow/simple-workflow/worker"
)

// Parse reads a handlers file that is not on disk.
func Parse(data string) ([]Binding, error) { return parse("handlers.yaml", []byte(data)) }

// Handler returns what Register would register.
func (b Binding) Handler(log *slog.Logger) worker.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return b.target.handler(log)
}

// SetResolver makes names of the binding's URL resolve as a test wants it.
func (b Binding) SetResolver(r *net.Resolver) { b.target.(*web).resolver = r }

// SetPatience shortens the pauses that a test would have to sit through.
func (b Binding) SetPatience(d time.Duration) {
	switch t := b.target.(type) {
	case *web:
		t.patience = d
	case *program:
		t.grace = d
	}
}

// Permits reports whether the binding's allow list lets addr through.
func (b Binding) Permits(addr netip.AddrPort) bool { return b.target.(*web).allow.permits(addr) }

// Transport returns the binding's way into the network.
func (b Binding) Transport() *http.Transport { return b.target.(*web).transport() }
