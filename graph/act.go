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
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// advance decides how a batch of settled runs changes their instances, and writes the changes. It runs in the
// transaction that locked the instances and settled the runs.
//
// It has two phases. First it reads everything that a decision about the batch may need (lookAhead computes what that
// is). Then the core decides, run by run, on the data in memory, and all changes are written together. So the number of
// statements does not grow with the size of the batch, and each decision sees the changes of the decisions before it.
func (e *Engine) advance(ctx context.Context, tx *transaction, s *scene, batch []leasing.Settlement, carrier *leasing.Carrier) error {
	if err := s.load(ctx, tx, e); err != nil {
		return s.blame(err, batch)
	}
	w := &writer{scene: s, tx: tx, copies: e.copies, statements: tx.statements(), carrier: carrier}
	for _, settled := range batch {
		if i := s.owners[settled.Step]; i != nil {
			i.chain = i.chain.Or(settled.Chain)
		}
		if err := w.decide(ctx, settled); err != nil {
			return &leasing.SettleError{Run: settled.Outcome.ID, Err: err}
		}
	}
	if err := s.start(ctx, tx, e, w.starts, w.again); err != nil {
		return err
	}
	return w.write(ctx)
}

// move advances the token of a settled run that belongs to it: a step, a timer, an arrival or an undo step. It changes
// nothing if the run is late, that is, if the token has moved on.
func (s *scene) move(w *writer, settled leasing.Settlement) error {
	t := s.tokens[settled.Step]
	if t == nil {
		return nil // the instance was deleted
	}
	i := s.owners[settled.Step]
	succeeded := settled.Verdict == settling.Succeed
	if succeeded && !t.hasItem && t.mode == forward && settled.Type == t.from.Do {
		i.changes.successes = append(i.changes.successes, success{t, t.from, settled.Outcome.ID})
	}
	if i.passed(t) {
		if succeeded && !t.hasItem && settled.Type == t.from.Do {
			i.owes(t, t.from, settled.Outcome.ID) // late, but the step is done and may have to be undone
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
			return nil // the engine did not enqueue this run
		}
	}
	switch {
	case p.Visit > 0 && p.Visit != t.version:
		return nil // the token has moved on meanwhile
	case !t.expects(settled.Type, p):
		return nil // the token waits for something else
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
			i.owes(t, t.node, settled.Outcome.ID) // the step is done, only its result was refused
		}
		i.failed(t, problem{f.Code, firstLine(f.Message), f.Declared && !strings.HasPrefix(settled.Type, naming.Engine), done})
	}
	if p.Message != uuid.Nil {
		w.consumed = append(w.consumed, p.Message)
	}
	return nil
}

// childNotStarted is the error code of a call node whose instance could not be started.
const childNotStarted = "child_not_started"

// completeTask completes a user task and moves its token. If the task has changed since the handler looked,
// process_task_finish raises an error, which becomes the failure of the run.
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
	if s.owners[r.Token] != i || t.node.kind != human { // the handler checked this: somebody has changed the row since
		return errors.New("graph: the task does not belong to the token and instance that it names; see process_fault")
	}
	if i.passed(t) { // the task was still open, so a run of this batch moved the token: settled alone, this one will be refused
		return errors.New("graph: another run of the batch has just moved the task's token; this one is settled again, alone")
	}
	i.done(t, settled.Outcome.ID, p.Output)
	return nil
}

// cutOff fails a token whose run somebody has cancelled or deleted, or whose called instance was never started.
func (s *scene) cutOff(settled leasing.Settlement) error {
	var c cutOff
	if err := json.Unmarshal(settled.Payload, &c); err != nil {
		return err
	}
	t, i := s.tokens[c.Token], s.owners[c.Token]
	if t == nil || t.version != c.Visit || i.passed(t) {
		return nil // the token has moved on
	}
	if c.Code == childNotStarted && t.node.kind != call {
		return nil // the token does not wait for an instance
	}
	if t.mode == compensation {
		i.undoFailed(t, firstLine(c.Reason))
		return nil
	}
	i.failedUnheard(t, problem{code: cmp.Or(c.Code, "cancelled"), message: firstLine(c.Reason)})
	return nil
}

// cancel cancels an instance. If the instance is over, cancel changes nothing.
func (s *scene) cancel(settled leasing.Settlement) error {
	var p cancelPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	i, err := s.undecided(p.Instance)
	if i != nil {
		i.conclude(statusCancelled, firstLine(p.Reason), p.Compensate)
	}
	return p.late(err)
}

// fail fails an instance. If the instance is over, fail changes nothing.
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
	i.conclude(statusFailed, cmp.Or(reason, "failed by hand"), true)
	return nil
}

// undecided returns the instance with an id, or nil if it is over or deleted. If the instance has begun to compensate
// since the handler looked, undecided returns an error and the run fails, because the instance will not end as the
// command asks.
func (s *scene) undecided(id uuid.UUID) (*instance, error) {
	i := s.instances[id]
	switch {
	case i == nil || i.status.final():
		return nil, nil
	case i.ending != "":
		return nil, undoing(id)
	}
	return i, nil
}

// retry resolves the incident that the handler found, and has the core try again what it stopped. It changes nothing if
// the incident was resolved, or its token moved on, since the handler looked.
func (w *writer) retry(ctx context.Context, settled leasing.Settlement) error {
	var p retryPayload
	var r retried
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &r)); err != nil {
		return err
	}
	if r.Kept { // the incident reports a row that is set aside: any worker tries it again, and then resolves the incident
		_, err := w.tx.Exec(ctx, `SELECT workflow_settle_again($1)`, r.Incident)
		return err
	}
	s := w.scene
	i, t := s.instances[r.Instance], s.tokens[r.Token]
	if i == nil || i.status.final() || t == nil || s.owners[r.Token] != i || !t.stopped && !t.joining || i.passed(t) || slices.Contains(w.resolved, r.Incident) {
		return nil
	}
	var code string
	err := w.tx.QueryRow(ctx, `SELECT code FROM incident WHERE id = $1 AND instance_id = $2 AND resolved_at IS NULL`, r.Incident, r.Instance).Scan(&code)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // somebody else has resolved the incident since the handler looked
	}
	if err != nil {
		return err
	}
	w.resolved = append(w.resolved, r.Incident)
	i.retry(t, code, p.Force)
	return nil
}

// notStarted fails the token that waits for an instance whose start has failed.
func (s *scene) notStarted(settled leasing.Settlement) {
	var p startPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil || p.Parent == nil {
		return // no token waits: the failed run reports the error to whoever enqueued it
	}
	if s.calls(p, settled.Tenant) && settled.Failure != nil && settled.Failure.Code != codeForeign {
		i, t := s.owners[p.Parent.Token], s.tokens[p.Parent.Token]
		i.failedUnheard(t, problem{code: childNotStarted, message: firstLine(settled.Failure.Message)})
	}
}
