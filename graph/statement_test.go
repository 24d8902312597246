package graph_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A reaper traces the statements of a worker's transactions, and kills the worker at the n-th place. A place is before
// a statement or batch, or after a statement of a batch.
type reaper struct {
	worker *mortal
	n      int // 0: never

	mu     sync.Mutex
	inside map[*pgx.Conn]bool // connections that are in a transaction
	places []string
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
	if !r.inside[conn] {
		return
	}
	if sql == "commit" || sql == "rollback" {
		delete(r.inside, conn)
	}
	r.places = append(r.places, when+" "+strings.Join(strings.Fields(sql), " "))
	if len(r.places) == r.n {
		r.worker.kill()
	}
}

// rest stops the reaper. It returns whether the worker was killed, and all places so far.
func (r *reaper) rest() (killed bool, places []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	killed = r.n > 0 && len(r.places) >= r.n
	r.n = 0
	return killed, r.places
}

// A tale is a process, the processes it calls, what people do meanwhile, and the final number of instances. Together
// the tales use every feature of a process.
type tale struct {
	name, nodes string // the process starts at the first node
	called      map[string]string
	act         func(s *site, id uuid.UUID)
	instances   int
}

func tales() []tale {
	send := func(names ...string) func(*site, uuid.UUID) {
		return func(s *site, _ uuid.UUID) {
			for _, name := range names {
				s.enqueue("graph.message.v1", fmt.Sprintf(`{"name": %q, "key": "k"}`, name))
			}
		}
	}
	return []tale{
		{name: "forks", instances: 2, called: map[string]string{"child": step("X", "")}, act: send("paid"),
			nodes: `"F": {"fork": ["A", "T", "M", "C", "E"]}, "T": {"wait": "10ms", "to": "J"}, "M": {"await": {"message": "paid", "key": "'k'"}, "to": "J"},
				"C": {"call": {"process": "child", "undo": "none"}, "to": "J"}, "E": {"each": {"list": "[1, 2]", "do": "test.step.v1", "limit": 1}, "to": "J"},
				"J": {"join": "all", "to": "D"},` + undoable("A", "J") + "," + step("D", "", `"fail": "'no'"`)},
		{name: "choices",
			nodes: `"O": {"any": [{"if": "true", "to": "A"}, {"if": "false", "to": "B"}, {"if": "true", "to": "C"}]}, "o": {"join": "taken", "to": "X"},
				"X": {"choose": [{"if": "steps.A.n > 5", "to": "D"}], "else": "E"},` +
				step("A", "o", `"n": "2"`) + "," + step("B", "o") + "," + step("C", "o") + "," + step("D", "") + "," + step("E", "")},
		{name: "some are enough",
			nodes: `"F": {"fork": ["A", "T"]}, "T": {"wait": "30ms", "to": "J"}, "J": {"join": {"need": 1}, "to": "C"},
				"G": {"fork": ["D", "W"]}, "W": {"wait": "PT1H", "to": "K"}, "K": {"join": {"need": 1, "rest": "cancel"}, "to": "E"},` +
				step("A", "J") + "," + step("C", "G") + "," + step("D", "K") + "," + step("E", "")},
		{name: "a loop through a fork",
			nodes: `"F": {"fork": ["A", "B"]}, "J": {"join": "all", "to": "N"}, "X": {"choose": [{"if": "steps.N.n < 2", "to": "F"}], "else": "over"}, "over": {"end": true},` +
				step("A", "J") + "," + step("B", "J") + "," + step("N", "X", `"n": "'N' in steps ? steps.N.n + 1.0 : 1.0"`)},
		{name: "races", act: send("m", "never"),
			nodes: `"R": {"race": ["M", "W"]}, "M": {"await": {"message": "m", "key": "'k'"}, "to": "A"}, "W": {"wait": "PT1H", "to": "B"},
				"Q": {"race": ["N", "T"]}, "N": {"await": {"message": "n", "key": "'k'"}, "to": "B"}, "T": {"wait": "10ms", "to": "C"},` +
				step("A", "Q") + "," + step("B", "") + "," + step("C", "")},
		{name: "boundaries", act: func(s *site, id uuid.UUID) { s.succeeded("Y", 1); send("stop")(s, id) },
			nodes: `"U": {"human": {}, "on": [{"after": "20ms", "to": "A"}]}, "V": {"human": {}, "to": "B", "on": [
					{"message": "stop", "key": "'k'", "to": "C"}, {"after": "10ms", "keep": true, "to": "Y"}]},` +
				step("A", "V") + "," + step("B", "") + "," + step("C", "") + "," + step("Y", "")},
		{name: "people", nodes: `"S": {"await": {"signal": "go"}, "to": "U"}, "U": {"human": {}, "to": "C"},` + step("C", "", `"ok": "steps.U.ok"`),
			act: func(s *site, id uuid.UUID) {
				s.waiting("go")
				s.enqueue("graph.signal.v1", `{"name": "go"}`)
				s.at("U", 1)
				query[string](s.t, s.pool, `SELECT process_pause($1)`, id)
				s.enqueue("graph.complete_task.v1", fmt.Sprintf(`{"task": %q, "by": "anna", "output": {"ok": true}}`,
					query[uuid.UUID](s.t, s.pool, `SELECT id FROM user_task WHERE state = 'open'`)))
				query[string](s.t, s.pool, `SELECT process_resume($1)`, id)
			}},
		{name: "scopes",
			nodes: `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["W", "A"]}, "W": {"wait": "PT1H"}, "over": {"terminate": true},` + step("A", "over") + `}}, "to": "B"},
				"R": {"scope": {"start": "X", "nodes": {` + step("X", "", `"fail": "'bad'"`) + `}}, "on": [{"error": "bad", "to": "C"}]},` + step("B", "R") + "," + step("C", "")},
		{name: "thrown",
			nodes: undoable("A", "T") + `, "T": {"throw": {"compensate": true}, "to": "B"},` + undoable("B", "Q") + `, "Q": {"throw": {"compensate": true}, "to": "C"},` + step("C", "")},
		{name: "cancelled", instances: 2, called: map[string]string{"child": undoable("K", "W") + `, "W": {"wait": "PT1H"}`},
			nodes: undoable("A", "C") + `, "C": {"call": {"process": "child", "undo": "propagate"}}`,
			act: func(s *site, id uuid.UUID) {
				s.at("W", 1)
				s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q, "compensate": true}`, id))
			}},
		{name: "retried", nodes: step("A", "X") + `, "X": {"choose": [{"if": "steps.A.n > 1", "to": "B"}], "else": "C"},` + step("B", "") + "," + step("C", ""),
			act: func(s *site, id uuid.UUID) {
				incident := s.stopped(id, "expression_failed", 1)
				s.correct(id, "A", `{"n": 5}`)
				s.enqueue("graph.retry.v1", fmt.Sprintf(`{"incident": %q}`, incident))
			}},
		{name: "calls", instances: 3, called: map[string]string{"good": undoable("X", "Y") + "," + undoable("Y", ""), "bad": undoable("P", "Q") + "," + step("Q", "", `"fail": "'no'"`)},
			nodes: undoable("A", "C") + `, "C": {"call": {"process": "good", "undo": "propagate"}, "to": "B"},
				"B": {"call": {"process": "bad", "undo": "propagate"}, "to": "never", "on": [{"error": "child_failed", "to": "D"}]},` +
				step("D", "", `"fail": "'no'"`) + "," + step("never", "")},
		{name: "lists",
			nodes: `"E": {"each": {"list": "[1, 2, 3]", "do": "test.step.v1", "limit": 2}, "to": "G"}, "G": {"each": {"list": "[1, 2]", "do": "test.step.v1", "limit": 1, "need": 1, "rest": "cancel"}, "to": "H"},
				"H": {"each": {"list": "[1, 2]", "do": "test.step.v1", "limit": 1}, "in": {"fail": "'bad'"}, "to": "A", "on": [{"error": "bad", "to": "B"}]},` + step("A", "") + "," + step("B", "")},
		{name: "terminated",
			nodes: `"F": {"fork": ["W", "U", "M", "T"]}, "W": {"wait": "PT1H"}, "U": {"human": {}}, "M": {"await": {"message": "m", "key": "'k'"}}, "T": {"wait": "10ms", "to": "A"}, "over": {"terminate": true},` +
				step("A", "over")},
	}
}

// Wherever a worker is cut off in the transactions that move a process, another one takes over, and the outcome is the
// same as without a disturbance. There are more than 2000 places in all tales. make graph-statements tries all of them,
// which takes minutes; otherwise the test tries a random sample.
func TestCutOffAtEachStatement(t *testing.T) {
	var tried, reached atomic.Int64
	one := 240
	if text := os.Getenv("GRAPH_STATEMENTS"); text == "all" {
		one = 1
	} else if n, err := strconv.Atoi(text); err == nil && n > 0 {
		one = n
	} else if text != "" {
		t.Fatalf("GRAPH_STATEMENTS=%s: use all, or a number n for one place in n", text)
	}
	t.Run("tales", func(t *testing.T) {
		for _, tale := range tales() {
			t.Run(tale.name, func(t *testing.T) {
				t.Parallel()
				want, places, _ := tale.play(t, 0)
				first := rand.IntN(one)
				t.Logf("%d places, of which %d and each %d after it are tried", len(places), first+1, one)
				if len(places) < 30 {
					t.Errorf("only %d places to be cut off at: %q", len(places), places)
				}
				for n := first; n < len(places); n += one {
					t.Run(fmt.Sprintf("%d %.60s", n+1, places[n]), func(t *testing.T) {
						t.Parallel()
						got, places, killed := tale.play(t, n+1)
						tried.Add(1)
						if killed {
							reached.Add(1)
						}
						if got != want {
							t.Errorf("cut off %s:\n%s\nwant:\n%s", slices.Concat(places, make([]string, n+1))[n], got, want)
						}
					})
				}
			})
		}
	})
	t.Logf("%d of %d workers were cut off", reached.Load(), tried.Load())
	if !t.Failed() && reached.Load()*4 < tried.Load()*3 {
		t.Errorf("of %d workers %d came to the place where they were to be cut off", tried.Load(), reached.Load())
	}
}

// play executes the tale with a worker that is cut off at the n-th place (0: never) and another one that takes over. It
// returns a description of the outcome.
func (tale tale) play(t *testing.T, n int) (end string, places []string, killed bool) {
	s := newEmptySite(t)
	s.fate = nil
	for name, nodes := range tale.called {
		s.deployAs(name, firstNode.FindStringSubmatch(nodes)[1], nodes)
	}
	id := s.start(s.deployAs("tale", firstNode.FindStringSubmatch(tale.nodes)[1], tale.nodes), `{}`)
	r := &reaper{n: n, inside: map[*pgx.Conn]bool{}}
	s.change = func(c *worker.Config) { c.Concurrency, c.Batch = 1, 1 } // one run at a time, so that the places are always the same
	first := s.hire(func(m *mortal, c *pgxpool.Config) { r.worker, c.ConnConfig.Tracer = m, r })
	over := make(chan struct{})
	var heir sync.WaitGroup
	heir.Go(func() {
		select {
		case <-first.died:
			pgtest.Elapse(t, s.pool, 2*leaseLength)
			s.hire()
		case <-over:
		}
	})
	if tale.act != nil {
		tale.act(s, id)
	}
	pgtest.Await(t, "the end", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE completed_at IS NOT NULL`) == cmp.Or(tale.instances, 1) &&
			query[int](t, s.pool, `SELECT count(*) FROM workflow_run WHERE finished_at IS NULL`) == 0
	})
	killed, places = r.rest()
	close(over)
	heir.Wait()
	s.healthy()
	return query[string](t, s.pool, `
		SELECT regexp_replace(concat_ws(E'\n',
			(SELECT string_agg(concat_ws(' ', d.name, status, failure_reason, output_payload), ', ' ORDER BY d.name)
			 FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id),
			(SELECT string_agg(concat_ws(' ', node, status, n), ', ' ORDER BY node, status)
			 FROM (SELECT node, status, count(*) AS n FROM workflow_run WHERE node IS NOT NULL AND type <> 'graph.undo.v1' GROUP BY 1, 2) r),
			(SELECT string_agg(concat_ws(' ', event_type, n), ', ' ORDER BY event_type)
			 FROM (SELECT event_type, count(*) AS n FROM outbox_event GROUP BY 1) e),
			(SELECT string_agg(concat_ws(' ', event_type, node, n), ', ' ORDER BY event_type, node)
			 FROM (SELECT event_type, node, count(*) AS n FROM process_history GROUP BY 1, 2) e),
			(SELECT string_agg(concat_ws(' ', node_id, c.status, certain), ', ' ORDER BY d.name, "order")
			 FROM compensation_record c JOIN process_instance i ON i.id = c.instance_id JOIN process_definition d ON d.id = i.process_definition_id),
			(SELECT string_agg(concat_ws('>', from_status, to_status), ' ' ORDER BY d.name, h.id)
			 FROM process_state_history h JOIN process_instance i ON i.id = h.instance_id JOIN process_definition d ON d.id = i.process_definition_id
			 WHERE to_status NOT IN ('WAITING', 'IN_PROGRESS')),
			(SELECT string_agg(concat_ws(' ', node, state, completed_by), ', ' ORDER BY node) FROM user_task),
			(SELECT string_agg(concat_ws(' ', node, code, resolved_at IS NOT NULL), ', ' ORDER BY node) FROM incident),
			(SELECT count(*) FROM message WHERE consumed_at IS NOT NULL)), '[0-9a-f-]{36}', '…', 'g')`), places, killed
}
