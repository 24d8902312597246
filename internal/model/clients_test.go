package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// A crowd is a group of clients that work on the same few runs at the same time.
type crowd struct {
	pool  *pgxpool.Pool
	ids   [runsEach]uuid.UUID
	start time.Time

	mu      sync.Mutex
	calls   int
	history []porcupine.Operation
	held    [runsEach][]grant // all leases that were ever granted
}

// A client makes one call after another. It also uses the leases of other clients, because a repeated settle can meet
// its first try on the server.
type client struct {
	*crowd
	*rand.Rand
	number int
	// The pollers whose answer to a lease was lost: the next poll gives the lease back.
	pollers [runsEach]*leasing.Poller
}

// A grant is a lease and its token.
type grant struct {
	lease int
	token uuid.UUID
}

const (
	runsEach = 2
	brief    = 10 * time.Millisecond
	forever  = math.MaxInt64
)

func prefix(i int) string { return fmt.Sprintf("model.%d.", i) }

// newCrowd starts with pending runs. The clients use pool, and setup uses quiet.
func newCrowd(t *testing.T, quiet, pool *pgxpool.Pool) *crowd {
	t.Helper()
	c := &crowd{pool: pool, ids: [runsEach]uuid.UUID{uuid.New(), uuid.New()}, start: time.Now()}
	pgtest.ByHand(t, quiet, `TRUNCATE workflow_run, workflow_history`)
	for i, id := range c.ids {
		exec(t, quiet, `INSERT INTO workflow_run (id, type, max_attempts) VALUES ($1, $2, 2)`, id, prefix(i)+"x")
	}
	return c
}

func exec(t *testing.T, pool *pgxpool.Pool, query string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), query, args...); err != nil {
		t.Fatal(err)
	}
}

// begin records that a call is made, and returns a function that records its reply.
func (c *client) begin(i int, made call) (call, func(reply)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	made.id, made.run = c.calls, i
	o := porcupine.Operation{ClientId: c.number, Input: made, Call: time.Since(c.start).Nanoseconds()}
	return made, func(a reply) {
		c.mu.Lock()
		defer c.mu.Unlock()
		o.Output, o.Return = a, time.Since(c.start).Nanoseconds()
		if a.none {
			o.Return = forever
		}
		c.history = append(c.history, o)
	}
}

// act makes one call. Some calls are cancelled after a moment.
func (c *client) act(ctx context.Context) {
	if c.IntN(8) == 0 {
		var done context.CancelFunc
		ctx, done = context.WithTimeout(ctx, time.Duration(c.IntN(5000))*time.Microsecond)
		defer done()
	}
	i := c.IntN(runsEach)
	g := c.grant(i)
	switch what := c.IntN(20); {
	case what == 0:
		c.ask(ctx, i, call{do: "cancel"}, `SELECT workflow_cancel($1)`, c.ids[i])
	case what == 1:
		c.ask(ctx, i, call{do: "retry"}, `SELECT workflow_retry($1)`, c.ids[i])
	case what <= 3:
		c.read(ctx, i)
	case what <= 6:
		c.reclaim(ctx)
	case what <= 10 || g.lease == 0:
		c.lease(ctx, i)
	case what <= 13:
		c.heartbeat(ctx, i, g)
	case what <= 14:
		c.recorded(ctx, i, g)
	default:
		c.settle(ctx, i, g)
	}
}

// grant is one of the last two leases of a run, or the zero grant if there was none.
func (c *client) grant(i int) (g grant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.held[i]); n > 0 {
		g = c.held[i][max(n-1-c.IntN(2), 0)]
	}
	return g
}

func (c *client) ask(ctx context.Context, i int, made call, query string, args ...any) {
	_, end := c.begin(i, made)
	var answer string
	err := c.transact(ctx, func(db run.DB) (err error) {
		rows, _ := db.Query(ctx, query, args...)
		answer, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
		return err
	})
	end(reply{answer: answer, none: err != nil})
}

// db is the database; sometimes its answers are lost.
func (c *client) db() run.DB {
	if c.IntN(5) == 0 {
		return deaf{c.pool}
	}
	return c.pool
}

// transact calls fn, sometimes in a transaction that stays open for a moment, so that other clients wait for the row.
func (c *client) transact(ctx context.Context, fn func(run.DB) error) error {
	if c.IntN(2) == 0 {
		return fn(c.db())
	}
	pause := c.IntN(3)
	return pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `SELECT pg_sleep($1 / 1000.0)`, pause)
		return err
	})
}

func (c *client) read(ctx context.Context, i int) {
	_, end := c.begin(i, call{do: "read"})
	if r, err := run.Read(ctx, c.pool, c.ids[i]); err == nil {
		end(reply{answer: string(r.Status), lease: int(r.LeaseNo), attempt: r.Attempt})
	}
}

// lease asks for one run. An empty result is not recorded as a reply, because another client may have locked the run.
func (c *client) lease(ctx context.Context, i int) {
	made, end := c.begin(i, call{do: "lease", brief: c.IntN(2) == 0})
	p := c.pollers[i]
	if p == nil {
		p = &leasing.Poller{Prefixes: []string{prefix(i)}, Worker: fmt.Sprint("w", c.number)}
	}
	p.DB = c.db()
	length := map[bool]time.Duration{true: brief, false: time.Hour}[made.brief]
	p.Terms = func(string) leasing.Terms { return leasing.Terms{Length: length, Room: -1} }
	leases, _, err := p.Acquire(ctx, 1, 1)

	c.pollers[i] = nil
	switch {
	case err != nil && !strings.HasPrefix(err.Error(), "lease runs"):
		c.pollers[i] = p // the poll did not get to the lease
	case err != nil:
		end(reply{none: true})
		c.pollers[i] = p
		_, back := c.begin(i, call{do: "give back", lost: made.id})
		back(reply{none: true})
	case len(leases) == 1:
		end(c.given(i, leases[0]))
	}
}

func (c *client) given(i int, l leasing.Lease) reply {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held[i] = append(c.held[i], grant{int(l.LeaseNo), l.Token})
	return reply{lease: int(l.LeaseNo), attempt: l.Attempt}
}

func (c *client) heartbeat(ctx context.Context, i int, g grant) {
	_, end := c.begin(i, call{do: "heartbeat", lease: g.lease})
	var kept []uuid.UUID
	var gone map[uuid.UUID]error
	err := c.transact(ctx, func(db run.DB) (err error) {
		kept, gone, err = leasing.Extend(ctx, db, []leasing.Held{{ID: c.ids[i], Token: g.token, Length: time.Hour}})
		return err
	})
	switch cause := gone[c.ids[i]]; {
	case err != nil:
		end(reply{none: true})
	case len(kept) > 0:
		end(reply{answer: "kept"})
	case errors.Is(cause, run.ErrCancelled):
		end(reply{answer: "cancelled"})
	case errors.Is(cause, run.ErrLost):
		end(reply{answer: "lost"})
	default:
		end(reply{answer: "locked"})
	}
}

func (c *client) settle(ctx context.Context, i int, g grant) {
	verdict := verdicts[c.IntN(len(verdicts))]
	_, end := c.begin(i, call{do: "settle", lease: g.lease, verdict: verdict})
	var refused []settling.Outcome
	err := c.transact(ctx, func(db run.DB) (err error) {
		refused, err = settling.Settle(ctx, db, fmt.Sprint("w", c.number), []settling.Outcome{{ID: c.ids[i], Token: g.token, Verdict: verdict}})
		return err
	})
	answer := map[bool]string{true: "recorded", false: "refused"}[len(refused) == 0]
	end(reply{answer: answer, none: err != nil})
}

func (c *client) recorded(ctx context.Context, i int, g grant) {
	_, end := c.begin(i, call{do: "recorded", lease: g.lease})
	recorded, err := settling.Recorded(ctx, c.pool, []settling.Outcome{{ID: c.ids[i], Token: g.token}})
	if err == nil {
		end(reply{answer: fmt.Sprint(len(recorded) == 1)})
	}
}

// reclaim is recorded as one call for each run.
func (c *client) reclaim(ctx context.Context) {
	var ends [runsEach]func(reply)
	for i := range ends {
		_, ends[i] = c.begin(i, call{do: "reclaim"})
	}
	var exhausted []leasing.Lease
	err := c.transact(ctx, func(db run.DB) (err error) {
		r := &leasing.Reclaimer{DB: db, Worker: fmt.Sprint("w", c.number), Length: brief, Backoff: run.Backoff{Base: time.Millisecond, Cap: time.Millisecond}}
		_, exhausted, err = r.Reclaim(ctx, 100)
		return err
	})
	for i, end := range ends {
		if err != nil {
			end(reply{none: true})
			continue
		}
		a := reply{answer: "perhaps"}
		if n := slices.IndexFunc(exhausted, func(l leasing.Lease) bool { return l.ID == c.ids[i] }); n >= 0 {
			a = c.given(i, exhausted[n])
		}
		end(a)
	}
}
