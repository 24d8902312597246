package leasing_test

import (
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A worker leaves runs for which it has no handler to other workers for its grace. It leases none of them as a probe,
// and none before the grace has passed since the breaker closed: they have been due for longer only because no worker
// could lease them, and it would fail them for good. It does not poll for them all the time, either. A worker that has
// the handler leases them in both cases.
func TestProbesAreOfWhoHasTheHandler(t *testing.T) {
	pool := pgtest.New(t)
	old, next := newPoller(pool, "a."), newPoller(pool, "a.")
	old.Terms = func(typ string) leasing.Terms {
		terms := unlimited(typ)
		terms.Grace = time.Minute
		return terms
	}
	for range 3 {
		add(t, pool, "a.new", 0, time.Hour)
	}
	byHand(t, pool, `INSERT INTO workflow_outage (type, bound, in_a_row, runs, code, opened_at) VALUES ('a.new', false, 5, 3, 'unavailable', now() - interval '1 hour')`)
	leases, wait, err := old.Acquire(t.Context(), 10, 1)
	if err != nil || len(leases) > 0 || wait < 10*time.Second {
		t.Fatalf("who has no handler got %d probes, and is to look again in %s (%v); want none, and no hurry", len(leases), wait, err)
	}
	if leases := acquire(t, next, 10); len(leases) != 1 {
		t.Errorf("who has the handler got %d probes, want 1", len(leases))
	}
	byHand(t, pool, `DELETE FROM workflow_outage`)
	old.Discover()
	if leases := acquire(t, old, 10); len(leases) > 0 {
		t.Errorf("who has no handler got %d runs at once after the breaker closed", len(leases))
	}
	next.Discover()
	if leases := acquire(t, next, 10); len(leases) != 2 {
		t.Errorf("who has the handler got %d runs after the breaker closed, want 2", len(leases))
	}
}

// A worker without the handler does not lease runs that became due during a pause, for a grace after an operator has
// resumed them.
func TestResumedRunsAreOfWhoHasTheHandler(t *testing.T) {
	pool := pgtest.New(t)
	old, next := newPoller(pool, "a."), newPoller(pool, "a.")
	grace := time.Minute
	old.Terms = func(typ string) leasing.Terms {
		terms := unlimited(typ)
		terms.Grace = grace
		return terms
	}
	addMany(t, pool, 3, "a.new", 0)
	exec(t, pool, `SELECT workflow_pause('a.', 'a deploy')`)
	for _, p := range []*leasing.Poller{old, next} {
		if leases := acquire(t, p, 10); len(leases) > 0 {
			t.Fatalf("%d runs were leased although they are paused", len(leases))
		}
	}
	exec(t, pool, `SELECT workflow_resume('a.')`)
	old.Discover()
	leases, wait, err := old.Acquire(t.Context(), 10, 1)
	if err != nil || len(leases) > 0 || wait < time.Second {
		t.Errorf("who has no handler got %d runs at once, and is to look again in %s (%v); want none, and no hurry", len(leases), wait, err)
	}
	next.Discover()
	if leases := acquire(t, next, 2); len(leases) != 2 {
		t.Errorf("who has the handler got %d runs, want 2", len(leases))
	}
	grace = time.Millisecond // has passed
	old.Discover()
	if leases := acquire(t, old, 10); len(leases) != 1 {
		t.Errorf("after the grace who has no handler got %d runs, want 1", len(leases))
	}
}

// A worker that knows from its own report that a breaker is open leases no more runs of the type at once, although
// discovery may come seconds later on a busy server. The next discovery overrides that knowledge, so a breaker that
// has closed does not stay open.
func TestBreakerIsKnownBeforeDiscovery(t *testing.T) {
	pool := pgtest.New(t)
	addMany(t, pool, 3, "a.x", 0)
	p := newPoller(pool, "a.")
	known := map[string]bool{}
	p.Open = func(typ string) bool { return known[typ] }
	p.Outages = func(found map[string]bool) { known = found }
	acquire(t, p, 1)
	p.DontDiscover()
	known = map[string]bool{"a.x": true}
	if leases := acquire(t, p, 10); len(leases) > 0 {
		t.Errorf("%d runs were leased although the breaker is open", len(leases))
	}
	p.Discover()
	if leases := acquire(t, p, 10); len(leases) != 2 {
		t.Errorf("%d runs were leased once discovery has found that it is closed, want 2", len(leases))
	}
}
