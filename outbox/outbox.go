// Package outbox appends events that must leave the database, in the transaction that makes
// them true. A dispatcher publishes them afterwards.
package outbox

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// An Event is one row of outbox_event.
type Event struct {
	ID        uuid.UUID         // the CloudEvents id, the same at every delivery; zero: a new one
	Aggregate uuid.UUID         // what the event is about; one aggregate's events stay in order
	Type      string            // such as invoice.charged.v1: letters, digits and _ . : / -
	Payload   any               // encoded with encoding/json; json.RawMessage is taken as it is
	Headers   map[string]string // travel with the event, such as traceparent; nil: none
}

// Append stores events in the caller's transaction. Until it ends, each event's aggregate is
// locked against other Appends, so that within one aggregate ids follow the order of commits.
func Append(ctx context.Context, tx pgx.Tx, events ...Event) error {
	if len(events) == 0 {
		return nil
	}
	ids, aggregates := make([]uuid.UUID, len(events)), make([]uuid.UUID, len(events))
	types := make([]string, len(events))
	payloads, headers := make([]json.RawMessage, len(events)), make([]json.RawMessage, len(events))
	for i, e := range events {
		var err error
		if ids[i] = e.ID; e.ID == uuid.Nil {
			if ids[i], err = uuid.NewV7(); err != nil {
				return fmt.Errorf("draw an event id: %w", err)
			}
		}
		aggregates[i], types[i] = e.Aggregate, e.Type
		if payloads[i], err = json.Marshal(e.Payload); err != nil {
			return fmt.Errorf("encode payload of event %q: %w", e.Type, err)
		}
		if e.Headers != nil {
			if headers[i], err = json.Marshal(e.Headers); err != nil {
				return fmt.Errorf("encode headers of event %q: %w", e.Type, err)
			}
		}
	}
	// Locks in one order for everybody; ids are drawn after them, in the order given.
	_, err := tx.Exec(ctx, `
		WITH locked AS MATERIALIZED (
			SELECT pg_advisory_xact_lock(hashtextextended(aggregate::text, 0))
			FROM (SELECT DISTINCT aggregate FROM unnest($2::uuid[]) AS a (aggregate) ORDER BY aggregate) AS sorted
		)
		INSERT INTO outbox_event (event_uuid, aggregate_id, event_type, payload, headers)
		SELECT e.id, e.aggregate, e.type, e.payload, e.headers
		FROM (SELECT count(*) FROM locked) AS all_of_them,
		     unnest($1::uuid[], $2::uuid[], $3::text[], $4::jsonb[], $5::jsonb[]) WITH ORDINALITY
		       AS e (id, aggregate, type, payload, headers, place)
		ORDER BY e.place`, ids, aggregates, types, payloads, headers)
	if err != nil {
		return fmt.Errorf("append %d events: %w", len(events), err)
	}
	return nil
}
