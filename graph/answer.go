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

// checked is the handler function of a run that needs no more than a well-formed payload.
func checked[In interface{ check() error }](_ context.Context, in In) (struct{}, error) {
	if err := in.check(); err != nil {
		return struct{}{}, run.Permanent(err)
	}
	return struct{}{}, nil
}

// typed makes a handler of fn. An unknown key in the payload is a permanent error, because a misspelt key would change
// what the request means. If fn returns a permanent error, a refusal (see refused) or run.Again, the handler returns
// that error. Any other error means that the database could not answer: the run is put off for 1 s and no attempt is
// charged.
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

// refused reports whether the database rejects the statement itself (SQLSTATE class 42), for example for lack of a
// privilege. Trying that again for ever would hide the cause.
func refused(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && strings.HasPrefix(pg.Code, "42")
}

// keys is the namespace in which the id of an instance is derived from its process, business key and tenant. Two starts
// with the same key therefore get the same id, whichever comes first.
var keys = uuid.MustParse("6f1f0d1e-4f0a-5b52-9c8e-3d2d6a3c7a10")

// start finds the definition and decides which instance to start. It starts nothing: when the run is settled, the
// engine checks again whether the id is free, or taken by an instance that matches the request.
func (e *Engine) start(ctx context.Context, p startPayload) (Started, error) {
	if p.Parent != nil {
		if err := e.called(ctx, p); err != nil {
			return Started{}, err
		}
	}
	if err := p.check(); err != nil {
		return Started{}, run.Permanent(err)
	}
	process, err := e.find(ctx, p.Process, p.Version, run.FromContext(ctx).StartedAt)
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
		// The id of the next instance is derived from the id of this one. If an instance with that id exists, it was
		// inserted since the query, or created_at is out of order because a clock was set back: then look at that one.
		s.Instance, s.After = keyed(p, first.Instance.String()), first.Instance
		asking, more = meeting, nil
	}
}

// keyed returns the id of the instance that has the key of p. With after, the id of an instance that had the key before
// and is over, it returns the id of the next instance with the key; empty: of the first one.
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

// called returns an error unless the token that the parent of p names waits for the instance, or did so before. A token
// that has left its node since, or that retention has removed, is no error. The engine checks the same again when the
// run is settled, with the caller locked; that check decides.
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
		return nil // its instance is over, and retention has removed it
	case err != nil:
		return fmt.Errorf("look for token %s: %w", p.Parent.Token, err)
	case owner != p.Parent.Instance || depth+1 != p.Parent.Depth || visit < p.Parent.Visit:
		return foreign("parent: instance, visit or depth are not those of token %s", p.Parent.Token)
	case p.Key != "" || p.ID != uuid.Nil || p.Tenant != "" || run.FromContext(ctx).Tenant != tenant:
		return foreign("parent: an instance that is called has the tenant of its caller, and no key or id of its own")
	case visit > p.Parent.Visit:
		return nil // the token has left the node
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

// starts reports whether n is a call node that calls the process and version that p starts, with the same "undo".
func starts(n *node, p startPayload) bool {
	return n.kind == call && n.Call.Process == p.Process && n.Call.Version == p.Version && (n.Call.Undo == propagate) == p.Parent.Undo
}

// undecided returns a permanent error if the instance is already compensating, with the code conflict, or if it does
// not exist. The handlers of cancel and fail call it; the instance is changed when the run is settled.
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

// undoing returns the error of a command that would end an instance which is already compensating.
func undoing(instance uuid.UUID) error {
	return run.Permanent(run.WithCode("conflict", fmt.Errorf("instance: %s is already undoing its completed steps, and ends after that", instance)))
}

// retry finds the open incident to retry: the oldest incident that stops a token, or if there is none, the oldest that
// reports a row which is set aside.
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

// completeTask checks that the task is open, that p.By may complete it, and that it has the version that the person
// saw.
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
		return r, foreign("task: %s does not belong to the token and instance that it names; see process_fault", p.Task)
	case err == nil && (assignee != p.By || p.Version != 0 && p.Version != version):
		return r, run.Permanent(run.WithCode("conflict", fmt.Errorf("task: %s is assigned to %s, version %d", p.Task, assignee, version)))
	}
	return r, err
}

// cutOff returns an error unless the token was cut off: a run of the token was cancelled or deleted, or, with the code
// child_not_started, the instance that it waits for does not exist. A token that retention has removed is no error;
// nothing is done for it.
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

// arrive returns the payload of the message or signal, or the output of the called instance, that arrived at the token
// of the run. If the called instance did not complete, arrive returns a permanent error with the code child_failed or
// child_cancelled. It refuses a message, signal or instance that belongs to another token.
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
		var status status
		var reason string
		err = e.pool.QueryRow(ctx, `
			SELECT c.status, coalesce(c.output_payload, 'null'), coalesce(c.failure_reason, ''),
			       (c.parent_token_id, c.parent_process_instance_id, c.parent_visit) IS NOT DISTINCT FROM (t.id, t.instance_id, $2::bigint) AND c.completed_at IS NOT NULL
			FROM process_instance c, workflow_run r JOIN process_token t ON t.id = r.token_id
			WHERE c.id = $1 AND r.id = $3`, unprepared, p.Child, p.Visit, own).Scan(&status, &payload, &reason, &its)
		if err == nil && its && status != statusCompleted {
			err = run.Permanent(run.WithCode("child_"+strings.ToLower(string(status)), fmt.Errorf("instance %s: %s %s", p.Child, status, reason)))
		}
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = run.Permanent(run.WithCode("gone", errors.New("the message, signal or called instance was deleted before the token took it")))
	case err == nil && !its:
		err = foreign("message, signal, child: none of them belongs to this token")
	}
	return payload, err
}
