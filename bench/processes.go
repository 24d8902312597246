package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/simple-workflow/simple-workflow/graph"
)

const (
	sequenceVariant = "5 steps in a row"
	forkVariant     = "fork of 4, joined"
	startVariant    = "start, then wait"
	plainVariant    = "plain runs"
	dbosVariant     = "5 steps in a row, RunWorkflow"
	insertedKey     = "inserted/s"

	sequenceSteps = 5
)

// processGraphs measures process graphs, beside DBOS and our own plain runs.
func processGraphs(ctx context.Context, b *bench) error {
	b.section.takePart(b)
	for rep := range b.sizes.reps {
		if b.has(ours{}) {
			if err := b.ownProcesses(ctx, rep+1); err != nil {
				return err
			}
		}
		if b.dbos {
			if err := b.dbosProcesses(ctx, rep+1); err != nil {
				return fmt.Errorf("DBOS: %w", err)
			}
		}
	}
	if !b.has(ours{}) {
		return nil
	}
	return errors.Join(b.betweenSteps(ctx), b.limits(ctx), b.amongWaiting(ctx))
}

// takePart records who takes part here: our engine and DBOS.
func (s *section) takePart(b *bench) {
	s.Engines, s.SetUp, s.Missing = map[string]string{}, map[string]string{}, ""
	if b.has(ours{}) {
		s.Engines[ours{}.name()], s.SetUp[ours{}.name()] = ours{}.version(), "as shipped: history, wake-up and processes on"
	}
	if b.dbos {
		s.Engines[transact{}.name()], s.SetUp[transact{}.name()] = transact{}.version(), transact{}.settings()
	}
}

// A graphed row is a process with many instances to execute.
type graphed struct {
	variant    string
	definition *graph.Definition
	steps      int // per instance; 0: only the start counts
	task       task
}

func (b *bench) ownProcesses(ctx context.Context, rep int) error {
	work := task{Do: "work", Graph: true}
	counted := task{Do: "work", Graph: true, Counted: "graph.start.v1"}
	for _, w := range []graphed{
		{sequenceVariant, inARow(noop, sequenceSteps), sequenceSteps, work},
		{forkVariant, forked(4), 4, work},
		{startVariant, waits(), 0, counted},
		{plainVariant, nil, 1, work},
	} {
		s := sample{Engine: ours{}.name(), Variant: w.variant, Rep: rep, Runs: b.sizes.instances * max(w.steps, 1), More: map[string]float64{}}
		err := b.onFresh(ctx, ours{}, func(db *database) error {
			if w.definition == nil {
				s.Runs = b.sizes.drain
				return b.drainOnce(ctx, db, drained{engine: ours{}, task: w.task, processes: 1}, &s)
			}
			return b.carryOutInstances(ctx, db, w, &s)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", w.variant, err)
		}
		b.record(s)
	}
	return nil
}

// inARow is a process of n steps in a row.
func inARow(typ string, n int) *graph.Definition {
	d := &graph.Definition{Process: "row", Version: 1, Start: "s1", Nodes: map[string]*graph.Node{}}
	for i := 1; i <= n; i++ {
		step := &graph.Node{Do: typ}
		if i < n {
			step.To = fmt.Sprintf("s%d", i+1)
		}
		d.Nodes[fmt.Sprintf("s%d", i)] = step
	}
	return d
}

// forked is a process of n parallel steps and a join.
func forked(n int) *graph.Definition {
	d := &graph.Definition{Process: "fork", Version: 1, Start: "fork", Nodes: map[string]*graph.Node{
		"join": {Join: &graph.Join{}, To: "end"}, "end": {End: true},
	}}
	var branches []string
	for i := range n {
		name := fmt.Sprintf("s%d", i)
		branches = append(branches, name)
		d.Nodes[name] = &graph.Node{Do: noop, To: "join"}
	}
	d.Nodes["fork"] = &graph.Node{Fork: branches}
	return d
}

// waits is a process that waits for a message or, if its input has no key, until tomorrow.
func waits() *graph.Definition {
	return &graph.Definition{Process: "wait", Version: 1, Start: "choose", Nodes: map[string]*graph.Node{
		"choose":  {Choose: []graph.Way{{If: "'key' in input", To: "message"}}, Else: "timer"},
		"message": {Await: &graph.Await{Message: "bench", Key: "input.key"}},
		"timer":   {Wait: &graph.Wait{For: graph.Duration(24 * time.Hour)}},
	}}
}

// carryOutInstances inserts the starts of the instances before the clock starts, and is timed until all of them are
// where they should be.
func (b *bench) carryOutInstances(ctx context.Context, db *database, w graphed, s *sample) error {
	if _, err := graph.Deploy(ctx, db.Pool, w.definition); err != nil {
		return err
	}
	begin := time.Now()
	if err := insertStarts(ctx, db, w.definition.Process, 0, b.sizes.instances); err != nil {
		return err
	}
	s.More[insertedKey] = float64(b.sizes.instances) / time.Since(begin).Seconds()
	if err := db.rest(ctx); err != nil {
		return err
	}
	w.task.URL = db.url
	err := b.timed(ctx, ours{}, w.task, 1, s, func(ps processes) (int, error) {
		return s.Runs, awaitDrained(ctx, db, ours{}, ps, int64(s.Runs))
	})
	if err != nil {
		return err
	}
	status := "COMPLETED"
	if w.steps == 0 {
		status = "WAITING"
	}
	return allAre(ctx, db, status, b.sizes.instances, b.sizes.instances*w.steps)
}

// insertStarts starts instances as any program may, with one INSERT.
func insertStarts(ctx context.Context, db *database, process string, before, n int) error {
	_, err := db.Exec(ctx, `
		INSERT INTO workflow_run (type, payload)
		SELECT $1, jsonb_build_object('process', $2::text, 'input', jsonb_build_object('n', g))
		FROM generate_series($3::int + 1, $3 + $4) g`, "graph.start.v1", process, before, n)
	return err
}

// allAre checks that n instances, and no others, have a status, that all their steps have succeeded, and that the
// engine's own checks find nothing.
func allAre(ctx context.Context, db *database, status string, n, steps int) error {
	var instances, others, succeeded, wrong int
	err := db.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE status = $1), count(*) FILTER (WHERE status <> $1),
		       (SELECT count(*) FROM workflow_run WHERE token_id IS NOT NULL AND starts_with(type, 'bench.') AND status = 'succeeded'),
		       (SELECT count(*) FROM process_miscounted) + (SELECT count(*) FROM process_undead) + (SELECT count(*) FROM incident)
		FROM process_instance`, status).Scan(&instances, &others, &succeeded, &wrong)
	if err == nil && (instances != n || others != 0 || succeeded != steps || wrong != 0) {
		err = fmt.Errorf("%d of %d instances are %s, %d are not; %d of %d steps succeeded; %d faults", instances, n, status, others, succeeded, steps, wrong)
	}
	return err
}

func (b *bench) dbosProcesses(ctx context.Context, rep int) error {
	e := transact{}
	s := sample{Engine: e.name(), Variant: dbosVariant, Rep: rep, Runs: b.sizes.workflows * dbosSteps}
	err := b.onFresh(ctx, e, func(db *database) error {
		if err := db.rest(ctx); err != nil {
			return err
		}
		t := task{Do: "work", URL: db.url, Runs: b.sizes.workflows}
		err := b.timed(ctx, e, t, 1, &s, func(ps processes) (int, error) {
			select {
			case <-ps[0].done:
				return s.Runs, nil
			case <-ps[0].ended:
				return 0, errors.New("the process ended by itself")
			case <-time.After(5 * time.Minute):
				return 0, errors.New("the process does not get done")
			}
		})
		if err != nil {
			return err
		}
		steps, err := e.stored(ctx, db)
		left, leftErr := e.unsettled(ctx, db, b.sizes.workflows)
		if err := errors.Join(err, leftErr); err != nil {
			return err
		}
		if left != 0 || steps != s.Runs {
			return fmt.Errorf("%d of %d workflows are not done, %d of %d steps are stored", left, b.sizes.workflows, steps, s.Runs)
		}
		return nil
	})
	if err == nil {
		b.record(s)
	}
	return err
}
