package graph

import (
	"cmp"
	"slices"
)

// arrive is what happens when a token comes to a join.
//
// An activation of a join belongs to one execution of the innermost fork that all of its edges
// come from, so that passes of a loop, and forks within forks, cannot be mistaken for each other.
func (i *instance) arrive(t *token) {
	n := t.node
	j := i.activation(n, t.group.home(n))
	if j.fired { // it needed only some, and had them: this one is absorbed
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

func (i *instance) listJoin(j *joining) {
	if !j.listed {
		j.listed = true
		i.changes.joins = append(i.changes.joins, j)
	}
}

// fire lets one token go on for those that have come.
func (i *instance) fire(j *joining) {
	j.fired, j.fires = true, true
	i.listJoin(j)
	n := j.node
	t := i.newToken(j.group) // before the others end
	path := 0
	for _, o := range i.known() {
		if j.holds(o) {
			path = max(path, o.purePath)
			i.setState(o, tokenCompleted)
		}
	}
	if !i.process.survey { // those of before are not known one by one
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
	if g := j.group; g != nil && g.host == nil && (n.Join.Need > 0 || g.live == 1) { // nobody else is on the way
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

// nextRound makes room for further arrivals: the surplus of this round is the start of the next.
func (i *instance) nextRound(j *joining) {
	delete(i.joins, joinKey{j.node.name, j.group})
	next := i.activation(j.node, j.group)
	next.round = j.round + 1
	for _, t := range j.surplus {
		if alive(t.state) == 0 {
			continue // it has been ended meanwhile
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
		if !t.listed { // by itself it is known no more
			next.waiting[t.group]++
		}
	}
	if next.joined >= next.expected && !j.node.Join.Taken {
		i.fire(next)
	}
}

// endWithin ends the live tokens of a group and of groups within it, but one.
func (i *instance) endWithin(g *group, but *token) {
	for _, t := range i.known() {
		if t != but && alive(t.state) > 0 && t.group.within(g) {
			i.setState(t, tokenTerminated)
		}
	}
}

// fireTaken fires joins that wait for those that can still come, when none can.
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
				break // the picture has changed
			}
		}
	}
}

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

// waitsAt reports whether a token waits at the activation: those that came may have been ended.
func (i *instance) waitsAt(j *joining) bool { return slices.ContainsFunc(i.known(), j.holds) }

// holds reports whether a token waits at the activation, and not for its next round.
func (j *joining) holds(t *token) bool {
	return t.joining && t.node == j.node && t.group.home(j.node) == j.group && !slices.Contains(j.surplus, t)
}

// comes reports whether a live token can still come to the activation.
func (i *instance) comes(j *joining) bool {
	for _, t := range i.known() {
		switch {
		case alive(t.state) == 0 || !t.group.within(j.group):
		case t.joining && t.node == j.node:
		case t.hasItem: // its host may come, not it
		case j.node.sources[t.node.index]:
			return true
		}
	}
	return false
}

// unsatisfiable opens an incident: everything that lives waits at joins for what cannot come.
func (i *instance) unsatisfiable() {
	for _, t := range i.known() {
		if t.joining {
			i.incident(t)
			return
		}
	}
	i.incident(nil)
}

func (i *instance) incident(t *token) {
	found := incident{token: t, code: "join_unsatisfiable", message: "every live token waits at a join for others, and none can come"}
	if t != nil {
		found.node = t.node.name
	}
	i.open(found)
}
