package session

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
)

// obeyed is how long a server may take to end a statement that was cancelled. Heartbeats wait for that when
// the network drops what is sent, so it is short beside a lease.
const obeyed = 500 * time.Millisecond

// Spare has a statement cancelled on the server when its context ends, and keeps the connection if that works
// within half a second. The error is the server's then, with SQLSTATE 57014 (query_canceled).
//
// Without Spare the connection is closed at once. A server that is slow because it has too much to do would get
// more: a session costs more to begin than most statements do.
//
// A pool has to be given the connections back by Prepare: it drops one whose cancellation may still be on its way.
func Spare(config *pgx.ConnConfig) {
	config.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &canceller{conn: conn}
	}
}

// A canceller cancels the statements of one connection. What pgconn has for this does not tell whether the server
// has got a cancellation: one that is late ends whatever statement comes next.
type canceller struct {
	conn  *pgconn.PgConn
	ended chan struct{} // closed when the server has, or too much time has gone by
	got   bool          // the server has got it
}

const doubtKey = "simple-workflow: may be cancelled" // among a connection's custom data

// HandleCancel is called when the context of a statement has ended.
func (c *canceller) HandleCancel(context.Context) {
	c.ended, c.got = make(chan struct{}), false
	limit := time.Now().Add(obeyed)
	_ = c.conn.Conn().SetDeadline(limit)
	go func() {
		defer close(c.ended)
		ctx, done := context.WithDeadline(context.Background(), limit)
		defer done()
		err := c.conn.CancelRequest(ctx) // returns when the server has closed the connection for it: the statement's has its signal by then
		c.got = err == nil && ctx.Err() == nil
	}()
}

// HandleUnwatchAfterCancel is called after HandleCancel, when the statement has ended, one way or the other.
func (c *canceller) HandleUnwatchAfterCancel() {
	<-c.ended
	if !c.conn.IsClosed() { // what closes it has a deadline of its own
		_ = c.conn.Conn().SetDeadline(time.Time{})
	}
	if !c.got {
		c.conn.CustomData()[doubtKey] = true
	}
}

// doubtful reports whether a cancellation may still be on its way to the connection.
func doubtful(conn *pgx.Conn) bool { return conn.PgConn().CustomData()[doubtKey] == true }
