package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// Prefix is that of the engine's own run types.
const Prefix = "graph."

// The engine's run types, with their payloads. Anybody may enqueue them, by SQL or from Go.
const (
	StartType  = "graph.start.v1"  // StartPayload
	CancelType = "graph.cancel.v1" // CancelPayload
	RetryType  = "graph.retry.v1"  // RetryPayload

	MessageType      = "graph.message.v1"       // MessagePayload
	SignalType       = "graph.signal.v1"        // SignalPayload
	CompleteTaskType = "graph.complete_task.v1" // CompleteTaskPayload
)

// Runs that the engine enqueues for itself.
const (
	arriveType = "graph.arrive.v1"  // something that a token waits for has come
	matchType  = "graph.match.v1"   // a message is free again
	cutOffType = "graph.cut_off.v1" // somebody has cancelled or deleted a step
)

// StartPayload starts an instance of a process.
type StartPayload struct {
	Process  string          `json:"process"`
	Version  int             `json:"version,omitzero"`  // 0: the highest there is
	Input    json.RawMessage `json:"input,omitzero"`    // an object; none: {}
	Key      string          `json:"key,omitzero"`      // at most one instance of the process has it, for as long as that is kept
	ID       uuid.UUID       `json:"id,omitzero"`       // of the instance; zero: made of process and key, or the run's own
	Priority int             `json:"priority,omitzero"` // of all its steps
	Tenant   string          `json:"tenant,omitzero"`

	Parent *parentPayload `json:"parent,omitzero"` // set by call nodes only
}

// A parentPayload says which token waits for the instance, and at which of its visits.
type parentPayload struct {
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
	Visit    int64     `json:"visit"`
	Depth    int       `json:"depth"`
}

// Started is the result of a run that starts an instance. It is the same if the instance had
// been started before.
type Started struct {
	Instance   uuid.UUID `json:"instance"`
	Definition uuid.UUID `json:"definition"`
	Version    int       `json:"version"`
}

// CancelPayload cancels an instance, for good.
type CancelPayload struct {
	Instance uuid.UUID `json:"instance"`
	Reason   string    `json:"reason,omitzero"`

	// Compensate undoes what was done before the instance is cancelled.
	Compensate bool `json:"compensate,omitzero"`
}

// MessagePayload is a message to the one token that waits for its name and key: the one that has
// waited longest, or the first that comes before the message's time is over.
type MessagePayload struct {
	Name    string          `json:"name"`
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
	ID      string          `json:"id,omitzero"`      // the sender's: the same again changes nothing; none: the run's
	TTL     Duration        `json:"ttl,omitzero"`     // none: a day
}

// SignalPayload is a signal to all tokens that wait for it now.
type SignalPayload struct {
	Name    string          `json:"name"`
	Payload json.RawMessage `json:"payload,omitzero"` // none: {}
}

// CompleteTaskPayload completes a person's task.
type CompleteTaskPayload struct {
	Task    uuid.UUID       `json:"task"`
	By      string          `json:"by"`
	Output  json.RawMessage `json:"output,omitzero"`  // none: {}
	Version int64           `json:"version,omitzero"` // the one that was seen; 0: any
}

// A cutOff tells that the step of a token was cancelled or deleted, at a visit of the token's.
type cutOff struct {
	Token  uuid.UUID `json:"token"`
	Visit  int64     `json:"visit"`
	Reason string    `json:"reason,omitzero"`
}

// taskRef is the result of a run that completes a task.
type taskRef struct {
	Task     uuid.UUID `json:"task"`
	Instance uuid.UUID `json:"instance"`
	Token    uuid.UUID `json:"token"`
}

// RetryPayload has what an incident stopped tried again: this one, or the oldest open one of an
// instance.
type RetryPayload struct {
	Incident uuid.UUID `json:"incident,omitzero"`
	Instance uuid.UUID `json:"instance,omitzero"`
}

// retried is the result of a run that retries an incident.
type retried struct {
	Instance uuid.UUID `json:"instance"`
	Incident uuid.UUID `json:"incident"`
	Token    uuid.UUID `json:"token"`
}

// An Engine moves process instances on. It keeps definitions in memory, which never change,
// and nothing else.
type Engine struct {
	pool *pgxpool.Pool

	mu    sync.Mutex
	known map[uuid.UUID]*Process
}

// New returns an engine that reads definitions from the pool's database.
func New(pool *pgxpool.Pool) *Engine {
	return &Engine{pool: pool, known: map[uuid.UUID]*Process{}}
}

// Handlers returns the handlers of the engine's own run types, to be registered with a worker.
// They only look and answer; what they decide takes effect when their run is settled, in Advance.
// Besides them the worker needs Concerns, Lock and Advance as a hook, and to lease steps.
func (e *Engine) Handlers() map[string]func(context.Context, json.RawMessage) (json.RawMessage, error) {
	return map[string]func(context.Context, json.RawMessage) (json.RawMessage, error){
		StartType:        typed(e.start),
		CancelType:       typed(e.cancel),
		RetryType:        typed(e.retry),
		MessageType:      typed(func(_ context.Context, p MessagePayload) (struct{}, error) { return struct{}{}, p.check() }),
		SignalType:       typed(func(_ context.Context, p SignalPayload) (struct{}, error) { return struct{}{}, named(p.Name) }),
		CompleteTaskType: typed(e.completeTask),
		arriveType:       typed(e.arrive),
		timerType:        typed(nothing[position]),
		undoType:         typed(nothing[position]),
		cutOffType:       typed(nothing[cutOff]),
		matchType:        typed(nothing[slot]),
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
		switch {
		case err == nil:
			return json.Marshal(out)
		case run.IsPermanent(err):
			return nil, err
		}
		return nil, run.Again(time.Second)
	}
}

// Concerns reports whether the engine has to know how a run is settled: it is a step of a process,
// or of the engine's own types.
func (e *Engine) Concerns(l *lease.Lease) bool {
	return l.Step != uuid.Nil || strings.HasPrefix(l.Type, Prefix)
}

// keys makes an instance's id of its process and business key, so that two starts with one key
// mean one instance, whichever comes first.
var keys = uuid.MustParse("6f1f0d1e-4f0a-5b52-9c8e-3d2d6a3c7a10")

// start finds the definition and says what is to be started. Nothing is started yet.
func (e *Engine) start(ctx context.Context, p StartPayload) (Started, error) {
	if p.Process == "" {
		return Started{}, run.Permanent(errors.New("process: it is missing; name the process to start"))
	}
	if len(p.Input) > 0 && p.Input[0] != '{' {
		return Started{}, run.Permanent(errors.New("input: use a JSON object"))
	}
	if p.Priority < -100 || p.Priority > 100 {
		return Started{}, run.Permanent(fmt.Errorf("priority: %d is outside -100 to 100", p.Priority))
	}
	process, err := e.find(ctx, p.Process, p.Version)
	if err != nil {
		return Started{}, err
	}
	s := Started{Instance: p.ID, Definition: process.ID, Version: process.Definition.Version}
	if s.Instance == uuid.Nil {
		s.Instance = run.FromContext(ctx).ID
		if p.Key != "" {
			s.Instance = uuid.NewSHA1(keys, []byte(p.Process+"\x00"+p.Key))
		}
	}
	return s, nil
}

func (e *Engine) cancel(ctx context.Context, p CancelPayload) (struct{}, error) { // the hook does it
	var undoing bool
	err := e.pool.QueryRow(ctx, `SELECT ending IS NOT NULL AND completed_at IS NULL FROM process_instance WHERE id = $1`, p.Instance).Scan(&undoing)
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
	err := e.pool.QueryRow(ctx, `
		SELECT id, instance_id, coalesce(token_id, '00000000-0000-0000-0000-000000000000')
		FROM incident
		WHERE (id = $1 OR instance_id = $2) AND resolved_at IS NULL
		ORDER BY created_at, id
		LIMIT 1`, p.Incident, p.Instance).Scan(&r.Incident, &r.Instance, &r.Token)
	if errors.Is(err, pgx.ErrNoRows) {
		err = run.Permanent(errors.New("incident, instance: there is no such open incident; see SELECT * FROM incident WHERE resolved_at IS NULL"))
	}
	return r, err
}

func (p MessagePayload) check() error {
	if len(p.Key) > 200 || len(p.ID) > 200 {
		return run.Permanent(errors.New("key and id: use at most 200 bytes"))
	}
	if p.Key == "" {
		return run.Permanent(errors.New("key: it is missing; say which instance is meant, as its await node does"))
	}
	if p.TTL < 0 {
		return run.Permanent(errors.New("ttl: it is negative"))
	}
	return named(p.Name)
}

func named(name string) error {
	if name == "" || len(name) > 200 {
		return run.Permanent(errors.New("name: use 1 to 200 characters"))
	}
	return nil
}

func (e *Engine) completeTask(ctx context.Context, p CompleteTaskPayload) (taskRef, error) {
	if p.By == "" {
		return taskRef{}, run.Permanent(errors.New("by: it is missing; say who completes the task"))
	}
	r := taskRef{Task: p.Task}
	var state, assignee string
	var version int64
	err := e.pool.QueryRow(ctx, `SELECT instance_id, token_id, state, coalesce(assignee, $2), version FROM user_task WHERE id = $1`, p.Task, p.By).
		Scan(&r.Instance, &r.Token, &state, &assignee, &version)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return r, run.Permanent(fmt.Errorf("task: there is no task %s", p.Task))
	case err == nil && state != "open":
		return r, run.Permanent(run.WithCode("conflict", fmt.Errorf("task: %s is %s", p.Task, state)))
	case err == nil && (assignee != p.By || p.Version != 0 && p.Version != version):
		return r, run.Permanent(run.WithCode("conflict", fmt.Errorf("task: %s is assigned to %s, version %d", p.Task, assignee, version)))
	}
	return r, err
}

// arrive returns what has come, or fails with what has failed.
func (e *Engine) arrive(ctx context.Context, p position) (json.RawMessage, error) {
	var payload []byte
	var err error
	switch {
	case p.Message != uuid.Nil:
		err = e.pool.QueryRow(ctx, `SELECT payload FROM message WHERE id = $1`, p.Message).Scan(&payload)
	case p.Signal != uuid.Nil:
		err = e.pool.QueryRow(ctx, `SELECT coalesce(payload->'payload', '{}') FROM workflow_run WHERE id = $1`, p.Signal).Scan(&payload)
	case p.Child != uuid.Nil:
		var status Status
		var reason string
		err = e.pool.QueryRow(ctx, `SELECT status, coalesce(output_payload, 'null'), coalesce(failure_reason, '') FROM process_instance WHERE id = $1`,
			p.Child).Scan(&status, &payload, &reason)
		if err == nil && status != Completed {
			err = run.Permanent(run.WithCode("child_"+strings.ToLower(string(status)), fmt.Errorf("instance %s: %s %s", p.Child, status, reason)))
		}
	}
	return payload, err
}

// find returns a process by name and version; 0: its highest.
func (e *Engine) find(ctx context.Context, name string, version int) (*Process, error) {
	var id uuid.UUID
	err := e.pool.QueryRow(ctx, `
		SELECT id
		FROM process_definition
		WHERE name = $1 AND ($2 = 0 OR version = $2)
		ORDER BY version DESC
		LIMIT 1`, name, version).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		what := fmt.Sprintf("%.100q", name)
		if version != 0 {
			what += fmt.Sprintf(" version %d", version)
		}
		return nil, run.Permanent(fmt.Errorf("process: %s is not deployed; deploy it with: workflowctl define FILE", what))
	}
	if err != nil {
		return nil, fmt.Errorf("find process: %w", err)
	}
	found, err := e.processes(ctx, e.pool, []uuid.UUID{id})
	if err != nil {
		return nil, err
	}
	return found[id], nil
}

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// processes returns definitions by id, from memory as far as they are there.
func (e *Engine) processes(ctx context.Context, db querier, ids []uuid.UUID) (map[uuid.UUID]*Process, error) {
	found, missing := map[uuid.UUID]*Process{}, []uuid.UUID{}
	e.mu.Lock()
	for _, id := range ids {
		if p := e.known[id]; p != nil {
			found[id] = p
		} else {
			missing = append(missing, id)
		}
	}
	e.mu.Unlock()
	if len(missing) == 0 {
		return found, nil
	}
	rows, _ := db.Query(ctx, `SELECT id, definition FROM process_definition WHERE id = ANY ($1)`, missing)
	var id uuid.UUID
	var text []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &text}, func() error {
		d, err := Parse(text)
		if err != nil {
			return run.Permanent(err)
		}
		p, _, err := Compile(d)
		if err != nil {
			return run.Permanent(err)
		}
		p.ID = id
		found[id] = p
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read process definitions: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, p := range found {
		e.known[id] = p
	}
	return found, nil
}

// Deploy stores a definition and returns its id. The same text again changes nothing; another
// text under the same version is refused. It returns an *InvalidError if the definition cannot
// be used.
func Deploy(ctx context.Context, db run.DB, d *Definition) (uuid.UUID, error) {
	if _, _, err := Compile(d); err != nil {
		return uuid.Nil, err
	}
	text, err := d.JSON()
	if err != nil {
		return uuid.Nil, err
	}
	rows, _ := db.Query(ctx, `
		INSERT INTO process_definition (definition)
		VALUES ($1::jsonb)
		ON CONFLICT (name, version) DO NOTHING
		RETURNING id`, text)
	id, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[uuid.UUID])
	if !errors.Is(err, pgx.ErrNoRows) {
		return id, err
	}
	rows, _ = db.Query(ctx, `
		SELECT id, definition = $3::jsonb
		FROM process_definition
		WHERE name = $1 AND version = $2`, d.Process, d.Version, text)
	var same bool
	_, err = pgx.ForEachRow(rows, []any{&id, &same}, func() error { return nil })
	if err == nil && !same {
		err = fmt.Errorf("graph: process %q version %d is deployed with another text; give the edited one a higher version", d.Process, d.Version)
	}
	return id, err
}

// firstLine keeps an error's text fit for a row.
func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return strings.ToValidUTF8(text[:min(len(text), 4000)], "")
}
