//go:build pooler

package pgtest

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgbouncer"
)

func init() { through = Bouncer }

// Bouncer starts a pgbouncer in front of a database and returns the connection string that leads through it. It runs
// in transaction mode over ten connections, as production setups do: no session state outlives a transaction, and
// named prepared statements do not work. It ends with t.
//
// Only tests that are built with the tag pooler have it, because pgbouncer is a package that root installs, and `make
// test` must not need it. As root on Debian, Bouncer installs pgbouncer if it is missing.
func Bouncer(t testing.TB, databaseURL string) string {
	t.Helper()
	b, err := pgbouncer.Start(t.Context(), databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Stop)
	return b.URL()
}
