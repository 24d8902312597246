package main_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// show, top, doctor and why report an open breaker. A command closes it, and a policy keeps it from opening again.
func TestBreaker(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	conn := connect(t, url)
	open := func() string {
		t.Helper()
		if _, err := conn.Exec(t.Context(), `BEGIN; SET LOCAL workflow.override = 'a test';
			INSERT INTO workflow_outage (type, bound, in_a_row, runs, code, opened_at) VALUES ('billing.charge', false, 5, 3, 'unavailable', now() - interval '1 minute') ON CONFLICT DO NOTHING;
			COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
		return value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.charge') RETURNING id::text`)
	}
	id := open()
	want(t, cmdtest.Start(t, env, "show", "breakers"), 0, "billing.charge", "unavailable")
	want(t, cmdtest.Start(t, env, "top", "--once"), 0, "what runs of type billing.charge need is out of reach")
	want(t, cmdtest.Start(t, env, "doctor"), 1, "GRAVE  what runs of type billing.charge need is out of reach", "workflowctl close-breaker billing.charge")
	want(t, cmdtest.Start(t, env, "why", id), 0, "the breaker of billing.charge is open", "workflow_close_breaker('billing.charge')")
	want(t, cmdtest.Start(t, env, "close-breaker", "billing.charge"), 0, "closed; five outages in a row open it again")
	want(t, cmdtest.Start(t, env, "close-breaker", "billing.charge"), 1, "none is open for it")
	want(t, cmdtest.Start(t, env, "policy", "billing.", "--breaker=false"), 0, "set")
	open()
	want(t, cmdtest.Start(t, env, "show", "policies"), 0, "BREAKER", "billing. ", " f ")
	want(t, cmdtest.Start(t, env, "close-breaker", "billing.charge"), 1, "none is open for it")
}
