package graph

import (
	"time"

	"github.com/google/uuid"
)

// Compensation. Each completed step with an Undo leaves a record in the database. Undoing executes the undo steps of
// the open records one after the other, the latest record first, because a step may rest on what the steps before it
// have done.
//
// One token does that, in mode Compensation. If the instance is to end, all other tokens end first: none may do what
// would then have to be undone, too. If a throw node begins it, the others continue. The token first gets a run of type
// undoType, whose handler does nothing. When that run is settled, and when each undo step is, the shell looks for the
// next record with the instance locked, and the core enqueues its undo step, an ordinary run. When no record is left,
// the token leads on from the throw node, or the instance gets the status that it is to end with. Undoing spans many
// transactions, so the row stores that status (ending).

// undoPause is how long a token that undoes waits before it asks again, if another undo step is under way. Each further
// pause is twice as long, up to one minute.
const undoPause = 200 * time.Millisecond

// A record is a completed step that is to be undone if the instance undoes what it has done.
type record struct {
	token *token
	run   runRef
	node  *node
}

// owes records that a step of t at n was done by a run, if it can be undone.
func (i *instance) owes(t *token, n *node, run runRef) {
	if n.Undo != "" {
		i.changes.records = append(i.changes.records, record{t, run, n})
	}
}

// compensate lets t undo what was done. to is the status that the instance then gets; all other tokens end now. If to
// is empty, t is at a throw node: it undoes what was done in its scope and then leads on, and no other token ends.
func (i *instance) compensate(t *token, to status, reason string) {
	if to != "" {
		i.ending, i.endingReason = to, reason
		i.endOthers(t)
		i.detach(t)
	}
	t.mode = compensation
	i.setState(t, tokenReady)
	if to != "" { // undo also what may have taken effect unheard, and retry undo steps that have failed before
		i.changes.unknown, i.changes.undoAgain = true, true
	} else {
		i.changes.throws = append(i.changes.throws, t)
	}
	i.event(t, "compensation.started", nil)
	i.askDebt(t, 0, 0)
}

// askDebt enqueues a run of undoType. When it is settled, the shell looks for the next record to undo. The run is not
// due before the leases that were cut off have expired: until then a handler may still do what is to be undone. waited
// is how often the token has found another undo step under way.
func (i *instance) askDebt(t *token, after time.Duration, waited int) {
	i.changes.steps = append(i.changes.steps, step{token: t, node: t.node.name + "/undo", typ: undoType, payload: position{Tick: waited}.json(),
		attempts: maxTimerAttempts, due: due{after: after}, afterLeases: true})
}

// undone handles the success of an undo step or of a run of askDebt. In both cases debts has the next record to undo.
func (i *instance) undone(t *token, run runRef, waited int) {
	i.changes.touched = true
	i.changes.undone = append(i.changes.undone, run)
	switch debt, owed := i.debts[t]; {
	case i.undoing: // by another throw or in a called instance: one step at a time, to keep the order
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

// undoFailed handles an undo step that has failed for good, or was cancelled or deleted. It is never skipped: the token
// stops with an incident until an operator retries it. The instance would otherwise end as if everything were undone.
func (i *instance) undoFailed(t *token, reason string) {
	i.changes.touched = true
	i.changes.notUndone = append(i.changes.notUndone, t)
	i.detach(t) // cancels the run: one that was deleted is still open
	i.stop(t, compensationFailed, reason)
	i.settle()
}

// compensationFailed is the code of the incident of a token whose undo step has failed.
const compensationFailed = "compensation_failed"

// An undo is an undo step to be enqueued for a record.
type undo struct {
	token  *token
	record uuid.UUID
}

// endOthers ends every token but one. It also ends those that are not loaded, by setting endedBut for the writer.
// Therefore it sets the counts afterwards: setState has counted only the loaded tokens.
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
