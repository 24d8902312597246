// Package outbox appends events to the outbox, in the transaction that makes them true. A dispatcher publishes
// them after that transaction has committed.
package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// An Event is one row of outbox_event.
type Event struct {
	ID        uuid.UUID         // the CloudEvents id, the same at every delivery; zero: a new one
	Aggregate uuid.UUID         // what the event is about; events of one aggregate are published in order
	Type      string            // such as invoice.charged.v1: letters, digits and _ . : / -
	Payload   any               // encoded with encoding/json; a json.RawMessage is passed through
	Headers   map[string]string // sent with the event, such as traceparent; nil: none

	// Held reports that the transaction already holds a row lock that every transaction takes before it appends events
	// of this aggregate. The engine locks process instances that way. Append then takes no lock of its own. Events
	// appended with Held have no order relative to events appended without it. The database believes Held only of the
	// owner and the engine's role; for other roles it takes the lock all the same.
	Held bool
}

// Append stores events in the caller's transaction. Until the transaction ends, each event's aggregate is
// locked against other calls of Append, unless the event is Held. So the ids of one aggregate follow the order
// of commits. If one event is refused, Append returns an error and stores none.
func Append(ctx context.Context, tx pgx.Tx, events ...Event) error {
	statement := &pgx.Batch{}
	if err := Queue(statement, events...); err != nil || statement.Len() == 0 {
		return err
	}
	q := statement.QueuedQueries[0]
	if _, err := tx.Exec(ctx, q.SQL, q.Arguments...); err != nil {
		return fmt.Errorf("append %d events: %w", len(events), err)
	}
	return nil
}

// Queue queues Append onto a batch, to be sent with other statements of the transaction. It queues nothing if
// there are no events, or if an event cannot be encoded, for which it returns an error.
func Queue(batch *pgx.Batch, events ...Event) error {
	rows, err := rowsOf(events)
	if err != nil || len(rows) == 0 {
		return err
	}
	n := len(rows)
	ids, aggregates := make([][16]byte, n), make([][16]byte, n) // pgx encodes uuid.UUID twenty times slower
	types, payloads, headers, held := make([]string, n), make([]json.RawMessage, n), make([]json.RawMessage, n), make([]bool, n)
	for k, r := range rows {
		ids[k], aggregates[k], types[k], payloads[k], headers[k], held[k] = r.ID, r.Aggregate, r.Type, r.Payload, r.Headers, r.Held
	}
	batch.Queue(`SELECT outbox_append_v1($1, $2, $3, $4, $5, $6)`, ids, aggregates, types, payloads, headers, held)
	return nil
}

// SQLTx is the part of a transaction that AppendSQL uses. *sql.Tx implements it.
type SQLTx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// AppendSQL is Append for database/sql with any Postgres driver.
func AppendSQL(ctx context.Context, tx SQLTx, events ...Event) error {
	rows, err := rowsOf(events)
	if err != nil || len(rows) == 0 {
		return err
	}
	document, err := json.Marshal(rows)
	if err != nil {
		return fmt.Errorf("encode %d events: %w", len(rows), err)
	}
	// One text argument, which every driver can encode.
	_, err = tx.ExecContext(ctx, `
		SELECT outbox_append_v1(array_agg(id ORDER BY place), array_agg(aggregate ORDER BY place), array_agg(type ORDER BY place),
		                        array_agg(payload ORDER BY place), array_agg(headers ORDER BY place), array_agg(held ORDER BY place))
		FROM ROWS FROM (jsonb_to_recordset($1::text::jsonb) AS (id uuid, aggregate uuid, type text, payload jsonb, headers jsonb, held boolean))
		  WITH ORDINALITY AS e (id, aggregate, type, payload, headers, held, place)`, string(document))
	if err != nil {
		return fmt.Errorf("append %d events: %w", len(rows), err)
	}
	return nil
}

// A row is an event as it is sent to the database.
type row struct {
	ID        uuid.UUID       `json:"id"`
	Aggregate uuid.UUID       `json:"aggregate"`
	Type      string          `json:"type"`
	Payload   json.RawMessage `json:"payload"`
	Headers   json.RawMessage `json:"headers,omitempty"`
	Held      bool            `json:"held"`
}

func rowsOf(events []Event) ([]row, error) {
	rows := make([]row, len(events))
	for k, e := range events {
		r := row{ID: e.ID, Aggregate: e.Aggregate, Type: e.Type, Held: e.Held}
		var err error
		if r.ID == uuid.Nil {
			if r.ID, err = uuid.NewV7(); err != nil {
				return nil, fmt.Errorf("draw an event id: %w", err)
			}
		}
		if r.Payload, err = json.Marshal(e.Payload); err != nil {
			return nil, fmt.Errorf("encode payload of event %q: %w", e.Type, err)
		}
		if e.Headers != nil {
			if r.Headers, err = json.Marshal(e.Headers); err != nil {
				return nil, fmt.Errorf("encode headers of event %q: %w", e.Type, err)
			}
		}
		rows[k] = r
	}
	return rows, nil
}
