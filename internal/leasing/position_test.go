package leasing_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

func has(leases []leasing.Lease, id uuid.UUID) bool {
	return slices.ContainsFunc(leases, func(l leasing.Lease) bool { return l.ID == id })
}

// A run whose transaction commits after hundreds of later runs were leased is leased soon, although polls
// continue where the last one stopped and never reach the end of the lane.
func TestLateCommit(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 300, "a.x", 0)
	tx := begin(t, pool)
	late := add(t, tx, "a.x", 0, 2*time.Hour)
	p := newPoller(pool, "a.")
	for range 10 {
		acquire(t, p, 20)
	}
	commit(t, tx)
	start := time.Now()
	pgtest.Await(t, "the late run is leased", func() bool {
		exec(t, pool, "INSERT INTO workflow_run (type) SELECT 'a.x' FROM generate_series(1, 20)")
		leases := acquire(t, p, 20)
		if len(leases) < 20 && !has(leases, late) {
			t.Fatal("the queue ran dry before")
		}
		return has(leases, late)
	})
	t.Logf("found after %v", time.Since(start))
}

// Runs that commit late are found even in lanes that full batches hardly reach. Several in one lane are found, and
// those behind a locked one.
func TestLateCommits(t *testing.T) {
	pool := pgtest.New(t)
	p := newPoller(pool, "a.")
	want := map[uuid.UUID]bool{}
	for _, typ := range []string{"a.x", "a.y"} {
		addMany(t, pool, 100, typ, 0)
	}
	tx := begin(t, pool)
	for _, typ := range []string{"a.x", "a.y"} {
		want[add(t, tx, typ, 0, 3*time.Hour)] = true
		want[add(t, tx, typ, 0, 2*time.Hour)] = true
	}
	locked := add(t, tx, "a.x", 0, 4*time.Hour)
	for range 10 {
		acquire(t, p, 10)
	}
	commit(t, tx)
	holder := begin(t, pool)
	exec(t, holder, "SELECT FROM workflow_run WHERE id = $1 FOR UPDATE", locked)
	p.Discover()
	leases := acquire(t, p, 4)
	leases = append(leases, acquire(t, p, 4)...) // from the other lane, which now has the oldest run
	for _, l := range leases {
		delete(want, l.ID)
	}
	if len(want) > 0 {
		t.Errorf("%d late runs are not among %v", len(want), names(leases))
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Discover()
	if leases := acquire(t, p, 1); !has(leases, locked) {
		t.Errorf("leased %v, want the one that was locked", leases)
	}
}

// A run that is put back is found, with an earlier due time and with one that others share.
func TestPutBack(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `
		INSERT INTO workflow_run (type, run_at)
		SELECT 'a.x', date_trunc('day', now()) - interval '1 day' FROM generate_series(1, 100)`)
	p := newPoller(pool, "a.")
	leases := acquire(t, p, 50)
	for i, back := range []string{"run_at", "run_at - interval '1 hour'"} {
		id := leases[i].ID
		exec(t, pool, "UPDATE workflow_run SET status = 'pending', run_at = "+back+" WHERE id = $1", id)
		p.Discover()
		if again := acquire(t, p, 1); !has(again, id) {
			t.Errorf("%s: not found again", back)
		}
	}
}

// Without discovery, a run is found that is enqueued in a known lane that was empty, or in which no run was due.
func TestKnownLanes(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 3, "a.empty", 0)
	add(t, pool, "a.later", 0, -time.Hour)
	p := newPoller(pool, "a.")
	acquire(t, p, 10)
	p.Discover()
	acquire(t, p, 10)
	p.DontDiscover()
	for range 3 {
		for _, typ := range []string{"a.empty", "a.later"} {
			id := add(t, pool, typ, 0, 0)
			if leases := acquire(t, p, 10); !has(leases, id) {
				t.Errorf("%s: leased %v", typ, types(leases))
			}
		}
	}
}

// When the batch is full before the end of a lane, the rest of the lane is leased later, even without discovery.
func TestPartlyRead(t *testing.T) {
	pool := pgtest.New(t)
	for priority := range 3 {
		addMany(t, pool, 25, "a.x", priority)
		addMany(t, pool, 25, "a.y", priority)
	}
	p := newPoller(pool, "a.")
	seen := map[uuid.UUID]bool{}
	last := 2
	for len(seen) < 150 {
		leases := acquire(t, p, 7)
		p.DontDiscover()
		if len(leases) == 0 {
			t.Fatalf("%d of 150 runs were found", len(seen))
		}
		for _, l := range leases {
			if seen[l.ID] || l.Priority > last {
				t.Errorf("run %v of priority %d came after %d", l.ID, l.Priority, last)
			}
			seen[l.ID], last = true, l.Priority
		}
	}
}

// A new lane, of higher priority or of a new type, is found long before a long queue is drained.
func TestNewLane(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 20_000, "a.x", 0)
	p := newPoller(pool, "a.")
	for _, typ := range []string{"a.x", "a.new"} {
		acquire(t, p, 50)
		id := add(t, pool, typ, 9, 0)
		for {
			leases := acquire(t, p, 50)
			if has(leases, id) {
				break
			}
			if len(leases) < 50 {
				t.Fatal("the queue ran dry before")
			}
		}
	}
}
