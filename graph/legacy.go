package graph

import (
	"fmt"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/run"
)

// A failed instance is restarted as another one, with the same definition and input. Its tokens begin at the start.
// They pass each node that is done in the failed instance, and take its result over. The same rules applied to the same
// facts lead them to where the failed instance stood, whatever forks, joins and conditions are on the way. So no tokens,
// groups or joins have to be copied. Afterwards inherit checks that the tokens have arrived there. They have not if the
// failed instance took an edge for an error, a message or a time, because these events do not happen again.

// A legacy is what a restarted instance takes over from the failed one.
type legacy struct {
	of      uuid.UUID        // the failed instance
	done    map[string]visit // by node: visits that are done and have not been passed yet
	entered []string         // nodes that the failed instance had entered, and that this one has to enter or pass, too
	facts   []known          // the facts that were taken over
}

// A visit is a completed visit of a node.
type visit struct {
	fact   any
	has    bool   // it has a fact
	option string // of a race: the option that came first
}

// A known is a fact that no run of the instance records.
type known struct {
	node   string
	value  any
	reason string
}

// cannot returns the error of a restart that is refused.
func cannot(format string, args ...any) error {
	return run.Permanent(run.WithCode("conflict", fmt.Errorf(format, args...)))
}

// pass leads a token past a node that is done. Each visit is passed once.
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

// inherit ends the restart. It returns an error if the instance has not come to where the failed one stood.
func (i *instance) inherit() error {
	l, came := i.from, map[string]bool{}
	i.from = nil
	for _, e := range i.changes.events {
		if e.name == nodeEntered || e.name == "node.taken_over" {
			came[e.node] = true
		}
	}
	for _, name := range l.entered {
		if !came[name] {
			return cannot("instance: %s cannot be started again where it failed: it has come to node %s by a path that a restart does not repeat, such as an edge for an error, a message or a time", l.of, name)
		}
	}
	i.changes.facts = append(i.changes.facts, l.facts...)
	return nil
}
