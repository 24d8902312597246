// Package session tells connections with a session of their own from those through a pooler, and
// has statements prepared on the former.
package session

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const kept = `SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off`

// Planned has the statements of a transaction planned with their values, as the planner likes best.
const Planned = `SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_seqscan TO DEFAULT; SET LOCAL enable_bitmapscan TO DEFAULT`

const ( // among a connection's custom data
	ownKey      = "simple-workflow: own session"
	preparesKey = "simple-workflow: prepares"
)

// Own reports whether all that is sent through the connection reaches the same session, and nobody
// else's statements do. Behind a pooler they may go to another each time: there the number of the
// session is not the one that was told when the connection was opened.
func Own(ctx context.Context, conn *pgx.Conn) (bool, error) {
	data := conn.PgConn().CustomData()
	if own, known := data[ownKey].(bool); known {
		return own, nil
	}
	var pid uint32
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()`, pgx.QueryExecModeSimpleProtocol).Scan(&pid); err != nil {
		return false, err
	}
	own := pid == conn.PgConn().PID()
	data[ownKey] = own
	return own, nil
}

// Sessions are those of a pool.
type Sessions struct {
	shared atomic.Bool // a pooler is between
}

// Prepare has the pool's statements prepared in sessions of their own, and their plans kept, which
// saves most of what a short statement costs. So that a plan made while a table was empty does not
// read all of it later on, rows are found through indexes, one after the other, whatever the planner
// thinks of the table: such plans have the same shape at any size. What is not made for that, in a
// transaction, is Planned. Behind a pooler statements are planned with their values each time, and
// nothing is left in a session. The config's hooks are called as before.
func Prepare(config *pgxpool.Config) *Sessions {
	s := &Sessions{}
	s.shared.Store(config.ConnConfig.StatementCacheCapacity == 0)
	beforeConnect, afterConnect, prepareConn := config.BeforeConnect, config.AfterConnect, config.PrepareConn
	beforeAcquire := config.BeforeAcquire //nolint:staticcheck // deprecated, and used
	config.BeforeConnect = func(ctx context.Context, c *pgx.ConnConfig) error {
		if beforeConnect != nil {
			if err := beforeConnect(ctx, c); err != nil {
				return err
			}
		}
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		if s.shared.Load() {
			c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		}
		return nil
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if err := s.look(ctx, conn); err != nil || s.refuses(conn) {
			return err
		}
		if afterConnect != nil {
			return afterConnect(ctx, conn)
		}
		return nil
	}
	config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		switch {
		case s.refuses(conn): // and the pool opens another
			return false, nil
		case prepareConn != nil:
			return prepareConn(ctx, conn)
		case beforeAcquire != nil:
			return beforeAcquire(ctx, conn), nil
		}
		return true, nil
	}
	return s
}

// look finds out whether a new connection has a session of its own, and sets that up.
func (s *Sessions) look(ctx context.Context, conn *pgx.Conn) error {
	prepares := conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	conn.PgConn().CustomData()[preparesKey] = prepares
	if !prepares {
		return nil
	}
	own, err := Own(ctx, conn)
	if err == nil && own {
		_, err = conn.Exec(ctx, kept, pgx.QueryExecModeSimpleProtocol)
	}
	if err == nil && !own {
		s.shared.Store(true)
	}
	return err
}

func (s *Sessions) refuses(conn *pgx.Conn) bool {
	return s.shared.Load() && conn.PgConn().CustomData()[preparesKey] == true
}

// Note has nothing prepared any more if err says that a session has lost what was.
func (s *Sessions) Note(err error) {
	var refused *pgconn.PgError
	if errors.As(err, &refused) && refused.Code == "26000" { // invalid_sql_statement_name
		s.shared.Store(true)
	}
}
