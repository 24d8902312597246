package graph

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
)

// maxMoves is the maximum number of nodes that the tokens of an instance may enter in one decision, that is, for one
// event. Forks in a loop of gateways multiply tokens, so the limit for one token's path (maxPureSteps) is not enough.
// It is above maxNodes, so that an event may lead through every node of the largest process. And it is above
// maxPureSteps, so that a single token in a loop gets the incident of that limit.
const maxMoves = maxNodes + 2_000

// maxPureSteps is the maximum number of gateways and joins that a token may pass in one decision. A token that passes
// more is in a loop without a step or wait, and would hold the lock of the instance for ever.
const maxPureSteps = 1000

// follow leads a token over an edge, unless it has ended in this decision: the first branch of a fork may end the
// others before they have left the fork.
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

// enter lets a token enter its node. If the instance is a restart, a node that is done is passed (see legacy).
func (i *instance) enter(t *token) {
	if i.status.final() {
		return // another token has ended the instance in this decision
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

// entering returns the method that handles a token which enters a node of a kind. It is not a field of verb, because
// the definitions may not refer to the core.
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
	return nil // there is no other kind: TestVerbs
}

// throw begins to undo, or raises an error. An error that no edge takes fails the instance.
func (i *instance) throw(t *token) {
	n := t.node
	switch {
	case n.Throw.Compensate:
		i.compensate(t, "", "")
	case !i.caught(t, n.Throw.Error):
		i.fail(t, fmt.Sprintf("%s: %s", n.name, n.Throw.Error))
	}
}

// startStep enqueues the run of a step.
func (i *instance) startStep(t *token) {
	n := t.node
	payload := i.given(t, i.facts, i.input)
	if payload == nil {
		return
	}
	i.setState(t, tokenReady)
	e := &entry{t}
	i.event(t, nodeEntered, nil).entry = e
	if !i.attach(t) {
		return
	}
	i.changes.steps = append(i.changes.steps, step{token: t, node: n.name, typ: n.Do, payload: payload, attempts: n.attempts(), entry: e})
}

// fits returns a payload if a run may have it. Otherwise it stops the token and returns nil. Without this check the
// database would refuse the insert, and with it the outcome of the step before.
func (i *instance) fits(t *token, payload json.RawMessage) json.RawMessage {
	// Postgres counts the length of jsonb as text, which has a blank after each colon and comma.
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

// choose takes the first way whose condition is true.
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

// split takes all ways whose conditions are true, as branches of a new group. It opens a group for a single branch,
// too, so that a join behind the gateway always finds the group of its fork.
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

// orElse takes the else edge. Without one the token stops with an incident, because the definition does not say what to
// do.
func (i *instance) orElse(t *token) {
	if t.node.other == nil {
		i.stop(t, "no_branch_taken", "no condition is true, and there is no else")
		return
	}
	i.follow(t, t.node.other)
}

// maxLive is the maximum number of live tokens of an instance. A fork in a loop with steps makes more in each pass, which
// maxMoves does not see.
const maxLive = 10_000

// room reports whether more tokens may be added. If not, it stops the token with an incident.
func (i *instance) room(t *token, more int) bool {
	if i.live+more <= maxLive {
		return true
	}
	i.stop(t, "too_many_tokens", fmt.Sprintf("%d tokens of the instance live, the limit is %d: a fork in a loop, or a handler that keeps its token, makes more than end", i.live, maxLive))
	return false
}

// forkAll takes all branches of a fork.
func (i *instance) forkAll(t *token) { i.fork(t, t.node.branches) }

// fork opens a group with a token for each branch. The token that arrived is completed.
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
	i.setState(t, tokenCompleted) // after the branches are counted: otherwise the group around them could seem empty, and drain
	for k, e := range branches {
		i.follow(tokens[k], e)
	}
}
