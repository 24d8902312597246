package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/worker"
)

// A tally counts what the heartbeat scenario reports. It is a tracer of connections, so that statements are counted
// where they are sent.
type tally struct{ statements, heartbeats, lost atomic.Int64 }

// TraceQueryStart counts a statement.
func (t *tally) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.statements.Add(1)
	return ctx
}

// TraceQueryEnd does nothing.
func (t *tally) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (t *tally) observer() worker.Observer {
	return worker.Observer{
		Extended: func(int, time.Duration, error) { t.heartbeats.Add(1) },
		Lost:     func(string, error) { t.lost.Add(1) },
		Refused:  func(string) { t.lost.Add(1) },
	}
}

// tell reports what was counted between begin and release; lost leases are counted from the start.
func (t *tally) tell(c *conversation) {
	<-c.begun
	statements, heartbeats := t.statements.Load(), t.heartbeats.Load()
	<-c.released
	c.done(map[string]float64{
		"statements": float64(t.statements.Load() - statements),
		"heartbeats": float64(t.heartbeats.Load() - heartbeats),
		"lost":       float64(t.lost.Load()),
	})
}
