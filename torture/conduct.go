package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func newLoad(l *lab) *load {
	return &load{lab: l, processes: drawProcesses(l.plan.random("processes")), handled: map[uuid.UUID]bool{}}
}

// deploy stores the graphs as psql would, and records them in the ledger.
func (g *load) deploy(ctx context.Context) error {
	for _, p := range g.processes {
		if _, err := g.lab.admin.Exec(ctx, `INSERT INTO process_definition (definition) VALUES ($1)`, p.definition); err != nil {
			return fmt.Errorf("deploy process %s: %w", p.name, err)
		}
		g.lab.ledger.add(entry{Kind: "define", Process: p.name, Payload: p.facts})
	}
	return nil
}

// conduct starts instances, sends what they wait for, and cancels, pauses and resumes them.
func (g *load) conduct(ctx context.Context) {
	g.every(ctx, g.lab.plan.Instances, "instances", func(r *rand.Rand) func(context.Context) {
		x := drawInstance(r, g.processes, g.lab.plan.Favoured)
		starts, letters := x.starts(), x.letters()
		return func(ctx context.Context) { g.begin(ctx, x, starts, letters) }
	})
	g.every(ctx, g.lab.plan.Halts, "halts", func(r *rand.Rand) func(context.Context) {
		at, undo, id := r.Float64(), r.IntN(2) == 0, newID(r)
		return func(ctx context.Context) {
			if i, ok := g.choose(ctx, at, false, true); ok {
				g.enqueueOne(ctx, graphOrder(id, "halt", "graph.cancel.v1", map[string]any{"instance": i, "reason": "torture", "compensate": undo}))
			}
		}
	})
	working := ctx // ends when no more work is made, and with it every pause
	g.every(ctx, g.lab.plan.Pauses, "pauses", func(r *rand.Rand) func(context.Context) {
		at, long, caller := r.Float64(), between(r, 0, 4*time.Second), r.IntN(2) == 0
		if r.IntN(4) == 0 {
			long = between(r, g.lab.plan.Keep*3/2, g.lab.plan.Keep*2)
		}
		return func(ctx context.Context) {
			if i, ok := g.choose(ctx, at, caller, false); ok {
				g.record(ctx, "pause", `SELECT process_pause($1)`, i)
				sleep(working, long)
				g.record(ctx, "unpause", `SELECT process_resume($1)`, i)
			}
		}
	})
	g.every(ctx, 0.5, "signals", func(r *rand.Rand) func(context.Context) {
		o := graphOrder(newID(r), "signal", "graph.signal.v1", map[string]any{"name": "chaos.bell"})
		o.once = true
		return func(ctx context.Context) { g.enqueueOne(ctx, o) }
	})
	g.running.Go(func() {
		for ; ctx.Err() == nil; sleep(ctx, 300*time.Millisecond) {
			g.serve(context.WithoutCancel(ctx))
		}
	})
}

// begin starts an instance and sends what it waits for, in no particular order.
func (g *load) begin(ctx context.Context, x *instance, starts, letters []order) {
	expect, err := json.Marshal(x.expect)
	if err != nil {
		panic(err) // words and numbers
	}
	g.lab.ledger.add(entry{Kind: "instance", Text: x.tag, Process: x.process, Key: x.key, Expect: expect, Answer: x.ends})
	for _, o := range letters {
		g.running.Go(func() {
			sleep(ctx, o.delay)
			o.delay = 0
			g.enqueueOne(ctx, o)
		})
	}
	for _, o := range starts {
		g.running.Go(func() { g.enqueueOne(ctx, o) })
	}
}

// choose returns an unfinished instance, selected by at. With caller it prefers one that continues and has called
// another. With once it never returns an instance twice, because the action is final.
func (g *load) choose(ctx context.Context, at float64, caller, once bool) (id uuid.UUID, ok bool) {
	if err := g.ask(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `
			SELECT i.id
			FROM process_instance i
			WHERE i.completed_at IS NULL AND i.parent_process_instance_id IS NULL
			ORDER BY $2 AND i.paused_at IS NULL AND EXISTS (SELECT FROM process_instance c WHERE c.parent_process_instance_id = i.id AND c.completed_at IS NULL) DESC, md5(i.id::text || $1::text)
			LIMIT 1`, fmt.Sprint(at), caller).Scan(&id)
	}); err != nil {
		return id, false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	known := g.handled[id]
	g.handled[id] = known || once
	return id, !(known && once)
}

// owe keeps a message that instances wait for until it is acknowledged.
func (g *load) owe(o order) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.owed = append(g.owed, o)
}

// serve does once what people do: it completes tasks, retries incidents, and sends again what was not acknowledged.
func (g *load) serve(ctx context.Context) {
	g.mu.Lock()
	owed := g.owed
	g.owed = nil
	g.mu.Unlock()
	for _, o := range owed {
		g.running.Go(func() { g.enqueueOne(ctx, o) })
	}
	g.each(ctx, `SELECT id FROM user_task WHERE state = 'open' LIMIT 50`, func(id uuid.UUID) (all []order) {
		people := 1
		if id[15]%4 == 0 { // two people at once: one is too late
			people = 2
		}
		for i := range people {
			all = append(all, graphOrder(uuid.NewSHA1(id, []byte{byte(i)}), "task", "graph.complete_task.v1", map[string]any{
				"task": id, "by": fmt.Sprintf("clerk %d", i), "output": map[string]any{"ok": true}}))
		}
		return all
	})
	g.each(ctx, `SELECT id FROM incident WHERE resolved_at IS NULL AND token_id IS NOT NULL LIMIT 50`, func(id uuid.UUID) []order {
		return []order{graphOrder(uuid.NewSHA1(id, []byte("again")), "again", "graph.retry.v1", map[string]any{"incident": id})}
	})
}

// each enqueues runs, once, for each id that a query finds.
func (g *load) each(ctx context.Context, query string, f func(uuid.UUID) []order) {
	var ids []uuid.UUID
	if err := g.ask(ctx, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		rows, _ := conn.Query(ctx, query)
		ids, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		return err
	}); err != nil {
		return // the next call tries again
	}
	for _, id := range ids {
		g.mu.Lock()
		known := g.handled[id]
		g.handled[id] = true
		g.mu.Unlock()
		if known {
			continue
		}
		for _, o := range f(id) {
			g.running.Go(func() { g.enqueueOne(ctx, o) })
		}
	}
}
