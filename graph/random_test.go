package graph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// This file draws random processes, nested from blocks of every kind, whose outcome is known in advance.

const (
	randomInstances = 320
	randomBatch     = 80
)

// A plan is a process and the expected outcome of an instance of it.
type plan struct {
	definition *graph.Definition
	input      map[string]any
	ends       []graph.Status  // the statuses in which it may end; Waiting means with the incident
	incident   string          // the code of the incident that remains; empty: none
	want       map[string]span // how often a node's runs succeed, if the instance completes
	cancel     bool            // the test cancels it while it runs
}

// A span is a range for how often something happens.
type span struct{ least, most int }

func (s span) maybe() span         { return span{0, s.most} }
func (s span) times(n int) span    { return span{s.least * n, s.most * n} }
func (s span) and(o span) span     { return span{s.least + o.least, s.most + o.most} }
func (s span) contains(n int) bool { return s.least <= n && n <= s.most }

// A block is a part of a process with one entry and one exit. build adds its nodes to in, with an exit that leads to
// to. walk adds to the plan how often its nodes are done if the block is entered often times.
type block struct {
	build func(in map[string]*graph.Node, to string) (first string)
	walk  func(often span)
}

// A planner draws processes.
type planner struct {
	*rand.Rand
	plan   *plan
	called []*plan // plans whose processes may be called
	names  int
	loops  bool // a loop may be drawn here: not where a block may run twice at once, since a loop counts its passes in a fact of the instance
	undoes bool
}

func newPlan(r *rand.Rand, name string, called []*plan) *plan {
	p := &planner{Rand: r, called: called, loops: true, undoes: r.IntN(3) == 0, plan: &plan{
		definition: &graph.Definition{Process: name, Version: 1, Nodes: map[string]*graph.Node{}},
		input:      map[string]any{"id": name}, want: map[string]span{}, ends: []graph.Status{graph.Completed},
	}}
	all := p.block(4)
	walk := span{1, 1}
	switch k := r.IntN(20); {
	case k < 2:
		all, p.plan.ends = p.sequence(all, p.failing("lost", nil)), []graph.Status{graph.Failed}
	case k < 4:
		all, walk = p.stopped(all), span{0, 1}
	case k == 4 && called != nil:
		all, p.plan.ends, p.plan.incident = p.sequence(all, p.stuck()), []graph.Status{graph.Waiting}, "no_branch_taken"
	case k == 5 && called != nil:
		p.plan.cancel, p.plan.ends = true, []graph.Status{graph.Completed, graph.Cancelled}
	}
	p.plan.definition.Start = all.build(p.plan.definition.Nodes, "")
	all.walk(walk)
	return p.plan
}

func (p *planner) name(kind string) string {
	p.names++
	return kind + strconv.Itoa(p.names)
}

// once draws a block without loops, which may run twice at once.
func (p *planner) once(depth int) block {
	loops := p.loops
	p.loops = false
	defer func() { p.loops = loops }()
	return p.block(depth)
}

func (p *planner) block(depth int) block {
	if depth == 0 {
		return p.step(nil)
	}
	depth--
	switch p.IntN(22) {
	case 0, 1, 2:
		return p.sequence(p.block(depth), p.block(depth))
	case 3:
		return p.choose(p.block(depth), p.block(depth))
	case 4, 5:
		return p.fork(&graph.Join{}, p.branches(depth, p.block)...)
	case 6:
		return p.any(p.branches(depth, p.block)...)
	case 7:
		return p.need(false, p.branches(depth, p.once))
	case 8:
		return p.need(true, p.branches(depth, p.block))
	case 9:
		if p.loops {
			return p.loop(p.block(depth))
		}
		return p.step(nil)
	case 10:
		return p.wait(60)
	case 11, 12:
		return p.scope(depth)
	case 13:
		return p.race(p.block(depth), p.block(depth))
	case 14:
		return p.host(depth, &graph.Node{Human: &graph.Human{Groups: []string{"staff"}}})
	case 15:
		return p.host(depth, p.await())
	case 16:
		return p.call(depth)
	case 17:
		b := p.block(depth)
		return p.failing("bad", &b)
	case 18:
		return p.each(depth)
	case 19:
		return p.host(depth, p.stepNode(nil))
	case 20:
		return p.sequence(p.step(nil), p.node("undo", &graph.Node{Throw: &graph.Throw{Compensate: true}}))
	}
	return p.step(nil)
}

// branches draws the branches of a fork. Each leads to the join over exactly one edge, as joins require.
func (p *planner) branches(depth int, draw func(int) block) (all []block) {
	for range 2 + p.IntN(2) {
		all = append(all, p.sequence(draw(depth), p.step(nil)))
	}
	return all
}

// node returns a block of one node, whose runs are not counted.
func (p *planner) node(kind string, n *graph.Node) block {
	name := p.name(kind)
	return block{func(in map[string]*graph.Node, to string) string {
		if !n.End && !n.Terminate {
			n.To = to
		}
		in[name] = n
		return name
	}, func(span) {}}
}

func (p *planner) stepNode(more map[string]string) *graph.Node {
	n := &graph.Node{Do: "random.step.v1", In: map[string]string{"ms": strconv.Itoa(p.IntN(12))}, Attempts: 100}
	maps.Copy(n.In, more)
	if p.IntN(6) == 0 {
		n.In["flaky"] = "true"
	}
	if p.undoes && p.IntN(2) == 0 {
		n.Undo = "random.undo.v1"
	}
	return n
}

func (p *planner) step(more map[string]string) block {
	name, n := p.name("step"), p.stepNode(more)
	return block{func(in map[string]*graph.Node, to string) string {
		n.To, in[name] = to, n
		return name
	}, func(s span) { p.plan.want[name] = p.plan.want[name].and(s) }}
}

// failing returns a step that fails for good with a code. If then is not nil, an error edge leads to it.
func (p *planner) failing(code string, then *block) block {
	name, n := p.name("fails"), p.stepNode(map[string]string{"fail": "'" + code + "'"})
	return block{func(in map[string]*graph.Node, to string) string {
		if then != nil {
			n.On = []graph.Boundary{{Error: []string{code, "*"}[p.IntN(2)], To: then.build(in, to)}}
		}
		n.To, in[name] = to, n
		return name
	}, func(s span) {
		p.plan.want[name] = span{}
		if then != nil {
			then.walk(s)
		}
	}}
}

// stuck returns an exclusive gateway none of whose conditions is true.
func (p *planner) stuck() block {
	name, over := p.name("stuck"), p.node("over", &graph.Node{End: true})
	return block{func(in map[string]*graph.Node, to string) string {
		in[name] = &graph.Node{Choose: []graph.Way{{If: "input.id == ''", To: over.build(in, to)}}}
		return name
	}, func(span) {}}
}

func (p *planner) sequence(all ...block) block {
	return block{func(in map[string]*graph.Node, to string) string {
		for _, b := range slices.Backward(all) {
			to = b.build(in, to)
		}
		return to
	}, func(s span) {
		for _, b := range all {
			b.walk(s)
		}
	}}
}

// flag draws a condition, and whether it is true.
func (p *planner) flag() (condition string, holds bool) {
	name := p.name("flag")
	is := p.IntN(2) == 0
	p.plan.input[name] = is
	return "input." + name, is
}

func (p *planner) choose(yes, no block) block {
	name := p.name("choose")
	condition, is := p.flag()
	return block{func(in map[string]*graph.Node, to string) string {
		in[name] = &graph.Node{Choose: []graph.Way{{If: condition, To: yes.build(in, to)}}, Else: no.build(in, to)}
		return name
	}, func(s span) {
		if is {
			yes.walk(s)
		} else {
			no.walk(s)
		}
	}}
}

func (p *planner) fork(j *graph.Join, all ...block) block {
	name, join := p.name("fork"), p.name("join")
	return block{func(in map[string]*graph.Node, to string) string {
		n := &graph.Node{}
		for _, b := range all {
			n.Fork = append(n.Fork, b.build(in, join))
		}
		in[name], in[join] = n, &graph.Node{Join: j, To: to}
		return name
	}, func(s span) {
		for _, b := range all {
			b.walk(s)
		}
	}}
}

// stopped returns a block that is terminated after a while, or at once.
func (p *planner) stopped(b block) block {
	name, stop, atOnce := p.name("fork"), p.node("stop", &graph.Node{Terminate: true}), p.IntN(3) == 0
	if !atOnce {
		stop = p.sequence(p.wait(100), stop)
	}
	first := p.IntN(2)
	return block{func(in map[string]*graph.Node, to string) string {
		ways := []string{b.build(in, to), stop.build(in, to)}
		in[name] = &graph.Node{Fork: []string{ways[first], ways[1-first]}}
		return name
	}, func(s span) {
		if atOnce {
			s = span{}
		}
		b.walk(s)
	}}
}

func (p *planner) any(all ...block) block {
	name, join, other := p.name("any"), p.name("join"), p.step(nil)
	conditions, are := make([]string, len(all)), make([]bool, len(all))
	for k := range all {
		conditions[k], are[k] = p.flag()
	}
	return block{func(in map[string]*graph.Node, to string) string {
		n := &graph.Node{Else: other.build(in, join)}
		for k, b := range all {
			n.Any = append(n.Any, graph.Way{If: conditions[k], To: b.build(in, join)})
		}
		in[name], in[join] = n, &graph.Node{Join: &graph.Join{Taken: true}, To: to}
		return name
	}, func(s span) {
		for k, b := range all {
			if are[k] {
				b.walk(s)
			}
		}
		if !slices.Contains(are, true) {
			other.walk(s)
		}
	}}
}

// need returns a fork whose join needs only some of the branches. One branch may lead straight to the join.
func (p *planner) need(cancel bool, all []block) block {
	n, straight := 1+p.IntN(len(all)), p.IntN(3) == 0
	if straight {
		all = slices.Insert(all, p.IntN(len(all)+1), p.sequence())
	}
	b := p.fork(&graph.Join{Need: n, Cancel: cancel}, all...)
	walk := b.walk
	b.walk = func(s span) {
		switch {
		case cancel && straight && n == 1: // the other branches are not even entered
			s = span{}
		case cancel:
			s = s.maybe()
		}
		walk(s)
	}
	return b
}

func (p *planner) loop(body block) block {
	count, again, over := p.name("count"), p.name("again"), p.node("over", &graph.Node{Do: "random.step.v1", In: map[string]string{"ms": "0"}, Attempts: 100})
	passes := 2 + p.IntN(2)
	return block{func(in map[string]*graph.Node, to string) string {
		in[count] = &graph.Node{Do: "random.step.v1", Attempts: 100, To: again,
			In: map[string]string{"n": fmt.Sprintf("'%s' in steps ? steps.%[1]s.n + 1.0 : 1.0", count)}}
		first := body.build(in, count)
		in[again] = &graph.Node{Choose: []graph.Way{{If: fmt.Sprintf("int(steps.%s.n) %% %d != 0", count, passes), To: first}}, Else: over.build(in, to)}
		return first
	}, func(s span) {
		body.walk(s.times(passes))
		p.plan.want[count] = s.times(passes)
	}}
}

func ms(n int) graph.Duration { return graph.Duration(time.Duration(n) * time.Millisecond) }

func (p *planner) wait(most int) block {
	return p.node("wait", &graph.Node{Wait: &graph.Wait{For: ms(1 + p.IntN(most))}})
}

func (p *planner) await() *graph.Node {
	if p.IntN(3) == 0 {
		return &graph.Node{Await: &graph.Await{Signal: p.name("signal")}}
	}
	return &graph.Node{Await: &graph.Await{Message: p.name("message"), Key: "input.id"}}
}

// host returns a block of a node with timers and messages on its boundary.
func (p *planner) host(depth int, n *graph.Node) block {
	name := p.name("host")
	handlers, counts := p.handlers(depth, name, n)
	return block{func(in map[string]*graph.Node, to string) string {
		in[name], n.To = n, to
		for _, h := range handlers {
			h.build(in, to)
		}
		return name
	}, func(s span) {
		for _, h := range handlers {
			h.walk(s)
		}
		if n.Do != "" {
			p.plan.want[name] = p.plan.want[name].and(counts(s))
		}
	}}
}

// handlers draws boundary timers and messages of a node. counts returns how often the node itself is completed if it is
// entered s times.
func (p *planner) handlers(depth int, name string, n *graph.Node) (all []block, counts func(span) span) {
	counts = func(s span) span { return s }
	for k := range p.IntN(3) {
		h, then := graph.Boundary{}, p.once(max(depth-1, 0))
		switch p.IntN(5) {
		case 0, 1:
			h.After = ms(1 + 2*p.IntN(40) + k) // never the same twice: Compile refuses two interrupting timers of one time
		case 2:
			h.After, h.Keep = ms(1+p.IntN(80)), true
		case 3:
			h.Message, h.Key = p.name("message"), "input.id"
		case 4:
			h.Every, h.Times = graph.Duration(time.Second), 1+p.IntN(2)
		}
		stays := h.Keep || h.Every > 0
		if !stays {
			counts = span.maybe
		}
		all = append(all, block{func(in map[string]*graph.Node, to string) string {
			if stays {
				to = ""
			}
			h.To = then.build(in, to)
			n.On = append(n.On, h)
			return name
		}, func(s span) {
			s = s.maybe()
			then.walk(s.times(max(h.Times, 1)))
		}})
	}
	return all, counts
}

func (p *planner) race(all ...block) block {
	name := p.name("race")
	return block{func(in map[string]*graph.Node, to string) string {
		n := &graph.Node{}
		for _, b := range all {
			o := &graph.Node{Wait: &graph.Wait{For: ms(1 + p.IntN(60))}}
			if p.IntN(2) == 0 {
				o = p.await()
			}
			option := p.name("option")
			o.To, in[option] = b.build(in, to), o
			n.Race = append(n.Race, option)
		}
		in[name] = n
		return name
	}, func(s span) {
		for _, b := range all {
			b.walk(s.maybe())
		}
	}}
}

// scope draws a scope that ends normally, by an error, by terminate, or by a boundary event.
func (p *planner) scope(depth int) block {
	name, inner, then := p.name("scope"), p.block(depth), p.block(depth)
	fails, cut := false, false
	switch p.IntN(4) {
	case 0:
		inner, fails, cut = p.sequence(inner, p.failing("bad", nil)), true, true
	case 1:
		inner, cut = p.stopped(inner), true
	}
	n := &graph.Node{Scope: &graph.Scope{Nodes: map[string]*graph.Node{}}}
	handlers, counts := p.handlers(depth, name, n)
	return block{func(in map[string]*graph.Node, to string) string {
		n.Scope.Start = inner.build(n.Scope.Nodes, "")
		in[name], n.To = n, to
		if fails {
			n.On = append(n.On, graph.Boundary{Error: "bad", To: then.build(in, to)})
		}
		for _, h := range handlers {
			h.build(in, to)
		}
		return name
	}, func(s span) {
		for _, h := range handlers {
			h.walk(s)
		}
		if s = counts(s); fails {
			then.walk(s)
		}
		if cut {
			s = s.maybe()
		}
		inner.walk(s)
	}}
}

func (p *planner) call(depth int) block {
	if len(p.called) == 0 {
		return p.step(nil)
	}
	child := p.called[p.IntN(len(p.called))]
	n := &graph.Node{Call: &graph.Call{Process: child.definition.Process, Undo: []string{"none", "propagate"}[p.IntN(2)]}, In: map[string]string{}}
	for key, value := range child.input {
		n.In[key] = fmt.Sprint(value)
		if key == "id" {
			n.In[key] = "input.id + 'c'"
		}
	}
	host := p.host(depth, n)
	if child.ends[0] == graph.Completed {
		return host
	}
	then := p.block(depth)
	return block{func(in map[string]*graph.Node, to string) string {
		n.On = append(n.On, graph.Boundary{Error: "child_failed", To: then.build(in, to)})
		return host.build(in, to)
	}, func(s span) {
		host.walk(s)
		if slices.ContainsFunc(n.On, func(h graph.Boundary) bool { return h.Error == "" && !h.Keep && h.Every == 0 }) {
			s = s.maybe()
		}
		then.walk(s)
	}}
}

func (p *planner) each(depth int) block {
	name, items := p.name("each"), p.IntN(6)
	var list []string
	for k := range items {
		list = append(list, strconv.Itoa(k))
	}
	e := &graph.Each{List: "[" + strings.Join(list, ", ") + "]", Do: "random.step.v1", Limit: p.IntN(4)}
	n := &graph.Node{Each: e, In: map[string]string{"ms": "item", "item": "item"}, Attempts: 100}
	counts := func(s span) span { return s.times(items) }
	then, fails := p.block(depth), false
	switch p.IntN(4) {
	case 0:
		if items > 1 {
			e.Need, e.Rest = 1+p.IntN(items), []string{"", "cancel"}[p.IntN(2)]
			counts = func(s span) span { return span{s.least * e.Need, s.most * items} }
		}
	case 1:
		if items > 1 {
			fails = true
			n.In["fail"] = "item == 1.0 ? dyn('bad') : dyn(null)"
			counts = func(s span) span { return span{0, s.most * (items - 1)} }
		}
	}
	return block{func(in map[string]*graph.Node, to string) string {
		if fails {
			n.On = []graph.Boundary{{Error: "bad", To: then.build(in, to)}}
		}
		in[name], n.To = n, to
		return name
	}, func(s span) {
		p.plan.want[name+"/item"] = p.plan.want[name+"/item"].and(counts(s))
		if fails {
			then.walk(s)
		}
	}}
}

// A crowd is a database, workers that die, and people who answer.
type crowd struct {
	t    *testing.T
	pool *pgxpool.Pool
	*rand.Rand

	mu      sync.Mutex
	workers []*mortal
}

// hire starts a worker.
func (c *crowd) hire() {
	m := employ(c.t, c.pool, func(pool *pgxpool.Pool) worker.Config {
		mux, engine := worker.NewMux(), graph.New(pool)
		graph.Copy(engine, told)
		worker.Handle(mux, "random.step.v1", func(_ context.Context, in map[string]any) (map[string]any, error) {
			if n, err := strconv.Atoi(fmt.Sprint(in["ms"])); err == nil {
				time.Sleep(time.Duration(n) * time.Millisecond)
			}
			if code, ok := in["fail"].(string); ok {
				return nil, run.Permanent(run.WithCode(code, errors.New("it was told to fail")))
			}
			if in["flaky"] == true && rand.IntN(3) > 0 {
				return nil, errors.New("not now")
			}
			return in, nil
		})
		worker.Handle(mux, "random.undo.v1", func(context.Context, struct{ Input, Output, Run, Certain any }) (struct{}, error) {
			return struct{}{}, nil
		})
		return worker.Config{
			Pool: pool, Mux: mux, Prefixes: []string{"random."}, Processes: engine, Retention: worker.Retention{Off: true},
			Lease: 6 * time.Second, PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
			Backoff: run.Backoff{Base: 5 * time.Millisecond, Cap: 10 * time.Millisecond}, ShutdownGrace: -1,
		}
	}, func(_ *mortal, config *pgxpool.Config) {
		config.ConnConfig.Tracer = &loser{db: c.pool, one: 10} // some commits are lost
	})
	c.mu.Lock()
	c.workers = append(c.workers, m)
	c.mu.Unlock()
}

// replace makes one worker, drawn at random, leave, and hires another one.
func (c *crowd) replace(leave func(*mortal)) {
	c.mu.Lock()
	k := c.IntN(len(c.workers))
	old := c.workers[k]
	c.workers = slices.Delete(c.workers, k, k+1)
	c.mu.Unlock()
	leave(old)
	c.hire()
}

// disturb ends connections, kills or stops a worker, or pauses an instance.
func (c *crowd) disturb(ctx context.Context) {
	switch k := c.IntN(10); {
	case k < 5:
		_, _ = c.pool.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE application_name = 'mortal' AND datname = current_database() ORDER BY random() LIMIT 2`)
	case k < 8:
		c.replace((*mortal).kill)
	case k < 9:
		c.replace(func(m *mortal) { m.stop(); m.worker.StopNow() })
	default:
		var id *uuid.UUID
		if err := c.pool.QueryRow(ctx, `SELECT (SELECT id FROM process_instance WHERE completed_at IS NULL ORDER BY random() LIMIT 1)`).Scan(&id); err == nil && id != nil {
			_, _ = c.pool.Exec(ctx, `SELECT process_pause($1)`, id)
			time.Sleep(20 * time.Millisecond)
			_, _ = c.pool.Exec(context.WithoutCancel(ctx), `SELECT process_resume($1)`, id)
		}
	}
}

// answer sends the messages, signals and task completions that some tokens wait for, each only once.
func (c *crowd) answer(ctx context.Context) {
	_, err := c.pool.Exec(ctx, `
		WITH waits AS (
			INSERT INTO answered
			SELECT token_id, place, created_at FROM message_wait WHERE random() < 0.5
			ON CONFLICT DO NOTHING
			RETURNING id AS token_id, place
		), sent AS (
			INSERT INTO workflow_run (type, payload, max_attempts)
			SELECT CASE WHEN m.key IS NULL THEN 'graph.signal.v1' ELSE 'graph.message.v1' END,
			       jsonb_strip_nulls(jsonb_build_object('name', m.name, 'key', m.key)), 1000
			FROM waits JOIN message_wait m USING (token_id, place)
		), tasks AS (
			INSERT INTO answered
			SELECT id, '', 'epoch' FROM user_task WHERE state = 'open' AND random() < 0.5
			ON CONFLICT DO NOTHING
			RETURNING id AS task
		)
		INSERT INTO workflow_run (type, payload, max_attempts)
		SELECT 'graph.complete_task.v1', jsonb_build_object('task', task, 'by', 'anna'), 1000 FROM tasks`)
	if err != nil && ctx.Err() == nil {
		c.t.Errorf("answer: %v", err)
	}
}

// Each instance of a random process ends as its definition says, with every step done as often as it says, although
// workers die and commits are lost meanwhile. The invariants hold afterwards.
func TestRandom(t *testing.T) {
	instances, seed := randomInstances, uint64(1) // the same seed each time; make graph-random draws one
	for name, into := range map[string]func(uint64){
		"GRAPH_RANDOM": func(n uint64) { instances = int(n) }, "GRAPH_SEED": func(n uint64) { seed = n },
	} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			into(n)
		}
	}
	var cutOff atomic.Int64
	t.Run("batch", func(t *testing.T) {
		for at := 0; at < instances; at += randomBatch {
			t.Run(fmt.Sprintf("GRAPH_SEED=%d", seed), func(t *testing.T) {
				t.Parallel()
				cutOff.Add(int64(disturbed(t, rand.New(rand.NewPCG(seed, 0)), min(randomBatch, instances-at))))
			})
			seed++
		}
	})
	if cutOff.Load() == 0 && instances >= randomInstances && !t.Failed() {
		t.Error("no worker died with a lease")
	}
	t.Logf("%d leases were cut off", cutOff.Load())
}

// disturbed executes random processes under disturbances, and returns how many leases expired.
func disturbed(t *testing.T, r *rand.Rand, instances int) (cutOff int) {
	c := &crowd{t: t, pool: pgtest.New(t), Rand: rand.New(rand.NewPCG(r.Uint64(), 0))}
	if _, err := c.pool.Exec(t.Context(), `CREATE TABLE answered (id uuid, place text, at timestamptz, PRIMARY KEY (id, place, at)); `+tellsAll); err != nil {
		t.Fatal(err)
	}
	plans := draw(t, c.pool, r, instances)
	for range 2 {
		c.hire()
	}
	ctx, stop := context.WithCancel(t.Context())
	var others sync.WaitGroup
	others.Go(func() {
		for ctx.Err() == nil {
			c.answer(ctx)
			time.Sleep(10 * time.Millisecond)
		}
	})
	t.Cleanup(func() { stop(); others.Wait() })
	started := c.start(plans)
	await(t, "steps to be leased", func() bool {
		return query[int](t, c.pool, `SELECT count(*) FROM workflow_run WHERE status = 'leased'`) > 4
	})
	for range 2 { // both workers, so that those with leases are killed
		c.replace((*mortal).kill)
	}
	for range 8 {
		time.Sleep(time.Duration(50+c.IntN(250)) * time.Millisecond)
		c.disturb(ctx)
	}
	c.settle(t)
	for id, p := range started {
		c.check(id, p)
	}
	for _, name := range invariants {
		if found := query[string](t, c.pool, "SELECT coalesce(jsonb_agg(v)::text, '') FROM "+name+" v"); found != "" {
			t.Errorf("%s: %s", name, found)
		}
	}
	retold(t, c.pool)
	visits := activities(t, c.pool)
	for _, percent := range []int{50, 100} { // workers of an earlier version have moved instances beside those of this one, or before them
		older(t, c.pool, percent)
		retold(t, c.pool)
		if now := activities(t, c.pool); now != visits {
			t.Errorf("visits are\n%s\nand were\n%s", now, visits)
		}
	}
	return query[int](t, c.pool, `SELECT count(*) FROM workflow_history WHERE event_type = 'expired'`)
}

// draw deploys n random processes. Some of the first four may be called by the others.
func draw(t *testing.T, pool *pgxpool.Pool, r *rand.Rand, n int) (plans []*plan) {
	t.Helper()
	var called []*plan
	for k := range n {
		p := newPlan(r, fmt.Sprintf("p%d", k), called)
		if _, err := graph.Deploy(t.Context(), pool, p.definition); err != nil {
			text, _ := p.definition.JSON()
			t.Fatalf("%v\n%s", err, text)
		}
		if k < 4 && len(p.definition.Nodes) < 20 && p.incident == "" && !p.cancel { // its end is certain, so its callers can plan with it
			called = append(called, p)
		}
		plans = append(plans, p)
	}
	return plans
}

// start starts an instance of each plan, and has those cancelled a little later that are to be cancelled.
func (c *crowd) start(plans []*plan) map[uuid.UUID]*plan {
	started := map[uuid.UUID]*plan{}
	for _, p := range plans {
		input, err := json.Marshal(p.input)
		if err != nil {
			c.t.Fatal(err)
		}
		id := query[uuid.UUID](c.t, c.pool, `
			INSERT INTO workflow_run (type, payload, max_attempts)
			VALUES ('graph.start.v1', jsonb_build_object('process', $1::text, 'input', $2::jsonb), 1000) RETURNING id`, p.definition.Process, input)
		started[id] = p
		if p.cancel {
			query[uuid.UUID](c.t, c.pool, `
				INSERT INTO workflow_run (type, payload, max_attempts, run_at)
				VALUES ('graph.cancel.v1', jsonb_build_object('instance', $1::text, 'compensate', $2::boolean), 1000, now() + $3 * interval '1 ms') RETURNING id`,
				id.String(), c.IntN(2) == 0, 500+c.IntN(1500))
		}
	}
	return started
}

// open counts the instances that are open without an incident, and the runs that are not finished.
func (c *crowd) open(t *testing.T) int {
	t.Helper()
	return query[int](t, c.pool, `
		SELECT (SELECT count(*) FROM process_instance i
		        WHERE i.completed_at IS NULL AND NOT EXISTS (SELECT FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL))
		     + (SELECT count(*) FROM workflow_run WHERE finished_at IS NULL)`)
}

// settle waits until nothing is open. It gives up when no instance has moved for two minutes, and after ten minutes.
func (c *crowd) settle(t *testing.T) {
	t.Helper()
	var moves int
	begun, moved := time.Now(), time.Now()
	for c.open(t) > 0 && time.Since(moved) < 2*time.Minute && time.Since(begun) < 10*time.Minute {
		if n := query[int](t, c.pool, `SELECT coalesce(sum(version), 0) FROM process_instance`); n > moves {
			moves, moved = n, time.Now()
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// check compares the outcome of an instance with its plan.
func (c *crowd) check(id uuid.UUID, p *plan) {
	c.t.Helper()
	var wrong []string
	status := graph.Status(query[string](c.t, c.pool, `SELECT coalesce((SELECT status FROM process_instance WHERE id = $1), 'NONE')`, id))
	if !slices.Contains(p.ends, status) {
		wrong = append(wrong, fmt.Sprintf("it is %s, want %v", status, p.ends))
	}
	if code := query[string](c.t, c.pool, `SELECT coalesce(string_agg(DISTINCT code, ' '), '') FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, id); code != p.incident {
		wrong = append(wrong, fmt.Sprintf("its incident is %q, want %q", code, p.incident))
	}
	if status == graph.Completed || status == graph.Waiting {
		did := map[string]int{}
		text := query[[]byte](c.t, c.pool, `
			SELECT coalesce(jsonb_object_agg(node_id, n), '{}')
			FROM (SELECT node_id, count(*) AS n FROM activity_instance WHERE instance_id = $1 AND status = 'succeeded' GROUP BY 1) x`, id)
		if err := json.Unmarshal(text, &did); err != nil {
			c.t.Fatal(err)
		}
		for _, node := range slices.Sorted(maps.Keys(p.want)) {
			if s := p.want[node]; !s.contains(did[node]) {
				wrong = append(wrong, fmt.Sprintf("%s was done %d times, want %d to %d", node, did[node], s.least, s.most))
			}
		}
	}
	if wrong != nil {
		text, _ := p.definition.JSON()
		c.t.Errorf("instance %s: %s\n%s\n%v\n%s", id, strings.Join(wrong, "; "), text, p.input, c.story(id))
	}
}

// story returns everything the database has about an instance, for the report of a failure.
func (c *crowd) story(id uuid.UUID) string {
	var all []string
	for _, sql := range []string{
		`SELECT to_jsonb(i)::text FROM process_instance i WHERE id = $1`,
		`SELECT to_jsonb(x)::text FROM incident x WHERE instance_id = $1`,
		`SELECT to_jsonb(t)::text FROM process_token t WHERE instance_id = $1 AND state NOT IN ('Completed', 'Terminated')`,
		`SELECT to_jsonb(m)::text FROM message_wait m WHERE instance_id = $1`,
		`SELECT to_jsonb(j)::text FROM parallel_join j WHERE instance_id = $1`,
		`SELECT concat_ws(' ', r.type, r.status, r.attempt, r.result, r.last_error, r.created_at::time, r.finished_at::time)
		 FROM workflow_run r JOIN message_wait m ON m.name = r.payload->>'name' AND m.key IS NOT DISTINCT FROM r.payload->>'key'
		 WHERE m.instance_id = $1 AND r.type IN ('graph.signal.v1', 'graph.message.v1') ORDER BY r.created_at`,
		`SELECT to_jsonb(b)::text FROM process_broadcast b JOIN message_wait m USING (name) WHERE m.instance_id = $1`,
		`SELECT concat_ws(' ', right(t.id::text, 4), t.node, r.node, r.type, r.status, r.attempt, r.last_error, r.created_at::time, r.finished_at::time)
		 FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE instance_id = $1 ORDER BY r.created_at`,
		`SELECT concat_ws(' ', created_at::time, version, right(token_id::text, 4), event_type, node, data) FROM process_history WHERE instance_id = $1 ORDER BY created_at, place, id`,
		`SELECT to_jsonb(c)::text FROM compensation_record c WHERE instance_id = $1 ORDER BY "order"`,
	} {
		all = append(all, query[string](c.t, c.pool, `SELECT coalesce(string_agg(x.x, E'\n'), '') FROM (`+sql+`) AS x (x)`, id))
	}
	return strings.Join(all, "\n")
}
