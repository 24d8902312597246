package session

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
)

// obeyed is how long a server may take to end a cancelled statement. It is short compared to a lease, since
// heartbeats have to wait for it when the network drops packets.
const obeyed = 500 * time.Millisecond

// Spare cancels a statement on the server when its context ends, to spare the connection. If the server ends the
// statement within 500 ms, the connection is kept, and the error is the server's, with SQLSTATE 57014 (query_canceled).
//
// Without Spare the connection would be closed at once. That would give more work to a server that is slow
// because it is overloaded: starting a session costs more than most statements.
//
// The pool must be one of Prepare, which closes a connection whose cancellation may still be on its way.
func Spare(config *pgx.ConnConfig) {
	config.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &canceller{conn: conn}
	}
}

// A canceller cancels the statements of one connection. pgconn's own handler does not report whether the server
// has received a cancellation, and a late one would cancel the next statement.
type canceller struct {
	conn  *pgconn.PgConn
	ended chan struct{} // closed when the server has answered, or obeyed is over
	got   bool          // the server has received the cancellation
}

const doubtKey = "simple-workflow: may be cancelled" // a key of a connection's custom data

// HandleCancel is called when the context of a statement has ended.
func (c *canceller) HandleCancel(context.Context) {
	c.ended, c.got = make(chan struct{}), false
	limit := time.Now().Add(obeyed)
	_ = c.conn.Conn().SetDeadline(limit)
	go func() {
		defer close(c.ended)
		ctx, done := context.WithDeadline(context.Background(), limit)
		defer done()
		err := c.conn.CancelRequest(ctx) // returns when the server closes the cancel connection; by then it has signalled the session
		c.got = err == nil && ctx.Err() == nil
	}()
}

// HandleUnwatchAfterCancel is called after HandleCancel, when the statement has ended for whatever reason.
func (c *canceller) HandleUnwatchAfterCancel() {
	<-c.ended
	if !c.conn.IsClosed() { // closing the connection has a deadline of its own
		_ = c.conn.Conn().SetDeadline(time.Time{})
	}
	if !c.got {
		c.conn.CustomData()[doubtKey] = true
	}
}

// doubtful reports whether a cancellation may still be on its way to the connection's session.
func doubtful(conn *pgx.Conn) bool { return conn.PgConn().CustomData()[doubtKey] == true }
