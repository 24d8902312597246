package graph_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// noted makes the database note with which status each run of a step is stored.
func (s *site) noted() {
	spoil(s, `CREATE TABLE noted (node text, status text);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO noted VALUES (NEW.node, NEW.status); RETURN NULL; END $$;
		CREATE TRIGGER note AFTER INSERT ON workflow_run FOR EACH ROW WHEN (NEW.type LIKE 'test.%') EXECUTE FUNCTION note()`)
}

// carried returns how many runs of steps were stored as leased, and how many as pending.
func (s *site) carried() (leased, pending int) {
	return query[int](s.t, s.pool, `SELECT count(*) FROM noted WHERE status = 'leased'`), query[int](s.t, s.pool, `SELECT count(*) FROM noted WHERE status = 'pending'`)
}

// The settling of a step stores the next steps as leased by the same worker: the first step, those in a row, the branches
// of a fork, and the one after a join.
//
// The observer is told of each lease: of those of a poll, and of those that were carried on.
func TestStepsAreCarriedOn(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	var observed atomic.Int64
	s.change = func(c *worker.Config) {
		c.Observe.Polled = func(leased int, _ time.Duration, _ error) { observed.Add(int64(leased)) }
		c.Observe.Carried = func(leased int) { observed.Add(int64(leased)) }
	}
	s.worker = s.hire()
	p := s.deploy("A", step("A", "B")+","+step("B", "F")+`, "F": {"fork": ["C", "D", "E"]}, "J": {"join": "all", "to": "G"}, `+step("C", "J")+","+step("D", "J")+","+step("E", "J")+","+step("G", ""))
	s.noted()
	for range 10 {
		s.status(s.start(p, `{}`), graph.Completed)
	}
	if leased, pending := s.carried(); leased+pending != 60 || leased < 40 { // a busy machine may look for pauses too late, and then carries nothing on
		t.Errorf("%d steps were stored as leased, and %d as pending; want nearly all of 60 as leased", leased, pending)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_event WHERE event_type IN ('released', 'expired')`); n > 0 {
		t.Errorf("%d leases were given back or expired", n)
	}
	if n := query[int64](t, s.pool, `SELECT sum(lease_no)::bigint FROM workflow_run`); n != observed.Load() {
		t.Errorf("the observer was told of %d leases, there were %d", observed.Load(), n)
	}
	s.healthy()
}

// The handler of a step that was carried on gets what it would get from a poll.
func TestCarriedStepKnowsWhatALeaseKnows(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	got := make(chan run.Info, 2)
	payloads := make(chan string, 2)
	s.mux.HandleRaw("test.look.v1", func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
		info := run.FromContext(ctx)
		got <- info
		payloads <- string(payload)
		if info.LeaseNo == 1 {
			return nil, run.Again(0)
		}
		return json.RawMessage(`{}`), nil
	})
	s.worker = s.hire()
	p := s.deploy("A", step("A", "L")+`, "L": {"do": "test.look.v1", "in": {"b": "'x'", "a": "[1.50, 1e2]"}}`)
	s.noted()
	for {
		s.finished(query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload, tenant_id, metadata)
			VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'key', gen_random_uuid(), 'priority', 3), 'acme', '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}') RETURNING id`, p))
		carried, polled := <-got, <-got
		one, other := <-payloads, <-payloads
		if query[bool](t, s.pool, `SELECT count(*) = 0 FROM noted WHERE node = 'L' AND status = 'leased'`) {
			continue // the machine is busy: a first try to settle has failed
		}
		if carried.StartedAt.IsZero() || carried.LeaseNo != 1 || carried.Attempt != 1 || carried.Worker == "" {
			t.Errorf("the handler got %+v", carried)
		}
		carried.StartedAt, carried.LeaseNo = polled.StartedAt, polled.LeaseNo
		if fmt.Sprint(carried) != fmt.Sprint(polled) || len(carried.BusinessKey) != 36 || carried.Instance == uuid.Nil || carried.Tenant != "acme" || carried.Node != "L" || carried.Metadata == nil {
			t.Errorf("the handler got\n%+v, by a poll\n%+v", carried, polled)
		}
		if one != other {
			t.Errorf("payload %s, by a poll %s", one, other)
		}
		return
	}
}

// endless starts an instance that never ends unless it is told to, and returns it.
func (s *site) endless(priority int) uuid.UUID {
	p := s.deploy("A", step("A", "B")+`, "B": {"choose": [{"if": "input.end == true", "to": "C"}], "else": "A"}, `+step("C", ""))
	return query[uuid.UUID](s.t, s.pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'input', '{"end": false}'::jsonb, 'priority', $2::int)) RETURNING id`, p, priority)
}

// The step after one that was at work when its instance was paused is not carried on. It is held, and executed once the
// instance is resumed.
func TestStepOfAPausedInstanceIsHeld(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	s.happens = func(name string, _ int) {
		if name == "A" {
			query[int](t, s.pool, `SELECT count(process_pause(id)) FROM process_instance WHERE paused_at IS NULL AND completed_at IS NULL`)
		}
	}
	s.worker = s.hire()
	p := s.deploy("A", step("A", "B")+","+step("B", ""))
	s.noted()
	for range 10 {
		id := s.start(p, `{}`)
		await(t, "the step after the one that was at work", func() bool {
			return query[bool](t, s.pool, `SELECT EXISTS (SELECT FROM workflow_run r JOIN process_token k ON k.id = r.token_id WHERE k.instance_id = $1 AND r.node = 'B')`, id)
		})
		if held := query[bool](t, s.pool, `SELECT held_at IS NOT NULL AND lease_no = 0 FROM workflow_run r JOIN process_token k ON k.id = r.token_id WHERE k.instance_id = $1 AND r.node = 'B'`, id); !held {
			t.Error("the step is not held although its instance is paused")
		}
		s.resume(id)
		s.status(id, graph.Completed)
	}
	if leased := query[int](t, s.pool, `SELECT count(*) FROM noted WHERE node = 'A' AND status = 'leased'`); leased == 0 {
		t.Error("no step was carried on, so nothing was tested")
	}
}

// No step of a paused type begins once the worker has looked, though every step before it was carried on. Nothing is
// charged for the steps that had to wait, and the chain continues after the pause.
func TestPauseStopsAChain(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	l := &looks{}
	s.worker = s.hire(func(_ *mortal, c *pgxpool.Config) { c.ConnConfig.Tracer = l })
	s.noted()
	const chains = 5
	for range chains {
		s.endless(0)
	}
	for range 3 {
		pgtest.Await(t, "steps to be carried on", func() bool { leased, _ := s.carried(); return leased > 20*chains })
		query[string](t, s.pool, `SELECT workflow_pause('test.', 'a test')::text`)
		l.await(t)
		looked := s.count("A")
		pgtest.Await(t, "its handlers to return", func() bool {
			return query[bool](t, s.pool, `SELECT NOT EXISTS (SELECT FROM workflow_run WHERE status = 'leased' AND type LIKE 'test.%')`)
		})
		before := s.count("A")
		if n := before - looked; n > chains { // a handler that was called may not have been counted then
			t.Errorf("%d steps of %d chains began after the worker had looked", n, chains)
		}
		time.Sleep(500 * time.Millisecond)
		if n := s.count("A") - before; n > 0 {
			t.Fatalf("%d steps began in the pause", n)
		}
		if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE type LIKE 'test.%' AND status = 'pending' AND attempt > 0`); n > 0 {
			t.Errorf("%d steps that wait were charged an attempt", n)
		}
		spoil(s, `DELETE FROM noted`)
		query[string](t, s.pool, `SELECT workflow_resume('test.')::text`)
	}
}

// looks counts the discoveries of a worker.
type looks struct{ begun atomic.Int64 }

func (l *looks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "workflow_lanes_v2") {
		l.begun.Add(1)
	}
	return ctx
}

func (l *looks) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// await waits until the worker has learned what a discovery has found that began after the call: the next but one has
// begun by then.
func (l *looks) await(t *testing.T) {
	t.Helper()
	before := l.begun.Load()
	pgtest.Await(t, "the worker to look", func() bool { return l.begun.Load() >= before+2 })
}

// A worker that stops while it carries steps on leaves no lease behind, and charges nothing for what has not begun.
func TestStopEndsAChain(t *testing.T) {
	s := newSite(t)
	s.noted()
	for range 5 {
		s.endless(0)
	}
	for range 4 {
		pgtest.Await(t, "steps to be carried on", func() bool { leased, _ := s.carried(); return leased > 50 })
		begun := time.Now()
		s.worker.release()
		if took := time.Since(begun); took > 5*time.Second { // its grace is twice as long
			t.Errorf("the stop took %s: what had not begun was not given back at once", took)
		}
		if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE status = 'leased' OR status = 'pending' AND attempt > 0`); n > 0 {
			t.Errorf("%d runs are leased, or charged for a start that never was", n)
		}
		spoil(s, `DELETE FROM noted`)
		s.worker = s.hire()
	}
	query[int](t, s.pool, `WITH c AS (INSERT INTO workflow_run (type, payload) SELECT 'graph.cancel.v1', jsonb_build_object('instance', id) FROM process_instance RETURNING id) SELECT count(*)::int FROM c`)
}

// If the answer to a commit is lost, the steps that it has stored as leased are given back at once. They do not wait for
// the end of their leases, and are charged nothing.
func TestCarriedOnByALostCommit(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	var armed atomic.Int32
	s.change = func(c *worker.Config) { c.Lease = time.Minute }
	s.worker = s.hire(func(_ *mortal, c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &unanswered{Conn: conn, armed: &armed}, err
		}
	})
	p := s.deploy("A", step("A", "B")+","+step("B", "C")+","+step("C", "D")+","+step("D", ""))
	s.noted()
	lost := 0
	for range 12 {
		armed.Store(1)
		id := s.start(p, `{}`)
		s.status(id, graph.Completed)
		if armed.Load() == 0 {
			lost++
		}
		if took := query[time.Duration](t, s.pool, `SELECT completed_at - created_at FROM process_instance WHERE id = $1`, id); took > 20*time.Second {
			t.Errorf("an instance took %s", took)
		}
	}
	leased, _ := s.carried()
	if lost < 6 || leased < 20 {
		t.Errorf("%d commits were lost, %d steps carried on", lost, leased)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE attempt > 1 OR suspect`); n > 0 {
		t.Errorf("%d runs were charged for a lease that was given back", n)
	}
	if n := query[int](t, s.pool, `SELECT count(*) FROM workflow_event WHERE event_type = 'released'`); n == 0 {
		t.Error("no lease was in doubt")
	}
	s.want(map[string]int{"A": 12, "B": 12, "C": 12, "D": 12})
	s.healthy()
}

// An unanswered connection breaks once, when armed, before the answer to a commit arrives that the server has executed.
type unanswered struct {
	net.Conn
	armed  *atomic.Int32
	commit bool
}

func (u *unanswered) Write(p []byte) (int, error) {
	u.commit = bytes.Contains(p, []byte("commit\x00"))
	return u.Conn.Write(p)
}

func (u *unanswered) Read(p []byte) (int, error) {
	n, err := u.Conn.Read(p)
	if err == nil && u.commit && u.armed.CompareAndSwap(1, 0) {
		_ = u.Close()
		return 0, errCut
	}
	return n, err
}

// A counter counts what is sent to the server: queries and batches, each of which is a round trip.
type counter struct{ queries, batches, commits atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	switch {
	case data.SQL == "commit":
		c.commits.Add(1)
	case strings.HasPrefix(data.SQL, "begin isolation"), conn.PgConn().TxStatus() == 'T' && !strings.Contains(data.SQL, "pg_relation_size") && data.SQL != "DISCARD PLANS":
		c.queries.Add(1)
	}
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.batches.Add(1)
	return ctx
}

func (c *counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// Settling a step, and storing the next one, takes three round trips: what is read and settled, what is written, and the
// commit. The start takes one more, for the instance. Ten times a second a look whether plans are still good takes one.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	c := &counter{}
	s.worker = s.hire(func(_ *mortal, config *pgxpool.Config) { config.ConnConfig.Tracer = c })
	const steps = 20
	nodes := step("n0", "")
	for n := 1; n < steps; n++ {
		nodes += "," + step(fmt.Sprintf("n%d", n), fmt.Sprintf("n%d", n-1))
	}
	s.status(s.start(s.deploy(fmt.Sprintf("n%d", steps-1), nodes), `{}`), graph.Completed)
	await(t, "the last commit", func() bool { return c.commits.Load() >= steps+1 })
	if q, b := c.queries.Load(), c.batches.Load(); q > 0 || b != 2*(steps+1)+1 {
		t.Errorf("%d steps and their start took %d queries and %d batches besides commits; want 0 and %d", steps, q, b, 2*(steps+1)+1)
	}
}
