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
	tendEvery    = time.Second // what is set aside is tried every ten seconds: it asks in time for that
	tendTimeout  = 5 * time.Second
	stalledEvery = 10 * time.Second
	mostToldOf   = 10 // runs set aside at once; the table has all
)

// tend has runs that are set aside tried again when it is time, reads the policies, settles what is kept, tells of statements that fail, looks
// for types that stand still although they need not, and has hooks do the like, until ctx ends.
func (w *Worker) tend(ctx context.Context) {
	var kept sync.WaitGroup
	defer kept.Wait()
	kept.Go(func() { w.settleKept(ctx) })
	looked := time.Now()
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
		for _, h := range w.engine.hooks {
			if h.Tend != nil {
				duties = append(duties, h.Tend)
			}
		}
		for _, duty := range duties { // whatever became of the one before
			call, done := context.WithTimeout(ctx, tendTimeout)
			err := duty(call)
			done()
			if err != nil && ctx.Err() == nil {
				w.note(err)
				w.complain("cannot look after what is set aside; trying again", "err", err)
			}
		}
	}
}

// lookForStalled warns of types of this worker's prefixes of which nothing is leased although something is due, and a worker
// that covers them has a slot free.
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
		w.complain("nothing is leased of some types, although they are due and a worker has a slot free; see workflowctl doctor", "types", types[:min(len(types), mostToldOf)])
	}
	return nil
}

// lookAtBacklog tells how much is due of this worker's prefixes. The database notes it by type, for who asks whether it grows.
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

// tellAside tells of runs that were set aside. The database's words may quote what they hold: these stand
// in workflow_set_aside alone.
func (w *Worker) tellAside(aside []leasing.Aside) {
	aside = slices.DeleteFunc(aside, func(a leasing.Aside) bool { return fault.OfState(a.SQLState) == fault.PassOver }) // that is nobody's fault
	for i, a := range aside {
		if i < mostToldOf {
			w.config.Logger.Error("run set aside: the database refuses to have it leased, extended or taken back; see workflow_unleasable",
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
