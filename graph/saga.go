package graph

import (
	"time"

	"github.com/google/uuid"
)

// Undoing. Each completed step with an undo leaves a record. When an instance has to undo, every
// token but one ends; that one, in mode Compensation, executes the undo steps one after the other,
// latest record first. When none is owed any more it goes on, or the instance ends as it was to.

// undoPause is how long a token lets another one undo before it asks again; each pause is twice the
// one before, up to a minute.
const undoPause = 200 * time.Millisecond

// A record says that a completed step is to be undone, should it come to that.
type record struct {
	token *token
	run   runRef
	node  *node
}

// owes notes that a step of t at n, by this run, may have to be undone.
func (i *instance) owes(t *token, n *node, run runRef) {
	if n.Undo != "" {
		i.changes.records = append(i.changes.records, record{t, run, n})
	}
}

// compensate ends everything that moves and has t undo what was done. to is what becomes of the
// instance then; empty: t goes on from its node.
func (i *instance) compensate(t *token, to status, reason string) {
	if to != "" {
		i.ending, i.endingReason = to, reason
		i.endOthers(t)
		i.detach(t)
	}
	t.mode = compensation
	i.setState(t, tokenReady)
	if to != "" { // nothing that was begun, or has failed, is skipped
		i.changes.unknown, i.changes.undoAgain = true, true
	} else {
		i.changes.throws = append(i.changes.throws, t)
	}
	i.event(t, "compensation.started", nil)
	i.askDebt(t, 0, 0)
}

// askDebt has the token look for what is to be undone next; it has waited so many times already.
func (i *instance) askDebt(t *token, after time.Duration, waited int) {
	i.changes.steps = append(i.changes.steps, step{token: t, node: t.node.name + "/undo", typ: undoType, payload: position{Tick: waited}.json(),
		attempts: maxTimerAttempts, due: due{after: after}, afterLeases: true})
}

// undone is what happens when an undo step, or the question for the next, which has waited so many
// times, has succeeded.
func (i *instance) undone(t *token, run runRef, waited int) {
	i.changes.touched = true
	i.changes.undone = append(i.changes.undone, run)
	switch debt, owed := i.debts[t]; {
	case i.undoing: // by another token, which was thrown, too, or within what it has called: one step at a time
		i.askDebt(t, min(undoPause<<min(waited, 10), time.Minute), waited+1)
	case owed:
		i.changes.undo = append(i.changes.undo, undo{token: t, record: debt})
		i.undoing = true
	case i.ending != "":
		i.event(t, "compensation.completed", nil)
		i.setState(t, tokenTerminated)
		i.endAs(i.ending, i.endingReason)
	default:
		i.event(t, "compensation.completed", nil)
		t.mode = forward
		i.leave(t, t.node.next)
	}
	i.settle()
}

// undoFailed is what happens when an undo step has failed for good, or was taken away: it is never
// skipped, an operator has it tried again.
func (i *instance) undoFailed(t *token, reason string) {
	i.changes.touched = true
	i.changes.notUndone = append(i.changes.notUndone, t)
	i.detach(t) // one that was deleted ends now, not with the instance
	i.stop(t, compensationFailed, reason)
	i.settle()
}

// compensationFailed is the incident of a token whose undo step has failed.
const compensationFailed = "compensation_failed"

// An undo is an undo step to be enqueued for a record.
type undo struct {
	token  *token
	record uuid.UUID
}

// endOthers ends every token but one.
func (i *instance) endOthers(but *token) {
	i.forget()
	for _, t := range i.known() {
		if t != but && alive(t.state) > 0 {
			i.setState(t, tokenTerminated)
		}
	}
	i.changes.endedBut = but
	i.drains = nil
	i.live, i.ready, i.joining = 1, count(but.state == tokenReady), 0
	i.incidents, but.stopped = 0, false
	for g := but.group; g != nil; g = g.parent {
		g.leadsNobody = true
	}
	but.group = nil
}
