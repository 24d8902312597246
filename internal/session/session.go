// Package session distinguishes connections with a server session of their own from connections through a pooler. It
// prepares statements on the former.
package session

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const kept = `SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_nestloop = off; SET jit = off`

// Unset restores, for a transaction, the planner settings of the server, the role or the address.
const Unset = `SET LOCAL plan_cache_mode TO DEFAULT; SET LOCAL enable_seqscan TO DEFAULT; SET LOCAL enable_bitmapscan TO DEFAULT; SET LOCAL enable_nestloop TO DEFAULT; SET LOCAL jit TO DEFAULT`

// planned also makes the transaction plan each statement with its values.
var planned = append(strings.Split(Unset, "; "), `SET LOCAL plan_cache_mode = force_custom_plan`)

const ( // keys of a connection's custom data
	ownKey      = "simple-workflow: own session"
	preparesKey = "simple-workflow: prepares"
)

// Own reports whether all statements of the connection reach one session, and nobody else's statements do.
// Behind a pooler each transaction may reach another session: there pg_backend_pid() is not the number that was
// received when the connection was opened.
func Own(ctx context.Context, conn *pgx.Conn) (bool, error) {
	data := conn.PgConn().CustomData()
	if own, known := data[ownKey].(bool); known {
		return own, nil
	}
	answers, err := conn.PgConn().Exec(ctx, `SELECT pg_backend_pid()`).ReadAll() // leaves nothing behind in any session
	if err != nil {
		return false, err
	}
	own := string(answers[0].Rows[0][0]) == strconv.FormatUint(uint64(conn.PgConn().PID()), 10)
	data[ownKey] = own
	return own, nil
}

// Sessions represents the server sessions of a pool.
type Sessions struct {
	shared atomic.Bool // there is a pooler between us and the server
}

// Prepare makes the pool prepare its statements and keep their plans, which saves most of the cost of a short
// statement.
//
// A plan made while a table was empty must still be good later. So sequential scans, bitmap scans and nested
// loops are off: plans find rows through index scans, and join without nested loops, whatever sizes the planner
// assumes. JIT is off, because PostgreSQL up to 17 disables these methods by giving them a high cost, which would
// start JIT. Statements in a transaction for which such plans are wrong should follow Planned.
//
// Behind a pooler nothing is prepared. Statements are then planned with their values each time, and leave
// nothing behind in a session. The same holds if the config disables the statement cache or has an AfterRelease
// hook. Other hooks of the config are called as before.
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
		case s.refuses(conn), doubtful(conn): // the pool opens another connection
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

// Planned queues statements that change how the rest of a transaction is planned: each statement anew with its values,
// and with the user's planner settings. It does nothing if the connection does not prepare statements.
func Planned(conn *pgx.Conn, batch *pgx.Batch) {
	if !Prepares(conn) {
		return
	}
	for _, set := range planned {
		batch.Queue(set)
	}
}

// Prepares reports whether the connection has a session of its own and prepares statements.
func Prepares(conn *pgx.Conn) bool { return conn.PgConn().CustomData()[preparesKey] == true }

// refuses reports whether the connection prepares statements although a pooler was detected since.
func (s *Sessions) refuses(conn *pgx.Conn) bool { return s.shared.Load() && Prepares(conn) }

// Note stops all preparing if err is Lost. It reports whether preparing was on before.
func (s *Sessions) Note(err error) bool { return Lost(err) && !s.shared.Swap(true) }

// Lost reports whether err says that a session lacks a statement that was prepared in it, or has one that it
// should not have. It recognizes the names that pgx gives to statements. Others are the user's business.
func Lost(err error) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && (strings.Contains(refused.Message, "stmtcache_") || strings.Contains(refused.Message, "stmt_")) &&
		(refused.Code == pgerrcode.InvalidSQLStatementName || refused.Code == pgerrcode.DuplicatePreparedStatement)
}
