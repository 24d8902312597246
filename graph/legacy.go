package graph

import (
	"fmt"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/run"
)

// An instance that has failed is started again as another one, of the same definition and input. Its tokens set out from the start, and pass
// each node that is done: what its step had returned is taken over. So they come to where the first one stood, whatever forks, joins and
// conditions are on the way: it is found by the same rules, from the same facts. Whether it is the same place is asked afterwards.

// A legacy is what an instance that is started again takes over.
type legacy struct {
	of      uuid.UUID
	done    map[string]visit // of nodes that are passed, and that have not been yet
	entered []string         // nodes that it has to come to, or to pass, as the first one did
	facts   []known          // that were taken over
}

// A visit of a node is over.
type visit struct {
	fact   any
	has    bool   // a fact
	option string // of a race: what came first
}

// A known is a fact that is in no run of the instance.
type known struct {
	node   string
	value  any
	reason string
}

// cannot is the failure of a restart.
func cannot(format string, args ...any) error {
	return run.Permanent(run.WithCode("conflict", fmt.Errorf(format, args...)))
}

// pass leads a token past a node that is done.
func (i *instance) pass(t *token, v visit) {
	delete(i.from.done, t.node.name)
	var how map[string]any
	if v.option != "" {
		how = map[string]any{"option": v.option}
	}
	i.event(t, "node.taken_over", how)
	if v.option != "" {
		for _, o := range t.node.options {
			if o.to.name == v.option {
				t.node, t.edge = o.to, o.id
				break
			}
		}
	}
	if v.has {
		i.know(t.node.name, v.fact)
		i.from.facts = append(i.from.facts, known{t.node.name, v.fact, "taken over from instance " + i.from.of.String()})
	}
	i.leave(t, t.node.next)
}

// inherit ends the taking over. The instance has to have come to where the one before it stood.
func (i *instance) inherit() error {
	l, came := i.from, map[string]bool{}
	i.from = nil
	for _, e := range i.changes.events {
		if e.name == "node.entered" || e.name == "node.taken_over" {
			came[e.node] = true
		}
	}
	for _, name := range l.entered {
		if !came[name] {
			return cannot("instance: %s cannot be started again where it failed: it has come to node %s on a way that is not found again, by an error, a message or a time, say", l.of, name)
		}
	}
	i.changes.facts = append(i.changes.facts, l.facts...)
	return nil
}
