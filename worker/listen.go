package worker

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
)

// listen wakes the poll when the database notifies of new runs, until ctx ends. Its connection is only a hint:
// without it, polling finds the same runs a little later.
func (w *Worker) listen(ctx context.Context) {
	failures := retries()
	for ctx.Err() == nil {
		w.awaitPoll(ctx)
		err := w.listenOnce(ctx, failures.Reset)
		if ctx.Err() != nil {
			return
		}
		w.config.Logger.Debug("wake-ups interrupted; polling goes on", "err", err)
		sleep(ctx, failures.NextBackOff())
	}
}

// awaitPoll waits until a poll succeeds. If the server has no room for all of the worker's connections, the one
// for wake-ups must not take the place of a more useful one.
func (w *Worker) awaitPoll(ctx context.Context) {
	for begun := time.Now(); ctx.Err() == nil && !w.lastPoll.time().After(begun); {
		sleep(ctx, 10*time.Millisecond)
	}
}

func (w *Worker) listenOnce(ctx context.Context, connected func()) error {
	call, done := context.WithTimeout(ctx, callTimeout)
	defer done()
	config := w.db.Config().ConnConfig
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler { // at a stop, close the connection instead of waiting for an answer
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	conn, err := pgx.ConnectConfig(call, config)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(call, `LISTEN workflow_run`); err != nil {
		return err
	}
	connected()
	for {
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return err
		}
		w.rouse()
	}
}

// rouse makes the poll look for work at once.
func (w *Worker) rouse() { poke(w.wake) }
