package graph

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// Begin locks the instances that a batch moves, in order of id: whoever advances an instance
// holds its row. That comes first in a settle transaction, before any run is touched. With it is read
// what is needed of every instance and token; Begin returns what advances them.
func (e *Engine) Begin(first *pgx.Batch, batch []lease.Settlement) (func(context.Context, pgx.Tx, []lease.Settlement) error, error) {
	tokens, instances, err := concerned(batch)
	if err != nil {
		return nil, err
	}
	s := newScene()
	if len(tokens)+len(instances) > 0 {
		s.lock(first, tokens, instances)
	}
	return func(ctx context.Context, tx pgx.Tx, settled []lease.Settlement) error {
		t, err := in(ctx, tx)
		if err != nil {
			return err
		}
		return e.advance(ctx, t, s, settled)
	}, nil
}

// concerned lists the tokens and instances that a batch is about.
func concerned(batch []lease.Settlement) (tokens, instances []uuid.UUID, err error) {
	tokens, instances = []uuid.UUID{}, []uuid.UUID{} // not null, in which nothing is found
	for _, s := range batch {
		switch {
		case s.Verdict != run.Succeed && s.Verdict != run.Fail:
		case s.Step != uuid.Nil:
			tokens = append(tokens, s.Step)
		case s.Type == StartType:
			var p StartPayload
			problem := json.Unmarshal(s.Payload, &p)
			if s.Verdict == run.Succeed {
				err = errors.Join(err, problem)
			}
			if problem == nil && p.Parent != nil {
				tokens, instances = append(tokens, p.Parent.Token), append(instances, p.Parent.Instance)
			}
		case s.Verdict == run.Fail:
		case s.Type == cutOffType:
			var c cutOff
			err = errors.Join(err, json.Unmarshal(s.Payload, &c))
			tokens = append(tokens, c.Token)
		case s.Type == CompleteTaskType:
			var r taskRef
			err = errors.Join(err, json.Unmarshal(s.Result, &r))
			tokens, instances = append(tokens, r.Token), append(instances, r.Instance)
		case s.Type == CancelType:
			var p CancelPayload
			err = errors.Join(err, json.Unmarshal(s.Payload, &p))
			instances = append(instances, p.Instance)
		case s.Type == RetryType:
			var r retried
			err = errors.Join(err, json.Unmarshal(s.Result, &r))
			instances = append(instances, r.Instance)
			if r.Token != uuid.Nil {
				tokens = append(tokens, r.Token)
			}
		}
	}
	return tokens, instances, err
}
