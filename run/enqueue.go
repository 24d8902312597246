package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// A New is a run to be enqueued. Type is required; the other fields may be zero.
type New struct {
	Type    string // dotted lower-case name, such as billing.invoice_charge.v1
	Payload any    // encoded with encoding/json; json.RawMessage and []byte are taken as they are; nil: {}

	ID             uuid.UUID     // zero: a new time-ordered id. Enqueueing the same id again is safe.
	RunAt          time.Time     // when it is due; zero: now, by the database's clock
	Delay          time.Duration // added to RunAt; negative counts as 0
	Priority       int           // -100 to 100; higher ones are leased first
	MaxAttempts    int           // 1 to 1000; 0 and 3 mean the number that the type's policy sets, which is 25 as shipped
	IdempotencyKey string        // 1 to 200 characters; empty: none
	Tenant         string        // the tenant it belongs to, at most 200 characters; empty: none
	Metadata       any           // a JSON object, encoded like Payload; nil: none
}

// A DocumentError says why a payload, metadata or a result cannot be stored: Document names the document, Path the
// place in it (such as $.lines[2].amount), Reason what is wrong, and Fix what to do.
type DocumentError = jsondoc.Error

// An Enqueued is the result of enqueueing a New.
type Enqueued struct {
	ID       uuid.UUID
	Existing bool // nothing was stored: there was a run already with this id or key, and the same type, payload and tenant
}

// A ConflictError means that an idempotency key or an id already belongs to a run with another type, payload or
// tenant. The statement has stored nothing, and a transaction around it can only be rolled back.
type ConflictError struct {
	Key      string    // the idempotency key; empty: the ids are the same
	Wanted   uuid.UUID // id of the run that was refused
	Existing uuid.UUID // id of the run that has the key or id
}

func (e *ConflictError) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("run: id %s already belongs to a run with another type, payload, key or tenant", e.Existing)
	}
	return fmt.Sprintf("run: idempotency key %q of new run %s already belongs to run %s, which has another type, payload or tenant",
		e.Key, e.Wanted, e.Existing)
}

// Enqueue stores a run. If db is a transaction, workers see the run when the transaction commits,
// together with everything else in it.
//
// If another run has the idempotency key or id already, Enqueue stores nothing. It returns that run if type,
// tenant and payload are equal (payloads are compared as JSON values), and a *ConflictError otherwise. A payload
// or metadata that cannot be stored is a *DocumentError. All other refusals are errors of the database, with a
// message that says what is wrong.
func Enqueue(ctx context.Context, db DB, n New) (Enqueued, error) {
	all, err := EnqueueMany(ctx, db, []New{n})
	if err != nil {
		return Enqueued{}, err
	}
	return all[0], nil
}

// A statement stores at most this many rows, and about this many bytes of payload.
const (
	batchRows  = 1000
	batchBytes = 16 << 20
)

// EnqueueMany stores runs as Enqueue does, and returns the result for each, in the same order. All
// documents are checked before the first run is stored.
//
// One statement stores up to a thousand runs, all or none of them. If db is a transaction, the same
// holds for the whole call. Outside of a transaction, the runs of earlier statements stay stored
// after an error. Then calling EnqueueMany again is safe for runs that have a key or an id.
func EnqueueMany(ctx context.Context, db DB, runs []New) ([]Enqueued, error) {
	return enqueue(runs, func(b batch) ([]Enqueued, error) {
		c := b.columns()
		if !b.unique() {
			_, err := db.Exec(ctx, `
				INSERT INTO workflow_run (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata, tenant_id)
				SELECT id, type, payload, coalesce(run_at, now()) + delay * interval '1 second', priority, max_attempts, key, metadata, nullif(tenant, '')
				`+fromColumns, c...)
			return b.stored(), err
		}
		rows, _ := db.Query(ctx, enqueueEach(fromColumns), c...)
		return pgx.CollectRows(rows, pgx.RowToStructByPos[Enqueued])
	})
}

const fromColumns = `
	FROM unnest($1::uuid[], $2::text[], $3::jsonb[], $4::timestamptz[], $5::float8[], $6::int[], $7::int[], $8::text[], $9::jsonb[], $10::text[])
	  WITH ORDINALITY AS n (id, type, payload, run_at, delay, priority, max_attempts, key, metadata, tenant, place)`

// enqueueEach returns a statement that stores the rows of from, some of which may be stored already. It stores them
// in order of key and id, so that two such statements seldom deadlock.
func enqueueEach(from string) string {
	return `
		SELECT e.run, e.existing
		FROM (SELECT n.* ` + from + ` ORDER BY n.key, n.id, n.place OFFSET 0) AS n,
		     workflow_enqueue_once(n.type, n.payload, n.run_at, n.delay * interval '1 second',
		                           n.priority, n.max_attempts, n.key, n.metadata, n.id, nullif(n.tenant, '')) AS e
		ORDER BY n.place`
}

// enqueue cuts runs into batches and calls store for each.
func enqueue(runs []New, store func(batch) ([]Enqueued, error)) ([]Enqueued, error) {
	rows := make(batch, len(runs))
	for i, n := range runs {
		var err error
		if rows[i], err = newRow(n); err != nil {
			return nil, fmt.Errorf("enqueue %q: %w", n.Type, err)
		}
	}
	done := make([]Enqueued, 0, len(rows))
	for len(rows) > 0 {
		n := rows.fitting()
		part, err := store(rows[:n])
		if err != nil {
			return nil, fmt.Errorf("enqueue %d runs: %w", n, rows[:n].explain(err))
		}
		done, rows = append(done, part...), rows[n:]
	}
	return done, nil
}

// A row is a New as the database takes it.
type row struct {
	ID          uuid.UUID       `json:"id"`
	Type        string          `json:"type"`
	Payload     json.RawMessage `json:"payload"`
	RunAt       *time.Time      `json:"run_at"`
	Delay       float64         `json:"delay"`
	Priority    int             `json:"priority"`
	MaxAttempts int             `json:"max_attempts"`
	Key         *string         `json:"key"`
	Metadata    json.RawMessage `json:"metadata,omitempty"`
	Tenant      string          `json:"tenant,omitzero"`
	named       bool            // its id was given, so it may be there already
}

func newRow(n New) (row, error) {
	r := row{
		ID: n.ID, Type: n.Type, Payload: json.RawMessage(`{}`), Delay: max(n.Delay, 0).Seconds(),
		Priority: n.Priority, MaxAttempts: n.MaxAttempts, Tenant: n.Tenant, named: n.ID != uuid.Nil,
	}
	if !utf8.ValidString(n.Type) || !utf8.ValidString(n.IdempotencyKey) || !utf8.ValidString(n.Tenant) {
		return row{}, errors.New("type, idempotency key and tenant must be valid UTF-8")
	}
	payload, err := encode("payload", n.Payload, jsondoc.MaxPayload)
	if err != nil {
		return row{}, err
	}
	if payload != nil {
		r.Payload = payload
	}
	if r.Metadata, err = encode("metadata", n.Metadata, jsondoc.MaxMetadata); err != nil {
		return row{}, err
	}
	if !r.named {
		if r.ID, err = uuid.NewV7(); err != nil {
			return row{}, fmt.Errorf("draw an id: %w", err)
		}
	}
	if r.MaxAttempts == 0 {
		r.MaxAttempts = shipped.MaxAttempts
	}
	if !n.RunAt.IsZero() {
		r.RunAt = &n.RunAt
	}
	if n.IdempotencyKey != "" {
		r.Key = &n.IdempotencyKey
	}
	return r, nil
}

// encode encodes v, and checks that it is a JSON object that the database accepts.
func encode(field string, v any, limit int) (json.RawMessage, error) {
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
	return data, jsondoc.Check(field, data, limit, true)
}

// A batch is the rows of one statement.
type batch []row

// fitting returns how many of the rows fit into one statement, at least one.
func (b batch) fitting() int {
	size := 0
	for i, r := range b {
		size += len(r.Payload)
		if i == batchRows || i > 0 && size > batchBytes {
			return i
		}
	}
	return len(b)
}

// unique reports whether some row may be stored already.
func (b batch) unique() bool {
	return slices.ContainsFunc(b, func(r row) bool { return r.named || r.Key != nil })
}

func (b batch) stored() []Enqueued {
	done := make([]Enqueued, len(b))
	for i, r := range b {
		done[i].ID = r.ID
	}
	return done
}

// columns returns the batch as arguments for fromColumns.
func (b batch) columns() []any {
	return []any{
		column.Of(b, func(r row) [16]byte { return r.ID }),
		column.Of(b, func(r row) string { return r.Type }),
		column.Of(b, func(r row) json.RawMessage { return r.Payload }),
		column.Of(b, func(r row) *time.Time { return r.RunAt }),
		column.Of(b, func(r row) float64 { return r.Delay }),
		column.Of(b, func(r row) int { return r.Priority }),
		column.Of(b, func(r row) int { return r.MaxAttempts }),
		column.Of(b, func(r row) *string { return r.Key }),
		column.Of(b, func(r row) json.RawMessage { return r.Metadata }),
		column.Of(b, func(r row) string { return r.Tenant }),
	}
}

// refused matches the message in which workflow_enqueue_once names the two runs of a conflict.
var refused = regexp.MustCompile(`workflow_enqueue: new run ([0-9a-f-]{36}) is refused: run ([0-9a-f-]{36}) has the same`)

// explain turns the database's error of a conflict into a *ConflictError. It reads the text of err,
// because the errors of all drivers contain the database's message.
func (b batch) explain(err error) error {
	var state interface{ SQLState() string }
	if !errors.As(err, &state) || state.SQLState() != pgerrcode.UniqueViolation {
		return fault.Hinted(err)
	}
	match := refused.FindStringSubmatch(err.Error())
	if match == nil {
		return fault.Hinted(err)
	}
	e := &ConflictError{Wanted: uuid.MustParse(match[1]), Existing: uuid.MustParse(match[2])}
	if e.Wanted == e.Existing {
		return e
	}
	for _, r := range b {
		if r.ID == e.Wanted && r.Key != nil {
			e.Key = *r.Key
		}
	}
	return e
}
