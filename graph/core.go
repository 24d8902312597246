package graph

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

// The core: what an instance is, as far as it has to be known, and how one event changes it.
// It knows no database, no clock, and draws no ids: what is new has none until it is written.

// Status of an instance.
type Status string

// The states of an instance. WAITING means that nothing of it is due or runs.
const (
	Created    Status = "CREATED"
	InProgress Status = "IN_PROGRESS"
	Waiting    Status = "WAITING"
	Completed  Status = "COMPLETED"
	Failed     Status = "FAILED"
	Cancelled  Status = "CANCELLED"
)

// Final reports whether the instance is over.
func (s Status) Final() bool { return s == Completed || s == Failed || s == Cancelled }

type tokenState string

const (
	tokenReady      tokenState = "Ready"
	tokenWaiting    tokenState = "Waiting"
	tokenCompleted  tokenState = "Completed"
	tokenFailed     tokenState = "Failed"
	tokenTerminated tokenState = "Terminated"
)

// timerType is the run that lets a token wait.
const timerType = "graph.timer.v1"

// maxMoves is how many nodes the tokens of an instance may enter in one decision.
const maxMoves = maxNodes + 2_000

// maxPureSteps is how many gateways and joins a token may pass in one decision.
const maxPureSteps = 1000

// An instance is as much of a process instance as a decision needs, and what it has changed.
type instance struct {
	id       uuid.UUID
	process  *Process
	status   Status
	priority int
	paused   bool
	input    json.RawMessage
	facts    facts // of the nodes that may be read

	depth  int // of calls: 0 for one that nobody has called
	parent *parentRef

	live, ready, joining, incidents int

	ending       Status // what it becomes once everything is undone; empty: it is not ending
	endingReason string
	debt         uuid.UUID // the record that is undone next; zero: nothing is owed, as far as was asked
	undoing      bool      // an undo step is under way

	moves  int // nodes entered in this decision
	eaches []*progress
	drains []*group // groups whose last token has ended, in this decision

	joins       map[joinKey]*joining // those that may be arrived at
	activations int                  // how many of them there have been
	others      []*token             // all live tokens not in the batch; only if the process needs them

	failure string
	output  json.RawMessage

	changes changes
}

// changes are what is to be written.
type changes struct {
	touched   bool // anything at all
	tokens    []*token
	groups    []*group
	joins     []*joining
	arrivals  []arrival
	steps     []step
	waits     []subscription
	tasks     []task
	children  []child
	left      []*token // whose attached runs, waits, tasks and children go
	records   []record
	undo      []undo
	undone    []runRef
	notUndone []runRef
	undoAgain bool // records of undo steps that have failed are renewed
	incidents []incident
	events    []event
	history   []transition
	ended     bool   // all live tokens that are not among tokens end, and their runs
	endedBut  *token // the same, but this one stays
	unknown   bool   // steps whose outcome nobody knows are to be undone, too
}

// runRef refers to a run.
type runRef = uuid.UUID

// A parentRef is the token that waits for an instance.
type parentRef struct {
	token uuid.UUID
	visit int64
}

type tokenMode string

const (
	forward      tokenMode = "Forward"
	compensation tokenMode = "Compensation"
)

// A token marks one path of an instance.
type token struct {
	id       uuid.UUID // zero: new
	node     *node
	from     *node // where it was before this decision; nil: it is new
	edge     string
	state    tokenState
	group    *group
	mode     tokenMode
	version  int64
	item     int // the index of the element it is for
	hasItem  bool
	joining  bool // it waits at a join
	stopped  bool // it has an open incident
	gone     bool // it has left its node in this batch: what was on its way there comes too late
	listed   bool // it is among the changes
	purePath int
}

// A group is what one execution of a fork opened.
type group struct {
	id     uuid.UUID // zero: new
	parent *group
	node   string
	live   int    // its live tokens, and groups in it that have any
	host   *token // the token that stands for it at a scope or each; nil: it is of a fork
	ended  bool   // its end leads nobody on
	fresh  bool
	listed bool
}

func (g *group) within(outer *group) bool {
	for ; g != nil; g = g.parent {
		if g == outer {
			return true
		}
	}
	return outer == nil
}

type joinKey struct {
	node  string
	group *group
}

// A joining is one activation of a join.
type joining struct {
	id       uuid.UUID // zero: new
	place    int       // among the activations of the instance, as far as they are known
	node     *node
	group    *group
	round    int
	expected int
	joined   int
	fired    bool
	has      map[string]bool // edges over which one has come, as far as they matter now
	waiting  map[*group]int  // arrivals that count, by their tokens' groups
	surplus  []*token        // for the next round
	came     []*token        // arrivals that count, of this decision
	fires    bool            // in this decision
	listed   bool
}

type arrival struct {
	join    *joining
	token   *token
	edge    string
	surplus bool
}

// A step is a run to be enqueued.
type step struct {
	token       *token
	node        string
	typ         string
	payload     json.RawMessage
	attempts    int
	delay       time.Duration
	until       string // RFC 3339; empty: after delay
	tick        *tick  // of a timer that fires time and again
	afterLeases bool   // not before leases that were cut off have run out
}

// A tick is one firing of a timer that fires time and again.
type tick struct {
	number int
	period time.Duration
	after  runRef // the run of the tick before; zero: this is the first
}

func (t *tick) count() int {
	if t == nil {
		return 0
	}
	return t.number
}

// A position is the payload of the engine's own runs that belong to a token: where at its node
// they happen.
type position struct {
	At      string    `json:"at,omitzero"`
	Tick    int       `json:"tick,omitzero"`
	Visit   int64     `json:"visit,omitzero"`   // of the token's, if nothing else keeps it from being late
	Message uuid.UUID `json:"message,omitzero"` // that has come
	Signal  uuid.UUID `json:"signal,omitzero"`  // the run that has sent it
	Child   uuid.UUID `json:"child,omitzero"`   // the instance that is over
}

func (p position) json() json.RawMessage {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // words and numbers
	}
	return text
}

type incident struct {
	token         *token
	node          string
	code, message string
}

type event struct {
	token *token
	name  string
	node  string
	data  map[string]any
}

type transition struct {
	from, to Status
	reason   string
}

// begin places the first token.
func (i *instance) begin() {
	i.changes.touched = true
	t := i.place(nil)
	i.follow(t, &edge{id: ">" + i.process.start.name, to: i.process.start})
	i.settle()
}

// done moves a token whose step, by this run, has succeeded.
func (i *instance) done(t *token, run runRef, result json.RawMessage) {
	i.changes.touched = true
	if t.hasItem {
		i.itemDone(t)
		i.settle()
		return
	}
	i.owes(t.node, run)
	f, err := fact(t.node, result)
	if err != nil {
		i.stop(t, "mapping_failed", err.Error())
		i.settle()
		return
	}
	i.facts.steps[t.node.name] = f
	i.event(t, "node.completed", nil)
	if t.node.attached() {
		i.left(t)
	}
	i.leave(t, t.node.next)
	i.settle()
}

// failed moves a token whose step has failed for good: over an error edge, or into the failure
// of the instance.
func (i *instance) failed(t *token, code, message string) {
	i.changes.touched = true
	if !t.hasItem {
		i.facts.steps[t.node.name] = failure(code, message)
	}
	i.event(t, "node.failed", map[string]any{"code": code})
	i.raise(t, code, fmt.Sprintf("%s: %s: %s", t.node.name, code, message))
	i.settle()
}

// raise has an error taken by the innermost edge for it: of the node, of what it lies within, and
// so on; if there is none, the instance fails.
func (i *instance) raise(t *token, code, reason string) {
	if e := t.node.errorEdge(code); e != nil && !t.hasItem {
		i.left(t)
		i.follow(t, e)
		return
	}
	for g := t.group; g != nil; g = g.parent {
		if g.host == nil {
			continue
		}
		if e := g.host.node.errorEdge(code); e != nil {
			g.ended = true // t may be the last in it
			i.setState(t, tokenFailed)
			i.left(g.host)
			i.endInside(g.host)
			i.follow(g.host, e)
			return
		}
	}
	i.fail(t, reason)
}

func (n *node) errorEdge(code string) *edge {
	for _, h := range n.handlers {
		if h.Error == code || h.Error == "*" {
			return h.edge
		}
	}
	return nil
}

// cancel ends the instance for good.
func (i *instance) cancel(reason string, undo bool) {
	i.changes.touched = true
	if undo && i.process.undoes {
		t := i.place(nil)
		t.node = i.process.start
		i.compensate(t, Cancelled, reason)
	} else {
		i.endAs(Cancelled, reason)
	}
	i.settle()
}

// retry lets a token that an incident stopped try again.
func (i *instance) retry(t *token) {
	i.changes.touched = true
	i.resolve(t)
	switch {
	case t.joining: // whether the others can come now is found out below
	case t.mode == compensation:
		i.setState(t, tokenReady)
		i.changes.undoAgain = true
		i.askDebt(t)
	default:
		i.left(t)
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
}

// hosts counts the tokens that stand for others in a scope: they move when these do. With scopes
// every live token is known.
func (i *instance) hosts() (n int) {
	if !i.process.survey {
		return 0
	}
	seen := map[*token]bool{}
	for _, t := range slices.Concat(i.others, i.changes.tokens) {
		if t.node.kind == scope && alive(t.state) > 0 && !t.stopped && t.mode == forward && !seen[t] && len(t.node.handlers) == 0 {
			seen[t] = true
			n++
		}
	}
	return n
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

// follow leads a token over an edge.
func (i *instance) follow(t *token, e *edge) {
	t.node, t.edge = e.to, e.id
	i.enter(t)
}

// leave leads a token on, or ends it where there is no edge.
func (i *instance) leave(t *token, e *edge) {
	if e == nil {
		i.complete(t)
		return
	}
	i.follow(t, e)
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
	if n.pure() {
		if t.purePath++; t.purePath > maxPureSteps {
			i.stop(t, "loop_limit", fmt.Sprintf("passed %d gateways and joins without a step in between", maxPureSteps))
			return
		}
	}
	switch n.kind {
	case do:
		i.startStep(t)
	case wait:
		i.startTimer(t)
	case await:
		i.await(t)
	case race:
		i.race(t)
	case human:
		i.human(t)
	case call:
		i.call(t)
	case each:
		i.enterEach(t)
	case scope:
		i.enterScope(t)
	case choose:
		i.choose(t)
	case anyOf:
		i.split(t)
	case fork:
		i.fork(t, n.branches)
	case join:
		i.arrive(t)
	case end:
		i.complete(t)
	case terminate:
		i.terminate(t)
	case throw:
		if n.Throw.Compensate {
			i.compensate(t, "", "")
			return
		}
		i.raise(t, n.Throw.Error, fmt.Sprintf("%s: %s", n.name, n.Throw.Error))
	}
}

// terminate ends all else in the scope that the token is in, or in the instance.
func (i *instance) terminate(t *token) {
	for g := t.group; g != nil; g = g.parent {
		if g.host != nil {
			i.endInside(g.host)
			i.setState(t, tokenCompleted)
			i.drains = append(i.drains, g)
			g.ended = false
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

// explode fails an instance whose tokens multiply, or go round, without end. None of the new ones
// is ever written.
func (i *instance) explode(t *token) {
	reason := fmt.Sprintf("%s: tokens enter more than %d nodes without a step in between", t.node.name, maxMoves)
	c := &i.changes
	c.incidents = nil // there may be thousands, and each that is resolved would be looked for
	i.endAs(Failed, reason)
	c.tokens = filter(c.tokens, func(t *token) bool { return t.version > 0 })
	c.groups = filter(c.groups, func(g *group) bool { return !g.fresh })
	c.joins, c.arrivals, c.events, c.incidents, c.left, i.eaches = nil, nil, nil, nil, nil, nil
	c.ended = true
}

func (i *instance) startStep(t *token) {
	n := t.node
	payload := i.given(t)
	if payload == nil {
		return
	}
	i.setState(t, tokenReady)
	i.event(t, "node.entered", nil)
	if !i.attach(t) {
		return
	}
	i.changes.steps = append(i.changes.steps, step{token: t, node: n.name, typ: n.Do, payload: payload, attempts: n.Attempts})
}

func (i *instance) startTimer(t *token) {
	n, until := t.node, ""
	if n.until != nil {
		var err error
		if until, err = i.time(n); err != nil {
			i.stop(t, "expression_failed", err.Error())
			return
		}
	}
	i.waits(t)
	i.timer(t, mainPlace, n.name, time.Duration(n.Wait.For), nil)
	i.changes.steps[len(i.changes.steps)-1].until = until
	i.attach(t)
}

// time evaluates until when to wait.
func (i *instance) time(n *node) (at string, err error) {
	value, err := n.until.value(i.facts)
	if err == nil {
		err = json.Unmarshal(value, &at)
	}
	if err == nil {
		_, err = time.Parse(time.RFC3339, at)
	}
	if err != nil {
		return "", fmt.Errorf("%s: no time in RFC 3339: %w", n.until.text, err)
	}
	return at, nil
}

// fits returns a payload unless it is too large.
func (i *instance) fits(t *token, payload json.RawMessage) json.RawMessage {
	// Postgres counts the document with a blank after each colon and comma.
	if size := len(payload) + bytes.Count(payload, []byte{':'}) + bytes.Count(payload, []byte{','}); size > maxPayload {
		i.stop(t, "payload_too_large", fmt.Sprintf("%d bytes, the limit is %d; pass a reference to large data", size, maxPayload))
		return nil
	}
	if bytes.Contains(payload, []byte(`\u0000`)) {
		i.stop(t, "expression_failed", "the payload holds the character \\u0000, which Postgres cannot store")
		return nil
	}
	return payload
}

// maxPayload is the limit of a run's payload in bytes.
const maxPayload = 256 << 10

// maxTimerAttempts is more than a timer needs: its handler does nothing.
const maxTimerAttempts = 1000

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

// fork opens a group with a token for each branch; the one that came is done.
func (i *instance) fork(t *token, branches []*edge) {
	g := &group{parent: t.group, node: t.node.name, fresh: true}
	tokens := make([]*token, len(branches))
	for k := range branches {
		tokens[k] = i.place(g)
		tokens[k].purePath = t.purePath
	}
	i.setState(t, tokenCompleted) // after its children are there: nothing looks finished in between
	for k, e := range branches {
		i.follow(tokens[k], e)
	}
}

// passed reports whether what is settled now comes too late for a token: it, or its instance, has
// gone on, or come to its end, in this batch or before.
func (i *instance) passed(t *token) bool {
	return t.gone || alive(t.state) == 0 || i.status.Final() || i.changes.endedBut != nil && i.changes.endedBut != t
}

// place makes a new token.
func (i *instance) place(g *group) *token {
	t := &token{group: g, state: tokenCompleted, mode: forward, node: i.process.start}
	i.setState(t, tokenWaiting)
	return t
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
			i.stop(t, "output_failed", err.Error())
			return
		}
		i.output = value
	}
	i.setState(t, tokenCompleted)
	i.endAll()
	i.become(Completed, "")
}

// fail fails the instance, after everything is undone that is to be.
func (i *instance) fail(t *token, reason string) {
	if i.process.undoes {
		i.compensate(t, Failed, reason)
		return
	}
	i.setState(t, tokenFailed)
	i.endAs(Failed, reason)
}

// endAs ends the instance now.
func (i *instance) endAs(to Status, reason string) {
	if to == Failed {
		i.failure = reason
	}
	i.endAll()
	i.become(to, reason)
}

// endAll ends every token that is still alive, and its run.
func (i *instance) endAll() {
	for _, t := range i.changes.tokens {
		if t.state == tokenReady || t.state == tokenWaiting {
			i.setState(t, tokenTerminated)
		}
	}
	i.changes.ended = i.changes.ended || i.live > 0
	i.changes.steps, i.changes.waits, i.changes.tasks, i.changes.children = nil, nil, nil, nil
	i.live, i.ready, i.joining = 0, 0, 0
}

// stop leaves a token where it is until an operator lets it try again.
func (i *instance) stop(t *token, code, message string) {
	i.setState(t, tokenWaiting)
	i.open(incident{token: t, node: t.node.name, code: code, message: message})
}

func (i *instance) open(x incident) {
	i.incidents++
	i.changes.incidents = append(i.changes.incidents, x)
	if x.token != nil {
		x.token.stopped = true
		i.event(x.token, "incident.opened", map[string]any{"code": x.code})
	}
}

// resolve ends the incident of a token, if it has one.
func (i *instance) resolve(t *token) {
	if !t.stopped {
		return
	}
	t.stopped = false
	i.incidents--
	i.changes.incidents = filter(i.changes.incidents, func(x incident) bool { return x.token != t })
}

func (i *instance) event(t *token, name string, data map[string]any) {
	i.changes.events = append(i.changes.events, event{token: t, name: name, node: t.node.name, data: data})
}

// setState changes a token's state, and counts.
func (i *instance) setState(t *token, to tokenState) {
	was, is := alive(t.state), alive(to)
	before := t.state
	t.state = to
	i.live += is - was
	i.ready += count(to == tokenReady) - count(before == tokenReady)
	if t.joining {
		i.joining--
		t.joining = false
	}
	if is != was {
		i.addTo(t.group, is-was)
	}
	if is == 0 {
		i.resolve(t)
	}
	if !t.listed {
		t.listed = true
		i.changes.tokens = append(i.changes.tokens, t)
	}
}

func alive(s tokenState) int { return count(s == tokenReady || s == tokenWaiting) }

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// addTo counts live tokens of a group; a group that has any counts as one in its parent.
func (i *instance) addTo(g *group, n int) {
	if g == nil {
		return
	}
	was := g.live > 0
	g.live += n
	if !g.listed {
		g.listed = true
		i.changes.groups = append(i.changes.groups, g)
	}
	if is := g.live > 0; is != was {
		i.addTo(g.parent, count(is)-count(was))
		if !is && g.host != nil && g.host.node.kind == scope {
			i.drains = append(i.drains, g)
		}
	}
}

// failure is what expressions read of a step that has failed.
func failure(code, message string) any {
	return map[string]any{"error": map[string]any{"code": code, "message": message}}
}

// fact is what expressions read of a step that has succeeded with a result.
func fact(n *node, result json.RawMessage) (any, error) {
	var value any
	if len(result) > 0 {
		if err := json.Unmarshal(result, &value); err != nil {
			return nil, err
		}
	}
	if n.out == nil {
		return value, nil
	}
	text, err := object(n.out, facts{result: value})
	if err != nil {
		return nil, err
	}
	value = nil
	err = json.Unmarshal(text, &value)
	return value, err
}

// object evaluates a mapping.
func object(all []mapping, f facts) (json.RawMessage, error) {
	values := make(map[string]json.RawMessage, len(all))
	for _, m := range all {
		value, err := m.value.value(f)
		if err != nil {
			return nil, err
		}
		values[m.key] = value
	}
	return json.Marshal(values)
}
