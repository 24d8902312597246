package graph_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A reaper sees the statements of a worker's transactions, and kills it at one of them.
type reaper struct {
	worker *mortal
	at     string

	mu     sync.Mutex
	inside map[*pgx.Conn]bool // in a transaction
	seen   map[string]bool
	places []string // in the order of their first times
}

func (r *reaper) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	r.reach(conn, "before", data.SQL)
	return ctx
}

func (r *reaper) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (r *reaper) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	r.reach(conn, "before the batch of", data.Batch.QueuedQueries[0].SQL)
	return ctx
}

func (r *reaper) TraceBatchQuery(_ context.Context, conn *pgx.Conn, data pgx.TraceBatchQueryData) {
	r.reach(conn, "after", data.SQL)
}

func (r *reaper) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (r *reaper) reach(conn *pgx.Conn, when, sql string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if strings.HasPrefix(sql, "begin") {
		r.inside[conn] = true
	}
	place := when + " " + strings.Join(strings.Fields(sql), " ")
	if !r.inside[conn] || r.seen[place] {
		return
	}
	if sql == "commit" || sql == "rollback" {
		delete(r.inside, conn)
	}
	r.seen[place] = true
	r.places = append(r.places, place)
	if place == r.at {
		r.worker.kill()
	}
}

// Wherever in the transactions that move a process its worker is cut off, another one takes over,
// and nothing tells what became of it from what becomes of an undisturbed one. All places take
// minutes: GRAPH_STATEMENTS=all tries them, otherwise it is one in some, others each time.
func TestCutOffAtEachStatement(t *testing.T) {
	want, places := story(t, "")
	one, first := 12, rand.IntN(12)
	if os.Getenv("GRAPH_STATEMENTS") == "all" {
		one, first = 1, 0
	}
	for n, place := range places {
		if n%one != first {
			continue
		}
		t.Run(fmt.Sprintf("%d %.60s", n, place), func(t *testing.T) {
			t.Parallel()
			if got, _ := story(t, place); got != want {
				t.Errorf("cut off %s:\n%s\nwant:\n%s", place, got, want)
			}
		})
	}
	if len(places) < 30 {
		t.Errorf("only %d places to be cut off at: %q", len(places), places)
	}
}

// story has a worker that is cut off at a place begin a process, another one end it, and tells
// what became of it.
func story(t *testing.T, at string) (end string, places []string) {
	s := newEmptySite(t)
	child := s.deploy("X", step("X", ""))
	p := s.deploy("F", `"F": {"fork": ["A", "T", "M", "C", "E"]}, "T": {"wait": "10ms", "to": "J"}, "M": {"await": {"message": "paid", "key": "'1'"}, "to": "J"},
		"C": {"call": {"process": "`+child+`", "undo": "none"}, "to": "J"}, "E": {"each": {"list": "[1, 2]", "do": "test.step.v1", "limit": 1}, "to": "J"},
		"J": {"join": "all", "to": "D"},`+undoable("A", "J")+","+step("D", "", `"fail": "'no'"`))
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	id := s.start(p, `{}`)
	r := &reaper{at: at, inside: map[*pgx.Conn]bool{}, seen: map[string]bool{}}
	first := s.hire(func(m *mortal, c *pgxpool.Config) { r.worker, c.ConnConfig.Tracer = m, r })
	over := func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE completed_at IS NOT NULL`) == 2 &&
			query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
	}
	if at != "" {
		select {
		case <-first.died:
		case <-t.Context().Done():
		}
		pgtest.Elapse(t, s.pool, 2*worker.MinLease)
		s.hire()
	}
	await(t, "the end", over)
	s.healthy()
	r.mu.Lock()
	defer r.mu.Unlock()
	return query[string](t, s.pool, `
		SELECT concat_ws(E'\n',
			(SELECT string_agg(concat_ws(' ', status, failure_reason), ', ' ORDER BY status) FROM process_instance),
			(SELECT string_agg(concat_ws(' ', node, status, n), ', ' ORDER BY node, status)
			 FROM (SELECT node, status, count(*) AS n FROM workflow_run WHERE node IS NOT NULL GROUP BY 1, 2) r),
			(SELECT string_agg(concat_ws(' ', event_type, n), ', ' ORDER BY event_type)
			 FROM (SELECT event_type, count(*) AS n FROM outbox_event GROUP BY 1) e),
			(SELECT string_agg(concat_ws(' ', event_type, node, n), ', ' ORDER BY event_type, node)
			 FROM (SELECT event_type, node, count(*) AS n FROM process_event GROUP BY 1, 2) e),
			(SELECT string_agg(concat_ws(' ', node_id, status, certain), ', ' ORDER BY "order") FROM compensation_record WHERE instance_id = $1),
			(SELECT string_agg(concat_ws('>', from_status, to_status), ' ' ORDER BY id) FROM process_state_history
			 WHERE instance_id = $1 AND to_status NOT IN ('WAITING', 'IN_PROGRESS')),
			(SELECT count(*) FROM message WHERE consumed_at IS NOT NULL))`, id), r.places
}
