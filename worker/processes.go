package worker

import (
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/hook"
)

// Processes lets a worker execute process graphs. The worker then executes steps under its prefixes and runs of
// the engine's own types, and advances instances when it settles. *graph.Engine is the only implementation.
type Processes interface {
	Parts() hook.Engine
}

// An engine is the part of Processes that a worker uses. The zero value stands for a worker without processes.
type engine struct {
	prefix string // prefix of the engine's own types
	types  *Mux   // their handlers
	hooks  []hook.Hook
}

func newEngine(c Config) (e engine) {
	e.types, e.hooks = NewMux(), slices.Clone(c.hooks)
	if c.Processes == nil {
		return e
	}
	parts := c.Processes.Parts()
	for typ, handler := range parts.Handlers {
		e.types.HandleRaw(typ, handler)
	}
	e.prefix, e.hooks = parts.Prefix, append(e.hooks, parts.Hook)
	return e
}

// steps reports whether the worker leases steps of processes.
func (w *Worker) steps() bool { return w.config.Processes != nil }

// lookup returns the entry of a type, or nil.
func (w *Worker) lookup(typ string) *entry {
	if w.engine.prefix != "" && strings.HasPrefix(typ, w.engine.prefix) {
		return w.engine.types.lookup(typ)
	}
	return w.config.Mux.lookup(typ)
}

// Patterns returns the types and prefixes that the worker has a handler for, sorted. Those of Processes are
// included.
func (w *Worker) Patterns() []string {
	all := append(w.config.Mux.Patterns(), w.engine.types.Patterns()...)
	slices.Sort(all)
	return all
}
