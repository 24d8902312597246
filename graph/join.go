package graph

import (
	"cmp"
	"slices"
)

// arrive handles a token that enters a join.
//
// An activation of a join belongs to one execution of a fork: the innermost fork that every path to the join passes
// (home). So the tokens of two passes of a loop, or of two nested forks, never meet in one activation.
//
// Which tokens count depends on the join. A join of all counts one token for each edge. A second one over the same edge
// is surplus: it waits for the next round, since it cannot stand for a token that has not arrived. A join with need
// counts any token, and absorbs those that arrive after it has fired. A taken join counts any token; only settle
// decides whether it fires, because that depends on where all other tokens are.
func (i *instance) arrive(t *token) {
	n := t.node
	j := i.activation(n, t.group.home(n))
	if j.fired { // a join with need that has enough: the token is absorbed
		i.complete(t)
		return
	}
	i.setState(t, tokenWaiting)
	t.joining = true
	i.joining++
	i.event(t, "join.arrived", map[string]any{"edge": t.edge})
	if n.Join.Need == 0 && !n.Join.Taken && j.has[t.edge] {
		j.surplus = append(j.surplus, t)
		i.changes.arrivals = append(i.changes.arrivals, arrival{j, t, t.edge, true})
		return
	}
	j.has[t.edge] = true
	j.joined++
	i.listJoin(j)
	i.changes.arrivals = append(i.changes.arrivals, arrival{j, t, t.edge, false})
	if !n.Join.Taken && j.joined >= j.expected {
		i.fire(j)
	}
}

// activation returns the current activation of a join for a group, and begins one if there is none.
func (i *instance) activation(n *node, home *group) *joining {
	key := joinKey{n.name, home}
	j := i.joins[key]
	if j == nil {
		i.activations++
		j = &joining{nth: i.activations, node: n, group: home, round: 1, expected: n.expects(), has: map[string]bool{}, waiting: map[*group]int{}}
		i.joins[key] = j
	}
	return j
}

// listJoin notes that an activation is to be written.
func (i *instance) listJoin(j *joining) {
	if !j.listed {
		j.listed = true
		i.changes.joins = append(i.changes.joins, j)
	}
}

// fire completes the tokens that wait at an activation, and leads one new token on in their place.
//
// The waiting tokens of earlier batches are loaded one by one only if the process is surveyed. Otherwise only their
// number is known, for each group. Then fire corrects the counts, and the writer completes the rows by join_arrival. A
// join of a thousand branches thus costs a few statements instead of a thousand tokens.
func (i *instance) fire(j *joining) {
	j.fired, j.fires = true, true
	i.listJoin(j)
	n := j.node
	t := i.newToken(j.group) // before the others end: otherwise their group could seem empty
	path := 0
	for _, o := range i.known() {
		if j.holds(o) {
			path = max(path, o.purePath)
			i.setState(o, tokenCompleted)
		}
	}
	if !i.process.survey { // see above; with survey the loop has found all of them
		for g, k := range j.waiting {
			i.live -= k
			i.joining -= k
			i.addTo(g, -k)
		}
	}
	j.waiting = nil
	if n.Join.Need > 0 && n.Join.Cancel {
		i.endWithin(j.group, t)
	}
	// The new token continues in the group around the fork's, unless tokens of the fork are still on their way to the
	// join or elsewhere: then the new one may meet them at a later join of the same fork. With need it leaves them
	// behind, because this activation absorbs those that arrive later. The group of a scope is never left by a join
	// within.
	if g := j.group; g != nil && g.host == nil && (n.Join.Need > 0 || g.live == 1) {
		i.addTo(g.parent, 1)
		i.addTo(g, -1)
		t.group = g.parent
	}
	t.node, t.purePath = n, path+1
	var how map[string]any
	if j.forced {
		how = map[string]any{"forced": true, "joined": j.joined}
	}
	i.event(t, "join.fired", how)
	if n.Join.Need == 0 {
		i.nextRound(j)
	}
	i.leave(t, n.next)
}

// nextRound begins the next round of a join that has fired. The surplus tokens of the last round are its first
// arrivals. They may be enough to fire it at once.
func (i *instance) nextRound(j *joining) {
	delete(i.joins, joinKey{j.node.name, j.group})
	next := i.activation(j.node, j.group)
	next.round = j.round + 1
	for _, t := range j.surplus {
		if alive(t.state) == 0 {
			continue // it has ended since it arrived
		}
		again := next.has[t.edge]
		i.changes.arrivals = append(i.changes.arrivals, arrival{next, t, t.edge, again})
		i.listJoin(next)
		if again {
			next.surplus = append(next.surplus, t)
			continue
		}
		next.has[t.edge] = true
		next.joined++
		if !t.listed { // it was read, and not changed, so known does not return it: fire has to find it in waiting
			next.waiting[t.group]++
		}
	}
	if next.joined >= next.expected && !j.node.Join.Taken {
		i.fire(next)
	}
}

// endWithin ends the live tokens of a group and of the groups within it, except one.
func (i *instance) endWithin(g *group, but *token) {
	for _, t := range i.known() {
		if t != but && alive(t.state) > 0 && t.group.within(g) {
			i.setState(t, tokenTerminated)
		}
	}
}

// fireTaken fires the taken joins at which no further token can arrive. It needs to know where every live token is, so
// a process with such a join is surveyed. Each firing moves a token, which may then be on its way to another join.
// Therefore fireTaken fires one join at a time and looks again.
func (i *instance) fireTaken() {
	if !i.process.survey {
		return
	}
	for again := true; again && !i.status.final(); {
		again = false
		for _, j := range i.pendingTaken() {
			if !i.comes(j) {
				i.fire(j)
				again = true
				break // tokens have moved: look at all joins again
			}
		}
	}
}

// pendingTaken returns the activations of taken joins where a token waits. Their order does not depend on the order of
// a map, so that the same events give the same changes.
func (i *instance) pendingTaken() (all []*joining) {
	for _, j := range i.joins {
		if j.node.Join.Taken && !j.fired && i.waitsAt(j) {
			all = append(all, j)
		}
	}
	slices.SortFunc(all, func(a, b *joining) int {
		return cmp.Or(cmp.Compare(a.node.name, b.node.name), cmp.Compare(a.nth, b.nth))
	})
	return all
}

// waitsAt reports whether a token waits at the activation. joined does not say so, because tokens that arrived may have
// ended since.
func (i *instance) waitsAt(j *joining) bool { return slices.ContainsFunc(i.known(), j.holds) }

// holds reports whether a token waits for this round of the activation. Surplus tokens wait for the next one.
func (j *joining) holds(t *token) bool {
	return t.joining && t.node == j.node && t.group.home(j.node) == j.group && !slices.Contains(j.surplus, t)
}

// comes reports whether a live token can still arrive at the activation: a path leads from its node to the join. Tokens
// outside of the activation's group would arrive at another activation. Conditions are not evaluated, so a token counts
// even if its facts will lead it elsewhere; the join is looked at again when it has moved.
func (i *instance) comes(j *joining) bool {
	for _, t := range i.known() {
		switch {
		case alive(t.state) == 0 || !t.group.within(j.group):
		case t.joining && t.node == j.node:
		case t.hasItem: // it never leaves its list; its host does, and is looked at itself
		case j.node.sources[t.node.index]:
			return true
		}
	}
	return false
}

// unsatisfiable opens an incident because all live tokens wait at joins for others, and there are no others. The join
// does not fire by itself: a branch that was meant to be joined is missing, and only people know whether the process
// may continue without it. The incident is attached to one of the waiting tokens, if one is known.
func (i *instance) unsatisfiable() {
	for _, t := range i.known() {
		if t.joining {
			i.incident(t)
			return
		}
	}
	i.incident(nil)
}

// incident opens the incident of unsatisfiable; t may be nil.
func (i *instance) incident(t *token) {
	found := incident{token: t, code: "join_unsatisfiable", message: "every live token waits at a join for others, and none can come"}
	if t != nil {
		found.node = t.node.name
	}
	i.open(found)
}
