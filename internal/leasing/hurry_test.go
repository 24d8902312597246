package leasing_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// After Hurry, a run in a known lane is leased by a single statement. A run in a new lane is leased by the same
// call too, after discovery.
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
		exec(t, pool, "UPDATE workflow_run SET held_at = now() WHERE status = 'pending'") // record has rolled back the lease
	}
}
