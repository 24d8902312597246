package worker

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A worker reads new policies also while nothing that is set aside can be tried again.
func TestPoliciesWithoutTryingAgain(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `ALTER FUNCTION workflow_try_again_v1 RENAME TO elsewhere`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SELECT workflow_set_policy('a.', attempts => 7)`); err != nil {
		t.Fatal(err)
	}
	w := &Worker{db: pool}
	if err := w.tendRuns(t.Context()); err == nil || w.policy("a.b").Attempts != 7 {
		t.Errorf("%v, %+v", err, w.policy("a.b"))
	}
}
