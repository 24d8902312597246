package worker

import (
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/hook"
)

// Processes are process graphs: a worker that has them executes their steps, under the prefixes that it covers, and
// the engine's own types, and moves instances on when it settles. There is one kind, *graph.Engine.
type Processes interface {
	Parts() hook.Engine
}

// engine is what a worker has of Processes. The zero value has none.
type engine struct {
	prefix string // of its own types
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

// steps reports whether steps of processes are leased.
func (w *Worker) steps() bool { return w.config.Processes != nil }

// lookup returns the entry for a run's type, or nil.
func (w *Worker) lookup(typ string) *entry {
	if w.engine.prefix != "" && strings.HasPrefix(typ, w.engine.prefix) {
		return w.engine.types.lookup(typ)
	}
	return w.config.Mux.lookup(typ)
}

// Patterns returns the types and prefixes that the worker has a handler for, sorted, those of Processes included.
func (w *Worker) Patterns() []string {
	all := append(w.config.Mux.Patterns(), w.engine.types.Patterns()...)
	slices.Sort(all)
	return all
}
