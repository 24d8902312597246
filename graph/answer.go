package graph

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/run"
)

// Handlers returns the handlers of the engine's own run types, to be registered with a worker.
// They only look and answer; what they decide takes effect when their run is settled, in Advance.
// Besides them the worker needs Concerns and Begin as a hook, and to lease steps.
func (e *Engine) Handlers() map[string]func(context.Context, json.RawMessage) (json.RawMessage, error) {
	return map[string]func(context.Context, json.RawMessage) (json.RawMessage, error){
		StartType:        typed(e.start),
		CancelType:       typed(e.cancel),
		RetryType:        typed(e.retry),
		MessageType:      typed(func(_ context.Context, p MessagePayload) (struct{}, error) { return struct{}{}, p.check() }),
		SignalType:       typed(e.signal),
		CompleteTaskType: typed(e.completeTask),
		arriveType:       typed(e.arrive),
		timerType:        typed(nothing[position]),
		undoType:         typed(nothing[position]),
		cutOffType:       typed(e.cutOff),
		matchType:        typed(nothing[slot]),
		broadcastType:    typed(nothing[struct{}]),
	}
}

func nothing[In any](context.Context, In) (struct{}, error) { return struct{}{}, nil }

// typed makes an ordinary function a handler. Keys that do not exist are errors: one that is
// misspelt would change what is meant. What the database could not do is tried again, charged to
// nobody.
func typed[In, Out any](fn func(context.Context, In) (Out, error)) func(context.Context, json.RawMessage) (json.RawMessage, error) {
	return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		var in In
		if err := jsonv2.Unmarshal(payload, &in, jsonv2.RejectUnknownMembers(true)); err != nil {
			return nil, run.Permanent(run.WithCode(run.CodePayload, fmt.Errorf("payload: %s", inWords(err))))
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

// start finds the definition and says what is to be started. Nothing is started yet.
func (e *Engine) start(ctx context.Context, p StartPayload) (Started, error) {
	if p.Parent != nil {
		if err := e.called(ctx, p); err != nil {
			return Started{}, err
		}
	}
	if p.Process == "" {
		return Started{}, run.Permanent(errors.New("process: it is missing; name the process to start"))
	}
	if len(p.Input) > 0 && p.Input[0] != '{' {
		return Started{}, run.Permanent(errors.New("input: use a JSON object"))
	}
	if p.ID != uuid.Nil && p.Key != "" {
		return Started{}, run.Permanent(errors.New("id, key: give one of them; with a key the id is made of it, so that there is one instance of it"))
	}
	if len(p.Input) > 0 {
		if err := run.CheckPayload(p.Input); err != nil {
			return Started{}, run.Permanent(fmt.Errorf("input: %w", err))
		}
	}
	if p.Priority < -100 || p.Priority > 100 {
		return Started{}, run.Permanent(fmt.Errorf("priority: %d is outside -100 to 100", p.Priority))
	}
	if utf8.RuneCountInString(p.Tenant) > 200 {
		return Started{}, run.Permanent(errors.New("tenant: use at most 200 characters"))
	}
	process, err := e.find(ctx, p.Process, p.Version)
	if err != nil {
		return Started{}, err
	}
	s := Started{Instance: p.ID, Definition: process.ID, Version: process.Definition.Version}
	if p.ID != uuid.Nil {
		return s, e.unused(ctx, p.ID, p.Process)
	}
	s.Instance = run.FromContext(ctx).ID
	if p.Key != "" {
		name := p.Process + "\x00" + p.Key
		if tenant := cmp.Or(p.Tenant, run.FromContext(ctx).Tenant); tenant != "" {
			name += "\x00" + tenant
		}
		s.Instance = uuid.NewSHA1(keys, []byte(name))
	}
	return s, nil
}

// called returns an error unless the token that is said to wait for the instance does, or has done so: one
// that has left since is no mistake, nor one that retention has removed. What counts is asked once more when the run is settled.
func (e *Engine) called(ctx context.Context, p StartPayload) error {
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
	if caller == nil || caller.nodes[at] == nil || !caller.nodes[at].starts(p) || !waits || has {
		return foreign("parent: token %s does not wait for process %.100q to be started", p.Parent.Token, p.Process)
	}
	return nil
}

// starts reports whether a node calls what a run is to start.
func (n *node) starts(p StartPayload) bool {
	return n.kind == call && n.Call.Process == p.Process && n.Call.Version == p.Version && (n.Call.Undo == propagate) == p.Parent.Undo
}

// unused returns an error if an instance of another process has the id. One of this process was started twice.
func (e *Engine) unused(ctx context.Context, id uuid.UUID, process string) error {
	var other string
	err := e.pool.QueryRow(ctx, `
		SELECT d.name FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id
		WHERE i.id = $1 AND d.name <> $2`, unprepared, id, process).Scan(&other)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err == nil:
		return run.Permanent(run.WithCode("conflict", fmt.Errorf("id: %s is an instance of %s; choose another id, or leave it out", id, other)))
	}
	return fmt.Errorf("look for instance %s: %w", id, err)
}

func (e *Engine) cancel(ctx context.Context, p CancelPayload) (struct{}, error) { // the hook does it
	var undoing bool
	err := e.pool.QueryRow(ctx, `SELECT ending IS NOT NULL AND completed_at IS NULL FROM process_instance WHERE id = $1`, unprepared, p.Instance).Scan(&undoing)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = run.Permanent(fmt.Errorf("instance: there is no instance %s", p.Instance))
	case undoing:
		err = run.Permanent(run.WithCode("conflict", fmt.Errorf("instance: %s undoes what it has done, and ends then", p.Instance)))
	}
	return struct{}{}, err
}

func (e *Engine) retry(ctx context.Context, p RetryPayload) (retried, error) {
	var r retried
	if p.Incident == uuid.Nil && p.Instance == uuid.Nil {
		return r, run.Permanent(errors.New("incident, instance: name one of them"))
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

func (e *Engine) completeTask(ctx context.Context, p CompleteTaskPayload) (taskRef, error) {
	if p.By == "" {
		return taskRef{}, run.Permanent(errors.New("by: it is missing; say who completes the task"))
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
			FROM workflow_run r WHERE r.id = $1`, unprepared, p.Signal, SignalType).Scan(&payload, &its)
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
