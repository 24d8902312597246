package survival

import (
	"syscall"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A killed worker counts as alive at most until its leases are reclaimed: after that, waiting runs are not reported
// as covered by it. A worker that was frozen meanwhile is reported as alive again as soon as it continues.
func TestTheDeadAreNotToldOf(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	dead := start(t, url, "dead")
	effects(t, pool, slots, 3000)
	leasedBy(t, pool, "dead", slots)
	frozen := start(t, url, "frozen")
	effects(t, pool, slots, 3000)
	leasedBy(t, pool, "frozen", slots)
	const live, told = `SELECT count(*) FROM workflow_live_worker WHERE name ^@ $1`, `SELECT count(*) FROM workflow_worker WHERE name ^@ $1 AND seen_at > now() - interval '12 seconds'`
	for _, name := range []string{"dead-", "frozen-"} {
		pgtest.Await(t, name+" to live", func() bool { return number(t, pool, live, name) == 1 })
	}
	dead.signal(syscall.SIGKILL)
	frozen.signal(syscall.SIGSTOP)
	start(t, url, "heir")
	pgtest.Await(t, "all leases to be taken back", func() bool {
		return number(t, pool, `SELECT count(DISTINCT workflow_id) FROM workflow_event WHERE event_type = 'expired'`) == 2*slots
	})
	for _, name := range []string{"dead-", "frozen-"} {
		if number(t, pool, live, name) != 0 {
			t.Errorf("%s is said to live, after its leases were taken back", name)
		}
		if number(t, pool, told, name) != 1 {
			t.Errorf("%s has not reported for 12 seconds: this shows nothing", name)
		}
	}
	if n := number(t, pool, `SELECT count(*) FROM workflow_waiting WHERE covered_by ~ '(dead|frozen)-'`); n != 0 {
		t.Error("what waits is said to be covered by the dead")
	}
	frozen.signal(syscall.SIGCONT)
	pgtest.Await(t, "it to live again", func() bool { return number(t, pool, live, "frozen-") == 1 })
	settled(t, pool)
	check(t, pool)
}
