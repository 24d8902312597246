package graph

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// The core: what an instance is, as far as it has to be known, and how one event changes it.
// It knows no database, no clock, and draws no ids: what is new has none until it is written.

// begin places the first token.
func (i *instance) begin() error {
	if err := json.Unmarshal(i.input, &i.facts.input); err != nil {
		return err
	}
	i.changes.touched = true
	t := i.newToken(nil)
	i.follow(t, &edge{id: ">" + i.process.start.name, to: i.process.start})
	i.settle()
	return nil
}

// done moves a token whose step, by this run, has succeeded.
func (i *instance) done(t *token, by runRef, result json.RawMessage) {
	i.changes.touched = true
	if t.hasItem {
		i.itemDone(t)
		i.settle()
		return
	}
	i.owes(t, t.node, by)
	i.learn(t.node, result)
	if i.told(t) {
		i.goOn(t)
	}
	i.settle()
}

// mappingFailed is the incident of a step that is done, and whose result is not what its mapping
// expects.
const mappingFailed = "mapping_failed"

// outputFailed is the incident of an instance that has nothing left to do but to tell its output.
const outputFailed = "output_failed"

// goOn leads a token on from a node that is done.
func (i *instance) goOn(t *token) {
	i.event(t, "node.completed", nil)
	if t.node.attached() {
		i.detach(t)
	}
	i.leave(t, t.node.next)
}

// A problem is what a step, or what a token waits for, has failed with for good.
type problem struct {
	code, message string
	declared      bool // by the handler: no further attempt can cure it
	done          bool // only its result was refused
}

// failed is what happens when a token's step has failed for good. The token takes the edge for the error. If there
// is none, the instance fails where that is declared, by the handler or by the process; else the token stays with an
// incident.
func (i *instance) failed(t *token, p problem) {
	i.changes.touched = true
	if !t.hasItem {
		i.know(t.node.name, failure(p.code, p.message))
	}
	i.event(t, "node.failed", map[string]any{"code": p.code})
	if list := i.progressOf(t.group); t.hasItem && list != nil && list.over { // nobody waits for it any more
		if i.live == 1 {
			i.finish(t)
		} else {
			i.setState(t, tokenFailed)
		}
		i.settle()
		return
	}
	switch {
	case i.caught(t, p.code):
	case p.declared || i.process.failure(t.node) == FailInstance:
		i.fail(t, fmt.Sprintf("%s: %s: %s", t.node.name, p.code, p.message))
	default:
		if ownCodes[p.code] || p.code == settling.CodeResult && !p.done {
			p.code, p.message = settling.CodeHandler, p.code+": "+p.message
		}
		i.stop(t, p.code, p.message)
	}
	i.settle()
}

// ownCodes are those of incidents for which a retry does something else than the step anew: a handler's error that has
// one is told of as handler_error.
var ownCodes = map[string]bool{mappingFailed: true, outputFailed: true, listBroken: true, compensationFailed: true, "not_settled": true, "not_leased": true, "not_reached": true}

// failedUnheard is the same, where it is no run of the token's that tells of the failure.
func (i *instance) failedUnheard(t *token, p problem) {
	if !t.hasItem {
		i.changes.failures = append(i.changes.failures, failed{t.node.name, p.code, p.message})
	}
	i.failed(t, p)
}

// caught has an error taken by the innermost edge for it: of the node, of what it lies within, and
// so on. It reports whether there is one.
func (i *instance) caught(t *token, code string) bool {
	if e := t.node.errorEdge(code); e != nil && !t.hasItem {
		i.detach(t)
		i.follow(t, e)
		return true
	}
	for g := t.group; g != nil; g = g.parent {
		if g.host == nil {
			continue
		}
		if e := g.host.node.errorEdge(code); e != nil {
			g.leadsNobody = true // t may be the last in it
			i.setState(t, tokenFailed)
			i.detach(g.host)
			i.endInside(g.host)
			i.follow(g.host, e)
			return true
		}
	}
	return false
}

// conclude ends the instance for good, by somebody's decision.
func (i *instance) conclude(to Status, reason string, undo bool) {
	i.changes.touched = true
	if undo && i.process.undoes {
		t := i.newToken(nil)
		t.node = i.process.start
		i.compensate(t, to, reason)
	} else {
		i.endAs(to, reason)
	}
	i.settle()
}

// strand opens an incident where what would have moved a token is not what the engine made: to try again is to enter the node again.
func (i *instance) strand(t *token, code, message string) {
	i.changes.touched = true
	i.stop(t, code, message)
	i.settle()
}

// retry lets a token that an incident with this code stopped try again. With force a join goes on
// with those that have come.
func (i *instance) retry(t *token, code string, force bool) {
	i.changes.touched = true
	if t.stopped {
		i.resolve(t)
	} else { // the incident is of all who wait at joins
		i.incidents--
	}
	switch {
	case t.joining && force:
		j := i.activation(t.node, t.group.home(t.node))
		waits := j.holds(t)
		j.forced, j.expected = true, j.joined
		i.fire(j)
		if waits { // as one of those that did
			t.state, t.joining = tokenCompleted, false
		}
	case t.joining: // whether the others can come now is found out below
	case t.mode == compensation:
		i.setState(t, tokenReady)
		i.changes.undoAgain = true
		i.askDebt(t, 0, 0)
	case code == outputFailed: // all is done but this, or is to end with it
		i.finish(t)
	case t.hasItem && code == listBroken: // it is done, and is not done again
		i.itemDone(t)
	case t.hasItem:
		i.startItem(t, t.element)
	case code == mappingFailed: // the step is done, and is not done again
		if _, known := i.facts.steps[t.node.name]; known {
			i.goOn(t)
		} else {
			i.stop(t, mappingFailed, "its result is what it was; correct it with SELECT process_correct(…), then retry")
		}
	case code == settling.CodeResult: // likewise
		if failedAs(i.facts.steps[t.node.name]) == settling.CodeResult {
			i.stop(t, settling.CodeResult, "its result is refused as it was; correct it with SELECT process_correct(…), then retry")
		} else {
			i.goOn(t)
		}
	default:
		i.detach(t)
		i.enter(t)
	}
	i.settle()
}

// settle finds out what the instance is now, after all tokens have moved as far as they go.
func (i *instance) settle() {
	for again := true; again; {
		again = i.drain()
		i.fireTaken()
		again = again || len(i.drains) > 0
	}
	// One that was about to undo something, and has been ended since: it is owed still.
	i.changes.undo = filter(i.changes.undo, func(u undo) bool { return alive(u.token.state) > 0 })
	switch {
	case i.status.Final():
	case i.live == 0:
		i.become(Completed, "")
	case i.live == i.joining+i.hosts() && i.joining > 0 && i.incidents == 0:
		i.unsatisfiable()
		i.become(Waiting, "")
	case i.ready > 0:
		i.become(InProgress, "")
	default:
		i.become(Waiting, "")
	}
	i.moves, *i.facts.spent = 0, 0 // one of many events in a batch is not charged for the others
}

// hosts counts the tokens that stand for others in a scope: they move when these do. With scopes
// every live token is known.
func (i *instance) hosts() (n int) {
	if !i.process.survey {
		return 0
	}
	for _, t := range i.known() {
		if t.node.kind == scope && alive(t.state) > 0 && !t.stopped && t.mode == forward && !i.movable(t) {
			n++
		}
	}
	return n
}

// movable reports whether something else than the tokens within may move a token on from a scope, or
// send another one on from it.
func (i *instance) movable(t *token) bool {
	return t.ticks || slices.ContainsFunc(t.node.boundaries, boundary.endless) ||
		slices.ContainsFunc(i.changes.steps, func(s step) bool { return s.token == t })
}

func (i *instance) become(to Status, reason string) {
	if i.status == to {
		return
	}
	if i.status == Created && to != Cancelled || i.status == Waiting && to == Completed { // by way of going on
		if to != InProgress {
			i.become(InProgress, "")
		}
	}
	i.changes.history = append(i.changes.history, transition{i.status, to, reason})
	i.status = to
}

func (i *instance) event(t *token, name string, data map[string]any) {
	i.changes.events = append(i.changes.events, event{token: t, name: name, node: t.node.name, data: data})
}
