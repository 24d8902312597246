package outbox_test

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// The outcome of a run becomes an event if workflow.run_events (the level) and workflow.run_event_types select it.
// While no sink is registered, no outcome becomes an event.
func TestRunEvents(t *testing.T) {
	for _, row := range []struct {
		level, types string
		sink         bool
		want         []string
	}{
		{"", "", true, []string{"run.failed a.x", "run.failed b.x"}},
		{"failed", "b.", true, []string{"run.failed b.x"}},
		{"none", "", true, nil},
		{"all", "", true, []string{"run.cancelled a.x", "run.cancelled b.x", "run.failed a.x", "run.failed b.x", "run.succeeded a.x", "run.succeeded b.x"}},
		{"all", "a., c.", true, []string{"run.cancelled a.x", "run.failed a.x", "run.succeeded a.x"}},
		{"all", "", false, nil},
	} {
		t.Run(row.level+" "+row.types, func(t *testing.T) {
			pool := pgtest.New(t)
			if row.sink {
				if err := delivery.Register(t.Context(), pool, "all", nil); err != nil {
					t.Fatal(err)
				}
			}
			tx := begin(t, pool)
			for _, query := range []string{
				`SELECT set_config('workflow.run_events', '` + row.level + `', true), set_config('workflow.run_event_types', '` + row.types + `', true)`,
				`INSERT INTO workflow_run (type) SELECT type FROM unnest('{a.x,b.x}'::text[]) AS type, generate_series(1, 3)`,
				`UPDATE workflow_run SET status = 'leased', leased_by = 'test', lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute',
				 attempt = 1, lease_no = 1, started_at = now()`,
				`WITH n AS (SELECT id, type, row_number() OVER (PARTITION BY type ORDER BY id) AS n FROM workflow_run)
				 UPDATE workflow_run r SET status = (ARRAY['failed', 'succeeded', 'cancelled'])[n], finished_at = now(),
				 leased_by = NULL, lease_token = NULL, lease_until = NULL FROM n WHERE n.id = r.id`,
			} {
				if _, err := tx.Exec(t.Context(), query); err != nil {
					t.Fatal(err)
				}
			}
			rows, _ := tx.Query(t.Context(), `SELECT concat(e.event_type, ' ', e.payload->>'type') FROM outbox_event e JOIN workflow_run r ON r.id = e.aggregate_id ORDER BY 1`)
			got, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, row.want) {
				t.Errorf("events %q, want %q", got, row.want)
			}
		})
	}
}
