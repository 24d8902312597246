package graph

import (
	"fmt"
	"slices"
)

// The checks of the verbs: each checks the value of its verb and compiles the expressions in it.

func (c *compiler) step(path string, n *node) {
	c.runType(path+"/do", n.Do, true, messageType, signalType)
}

// gateway checks the ways of a choose or an any.
func (c *compiler) gateway(path string, n *node) {
	all := slices.Concat(n.Choose, n.Any)
	if len(all) == 0 {
		c.bad("NO_WAY", path+"/"+string(n.kind), "no way leads on", "list ways with if and to")
	}
	c.branches(path, n, len(n.Any))
	for i, w := range all {
		at := fmt.Sprintf("%s/%s/%d/if", path, n.kind, i)
		condition := c.expression(at, w.If, ofInstance)
		if w.If == "" {
			c.bad("NO_CONDITION", at, "a way needs a condition", "say when it is taken, or make it the else")
		} else if condition != nil && !condition.canBeTrue() {
			c.bad("NOT_A_CONDITION", at, fmt.Sprintf("gives %s, a condition gives true or false", condition.gives), "compare it with something")
		}
		n.ways = append(n.ways, way{condition: condition})
	}
}

func (c *compiler) fork(path string, n *node) {
	if len(n.Fork) < 2 {
		c.bad("NO_FORK", path+"/fork", fmt.Sprintf("it has %d branches", len(n.Fork)), "use two or more, or an edge")
	}
	c.branches(path, n, len(n.Fork))
}

// branches checks the number of branches: each becomes a token, all in one decision.
func (c *compiler) branches(path string, n *node, count int) {
	if count > maxBranches {
		c.bad("BRANCHES", path+"/"+string(n.kind), fmt.Sprintf("it has %d branches", count), fmt.Sprintf("use at most %d; an each executes a step for each element of a list", maxBranches))
	}
}

func (c *compiler) wait(path string, n *node) {
	n.until = c.expression(path+"/wait/until", n.Wait.Until, ofInstance)
}

func (c *compiler) await(path string, n *node) {
	a := n.Await
	if (a.Message != "") == (a.Signal != "") {
		c.bad("AWAIT", path+"/await", "it waits for a message or for a signal", "name one of them")
	}
	c.name(path+"/await", a.Message+a.Signal)
	if a.Signal != "" && a.Key != "" {
		c.bad("AWAIT", path+"/await/key", "a signal goes to all that wait for its name", "remove the key, or await a message")
	}
	if a.Message != "" && a.Key == "" {
		c.bad("NO_KEY", path+"/await/key", "a message needs a key", "say what it is correlated by, such as input.order")
	}
	n.key = c.expression(path+"/await/key", a.Key, ofInstance)
}

// race checks the number of options. Their kinds are checked by tie, when all nodes are known.
func (c *compiler) race(path string, n *node) {
	if len(n.Race) < 2 {
		c.bad("RACE", path+"/race", fmt.Sprintf("it has %d nodes to wait at", len(n.Race)), "name two or more")
	}
}

func (c *compiler) human(path string, n *node) {
	n.assignee = c.expression(path+"/human/assignee", n.Human.Assignee, ofInstance)
}

func (c *compiler) call(path string, n *node) {
	if !kindForm.MatchString(n.Call.Process) {
		c.bad("CALL", path+"/call/process", fmt.Sprintf("%.120q is no process", n.Call.Process), "name a process")
	}
	if n.Call.Version < 0 {
		c.bad("CALL", path+"/call/version", fmt.Sprintf("%d is no version", n.Call.Version), "use one from 1 up, or leave it out for the highest")
	}
	if u := n.Call.Undo; u != "" && u != "none" && u != propagate {
		c.bad("CALL", path+"/call/undo", fmt.Sprintf("%.40q is neither none nor propagate", u), "use one of them")
	}
	if n.Call.Undo == "" {
		c.note("CALL_UNDO", path+"/call/undo", "if the process fails later, what the child did is kept", "say none if that is meant, or propagate")
	}
}

func (c *compiler) each(path string, n *node) {
	e := n.Each
	c.runType(path+"/each/do", e.Do, true, messageType, signalType)
	if e.List == "" {
		c.bad("NO_LIST", path+"/each/list", "it needs a list", "say which, such as input.items")
	}
	if e.Limit < 0 || e.Limit > maxEach || e.Need < 0 {
		c.bad("EACH", path+"/each", fmt.Sprintf("limit %d, need %d: limit is 1 to %d and need at least 1", e.Limit, e.Need, maxEach), "leave out what is not needed")
	}
	if e.Rest != "" && (e.Rest != "cancel" || e.Need == 0) {
		c.bad("EACH", path+"/each/rest", fmt.Sprintf("%.40q means nothing here", e.Rest), `use {"need": 2, "rest": "cancel"}, or leave it out`)
	}
	n.list = c.expression(path+"/each/list", e.List, ofInstance)
}

func (c *compiler) scope(path string, n *node) {
	if len(n.Scope.Nodes) == 0 {
		c.bad("EMPTY_SCOPE", path+"/scope/nodes", "it has no nodes", "put nodes into it, or remove it")
	} else if n.Scope.Nodes[n.Scope.Start] == nil {
		c.bad("NO_START", path+"/scope/start", fmt.Sprintf("there is no node %q in it", n.Scope.Start), "name the node where it starts")
	}
}

func (c *compiler) throw(path string, n *node) {
	if n.Throw.Compensate == (n.Throw.Error != "") {
		c.bad("NO_CODE", path+"/throw", "a throw has either compensate or an error", `use {"compensate": true}, or name the error, such as REJECTED`)
	}
}
