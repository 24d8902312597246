//go:build pooler

package session_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Behind a pooler nothing is left in a session, neither a statement nor a setting.
func TestSharedSession(t *testing.T) {
	t.Parallel()
	pool, _ := prepared(t, pgtest.Bouncer(t, pgtest.URL(t)), nil)
	repeat(t, pool, 20)
	if got := scan[int](t, pool, `SELECT count(*) FROM pg_prepared_statements`); got != 0 {
		t.Errorf("%d statements are prepared", got)
	}
	if got := scan[string](t, pool, `SHOW plan_cache_mode`); got != "auto" {
		t.Errorf("plan_cache_mode is %s", got)
	}
	if got := pool.Stat().NewConnsCount(); got != 2 {
		t.Errorf("%d connections were opened: want one to find out and one that is used", got)
	}
}

// The hooks of the config are called in the same way behind a pooler.
func TestHooksBehindAPooler(t *testing.T) {
	t.Parallel()
	hooks(t, pgtest.Bouncer(t, pgtest.URL(t)))
}
