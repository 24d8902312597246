package lease_test

import (
	"cmp"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// deaf is a database whose next answer to a request for leases is lost on its way.
type deaf struct {
	run.DB
	mode string // lost: the statement was executed; late: it will be; "": nothing is lost
	err  error  // what the client sees instead of the answer; nil: io.ErrUnexpectedEOF
	late func(run.DB) error
}

func (d *deaf) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.mode == "" || !strings.Contains(sql, "workflow_lease_v1(") {
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

// lost are rows that never come.
type lost struct {
	pgx.Rows
	err error
}

func (lost) Next() bool   { return false }
func (lost) Close()       {}
func (l lost) Err() error { return l.err }

// A brokenOff is what pgx answers to a simple query whose connection broke: it calls it safe to
// repeat, though it was sent.
type brokenOff struct{}

func (brokenOff) Error() string     { return "conn closed" }
func (brokenOff) Unwrap() error     { return pgconn.ErrConnClosed }
func (brokenOff) SafeToRetry() bool { return true }

func lose(t *testing.T, p *lease.Poller, d *deaf, mode string) {
	t.Helper()
	d.mode = mode
	p.Discover()
	if leases, _, err := p.Acquire(t.Context(), 10, 10); err == nil {
		t.Fatalf("leased %v, although the answer is lost", leases)
	}
}

// Leases whose answer was lost are given back by the next call, with no attempt charged,
// and can be taken at once; exhausted runs stay exhausted.
func TestLostAnswer(t *testing.T) {
	for _, err := range []error{io.ErrUnexpectedEOF, brokenOff{}} {
		t.Run(err.Error(), func(t *testing.T) { testLostAnswer(t, err) })
	}
}

func testLostAnswer(t *testing.T, err error) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	spent := add(t, pool, "a.x", 0, time.Minute)
	exec(t, pool, "UPDATE workflow_run SET attempt = 3 WHERE id = $1", spent)
	d := &deaf{DB: pool, err: err}
	p := newPoller(d, "a.")
	lose(t, p, d, "lost")
	if r := read(t, pool, id); r.Status != run.Leased || r.Attempt != 1 {
		t.Fatalf("the statement was not executed: %+v", r)
	}
	p.Discover()
	leases := acquire(t, p, 10)
	if len(leases) != 2 {
		t.Fatalf("leased %v, want both", leases)
	}
	for _, l := range leases {
		if l.LeaseNo != 2 || l.ID == id && (l.Attempt != 1 || l.Exhausted) || l.ID == spent && (l.Attempt != 3 || !l.Exhausted) {
			t.Errorf("lease: %+v", l)
		}
	}
	events := query[string](t, pool, `
		SELECT string_agg(event_type || ' ' || attempt || ' ' || lease_no, ', ' ORDER BY e.id)
		FROM workflow_event e
		WHERE workflow_id = $1 AND event_type <> 'created'`, id)
	if want := "leased 1 1, released 1 1, leased 1 2"; events != want {
		t.Errorf("history %q, want %q", events, want)
	}
	// The leases that were given are not taken away by later looks.
	p.DoubtAgain()
	acquire(t, p, 10)
	if r := read(t, pool, id); r.Status != run.Leased {
		t.Errorf("row: %+v", r)
	}
}

// A request that the server finishes only after the first look for it is given back, too.
func TestLateAnswer(t *testing.T) {
	pool := pgtest.New(t)
	id := add(t, pool, "a.x", 0, time.Minute)
	d := &deaf{DB: pool}
	p := newPoller(d, "a.")
	lose(t, p, d, "late")
	// The next call looks in vain, and finds nothing else to lease: someone has the row.
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

// A request given up half-way, while the server works on it, leaves no charged attempt.
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

// A database that is out of reach is an error each time, with lanes known or not, leaves no
// doubt about leases, and once it is back is worked with at once.
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

// Discovery that fails, because it takes too long, is tried again only after a while:
// meanwhile runs of known lanes are leased.
func TestDiscoveryFails(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.x", 0, time.Minute)
	b := &blind{DB: pool, on: true}
	p := newPoller(b, "a.")
	for range 2 { // no lane is known yet: each call tries, and says so
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
	if !b.on || !strings.Contains(sql, "workflow_lanes_v1") {
		return b.DB.Query(ctx, sql, args...)
	}
	_, _ = b.Exec(ctx, "SELECT pg_sleep(0.2)")
	return lost{err: io.ErrUnexpectedEOF}, io.ErrUnexpectedEOF
}
