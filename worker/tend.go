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

// tend does what is to be done every second or so, until ctx ends. It reports statements that fail for every
// row, looks for stalled types, and removes old marks of leases ahead. Usually nothing else is to be done; look,
// which does not wait for all that, finds out.
func (w *Worker) tend(ctx context.Context) {
	kept, aside := make(chan struct{}, 1), make(chan struct{}, 1)
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() { w.look(ctx, kept, aside) })
	others.Go(func() { w.settleKept(ctx, kept) })
	looked, forgot := time.Now(), time.Now()
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-aside:
			w.tryAgain(ctx)
			continue
		case <-tick.C:
		case <-w.tending:
		}
		w.attend(ctx, w.tellFaults)
		if time.Since(looked) >= stalledEvery {
			looked = time.Now()
			w.attend(ctx, w.lookForStalled)
			w.attend(ctx, w.lookAtBacklog)
			w.attend(ctx, w.countElsewhere)
		}
		if time.Since(forgot) >= forgetEvery {
			forgot = time.Now()
			w.attend(ctx, func(ctx context.Context) error { return leasing.ForgetBegun(ctx, w.db) })
		}
	}
}

// look finds out every second whether there is more to tend to, until ctx ends. It heeds what other workers
// report, and reads the policies if they have changed. It gives kept a value if an outcome is kept, and aside if
// something is set aside.
func (w *Worker) look(ctx context.Context, kept, aside chan<- struct{}) {
	var policies *int64 // those that were read last, see leasing.Look; nil: unknown
	for sleep(ctx, tendEvery); ctx.Err() == nil; sleep(ctx, tendEvery) {
		var found leasing.Look
		looked := w.attend(ctx, func(ctx context.Context) (err error) {
			found, err = leasing.LookAround(ctx, w.db)
			return err
		})
		if !looked { // one of the many tables it reads may be the cause: whatever it tells of is asked for by itself
			found = leasing.Look{Aside: true, Kept: true}
			w.attend(ctx, func(ctx context.Context) (err error) {
				found.Faults, err = leasing.Faults(ctx, w.db)
				return err
			})
		}
		if slices.Contains(found.Faults, "extend") { // while some worker cannot extend leases, none is taken back
			w.trouble.now()
		}
		if found.Kept {
			poke(kept)
		}
		if found.Aside {
			poke(aside)
		}
		if !looked || policies == nil || *policies != found.Policies {
			policies = nil
			if w.attend(ctx, w.readPolicies) && looked {
				policies = &found.Policies
			}
		}
	}
}

// poke puts a value into a channel that has room for one, unless there is one already.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// tryAgain makes runs that are set aside eligible again when their time has come, and calls Tend of the hooks.
func (w *Worker) tryAgain(ctx context.Context) {
	w.attend(ctx, func(ctx context.Context) error { return leasing.TryAgain(ctx, w.db) })
	for _, h := range w.engine.hooks {
		if h.Tend != nil {
			w.attend(ctx, h.Tend)
		}
	}
}

// attend does one thing, and reports whether it was done. What comes after it is done even if it failed.
func (w *Worker) attend(ctx context.Context, duty func(context.Context) error) bool {
	call, done := context.WithTimeout(ctx, tendTimeout)
	defer done()
	err := duty(call)
	if err != nil && ctx.Err() == nil {
		w.note(err)
		w.complain("periodic work has failed; trying again", "err", err)
	}
	return err == nil
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
