package graph

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// A Play is an instance that lives in memory. Between two decisions of the core it does what the shell does in the
// database.
type Play struct {
	Story []string // the text of each decision

	i        *instance
	tokens   []*token
	numbers  map[*token]int
	arrivals map[*joining][]*token
	lists    map[*progress][]json.RawMessage
	open     []open // the events that may happen next
	records  []*owed
	runs     int

	narrow bool // each decision knows only what would be loaded for it
	facts  map[string]any
	joins  map[joinKey]*joining
	has    map[*joining]map[string]bool
}

// An open is an event that may happen: the end of a run, a message, the completion of a task, or the end of a called
// instance.
type open struct {
	token *token
	place string
	kind  string
	owed  *owed // for an undo step: the record that it undoes
}

// An owed is a compensation record. given: its undo step was started.
type owed struct {
	record
	undone, given bool
}

// NewNarrowPlay starts an instance in which each decision knows only what the shell would load for the tokens that are
// settled.
func NewNarrowPlay(d *Definition, input map[string]any) (*Play, error) {
	p, err := NewPlay(d, input)
	if err == nil {
		p.narrow = true
	}
	return p, err
}

// NewPlay starts an instance in which each decision knows everything.
func NewPlay(d *Definition, input map[string]any) (*Play, error) {
	process, _, err := Compile(d)
	if err != nil {
		return nil, err
	}
	p := &Play{i: newInstance(), numbers: map[*token]int{}, arrivals: map[*joining][]*token{}, lists: map[*progress][]json.RawMessage{}}
	p.i.process, p.i.status, p.i.facts.input = process, statusCreated, input
	if p.i.input, err = json.Marshal(input); err != nil {
		return nil, err
	}
	if err := p.i.begin(); err != nil {
		return nil, err
	}
	return p, p.commit()
}

// Tokens returns how many tokens the instance has had.
func (p *Play) Tokens() int { return len(p.tokens) }

// Next makes one or more open events, which choose draws, happen in one decision. It reports whether there was an open
// event.
func (p *Play) Next(choose func(n int) int) (bool, error) {
	if p.i.status.final() || len(p.open) == 0 {
		return false, nil
	}
	var batch []open
	for len(p.open) > 0 && (len(batch) == 0 || choose(3) == 0) {
		k := choose(len(p.open))
		batch = append(batch, p.open[k])
		p.open = slices.Delete(p.open, k, k+1)
	}
	if p.narrow {
		p.forget(batch)
	}
	for _, o := range batch {
		if !p.i.status.final() && p.i.ending == "" && choose(40) == 0 {
			p.i.conclude(statusCancelled, "no more", choose(2) == 0)
		}
		p.happen(choose, o)
	}
	if p.narrow {
		p.remember()
	}
	return true, p.commit()
}

// Do executes a command in one decision: done NODE [RESULT], fail NODE CODE [declared], happens NODE PLACE, undone,
// retry NODE CODE, or cancel [undo]; or several commands, separated by semicolons. PLACE names what is attached to the
// node, such as on/0 or race/1.
func (p *Play) Do(line string) error {
	for _, command := range strings.Split(line, ";") {
		word := append(strings.SplitN(strings.TrimSpace(command), " ", 4), "", "", "", "")
		verb, node, third, fourth := word[0], word[1], word[2], word[3]
		take := func(fits func(open) bool) (*open, error) {
			k := slices.IndexFunc(p.open, fits)
			if k < 0 {
				return nil, fmt.Errorf("%s: nothing like that can happen now", command)
			}
			o := p.open[k]
			p.open = slices.Delete(p.open, k, k+1)
			return &o, nil
		}
		main := func(o open) bool { return o.kind != "undo" && o.place == mainPlace && o.token.node.name == node }
		var o *open
		var err error
		switch verb {
		case "done":
			if o, err = take(main); err == nil {
				p.runs++
				p.i.done(o.token, uuid.UUID{byte(p.runs)}, json.RawMessage(cmp.Or(strings.TrimSpace(third+" "+fourth), "{}")))
			}
		case "fail":
			if o, err = take(main); err == nil {
				p.i.failed(o.token, problem{code: third, message: "it was told to fail", declared: fourth == "declared"})
			}
		case "happens":
			if o, err = take(func(o open) bool { return o.place == third && o.token.node.name == node }); err == nil {
				p.happen(func(int) int { return 1 }, *o)
			}
		case "undone":
			if o, err = take(func(o open) bool { return o.kind == "undo" }); err == nil {
				p.happen(func(int) int { return 1 }, *o)
			}
		case "retry":
			for _, t := range p.tokens {
				if t.stopped && t.node.name == node {
					p.i.retry(t, third, false)
				}
			}
		case "cancel":
			p.i.conclude(statusCancelled, "no more", node == "undo")
		default:
			err = fmt.Errorf("%s: what is that?", command)
		}
		if err != nil {
			return err
		}
	}
	return p.commit()
}

// forget removes from the instance what would not be loaded for a batch.
func (p *Play) forget(batch []open) {
	edges, reads, joins, all := map[string]bool{}, map[string]bool{}, map[string]bool{}, p.i.process.survey
	for _, o := range batch {
		a := o.token.node.ahead()
		for _, e := range a.edges {
			edges[e] = true
		}
		for _, name := range a.reads {
			reads[name] = true
		}
		for _, j := range a.joins {
			joins[j.name] = true
		}
	}
	p.facts, p.joins, p.has = maps.Clone(p.i.facts.steps), maps.Clone(p.i.joins), map[*joining]map[string]bool{}
	maps.DeleteFunc(p.i.facts.steps, func(name string, _ any) bool { return !reads[name] })
	for key, j := range p.i.joins {
		if !all && !joins[key.node] {
			delete(p.i.joins, key)
		}
		p.has[j] = maps.Clone(j.has)
		maps.DeleteFunc(j.has, func(edge string, _ bool) bool { return !edges[edge] })
		if !slices.ContainsFunc(j.node.incoming, func(e *edge) bool { return edges[e.id] }) && !j.node.Join.Taken {
			clear(j.waiting) // no token of the batch can arrive
		}
	}
}

// remember restores what forget has removed.
func (p *Play) remember() {
	maps.Copy(p.facts, p.i.facts.steps)
	p.i.facts.steps = p.facts
	for key, j := range p.joins {
		if p.i.joins[key] == nil {
			p.i.joins[key] = j
		}
	}
	for j, had := range p.has {
		maps.Copy(j.has, had)
	}
}

// happen makes an event happen; choose draws whether a step fails.
func (p *Play) happen(choose func(n int) int, o open) {
	p.runs++
	run := uuid.UUID{byte(p.runs >> 8), byte(p.runs)}
	at := position{At: o.place, Tick: 1}
	if o.owed != nil {
		o.owed.undone = true
	}
	switch {
	case p.i.passed(o.token): // the event is late
	case o.kind == "undo":
		p.debt(o.token)
		p.i.undone(o.token, run, 0)
	case o.place != mainPlace:
		p.i.happens(o.token, at, run, json.RawMessage(`{}`))
	case o.kind == "step" && choose(20) == 0:
		p.i.failed(o.token, problem{code: "bad", message: "it was told to fail", declared: choose(2) == 0})
	default:
		p.i.done(o.token, run, json.RawMessage(`{"n": 1}`))
	}
}

// debt sets which record a token undoes next, as askDebts does.
func (p *Play) debt(t *token) {
	clear(p.i.debts)
	p.i.undoing = false
	for n, o := range p.records {
		if !o.undone && !o.given {
			p.i.debts[t] = uuid.UUID{1, byte(n)} // not zero
		}
		p.i.undoing = p.i.undoing || o.given && !o.undone
	}
}

// commit does what writing and loading the instance would do, and checks its counts.
func (p *Play) commit() error {
	i, c := p.i, p.i.changes
	for _, t := range c.tokens {
		if _, known := p.numbers[t]; !known {
			p.tokens = append(p.tokens, t)
			p.numbers[t] = len(p.tokens)
		}
	}
	p.tell()
	for _, a := range c.arrivals {
		if !a.surplus {
			p.arrivals[a.join] = append(p.arrivals[a.join], a.token)
		}
	}
	for _, t := range p.tokens {
		if alive(t.state) > 0 && (c.ended || c.endedBut != nil && c.endedBut != t) {
			t.state, t.joining = tokenTerminated, false
		}
	}
	for _, j := range c.joins {
		for _, t := range p.arrivals[j] {
			if j.fires && t.state == tokenWaiting {
				t.state, t.joining = tokenCompleted, false
			}
		}
		j.listed, j.fires = false, false
	}
	for _, j := range i.joins {
		j.waiting = map[*group]int{}
		for _, t := range p.arrivals[j] {
			if t.state == tokenWaiting {
				j.waiting[t.group]++
			}
		}
	}
	if err := p.attached(); err != nil {
		return err
	}
	i.loaded = nil
	ticking := map[*token]bool{}
	for _, o := range p.open {
		if o.kind == "timer" {
			ticking[o.token] = true
		}
	}
	for _, t := range p.tokens {
		t.ticks = ticking[t]
		t.listed, t.gone, t.purePath, t.from = false, false, 0, t.node
		t.version++
		if i.process.survey && alive(t.state) > 0 {
			i.loaded = append(i.loaded, t)
		}
	}
	for _, g := range c.groups {
		g.listed, g.fresh = false, false
	}
	for _, e := range i.eaches {
		if e.all != nil {
			var all []json.RawMessage
			if err := json.Unmarshal(e.all, &all); err != nil {
				return err
			}
			p.lists[e] = all
		}
		e.group.restOfList = e.over
		e.items, e.from, e.all, e.changed = p.lists[e][e.next:], e.next, nil, false
	}
	i.changes, i.drains, i.moves = changes{}, nil, 0
	return p.balanced()
}

// attached updates the open events: it adds those that the decision began, and removes those of tokens that left or
// ended.
func (p *Play) attached() error {
	c := p.i.changes
	gone := map[*token]bool{}
	for _, t := range c.detached {
		gone[t] = true
	}
	p.open = filter(p.open, func(o open) bool {
		if !gone[o.token] && alive(o.token.state) > 0 {
			return true
		}
		if o.owed != nil {
			o.owed.given = false
		}
		return false
	})
	for _, r := range c.records {
		p.records = append(p.records, &owed{record: r})
	}
	add := func(t *token, place, kind string, o *owed) {
		if alive(t.state) > 0 {
			p.open = append(p.open, open{t, place, kind, o})
		}
	}
	for _, s := range c.steps {
		var at position
		kind := "step"
		switch s.typ {
		case timerType:
			kind = "timer"
			_ = json.Unmarshal(s.payload, &at)
		case undoType:
			kind = "undo"
		}
		add(s.token, at.At, kind, nil)
	}
	for _, u := range c.undo {
		if alive(u.token.state) == 0 {
			return fmt.Errorf("a token that is %s undoes %s", u.token.state, p.records[u.record[1]].node.name)
		}
		o := p.records[u.record[1]]
		o.given = true
		add(u.token, mainPlace, "undo", o)
	}
	for _, s := range c.waits {
		add(s.token, s.place, "message", nil)
	}
	for _, k := range c.tasks {
		add(k.token, mainPlace, "task", nil)
	}
	for _, k := range c.children {
		add(k.token, mainPlace, "child", nil)
	}
	return nil
}

// tell adds to the story everything that the decision writes. Tokens appear as numbers, in the order in which they were
// made.
func (p *Play) tell() {
	var all []string
	say := func(format string, args ...any) { all = append(all, strings.TrimSpace(fmt.Sprintf(format, args...))) }
	i, c := p.i, p.i.changes
	say("%s live %d ready %d joining %d incidents %d", i.status, i.live, i.ready, i.joining, i.incidents)
	if c.ended {
		say("all others end")
	} else if c.endedBut != nil {
		say("all end but %d", p.numbers[c.endedBut])
	}
	for _, h := range c.history {
		say("history    %s to %s %s", h.from, h.to, h.reason)
	}
	for _, g := range c.groups {
		say("group      of %s, live %d", g.node, g.live)
	}
	for _, t := range c.tokens {
		how := "by " + t.edge
		if t.hasItem {
			how = fmt.Sprintf("for element %d", t.item)
		}
		say("token      %d at %s %s is %s", p.numbers[t], t.node.name, how, t.state)
	}
	for _, j := range c.joins {
		of := ""
		if j.expected > 0 {
			of = fmt.Sprintf(" of %d", j.expected)
		}
		say("join       %s round %d has %d%s%s", j.node.name, j.round, j.joined, of, map[bool]string{true: ", fired"}[j.fired])
	}
	for _, a := range c.arrivals {
		say("arrival    of %d by %s%s", p.numbers[a.token], a.edge, map[bool]string{true: ", for the next round"}[a.surplus])
	}
	for _, s := range c.steps {
		say("run        of %d at %s: %s %s", p.numbers[s.token], s.node, s.typ, s.payload)
	}
	for _, s := range c.waits {
		say("wait       of %d, %s: for %s", p.numbers[s.token], s.place, s.name)
	}
	for _, k := range c.tasks {
		say("task       of %d", p.numbers[k.token])
	}
	for _, k := range c.children {
		say("child      of %d", p.numbers[k.token])
	}
	for _, t := range c.detached {
		say("left       by %d", p.numbers[t])
	}
	for k, r := range c.records {
		say("record     %d, that %s is done", len(p.records)+k+1, r.node.name)
	}
	for _, u := range c.undo {
		say("undo       record %d, of %s", u.record[1]+1, p.records[u.record[1]].node.name)
	}
	for _, x := range c.incidents {
		say("incident   at %s: %s, %s", x.node, x.code, x.message)
	}
	for _, e := range c.events {
		of, data := "", ""
		if e.token != nil {
			of = fmt.Sprintf(" of %d", p.numbers[e.token])
		}
		if len(e.data) > 0 {
			data = fmt.Sprint(" ", e.data)
		}
		say("event      %s%s at %s%s", e.name, of, e.node, data)
	}
	p.Story = append(p.Story, strings.Join(all, "\n"))
}

// balanced returns an error if the counts of the instance and its groups differ from the numbers of tokens, or if the
// instance is open but nothing can happen and no incident says why.
func (p *Play) balanced() error {
	live, ready, joining := 0, 0, 0
	groups, within := map[*group]int{}, map[*group]bool{}
	for _, t := range p.tokens {
		live += alive(t.state)
		ready += count(t.state == tokenReady)
		if t.group != nil {
			groups[t.group] += alive(t.state)
		}
		for g := t.group; g != nil; g = g.parent {
			within[g] = true
		}
	}
	for _, j := range p.i.joins {
		for _, t := range j.surplus {
			joining += alive(t.state)
		}
		for _, t := range p.arrivals[j] {
			joining += alive(t.state)
		}
	}
	if i := p.i; live != i.live || ready != i.ready || joining != i.joining {
		return fmt.Errorf("live %d, ready %d, joining %d: counted %d, %d, %d", live, ready, joining, i.live, i.ready, i.joining)
	}
	if p.i.status.final() != (live == 0) {
		return fmt.Errorf("%d live tokens in a %s instance", live, p.i.status)
	}
	if p.i.status.final() || p.i.ending != "" { // the groups of an ending instance are not counted any more
		return nil
	}
	for g := range within {
		if g.parent != nil {
			groups[g.parent] += count(g.live > 0)
		}
	}
	for g := range maps.Keys(within) {
		if g.live != groups[g] {
			return fmt.Errorf("group of %s: %d live, counted %d", g.node, groups[g], g.live)
		}
	}
	if len(p.open) == 0 && p.i.incidents == 0 {
		return fmt.Errorf("nothing can move, and no incident says why")
	}
	return nil
}

// Stopped returns the nodes of the live tokens that an incident stops.
func (p *Play) Stopped() (nodes []string) {
	for _, t := range p.tokens {
		if t.stopped && alive(t.state) > 0 {
			nodes = append(nodes, t.node.name)
		}
	}
	return nodes
}

// Retry retries the incidents of the tokens at a node.
func (p *Play) Retry(node, code string) error {
	for _, t := range p.tokens {
		if t.stopped && t.node.name == node {
			p.i.retry(t, code, false)
		}
	}
	return p.commit()
}

// FailAndCancel fails the step at a node and cancels the instance, in one decision. It returns how many incidents are
// left open.
func (p *Play) FailAndCancel(node string) (incidents int, err error) {
	for _, t := range p.tokens {
		if t.node.name == node && alive(t.state) > 0 {
			p.i.failed(t, problem{code: "no", message: "it was told to fail", declared: true})
		}
	}
	p.i.conclude(statusCancelled, "no more", false)
	return p.i.incidents + len(p.i.changes.incidents), p.commit()
}

// ChooseAndCancel lets a token choose what to undo next, and cancels the instance, in one decision. It reports whether
// the undo step is started.
func (p *Play) ChooseAndCancel(compensate bool) (begun bool) {
	for _, o := range p.open {
		if o.kind == "undo" {
			p.debt(o.token)
			p.i.undone(o.token, uuid.UUID{1}, 0)
			p.i.conclude(statusCancelled, "no more", compensate)
			return len(p.i.changes.undo) > 0
		}
	}
	panic("nobody is about to undo anything")
}
