package leasing_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
)

func newReclaimer(db run.DB) *leasing.Reclaimer {
	return &leasing.Reclaimer{DB: db, Worker: "w2", Length: time.Minute,
		Backoff: run.Backoff{Base: 8 * time.Second, Cap: 20 * time.Second}}
}

func reclaim(t *testing.T, r *leasing.Reclaimer, n int) (again int, exhausted []leasing.Lease) {
	t.Helper()
	again, exhausted, err := r.Reclaim(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return again, exhausted
}

// expire makes the leases of the given runs expire, as if their worker had died.
func expire(t *testing.T, db run.DB, ids ...uuid.UUID) {
	t.Helper()
	exec(t, db, "UPDATE workflow_run SET lease_until = clock_timestamp() - interval '1 second' WHERE id = ANY ($1)", ids)
}

// A run whose lease has expired becomes due again after a backoff with jitter, which grows with
// each attempt up to its cap. The attempt stays charged, the run is a suspect, and the history
// names the lost worker. A run without attempts left is leased to the reclaimer as exhausted.
func TestReclaim(t *testing.T) {
	pool := settledServer(t)
	id := add(t, pool, "a.x", -100, time.Minute)
	exec(t, pool, "UPDATE workflow_run SET max_attempts = 4 WHERE id = $1", id)
	p, r := newPoller(pool, "a."), newReclaimer(pool)
	for attempt, raw := range []time.Duration{8 * time.Second, 16 * time.Second, 20 * time.Second} {
		one(t, p)
		expire(t, pool, id)
		if again, exhausted := reclaim(t, r, 10); again != 1 || len(exhausted) != 0 {
			t.Fatalf("attempt %d: %d again, %d exhausted", attempt+1, again, len(exhausted))
		}
		got := read(t, pool, id)
		if got.Status != run.Pending || got.Attempt != attempt+1 || got.DeadlineAt != nil ||
			*got.LastError != "lease_expired: no sign of life from w1" || !query[bool](t, pool, "SELECT suspect FROM workflow_run") {
			t.Errorf("attempt %d: %+v", attempt+1, got)
		}
		if pause := got.RunAt.Sub(got.UpdatedAt); pause < raw || pause > raw*3/2 {
			t.Errorf("attempt %d: due after %v, want %v and up to half of it on top", attempt+1, pause, raw)
		}
		pgtest.Elapse(t, pool, time.Minute)
	}
	one(t, p)
	expire(t, pool, id)
	again, exhausted := reclaim(t, r, 10)
	if again != 0 || len(exhausted) != 1 {
		t.Fatalf("last attempt: %d again, %d exhausted", again, len(exhausted))
	}
	l, got := exhausted[0], read(t, pool, id)
	if l.ID != id || !l.Exhausted || l.Attempt != 4 || l.LeaseNo != 5 || l.Worker != "w2" || l.Length != time.Minute {
		t.Errorf("lease: %+v", l)
	}
	if got.Status != run.Leased || got.Attempt != 4 || *got.LeasedBy != "w2" || !near(left(t, pool, id), time.Minute) {
		t.Errorf("row: %+v", got)
	}
	history := query[string](t, pool, `
		SELECT string_agg(concat_ws(' ', h.event_type, h.attempt, h.lease_no, h.actor, h.leased_by), ', ' ORDER BY h.id)
		FROM workflow_history h
		WHERE h.started_at < h.created_at`)
	if want := "expired 1 1 w2 w1, expired 2 2 w2 w1, expired 3 3 w2 w1, expired 4 4 w2 w1"; history != want {
		t.Errorf("history %q, want %q", history, want)
	}
	settle(t, pool, l)
}

// Leases that have not expired are left alone, however long ago they were taken. So are exhausted steps,
// by a worker that does not execute processes.
func TestReclaimLeavesAlone(t *testing.T) {
	pool := settledServer(t)
	add(t, pool, "a.long", 0, time.Minute)
	step := add(t, pool, "a.step", 0, time.Minute)
	pgtest.ByHand(t, pool, "UPDATE workflow_run SET token_id = gen_random_uuid(), max_attempts = 1 WHERE id = $1", step)
	p, r := newPoller(pool, "a."), newReclaimer(pool)
	p.Steps = true
	leases := acquire(t, p, 10)
	pgtest.Elapse(t, pool, 48*time.Hour)
	extend(t, pool, held(leases, time.Hour))
	expire(t, pool, step)
	if again, exhausted := reclaim(t, r, 10); again+len(exhausted) > 0 || r.Idle() {
		t.Errorf("%d again, %v exhausted, idle %v", again, exhausted, r.Idle())
	}
	r.Steps = true
	r.LookBack()
	if _, exhausted := reclaim(t, r, 10); len(exhausted) != 1 || exhausted[0].ID != step {
		t.Errorf("exhausted %v, want the step", exhausted)
	}
}

// A reclaimer is idle when no lease is held, and takes back no more leases than it is asked for.
func TestReclaimBatch(t *testing.T) {
	pool := settledServer(t)
	r := newReclaimer(pool)
	if again, exhausted := reclaim(t, r, 10); again+len(exhausted) > 0 || !r.Idle() {
		t.Errorf("%d again, %v exhausted, idle %v", again, exhausted, r.Idle())
	}
	addMany(t, pool, 25, "a.x", 0)
	acquire(t, newPoller(pool, "a."), 25)
	pgtest.Elapse(t, pool, time.Hour)
	r.LookBack() // Elapse has moved the leases to before the last look
	for _, want := range []int{10, 10, 5, 0} {
		if again, _ := reclaim(t, r, 10); again != want {
			t.Errorf("took back %d, want %d", again, want)
		}
	}
}

// Reclaimers that work at the same time never take back the same run. The runs become due again spread over
// half of the backoff.
func TestReclaimersShare(t *testing.T) {
	pool := settledServer(t)
	const n = 600
	addMany(t, pool, n, "a.x", 0)
	exec(t, pool, "UPDATE workflow_run SET max_attempts = 1 WHERE priority = 0 AND right(id::text, 1) < '8'")
	spent := query[int](t, pool, "SELECT count(*) FROM workflow_run WHERE max_attempts = 1")
	acquire(t, newPoller(pool, "a."), n)
	pgtest.Elapse(t, pool, time.Hour)
	var mu sync.Mutex
	total, taken := 0, map[uuid.UUID]bool{}
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() {
			r := newReclaimer(pool)
			for range 3 * n / 20 {
				again, exhausted, err := r.Reclaim(t.Context(), 20)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				total += again
				for _, l := range exhausted {
					if taken[l.ID] {
						t.Errorf("run %s was taken twice", l.ID)
					}
					taken[l.ID] = true
				}
				done := total+len(taken) >= n
				mu.Unlock()
				if done {
					return
				}
			}
		})
	}
	group.Wait()
	events := query[int](t, pool, "SELECT count(*) FROM workflow_event WHERE event_type = 'expired'")
	if total != n-spent || len(taken) != spent || events != n {
		t.Errorf("%d again and %d exhausted, %d events, want %d and %d", total, len(taken), events, n-spent, spent)
	}
	first := query[time.Duration](t, pool, "SELECT min(run_at - updated_at) FROM workflow_run WHERE status = 'pending'")
	last := query[time.Duration](t, pool, "SELECT max(run_at - updated_at) FROM workflow_run WHERE status = 'pending'")
	if first < 8*time.Second || first > 9*time.Second || last < 11*time.Second || last > 12*time.Second {
		t.Errorf("due again after %v to %v, want 8 to 12 s", first, last)
	}
}

// No lease is taken back in the first two seconds after the server has started, so that living workers can extend
// theirs.
func TestReclaimAfterRestart(t *testing.T) {
	server := pgtest.Server(t, pgserver.Options{})
	pool, err := pgxpool.New(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return sql.Up(t.Context(), tx.Conn()) }); err != nil {
		t.Fatal(err)
	}
	id := add(t, pool, "a.x", 0, time.Minute)
	one(t, newPoller(pool, "a."))
	expire(t, pool, id)
	server.StopMode(pgserver.Fast)
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "the server is back", func() bool { return pool.Ping(t.Context()) == nil })
	pgtest.Await(t, "the lease is taken back", func() bool {
		r := newReclaimer(pool)
		again, _ := reclaim(t, r, 10)
		up := query[time.Duration](t, pool, "SELECT clock_timestamp() - pg_postmaster_start_time()")
		if again > 0 && up < 2*time.Second {
			t.Errorf("taken back %v after the start", up)
		}
		return again > 0
	})
}

// An expired lease whose update a user's trigger refuses does not keep other leases from being taken back.
func TestReclaimPastRefusal(t *testing.T) {
	pool := settledServer(t)
	addMany(t, pool, 5, "a.x", 0)
	leases := acquire(t, newPoller(pool, "a."), 5)
	for _, l := range leases {
		expire(t, pool, l.ID)
	}
	pgtest.ByHand(t, pool, "UPDATE workflow_run SET started_at = started_at - interval '1 hour' WHERE id = $1", leases[2].ID)
	exec(t, pool, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never'; END $$`)
	exec(t, pool, `
		CREATE TRIGGER refuse AFTER UPDATE ON workflow_run
		FOR EACH ROW WHEN (OLD.id = '`+leases[2].ID.String()+`') EXECUTE FUNCTION refuse()`)
	if again, exhausted := reclaim(t, newReclaimer(pool), 10); again != 4 || len(exhausted) != 0 {
		t.Errorf("%d due again, %d exhausted; want the 4 that do not refuse", again, len(exhausted))
	}
	if got := read(t, pool, leases[2].ID); got.Status != run.Leased || got.Attempt != 1 {
		t.Errorf("the one that refuses is %s after %d attempts", got.Status, got.Attempt)
	}
}
