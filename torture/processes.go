package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
)

// A process is a graph that instances are started of. What it must do is defined here, independently of the engine.
type process struct {
	name       string
	definition json.RawMessage
	facts      json.RawMessage // for verdict.sql: joins and waits
	play       func(x *instance)
	called     bool // by others; such a process is not started directly
}

// An instance is one execution, as its client wants it, with the result it must have.
type instance struct {
	tag      string // identifies it in its input and in the rows that its steps write
	process  string
	key      string
	input    map[string]any
	random   *rand.Rand
	expect   map[string][2]int // how often each step takes effect, at least and at most, if the instance ends on its own
	ends     string
	messages []string // the messages that it waits for
}

func (x *instance) add(node string, least, most int) {
	e := x.expect[node]
	x.expect[node] = [2]int{e[0] + least, e[1] + most}
}

// flag draws a condition of the input.
func (x *instance) flag(name string) bool {
	yes := x.random.IntN(2) == 0
	x.input[name] = yes
	return yes
}

// A part is a piece of a graph with one entry and one exit. play records in an instance what it must do if tokens pass
// through the part so many times.
type part struct {
	entry, exit string
	play        func(x *instance, passes int)
}

type node = map[string]any

// A drawer draws a graph.
type drawer struct {
	random *rand.Rand
	name   string
	first  int // the nodes' numbers start after it
	nodes  map[string]node
	joins  []joint
	waits  map[string]int64 // milliseconds
	flags  int
	undoes bool // steps can be undone
	looped bool // inside a loop: no further loop, and nothing that waits for clients
}

// A joint is a join, given by the step after it and the last step of each of its branches.
type joint struct {
	After    string   `json:"after"`
	Branches []string `json:"branches"`
}

func newDrawer(r *rand.Rand, name string) *drawer {
	return &drawer{random: r, name: name, nodes: map[string]node{}, waits: map[string]int64{}}
}

// within draws the contents of a scope of the graph, with names of its own.
func (d *drawer) within() *drawer {
	inner := newDrawer(d.random, d.name)
	inner.first = 20
	return inner
}

// add adds a node with a new name.
func (d *drawer) add(prefix string, n node) string {
	name := fmt.Sprintf("%s%d", prefix, d.first+len(d.nodes)+1)
	d.nodes[name] = n
	return name
}

func (d *drawer) flag() string {
	d.flags++
	return fmt.Sprintf("c%d", d.flags)
}

// step draws a step. in are inputs in addition to its name, as expressions.
func (d *drawer) step(in ...string) part {
	given := map[string]string{"tag": "input.tag", "ms": fmt.Sprint(1 + d.random.IntN(60))}
	n := node{"do": "chaos.step", "attempts": 100, "in": given}
	switch d.random.IntN(20) {
	case 0:
		given["ms"] = fmt.Sprint(1000 + d.random.IntN(3000)) // longer than a lease
	case 1:
		given["times"] = "1"
	}
	for i := 0; i < len(in); i += 2 {
		given[in[i]] = in[i+1]
	}
	if d.undoes && d.random.IntN(3) > 0 || given["owes"] != "" {
		given["owes"], n["undo"] = "true", "chaos.undo"
		if d.random.IntN(4) == 0 {
			given["reluctant"] = "true"
		}
	}
	name := d.add("S", n)
	given["node"] = "'" + name + "'"
	return part{name, name, func(x *instance, passes int) { x.add(name, passes, passes) }}
}

func (d *drawer) seq(all ...part) part {
	for i := range all[1:] {
		d.nodes[all[i].exit]["to"] = all[i+1].entry
	}
	return part{all[0].entry, all[len(all)-1].exit, func(x *instance, passes int) {
		for _, p := range all {
			p.play(x, passes)
		}
	}}
}

// fork draws branches that join, and a step after the join.
func (d *drawer) fork(branches ...part) part {
	after := d.step()
	join := d.add("J", node{"join": "all", "to": after.entry})
	var entries, last []string
	for i, b := range branches {
		end := d.step()
		branches[i] = d.seq(b, end)
		d.nodes[end.exit]["to"] = join
		entries, last = append(entries, b.entry), append(last, end.exit)
	}
	d.joins = append(d.joins, joint{after.entry, last})
	return part{d.add("F", node{"fork": entries}), after.exit, func(x *instance, passes int) {
		for _, b := range branches {
			b.play(x, passes)
		}
		after.play(x, passes)
	}}
}

func (d *drawer) choose(a, b part) part {
	flag, after := d.flag(), d.step()
	d.nodes[a.exit]["to"], d.nodes[b.exit]["to"] = after.entry, after.entry
	x := d.add("X", node{"choose": []node{{"if": "input." + flag, "to": a.entry}}, "else": b.entry})
	return part{x, after.exit, func(x *instance, passes int) {
		if x.flag(flag) {
			a.play(x, passes)
		} else {
			b.play(x, passes)
		}
		after.play(x, passes)
	}}
}

// loop draws a part that is passed k times.
func (d *drawer) loop(body part, k int) part {
	count, after := d.step(), d.step()
	n := count.entry
	d.nodes[n]["in"].(map[string]string)["n"] = fmt.Sprintf("'%s' in steps ? steps.%s.n + 1.0 : 1.0", n, n)
	d.nodes[n]["to"] = d.add("X", node{"choose": []node{{"if": fmt.Sprintf("steps.%s.n < %d.0", n, k), "to": body.entry}}, "else": after.entry})
	d.nodes[body.exit]["to"] = n
	return part{body.entry, after.exit, func(x *instance, passes int) {
		body.play(x, passes*k)
		count.play(x, passes*k)
		after.play(x, passes)
	}}
}

func (d *drawer) wait(low, high time.Duration) part {
	long := between(d.random, low, high).Truncate(time.Millisecond)
	name := d.add("W", node{"wait": long.String()})
	d.waits[name] = long.Milliseconds()
	return part{name, name, func(*instance, int) {}}
}

func (d *drawer) await() part {
	name := d.add("M", nil)
	message := "chaos." + d.name + "." + name
	d.nodes[name] = node{"await": node{"message": message, "key": "input.tag"}}
	return part{name, name, func(x *instance, _ int) { x.messages = append(x.messages, message) }}
}

func (d *drawer) human() part {
	name := d.add("H", node{"human": node{"groups": []string{"clerks"}}, "in": map[string]string{"tag": "input.tag"}})
	return part{name, name, func(*instance, int) {}}
}

// any draws a part of about the given depth.
func (d *drawer) any(depth int) part {
	kind := d.random.IntN(10)
	switch {
	case depth > 0 && kind < 3:
		branches := make([]part, 2+d.random.IntN(3))
		for i := range branches {
			branches[i] = d.any(depth - 1)
		}
		return d.fork(branches...)
	case depth > 0 && kind == 3:
		return d.choose(d.any(depth-1), d.any(depth-1))
	case depth > 0 && kind == 4 && !d.looped:
		d.looped = true
		defer func() { d.looped = false }()
		return d.loop(d.any(depth-1), 2+d.random.IntN(2))
	case kind == 5:
		return d.wait(200*time.Millisecond, 3*time.Second)
	case kind == 6 && !d.looped:
		return d.await()
	case kind == 7 && !d.looped && d.random.IntN(2) == 0:
		return d.human()
	}
	return d.step()
}

// done makes a process of the drawn graph, from first to last.
func (d *drawer) done(whole part) process {
	definition, err := json.Marshal(node{"process": d.name, "version": 1, "start": whole.entry, "nodes": d.nodes})
	if err != nil {
		panic(err) // cannot happen: the definition consists of text and numbers
	}
	facts, err := json.Marshal(map[string]any{"joins": d.joins, "waits": d.waits})
	if err != nil {
		panic(err)
	}
	return process{name: d.name, definition: definition, facts: facts, play: func(x *instance) { whole.play(x, 1) }}
}

// fixed are graphs that every torture run has; the variety of blocks is left to the drawn graphs.
var fixed = map[string]func(d *drawer) part{
	"wide": func(d *drawer) part { // the last arrivals come at about the same time
		branches := make([]part, 8)
		for i := range branches {
			branches[i] = d.step("ms", "20")
		}
		return d.fork(branches...)
	},
	"nested": func(d *drawer) part {
		return d.fork(d.step(), d.fork(d.step(), d.fork(d.step(), d.step())))
	},
	"round": func(d *drawer) part { // a loop re-enters a fork
		d.looped = true
		return d.loop(d.fork(d.step(), d.step(), d.wait(100*time.Millisecond, 300*time.Millisecond)), 3)
	},
	"letters": func(d *drawer) part { // messages that come before, after and while they are awaited
		return d.seq(d.step(), d.fork(d.await(), d.await(), d.seq(d.step(), d.await())), d.await())
	},
	"post": func(d *drawer) part { // many messages at the time when they are awaited
		branches := make([]part, 6)
		for i := range branches {
			branches[i] = d.seq(d.step("ms", fmt.Sprint(40*i)), d.await())
		}
		return d.fork(branches...)
	},
	"office": func(d *drawer) part { return d.seq(d.step(), d.fork(d.human(), d.human())) },
	"saga": func(d *drawer) part {
		d.undoes = true
		return d.seq(d.step(), d.fork(d.seq(d.step(), d.step()), d.step(), d.step("ms", "300")), d.step(), d.failing())
	},
	"cut": func(d *drawer) part { // fails while other branches execute
		d.undoes = true
		return d.seq(d.step(), d.fork(d.seq(d.step(), d.step()), d.seq(d.step(), d.failing()), d.step("ms", "1500", "owes", "true")))
	},
	"regret": func(d *drawer) part { // undoes, and continues
		d.undoes = true
		before := d.seq(d.step(), d.fork(d.step(), d.step()), d.step())
		throw := d.add("T", node{"throw": node{"compensate": true}})
		undone := part{throw, throw, func(x *instance, _ int) {
			for name, n := range d.nodes {
				if n["undo"] != nil && x.expect[name][0] > 0 {
					x.add("undo "+name, x.expect[name][0], x.expect[name][1])
				}
			}
		}}
		return d.seq(before, undone, plainly(d))
	},
	"stubborn": func(d *drawer) part { // a step fails unexpectedly, and is retried; the others continue
		d.undoes = true
		bug, item := plainly(d, "breaks", "true"), d.step()
		d.nodes[bug.exit]["attempts"] = 2
		return d.seq(d.step(), d.fork(bug, d.seq(item, d.step())), d.step())
	},
	"detour": func(d *drawer) part { // a step fails, and an error edge takes the token
		bad, after := d.step("fail", "'declined'"), d.step()
		d.nodes[bad.exit]["to"], d.nodes[bad.exit]["on"] = after.entry, []node{{"error": "declined", "to": after.entry}}
		return part{bad.entry, after.exit, after.play}
	},
	"impatient": func(d *drawer) part { // nobody sends what it waits for
		after := d.step()
		return part{d.add("M", node{"await": node{"message": "chaos.never", "key": "input.tag"}, "to": after.entry,
			"on": []node{{"after": "400ms", "to": after.entry}}}), after.exit, after.play}
	},
	"race": func(d *drawer) part { // a signal, a message, or a timer
		after := d.step()
		d.nodes["o_signal"] = node{"await": node{"signal": "chaos.bell"}, "to": after.entry}
		d.nodes["o_message"] = node{"await": node{"message": "chaos.race", "key": "input.tag"}, "to": after.entry}
		d.nodes["o_time"] = node{"wait": "1500ms", "to": after.entry}
		return part{d.add("R", node{"race": []string{"o_signal", "o_message", "o_time"}}), after.exit, func(x *instance, passes int) {
			if x.random.IntN(2) == 0 {
				x.messages = append(x.messages, "chaos.race")
			}
			after.play(x, passes)
		}}
	},
	"first": func(d *drawer) part { // one branch is enough, and the others are ended
		after := d.step()
		join := d.add("J", node{"join": node{"need": 1, "rest": "cancel"}, "to": after.entry})
		a, b, c := d.step("ms", "50"), d.step("ms", "60"), d.step("ms", "2500")
		for _, p := range []part{a, b, c} {
			d.nodes[p.exit]["to"] = join
		}
		return part{d.add("F", node{"fork": []string{a.entry, b.entry, c.entry}}), after.exit, func(x *instance, passes int) {
			for _, p := range []part{a, b, c} {
				x.add(p.entry, 0, passes)
			}
			after.play(x, passes)
		}}
	},
	"inclusive": func(d *drawer) part {
		after := d.step()
		join := d.add("J", node{"join": "taken", "to": after.entry})
		var ways []node
		var flags []string
		var branches []part
		for range 3 {
			b, flag := d.step(), d.flag()
			d.nodes[b.exit]["to"] = join
			ways, flags, branches = append(ways, node{"if": "input." + flag, "to": b.entry}), append(flags, flag), append(branches, b)
		}
		other := d.step()
		d.nodes[other.exit]["to"] = join
		return part{d.add("O", node{"any": ways, "else": other.entry}), after.exit, func(x *instance, passes int) {
			none := true
			for i, b := range branches {
				if x.flag(flags[i]) {
					b.play(x, passes)
					none = false
				}
			}
			if none {
				other.play(x, passes)
			}
			after.play(x, passes)
		}}
	},
	"scope": func(d *drawer) part { // a failure inside ends everything that moves there
		inner := d.within()
		body := inner.fork(inner.step(), inner.seq(inner.step(), inner.step("fail", "'declined'", "ms", "30")), inner.step("ms", "1200"))
		d.joins = append(d.joins, inner.joins...)
		after := d.step()
		return part{d.add("C", node{"scope": node{"start": body.entry, "nodes": inner.nodes}, "on": []node{{"error": "declined", "to": after.entry}}, "to": after.entry}),
			after.exit, func(x *instance, passes int) {
				for _, name := range slices.Sorted(maps.Keys(inner.nodes)) {
					if inner.nodes[name]["do"] != nil {
						x.add(name, 0, passes)
					}
				}
				after.play(x, passes)
			}}
	},
	"thrown": func(d *drawer) part { // an error that comes from no run
		inner := d.within()
		before := inner.step()
		inner.nodes[before.exit]["to"] = inner.add("T", node{"throw": node{"error": "sour"}})
		slow := inner.step("ms", "900")
		body := inner.add("F", node{"fork": []string{before.entry, slow.entry}})
		after, never := d.step(), d.step()
		return part{d.add("C", node{"scope": node{"start": body, "nodes": inner.nodes}, "on": []node{{"error": "sour", "to": after.entry}}, "to": never.entry}),
			after.exit, func(x *instance, passes int) {
				before.play(x, passes)
				x.add(slow.entry, 0, passes)
				after.play(x, passes)
			}}
	},
	"over": func(d *drawer) part { // one branch ends everything
		first, slow := d.step("ms", "300"), d.step("ms", "300")
		d.nodes[first.exit]["to"] = d.add("T", node{"terminate": true})
		later := d.step()
		d.nodes[slow.exit]["to"] = later.entry
		return part{d.add("F", node{"fork": []string{first.entry, slow.entry}}), later.exit, func(x *instance, passes int) {
			first.play(x, passes)
			x.add(slow.entry, 0, passes)
			x.add(later.entry, 0, passes)
		}}
	},
	"reminded": func(d *drawer) part { // timers that do not interrupt the waiting
		waiting, every, once, after := d.await(), d.step(), d.step(), d.step()
		d.nodes[waiting.exit]["to"] = after.entry
		d.nodes[waiting.exit]["on"] = []node{{"every": "1s", "times": 3, "to": every.entry}, {"after": "700ms", "keep": true, "to": once.entry}}
		return part{waiting.entry, after.exit, func(x *instance, passes int) {
			waiting.play(x, passes)
			x.add(every.entry, 0, 3*passes)
			x.add(once.entry, 0, passes)
			after.play(x, passes)
		}}
	},
	"list": func(d *drawer) part {
		name := d.add("E", nil)
		d.nodes[name] = node{"each": node{"list": "input.items", "do": "chaos.step", "limit": 3}, "attempts": 100,
			"in": map[string]string{"tag": "input.tag", "node": "'" + name + "'", "ms": "item"}}
		each := part{name, name, func(x *instance, passes int) {
			items := make([]int, x.random.IntN(9))
			for i := range items {
				items[i] = 1 + x.random.IntN(50)
			}
			x.input["items"] = items
			x.add(name, passes*len(items), passes*len(items))
		}}
		return d.seq(d.step(), each, d.step())
	},
	"child": func(d *drawer) part {
		return d.fork(d.step(), d.step())
	},
	"naps": func(d *drawer) part { // long enough to be paused with its caller, and to be due before that is resumed
		all := []part{d.step()}
		for range 5 {
			all = append(all, d.wait(300*time.Millisecond, 700*time.Millisecond), d.step())
		}
		return d.seq(all...)
	},
	"parent": func(d *drawer) part {
		return d.seq(d.step(), d.fork(d.call("child", "none"), d.call("naps", "none")), d.step())
	},
	"lent": func(d *drawer) part { // its steps are undone when its caller fails
		d.undoes = true
		return d.seq(d.step(), d.fork(d.step(), d.step()), d.step())
	},
	"lender": func(d *drawer) part {
		d.undoes = true
		return d.seq(d.step(), d.call("lent", "propagate"), d.step(), d.call("lent", "propagate"), d.failing())
	},
}

// call draws a call of a process that is only called.
func (d *drawer) call(process, undo string) part {
	name := d.add("K", nil)
	d.nodes[name] = node{"call": node{"process": process, "undo": undo}, "in": map[string]string{"tag": "input.tag + '/" + name + "'"}}
	return part{name, name, func(*instance, int) {}}
}

// called are the processes that others call.
var called = []string{"child", "naps", "lent"}

// failing draws a step that fails for good if the input says so.
func (d *drawer) failing() part {
	p := plainly(d, "fail", "input.fail ? 'declined' : ''")
	return part{p.entry, p.exit, func(x *instance, passes int) {
		fail := x.random.IntN(3) > 0
		if x.input["fail"] = fail; fail {
			x.ends = "FAILED"
		}
		p.play(x, passes)
	}}
}

// plainly draws a step with nothing to undo.
func plainly(d *drawer, in ...string) part {
	undoes := d.undoes
	d.undoes = false
	defer func() { d.undoes = undoes }()
	return d.step(in...)
}

// drawProcesses draws all graphs of a torture run: the fixed ones, and some at random.
func drawProcesses(r *rand.Rand) (all []process) {
	for _, name := range slices.Sorted(maps.Keys(fixed)) {
		d := newDrawer(r, name)
		p := d.done(fixed[name](d))
		p.called = slices.Contains(called, name)
		all = append(all, p)
	}
	for i := range 10 {
		d := newDrawer(r, fmt.Sprintf("random%d", i))
		if d.undoes = i%3 == 0; d.undoes {
			all = append(all, d.done(d.seq(d.step(), d.any(2), d.any(2), d.failing())))
			continue
		}
		all = append(all, d.done(d.seq(d.any(2), d.any(3), d.step())))
	}
	return all
}

// drawInstance draws an instance of one of the processes.
func drawInstance(r *rand.Rand, all []process, favoured string) *instance {
	id := newID(r)
	p := all[r.IntN(len(all))]
	for p.called {
		p = all[r.IntN(len(all))]
	}
	if i := slices.IndexFunc(all, func(p process) bool { return p.name == favoured }); i >= 0 && r.IntN(2) == 0 {
		p = all[i]
	}
	x := &instance{tag: id.String(), process: p.name, random: r, ends: "COMPLETED", input: map[string]any{"tag": id.String()}, expect: map[string][2]int{}}
	if r.IntN(5) == 0 {
		x.key = "key of " + x.tag
	}
	p.play(x)
	return x
}

// starts are the runs that start the instance; with a key there may be several with the same key.
func (x *instance) starts() (all []order) {
	payload := map[string]any{"process": x.process, "input": x.input}
	copies := 1
	if x.key == "" {
		payload["id"] = x.tag
	} else {
		payload["key"] = x.key
		copies = 2 + x.random.IntN(2)
	}
	for range copies {
		all = append(all, graphOrder(newID(x.random), "start", "graph.start.v1", payload))
	}
	return all
}

// letters are the messages that it waits for.
func (x *instance) letters() (all []order) {
	for _, name := range x.messages {
		o := graphOrder(newID(x.random), "message", "graph.message.v1", map[string]any{
			"name": name, "key": x.tag, "id": name + " " + x.tag, "payload": map[string]any{"text": "\u00e4"}})
		longest := 4 * time.Second
		if x.process == "post" {
			longest = 400 * time.Millisecond
		}
		if o.delay = 0; x.random.IntN(2) == 0 {
			o.delay = between(x.random, 0, longest)
		}
		all = append(all, o)
		if x.random.IntN(8) == 0 { // the sender is not sure, and sends it again
			o.id = newID(x.random)
			all = append(all, o)
		}
	}
	return all
}

// graphOrder is a run that is a command to the engine.
func graphOrder(id uuid.UUID, name, typ string, payload any) order {
	text, err := json.Marshal(payload)
	if err != nil {
		panic(err) // words and numbers
	}
	return order{id: id, name: name, typ: typ, payload: text, maxAttempts: 100, copies: 1, quiet: !strings.HasPrefix(typ, "graph.start.")}
}
