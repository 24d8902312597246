package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// Lock locks the instances that a batch moves, in order of id: whoever advances an instance
// holds its row. It comes first in a settle transaction, before any run is touched.
func (e *Engine) Lock(ctx context.Context, tx pgx.Tx, batch []lease.Settlement) error {
	tokens, instances, err := concerned(batch)
	if err != nil || len(tokens)+len(instances) == 0 {
		return err
	}
	_, err = tx.Exec(ctx, `
		SELECT FROM process_instance
		WHERE id = ANY (ARRAY(SELECT instance_id FROM process_token WHERE id = ANY ($1)) || $2::uuid[])
		ORDER BY id
		FOR NO KEY UPDATE`, plain([]any{tokens, instances})...)
	if err != nil {
		return fmt.Errorf("lock process instances: %w", err)
	}
	return nil
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
