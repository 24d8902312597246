package graph_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A loser loses commits: it ends a session just before it commits. Of the transactions that executed a statement
// containing words, it ends the first, and then every one-th: with one = 10, the 1st, the 11th and the 21st.
type loser struct {
	db    *pgxpool.Pool // not the traced pool: the loser ends sessions through it
	words string
	one   int64

	commits, lost atomic.Int64
	inside        sync.Map // connections whose transaction has executed such a statement
}

func (l *loser) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL != "commit" {
		if strings.Contains(data.SQL, l.words) {
			l.inside.Store(conn, true)
		}
		return ctx
	}
	if _, inside := l.inside.LoadAndDelete(conn); inside && l.commits.Add(1)%l.one == 1 {
		l.lost.Add(1)
		_, _ = l.db.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, conn.PgConn().PID())
	}
	return ctx
}

func (l *loser) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (l *loser) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	if slices.ContainsFunc(data.Batch.QueuedQueries, func(q *pgx.QueuedQuery) bool { return strings.Contains(q.SQL, l.words) }) {
		l.inside.Store(conn, true)
	}
	return ctx
}

func (l *loser) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (l *loser) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// If the commit is lost after process_signal_v1 has answered that all tokens were reached, the signal is delivered
// again, and the result of its run counts what was committed.
func TestSignalWhoseCommitIsLost(t *testing.T) {
	const n = 20
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), n)
	signal := s.enqueue("graph.signal.v1", `{"name": "go"}`)
	l := &loser{db: s.pool, words: "process_signal_v1", one: 2}
	employ(t, s.pool, func(pool *pgxpool.Pool) worker.Config {
		mux := worker.NewMux()
		return worker.Config{Pool: pool, Processes: graph.New(pool), Mux: mux, Prefixes: []string{"graph."}, Lease: 2 * time.Second, PollInterval: 20 * time.Millisecond,
			Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond}}
	}, func(_ *mortal, c *pgxpool.Config) { c.ConnConfig.Tracer = l })
	await(t, "the signal to be over, and what it brought", func() bool {
		return query[bool](t, s.pool, `SELECT NOT EXISTS (SELECT FROM workflow_run WHERE status IN ('pending', 'leased'))`)
	})
	if l.lost.Load() == 0 {
		t.Error("no commit was lost")
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, result->>'reached') FROM workflow_run WHERE id = $1`, signal); got != "succeeded 20" {
		t.Errorf("the signal: %s", got)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', count(*), (SELECT count(*) FROM message_wait)) FROM process_instance WHERE status = 'COMPLETED'`); got != "20 0" {
		t.Errorf("completed instances and waits are %s", got)
	}
}
