package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// act decides what a batch of settled runs means for their instances, and writes it. It is the
// hook's second step: the instances are locked, the runs are settled.
func (e *Engine) act(ctx context.Context, tx pgx.Tx, batch []worker.Settlement) error {
	tokens, instances, err := concerned(batch)
	if err != nil {
		return err
	}
	s, err := e.load(ctx, tx, tokens, instances)
	if err != nil {
		return err
	}
	w := &writer{scene: s}
	for _, settled := range batch {
		if settled.Verdict != run.Succeed && settled.Verdict != run.Fail {
			continue // it will be tried again: its token stays where it is
		}
		switch {
		case settled.Step != uuid.Nil:
			s.move(settled)
		case settled.Verdict == run.Fail:
		case settled.Type == StartType:
			err = w.start(ctx, tx, e, settled)
		case settled.Type == CancelType:
			err = s.cancel(settled)
		case settled.Type == RetryType:
			err = s.retry(w, settled)
		}
		if err != nil {
			return err
		}
	}
	return w.write(ctx, tx)
}

// move moves the token of a step.
func (s *scene) move(settled worker.Settlement) {
	t := s.tokens[settled.Step]
	if t == nil {
		return // the instance was deleted
	}
	i := s.owners[settled.Step]
	if i.status.Final() || alive(t.state) == 0 {
		return // it came to its end in this very batch
	}
	if settled.Verdict == run.Succeed {
		i.done(t, settled.Result)
		return
	}
	f := settled.Failure
	if f == nil {
		f = &run.Failure{Code: "handler_error"}
	}
	i.failed(t, f.Code, firstLine(f.Message))
}

func (s *scene) cancel(settled worker.Settlement) error {
	var p CancelPayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	if i := s.instances[p.Instance]; i != nil && !i.status.Final() {
		i.cancel(firstLine(p.Reason))
	}
	return nil
}

func (s *scene) retry(w *writer, settled worker.Settlement) error {
	var r retried
	if err := json.Unmarshal(settled.Result, &r); err != nil {
		return err
	}
	i, t := s.instances[r.Instance], s.tokens[r.Token]
	if i == nil || i.status.Final() {
		return nil
	}
	if t == nil {
		return errors.New("graph: an incident without a token cannot be retried")
	}
	w.resolved = append(w.resolved, r.Incident)
	i.retry(t)
	return nil
}

// start places the first token of a new instance; of one that is there already, nothing.
func (w *writer) start(ctx context.Context, tx pgx.Tx, e *Engine, settled worker.Settlement) error {
	var p StartPayload
	var started Started
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &started)); err != nil {
		return err
	}
	found, err := e.processes(ctx, tx, []uuid.UUID{started.Definition})
	if err != nil {
		return err
	}
	if len(p.Input) == 0 {
		p.Input = json.RawMessage("{}")
	}
	rows, _ := tx.Query(ctx, `
		INSERT INTO process_instance (id, process_definition_id, business_key, tenant_id, priority, input_payload, metadata, version)
		VALUES ($1, $2, nullif($3, ''), nullif($4, ''), $5, $6, coalesce($7::jsonb, '{}'), 1)
		ON CONFLICT (id) DO NOTHING
		RETURNING id`,
		started.Instance, started.Definition, p.Key, p.Tenant, p.Priority, p.Input, []byte(settled.Metadata))
	id, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[uuid.UUID])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("insert process instance: %w", err)
	}
	i := newInstance()
	i.id, i.process, i.status, i.priority, i.input = id, found[started.Definition], Created, p.Priority, p.Input
	if err := json.Unmarshal(p.Input, &i.facts.input); err != nil {
		return err
	}
	w.scene.instances[id] = i
	i.begin()
	return nil
}
