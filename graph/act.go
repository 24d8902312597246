package graph

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// advance decides what a batch of settled runs means for their instances, and writes it, in the
// transaction in which the instances were locked and the runs settled.
//
// It has two phases. First everything is read that any decision of the batch may need (lookAhead says what). Then the core decides, run by
// run, on what is in memory, and all changes are written together. So the number of statements does not grow with the batch,
// and a decision sees what the ones before it have changed.
func (e *Engine) advance(ctx context.Context, tx *transaction, s *scene, batch []leasing.Settlement) error {
	if err := s.load(ctx, tx, e); err != nil {
		return s.blame(err, batch)
	}
	w := &writer{scene: s, tx: tx, statements: tx.statements()}
	for _, settled := range batch {
		if err := w.decide(ctx, settled); err != nil {
			return &leasing.SettleError{Run: settled.Outcome.ID, Err: err}
		}
	}
	if err := s.start(ctx, tx, e, w.starts, w.again); err != nil {
		return err
	}
	return w.write(ctx)
}

// move moves the token of a step.
func (s *scene) move(w *writer, settled leasing.Settlement) error {
	t := s.tokens[settled.Step]
	if t == nil {
		return nil // the instance was deleted
	}
	i := s.owners[settled.Step]
	succeeded := settled.Verdict == settling.Succeed
	if i.passed(t) {
		if succeeded && !t.hasItem && settled.Type == t.from.Do {
			i.owes(t, t.from, settled.Outcome.ID) // it is done all the same
		}
		return nil
	}
	f := settled.Failure
	if f == nil {
		f = &settling.Failure{Code: "handler_error"}
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
		done := f.Code == settling.CodeResult && f.Permanent && !f.Declared
		if done && !t.hasItem && settled.Type == t.node.Do {
			i.owes(t, t.node, settled.Outcome.ID) // only its result is lost
		}
		i.failed(t, problem{f.Code, firstLine(f.Message), f.Declared && !strings.HasPrefix(settled.Type, Prefix), done})
	}
	if p.Message != uuid.Nil {
		w.consumed = append(w.consumed, p.Message)
	}
	return nil
}

// childNotStarted is the code of a call whose instance could not be started.
const childNotStarted = "child_not_started"

// completeTask completes a person's task, and moves its token with it. If somebody else has been
// faster, the database's objection becomes the failure of the run.
func (s *scene) completeTask(ctx context.Context, tx pgx.Tx, settled leasing.Settlement) error {
	var p completeTaskPayload
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
func (s *scene) cutOff(settled leasing.Settlement) error {
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
	i.failedUnheard(t, problem{code: cmp.Or(c.Code, "cancelled"), message: firstLine(c.Reason)})
	return nil
}

// cancel cancels an instance, unless it is over.
func (s *scene) cancel(settled leasing.Settlement) error {
	var p cancelPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	i, err := s.undecided(p.Instance)
	if i != nil {
		i.conclude(Cancelled, firstLine(p.Reason), p.Compensate)
	}
	return err
}

// fail fails an instance, unless it is over.
func (s *scene) fail(ctx context.Context, tx pgx.Tx, settled leasing.Settlement) error {
	var p failPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	i, err := s.undecided(p.Instance)
	if i == nil {
		return err
	}
	reason := firstLine(p.Reason)
	if reason == "" {
		if err := tx.QueryRow(ctx, `
			SELECT coalesce((SELECT concat_ws(': ', nullif(node, ''), code, message) FROM incident
			                 WHERE instance_id = $1 AND resolved_at IS NULL ORDER BY created_at DESC, id DESC LIMIT 1), '')`, p.Instance).Scan(&reason); err != nil {
			return err
		}
	}
	i.conclude(Failed, cmp.Or(reason, "failed by hand"), true)
	return nil
}

// undecided returns an instance that is to be ended now; nil: it is over. If it has begun to undo since the handler
// looked, a success would promise what does not come: the run fails.
func (s *scene) undecided(id uuid.UUID) (*instance, error) {
	i := s.instances[id]
	switch {
	case i == nil || i.status.Final():
		return nil, nil
	case i.ending != "":
		return nil, undoing(id)
	}
	return i, nil
}

func (w *writer) retry(ctx context.Context, settled leasing.Settlement) error {
	var p retryPayload
	var r retried
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &r)); err != nil {
		return err
	}
	if r.Kept { // any worker tries it, and resolves it
		_, err := w.tx.Exec(ctx, `SELECT workflow_settle_again($1)`, r.Incident)
		return err
	}
	s := w.scene
	i, t := s.instances[r.Instance], s.tokens[r.Token]
	if i == nil || i.status.Final() || t == nil || s.owners[r.Token] != i || !t.stopped && !t.joining || i.passed(t) || slices.Contains(w.resolved, r.Incident) {
		return nil
	}
	var code string
	err := w.tx.QueryRow(ctx, `SELECT code FROM incident WHERE id = $1 AND instance_id = $2 AND resolved_at IS NULL`, r.Incident, r.Instance).Scan(&code)
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
func (s *scene) notStarted(settled leasing.Settlement) {
	var p startPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil || p.Parent == nil {
		return // whoever asked for it sees the run
	}
	if s.calls(p, settled.Tenant) && settled.Failure != nil && settled.Failure.Code != codeForeign {
		i, t := s.owners[p.Parent.Token], s.tokens[p.Parent.Token]
		i.failedUnheard(t, problem{code: childNotStarted, message: firstLine(settled.Failure.Message)})
	}
}
