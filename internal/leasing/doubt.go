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
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/run"
)

// Doubts are requests of a Poller and a Reclaimer whose answers were lost. The server may have granted leases, or may
// still be about to. Settle gives such leases back. No attempt is charged, because no handler was started. The zero
// value is empty. Any number of goroutines may use it.
type Doubts struct {
	mu  sync.Mutex
	all []*doubt
}

type doubt struct {
	tokens []uuid.UUID
	sent   time.Time
	until  time.Time // by when every lease of the request has expired

	// Guarded by Doubts.mu.
	next time.Time // when to look for its leases
	busy bool      // a goroutine is looking
}

// sure is how long after a request the server is assumed to be done with it.
const sure = 2 * lag

// lost reports whether an error leaves it unknown whether the request was executed.
func lost(err error) bool {
	var connect *pgconn.ConnectError
	var answer *pgconn.PgError
	switch {
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err):
		return false // it was not sent: there was no connection, or none in time
	case pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed):
		return false // ErrConnClosed is excluded: pgx calls it safe even if a simple query was sent before the connection broke
	case errors.As(err, &answer):
		// The server says that the statement failed, unless the server is shutting down or a pooler answers in its place.
		return strings.HasPrefix(answer.Code, "08") || strings.HasPrefix(answer.Code, "58") || answer.Code == pgerrcode.AdminShutdown || answer.Code == pgerrcode.CrashShutdown
	}
	return true
}

// add records a request for leases with these tokens. longest is the greatest length among them.
func (d *Doubts) add(tokens []uuid.UUID, sent time.Time, longest time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, &doubt{tokens: tokens, sent: sent, until: time.Now().Add(sure + longest)})
}

// Left returns how many requests are still in doubt.
func (d *Doubts) Left() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.all)
}

// due returns the requests whose leases are to be looked for now, except those that another goroutine is looking
// for. The caller must call looked for each.
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

// looked notes when to look again. With over, nothing is left to look for, and the request is forgotten.
func (d *Doubts) looked(done *doubt, next time.Time, over bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	done.busy, done.next = false, next
	if over {
		d.all = slices.DeleteFunc(d.all, func(one *doubt) bool { return one == done })
	}
}

// Settle gives back leases in doubt. It looks for those of a request at once and then every second, until it has given
// all of them back, or until the server must be done with the request and there are none. A lease whose row is locked,
// or that the database refuses to give back, expires in the end. An error means that Settle could not look for some;
// the next call does.
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

// giveBack gives back the leases of a request. It returns how many it gave back, and how many were locked. One
// statement grants all leases of a request, so if it finds any it has found all.
func (d *doubt) giveBack(ctx context.Context, db run.DB, worker string) (given, locked int, err error) {
	rows, _ := db.Query(ctx, `SELECT given, locked FROM workflow_give_back_v2($1, $2, $3)`, column.Of(d.tokens, func(t uuid.UUID) [16]byte { return t }), (time.Since(d.sent) + time.Hour).Seconds(), worker)
	leases, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[struct{ Given, Locked int }])
	if err != nil {
		return 0, 0, fmt.Errorf("give back leases in doubt: %w", err)
	}
	return leases.Given, leases.Locked, nil
}
