package graph

import (
	"encoding/json"
	"fmt"
)

// defaultLimit is how many elements are under way at once unless the definition says otherwise.
const defaultLimit = 100

// A progress is the state of one execution of an each. The list may be long, so only the elements that the batch may
// start are read.
type progress struct {
	group   *group
	items   []json.RawMessage // the elements from the next one on that the batch may start
	from    int               // the index of the first of items in the list
	next    int               // the index of the first element that was not started
	done    int               // elements that have succeeded
	total   int
	all     json.RawMessage // the whole list, if the execution begins in this batch
	over    bool            // the host has led on; elements may still be under way
	problem string          // how the numbers of its rows contradict each other; empty: they do not
	changed bool
}

// enterEach evaluates the list and starts as many elements as may be under way at once.
func (i *instance) enterEach(t *token) {
	n := t.node
	text, err := n.list.value(i.facts)
	var items []json.RawMessage
	if err == nil {
		if err = json.Unmarshal(text, &items); err != nil || items == nil {
			err = fmt.Errorf("%s: gives no list", n.list.text)
		}
	}
	if err != nil {
		i.stop(t, "expression_failed", err.Error())
		return
	}
	i.waits(t)
	g := &group{parent: t.group, node: n.name, host: t, fresh: true, listed: true}
	i.changes.groups = append(i.changes.groups, g)
	p := &progress{group: g, items: items, total: len(items), all: text}
	i.eaches = append(i.eaches, p)
	if !i.attach(t) {
		return
	}
	if len(items) == 0 {
		i.learn(n, json.RawMessage("[]"))
		i.eachDone(p)
		return
	}
	i.startItems(p)
}

// startItems starts elements up to the limit of the each and the limit of live tokens. At maxLive one element is started
// nevertheless if none is under way, because only the end of an element starts the next.
func (i *instance) startItems(p *progress) {
	n := p.group.host.node
	limit := n.Each.Limit
	if limit == 0 {
		limit = defaultLimit
	}
	p.changed = true
	for p.next < p.total && p.group.live < limit && (p.group.live == 0 || i.live < maxLive) && p.next-p.from < len(p.items) {
		item := p.items[p.next-p.from]
		t := i.newToken(p.group)
		t.node, t.item = n, p.next
		t.hasItem = true
		p.next++
		i.startItem(t, item)
	}
}

// startItem enqueues the step for one element. Without a mapping (In) the payload is the element, or {"item": element}
// if it is not an object.
func (i *instance) startItem(t *token, item json.RawMessage) {
	f, n := i.facts, t.node
	if err := json.Unmarshal(item, &f.item); err != nil {
		i.stop(t, "expression_failed", err.Error())
		return
	}
	payload := item
	if _, ok := f.item.(map[string]any); !ok {
		payload, _ = json.Marshal(map[string]json.RawMessage{"item": item})
	}
	if payload = i.given(t, f, payload); payload == nil {
		return
	}
	i.setState(t, tokenReady)
	i.changes.steps = append(i.changes.steps, step{token: t, node: n.name + "/item", typ: n.Each.Do, payload: payload, attempts: n.attempts()})
}

// listBroken is the code of the incident of an element that is done and cannot be counted, because the numbers of its
// list contradict each other.
const listBroken = "list_broken"

// itemDone counts an element that has succeeded, and starts the next elements or leads the host on.
func (i *instance) itemDone(t *token) {
	p := i.progressOf(t.group)
	if p == nil || p.over {
		i.complete(t) // nobody waits for it, but it may be the last token of the instance
		return
	}
	if p.problem != "" {
		i.stop(t, listBroken, p.problem+"; the element is done: see process_fault, then retry")
		return
	}
	i.setState(t, tokenCompleted)
	p.done++
	p.changed = true
	if need := t.node.Each.Need; p.done == p.total || need > 0 && p.done >= need {
		i.eachDone(p)
		return
	}
	i.startItems(p)
}

// progressOf returns the state of the list whose group is g; nil: g is of no list.
func (i *instance) progressOf(g *group) *progress {
	for _, p := range i.eaches {
		if p.group == g {
			return p
		}
	}
	return nil
}

// eachDone leads the host on from a list that has enough results. Elements that are still under way end, with rest:
// cancel, or run on in the group without anybody waiting for them.
func (i *instance) eachDone(p *progress) {
	t := p.group.host
	p.changed, p.over, p.group.leadsNobody = true, true, true
	if p.group.live > 0 && t.node.Each.Rest == "cancel" {
		i.endInside(t)
	}
	p.group.restOfList = true
	for _, o := range i.known() {
		if o.group == p.group && o.stopped && alive(o.state) > 0 {
			i.setState(o, tokenTerminated) // an operator need not retry it: its result would be ignored
		}
	}
	if i.told(t) {
		i.goOn(t, runRef{})
	}
}
