package worker

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

const (
	// forgetEvery is the time between two removals of old marks.
	forgetEvery = time.Minute
	// unmarkable is how long nothing is leased ahead after the database has refused a mark.
	unmarkable = 10 * time.Second
)

// mark has runs that were leased ahead begun, group by group, until ctx ends. A commit says so before the first handler
// of a group is called, so that a run that kills the process is charged.
func (w *Worker) mark(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.jobs.markable:
		}
		for groups := w.jobs.ask(); len(groups) > 0; groups = w.jobs.ask() {
			begun, ok := w.markGroups(ctx, groups)
			if !ok {
				return
			}
			w.giveBack(w.jobs.answered(groups, begun))
			w.dispatch()
		}
	}
}

// markGroups returns which of the groups may begin. While there is no answer it asks for the same groups again, because
// they may be charged already. It reports false once ctx has ended.
func (w *Worker) markGroups(ctx context.Context, groups []*group) (begun map[uuid.UUID]bool, ok bool) {
	for pause := retries(); ctx.Err() == nil; sleep(ctx, pause.NextBackOff()) {
		var tokens, runs []uuid.UUID
		for _, g := range groups {
			for _, id := range w.jobs.someOf(g) {
				tokens, runs = append(tokens, g.token), append(runs, id)
			}
		}
		call, done := context.WithTimeout(ctx, settleTimeout)
		begun, err := leasing.Begin(call, w.db, tokens, runs)
		if err == nil && call.Err() == nil { // a server that waits for a standby answers a cancellation with success
			done()
			w.hasWritten(ctx)
			return begun, true
		}
		done()
		w.jobs.bar(time.Second)
		w.note(err)
		w.complain("cannot begin runs that are leased ahead; trying again", "groups", len(groups), "err", err)
		if answer := (*pgconn.PgError)(nil); errors.As(err, &answer) && !transient(err) && !tooLong(err) {
			w.jobs.bar(unmarkable)
			return nil, true // nothing was stored, and nothing is by a repetition: give them back
		}
	}
	return nil, false
}

// giveBack releases jobs that have not begun. They are due at once, and not charged.
func (w *Worker) giveBack(all []*job) {
	for _, j := range all {
		j.outcome = settling.Outcome{ID: j.ID, Token: j.Token, Verdict: settling.Release}
		select {
		case w.settles <- j:
		default: // it holds all jobs but those of a flood of exhausted ones; watch must not wait for these
			go func() { w.settles <- j }()
		}
	}
}

// reconsider gives back what waits in line and should not: runs that have waited for too long, runs whose type is
// paused, and runs leased ahead whose breaker has opened.
func (w *Worker) reconsider() {
	now := time.Now()
	w.giveBack(w.jobs.withdraw(func(j *job) bool { return now.Sub(j.received) > longestWait || w.mustWait(j) }))
}

// mustWait reports whether a job may not begin now: its type is paused, or it was leased ahead and its breaker is open.
func (w *Worker) mustWait(j *job) bool {
	return w.isPaused(j.Type) || j.Ahead() && w.outages.open(j.Type)
}

// isPaused reports whether a type is paused, as far as the worker knows.
func (w *Worker) isPaused(typ string) bool {
	paused := w.paused.Load()
	return paused != nil && slices.ContainsFunc(*paused, func(prefix string) bool { return naming.Covers(prefix, typ) })
}

// learnPauses notes what is paused, by discovery. No handler of such a type begins after that.
func (w *Worker) learnPauses(paused []string) {
	w.lastLook.now()
	w.paused.Store(&paused)
	if len(paused) > 0 {
		w.reconsider()
	}
}
