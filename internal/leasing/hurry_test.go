package leasing_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// At the word of a new run, one in a known lane costs a single statement; one in an unknown
// lane is found by the same call all the same.
func TestHurry(t *testing.T) {
	pool := pgtest.New(t)
	add(t, pool, "a.known", 0, 0)
	p := newPoller(pool, "a.")
	one(t, p)
	for _, c := range []struct {
		typ        string
		statements int
	}{{"a.known", 1}, {"a.new", 3}, {"a.new", 1}} {
		add(t, pool, c.typ, 0, 0)
		p.Discover()
		p.Hurry()
		sent := record(t, pool, func(db run.DB) {
			p.DB = db
			if leases := acquire(t, p, 10); len(leases) != 1 || leases[0].Type != c.typ {
				t.Errorf("leased %v, want %s", types(leases), c.typ)
			}
		})
		if len(sent) != c.statements {
			t.Errorf("%s: %d statements, want %d", c.typ, len(sent), c.statements)
		}
		exec(t, pool, "UPDATE workflow_run SET held_at = now() WHERE status = 'pending'") // record has undone the lease
	}
}
