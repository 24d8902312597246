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

// Where tokens wait: for a message or signal, for the first of several, for a person, for another
// instance, for the tokens within. What may move such a token on is attached to it: timers and
// waits that know at which place they are, and go when the token leaves.

// The places. The main one is what the node itself is about.
const mainPlace = ""

func handlerPlace(k int) string { return fmt.Sprintf("on/%d", k) }
func optionPlace(k int) string  { return fmt.Sprintf("race/%d", k) }

// numbered returns k of the k-th place of a kind.
func numbered(place, kind string) (k int, ok bool) {
	text, ok := strings.CutPrefix(place, kind+"/")
	if !ok {
		return 0, false
	}
	_, err := fmt.Sscanf(text, "%d", &k)
	return k, err == nil
}

// A subscription waits for a message, or for a signal if the key is null.
type subscription struct {
	token *token
	place string
	node  string // whose fact the payload becomes
	name  string
	key   *string
}

// A task is for a person.
type task struct {
	token    *token
	assignee string
	payload  json.RawMessage
}

// A child is an instance to be started and waited for.
type child struct {
	token *token
	input json.RawMessage
}

// attach adds what else may happen at the token's node. It reports whether that could be told.
func (i *instance) attach(t *token) bool {
	for k, h := range t.node.boundaries {
		if !i.arm(t, k, h, nil) {
			return false
		}
	}
	return true
}

// arm arms one handler; again follows a tick that was fired.
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

// timer has something happen at a place when it is due.
func (i *instance) timer(t *token, place, node string, d due) {
	if place != mainPlace && node == t.node.name {
		node += "/" + place // no fact
	}
	i.changes.steps = append(i.changes.steps, step{
		token: t, node: node, typ: timerType, payload: position{At: place, Tick: d.tick.count()}.json(),
		attempts: maxTimerAttempts, due: d,
	})
}

// maxExact is the largest number up to which a float64 holds every whole one.
const maxExact = 1 << 53

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

// await has a token wait for a time, a message or a signal.
func (i *instance) await(t *token) {
	i.waits(t)
	if i.waitFor(t, mainPlace, t.node) {
		i.attach(t)
	}
}

// waits has a token wait at its node.
func (i *instance) waits(t *token) {
	i.setState(t, tokenWaiting)
	i.event(t, "node.entered", nil)
}

// waitFor has what a wait or await node is about happen to a token at a place. It reports whether
// that could be told.
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

// time evaluates until when to wait.
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

// race has a token wait for the first of several; each of them is a place.
func (i *instance) race(t *token) {
	i.waits(t)
	for k, o := range t.node.options {
		if !i.waitFor(t, optionPlace(k), o.to) {
			return
		}
	}
}

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

// maxDepth is how deep processes may call each other, or themselves.
const maxDepth = 100

// given evaluates what a step, task or call is given: what its mapping makes of the facts, without
// one what is there anyway; nil: it could not be told.
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

// enterScope places a token within; the one that came stands for all of them outside.
func (i *instance) enterScope(t *token) {
	i.waits(t)
	g := &group{parent: t.group, node: t.node.name, host: t, fresh: true}
	inner := i.newToken(g)
	inner.purePath = t.purePath
	if i.attach(t) {
		i.follow(inner, t.node.inner)
	}
}

// drained is what happens when no token lives within any more: the host goes on.
func (i *instance) drained(g *group) {
	t := g.host
	if t == nil || alive(t.state) == 0 || i.status.Final() || g.leadsNobody {
		return
	}
	g.leadsNobody = true
	i.detach(t)
	i.event(t, "node.completed", nil)
	i.leave(t, t.node.next)
}

// happens is what a timer or a message at a place means; run is its run.
func (i *instance) happens(t *token, p position, run runRef, result json.RawMessage) {
	i.changes.touched = true
	switch k, ok := numbered(p.At, "on"); {
	case ok && k < len(t.node.boundaries):
		i.boundary(t, k, &tick{number: p.Tick, after: run})
	default:
		if k, ok := numbered(p.At, "race"); ok && k < len(t.node.options) {
			o := t.node.options[k]
			i.detach(t)
			i.event(t, "node.completed", map[string]any{"option": o.to.name})
			t.node, t.edge = o.to, o.id
			if i.learn(o.to, result); i.told(t) {
				i.leave(t, o.to.next)
			}
		}
	}
	i.settle()
}

// boundary takes the edge of a handler: with the token itself, or, if that stays, with another.
func (i *instance) boundary(t *token, k int, fired *tick) {
	h := t.node.boundaries[k]
	i.event(t, "handler.taken", map[string]any{"edge": h.edge.id})
	if h.stays() {
		if h.Every == 0 && h.Message == "" || h.Times > 0 && fired.number >= h.Times {
			// it happens no more
		} else if !i.arm(t, k, h, fired) {
			return
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

// detach removes what is attached to a token: it is about to leave its node.
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

func filter[T any](all []T, keep func(T) bool) (kept []T) {
	for _, x := range all {
		if keep(x) {
			kept = append(kept, x)
		}
	}
	return kept
}

// endInside ends the tokens for which a host stands; not what an earlier visit of a list has left.
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

// maxTimerAttempts is more than a timer needs: its handler does nothing.
const maxTimerAttempts = 1000

// expects reports whether a token waits for what one of the engine's own runs says has happened to it.
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
