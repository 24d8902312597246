package graph

import (
	"fmt"
)

// terminate ends all else in the scope that the token is in, or in the instance.
func (i *instance) terminate(t *token) {
	for g := t.group; g != nil; g = g.parent {
		if g.host != nil {
			i.setState(t, tokenCompleted)
			i.endInside(g.host)
			g.leadsNobody = false // it leads on
			return
		}
	}
	i.setState(t, tokenCompleted)
	i.finish(t)
}

// drain leads hosts on whose tokens have all ended.
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

// explode fails an instance whose tokens multiply, or go round, without end. Of the new ones none is
// ever written but t, if there may be something to be undone.
func (i *instance) explode(t *token) {
	if i.ending != "" {
		return // it has just done so
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

// complete ends a token; the last one of the instance completes it.
func (i *instance) complete(t *token) {
	if i.live == 1 {
		i.finish(t)
		return
	}
	i.setState(t, tokenCompleted)
}

// finish completes the instance, of which t is the last token, or one that terminates it.
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

// fail fails the instance, after everything is undone that is to be.
func (i *instance) fail(t *token, reason string) {
	if i.process.undoes {
		i.compensate(t, statusFailed, reason)
		return
	}
	i.setState(t, tokenFailed)
	i.endAs(statusFailed, reason)
}

// endAs ends the instance now.
func (i *instance) endAs(to status, reason string) {
	if to == statusFailed {
		i.failure = reason
	}
	i.endAll()
	i.become(to, reason)
}

// endAll ends every token that is still alive, and its run.
func (i *instance) endAll() {
	i.forget() // first: there may be thousands of incidents, and each that is resolved would be looked for
	for _, t := range i.changes.tokens {
		if t.state == tokenReady || t.state == tokenWaiting {
			i.setState(t, tokenTerminated)
		}
	}
	i.changes.ended = i.changes.ended || i.live > 0
	i.live, i.ready, i.joining, i.incidents = 0, 0, 0, 0
}

// forget drops all that was about to begin, and every incident: of tokens, too, that are not known
// one by one.
func (i *instance) forget() {
	c := &i.changes
	c.steps, c.waits, c.tasks, c.children, c.undo = nil, nil, nil, nil, nil
	c.unopen(func(*token) bool { return true })
	i.incidents = 0
}
