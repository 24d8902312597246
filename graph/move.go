package graph

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
)

// maxMoves is how many nodes the tokens of an instance may enter in one decision: by one event.
const maxMoves = maxNodes + 2_000

// maxPureSteps is how many gateways and joins a token may pass in one decision.
const maxPureSteps = 1000

// follow leads a token over an edge, unless another one has ended it in this decision: of the
// branches of a fork that set out together the first may end the others.
func (i *instance) follow(t *token, e *edge) {
	if alive(t.state) == 0 {
		return
	}
	t.node, t.edge = e.to, e.id
	i.enter(t)
}

// leave leads a token on, or ends it where there is no edge.
func (i *instance) leave(t *token, e *edge) {
	switch {
	case e != nil:
		i.follow(t, e)
	case alive(t.state) > 0:
		i.complete(t)
	}
}

// enter is what happens when a token comes to a node.
func (i *instance) enter(t *token) {
	if i.status.Final() {
		return // another token has just ended the instance
	}
	if i.moves++; i.moves > maxMoves {
		i.explode(t)
		return
	}
	n := t.node
	if i.from != nil && !t.hasItem {
		if v, done := i.from.done[n.name]; done {
			i.pass(t, v)
			return
		}
	}
	if n.pure() {
		if t.purePath++; t.purePath > maxPureSteps {
			i.stop(t, "loop_limit", fmt.Sprintf("passed %d gateways and joins without a step in between", maxPureSteps))
			return
		}
	}
	entering(n.kind)(i, t)
}

// entering returns what happens when a token comes to a node of a kind.
func entering(k kind) func(*instance, *token) {
	switch k {
	case do:
		return (*instance).startStep
	case choose:
		return (*instance).choose
	case anyOf:
		return (*instance).split
	case fork:
		return (*instance).forkAll
	case join:
		return (*instance).arrive
	case wait, await:
		return (*instance).await
	case race:
		return (*instance).race
	case human:
		return (*instance).human
	case call:
		return (*instance).call
	case each:
		return (*instance).enterEach
	case scope:
		return (*instance).enterScope
	case throw:
		return (*instance).throw
	case end:
		return (*instance).complete
	case terminate:
		return (*instance).terminate
	}
	return nil // there is no other: TestVerbs
}

func (i *instance) throw(t *token) {
	n := t.node
	switch {
	case n.Throw.Compensate:
		i.compensate(t, "", "")
	case !i.caught(t, n.Throw.Error):
		i.fail(t, fmt.Sprintf("%s: %s", n.name, n.Throw.Error))
	}
}

func (i *instance) startStep(t *token) {
	n := t.node
	payload := i.given(t, i.facts, i.input)
	if payload == nil {
		return
	}
	i.setState(t, tokenReady)
	i.event(t, "node.entered", nil)
	if !i.attach(t) {
		return
	}
	i.changes.steps = append(i.changes.steps, step{token: t, node: n.name, typ: n.Do, payload: payload, attempts: n.attempts()})
}

// fits returns a payload if a run can be given it.
func (i *instance) fits(t *token, payload json.RawMessage) json.RawMessage {
	// Postgres counts the document with a blank after each colon and comma.
	if size := len(payload) + bytes.Count(payload, []byte{':'}) + bytes.Count(payload, []byte{','}); size > jsondoc.MaxPayload {
		i.stop(t, "payload_too_large", fmt.Sprintf("%d bytes, the limit is %d; pass a reference to large data", size, jsondoc.MaxPayload))
		return nil
	}
	if err := jsondoc.CheckPayload(payload); err != nil {
		i.stop(t, "expression_failed", err.Error())
		return nil
	}
	return payload
}

func (i *instance) choose(t *token) {
	for _, w := range t.node.ways {
		yes, err := w.condition.condition(i.facts)
		if err != nil {
			i.stop(t, "expression_failed", err.Error())
			return
		}
		if yes {
			i.follow(t, w.edge)
			return
		}
	}
	i.orElse(t)
}

// split takes all ways whose conditions are true, as branches of a group.
func (i *instance) split(t *token) {
	var taken []*edge
	for _, w := range t.node.ways {
		yes, err := w.condition.condition(i.facts)
		if err != nil {
			i.stop(t, "expression_failed", err.Error())
			return
		}
		if yes {
			taken = append(taken, w.edge)
		}
	}
	switch {
	case len(taken) > 0:
		i.fork(t, taken)
	case t.node.other != nil:
		i.fork(t, []*edge{t.node.other})
	default:
		i.orElse(t)
	}
}

func (i *instance) orElse(t *token) {
	if t.node.other == nil {
		i.stop(t, "no_branch_taken", "no condition is true, and there is no else")
		return
	}
	i.follow(t, t.node.other)
}

// maxLive is how many tokens of an instance may live at once. Forks in loops multiply them.
const maxLive = 10_000

// room reports whether so many more tokens may live; if not, the token stays where it is with an
// incident.
func (i *instance) room(t *token, more int) bool {
	if i.live+more <= maxLive {
		return true
	}
	i.stop(t, "too_many_tokens", fmt.Sprintf("%d tokens of the instance live, the limit is %d: a fork in a loop, or a handler that keeps its token, makes more than end", i.live, maxLive))
	return false
}

func (i *instance) forkAll(t *token) { i.fork(t, t.node.branches) }

// fork opens a group with a token for each branch; the one that came is done.
func (i *instance) fork(t *token, branches []*edge) {
	if !i.room(t, len(branches)-1) {
		return
	}
	g := &group{parent: t.group, node: t.node.name, fresh: true}
	tokens := make([]*token, len(branches))
	for k := range branches {
		tokens[k] = i.newToken(g)
		tokens[k].purePath = t.purePath
	}
	i.setState(t, tokenCompleted) // after its children are there: nothing looks finished in between
	for k, e := range branches {
		i.follow(tokens[k], e)
	}
}
