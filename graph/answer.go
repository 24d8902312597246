package graph

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

func nothing[In any](context.Context, In) (struct{}, error) { return struct{}{}, nil }

// checked answers a run of which nothing has to be known but that it makes sense.
func checked[In interface{ check() error }](_ context.Context, in In) (struct{}, error) {
	if err := in.check(); err != nil {
		return struct{}{}, run.Permanent(err)
	}
	return struct{}{}, nil
}

// typed makes an ordinary function a handler. Keys that do not exist are errors: one that is
// misspelt would change what is meant. What the database could not do is tried again, charged to
// nobody.
func typed[In, Out any](fn func(context.Context, In) (Out, error)) func(context.Context, json.RawMessage) (json.RawMessage, error) {
	return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		var in In
		if err := jsonv2.Unmarshal(payload, &in, jsonv2.RejectUnknownMembers(true)); err != nil {
			return nil, run.Permanent(run.WithCode(settling.CodePayload, fmt.Errorf("payload: %s", inWords(err))))
		}
		out, err := fn(ctx, in)
		_, putOff, _ := run.Delay(err)
		switch {
		case err == nil:
			return json.Marshal(out)
		case run.IsPermanent(err), refused(err), putOff:
			return nil, err
		}
		return nil, run.Again(time.Second)
	}
}

// refused reports whether the database understood, and refuses, for want of a right, say: to try
// again for ever would hide why.
func refused(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && strings.HasPrefix(pg.Code, "42")
}

// keys makes an instance's id of its process, business key and tenant, so that two starts with one key
// mean one instance, whichever comes first.
var keys = uuid.MustParse("6f1f0d1e-4f0a-5b52-9c8e-3d2d6a3c7a10")

// start finds the definition and says what is to be started. Nothing is started yet: whether the id is still free,
// or taken for the same, is asked once more when the run is settled.
func (e *Engine) start(ctx context.Context, p startPayload) (Started, error) {
	if p.Parent != nil {
		if err := e.called(ctx, p); err != nil {
			return Started{}, err
		}
	}
	if err := p.check(); err != nil {
		return Started{}, run.Permanent(err)
	}
	process, err := e.find(ctx, p.Process, p.Version)
	if err != nil {
		return Started{}, err
	}
	own := run.FromContext(ctx)
	s := Started{Instance: cmp.Or(p.ID, own.ID), Definition: process.ID, Version: process.Definition.Version}
	p.Tenant = cmp.Or(p.Tenant, own.Tenant)
	asking, more := meeting, []any(nil)
	if p.Key != "" {
		s.Instance = keyed(p, "")
		asking, more = newest, []any{p.Key, p.Process}
	}
	if s.Instance == own.ID {
		return s, nil
	}
	for {
		b := birth{asked: p, started: s}
		rows, _ := e.pool.Query(ctx, asking, append([]any{unprepared, s.Instance, p.Tenant, p.input()}, more...)...)
		first, over, conflict, err := b.meet(rows)
		if err != nil {
			return Started{}, fmt.Errorf("look for instance %s: %w", s.Instance, err)
		}
		if !p.Again || !over {
			return first, conflict
		}
		// Whoever starts one after this gives it the same id. If there is one, it has come just now, or a clock was put back.
		s.Instance, s.After = keyed(p, first.Instance.String()), first.Instance
		asking, more = meeting, nil
	}
}

// keyed returns the id of an instance that has a key: of the first one, or of the one that gets it after another, which is over.
func keyed(p startPayload, after string) uuid.UUID {
	name := p.Process + "\x00" + p.Key
	if p.Tenant != "" || after != "" {
		name += "\x00" + p.Tenant
	}
	if after != "" {
		name += "\x00" + after
	}
	return uuid.NewSHA1(keys, []byte(name))
}

// called returns an error unless the token that is said to wait for the instance does, or has done so: one
// that has left since is no mistake, nor one that retention has removed. What counts is asked once more when the run is settled.
func (e *Engine) called(ctx context.Context, p startPayload) error {
	var owner, definition uuid.UUID
	var visit int64
	var depth int
	var at, tenant string
	var waits, has bool
	err := e.pool.QueryRow(ctx, `
		SELECT i.id, i.process_definition_id, t.version, i.depth, t.node, coalesce(i.tenant_id, ''), t.state = 'Waiting',
		       EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = t.id AND c.parent_visit = t.version AND c.id <> $2)
		FROM process_token t JOIN process_instance i ON i.id = t.instance_id
		WHERE t.id = $1`, unprepared, p.Parent.Token, run.FromContext(ctx).ID).Scan(&owner, &definition, &visit, &depth, &at, &tenant, &waits, &has)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil // its instance was over, and retention has removed it
	case err != nil:
		return fmt.Errorf("look for token %s: %w", p.Parent.Token, err)
	case owner != p.Parent.Instance || depth+1 != p.Parent.Depth || visit < p.Parent.Visit:
		return foreign("parent: instance, visit or depth are not those of token %s", p.Parent.Token)
	case p.Key != "" || p.ID != uuid.Nil || p.Tenant != "" || run.FromContext(ctx).Tenant != tenant:
		return foreign("parent: an instance that is called has the tenant of its caller, and no key or id of its own")
	case visit > p.Parent.Visit:
		return nil // it has left
	}
	processes, err := e.processes(ctx, e.pool, []uuid.UUID{definition})
	if err != nil {
		return err
	}
	caller := processes[definition]
	if caller == nil || caller.nodes[at] == nil || !starts(caller.nodes[at], p) || !waits || has {
		return foreign("parent: token %s does not wait for process %.100q to be started", p.Parent.Token, p.Process)
	}
	return nil
}

// starts reports whether a node calls what a run is to start.
func starts(n *node, p startPayload) bool {
	return n.kind == call && n.Call.Process == p.Process && n.Call.Version == p.Version && (n.Call.Undo == propagate) == p.Parent.Undo
}

// undecided returns an error if an instance undoes what it has done already, or is none. The rest is done when the run is settled.
func (e *Engine) undecided(ctx context.Context, instance uuid.UUID) error {
	var ending bool
	err := e.pool.QueryRow(ctx, `SELECT ending IS NOT NULL AND completed_at IS NULL FROM process_instance WHERE id = $1`, unprepared, instance).Scan(&ending)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = run.Permanent(fmt.Errorf("instance: there is no instance %s", instance))
	case ending:
		err = undoing(instance)
	}
	return err
}

// undoing is the failure of a command to end an instance that comes too late.
func undoing(instance uuid.UUID) error {
	return run.Permanent(run.WithCode("conflict", fmt.Errorf("instance: %s undoes what it has done, and ends then", instance)))
}

func (e *Engine) retry(ctx context.Context, p retryPayload) (retried, error) {
	var r retried
	if err := p.check(); err != nil {
		return r, run.Permanent(err)
	}
	err := e.pool.QueryRow(ctx, `
		SELECT x.id, x.instance_id, coalesce(x.token_id, ( -- of an instance in which all wait at joins: one of them
			SELECT t.id
			FROM process_token t JOIN join_arrival a ON a.token_id = t.id
			WHERE t.instance_id = x.instance_id AND t.state = 'Waiting'
			ORDER BY a.surplus, t.id
			LIMIT 1), '00000000-0000-0000-0000-000000000000'), x.code IN ('not_settled', 'not_leased', 'not_reached')
		FROM incident x
		WHERE ($1::uuid = '00000000-0000-0000-0000-000000000000' OR x.id = $1) AND ($2::uuid = '00000000-0000-0000-0000-000000000000' OR x.instance_id = $2)
		  AND x.resolved_at IS NULL
		ORDER BY x.code IN ('not_settled', 'not_leased', 'not_reached'), x.created_at, x.id
		LIMIT 1`, unprepared, p.Incident, p.Instance).Scan(&r.Incident, &r.Instance, &r.Token, &r.Kept)
	if errors.Is(err, pgx.ErrNoRows) {
		err = run.Permanent(errors.New("incident, instance: there is no such open incident; see SELECT * FROM incident WHERE resolved_at IS NULL"))
	}
	return r, err
}

func (e *Engine) completeTask(ctx context.Context, p completeTaskPayload) (taskRef, error) {
	if err := p.check(); err != nil {
		return taskRef{}, run.Permanent(err)
	}
	r := taskRef{Task: p.Task}
	var state, assignee string
	var version int64
	var its bool
	err := e.pool.QueryRow(ctx, `
		SELECT k.instance_id, k.token_id, k.state, coalesce(k.assignee, $2), k.version,
		       (SELECT (t.instance_id, t.node) = (k.instance_id, k.node) FROM process_token t WHERE t.id = k.token_id) IS TRUE
		FROM user_task k WHERE k.id = $1`, unprepared, p.Task, p.By).
		Scan(&r.Instance, &r.Token, &state, &assignee, &version, &its)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return r, run.Permanent(fmt.Errorf("task: there is no task %s", p.Task))
	case err == nil && state != "open":
		return r, run.Permanent(run.WithCode("conflict", fmt.Errorf("task: %s is %s", p.Task, state)))
	case err == nil && !its:
		return r, foreign("task: %s is not of the token and instance that it names; see process_fault", p.Task)
	case err == nil && (assignee != p.By || p.Version != 0 && p.Version != version):
		return r, run.Permanent(run.WithCode("conflict", fmt.Errorf("task: %s is assigned to %s, version %d", p.Task, assignee, version)))
	}
	return r, err
}

// cutOff finds out whether a token was cut off: whether somebody has cancelled or deleted a run of its, or it
// waits for an instance that has not been started. One that retention has removed needs nothing, and is no mistake.
func (e *Engine) cutOff(ctx context.Context, c cutOff) (struct{}, error) {
	var is bool
	err := e.pool.QueryRow(ctx, `
		SELECT CASE WHEN NOT EXISTS (SELECT FROM process_token t WHERE t.id = $1) THEN true -- retention has removed it with its instance
		            WHEN $3 THEN NOT EXISTS (SELECT FROM process_instance i WHERE i.parent_token_id = $1 AND i.parent_visit = $2)
		            ELSE EXISTS (SELECT FROM workflow_run r WHERE r.token_id = $1 AND (r.status = 'cancelled' OR r.deleted_at IS NOT NULL)) END`,
		unprepared, c.Token, c.Visit, c.Code == childNotStarted).Scan(&is)
	if err == nil && !is {
		err = foreign("token: nothing of %s was cut off", c.Token)
	}
	return struct{}{}, err
}

// arrive returns what has come, or fails with what has failed. It was brought to the token of this run:
// what was brought to another one is not taken.
func (e *Engine) arrive(ctx context.Context, p position) (json.RawMessage, error) {
	var payload []byte
	var err error
	var its bool
	own := run.FromContext(ctx).ID
	switch {
	case p.Message != uuid.Nil:
		err = e.pool.QueryRow(ctx, `
			SELECT m.payload, m.token_id IS NOT DISTINCT FROM r.token_id FROM message m, workflow_run r WHERE m.id = $1 AND r.id = $2`, unprepared, p.Message, own).Scan(&payload, &its)
	case p.Signal != uuid.Nil:
		err = e.pool.QueryRow(ctx, `
			SELECT coalesce(r.payload->'payload', '{}'),
			       r.type = $2 AND (r.status = 'succeeded' OR EXISTS (SELECT FROM process_broadcast b WHERE b.signal_id = r.id))
			FROM workflow_run r WHERE r.id = $1`, unprepared, p.Signal, signalType).Scan(&payload, &its)
	case p.Child != uuid.Nil:
		var status Status
		var reason string
		err = e.pool.QueryRow(ctx, `
			SELECT c.status, coalesce(c.output_payload, 'null'), coalesce(c.failure_reason, ''),
			       (c.parent_token_id, c.parent_process_instance_id, c.parent_visit) IS NOT DISTINCT FROM (t.id, t.instance_id, $2::bigint) AND c.completed_at IS NOT NULL
			FROM process_instance c, workflow_run r JOIN process_token t ON t.id = r.token_id
			WHERE c.id = $1 AND r.id = $3`, unprepared, p.Child, p.Visit, own).Scan(&status, &payload, &reason, &its)
		if err == nil && its && status != Completed {
			err = run.Permanent(run.WithCode("child_"+strings.ToLower(string(status)), fmt.Errorf("instance %s: %s %s", p.Child, status, reason)))
		}
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = run.Permanent(run.WithCode("gone", errors.New("what had come was deleted before it was taken")))
	case err == nil && !its:
		err = foreign("message, signal, child: none of them has come to this token")
	}
	return payload, err
}
