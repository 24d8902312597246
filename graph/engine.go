package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Prefix is that of the engine's own run types.
const Prefix = "graph."

// The engine's run types, with their payloads. Anybody may enqueue them, by SQL or from Go.
const (
	StartType  = "graph.start.v1"  // StartPayload
	CancelType = "graph.cancel.v1" // CancelPayload
	RetryType  = "graph.retry.v1"  // RetryPayload
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
}

// RetryPayload has what an incident stopped tried again.
type RetryPayload struct {
	Incident uuid.UUID `json:"incident"`
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

// Register registers the handlers of the engine's own run types. What they decide takes effect
// in the hook; a worker needs both, and Config.Steps.
func (e *Engine) Register(mux *worker.Mux) {
	worker.Handle(mux, StartType, e.start)
	worker.Handle(mux, CancelType, e.cancel)
	worker.Handle(mux, RetryType, e.retry)
	worker.Handle(mux, timerType, func(context.Context, struct{}) (struct{}, error) { return struct{}{}, nil })
}

// Hook returns the engine's part in settle transactions.
func (e *Engine) Hook() worker.Hook {
	return worker.Hook{Concerns: concerns, Lock: lock, Act: e.act}
}

func concerns(l *lease.Lease) bool {
	return l.Step != uuid.Nil || l.Type == StartType || l.Type == CancelType || l.Type == RetryType
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

func (e *Engine) cancel(ctx context.Context, p CancelPayload) (struct{}, error) {
	var there bool
	err := e.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM process_instance WHERE id = $1)`, p.Instance).Scan(&there)
	if err == nil && !there {
		err = run.Permanent(fmt.Errorf("instance: there is no instance %s", p.Instance))
	}
	return struct{}{}, err
}

func (e *Engine) retry(ctx context.Context, p RetryPayload) (retried, error) {
	r := retried{Incident: p.Incident}
	err := e.pool.QueryRow(ctx, `
		SELECT instance_id, coalesce(token_id, '00000000-0000-0000-0000-000000000000')
		FROM incident
		WHERE id = $1 AND resolved_at IS NULL`, p.Incident).Scan(&r.Instance, &r.Token)
	if errors.Is(err, pgx.ErrNoRows) {
		err = run.Permanent(fmt.Errorf("incident: there is no open incident %s", p.Incident))
	}
	return r, err
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
	return text[:min(len(text), 4000)]
}
