package lease

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
	next  time.Time // when to look for its leases
}

// sure is how long after a request the server is done with it.
const sure = 2 * lag

// lost reports whether an error leaves open if the request was executed.
func lost(err error) bool {
	var answer *pgconn.PgError // not that of a server on its way down
	// pgx calls it safe, too, when a connection broke under a simple query that was sent.
	unsent := pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
	return !unsent && !(errors.As(err, &answer) && !strings.HasPrefix(answer.Code, "57"))
}

// add keeps a request for leases with the token.
func (d *Doubts) add(token uuid.UUID, sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, &doubt{token: token, sent: sent})
}

// Left returns how many requests are in doubt still.
func (d *Doubts) Left() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.all)
}

// due returns those for whose leases it is time to look. Until then others leave them alone.
func (d *Doubts) due(now time.Time) (all []*doubt) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.all {
		if !now.Before(one.next) {
			one.next = now.Add(time.Second)
			all = append(all, one)
		}
	}
	return all
}

// over forgets a request.
func (d *Doubts) over(done *doubt) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = slices.DeleteFunc(d.all, func(one *doubt) bool { return one == done })
}

// Settle gives back leases in doubt: at once, and then each second, until they were found or the server is
// sure to be done with the request. What the database refuses to have given back is left to expire. An error
// means that it could not look for some; the next call does.
func (d *Doubts) Settle(ctx context.Context, db run.DB, worker string) error {
	var problem error
	for _, one := range d.due(time.Now()) {
		began := time.Now()
		found, err := one.giveBack(ctx, db, worker)
		switch {
		case err != nil && !refused(err):
			problem = errors.Join(problem, err)
		case found, began.Sub(one.sent) > sure:
			d.over(one)
		}
	}
	return problem
}

// giveBack returns the leases of a request, if there are any. It reports whether these are all: a statement
// takes its leases together, and somebody may have locked some.
func (d *doubt) giveBack(ctx context.Context, db run.DB, worker string) (found bool, err error) {
	rows, _ := db.Query(ctx, `SELECT * FROM workflow_give_back_v1($1, $2, $3)`, d.token, (time.Since(d.sent) + time.Hour).Seconds(), worker)
	leases, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[struct{ Given, Locked int }])
	if err != nil {
		return false, fmt.Errorf("give back leases in doubt: %w", err)
	}
	return leases.Given > 0 && leases.Locked == 0, nil
}
