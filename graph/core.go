package graph

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// The core decides how one event changes an instance. It uses no database and no clock and draws no ids: what is new
// gets its id when it is written.
//
// Each method below that is an event moves the token that it is about, and with it all tokens that can move on, until
// each of them waits or has ended. Then it calls settle, which finds out what that means for the instance as a whole.

// begin places the first token at the start node.
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

// done moves a token whose step has succeeded with a result. by is the run of the step.
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
		i.goOn(t, by)
	}
	i.settle()
}

// mappingFailed is the code of the incident of a step that is done and whose result its mapping (Out) refuses.
const mappingFailed = "mapping_failed"

// outputFailed is the code of the incident of an instance that is done except for its output, which cannot be evaluated.
const outputFailed = "output_failed"

// goOn leads a token on from a node that has completed. by is the run of the step whose success has completed it in this
// batch; zero: something else has.
func (i *instance) goOn(t *token, by runRef) {
	i.event(t, nodeCompleted, nil).run = by
	if t.node.attached() {
		i.detach(t)
	}
	i.leave(t, t.node.next)
}

// A problem is an error with which a step, or something else that a token waits for, has failed for good.
type problem struct {
	code, message string
	declared      bool // the handler has marked it with run.Permanent
	done          bool // the step has done its work, but the database refused its result
}

// failed handles a step that has failed for good. The token takes the innermost error edge for the code. If there is
// none, the instance fails if the handler or the definition says so. Otherwise the token stays with an incident.
func (i *instance) failed(t *token, p problem) {
	i.changes.touched = true
	if !t.hasItem {
		i.know(t.node.name, failure(p.code, p.message))
	}
	i.event(t, "node.failed", map[string]any{"code": p.code})
	if list := i.progressOf(t.group); t.hasItem && list != nil && list.over { // the list has led on with enough results: the error matters to nobody
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

// ownCodes are the codes of incidents for which retry does something other than execute the step anew. A handler may
// return an error with such a code. Its incident gets the code handler_error instead, so that retry does not mistake it
// for the engine's.
var ownCodes = map[string]bool{mappingFailed: true, outputFailed: true, listBroken: true, compensationFailed: true, "not_settled": true, "not_leased": true, "not_reached": true}

// failedUnheard is failed for a failure that no run of the token records. Expressions read failures from runs, so this
// one is stored on its own.
func (i *instance) failedUnheard(t *token, p problem) {
	if !t.hasItem {
		i.changes.failures = append(i.changes.failures, failed{t.node.name, p.code, p.message})
	}
	i.failed(t, p)
}

// caught lets the innermost error edge for a code take the error: an edge of the node, of the scope or each around it,
// and so on outwards. It reports whether there is one. An edge of a scope or each ends all tokens within, and leads its
// host on.
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
			g.leadsNobody = true // t may be the last token in it, and the host takes the error edge instead
			i.setState(t, tokenFailed)
			i.detach(g.host)
			i.endInside(g.host)
			i.follow(g.host, e)
			return true
		}
	}
	return false
}

// conclude cancels or fails the instance because somebody has asked for it. With undo, what was done is undone first. A
// new token does that, because the present ones may not be loaded. It is placed at the start node only because a token
// has to be at some node.
func (i *instance) conclude(to status, reason string, undo bool) {
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

// strand opens an incident for a token whose run, the only one that would have moved it, has a payload that the engine
// did not write. A retry enters the node again.
func (i *instance) strand(t *token, code, message string) {
	i.changes.touched = true
	i.stop(t, code, message)
	i.settle()
}

// retry retries what an incident with this code has stopped. What is done is not done again: after mapping_failed, for
// example, only the mapping is evaluated anew. With force, a join fires with the tokens that have arrived.
func (i *instance) retry(t *token, code string, force bool) {
	i.changes.touched = true
	if t.stopped {
		i.resolve(t)
	} else { // join_unsatisfiable is one incident for all tokens that wait at joins
		i.incidents--
	}
	switch {
	case t.joining && force:
		j := i.activation(t.node, t.group.home(t.node))
		waits := j.holds(t)
		j.forced, j.expected = true, j.joined
		i.fire(j)
		if waits { // fire has counted t with the others that waited, so setState would count it twice
			t.state, t.joining = tokenCompleted, false
		}
	case t.joining: // settle opens the incident again if the others still cannot arrive
	case t.mode == compensation:
		i.setState(t, tokenReady)
		i.changes.undoAgain = true
		i.askDebt(t, 0, 0)
	case code == outputFailed: // t is the last token, or terminates the instance
		i.finish(t)
	case t.hasItem && code == listBroken: // the element is done, and is not done again
		i.itemDone(t)
	case t.hasItem:
		i.startItem(t, t.element)
	case code == mappingFailed: // the step is done, and is not done again
		if _, known := i.facts.steps[t.node.name]; known {
			i.goOn(t, runRef{})
		} else {
			i.stop(t, mappingFailed, "its result is unchanged; correct it with SELECT process_correct(…), then retry")
		}
	case code == settling.CodeResult: // the step is done, too
		if failedAs(i.facts.steps[t.node.name]) == settling.CodeResult {
			i.stop(t, settling.CodeResult, "its result is still refused; correct it with SELECT process_correct(…), then retry")
		} else {
			i.goOn(t, runRef{})
		}
	default:
		i.detach(t)
		i.enter(t)
	}
	i.settle()
}

// settle determines the status of the instance, after all tokens have moved as far as they can. Before that it does
// what depends on all tokens: hosts of empty scopes lead on, and taken joins fire if nobody else can arrive. Each may
// make the other possible, so settle repeats both until nothing changes.
func (i *instance) settle() {
	for again := true; again; {
		again = i.drain()
		i.fireTaken()
		again = again || len(i.drains) > 0
	}
	// If a token that was about to undo a step has ended since, its record stays open for the next one that undoes.
	i.changes.undo = filter(i.changes.undo, func(u undo) bool { return alive(u.token.state) > 0 })
	switch {
	case i.status.final():
	case i.live == 0:
		i.become(statusCompleted, "")
	case i.live == i.joining+i.hosts() && i.joining > 0 && i.incidents == 0:
		i.unsatisfiable()
		i.become(statusWaiting, "")
	case i.ready > 0:
		i.become(statusInProgress, "")
	default:
		i.become(statusWaiting, "")
	}
	i.moves, *i.facts.spent = 0, 0 // the limits are for one event: how many are settled together must not decide whether one of them fails
}

// hosts counts the hosts of scopes that only the tokens within can move. If all of those wait at joins, the hosts are
// stuck, too. If the process has scopes, every live token is loaded, so none is missed.
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

// movable reports whether a timer or message may still lead the host of a scope on, or send another token on from there.
func (i *instance) movable(t *token) bool {
	return t.ticks || slices.ContainsFunc(t.node.boundaries, boundary.endless) ||
		slices.ContainsFunc(i.changes.steps, func(s step) bool { return s.token == t })
}

// become changes the status. Transitions that the state machine does not have are taken in two steps, by way of
// IN_PROGRESS.
func (i *instance) become(to status, reason string) {
	if i.status == to {
		return
	}
	if i.status == statusCreated && to != statusCancelled || i.status == statusWaiting && to == statusCompleted {
		if to != statusInProgress {
			i.become(statusInProgress, "")
		}
	}
	i.changes.history = append(i.changes.history, transition{i.status, to, reason})
	i.status = to
}

// The events of visits.
const (
	nodeEntered   = "node.entered"
	nodeCompleted = "node.completed"
)

// event adds an event of a token at its node. The result is valid until the next event is added.
func (i *instance) event(t *token, name string, data map[string]any) *event {
	i.changes.events = append(i.changes.events, event{token: t, name: name, node: t.node.name, data: data})
	return &i.changes.events[len(i.changes.events)-1]
}
