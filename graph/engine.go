package graph

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/run"
)

// An Engine advances process instances. It caches compiled definitions, which never change, and keeps no other state of
// instances in memory.
type Engine struct {
	pool *pgxpool.Pool

	mu     sync.Mutex
	known  map[uuid.UUID]*Process
	named  map[processName]lookup        // by name, as find last found it
	asking map[processName]chan struct{} // those that are being looked up; closed once they are not

	copies string // see writer.copies

	staying atomic.Int32 // signal runs that keep their slot while the database refuses the signal for every token: see stay
}

// unprepared is the mode in which handlers query. It prepares no statement: behind a pooler, another client may get the
// session next, and would find the prepared statement there.
const unprepared = pgx.QueryExecModeCacheDescribe

// New returns an engine whose handlers read through pool. The pool may connect through a pooler, even if its config
// enables prepared statements: the engine does not use them there.
func New(pool *pgxpool.Pool) *Engine {
	return &Engine{pool: pool, known: map[uuid.UUID]*Process{}, named: map[processName]lookup{}, asking: map[processName]chan struct{}{}}
}

// Parts returns the parts of the engine that package worker calls: see worker.Config.Processes.
func (e *Engine) Parts() hook.Engine {
	return hook.Engine{Prefix: naming.Engine, Handlers: e.handlers(), Hook: hook.Hook{Concerns: e.concerns, Begin: e.begin, Backoff: e.backoff, Tend: e.tend}}
}

// concerns reports whether the engine takes part in settling a run: the run is a step of a process, or of one of the
// engine's own types.
func (e *Engine) concerns(l *leasing.Lease) bool {
	return l.Step != uuid.Nil || strings.HasPrefix(l.Type, naming.Engine)
}

// A processName is what find looks for.
type processName struct {
	name    string
	version int // 0: the highest that is deployed
}

// A lookup is what find has found, and when.
type lookup struct {
	id   uuid.UUID
	at   time.Time // by the database's clock
	seen time.Time // by this process's clock; it holds for a second, because a database's clock may be set back
}

// find returns the process with a name and version; version 0: the highest that was deployed at a time since, by the
// database's clock, or later. If there is none, the error is permanent. So of many starts that were leased together,
// one asks the database.
func (e *Engine) find(ctx context.Context, name string, version int, since time.Time) (*Process, error) {
	last, err := e.latest(ctx, processName{name, version}, since)
	if err != nil {
		return nil, err
	}
	found, err := e.processes(ctx, e.pool, []uuid.UUID{last.id})
	if err != nil {
		return nil, err
	}
	return found[last.id], nil
}

// latest returns what is remembered, if it is new enough, or asks. While one asks, the others wait for his answer. Whoever
// has waited in vain, or for a second, asks as well.
func (e *Engine) latest(ctx context.Context, key processName, since time.Time) (lookup, error) {
	e.mu.Lock()
	last, asking := e.named[key], e.asking[key]
	fresh := last.at.After(since) && time.Since(last.seen) <= time.Second
	if !fresh && asking == nil {
		asked := make(chan struct{})
		e.asking[key] = asked
		defer func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			delete(e.asking, key)
			close(asked)
		}()
	}
	e.mu.Unlock()
	if fresh {
		return last, nil
	}
	if asking != nil {
		enough := time.NewTimer(time.Second)
		defer enough.Stop()
		select {
		case <-asking:
		case <-enough.C:
		case <-ctx.Done():
			return lookup{}, fmt.Errorf("find process: %w", ctx.Err())
		}
		e.mu.Lock()
		last = e.named[key]
		e.mu.Unlock()
		if last.at.After(since) { // however long the answer took
			return last, nil
		}
	}
	return e.lookUp(ctx, key)
}

// lookUp asks the database which process has a name, and remembers the answer.
func (e *Engine) lookUp(ctx context.Context, key processName) (found lookup, err error) {
	found.seen = time.Now()
	err = e.pool.QueryRow(ctx, `
		SELECT id, statement_timestamp()
		FROM process_definition
		WHERE name = $1 AND ($2 = 0 OR version = $2)
		ORDER BY version DESC
		LIMIT 1`, unprepared, key.name, key.version).Scan(&found.id, &found.at)
	if errors.Is(err, pgx.ErrNoRows) {
		what := fmt.Sprintf("%.100q", key.name)
		if key.version != 0 {
			what += fmt.Sprintf(" version %d", key.version)
		}
		return found, run.Permanent(fmt.Errorf("process: %s is not deployed; deploy it with: workflowctl define FILE", what))
	}
	if err != nil {
		return found, fmt.Errorf("find process: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.named[key] = found
	return found, nil
}

// A querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// processes returns definitions by id. It reads and compiles those that are not cached. An id without a row is absent
// from the map.
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

// firstLine returns the first line of an error's text, cut to 4000 bytes and valid UTF-8, so that it can be stored.
func firstLine(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return strings.ToValidUTF8(text[:min(len(text), 4000)], "")
}
