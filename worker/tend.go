package worker

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

const (
	tendEvery    = time.Second // often enough for rows that are tried again every 10 s
	tendTimeout  = 5 * time.Second
	stalledEvery = 10 * time.Second
	mostToldOf   = 10 // runs logged at a time; workflow_set_aside has all
)

// tend does what is to be done every second or so, until ctx ends. It makes runs that are set aside eligible
// again, reads the policies, settles kept outcomes, reports statements that fail for every row, looks for
// stalled types, removes old marks of leases ahead, and calls Tend of the hooks.
func (w *Worker) tend(ctx context.Context) {
	var kept sync.WaitGroup
	defer kept.Wait()
	kept.Go(func() { w.settleKept(ctx) })
	looked, forgot := time.Now(), time.Now()
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-w.tending:
		}
		duties := []func(context.Context) error{w.tellFaults, w.tendRuns}
		if time.Since(looked) >= stalledEvery {
			looked = time.Now()
			duties = append(duties, w.lookForStalled, w.lookAtBacklog, w.countElsewhere)
		}
		if time.Since(forgot) >= forgetEvery {
			forgot = time.Now()
			duties = append(duties, func(ctx context.Context) error { return leasing.ForgetBegun(ctx, w.db) })
		}
		for _, h := range w.engine.hooks {
			if h.Tend != nil {
				duties = append(duties, h.Tend)
			}
		}
		for _, duty := range duties { // each is called even if the one before failed
			call, done := context.WithTimeout(ctx, tendTimeout)
			err := duty(call)
			done()
			if err != nil && ctx.Err() == nil {
				w.note(err)
				w.complain("periodic work has failed; trying again", "err", err)
			}
		}
	}
}

// lookForStalled warns of types of this worker's prefixes that have due runs but are not leased, although a
// worker that covers them has a free slot.
func (w *Worker) lookForStalled(ctx context.Context) error {
	rows, _ := w.db.Query(ctx, `SELECT type FROM workflow_stalled_v1($1)`, w.config.Prefixes)
	types, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	if w.config.Observe.Stalled != nil {
		w.config.Observe.Stalled(len(types))
	}
	if len(types) > 0 {
		w.complain("no run of some types is leased, although runs are due and a worker has a free slot; see workflowctl doctor", "types", types[:min(len(types), mostToldOf)])
	}
	return nil
}

// lookAtBacklog reports how many runs of this worker's prefixes are due. The database also records it by type,
// so that operators see whether the backlog grows.
func (w *Worker) lookAtBacklog(ctx context.Context) error {
	rows, _ := w.db.Query(ctx, `SELECT prefix, due, or_more, seconds FROM workflow_backlog_v1($1)`, w.config.Prefixes)
	due, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b Backlog, err error) {
		var seconds float64
		err = row.Scan(&b.Prefix, &b.Due, &b.AtLeast, &seconds)
		b.Oldest = time.Duration(min(seconds, 1e9) * float64(time.Second))
		return b, err
	})
	if err == nil && w.config.Observe.Backlog != nil {
		w.config.Observe.Backlog(due)
	}
	return err
}

// tellAside logs runs that were set aside, without the database's message, which may quote the row. The message
// is in workflow_set_aside only.
func (w *Worker) tellAside(aside []leasing.Aside) {
	aside = slices.DeleteFunc(aside, func(a leasing.Aside) bool { return fault.OfState(a.SQLState) == fault.PassOver }) // locked rows are nobody's fault
	for i, a := range aside {
		if i < mostToldOf {
			w.config.Logger.Error("run set aside: the database refuses to lease it, extend its lease or take it back; see workflow_unleasable",
				"run", a.ID, "type", a.Type, "sqlstate", a.SQLState, "constraint", a.Constraint)
		}
		if w.config.Observe.SetAside != nil {
			w.config.Observe.SetAside(a.Type)
		}
	}
	if more := len(aside) - mostToldOf; more > 0 {
		w.config.Logger.Error("more runs set aside; see workflow_unleasable", "runs", more)
	}
}
