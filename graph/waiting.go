package graph

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Nodes where tokens wait: for a message or signal, for the first of several events, for a person, for another
// instance, or for the tokens within. What may move a waiting token on is attached to it: timers, subscriptions, tasks
// and children. Each knows at which place of the node it is, so that the run which reports its event says what to do.
// All of them are removed when the token leaves the node (detach). So what comes late finds nobody.

// The places of a node. The main place is that of the node's verb. Handlers and the options of a race have numbered
// places.
const mainPlace = ""

func handlerPlace(k int) string { return fmt.Sprintf("on/%d", k) }
func optionPlace(k int) string  { return fmt.Sprintf("race/%d", k) }

// numbered returns the number of a place of a kind, "on" or "race"; ok is false for other places.
func numbered(place, kind string) (k int, ok bool) {
	text, ok := strings.CutPrefix(place, kind+"/")
	if !ok {
		return 0, false
	}
	_, err := fmt.Sscanf(text, "%d", &k)
	return k, err == nil
}

// A subscription waits for a message with a name and key, or for a signal if the key is nil.
type subscription struct {
	token *token
	place string
	node  string // the node whose fact the payload becomes
	name  string
	key   *string
}

// A task is one for a person.
type task struct {
	token    *token
	assignee string
	payload  json.RawMessage
}

// A child is an instance that a call starts and waits for.
type child struct {
	token *token
	input json.RawMessage
}

// attach arms the handlers of the token's node. It reports whether it succeeded; if not, an expression has failed and
// the token is stopped.
func (i *instance) attach(t *token) bool {
	for k, h := range t.node.boundaries {
		if !i.arm(t, k, h, nil) {
			return false
		}
	}
	return true
}

// arm arms one handler, the k-th of the node, and reports like attach. again is the tick that has just fired; nil: the
// handler is armed for the first time.
func (i *instance) arm(t *token, k int, h boundary, again *tick) bool {
	switch {
	case h.After > 0:
		i.timer(t, handlerPlace(k), t.node.name, due{after: time.Duration(h.After)})
	case h.Every > 0:
		next := &tick{number: 1}
		if again != nil {
			next.number, next.after = again.number+1, again.after
		}
		i.timer(t, handlerPlace(k), t.node.name, due{after: time.Duration(h.Every), tick: next})
	case h.Message != "":
		return i.subscribe(t, handlerPlace(k), t.node.name, h.Message, h.key)
	}
	return true
}

// timer enqueues a run that is due when a timer at a place fires.
func (i *instance) timer(t *token, place, node string, d due) {
	if place != mainPlace && node == t.node.name {
		node += "/" + place // keeps the run's result from being a fact of the node
	}
	i.changes.steps = append(i.changes.steps, step{
		token: t, node: node, typ: timerType, payload: position{At: place, Tick: d.tick.count()}.json(),
		attempts: maxTimerAttempts, due: d,
	})
}

// maxExact is the number up to which a float64 represents every integer.
const maxExact = 1 << 53

// subscribe lets a token wait for a message, or for a signal if key is nil. It reports whether the key could be
// evaluated to a valid one; if not, the token is stopped.
func (i *instance) subscribe(t *token, place, node, name string, key *expression) bool {
	s := subscription{token: t, place: place, node: node, name: name}
	if key != nil {
		value, err := key.value(i.facts)
		text := string(value)
		switch number, no := strconv.ParseFloat(text, 64); {
		case err != nil:
		case strings.HasPrefix(text, `"`):
			err = json.Unmarshal(value, &text)
		case no != nil:
			err = fmt.Errorf("%s: gives %.40s; a key is a text or a number", key.text, text)
		case math.Abs(number) > maxExact:
			err = fmt.Errorf("%s: gives a number beyond ±2^53, of which not every digit is kept; use a text as key", key.text)
		}
		if err == nil && text == "" {
			err = fmt.Errorf("%s: gives an empty text; a key says which instance is meant", key.text)
		}
		if err == nil && (len(text) > 200 || strings.ContainsRune(text, 0)) {
			err = fmt.Errorf("%s: gives a key of %d bytes; use at most 200, and no NUL", key.text, len(text))
		}
		if err != nil {
			i.stop(t, "expression_failed", err.Error())
			return false
		}
		s.key = &text
	}
	i.changes.waits = append(i.changes.waits, s)
	return true
}

// await lets a token wait for a time, a message or a signal.
func (i *instance) await(t *token) {
	i.waits(t)
	if i.waitFor(t, mainPlace, t.node) {
		i.attach(t)
	}
}

// waits notes that a token has entered its node and waits there.
func (i *instance) waits(t *token) {
	i.setState(t, tokenWaiting)
	i.event(t, nodeEntered, nil)
}

// waitFor starts the timer or subscription of n, a wait or await node. If the token is at a race, n is one of its
// options, and place says which. waitFor reports whether the expressions of n could be evaluated; if not, the token is
// stopped.
func (i *instance) waitFor(t *token, place string, n *node) bool {
	if n.kind == await {
		return i.subscribe(t, place, n.name, n.Await.Message+n.Await.Signal, n.key)
	}
	d := due{after: time.Duration(n.Wait.For)}
	if n.until != nil {
		var err error
		if d.until, err = i.time(n.until); err != nil {
			i.stop(t, "expression_failed", err.Error())
			return false
		}
	}
	i.timer(t, place, n.name, d)
	return true
}

// time evaluates an expression that gives a time in RFC 3339.
func (i *instance) time(e *expression) (at time.Time, err error) {
	value, err := e.value(i.facts)
	var text string
	if err == nil {
		err = json.Unmarshal(value, &text)
	}
	if err == nil {
		at, err = time.Parse(time.RFC3339, text)
	}
	if err != nil {
		return at, fmt.Errorf("%s: no time in RFC 3339: %w", e.text, err)
	}
	return at, nil
}

// race lets a token wait for the first of several events. Each option is a place of the race.
func (i *instance) race(t *token) {
	i.waits(t)
	for k, o := range t.node.options {
		if !i.waitFor(t, optionPlace(k), o.to) {
			return
		}
	}
}

// human opens a task and lets the token wait for its completion.
func (i *instance) human(t *token) {
	n, k := t.node, task{token: t}
	if n.assignee != nil {
		value, err := n.assignee.value(i.facts)
		if err == nil {
			err = json.Unmarshal(value, &k.assignee)
		}
		if err != nil {
			i.stop(t, "expression_failed", err.Error())
			return
		}
	}
	if k.payload = i.given(t, i.facts, i.input); k.payload == nil {
		return
	}
	i.waits(t)
	i.changes.tasks = append(i.changes.tasks, k)
	i.attach(t)
}

// call starts an instance and lets the token wait for its end.
func (i *instance) call(t *token) {
	input := i.given(t, i.facts, i.input)
	if input == nil {
		return
	}
	if i.depth >= maxDepth {
		i.stop(t, "too_deep", fmt.Sprintf("%d processes have called each other", i.depth))
		return
	}
	i.waits(t)
	i.changes.children = append(i.changes.children, child{t, input})
	i.attach(t)
}

// maxDepth is how deeply calls may be nested. A process that calls itself without a condition would otherwise start
// instances for ever.
const maxDepth = 100

// given returns the payload of a step, task or call: the result of its mapping (In), or anyway if it has none. It
// returns nil if the mapping fails or its result does not fit into a run; then the token is stopped.
func (i *instance) given(t *token, f facts, anyway json.RawMessage) json.RawMessage {
	payload := anyway
	if t.node.in != nil {
		var err error
		if payload, err = object(t.node.in, f); err != nil {
			i.stop(t, "expression_failed", err.Error())
			return nil
		}
	}
	return i.fits(t, payload)
}

// enterScope opens a group with a token at the start of the scope. The token that entered becomes the group's host: it
// waits at the scope, carries its handlers, and leads on when the last token within has ended (drained).
func (i *instance) enterScope(t *token) {
	i.waits(t)
	g := &group{parent: t.group, node: t.node.name, host: t, fresh: true}
	inner := i.newToken(g)
	inner.purePath = t.purePath
	if i.attach(t) {
		i.follow(inner, t.node.inner)
	}
}

// drained leads the host of a scope on when no token lives within any more. If the scope is left by an error or a
// handler instead, leadsNobody is set before the tokens within end.
func (i *instance) drained(g *group) {
	t := g.host
	if t == nil || alive(t.state) == 0 || i.status.final() || g.leadsNobody {
		return
	}
	g.leadsNobody = true
	i.detach(t)
	i.event(t, nodeCompleted, nil)
	i.leave(t, t.node.next)
}

// happens handles a timer or message at the place of a handler or of a race's option. run is the run that reports it.
func (i *instance) happens(t *token, p position, run runRef, result json.RawMessage) {
	i.changes.touched = true
	switch k, ok := numbered(p.At, "on"); {
	case ok && k < len(t.node.boundaries):
		i.boundary(t, k, &tick{number: p.Tick, after: run})
	default:
		if k, ok := numbered(p.At, "race"); ok && k < len(t.node.options) {
			o := t.node.options[k]
			i.detach(t)
			i.event(t, nodeCompleted, map[string]any{"option": o.to.name})
			t.node, t.edge = o.to, o.id
			if i.learn(o.to, result); i.told(t) {
				i.leave(t, o.to.next)
			}
		}
	}
	i.settle()
}

// boundary takes the edge of a handler. If the handler interrupts, the token leaves by it and the tokens within end.
// Otherwise the token stays and a new one takes the edge.
func (i *instance) boundary(t *token, k int, fired *tick) {
	h := t.node.boundaries[k]
	i.event(t, "handler.taken", map[string]any{"edge": h.edge.id})
	if h.stays() {
		if once := h.Every == 0 && h.Message == "" || h.Times > 0 && fired.number >= h.Times; !once {
			i.arm(t, k, h, fired) // if that fails, the token stops, and the one that takes the edge goes all the same
		}
		aside := i.newToken(t.group)
		aside.node, aside.edge = h.edge.to, h.edge.id
		if i.room(aside, 0) {
			i.follow(aside, h.edge)
		}
		return
	}
	i.detach(t)
	i.endInside(t)
	i.follow(t, h.edge)
}

// detach removes what is attached to a token that is about to leave its node. That may be rows of earlier batches, and
// what this batch was about to add.
func (i *instance) detach(t *token) {
	i.resolve(t)
	t.gone = true
	if t.version > 0 {
		i.changes.detached = append(i.changes.detached, t)
	}
	keep := func(of *token) bool { return of != t }
	i.changes.steps = filter(i.changes.steps, func(s step) bool { return keep(s.token) })
	i.changes.waits = filter(i.changes.waits, func(s subscription) bool { return keep(s.token) })
	i.changes.tasks = filter(i.changes.tasks, func(k task) bool { return keep(k.token) })
	i.changes.children = filter(i.changes.children, func(c child) bool { return keep(c.token) })
}

// filter returns a new slice of the elements that keep accepts.
func filter[T any](all []T, keep func(T) bool) (kept []T) {
	for _, x := range all {
		if keep(x) {
			kept = append(kept, x)
		}
	}
	return kept
}

// endInside ends the tokens within the scope or each where a host is. It does not lead the host on: the caller does.
// The rest of a list that the host has left before is not ended, although its group has the same host.
func (i *instance) endInside(t *token) {
	if !t.node.hosts() {
		return
	}
	for _, o := range i.known() {
		if g := o.group; alive(o.state) > 0 && o != t {
			for ; g != nil; g = g.parent {
				if g.host == t && g.node == t.node.name && !g.restOfList {
					g.leadsNobody = true
					i.setState(o, tokenTerminated)
					break
				}
			}
		}
	}
}

// maxTimerAttempts is the attempt limit of runs of timerType and undoType. Their handlers do nothing, so attempts are
// spent only by workers that die. A timer must not fail because of that.
const maxTimerAttempts = 1000

// expects reports whether a token waits for the event that a run of the engine's own type reports. Other runs, those of
// steps, are always expected. A run that somebody has inserted or changed past the guards thus moves no token that
// waits for something else.
func (t *token) expects(typ string, p position) bool {
	if typ == undoType {
		return t.mode == compensation
	}
	if typ != timerType && typ != arriveType {
		return true
	}
	n, h := t.node, (*Boundary)(nil)
	if k, ok := numbered(p.At, "on"); ok {
		if k >= len(n.boundaries) {
			return false
		}
		h = n.boundaries[k].Boundary
	} else if k, ok := numbered(p.At, "race"); ok {
		if n.kind != race || k >= len(n.options) {
			return false
		}
		n = n.options[k].to
	} else if p.At != mainPlace {
		return false
	}
	switch {
	case h != nil && typ == timerType:
		return h.After > 0 || h.Every > 0
	case h != nil:
		return h.Message != "" && p.Message != uuid.Nil
	case typ == timerType:
		return n.kind == wait
	case p.Message != uuid.Nil:
		return n.kind == await && n.Await.Message != ""
	case p.Signal != uuid.Nil:
		return n.kind == await && n.Await.Signal != ""
	}
	return n.kind == call && p.Child != uuid.Nil
}
