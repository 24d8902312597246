package leasing_test

import (
	"testing"
	"time"
)

// A lease that was committed ten seconds after it was taken is taken back, although the
// last look saw only newer leases and the next one continues from there.
func TestReclaimCommittedLate(t *testing.T) {
	pool := settledServer(t)
	late := add(t, pool, "a.late", 0, time.Minute)
	tx := begin(t, pool)
	exec(t, tx, `
		UPDATE workflow_run
		SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'w0',
		    started_at = now() - interval '10 seconds', lease_until = now() - interval '1 second'
		WHERE id = $1`, late)
	add(t, pool, "a.x", 0, time.Minute)
	one(t, newPoller(pool, "a."))
	r := newReclaimer(pool)
	if again, _ := reclaim(t, r, 10); again != 0 {
		t.Fatalf("took back %d", again)
	}
	commit(t, tx)
	r.DontLookBack()
	r.Later(10 * time.Second)
	if again, _ := reclaim(t, r, 10); again != 1 {
		t.Errorf("took back %d, want the late one", again)
	}
}

// Most looks see only leases about as new as the oldest one held. A look from the beginning sees all. It
// comes once 49 times the duration of the last one has passed.
func TestReclaimLooksBack(t *testing.T) {
	pool := settledServer(t)
	add(t, pool, "a.x", 0, time.Minute)
	one(t, newPoller(pool, "a."))
	r := newReclaimer(pool)
	reclaim(t, r, 10)
	old := add(t, pool, "a.old", 0, time.Minute)
	exec(t, pool, `
		UPDATE workflow_run
		SET status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'w0',
		    started_at = now() - interval '1 day', lease_until = now() - interval '1 second'
		WHERE id = $1`, old)
	for _, look := range []struct {
		ago  time.Duration
		want int
	}{{20 * time.Second, 0}, {49 * time.Second, 1}} {
		r.LookedBack(look.ago, time.Second)
		if again, _ := reclaim(t, r, 10); again != look.want {
			t.Errorf("%v after a look from the beginning that took a second: took back %d, want %d", look.ago, again, look.want)
		}
	}
}

// Leases that were taken since the last look are seen, even if that look found no lease held.
func TestReclaimAfterIdle(t *testing.T) {
	pool := settledServer(t)
	r := newReclaimer(pool)
	reclaim(t, r, 10)
	id := add(t, pool, "a.x", 0, time.Minute)
	one(t, newPoller(pool, "a."))
	expire(t, pool, id)
	r.DontLookBack()
	if again, _ := reclaim(t, r, 10); again != 1 {
		t.Errorf("took back %d, want 1", again)
	}
}
