package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// forge enqueues a start as if it came from a token that waits for something else. First a client does so, whom the
// database must refuse; then somebody with the engine's rights, whose run must change nothing.
func forge(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	id, at := newID(r), r.Float64()
	process := []string{"nobody", "post"}[r.IntN(2)] // one is not deployed, and nothing calls the other
	var instance, token uuid.UUID
	var visit int64
	var depth int
	found, err := soon(ctx, func() (bool, error) {
		err := l.admin.QueryRow(ctx, `
			SELECT i.id, t.id, t.version, i.depth
			FROM process_token t JOIN process_instance i ON i.id = t.instance_id
			WHERE t.state = 'Waiting' AND i.completed_at IS NULL
			ORDER BY md5(t.id::text || $1::text)
			LIMIT 1`, fmt.Sprint(at)).Scan(&instance, &token, &visit, &depth)
		if errors.Is(err, pgx.ErrNoRows) {
			return false, nil
		}
		return err == nil, err
	})
	if !found {
		return noOne, l.excuse(err)
	}
	payload, err := json.Marshal(map[string]any{
		"process": process, "input": map[string]any{"tag": id},
		"parent": map[string]any{"instance": instance, "token": token, "visit": visit, "depth": depth + 1},
	})
	if err != nil {
		return noOne, err
	}
	insert := func(believed string) error {
		return pgx.BeginFunc(ctx, l.admin, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, believed); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO workflow_run (id, type, payload, max_attempts) VALUES ($1, 'graph.start.v1', $2, 100)`, id, payload)
			return err
		})
	}
	if err := insert(`SET LOCAL ROLE ` + clientRole); err == nil {
		l.ledger.add(entry{Kind: "forged", Run: id.String()})
		return nobody, nil
	}
	e := entry{Kind: "enqueue", Run: id.String(), Type: "graph.start.v1", Case: "forged", Payload: payload, Answer: "done"}
	found, err = soon(ctx, func() (bool, error) { // in spite of storms
		err := insert(`SET LOCAL workflow.advance = on`)
		return judge(err) != refused, err
	})
	switch {
	case !found:
		return noOne, nil
	case err != nil:
		e.Answer = "unknown"
	}
	l.ledger.add(e)
	return nobody, nil
}
