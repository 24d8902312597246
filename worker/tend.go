package worker

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/lease"
)

const (
	tendEvery   = 10 * time.Second
	tendTimeout = 5 * time.Second
	mostToldOf  = 10 // runs set aside at once; the table has all
)

// tend has runs that are set aside tried again when it is time, looks for types that stand
// still although they need not, and has hooks do the like, until ctx ends.
func (w *Worker) tend(ctx context.Context) {
	for sleep(ctx, tendEvery); ctx.Err() == nil; sleep(ctx, tendEvery) {
		call, done := context.WithTimeout(ctx, tendTimeout)
		err := lease.TryAgain(call, w.db)
		if err == nil {
			err = w.lookForStalled(call)
		}
		for _, h := range w.config.Hooks {
			if err == nil && h.Tend != nil {
				err = h.Tend(call)
			}
		}
		done()
		if err != nil && ctx.Err() == nil {
			w.note(err)
			w.complain("cannot look after what is set aside; trying again", "err", loggable(err))
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

// tellAside tells of runs that were set aside. The database's words may quote what they hold: these stand
// in workflow_set_aside alone.
func (w *Worker) tellAside(aside []lease.Aside) {
	for i, a := range aside {
		if i < mostToldOf {
			w.config.Logger.Error("run set aside: the database refuses to have it leased or taken back; see workflow_unleasable",
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

// tellUnsettled says where people look that the outcome of a job is refused, and the first time in the log, too. It reports
// whether it has been told.
func (w *Worker) tellUnsettled(ctx context.Context, j *job, cause error, before bool) bool {
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	told, err := lease.TellUnsettled(call, w.db, j.ID, j.Token, cause)
	switch {
	case err != nil && ctx.Err() == nil:
		w.note(err)
		w.complain("cannot tell that an outcome is refused; trying again", "err", loggable(err))
	case told && !before:
		w.logger(&j.Lease).Error("outcome refused time and again; it is kept, and tried again: see workflow_unleasable", "sqlstate", code(cause))
		if w.config.Observe.SetAside != nil {
			w.config.Observe.SetAside(j.Type)
		}
	}
	return told || before
}
