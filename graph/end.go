package graph

import (
	"fmt"
)

// terminate completes the innermost scope around a token, and ends all other tokens in it. Without one it completes the
// instance.
func (i *instance) terminate(t *token) {
	for g := t.group; g != nil; g = g.parent {
		if g.host != nil {
			i.setState(t, tokenCompleted)
			i.endInside(g.host)
			g.leadsNobody = false // endInside has set it, but here the host does lead on
			return
		}
	}
	i.setState(t, tokenCompleted)
	i.finish(t)
}

// drain leads the hosts of scopes on whose tokens have all ended. A group may have live tokens again by now, if a new
// one has joined it in the same decision. It reports whether there was anything to do.
func (i *instance) drain() (any bool) {
	for len(i.drains) > 0 {
		g := i.drains[0]
		i.drains = i.drains[1:]
		if g.live == 0 {
			any = true
			i.drained(g)
		}
	}
	return any
}

// explode fails an instance whose tokens multiply, or run in a loop, without end. The tokens and groups that this
// decision has made are dropped rather than written, as they may be thousands. Only t is written, if it has to undo
// what was done.
func (i *instance) explode(t *token) {
	if i.ending != "" {
		return // another token has just called explode
	}
	reason := fmt.Sprintf("%s: tokens enter more than %d nodes without a step in between", t.node.name, maxMoves)
	c := &i.changes
	c.events = nil
	i.fail(t, reason)
	c.tokens = filter(c.tokens, func(x *token) bool { return x.version > 0 || x == c.endedBut })
	c.groups = filter(c.groups, func(g *group) bool { return !g.fresh })
	c.joins, c.arrivals, c.detached, i.eaches = nil, nil, nil, nil
	c.ended = i.status.final()
}

// complete completes a token, and the instance with its last token.
func (i *instance) complete(t *token) {
	if i.live == 1 {
		i.finish(t)
		return
	}
	i.setState(t, tokenCompleted)
}

// finish completes the instance. t is its last token, or one that terminates it. If the output cannot be evaluated, the
// instance stays open, and t stops with an incident.
func (i *instance) finish(t *token) {
	if i.process.output != nil {
		value, err := i.process.output.value(i.facts)
		if err != nil {
			i.setState(t, tokenWaiting)
			i.stop(t, outputFailed, err.Error())
			return
		}
		i.output = value
	}
	i.setState(t, tokenCompleted)
	i.endAll()
	i.become(statusCompleted, "")
}

// fail fails the instance. If the process has steps that can be undone, t undoes first.
func (i *instance) fail(t *token, reason string) {
	if i.process.undoes {
		i.compensate(t, statusFailed, reason)
		return
	}
	i.setState(t, tokenFailed)
	i.endAs(statusFailed, reason)
}

// endAs ends the instance now, with a final status.
func (i *instance) endAs(to status, reason string) {
	if to == statusFailed {
		i.failure = reason
	}
	i.endAll()
	i.become(to, reason)
}

// endAll ends every live token, with its run. It also ends those that are not loaded, by setting ended for the writer.
func (i *instance) endAll() {
	i.forget() // first: otherwise each token would search the list of new incidents, which may have thousands
	for _, t := range i.changes.tokens {
		if t.state == tokenReady || t.state == tokenWaiting {
			i.setState(t, tokenTerminated)
		}
	}
	i.changes.ended = i.changes.ended || i.live > 0
	i.live, i.ready, i.joining, i.incidents = 0, 0, 0, 0
}

// forget drops all that was about to be enqueued, and all incidents, including those of tokens that are not loaded.
func (i *instance) forget() {
	c := &i.changes
	c.steps, c.waits, c.tasks, c.children, c.undo = nil, nil, nil, nil, nil
	c.unopen(func(*token) bool { return true })
	i.incidents = 0
}
