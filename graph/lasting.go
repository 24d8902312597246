package graph

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// A lasting transaction is one in a session that is ours: there the engine's statements are
// prepared once, and their plans kept for a while. An advance is a dozen short statements, of
// which parsing and planning is most of the work.
type lasting struct{ pgx.Tx }

// A session is what is known about a connection.
type session struct {
	ours    bool
	planned time.Time // when plans were last made anew
}

const sessionKey = "simple-workflow session" // among a connection's custom data

// keptFor is how long plans are kept. One that was made while tables were empty stays bad until
// they are analyzed; made anew it goes by the tables' sizes as they are then.
const keptFor = 5 * time.Second

// last returns the transaction as a lasting one, if its session is ours, and otherwise as it is.
// Behind a pooler in transaction mode the next one may have another session: there the number of
// the session is not the one that was told when the connection was opened.
//
// For the rest of the transaction statements are planned without their values.
func last(ctx context.Context, tx pgx.Tx) (pgx.Tx, error) {
	conn := tx.Conn().PgConn()
	s, known := conn.CustomData()[sessionKey].(*session)
	if !known {
		var pid uint32
		if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
			return nil, fmt.Errorf("look whose session it is: %w", err)
		}
		s = &session{ours: pid == conn.PID(), planned: time.Now()}
		conn.CustomData()[sessionKey] = s
	}
	if !s.ours {
		return tx, nil
	}
	l := lasting{tx}
	if time.Since(s.planned) > keptFor {
		if _, err := tx.Exec(ctx, `DISCARD PLANS`); err != nil {
			return nil, fmt.Errorf("have plans made anew: %w", err)
		}
		s.planned = time.Now()
	}
	_, err := l.Exec(ctx, `SELECT set_config('plan_cache_mode', 'force_generic_plan', true)`)
	return l, err
}

func (l lasting) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return l.Tx.Exec(ctx, sql, append([]any{pgx.QueryExecModeCacheStatement}, args...)...)
}

func (l lasting) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.Tx.Query(ctx, sql, append([]any{pgx.QueryExecModeCacheStatement}, args...)...)
}

// send sends statements that return nothing.
func send(ctx context.Context, tx pgx.Tx, batch *pgx.Batch) error {
	if l, ok := tx.(lasting); ok {
		for _, q := range batch.QueuedQueries { // pgx has no such mode for batches, but finds a statement by its text
			if _, err := l.Conn().Prepare(ctx, q.SQL, q.SQL); err != nil {
				return err
			}
		}
	}
	return tx.SendBatch(ctx, batch).Close()
}
