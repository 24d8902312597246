package handlers

import (
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/simple-workflow/simple-workflow/worker"
)

// Parse parses the text of a handlers file.
func Parse(data string) ([]Binding, error) { return parse("handlers.yaml", []byte(data)) }

// Handler returns the handler that Register would register.
func (b Binding) Handler(log *slog.Logger) worker.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return b.target.handler(log)
}

// SetResolver sets the resolver for the host of the binding's URL.
func (b Binding) SetResolver(r *net.Resolver) { b.target.(*web).resolver = r }

// SetPatience shortens pauses that tests would have to wait for.
func (b Binding) SetPatience(d time.Duration) {
	switch t := b.target.(type) {
	case *web:
		t.patience = d
	case *program:
		t.grace = d
	}
}

// Permits reports whether the binding's allow list permits addr.
func (b Binding) Permits(addr netip.AddrPort) bool { return b.target.(*web).allow.permits(addr) }

// Transport returns the binding's HTTP transport.
func (b Binding) Transport() *http.Transport { return b.target.(*web).transport() }
