package leasing

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/run"
)

// A Held is a lease that this process holds.
type Held struct {
	ID     uuid.UUID
	Token  uuid.UUID
	Length time.Duration // of an extension, counted from now
}

// Extend extends leases: it is the heartbeat, one statement for all leases of a worker. Each lease
// is extended to Length from now, but not beyond the run's deadline_at. Extend waits for no lock: a
// row that another session has locked is in neither result. kept lists the runs whose leases were
// extended. gone maps the runs whose leases are lost to run.ErrCancelled or run.ErrLost.
func Extend(ctx context.Context, db run.DB, held []Held) (kept []uuid.UUID, gone map[uuid.UUID]error, err error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_extend_v1($1, $2, $3)`,
		column.Of(held, func(h Held) [16]byte { return h.ID }),
		column.Of(held, func(h Held) [16]byte { return h.Token }),
		column.Of(held, func(h Held) float64 { return h.Length.Seconds() }))
	kept, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, nil, fmt.Errorf("extend %d leases: %w", len(held), err)
	}
	if len(kept) == len(held) {
		return kept, nil, nil
	}
	gone, err = look(ctx, db, missing(held, kept))
	return kept, gone, err
}

// ExtendRefused finds the leases that the database refuses to extend, and records them in workflow_set_aside. Call it
// after Extend has failed. None means that no row is the cause. With anyCode, every SQLSTATE counts as an answer about
// rows.
func ExtendRefused(ctx context.Context, db run.DB, held []Held, anyCode bool) ([]Aside, error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_extend_refused_v1($1, $2, $3, $4)`,
		column.Of(held, func(h Held) [16]byte { return h.ID }),
		column.Of(held, func(h Held) [16]byte { return h.Token }),
		column.Of(held, func(h Held) float64 { return h.Length.Seconds() }), anyCode)
	return collectAside(rows)
}

// missing returns the tokens of the leases that were not kept, by run id.
func missing(held []Held, kept []uuid.UUID) map[uuid.UUID]uuid.UUID {
	tokens := make(map[uuid.UUID]uuid.UUID, len(held))
	for _, h := range held {
		tokens[h.ID] = h.Token
	}
	for _, id := range kept {
		delete(tokens, id)
	}
	return tokens
}

// look finds out, without a lock, which of the leases that were not extended are gone. The others
// are only locked.
func look(ctx context.Context, db run.DB, tokens map[uuid.UUID]uuid.UUID) (map[uuid.UUID]error, error) {
	type state struct {
		ID     uuid.UUID
		Held   bool
		Status *run.Status
	}
	ids := slices.Collect(maps.Keys(tokens))
	rows, _ := db.Query(ctx, `SELECT id, held, status FROM workflow_held_v1($1, $2)`,
		ids, column.Of(ids, func(id uuid.UUID) [16]byte { return tokens[id] }))
	states, err := pgx.CollectRows(rows, pgx.RowToStructByPos[state])
	if err != nil {
		return nil, fmt.Errorf("look at %d leases: %w", len(tokens), err)
	}
	gone := make(map[uuid.UUID]error, len(tokens))
	for _, id := range ids {
		gone[id] = run.ErrLost // also when the row itself is gone
	}
	for _, s := range states {
		switch {
		case s.Held:
			delete(gone, s.ID) // still ours, only locked
		case s.Status != nil && *s.Status == run.Cancelled:
			gone[s.ID] = run.ErrCancelled
		}
	}
	return gone, nil
}
