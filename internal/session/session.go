// Package session tells connections with a session of their own from those through a pooler, and
// has statements prepared on the former.
package session

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const kept = `SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_nestloop = off; SET jit = off`

// Unset has the statements of a transaction planned as the server, the role or the address has it.
const Unset = `SET LOCAL plan_cache_mode TO DEFAULT; SET LOCAL enable_seqscan TO DEFAULT; SET LOCAL enable_bitmapscan TO DEFAULT; SET LOCAL enable_nestloop TO DEFAULT; SET LOCAL jit TO DEFAULT`

// planned has them planned with their values, as the planner likes best.
var planned = append(strings.Split(Unset, "; "), `SET LOCAL plan_cache_mode = force_custom_plan`)

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
	answers, err := conn.PgConn().Exec(ctx, `SELECT pg_backend_pid()`).ReadAll() // leaves nothing behind, wherever it goes
	if err != nil {
		return false, err
	}
	own := string(answers[0].Rows[0][0]) == strconv.FormatUint(uint64(conn.PgConn().PID()), 10)
	data[ownKey] = own
	return own, nil
}

// Sessions are those of a pool.
type Sessions struct {
	shared atomic.Bool // a pooler is between
}

// Prepare has the pool's statements prepared in sessions of their own, and their plans kept, which
// saves most of what a short statement costs. So that a plan made while a table was empty is
// good later on, it never reads all of a table, finds rows through indexes one after the other, and brings
// lists together by hashing, whatever the planner thinks of their sizes. JIT compilation would answer to costs
// that are only there to keep the planner from other ways. What is not made for that, in a
// transaction, is Planned. Behind a pooler statements are planned with their values each time, and
// nothing is left in a session; so it is with a config that remembers no statements, or does something to
// sessions after each use. The config's hooks are called as before.
func Prepare(config *pgxpool.Config) *Sessions {
	s := &Sessions{}
	s.shared.Store(config.ConnConfig.StatementCacheCapacity == 0 || config.AfterRelease != nil)
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
			if err := afterConnect(ctx, conn); err != nil {
				return err
			}
		}
		if !Prepares(conn) {
			return nil
		}
		_, err := conn.PgConn().Exec(ctx, kept).ReadAll()
		return err
	}
	config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		switch {
		case s.refuses(conn), doubtful(conn): // and the pool opens another
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

// look finds out whether a new connection has a session of its own.
func (s *Sessions) look(ctx context.Context, conn *pgx.Conn) error {
	if conn.Config().DefaultQueryExecMode != pgx.QueryExecModeCacheStatement {
		return nil
	}
	conn.PgConn().CustomData()[preparesKey] = true
	own, err := Own(ctx, conn)
	if err == nil && !own {
		s.shared.Store(true)
	}
	return err
}

// Planned queues what has the rest of a transaction planned with its values, as the planner likes best, if
// the connection Prepares its statements.
func Planned(conn *pgx.Conn, batch *pgx.Batch) {
	if !Prepares(conn) {
		return
	}
	for _, set := range planned {
		batch.Queue(set)
	}
}

// Prepares reports whether a connection's statements are prepared, in a session of its own.
func Prepares(conn *pgx.Conn) bool { return conn.PgConn().CustomData()[preparesKey] == true }

// refuses reports whether the connection prepares statements, and none must any more.
func (s *Sessions) refuses(conn *pgx.Conn) bool { return s.shared.Load() && Prepares(conn) }

// Note has nothing prepared any more if err is Lost. It reports whether that is news.
func (s *Sessions) Note(err error) bool { return Lost(err) && !s.shared.Swap(true) }

// Lost reports whether err says that a session does not have what was prepared in it, or has it
// although it should not. It goes by the names that pgx gives: other statements are the user's own business.
func Lost(err error) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && (strings.Contains(refused.Message, "stmtcache_") || strings.Contains(refused.Message, "stmt_")) &&
		(refused.Code == "26000" || refused.Code == "42P05") // invalid_sql_statement_name, duplicate_prepared_statement
}
