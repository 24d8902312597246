package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/session"
)

// Findings about poolers, by whether a session is assigned for a transaction, a statement or a connection.
var (
	byTransaction = finding{false, "a pooler is between, in transaction mode: no wake-up passes, so runs are found by polling; no statement is prepared, so each costs more; " +
		"what a session was opened with, read-only for one, stays as long as the pooler keeps it",
		"that is supported; for wake-ups and prepared statements give workers the server's own address, or a pool in session mode"}
	byStatement = finding{true, "a pooler is between, in statement mode: it refuses transactions, so neither effects, events nor processes can be recorded",
		"pool_mode = transaction, or the server's own address"}
	bySession = finding{false, "a pooler is between, and gives each connection a session of its own, or so it seems: its pool must have room for all connections of workers and dispatchers",
		"if it is in transaction mode and idle, look again while it is in use"}
)

// between finds out whether a pooler is in between, and how it assigns sessions. It returns nil if there is no
// pooler, and leaves no state in any session.
func between(ctx context.Context, conn *pgx.Conn) (*finding, error) {
	own, err := session.Own(ctx, conn)
	if err != nil || own {
		return nil, err
	}
	_, err = conn.PgConn().Exec(ctx, `BEGIN; SELECT 1; COMMIT`).ReadAll()
	if refused := (*pgconn.PgError)(nil); err != nil && conn.IsClosed() || errors.As(err, &refused) {
		return &byStatement, nil
	} else if err != nil {
		return nil, err
	}
	// In session mode nobody else gets this connection's session, and another connection may even wait for one.
	call, done := context.WithTimeout(ctx, 3*time.Second)
	defer done()
	other, err := pgx.ConnectConfig(call, conn.Config())
	if err != nil {
		return &bySession, nil
	}
	defer func() { _ = other.Close(context.WithoutCancel(ctx)) }()
	seen := map[string]bool{}
	for range 5 {
		for _, c := range []*pgx.Conn{conn, other} {
			answers, err := c.PgConn().Exec(call, `SELECT pg_backend_pid()`).ReadAll()
			if err != nil && c == other {
				return &bySession, nil
			} else if err != nil {
				return nil, err
			}
			pid := string(answers[0].Rows[0][0])
			if c == other && seen[pid] {
				return &byTransaction, nil
			}
			if c == conn {
				seen[pid] = true
			}
		}
	}
	return &bySession, nil
}
