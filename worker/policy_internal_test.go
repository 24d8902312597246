package worker

import (
	"context"
	"log/slog"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A worker reads policies that are set while it runs, also while it cannot try again what is set aside, and while it
// cannot look whether there is anything.
func TestPoliciesAreRead(t *testing.T) {
	for _, broken := range []string{"", "workflow_look_v1", "workflow_try_again_v1"} {
		t.Run("without "+broken, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			if broken != "" {
				if _, err := pool.Exec(t.Context(), `ALTER FUNCTION `+broken+` RENAME TO elsewhere`); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := pool.Exec(t.Context(), `BEGIN; SET LOCAL workflow.override = 'as if it was refused';
				INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) VALUES ('run', gen_random_uuid(), 'a.b', 'lease', 'XX777', 'no', '', '1'); COMMIT`); err != nil {
				t.Fatal(err)
			}
			w, err := New(Config{Pool: pool, Mux: NewMux(), Prefixes: []string{"a."}, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			w.db = pool
			if err := w.firstPolicies(t.Context()); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); w.tend(ctx) }()
			defer func() { stop(); <-ended }()
			for _, c := range []struct {
				set      string
				attempts int
			}{
				{`workflow_set_policy('a.', attempts => 7)`, 7},
				{`workflow_set_policy('a.', attempts => 8)`, 8},
				{`workflow_drop_policy('a.')`, 25},
			} {
				if _, err := pool.Exec(t.Context(), `SELECT `+c.set); err != nil {
					t.Fatal(err)
				}
				pgtest.Await(t, c.set+" to be read", func() bool { return w.policy("a.b").Attempts == c.attempts })
			}
		})
	}
}
