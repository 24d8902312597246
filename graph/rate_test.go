package graph_test

import (
	"strconv"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// process_rate reports how many instances of each process start and end in an hour, and how many are open, as measured
// on the latest instances. Instances that ended or began long ago do not change the rates.
func TestProcessRate(t *testing.T) {
	tx, err := pgtest.New(t).Begin(t.Context()) // now() is constant within it
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	do := func(sql string) {
		t.Helper()
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	rate := func() (all string) {
		t.Helper()
		if err := tx.QueryRow(t.Context(), `SELECT coalesce(string_agg(concat_ws(' ', name, version, created_per_hour, completed_per_hour, failed_per_hour, cancelled_per_hour, active, or_more, over), ', '
			ORDER BY name, version), '') FROM process_rate`).Scan(&all); err != nil {
			t.Fatal(err)
		}
		return all
	}
	do(`SET LOCAL workflow.override = 'a test needs it'`)
	do(`INSERT INTO process_definition (definition)
		SELECT jsonb_build_object('process', p, 'version', v, 'start', 'e', 'nodes', '{"e": {"end": true}}'::jsonb) FROM unnest('{p,q}'::text[]) AS p, generate_series(1, 2) AS v WHERE (p, v) <> ('q', 2)`)
	// plant inserts n instances; created and completed are SQL expressions for minutes before now. process is its name
	// and version.
	plant := func(process, status string, n int, created, completed string) {
		t.Helper()
		do(`INSERT INTO process_instance (process_definition_id, status, created_at, completed_at, failure_reason, live_tokens)
			SELECT d.id, '` + status + `', now() - interval '1 minute' * ` + created + `, now() - interval '1 minute' * ` + completed + `,
			       CASE WHEN '` + status + `' = 'FAILED' THEN 'why' END, CASE WHEN '` + completed + `' = 'NULL' THEN 1 ELSE 0 END
			FROM process_definition d, generate_series(1, ` + strconv.Itoa(n) + `) AS n WHERE d.name = '` + process[:1] + `' AND d.version = ` + process[1:])
	}
	plant("p1", "COMPLETED", 6, "90", "30")
	plant("p1", "COMPLETED", 4, "20", "11")
	plant("p1", "FAILED", 2, "20", "11")
	plant("p1", "CANCELLED", 1, "200", "11")
	plant("p1", "COMPLETED", 5, "200", "61") // too long ago to count
	plant("p1", "WAITING", 3, "5000", "NULL")
	plant("p2", "WAITING", 1, "5", "NULL")
	plant("q1", "FAILED", 1, "100", "99")
	if got, want := rate(), "p 1 6.0 10.0 2.0 1.0 3 f 01:00:00, p 2 1.0 0.0 0.0 0.0 1 f 01:00:00"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	plant("q1", "COMPLETED", 3000, "n / 100.0", "n / 100.0") // a hundred in a minute: the latest thousand cover 10 minutes
	if got, want := rate(), "p 1 0.0 0.0 0.0 0.0 3 f 00:10:00, p 2 6.0 0.0 0.0 0.0 1 f 00:10:00, q 1 6000.0 6000.0 0.0 0.0 0 f 00:10:00"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	plant("q1", "WAITING", 1500, "n / 1000.0", "NULL")
	if got, want := rate(), "q 1 66000.0 6000.0 0.0 0.0 1000 t 00:01:00"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
