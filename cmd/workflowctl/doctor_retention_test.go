package main_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// doctor reports workers that ask for different retention periods, and which period counts; a prefix for which no
// worker has had a turn for a day; and runs, events and instances that have long been over and for which no worker
// asks for retention. It does not report what is kept for ever.
func TestDoctorOfRetention(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	do := func(statements string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), statements, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{"DATABASE_URL=" + pool.Config().ConnString()}
	said := func() string {
		t.Helper()
		p, _ := cmdtest.Run(t, env, "doctor")
		return p.Stdout.String()
	}
	expect := func(out string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(out, part) {
				t.Errorf("it does not say %q, but\n%s", part, out)
			}
		}
	}
	do(`INSERT INTO workflow_run (type) SELECT 'old.x.v1' FROM generate_series(1, 3);
		INSERT INTO workflow_run (type) SELECT 'kept.x.v1' FROM generate_series(1, 3);
		UPDATE workflow_run SET status = 'cancelled';
		SELECT outbox_emit(gen_random_uuid(), 'test.event', '{}'); UPDATE outbox_event SET published_at = now();
		INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}')`)
	do(`BEGIN; SET LOCAL workflow.override = 'a test'; INSERT INTO process_instance (id, process_definition_id, status, completed_at) SELECT gen_random_uuid(), id, 'COMPLETED', now() FROM process_definition; COMMIT`)
	pgtest.Elapse(t, pool, 101*24*time.Hour)
	do(`BEGIN; SET LOCAL workflow.override = 'a test'; INSERT INTO workflow_retention (prefix, kind, period, set_by) VALUES ('kept.', 'cancelled', 0, 'w'); COMMIT`)
	out := said()
	expect(out, "note   nobody removes 3 runs of prefix old., over for more than 100 days: no worker says how long", "→ start a worker that covers old., or default.",
		"nobody removes 1 published events", "nobody removes 1 instances of processes")
	if strings.Contains(out, "kept.") {
		t.Errorf("of what is kept for ever it says\n%s", out)
	}
	do(`SELECT workflow_retention_v1('{a.,b.,default.,*}', '{succeeded,cancelled,events,messages,processes}', '{3600,3600,3600,3600,3600}', 60, NULL);
		SELECT workflow_retention_v1('{a.}', '{succeeded,cancelled}', '{86400,86400}', 60, NULL);
		SELECT workflow_retention_v1('{b.,c.}', '{succeeded}', '{0}', 60, NULL)`)
	out = said()
	expect(out, "note   retention (succeeded): workers of prefix a. ask to keep what is over for 60 min, others for ", ", which counts", "(succeeded): workers of prefix b. ask to keep what is over for 60 min, others for ever, which counts")
	if strings.Contains(out, "nobody removes") || strings.Contains(out, "(cancelled)") || strings.Contains(out, "prefix *") {
		t.Errorf("it says too much:\n%s", out)
	}
	pgtest.Elapse(t, pool, 30*time.Hour)
	out = said()
	expect(out, "nobody removes what is over of prefix a. (cancelled, succeeded): the last turn was ", "DELETE FROM workflow_retention WHERE prefix = 'a.'", "nobody removes what is over of prefix b. (cancelled)",
		"nobody removes what is over of prefix * (")
	if strings.Contains(out, "prefix c.") || strings.Contains(out, "which counts") {
		t.Errorf("it says too much:\n%s", out)
	}
}
