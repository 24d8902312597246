package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A load is the clients: they enqueue, cancel and intervene through the front link, and record what they were told.
// Each call ends as done, refused, or unknown; after unknown, both outcomes are legal.
type load struct {
	lab      *lab
	running  sync.WaitGroup
	enqueued atomic.Int64
	gentle   atomic.Bool // no more runs that end their process
	crowded  atomic.Bool // no new runs are enqueued

	processes []process

	mu      sync.Mutex
	recent  []uuid.UUID        // acknowledged runs, to choose from
	owed    []order            // messages that instances wait for, not acknowledged yet
	handled map[uuid.UUID]bool // tasks, incidents and instances that were handled and are handled only once
}

const (
	callLimit = 5 * time.Second // how long a client waits for an answer
	mostCalls = 100             // of one kind, at the same time

	// A machine that cannot carry the load gets less of it. Otherwise the verdict would only show that leases are too
	// short where everything waits for a processor.
	mostOpen   = 150                    // the most runs that may be due or leased for more to be enqueued
	quick      = 100 * time.Millisecond // the longest that a short query may take for more to be enqueued
	shortQueue = 20                     // the most runs that may be due when the singles begin
)

// run works until ctx ends, and returns when every call has ended.
func (g *load) run(ctx context.Context) {
	g.running.Go(func() { g.look(ctx) })
	g.every(ctx, g.lab.plan.Rate, "enqueue", func(r *rand.Rand) func(context.Context) {
		o := draw(r, world{g.lab.outside.server.URL}, g.lab.plan.Hold)
		if most := g.lab.plan.Mostly; most != "" && r.IntN(2) == 0 {
			o = drawCase(r, findCase(most), world{g.lab.outside.server.URL}, g.lab.plan.Hold)
		}
		return func(ctx context.Context) {
			if !o.pill() || !g.gentle.Load() {
				g.enqueue(ctx, o)
			}
		}
	})
	g.every(ctx, g.lab.plan.Cancels, "cancel", func(r *rand.Rand) func(context.Context) {
		at, wait := r.Float64(), between(r, 0, 3*time.Second)
		if r.IntN(2) == 0 {
			at, wait = 1, between(r, 0, 60*time.Millisecond) // races with the settle
		}
		return func(ctx context.Context) {
			if id, ok := g.pick(at); ok {
				sleep(ctx, wait)
				g.record(ctx, "cancel", `SELECT workflow_cancel($1, 'torture')`, id)
			}
		}
	})
	g.every(ctx, g.lab.plan.Foreign, "foreign", func(r *rand.Rand) func(context.Context) {
		o := draw(r, world{g.lab.outside.server.URL}, g.lab.plan.Hold)
		o.key = ""
		rollback, hold := r.IntN(5) == 0, time.Duration(0)
		if r.IntN(20) == 0 {
			hold = g.lab.plan.hold(r, 5*time.Second, 20*time.Second)
		}
		return func(ctx context.Context) {
			if !o.pill() || !g.gentle.Load() {
				g.within(ctx, o, rollback, hold)
			}
		}
	})
	g.every(ctx, 1/g.lab.plan.Operator.Seconds(), "operator", func(r *rand.Rand) func(context.Context) {
		at := r.Float64()
		return func(ctx context.Context) { g.operate(ctx, at) }
	})
	g.conduct(ctx)
	<-ctx.Done()
	g.running.Wait()
}

// every makes and starts calls at a mean rate, with exponential gaps, until ctx ends. Only draw uses the random
// source, so that the calls do not depend on how long they take.
func (g *load) every(ctx context.Context, rate float64, use string, draw func(*rand.Rand) func(context.Context)) {
	r := g.lab.plan.random(use)
	turns := make(chan struct{}, mostCalls)
	g.running.Go(func() {
		next := time.Now()
		for ctx.Err() == nil {
			next = next.Add(time.Duration(r.ExpFloat64() / rate * float64(time.Second)))
			call := draw(r)
			sleep(ctx, time.Until(next))
			for (use == "enqueue" || use == "foreign" || use == "instances") && g.crowded.Load() && ctx.Err() == nil {
				sleep(ctx, 50*time.Millisecond)
			}
			turns <- struct{}{} // every call ends, so a turn becomes free
			if late := time.Since(next); late > time.Second {
				next = next.Add(late) // the calls that were missed are not made up for
			}
			g.running.Go(func() {
				defer func() { <-turns }()
				if ctx.Err() == nil {
					call(context.WithoutCancel(ctx))
				}
			})
		}
	})
}

// look checks regularly whether too much is open. While the server is down, clients continue.
func (g *load) look(ctx context.Context) {
	for ; ctx.Err() == nil; sleep(ctx, 250*time.Millisecond) {
		start, open := time.Now(), 0
		err := g.lab.admin.QueryRow(ctx, `
			SELECT count(*)
			FROM workflow_run
			WHERE (status = 'leased' OR status = 'pending' AND run_at < now()) AND NOT suspect AND held_at IS NULL AND deleted_at IS NULL AND payload->'unleasable' IS NULL`).Scan(&open)
		slow := time.Since(start) > quick
		g.crowded.Store(err == nil && (open > mostOpen || slow))
		if err == nil && (slow || starved()) { // what has waited meanwhile is late for a while
			until := time.Now().Add(leaseLength)
			g.lab.ledger.add(entry{Kind: "busy", At: start, Until: &until})
		}
	}
}

// starved reports whether three times as many threads are ready to run as there are processors. It works on Linux
// only.
func starved() bool {
	text, err := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text)) // three averages, ready/all, the last pid
	if err != nil || len(fields) < 4 {
		return false
	}
	ready, err := strconv.Atoi(strings.Split(fields[3], "/")[0])
	return err == nil && ready > 3*runtime.NumCPU()
}

// ask gives f one of the clients' connections, and the time that a client waits for an answer. The time starts when
// the connection is there: otherwise a client that waits for one would close it as soon as it got it, and open
// another.
func (g *load) ask(ctx context.Context, f func(context.Context, *pgxpool.Conn) error) error {
	conn, err := g.lab.client.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	limited, stop := context.WithTimeout(ctx, callLimit)
	defer stop()
	return f(limited, conn)
}

// An answer is how a call ended.
type answer int

const (
	done answer = iota
	refused
	unknown
)

// judge decides from an error whether the server refused, or the outcome is unknown. Only an answer of the server
// counts, and not one of a server that is shutting down: a statement that the driver calls safe to retry may have
// been sent anyway (a simple query, such as commit, whose connection broke).
func judge(err error) answer {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return done
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.As(err, &pg) && !strings.HasPrefix(pg.Code, "57"):
		return refused
	}
	return unknown
}

// enqueue enqueues a run from as many sessions at once as it has copies. Each of them tries until it knows the
// outcome.
func (g *load) enqueue(ctx context.Context, o order) {
	var all sync.WaitGroup
	if o.delay > 0 {
		o.due = time.Now().Add(o.delay) // of all copies: the ledger must not say a later time than the copy that came first
	}
	for i := range o.copies {
		c := o
		if i > 0 {
			c.id = uuid.NewSHA1(o.id, []byte{byte(i)}) // another client makes another id
		}
		if o.rival && i == o.copies-1 {
			c.name, c.typ, c.payload, c.emit = "rival", "chaos.sleep", []byte(`{"rival": true}`), 0
		}
		all.Go(func() { g.enqueueOne(ctx, c) })
	}
	all.Wait()
}

func (g *load) enqueueOne(ctx context.Context, o order) {
	runAt := o.due
	if runAt.IsZero() {
		runAt = time.Now().Add(o.delay)
	}
	e := entry{Kind: "enqueue", Run: o.id.String(), Type: o.typ, Case: o.name, Payload: o.payload, Emit: o.emit, Key: o.key}
	if o.delay > 0 || !o.due.IsZero() {
		e.RunAt = &runAt
	}
	var maybe bool // an earlier call may have worked
	for try := 0; try < 8; try++ {
		id, err := g.send(ctx, o, runAt)
		switch pg := code(err); {
		case err == nil:
			e.Answer, e.Run = "done", id.String()
		case (maybe || o.quiet) && pg == "23505" && o.key == "":
			e.Answer = "done" // this call or an earlier one succeeded
		case pg == "23505":
			e.Answer = "conflict" // a run with the same key has another payload
		case judge(err) == unknown && o.once:
			e.Answer = "unknown"
		case judge(err) == unknown:
			maybe = true
			fallthrough
		default:
			sleep(ctx, time.Duration(100<<try)*time.Millisecond)
			continue
		}
		break
	}
	if e.Answer == "" {
		e.Answer = map[bool]string{true: "unknown", false: "refused"}[maybe]
	}
	g.lab.ledger.add(e)
	if o.quiet {
		if e.Answer != "done" && !o.once {
			g.owe(o)
		}
		return
	}
	if e.Answer == "done" && e.Run == o.id.String() { // not that of another session
		g.enqueued.Add(1)
		g.remember(e.Run)
	}
}

// send enqueues by a plain INSERT, or through the function if there is a key.
func (g *load) send(ctx context.Context, o order, runAt time.Time) (id uuid.UUID, err error) {
	id = o.id
	err = g.ask(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		if o.key != "" {
			return conn.QueryRow(ctx, `SELECT workflow_enqueue($1, $2, $3, max_attempts => $4, idempotency_key => $5, id => $6)`,
				o.typ, o.payload, runAt, o.maxAttempts, o.key, o.id).Scan(&id)
		}
		_, err := conn.Exec(ctx, `INSERT INTO workflow_run (id, type, payload, run_at, max_attempts) VALUES ($1, $2, $3, $4, $5)`,
			o.id, o.typ, o.payload, runAt, o.maxAttempts)
		return err
	})
	return id, err
}

// within enqueues in a transaction that also does other work, which may take long, and which may be rolled back.
func (g *load) within(ctx context.Context, o order, rollback bool, hold time.Duration) {
	e := entry{Kind: "enqueue", Run: o.id.String(), Type: o.typ, Case: o.name, Payload: o.payload, Emit: o.emit}
	tx, err := g.lab.client.Begin(ctx)
	if err != nil {
		return
	}
	_, err = tx.Exec(ctx, `INSERT INTO workflow_run (id, type, payload, max_attempts) VALUES ($1, $2, $3, $4)`,
		o.id, o.typ, o.payload, o.maxAttempts)
	sleep(ctx, hold)
	switch {
	case err != nil || rollback:
		_ = tx.Rollback(ctx)
		e.Answer = "rolled back"
	default:
		limited, stop := context.WithTimeout(ctx, callLimit)
		err = tx.Commit(limited)
		stop()
		e.Answer = [...]string{"done", "rolled back", "unknown"}[judge(err)]
		if err != nil {
			e.Text = err.Error()
		}
	}
	g.lab.ledger.add(e)
	if e.Answer == "done" {
		g.enqueued.Add(1)
		g.remember(e.Run)
	}
}

// operate does what operators do: retry failed runs, delete, hold, resume and reorder runs, and change the policy.
func (g *load) operate(ctx context.Context, at float64) {
	var failed uuid.UUID
	if err := g.ask(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		_, _ = conn.Exec(ctx, setPolicy, 4+int(at*5)) // if it fails, the policy stays
		return conn.QueryRow(ctx, `SELECT id FROM workflow_run WHERE status = 'failed' AND deleted_at IS NULL AND type LIKE 'chaos.%' AND token_id IS NULL ORDER BY md5(id::text || $1::text) LIMIT 1`,
			fmt.Sprint(at)).Scan(&failed)
	}); err == nil {
		g.record(ctx, "retry", `SELECT workflow_retry($1)`, failed)
	}
	if id, ok := g.pick(at); ok {
		g.record(ctx, "delete", `SELECT workflow_delete($1, 'torture')`, id)
	}
	if id, ok := g.pick(at / 2); ok {
		g.record(ctx, "hold", `WITH u AS (UPDATE workflow_run SET held_at = now() WHERE id = $1 RETURNING 1) SELECT count(*)::text FROM u`, id)
		sleep(ctx, time.Second)
		g.record(ctx, "resume", `WITH u AS (UPDATE workflow_run SET held_at = NULL WHERE id = $1 RETURNING 1) SELECT count(*)::text FROM u`, id)
	}
	if id, ok := g.pick(at / 3); ok {
		g.record(ctx, "priority", `WITH u AS (UPDATE workflow_run SET priority = 10 WHERE id = $1 RETURNING 1) SELECT count(*)::text FROM u`, id)
	}
}

// record makes a call about a run and records the answer.
func (g *load) record(ctx context.Context, kind, sql string, id uuid.UUID) {
	sent := time.Now()
	var answer string
	if err := g.ask(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		sent = time.Now()
		return conn.QueryRow(ctx, sql, id).Scan(&answer)
	}); err != nil {
		answer = [...]string{"", "refused", "unknown"}[judge(err)]
	}
	g.lab.ledger.add(entry{Kind: kind, Run: id.String(), Answer: answer, Sent: &sent})
}

func (g *load) remember(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.recent) == 400 {
		g.recent = append(g.recent[:0], g.recent[100:]...)
	}
	g.recent = append(g.recent, uuid.MustParse(id))
}

// pick returns a recent run; at goes from 0, the oldest, to 1.
func (g *load) pick(at float64) (id uuid.UUID, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.recent) == 0 {
		return id, false
	}
	return g.recent[int(at*float64(len(g.recent)-1))], true
}

func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}
