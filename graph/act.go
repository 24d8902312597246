package graph

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// advance decides what a batch of settled runs means for their instances, and writes it, in the
// transaction in which the instances were locked and the runs settled.
func (e *Engine) advance(ctx context.Context, tx *transaction, s *scene, batch []lease.Settlement) error {
	if err := s.load(ctx, tx, e); err != nil {
		return s.blame(err, batch)
	}
	w := &writer{scene: s, statements: tx.statements()}
	var starts []lease.Settlement
	var err error
	for _, settled := range batch {
		if settled.Verdict != run.Succeed && settled.Verdict != run.Fail {
			continue // it will be tried again: its token stays where it is
		}
		switch {
		case settled.Step != uuid.Nil:
			err = s.move(w, settled)
			if err == nil && settled.Verdict == run.Succeed {
				err = w.sent(settled)
			}
		case settled.Type == StartType && settled.Verdict == run.Fail:
			s.notStarted(settled)
		case settled.Verdict == run.Fail:
		case settled.Type == StartType:
			starts = append(starts, settled)
		case settled.Type == cutOffType:
			err = s.cutOff(settled)
		case settled.Type == CompleteTaskType:
			err = s.completeTask(ctx, tx, settled)
		case settled.Type == MessageType:
			err = w.message(settled)
		case settled.Type == SignalType:
			err = w.sent(settled)
		case settled.Type == matchType:
			err = w.match(settled)
		case settled.Type == CancelType:
			err = s.cancel(ctx, tx, settled)
		case settled.Type == RetryType:
			err = s.retry(ctx, tx, w, settled)
		}
		if err != nil {
			return &lease.SettleError{Run: settled.Outcome.ID, Err: err}
		}
	}
	if err := s.start(ctx, tx, e, starts); err != nil {
		return err
	}
	return w.write(ctx)
}

// move moves the token of a step.
func (s *scene) move(w *writer, settled lease.Settlement) error {
	t := s.tokens[settled.Step]
	if t == nil {
		return nil // the instance was deleted
	}
	i := s.owners[settled.Step]
	succeeded := settled.Verdict == run.Succeed
	if i.passed(t) {
		if succeeded && !t.hasItem && settled.Type == t.from.Do {
			i.owes(t, t.from, settled.Outcome.ID) // it is done all the same
		}
		return nil
	}
	f := settled.Failure
	if f == nil {
		f = &run.Failure{Code: "handler_error"}
	}
	var p position
	switch settled.Type {
	case timerType, arriveType, undoType:
		err := json.Unmarshal(settled.Payload, &p)
		if err != nil && !succeeded && settled.Type == timerType && t.node.kind == wait && t.mode != compensation && !t.stopped {
			i.strand(t, f.Code, firstLine(f.Message)) // nothing else would move it
			return nil
		}
		if err != nil || !succeeded && f.Code == codeForeign {
			return nil // the engine has not enqueued it
		}
	}
	switch {
	case p.Visit > 0 && p.Visit != t.version:
		return nil // the token has moved on meanwhile
	case !t.expects(settled.Type, p):
		return nil // it waits for something else
	case t.mode == compensation && succeeded:
		i.undone(t, settled.Outcome.ID, p.Tick)
	case t.mode == compensation:
		i.undoFailed(t, f.Code+": "+firstLine(f.Message))
	case p.At != mainPlace && succeeded:
		i.happens(t, p, settled.Outcome.ID, settled.Result)
	case succeeded:
		i.done(t, settled.Outcome.ID, settled.Result)
	default:
		if f.Code == run.CodeResult && !t.hasItem && settled.Type == t.node.Do {
			i.owes(t, t.node, settled.Outcome.ID) // it is done, only its result is lost
		}
		i.failed(t, f.Code, firstLine(f.Message))
	}
	if p.Message != uuid.Nil {
		w.consumed = append(w.consumed, p.Message)
	}
	return nil
}

// childNotStarted is the code of a call whose instance could not be started.
const childNotStarted = "child_not_started"

// expects reports whether a token waits for what one of the engine's own runs says has happened to it.
func (t *token) expects(typ string, p position) bool {
	if typ == undoType {
		return t.mode == compensation
	}
	if typ != timerType && typ != arriveType {
		return true
	}
	n, h := t.node, (*Handler)(nil)
	if k, ok := numbered(p.At, "on"); ok {
		if k >= len(n.handlers) {
			return false
		}
		h = n.handlers[k].Handler
	} else if k, ok := numbered(p.At, "race"); ok {
		if n.kind != race || k >= len(n.options) {
			return false
		}
		n = n.options[k].to
	} else if p.At != mainPlace {
		return false
	}
	switch {
	case h != nil && typ == timerType:
		return h.After > 0 || h.Every > 0
	case h != nil:
		return h.Message != "" && p.Message != uuid.Nil
	case typ == timerType:
		return n.kind == wait
	case p.Message != uuid.Nil:
		return n.kind == await && n.Await.Message != ""
	case p.Signal != uuid.Nil:
		return n.kind == await && n.Await.Signal != ""
	}
	return n.kind == call && p.Child != uuid.Nil
}

// completeTask completes a person's task, and moves its token with it. If somebody else has been
// faster, the database's objection becomes the failure of the run.
func (s *scene) completeTask(ctx context.Context, tx pgx.Tx, settled lease.Settlement) error {
	var p CompleteTaskPayload
	var r taskRef
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &r)); err != nil {
		return err
	}
	if len(p.Output) == 0 {
		p.Output = json.RawMessage("{}")
	}
	var version *int64
	if p.Version != 0 {
		version = &p.Version
	}
	if _, err := tx.Exec(ctx, `SELECT process_task_finish($1, $2, $3, $4)`, p.Task, p.By, p.Output, version); err != nil {
		return err
	}
	i, t := s.instances[r.Instance], s.tokens[r.Token]
	if i == nil || t == nil {
		return nil // the instance was deleted
	}
	if s.owners[r.Token] != i || t.node.kind != human { // the handler has looked: somebody has changed it since
		return errors.New("graph: the task is not of the token and instance that it names; see process_fault")
	}
	if i.passed(t) { // the task was open, so it was in this batch: by itself it is refused
		return errors.New("graph: something else has just moved the task's token; the task is to be looked at once more")
	}
	i.done(t, settled.Outcome.ID, p.Output)
	return nil
}

// cutOff fails a token whose step somebody has taken away.
func (s *scene) cutOff(settled lease.Settlement) error {
	var c cutOff
	if err := json.Unmarshal(settled.Payload, &c); err != nil {
		return err
	}
	t, i := s.tokens[c.Token], s.owners[c.Token]
	if t == nil || t.version != c.Visit || i.passed(t) {
		return nil // it has moved on by something else
	}
	if c.Code == childNotStarted && t.node.kind != call {
		return nil // it waits for no instance
	}
	if t.mode == compensation {
		i.undoFailed(t, firstLine(c.Reason))
		return nil
	}
	i.failedUnheard(t, cmp.Or(c.Code, "cancelled"), firstLine(c.Reason))
	return nil
}

// cancel cancels an instance, unless it is over. If it has begun to undo since the handler looked,
// a success would promise what does not come: the database's objection becomes the failure of the
// run.
func (s *scene) cancel(ctx context.Context, tx pgx.Tx, settled lease.Settlement) error {
	var p CancelPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	i := s.instances[p.Instance]
	if i == nil || i.status.Final() {
		return nil
	}
	if i.ending != "" {
		_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'instance: it undoes what it has done, and ends then'; END $$`)
		return err
	}
	i.cancel(firstLine(p.Reason), p.Compensate)
	return nil
}

func (s *scene) retry(ctx context.Context, tx pgx.Tx, w *writer, settled lease.Settlement) error {
	var p RetryPayload
	var r retried
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &r)); err != nil {
		return err
	}
	if r.Kept { // any worker tries it, and resolves it
		_, err := tx.Exec(ctx, `SELECT workflow_settle_again($1)`, r.Incident)
		return err
	}
	i, t := s.instances[r.Instance], s.tokens[r.Token]
	if i == nil || i.status.Final() || t == nil || s.owners[r.Token] != i || !t.stopped && !t.joining || i.passed(t) || slices.Contains(w.resolved, r.Incident) {
		return nil
	}
	var code string
	err := tx.QueryRow(ctx, `SELECT code FROM incident WHERE id = $1 AND instance_id = $2 AND resolved_at IS NULL`, r.Incident, r.Instance).Scan(&code)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // others have been faster since the handler looked
	}
	if err != nil {
		return err
	}
	w.resolved = append(w.resolved, r.Incident)
	i.retry(t, code, p.Force)
	return nil
}

// notStarted tells the token that waits for an instance that there will be none.
func (s *scene) notStarted(settled lease.Settlement) {
	var p StartPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil || p.Parent == nil {
		return // whoever asked for it sees the run
	}
	if s.calls(p, settled.Tenant) && settled.Failure != nil && settled.Failure.Code != codeForeign {
		i, t := s.owners[p.Parent.Token], s.tokens[p.Parent.Token]
		i.failedUnheard(t, childNotStarted, firstLine(settled.Failure.Message))
	}
}
