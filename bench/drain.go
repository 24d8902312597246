package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	oneProcess   = "1 process"
	twoProcesses = "2 processes"
	startPage    = "1 process, documented defaults"
	floorOne     = "floor, 1 loop"
	floorTwo     = "floor, 2 loops"
	noHistory    = "history off"
	noWakeUp     = "wake-up off"
	wideSlots    = "4,000 slots"
	boundRole    = "role bound to its prefix"

	largerKey = "larger share" // of the busier of two workers
)

// A drained row is one way to drain a table that was filled before.
type drained struct {
	engine    engine
	variant   string
	task      task
	processes int
	alter     string // a setting of the database
	runs      int    // 0: as many as sizes say
}

// drain empties a table of due runs in each of the ways.
func drain(ctx context.Context, b *bench) error {
	work := task{Do: "work"}
	var ways []drained
	for _, e := range b.engines {
		ways = append(ways, drained{e, oneProcess, work, 1, "", 0}, drained{e, twoProcesses, work, 2, "", 0})
		if e.name() != (ours{}).name() {
			ways = append(ways, drained{e, startPage, task{Do: "work", Start: true}, 1, "", b.sizes.start})
		}
	}
	if b.has(ours{}) {
		ways = append(ways,
			drained{ours{}, floorOne, task{Do: "floor", Loops: 1}, 1, "", 0},
			drained{ours{}, floorTwo, task{Do: "floor", Loops: 2}, 1, "", 0},
			drained{ours{}, noHistory, work, 1, "workflow.audit = off", 0},
			drained{ours{}, noWakeUp, task{Do: "work", NoWakeUp: true}, 1, "workflow.wakeup = off", 0},
			drained{ours{}, wideSlots, task{Do: "work", Slots: 4000}, 1, "", 0},
			drained{ours{}, boundRole, work, 1, "", 0},
		)
	}
	for rep := range b.sizes.reps {
		for _, w := range ways {
			s := sample{Engine: w.engine.name(), Variant: w.variant, Rep: rep + 1, Runs: cmp.Or(w.runs, b.sizes.drain)}
			err := b.onFresh(ctx, w.engine, func(db *database) error {
				if w.alter != "" {
					if err := db.set(ctx, w.alter); err != nil {
						return err
					}
				}
				if w.variant == boundRole {
					var err error
					if w.task.URL, err = bind(ctx, db); err != nil {
						return err
					}
				}
				if err := b.drainOnce(ctx, db, w, &s); err != nil || w.variant != twoProcesses || w.engine.name() != (ours{}).name() {
					return err
				}
				larger, err := largerShare(ctx, db)
				s.More = map[string]float64{largerKey: larger}
				return err
			})
			if err != nil {
				return fmt.Errorf("%s, %s: %w", w.engine.name(), w.variant, err)
			}
			b.record(s)
		}
	}
	return nil
}

// largerShare returns which share of the runs the busier worker has settled.
func largerShare(ctx context.Context, db *database) (share float64, err error) {
	err = db.QueryRow(ctx, `SELECT max(n) / sum(n) FROM (SELECT count(*)::float8 AS n FROM workflow_run GROUP BY settled_by) AS worker`).Scan(&share)
	return share, err
}

// drainOnce loads s.Runs foreground runs and drains them.
func (b *bench) drainOnce(ctx context.Context, db *database, w drained, s *sample) error {
	if err := w.engine.load(ctx, db, s.Runs, foreground); err != nil {
		return err
	}
	if err := db.rest(ctx); err != nil {
		return err
	}
	return b.drainLoaded(ctx, db, w, s)
}

// drainLoaded is timed from the word go until every foreground run is finished. The costs are shared by all runs that
// handlers saw, also those beyond the foreground.
func (b *bench) drainLoaded(ctx context.Context, db *database, w drained, s *sample) error {
	w.task.URL = cmp.Or(w.task.URL, db.url)
	err := b.timed(ctx, w.engine, w.task, w.processes, s, func(ps processes) (int, error) {
		err := awaitDrained(ctx, db, w.engine, ps, int64(s.Runs))
		foreground, all := ps.handled()
		return s.Runs + int(all-foreground), err
	})
	if err != nil {
		return err
	}
	left, err := w.engine.unsettled(ctx, db, s.Runs)
	if err == nil && left != 0 {
		err = fmt.Errorf("%d of %d runs are not settled", left, s.Runs)
	}
	return err
}

// timed starts processes of an engine, waits for a calm machine, gives the word go, and records in s what it costs
// until work is done: the rate of s.Runs, and the costs of the runs that work returns.
func (b *bench) timed(ctx context.Context, e engine, t task, n int, s *sample, work func(processes) (runs int, err error)) error {
	ps, err := start(e, t, n)
	if err != nil {
		return err
	}
	err = func() error {
		b.calm()
		from, err := b.server.read(ctx, ps)
		if err != nil {
			return err
		}
		ps.say("go")
		runs, err := work(ps)
		if err != nil {
			return err
		}
		to, err := b.server.read(ctx, ps)
		s.costs(from, to, runs)
		s.Rate = float64(s.Runs) / s.Seconds
		return err
	}()
	return errors.Join(err, ps.stop())
}

// awaitDrained first waits for the handlers, which costs nothing, and then asks the engine.
func awaitDrained(ctx context.Context, db *database, e engine, ps processes, n int64) error {
	const patience = 60 * time.Second
	last, progress := int64(0), time.Now()
	for {
		time.Sleep(2 * time.Millisecond)
		foreground, all := ps.handled()
		if foreground >= n {
			if busy, err := e.busy(ctx, db); err != nil || !busy {
				return err
			}
		}
		if all != last {
			last, progress = all, time.Now()
		}
		if time.Since(progress) > patience {
			return fmt.Errorf("%d of %d runs were handled, and no more for %v", foreground, n, patience)
		}
		if err := errors.Join(ps.alive(), ctx.Err()); err != nil {
			return err
		}
	}
}
