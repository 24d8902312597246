package leasing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// Doubts are requests of a Poller and a Reclaimer whose answers were lost: leases may have been taken, or may
// still be while the server works on the request. They are given back, with no attempt charged: their handlers
// were never started. The zero value has none. Any number of goroutines may use it.
type Doubts struct {
	mu  sync.Mutex
	all []*doubt
}

type doubt struct {
	token uuid.UUID
	sent  time.Time
	until time.Time // when any lease of it has expired

	// Guarded by Doubts.mu.
	next time.Time // when to look for its leases
	busy bool      // somebody does
}

// sure is how long after a request we take it that the server is done with it.
const sure = 2 * lag

// lost reports whether an error leaves open if the request was executed.
func lost(err error) bool {
	var connect *pgconn.ConnectError
	var answer *pgconn.PgError
	switch {
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err):
		return false // there was no connection to send it by, or not in time
	case pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed):
		return false // and pgx calls it safe, too, when a connection broke under a simple query that was sent
	case errors.As(err, &answer):
		// The server's word, unless it is on its way down, or a pooler speaks for it.
		return strings.HasPrefix(answer.Code, "08") || strings.HasPrefix(answer.Code, "58") || answer.Code == "57P01" || answer.Code == "57P02"
	}
	return true
}

// add keeps a request for leases with the token, the longest of which lasts so long.
func (d *Doubts) add(token uuid.UUID, sent time.Time, longest time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, &doubt{token: token, sent: sent, until: time.Now().Add(sure + longest)})
}

// Left returns how many requests are in doubt still.
func (d *Doubts) Left() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.all)
}

// due returns those for whose leases it is time to look, and for which nobody else does. The caller answers
// each with looked.
func (d *Doubts) due(now time.Time) (all []*doubt) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.all {
		if !one.busy && !now.Before(one.next) {
			one.busy = true
			all = append(all, one)
		}
	}
	return all
}

// looked notes when to look again, or that there is nothing left to look for.
func (d *Doubts) looked(done *doubt, next time.Time, over bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	done.busy, done.next = false, next
	if over {
		d.all = slices.DeleteFunc(d.all, func(one *doubt) bool { return one == done })
	}
}

// Settle gives back leases in doubt: at once, and then each second, until all are, or the server is sure to be
// done with the request and there are none. What somebody has locked, or the database refuses to have given
// back, expires at last. An error means that it could not look for some; the next call does.
func (d *Doubts) Settle(ctx context.Context, db run.DB, worker string) error {
	var problem error
	for _, one := range d.due(time.Now()) {
		began := time.Now()
		given, locked, err := one.giveBack(ctx, db, worker)
		next := began.Add(time.Second)
		if first := fault.Of(err); first == fault.Again || first == fault.Anew {
			problem = errors.Join(problem, err)
			next = time.Time{}
		}
		all := err == nil && locked == 0 && (given > 0 || began.Sub(one.sent) > sure)
		d.looked(one, next, all || began.After(one.until))
	}
	return problem
}

// giveBack returns the leases of a request, if there are any, and tells how many, and how many somebody has locked. A
// statement takes its leases together.
func (d *doubt) giveBack(ctx context.Context, db run.DB, worker string) (given, locked int, err error) {
	rows, _ := db.Query(ctx, `SELECT given, locked FROM workflow_give_back_v1($1, $2, $3)`, d.token, (time.Since(d.sent) + time.Hour).Seconds(), worker)
	leases, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[struct{ Given, Locked int }])
	if err != nil {
		return 0, 0, fmt.Errorf("give back leases in doubt: %w", err)
	}
	return leases.Given, leases.Locked, nil
}
