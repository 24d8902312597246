package graph

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// An Engine moves process instances on. It keeps definitions in memory, which never change,
// and nothing else.
type Engine struct {
	pool *pgxpool.Pool

	mu    sync.Mutex
	known map[uuid.UUID]*Process

	staying atomic.Int32 // runs of signals that are refused to all, and wait in their slots
}

// unprepared is how handlers ask: what a statement left behind in a session, a pooler would give to others.
const unprepared = pgx.QueryExecModeCacheDescribe

// New returns an engine whose handlers read from the pool's database. A pooler may be between, whatever
// the pool's config says of prepared statements.
func New(pool *pgxpool.Pool) *Engine {
	return &Engine{pool: pool, known: map[uuid.UUID]*Process{}}
}

// Parts is for package worker: see worker.Config.Processes.
func (e *Engine) Parts() hook.Engine {
	return hook.Engine{Prefix: Prefix, Handlers: e.handlers(), Hook: hook.Hook{Concerns: e.concerns, Begin: e.begin, Backoff: e.backoff, Tend: e.tend}}
}

// concerns reports whether the engine has to know how a run is settled: it is a step of a process,
// or of the engine's own types.
func (e *Engine) concerns(l *leasing.Lease) bool {
	return l.Step != uuid.Nil || strings.HasPrefix(l.Type, Prefix)
}

// find returns a process by name and version; 0: its highest.
func (e *Engine) find(ctx context.Context, name string, version int) (*Process, error) {
	var id uuid.UUID
	err := e.pool.QueryRow(ctx, `
		SELECT id
		FROM process_definition
		WHERE name = $1 AND ($2 = 0 OR version = $2)
		ORDER BY version DESC
		LIMIT 1`, unprepared, name, version).Scan(&id)
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
	rows, _ := db.Query(ctx, `SELECT id, definition FROM process_definition WHERE id = ANY ($1)`, unprepared, missing)
	var id uuid.UUID
	var text []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &text}, func() error {
		d, err := parse(text)
		if err != nil {
			return run.Permanent(err)
		}
		p, _, err := compileAll(d, false)
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

// firstLine keeps an error's text fit for a row.
func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return strings.ToValidUTF8(text[:min(len(text), 4000)], "")
}
