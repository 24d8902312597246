package run

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
)

// SQLDB is what EnqueueSQL needs of a database: *sql.DB, *sql.Tx and *sql.Conn have it.
type SQLDB interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// EnqueueSQL is EnqueueMany for database/sql, with any driver for Postgres. So a program that does
// not use pgx can store runs in its own transactions.
func EnqueueSQL(ctx context.Context, db SQLDB, runs []New) ([]Enqueued, error) {
	return enqueue(runs, func(b batch) ([]Enqueued, error) {
		document, err := json.Marshal(b)
		if err != nil {
			return nil, fmt.Errorf("encode: %w", err)
		}
		rows, err := db.QueryContext(ctx, enqueueEach(fromDocument), string(document))
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		done := make([]Enqueued, 0, len(b))
		for rows.Next() {
			var e Enqueued
			if err := rows.Scan(&e.ID, &e.Existing); err != nil {
				return nil, err
			}
			done = append(done, e)
		}
		return done, rows.Err()
	})
}

// fromDocument is fromColumns with a single argument, a JSON document, because every driver can pass that.
const fromDocument = `
	FROM ROWS FROM (jsonb_to_recordset($1::text::jsonb)
	     AS (id uuid, type text, payload jsonb, run_at timestamptz, delay float8,
	         priority int, max_attempts int, key text, metadata jsonb, tenant text))
	  WITH ORDINALITY AS n (id, type, payload, run_at, delay, priority, max_attempts, key, metadata, tenant, place)`
