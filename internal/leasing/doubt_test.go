package leasing_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// deaf is a database whose next answer to a request for leases is lost on the way.
type deaf struct {
	run.DB
	mode string // lost: the statement was executed; late: it will be; "": nothing is lost
	err  error  // what the client sees instead of the answer; nil: io.ErrUnexpectedEOF
	late func(run.DB) error
}

func (d *deaf) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.mode == "" || !strings.Contains(sql, "workflow_lease_") {
		return d.DB.Query(ctx, sql, args...)
	}
	execute := func(db run.DB) error {
		_, err := db.Exec(ctx, sql, args...)
		return err
	}
	if d.mode == "lost" {
		if err := execute(d.DB); err != nil {
			return nil, err
		}
	}
	d.late, d.mode = execute, ""
	err := cmp.Or(d.err, io.ErrUnexpectedEOF)
	return lost{err: err}, err
}

// lost is a result whose rows never arrive.
type lost struct {
	pgx.Rows
	err error
}

func (lost) Next() bool   { return false }
func (lost) Close()       {}
func (l lost) Err() error { return l.err }

// A brokenOff is the error of pgx for a simple query whose connection broke. It claims that the query is
// safe to retry, although it was sent.
type brokenOff struct{}

func (brokenOff) Error() string     { return "conn closed" }
func (brokenOff) Unwrap() error     { return pgconn.ErrConnClosed }
func (brokenOff) SafeToRetry() bool { return true }

func lose(t *testing.T, p *leasing.Poller, d *deaf, mode string) {
	t.Helper()
	d.mode = mode
	p.Discover()
	if leases, _, err := p.Acquire(t.Context(), 10, 10); err == nil {
		t.Fatalf("leased %v, although the answer is lost", leases)
	}
}

// Leases whose answer was lost are given back by the next call, with no attempt charged, and the runs can be
// leased at once. For an exhausted run, the next call makes the lease expire instead. Then any worker can reclaim the
// run and fail it.
func TestLostAnswer(t *testing.T) {
	for _, err := range []error{io.ErrUnexpectedEOF, brokenOff{}} {
		t.Run(err.Error(), func(t *testing.T) { testLostAnswer(t, err) })
	}
}

func testLostAnswer(t *testing.T, err error) {
	pool := settledServer(t)
	pgtest.Attempts(t, pool, 3)
	id := add(t, pool, "a.x", 0, time.Minute)
	spent := add(t, pool, "a.x", 0, time.Minute)
	byHand(t, pool, "UPDATE workflow_run SET attempt = 3 WHERE id = $1", spent)
	d := &deaf{DB: pool, err: err}
	p := newPoller(d, "a.")
	lose(t, p, d, "lost")
	if r := read(t, pool, id); r.Status != run.Leased || r.Attempt != 1 {
		t.Fatalf("the statement was not executed: %+v", r)
	}
	p.Discover()
	leases := acquire(t, p, 10)
	if len(leases) != 1 || leases[0].ID != id || leases[0].LeaseNo != 2 || leases[0].Attempt != 1 || leases[0].Exhausted {
		t.Fatalf("leased %+v, want run %s once more", leases, id)
	}
	again, exhausted := reclaim(t, newReclaimer(pool), 10)
	if again != 0 || len(exhausted) != 1 || exhausted[0].ID != spent || exhausted[0].LeaseNo != 2 || exhausted[0].Attempt != 3 {
		t.Errorf("taken back: %d and %+v, want run %s, which is exhausted", again, exhausted, spent)
	}
	events := query[string](t, pool, `
		SELECT string_agg(event_type || ' ' || attempt || ' ' || lease_no, ', ' ORDER BY e.id)
		FROM workflow_event e
		WHERE workflow_id = $1 AND event_type NOT IN ('created', 'started')`, id)
	if want := "leased 1 1, released 1 1, leased 1 2"; events != want {
		t.Errorf("history %q, want %q", events, want)
	}
	// Later looks do not take away the new leases.
	p.DoubtAgain()
	acquire(t, p, 10)
	if r := read(t, pool, id); r.Status != run.Leased {
		t.Errorf("row: %+v", r)
	}
}

// The leases of a request that the server finishes only after the first look for them are given back too.
func TestLateAnswer(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	d := &deaf{DB: pool}
	p := newPoller(d, "a.")
	lose(t, p, d, "late")
	// The next call finds no lease to give back, and no run to lease, because the row is locked.
	holder := begin(t, pool)
	exec(t, holder, "SELECT FROM workflow_run WHERE id = $1 FOR UPDATE", id)
	p.Discover()
	if leases := acquire(t, p, 10); len(leases) > 0 {
		t.Fatalf("leased %v", leases)
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.late(pool); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Status != run.Leased {
		t.Fatalf("row: %+v", r)
	}
	p.DoubtAgain()
	p.Discover()
	if l := one(t, p); l.Attempt != 1 || l.LeaseNo != 2 {
		t.Errorf("lease: %+v", l)
	}
}

// A request that is cancelled while the server works on it leaves no attempt charged.
func TestAcquireCancelled(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	holder := begin(t, pool)
	exec(t, pool, "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$")
	exec(t, pool, "CREATE TRIGGER wait AFTER UPDATE ON workflow_run FOR EACH ROW EXECUTE FUNCTION wait()")
	exec(t, holder, "SELECT pg_advisory_xact_lock(42)") // the row is updated, and the statement does not end
	p := newPoller(pool, "a.")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, _, err := p.Acquire(ctx, 10, 1)
		ended <- err
	}()
	pgtest.Blocked(t, pool, 1)
	cancel()
	if err := <-ended; err == nil {
		t.Fatal("leased although it was cancelled")
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the run is leased, as its first attempt", func() bool {
		p.DoubtAgain()
		p.Discover()
		leases := acquire(t, p, 10)
		return len(leases) == 1 && leases[0].ID == id && leases[0].Attempt == 1
	})
}

// While the database is out of reach, each call returns an error, whether lanes are known or not, and no lease
// is in doubt. Once the database is back, runs are leased at once.
func TestUnreachable(t *testing.T) {
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	down, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer down.Close()
	pool := pgtest.New(t)
	p := newPoller(pool, "a.")
	for range 2 {
		p.DB = down
		for range 3 {
			if _, wait, err := p.Acquire(t.Context(), 10, 1); err == nil {
				t.Errorf("wait %v, no error", wait)
			}
		}
		p.DB = pool
		add(t, pool, "a.x", 0, 0)
		one(t, p)
	}
}

// If a discovery of lanes fails because it takes too long, the next one is delayed. Until then, runs of known lanes
// are leased.
func TestDiscoveryFails(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.x", 0, time.Minute)
	b := &blind{DB: pool, on: true}
	p := newPoller(b, "a.")
	for range 2 { // no lane is known yet: each call tries discovery, and returns its error
		if _, _, err := p.Acquire(t.Context(), 10, 1); err == nil {
			t.Fatal("no error")
		}
	}
	b.on = false
	one(t, p)
	add(t, pool, "a.x", 0, 0)
	b.on = true
	p.Discover()
	if _, _, err := p.Acquire(t.Context(), 10, 1); err == nil {
		t.Fatal("no error")
	}
	if leases := acquire(t, p, 10); len(leases) != 1 {
		t.Errorf("leased %v, want the run of the known lane", leases)
	}
}

// blind is a database in which looking for lanes takes a while and fails.
type blind struct {
	run.DB
	on bool
}

func (b *blind) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !b.on || !strings.Contains(sql, "workflow_lanes_v2") {
		return b.DB.Query(ctx, sql, args...)
	}
	_, _ = b.Exec(ctx, "SELECT pg_sleep(0.2)")
	return lost{err: io.ErrUnexpectedEOF}, io.ErrUnexpectedEOF
}

// A request is in doubt if its answer was lost. It is not in doubt if it was refused or never sent.
func TestLost(t *testing.T) {
	pool := pgtest.New(t)
	_, away := pgx.Connect(t.Context(), "postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	if err := pool.Ping(t.Context()); err != nil { // opens the connection: the time is for the statement
		t.Fatal(err)
	}
	short, done := context.WithTimeout(t.Context(), 2*time.Second)
	defer done()
	_, late := pool.Exec(short, `SELECT pg_sleep(10)`)
	_, over := pool.Exec(short, `SELECT 1`)
	for _, c := range []struct {
		err  error
		want bool
	}{
		{away, false}, {late, true}, {over, false}, {context.DeadlineExceeded, false}, {context.Canceled, true},
		{io.ErrUnexpectedEOF, true}, {brokenOff{}, true},
		{&pgconn.PgError{Code: "57P01"}, true}, {&pgconn.PgError{Code: "57P02"}, true}, {&pgconn.PgError{Code: "08P01"}, true}, {&pgconn.PgError{Code: "58000"}, true},
		{&pgconn.PgError{Code: "57P03"}, false}, {&pgconn.PgError{Code: "57014"}, false}, {&pgconn.PgError{Code: "23514"}, false}, {&pgconn.PgError{Code: "40001"}, false},
	} {
		if got := leasing.Lost(fmt.Errorf("lease runs: %w", c.err)); got != c.want {
			t.Errorf("%v: lost is %t", c.err, got)
		}
	}
}

// A request stays in doubt until its leases must have expired, and no longer, even if the database was out of
// reach all that time.
func TestDoubtEnds(t *testing.T) {
	pool := pgtest.New(t)
	d := &deaf{DB: pool}
	p := newPoller(d, "a.")
	add(t, pool, "a.x", 0, time.Minute)
	lose(t, p, d, "lost")
	closed := pgtest.New(t)
	closed.Close()
	for _, later := range []time.Duration{0, leasing.Sure + time.Minute - 5*time.Second} {
		p.Doubts.Age(later)
		if err := p.Doubts.Settle(t.Context(), closed, "w"); err == nil || p.Doubts.Left() != 1 {
			t.Fatalf("%s later: error %v, %d are left", later, err, p.Doubts.Left())
		}
	}
	p.Doubts.Age(10 * time.Second)
	if err := p.Doubts.Settle(t.Context(), closed, "w"); err == nil || p.Doubts.Left() != 0 {
		t.Errorf("error %v, %d are left", err, p.Doubts.Left())
	}
}
