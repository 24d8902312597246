package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// New is a run to be enqueued. Type is required, everything else may be left zero.
type New struct {
	Type    string // dotted lower-case name, such as billing.invoice_charge.v1
	Payload any    // encoded with encoding/json; json.RawMessage and []byte are taken as they are; nil: {}

	ID             uuid.UUID     // zero: a new time-ordered id. Enqueueing the same id again is safe.
	RunAt          time.Time     // zero: now, by the database's clock
	Delay          time.Duration // added to RunAt; negative counts as 0
	Priority       int           // -100 to 100, higher first
	MaxAttempts    int           // 1 to 1000; 0: 3
	IdempotencyKey string        // 1 to 200 characters; empty: none
	Metadata       any           // a JSON object, encoded like Payload; nil: none
}

// Enqueued is what became of a New.
type Enqueued struct {
	ID       uuid.UUID
	Existing bool // a run with this id or key, the same type and payload was there already
}

// A ConflictError means that an idempotency key, or an id, already belongs to a run with
// another type or payload. Nothing was enqueued by the call.
type ConflictError struct {
	Key      string    // the idempotency key; empty if the id was in the way
	Wanted   uuid.UUID // id of the run that was refused
	Existing uuid.UUID // id of the run that has the key or id
}

func (e *ConflictError) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("run: id %s already belongs to a run with another type, payload or key", e.Existing)
	}
	return fmt.Sprintf("run: idempotency key %q of new run %s already belongs to run %s, which has another type or payload",
		e.Key, e.Wanted, e.Existing)
}

// Enqueue stores a run. In a transaction it becomes visible to workers when that commits,
// together with everything else in it. With an idempotency key that is taken it returns the
// existing run if type and payload are equal as JSON values, and a *ConflictError if not.
// Bad payloads are a *DocumentError; other refusals come from the database in words.
func Enqueue(ctx context.Context, db DB, n New) (Enqueued, error) {
	all, err := EnqueueMany(ctx, db, []New{n})
	if err != nil {
		return Enqueued{}, err
	}
	return all[0], nil
}

// batchSize is how many rows one statement inserts.
const batchSize = 1000

// EnqueueMany stores runs, a thousand per statement, and returns what became of each in the
// same order. Outside of a transaction each statement commits by itself. See Enqueue.
func EnqueueMany(ctx context.Context, db DB, runs []New) ([]Enqueued, error) {
	done := make([]Enqueued, 0, len(runs))
	for len(runs) > 0 {
		n := min(len(runs), batchSize)
		b, err := newBatch(runs[:n])
		if err != nil {
			return nil, err
		}
		part, err := b.insert(ctx, db)
		if err != nil {
			return nil, err
		}
		done, runs = append(done, part...), runs[n:]
	}
	return done, nil
}

// A batch is runs as columns, ready for unnest.
type batch struct {
	ids         []uuid.UUID
	types       []string
	payloads    []json.RawMessage
	runAts      []*time.Time
	delays      []float64
	priorities  []int
	maxAttempts []int
	keys        []*string
	metadata    []json.RawMessage
	unique      bool // some row may already be there
}

func newBatch(runs []New) (*batch, error) {
	b := &batch{}
	for _, n := range runs {
		payload, err := document("payload", n.Payload, MaxPayload)
		if err != nil {
			return nil, fmt.Errorf("enqueue %q: %w", n.Type, err)
		}
		if payload == nil {
			payload = json.RawMessage(`{}`)
		}
		metadata, err := document("metadata", n.Metadata, MaxMetadata)
		if err != nil {
			return nil, fmt.Errorf("enqueue %q: %w", n.Type, err)
		}
		b.unique = b.unique || n.IdempotencyKey != "" || n.ID != uuid.Nil
		if n.ID == uuid.Nil {
			if n.ID, err = uuid.NewV7(); err != nil {
				return nil, fmt.Errorf("enqueue %q: draw an id: %w", n.Type, err)
			}
		}
		if n.MaxAttempts == 0 {
			n.MaxAttempts = 3
		}
		b.ids = append(b.ids, n.ID)
		b.types = append(b.types, n.Type)
		b.payloads = append(b.payloads, payload)
		b.runAts = append(b.runAts, orNil(n.RunAt, n.RunAt.IsZero()))
		b.delays = append(b.delays, max(n.Delay, 0).Seconds())
		b.priorities = append(b.priorities, n.Priority)
		b.maxAttempts = append(b.maxAttempts, n.MaxAttempts)
		b.keys = append(b.keys, orNil(n.IdempotencyKey, n.IdempotencyKey == ""))
		b.metadata = append(b.metadata, metadata)
	}
	return b, nil
}

func orNil[T any](v T, null bool) *T {
	if null {
		return nil
	}
	return &v
}

// insert stores the batch. Rows that meet an existing key or id are compared with it
// afterwards: an existing row that has gone in between is tried again.
func (b *batch) insert(ctx context.Context, db DB) ([]Enqueued, error) {
	insert := insertRuns
	if b.unique {
		insert += ` ON CONFLICT DO NOTHING RETURNING id`
	}
	done := make([]Enqueued, len(b.ids))
	for i, id := range b.ids {
		done[i].ID = id
	}
	args := []any{b.ids, b.types, b.payloads, b.runAts, b.delays, b.priorities, b.maxAttempts, b.keys, b.metadata}
	if !b.unique {
		if _, err := db.Exec(ctx, insert, args...); err != nil {
			return nil, fmt.Errorf("enqueue %d runs: %w", len(b.ids), err)
		}
		return done, nil
	}
	stored := map[uuid.UUID]bool{}
	for round := 0; ; round++ {
		rows, _ := db.Query(ctx, insert, args...)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		if err != nil {
			return nil, fmt.Errorf("enqueue %d runs: %w", len(b.ids), err)
		}
		for _, id := range ids {
			stored[id] = true
		}
		found, err := b.existing(ctx, db, stored, done)
		if err != nil || found {
			return done, err
		}
		if round == 10 {
			return nil, errors.New("run: enqueue: an idempotency key keeps changing hands; try again")
		}
	}
}

const insertRuns = `
	INSERT INTO workflow_run (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata)
	SELECT id, type, payload, coalesce(run_at, now()) + delay * interval '1 second', priority, max_attempts, key, metadata
	FROM unnest($1::uuid[], $2::text[], $3::jsonb[], $4::timestamptz[], $5::float8[], $6::int[], $7::int[], $8::text[], $9::jsonb[])
	  AS n (id, type, payload, run_at, delay, priority, max_attempts, key, metadata)`

// existing fills done for the rows that were not stored. It reports false if one of them
// met a row that has gone since.
func (b *batch) existing(ctx context.Context, db DB, stored map[uuid.UUID]bool, done []Enqueued) (found bool, err error) {
	var missing []int
	for i, id := range b.ids {
		if !stored[id] {
			missing = append(missing, i)
		}
	}
	if len(missing) == 0 {
		return true, nil
	}
	type match struct {
		Place int
		ID    uuid.UUID
		Same  bool
	}
	rows, _ := db.Query(ctx, `
		SELECT DISTINCT ON (n.place) n.place - 1, r.id,
		       r.type = n.type AND r.payload = n.payload AND r.idempotency_key IS NOT DISTINCT FROM n.key
		FROM unnest($1::uuid[], $2::text[], $3::jsonb[], $4::text[]) WITH ORDINALITY AS n (id, type, payload, key, place)
		JOIN workflow_run r ON r.id = n.id OR r.idempotency_key = n.key AND r.deleted_at IS NULL
		WHERE n.place - 1 = ANY ($5::int[])
		ORDER BY n.place, r.id = n.id DESC`, b.ids, b.types, b.payloads, b.keys, missing)
	matches, err := pgx.CollectRows(rows, pgx.RowToStructByPos[match])
	if err != nil {
		return false, fmt.Errorf("look up existing runs: %w", err)
	}
	for _, m := range matches {
		if !m.Same {
			e := &ConflictError{Wanted: b.ids[m.Place], Existing: m.ID}
			if b.keys[m.Place] != nil && m.ID != b.ids[m.Place] {
				e.Key = *b.keys[m.Place]
			}
			return false, e
		}
		done[m.Place] = Enqueued{ID: m.ID, Existing: true}
	}
	return len(matches) == len(missing), nil
}

// document encodes v and checks that it is a JSON object the database will take.
func document(field string, v any, limit int) (json.RawMessage, error) {
	var data []byte
	switch v := v.(type) {
	case nil:
		return nil, nil
	case json.RawMessage:
		data = v
	case []byte:
		data = v
	default:
		var err error
		if data, err = json.Marshal(v); err != nil {
			return nil, fmt.Errorf("encode %s: %w", field, err)
		}
	}
	return data, check(field, data, limit, true)
}
