package graph

import (
	"github.com/google/uuid"
)

type tokenState string

const (
	tokenReady      tokenState = "Ready"
	tokenWaiting    tokenState = "Waiting"
	tokenCompleted  tokenState = "Completed"
	tokenFailed     tokenState = "Failed"
	tokenTerminated tokenState = "Terminated"
)

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
	element  []byte // its element, once more; only if it is stopped
	joining  bool   // it waits at a join
	stopped  bool   // it has an open incident
	ticks    bool   // a timer of its node's edges is still to fire
	gone     bool   // it has left its node in this batch: what was on its way there comes too late
	listed   bool   // it is among the changes
	purePath int
}

// known returns the tokens that are known one by one, each once: all live ones, if the process needs
// them, and all that this decision has changed.
func (i *instance) known() []*token {
	return append(filter(i.loaded, func(t *token) bool { return !t.listed }), i.changes.tokens...)
}

// passed reports whether what is settled now comes too late for a token: it, or its instance, has
// gone on, or come to its end, in this batch or before.
func (i *instance) passed(t *token) bool {
	return t.gone || alive(t.state) == 0 || i.status.final() || i.changes.endedBut != nil && i.changes.endedBut != t
}

// newToken makes a new token.
func (i *instance) newToken(g *group) *token {
	t := &token{group: g, state: tokenCompleted, mode: forward, node: i.process.start}
	i.setState(t, tokenWaiting)
	return t
}

// stop leaves a token where it is until an operator lets it try again.
func (i *instance) stop(t *token, code, message string) {
	i.setState(t, tokenWaiting)
	i.open(incident{token: t, node: t.node.name, code: code, message: message})
}

func (i *instance) open(x incident) {
	i.incidents++
	i.changes.incidents = append(i.changes.incidents, x)
	i.changes.events = append(i.changes.events, event{token: x.token, name: incidentOpened, node: x.node, data: map[string]any{"code": x.code}})
	if x.token != nil {
		x.token.stopped = true
	}
}

const incidentOpened = "incident.opened"

// resolve ends the incident of a token, if it has one.
func (i *instance) resolve(t *token) {
	if !t.stopped {
		return
	}
	t.stopped = false
	i.incidents--
	i.changes.unopen(func(of *token) bool { return of == t })
}

// unopen drops incidents of this decision that are over already: nobody is told of them.
func (c *changes) unopen(over func(*token) bool) {
	opened := len(c.incidents)
	if c.incidents = filter(c.incidents, func(x incident) bool { return !over(x.token) }); len(c.incidents) == opened {
		return
	}
	c.events = filter(c.events, func(e event) bool { return e.name != incidentOpened || !over(e.token) })
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
		if !is && g.host != nil && g.host.node.kind == scope && g.host.node.name == g.node { // and not what is left of a list
			i.drains = append(i.drains, g)
		}
	}
}
