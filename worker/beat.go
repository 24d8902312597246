package worker

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// patience is for how many times its length a lease is believed to be ours while no server answers.
const patience = 5

// closing is longer than it takes to close a connection that has gone silent. Until it is closed, a pool of one
// connection opens no other.
const closing = 20 * time.Second

// beat extends the worker's leases until ctx ends, with one statement for all leases that are due. Runs that
// finish before their first heartbeat cost nothing.
func (w *Worker) beat(ctx context.Context) {
	every := w.beatInterval()
	pause := every
	var silent moment // when a call on the heartbeat connection last failed
	for ctx.Err() == nil {
		sleep(ctx, pause)
		pause = every
		due := w.dueForBeat(every)
		if len(due) == 0 {
			continue
		}
		db := w.beats
		if silent.ago() < closing && w.beats.Stat().IdleConns() == 0 { // a connection that was merely slow is idle again
			db = w.db
		}
		err := w.extend(ctx, db, due)
		if err == nil || ctx.Err() != nil {
			continue
		}
		w.note(err)
		w.complain("cannot extend leases; trying again", "leases", len(due), "err", err)
		pause = min(every, 250*time.Millisecond)
		if db == w.beats {
			silent.now()
		} else {
			silent = moment{}
		}
	}
}

// beatInterval is the shortest time after which some lease may be due for a heartbeat.
func (w *Worker) beatInterval() time.Duration { return min(w.config.Heartbeat, w.shortestLease()/3) }

func (w *Worker) shortestLease() time.Duration {
	shortest := w.config.Lease
	for _, e := range w.config.Mux.entries() {
		if e.options.Lease > 0 {
			shortest = min(shortest, e.options.Lease)
		}
	}
	return shortest
}

func (w *Worker) dueForBeat(every time.Duration) []*job {
	var due []*job
	now := time.Now()
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	for _, j := range w.jobs.byID {
		// At the next tick a third of the lease may be over, which is too late. The lease of an exhausted run
		// is not extended.
		if !j.Exhausted && now.Sub(j.extended)+every/2 >= min(j.Length/3, w.config.Heartbeat) {
			due = append(due, j)
		}
	}
	return due
}

// prolong extends the leases of a batch that are past half their length. It is called before the batch is settled, and after
// a settle that failed. A settle locks its rows, and no heartbeat reaches them meanwhile. Without prolong, a few slow settles
// would lose the leases of runs whose handlers have returned. The server may still be ending the
// last try, so prolong waits up to a third of a second for it.
func (w *Worker) prolong(ctx context.Context, batch []*job) {
	released := func(j *job) bool { return j.outcome.Verdict == settling.Release }
	for range 15 {
		due := slices.DeleteFunc(w.ageing(batch), released)
		if len(due) == 0 {
			return
		}
		call, done := context.WithTimeout(ctx, settleTimeout)
		err := w.extend(call, w.db, due)
		done()
		if err != nil || len(w.ageing(due)) == 0 {
			return
		}
		sleep(ctx, 20*time.Millisecond)
	}
}

// ageing returns the jobs of a batch whose leases are past half their length. Their handlers may be running, so
// it does not read their outcomes.
func (w *Worker) ageing(batch []*job) (due []*job) {
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	for _, j := range batch {
		if !j.Exhausted && !j.gone && !j.beatRefused && time.Since(j.extended) > j.Length/2 {
			due = append(due, j)
		}
	}
	return due
}

// extend extends leases. A row that refuses is extended alone from then on, so that it does not affect the
// others.
func (w *Worker) extend(ctx context.Context, db *pgxpool.Pool, due []*job) error {
	shortest := callTimeout
	var together, alone []*job
	w.jobs.mu.Lock()
	for _, j := range due {
		shortest = min(shortest, max(j.Length/3, 500*time.Millisecond))
		if j.beatRefused {
			alone = append(alone, j)
		} else {
			together = append(together, j)
		}
	}
	w.jobs.mu.Unlock()
	call, done := context.WithTimeout(ctx, shortest)
	defer done()
	err := w.extendAll(call, db, together)
	for _, j := range alone {
		switch problem := w.extendOnce(call, db, []*job{j}); {
		case problem == nil:
			w.jobs.refuseBeat(j, false)
		case !refused(problem):
			err = errors.Join(err, problem)
		}
	}
	return err
}

// extendAll extends leases. It finds the rows that refuse, reports them, and extends the others. An error of
// the server or of chance is returned at once, unless a lease is past half its length. Then any error may be
// one row's, because leases cannot wait for fault.Patience.
func (w *Worker) extendAll(ctx context.Context, db *pgxpool.Pool, due []*job) error {
	if len(due) == 0 {
		return nil
	}
	err := w.extendOnce(ctx, db, due)
	first, anyCode := fault.Of(err), false
	switch {
	case first == fault.None, down(err):
		return err
	case first == fault.Again && code(err) != "" && len(w.ageing(due)) > 0:
		anyCode = true
	case first == fault.Again, first == fault.Anew:
		return err
	case first == fault.Fewer && len(due) > 1:
		return errors.Join(w.extendAll(ctx, db, due[:len(due)/2]), w.extendAll(ctx, db, due[len(due)/2:]))
	case first == fault.Fewer:
		anyCode = true
	}
	aside, problem := leasing.ExtendRefused(ctx, db, heldOf(due), anyCode)
	switch {
	case problem != nil:
		err = fault.OfStatement("extend", problem)
	case len(aside) == 0:
		err = fault.OfStatement("extend", err)
	default:
		w.tellAside(slices.Clone(aside))
		bad := map[uuid.UUID]bool{}
		for _, a := range aside {
			bad[a.ID] = true
		}
		var rest []*job
		for _, j := range due {
			if bad[j.ID] {
				w.jobs.refuseBeat(j, true)
			} else {
				rest = append(rest, j)
			}
		}
		return w.extendAll(ctx, db, rest)
	}
	if errors.As(err, new(*fault.Error)) {
		w.believe(due, time.Now())
	}
	return err
}

// believe treats leases as ours without an answer: the server is away, or no lease at all can be extended, so
// most likely nobody else has leased the runs. Handlers may continue for up to patience times the length of
// their leases. The first heartbeat that succeeds shows whether the leases are still ours.
func (w *Worker) believe(due []*job, start time.Time) {
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	for _, j := range due {
		if start.Sub(j.confirmed) < patience*j.Length {
			j.extended = start
		}
	}
}

func heldOf(due []*job) []leasing.Held {
	held := make([]leasing.Held, len(due))
	for i, j := range due {
		held[i] = leasing.Held{ID: j.ID, Token: j.Token, Length: j.Length}
	}
	return held
}

// extendOnce sends one heartbeat.
func (w *Worker) extendOnce(ctx context.Context, db *pgxpool.Pool, due []*job) error {
	start := time.Now()
	kept, gone, err := leasing.Extend(ctx, db, heldOf(due))
	if len(kept) > 0 {
		w.hasWritten(ctx)
	}
	if w.config.Observe.Extended != nil {
		w.config.Observe.Extended(len(kept), time.Since(start), err)
	}
	if err != nil {
		w.unheard.now()
		if down(err) {
			w.believe(due, start)
		}
		return err
	}
	w.goesThrough("extend")
	w.jobs.mu.Lock()
	for _, id := range kept {
		if j := w.jobs.byID[id]; j != nil {
			j.extended, j.confirmed = start, start
		}
	}
	for _, j := range due {
		j.gone = j.gone || gone[j.ID] != nil
	}
	w.jobs.mu.Unlock()
	for _, j := range due {
		if cause := gone[j.ID]; cause != nil {
			w.logger(&j.Lease).Info("lease is gone", "cause", cause)
			w.jobs.end(j, cause)
		}
	}
	return nil
}

// watch gives up leases that could not be extended in time, takes slots from handlers that then ignore the end
// of their contexts, and stops the worker with ErrStuck or ErrStalled if that does not help.
func (w *Worker) watch(ctx context.Context, stop context.CancelCauseFunc) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	stalled := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if w.lastTick.ago() > standstill {
			w.stood.now()
		}
		w.lastTick.now()
		for _, j := range w.expiring() {
			w.logger(&j.Lease).Warn("lease given up: it could not be extended in time")
			w.jobs.end(j, run.ErrLost)
		}
		w.reconsider()
		for _, j := range w.deaf() {
			if w.jobs.leave(j) {
				w.logger(&j.Lease).Warn("handler ignores the end of its context; its slot is given away", "cause", context.Cause(j.ctx))
			}
		}
		w.dispatch() // a slot may have been given away
		stuck := w.jobs.stuckCount()
		if w.config.Observe.Stuck != nil {
			w.config.Observe.Stuck(stuck)
		}
		if stuck > w.config.Concurrency {
			stop(ErrStuck)
		}
		// Checked at more than one tick, because after a freeze of the whole process the loop needs a moment.
		if w.lastTurn.ago() <= w.stallLimit() {
			stalled = 0
		} else if stalled++; stalled > 20 {
			stop(ErrStalled)
		}
	}
}

// stallLimit is how long the poll loop may take for one turn, its sleep while idle included.
func (w *Worker) stallLimit() time.Duration {
	return 3*w.config.Lease + 2*callTimeout + w.config.PollInterval
}

// standstill is how long watch may not tick before the process counts as having been frozen, or without a
// processor.
const standstill = time.Second

// stoodStill reports whether the process was frozen at some time after since.
func (w *Worker) stoodStill(since time.Time) bool {
	return w.lastTick.ago() > standstill || w.stood.time().After(since)
}

// expiring returns the running jobs whose leases are about to expire.
func (w *Worker) expiring() (list []*job) {
	now := time.Now()
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	for _, j := range w.jobs.byID {
		margin := min(j.Length/10, 3*time.Second)
		if j.ended.IsZero() && !j.done && now.Sub(j.extended) > j.Length-margin {
			list = append(list, j)
		}
	}
	return list
}

// deaf returns the jobs whose handlers still run for longer than stuckGrace after their contexts ended.
func (w *Worker) deaf() (list []*job) {
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	for _, j := range w.jobs.byID {
		if !j.done && !j.ended.IsZero() && time.Since(j.ended) > stuckGrace &&
			!errors.Is(context.Cause(j.ctx), run.ErrShutdown) {
			list = append(list, j)
		}
	}
	return list
}
