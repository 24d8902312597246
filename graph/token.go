package graph

import (
	"github.com/google/uuid"
)

// A tokenState is the state of a token. Ready and Waiting are the live ones: a Ready token has a step or an undo step
// to be executed, a Waiting one waits for something else. The database has one more state, Created, which the core does
// not use.
type tokenState string

const (
	tokenReady      tokenState = "Ready"
	tokenWaiting    tokenState = "Waiting"
	tokenCompleted  tokenState = "Completed"
	tokenFailed     tokenState = "Failed"
	tokenTerminated tokenState = "Terminated"
)

// A tokenMode says whether a token executes the process or undoes what was done.
type tokenMode string

const (
	forward      tokenMode = "Forward"
	compensation tokenMode = "Compensation"
)

// A token marks one path of an instance.
type token struct {
	id       uuid.UUID // zero: new, and not written yet
	node     *node
	from     *node  // its node when the batch was loaded; nil: it is new
	edge     string // the id of the edge that led it here
	state    tokenState
	group    *group // the innermost group that it is in; nil: none
	mode     tokenMode
	version  int64 // of its row, one more with each write: it identifies the visit of the node; 0: new
	item     int   // the index of the list's element that it is for, if hasItem
	hasItem  bool
	element  []byte // that element as JSON; only read if the token is stopped, for a retry
	joining  bool   // it waits at a join
	stopped  bool   // it has an open incident
	ticks    bool   // a timer of a boundary event is still to fire; only read for hosts of scopes
	gone     bool   // it has left its node in this batch: runs that were on their way to it come too late
	listed   bool   // it is in changes.tokens
	purePath int    // gateways and joins passed in this batch, by it and by the tokens that it continues, see maxPureSteps
}

// known returns each token that is in memory once: all tokens that this batch has changed or made and, if
// process.survey, all others that were live.
func (i *instance) known() []*token {
	return append(filter(i.loaded, func(t *token) bool { return !t.listed }), i.changes.tokens...)
}

// passed reports whether a settled run comes too late for its token: the token has left its node or ended, or its
// instance has ended, earlier in this batch or before it.
func (i *instance) passed(t *token) bool {
	return t.gone || alive(t.state) == 0 || i.status.final() || i.changes.endedBut != nil && i.changes.endedBut != t
}

// newToken adds a live token to a group; nil: to none. It changes the state by setState, so that the counts include it.
func (i *instance) newToken(g *group) *token {
	t := &token{group: g, state: tokenCompleted, mode: forward, node: i.process.start}
	i.setState(t, tokenWaiting)
	return t
}

// stop leaves a token where it is, with an incident, until an operator retries it.
func (i *instance) stop(t *token, code, message string) {
	i.setState(t, tokenWaiting)
	i.open(incident{token: t, node: t.node.name, code: code, message: message})
}

// open opens an incident.
func (i *instance) open(x incident) {
	i.incidents++
	i.changes.incidents = append(i.changes.incidents, x)
	i.changes.events = append(i.changes.events, event{token: x.token, name: incidentOpened, node: x.node, data: map[string]any{"code": x.code}})
	if x.token != nil {
		x.token.stopped = true
	}
}

// incidentOpened is the event of an incident.
const incidentOpened = "incident.opened"

// resolve ends the incident of a token, if it has one. The writer resolves the row when it writes that the token has
// moved.
func (i *instance) resolve(t *token) {
	if !t.stopped {
		return
	}
	t.stopped = false
	i.incidents--
	i.changes.unopen(func(of *token) bool { return of == t })
}

// unopen drops incidents that were opened in this batch and are over already, with their events, so that nobody is
// alarmed.
func (c *changes) unopen(over func(*token) bool) {
	opened := len(c.incidents)
	if c.incidents = filter(c.incidents, func(x incident) bool { return !over(x.token) }); len(c.incidents) == opened {
		return
	}
	c.events = filter(c.events, func(e event) bool { return e.name != incidentOpened || !over(e.token) })
}

// setState changes a token's state. It keeps the counts of the instance and of the groups, and lists the token as
// changed. So state is not assigned elsewhere, except where fire has counted the token already.
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

// alive returns 1 for a live state and 0 for others.
func alive(s tokenState) int { return count(s == tokenReady || s == tokenWaiting) }

// addTo adds n to the live count of a group. A group with a live count above 0 counts as one in its parent, so a change
// is passed on only when the first token begins or the last one ends. Thus the count of a group says whether anything
// lives in it, at any depth, without looking at the tokens.
//
// When the last token of a scope has ended, the host has to lead on. addTo is called in the middle of other moves, so
// it only notes the group in drains; settle leads the host on after these moves.
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
		if !is && g.host != nil && g.host.node.kind == scope && g.host.node.name == g.node { // g is not the rest of a list that the host has left for a scope
			i.drains = append(i.drains, g)
		}
	}
}
