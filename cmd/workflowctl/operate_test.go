package main_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

func value[T any](t *testing.T, url, query string) T {
	t.Helper()
	rows, _ := connect(t, url).Query(t.Context(), query)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

// show prints each of its subjects as a table, or as JSON.
func TestShow(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	for _, what := range []string{"bloat", "blockers", "coverage", "failing", "incidents", "lag", "parked", "pauses", "prefix", "rate", "stuck", "tasks", "waiting", "workers", "working"} {
		want(t, cmdtest.Start(t, env, "show", what), 0)
	}
	want(t, cmdtest.Start(t, env, "show", "waiting"), 0, "nothing\n")
	value[string](t, url, `INSERT INTO workflow_run (type, run_at) VALUES ('billing.charge', now() - interval '5 minutes') RETURNING id::text`)
	p, _ := cmdtest.Run(t, env, "show", "waiting")
	want(t, p, 0, "TYPE            DUE  OR_MORE  OLDEST", "billing.charge  1    f        00:05:")
	p, _ = cmdtest.Run(t, env, "show", "coverage", "--json")
	var rows []map[string]string
	if err := json.Unmarshal([]byte(p.Stdout.String()), &rows); err != nil || len(rows) != 1 || rows[0]["problem"] != "no live worker covers this type: 1 due, for 5 min" {
		t.Errorf("as JSON: %v, %s", err, p.Stdout.String())
	}
	want(t, cmdtest.Start(t, env, "show", "everything"), 2, `show "everything": there is no such thing; there are bloat, blockers,`)
	want(t, cmdtest.Start(t, env, "show", "waiting", "--limit", "0"), 2, "--limit=0: use 1 to 100000")
}

func TestWhyCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	id := value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.charge') RETURNING id::text`)
	want(t, cmdtest.Start(t, env, "why", id), 0, "no live worker covers billing.charge; none lives at all\n")
	want(t, cmdtest.Start(t, env, "why", "00000000-0000-7000-8000-000000000000"), 0, "there is no such run")
	want(t, cmdtest.Start(t, env, "why", "17"), 2, `"17" is no id of a run or an instance: use a uuid`)
}

// Each action prints what it did. An action that could not be done is a failure.
func TestActions(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	id := value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.charge') RETURNING id::text`)
	want(t, cmdtest.Start(t, env, "prioritize", id, "--", "-5"), 0, "priority -5\n")
	want(t, cmdtest.Start(t, env, "prioritize", id, "-6"), 0, "priority -6\n")
	want(t, cmdtest.Start(t, env, "prioritize", id, "500"), 1, "priority 500 is outside -100 to 100. Use a priority from -100 (last) to 100 (first).")
	want(t, cmdtest.Start(t, env, "reschedule", id, "2031-01-01T00:00:00Z"), 0, "due 203")
	want(t, cmdtest.Start(t, env, "reschedule", id, "tomorrow"), 2, `TIME="tomorrow": use a time such as`)
	want(t, cmdtest.Start(t, env, "pause", "billing.", "the bank is down"), 0, "paused\n")
	want(t, cmdtest.Start(t, env, "pause", "billing.", "again"), 1, "already paused")
	want(t, cmdtest.Start(t, env, "show", "pauses"), 0, "billing.", "the bank is down", "workflowctl")
	want(t, cmdtest.Start(t, env, "resume", "billing."), 0, "resumed\n")
	want(t, cmdtest.Start(t, env, "resume", "billing."), 1, "not paused")
	want(t, cmdtest.Start(t, env, "retry", id), 1, "not failed: pending")
	want(t, cmdtest.Start(t, env, "cancel", id, "not wanted"), 0, "cancelled\n")
	want(t, cmdtest.Start(t, env, "cancel", id, "not wanted"), 1, "too late: cancelled")
	want(t, cmdtest.Start(t, env, "cancel", id), 2, "use: workflowctl cancel RUN REASON")
	want(t, cmdtest.Start(t, env, "cancel", "17", "x"), 2, `RUN="17": use an id, a uuid`)
	want(t, cmdtest.Start(t, env, "release", "w1", "it hangs"), 1, "0 leases taken away")
	want(t, cmdtest.Start(t, env, "delete", id, "by mistake"), 0, "deleted\n")
	if got := value[string](t, url, `SELECT string_agg(event_type || ' ' || coalesce(actor, ''), ', ' ORDER BY id) FROM workflow_history`); !strings.Contains(got, "cancelled postgres [workflowctl]") {
		t.Errorf("history: %s", got)
	}
}

// A misused command prints how it is used.
func TestHowItIsUsed(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=postgres://nobody@127.0.0.1:1/none"}
	for _, c := range []struct{ args, says string }{
		{"why", "workflowctl: use: workflowctl why ID\nSee workflowctl why --help.\n"},
		{"top now", "workflowctl: use: workflowctl top\nSee workflowctl top --help.\n"},
		{"show", "workflowctl: use: workflowctl show WHAT\nSee workflowctl show --help.\n"},
		{"migrate up now", "workflowctl: use: workflowctl migrate up\nSee workflowctl migrate up --help.\n"},
		{"redrive", "workflowctl: use: workflowctl redrive PREFIX\nSee workflowctl redrive --help.\n"},
		{"retry x --often", "workflowctl: \"--often\": there is no such flag; use: workflowctl retry RUN\nSee workflowctl retry --help.\n"},
		{"--often", "workflowctl: \"--often\": there is no such flag; use: workflowctl COMMAND\nSee workflowctl --help.\n"},
		{"show waiting --limit -5", "workflowctl: --limit=-5: use 1 to 100000\nSee workflowctl show --help.\n"},
		{"show waiting --limit many", "workflowctl: --limit=\"many\": use a whole number\nSee workflowctl show --help.\n"},
		{"top --every soon", "workflowctl: --every=\"soon\": use a duration such as 500ms, 30s, 5m or 1h30m\n"},
		{"show waiting --limit", "workflowctl: --limit: give it a value\nSee"},
		{"sho", "workflowctl: there is no command \"sho\"; did you mean show"},
		{"migrate donw", "workflowctl: there is no command \"donw\"\nSee workflowctl migrate --help.\n"},
		{"show waiting --database-url mysql://x --schema pg_x", "write it like postgres://app:secret@127.0.0.1:5432/app\nworkflowctl: --schema=\"pg_x\": use at most 63 bytes"},
		{"policy billing.", "policy billing.: give --attempts, --backoff-base, --backoff-cap, --curve, --deadline, --dead-letter or --breaker, or --drop alone"},
		{"policy billing. --attempts 3 --drop", "policy billing.: give --attempts,"},
	} {
		want(t, cmdtest.Start(t, env, strings.Fields(c.args)...), 2, c.says)
	}
	want(t, cmdtest.Start(t, env, "--version"), 0, "workflowctl ")
}

// A policy can be set, shown and dropped. Invalid policies are refused with a message.
func TestPolicyCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "show", "policies"), 0, "*        25")
	want(t, cmdtest.Start(t, env, "policy", "billing.", "--attempts", "50", "--backoff-base", "10s", "--backoff-cap", "1h", "--curve", "linear", "--deadline", "48h", "--dead-letter", "ops.dead_letter.v1"), 0, "set; workers read it every second\n")
	want(t, cmdtest.Start(t, env, "policy", "billing.x", "--attempts", "1"), 0, "set")
	want(t, cmdtest.Start(t, env, "show", "policies"), 0, "billing.", "50        00:00:10      01:00:00     linear  48:00:00  ops.dead_letter.v1", "workflowctl")
	for _, c := range []struct{ args, says string }{
		{"billing --attempts 1", "pattern 'billing' is neither a type, nor a prefix that ends with a dot, nor *. Use billing. for all its types"},
		{"billing. --backoff-base 1us", "backoff_base 00:00:00.000001 to backoff_cap null is outside 1 ms to 1 year"},
		{"billing. --backoff-base 2h --backoff-cap 1h", "backoff_base 02:00:00 is longer than backoff_cap 01:00:00"},
		{"billing. --curve steep", "curve 'steep' is unknown. Use exponential, linear or constant"},
		{"billing. --dead-letter dead", "dead_letter 'dead' is not a type. Use a type such as ops.dead_letter.v1, or none"},
		{"billing. --deadline 1ms", "deadline 00:00:00.001 is outside 1 s to 10 years"},
		{"graph.timer.v1 --deadline 48h", "pattern 'graph.timer.v1' is of the engine's own types"},
	} {
		want(t, cmdtest.Start(t, env, append([]string{"policy"}, strings.Fields(c.args)...)...), 1, c.says)
	}
	id := value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.y') RETURNING id::text`)
	if _, err := connect(t, url).Exec(t.Context(), `UPDATE workflow_run SET run_at = now() + interval '1 hour'; BEGIN; SET LOCAL session_replication_role = replica; UPDATE workflow_run SET attempt = 2; COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	want(t, cmdtest.Start(t, env, "why", id), 0, "due in 60 min: attempt 3 of 50 (policy billing.)")
	want(t, cmdtest.Start(t, env, "policy", "billing.", "--attempts", "0"), 2, "--attempts=0: use 1 to 1000")
	want(t, cmdtest.Start(t, env, "policy", "billing.", "--drop"), 0, "dropped\n")
	want(t, cmdtest.Start(t, env, "policy", "*", "--deadline", "48h"), 0, "set;")
	want(t, cmdtest.Start(t, env, "policy", "*", "--drop"), 0, "dropped\n")
	want(t, cmdtest.Start(t, env, "policy", "billing.", "--drop"), 1, "there is none for it")
	want(t, cmdtest.Start(t, env, "why", id), 0, "attempt 3 of 25 (policy as shipped)")
	want(t, cmdtest.Start(t, env, "show", "policy-history"), 0, `billing.   attempts 50, backoff_base 10, backoff_cap 3600, curve linear, dead_letter ops.dead_letter.v1, deadline 172800  dropped`, `billing.x  none `, "[workflowctl]")
}

// doctor is grave about a run whose dead letter the database refused, and names the run and what to do.
func TestDoctorOfDeadLetters(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "policy", "*", "--dead-letter", "ops.dead_letter.v1"), 0, "set;")
	const fail = `UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, lease_until = now(), leased_by = 'w', started_at = now() WHERE type = 'a.b' AND status = 'pending';
		UPDATE workflow_run SET status = 'failed' WHERE status = 'leased'`
	execute := func(statements string) {
		t.Helper()
		if _, err := connect(t, url).Exec(t.Context(), statements, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	execute(`INSERT INTO workflow_run (type) VALUES ('a.b'); ` + fail)
	if p, _ := cmdtest.Run(t, env, "doctor"); strings.Contains(p.Stdout.String(), "the dead letter") {
		t.Errorf("a letter that is there is told of as refused:\n%s", p.Stdout.String())
	}
	execute(`ALTER TABLE workflow_run ADD CONSTRAINT no_letters CHECK (type <> 'ops.dead_letter.v1') NOT VALID; INSERT INTO workflow_run (type) VALUES ('a.b'); ` + fail)
	id := value[string](t, url, `SELECT id::text FROM workflow_run WHERE type = 'a.b' ORDER BY created_at DESC LIMIT 1`)
	want(t, cmdtest.Start(t, env, "doctor"), 1, "the dead letter ops.dead_letter.v1 of 1 run that failed within a day was refused (SQLSTATE 23514), for example of run "+id+": nobody", "workflowctl events "+id)
	want(t, cmdtest.Start(t, env, "events", id), 0, "dead_letter_refused", "no_letters")
}

func TestRedriveCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	if _, err := connect(t, url).Exec(t.Context(), `
		BEGIN;
		SET LOCAL session_replication_role = replica;
		INSERT INTO workflow_run (type, status, attempt, finished_at, error, last_error)
		SELECT 'billing.charge', 'failed', 3, now(), '{"code": "timeout"}', 'timeout: no answer' FROM generate_series(1, 3);
		COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	pending := func() int {
		return value[int](t, url, `SELECT count(*) FROM workflow_run WHERE status = 'pending'`)
	}
	p, _ := cmdtest.Run(t, env, "redrive", "billing.", "--code", "timeout")
	want(t, p, 0, "CODE_WAS", "timeout: no answer")
	if n := pending(); n != 0 || strings.Count(p.Stdout.String(), "billing.charge") != 3 {
		t.Errorf("without --do %d are tried again; %s", n, p.Stdout.String())
	}
	want(t, cmdtest.Start(t, env, "redrive", "billing.", "--most", "1", "--do"), 0, "billing.charge")
	if n := pending(); n != 1 {
		t.Errorf("a canary of one: %d are tried again", n)
	}
	want(t, cmdtest.Start(t, env, "redrive", "billing.", "--per-second", "10", "--since", "2020-01-01T00:00:00Z", "--do"), 0, "billing.charge")
	if n := pending(); n != 3 {
		t.Errorf("in the end %d are tried again, want 3", n)
	}
	want(t, cmdtest.Start(t, env, "redrive", "billing.", "--per-second", "-1"), 2, "--per-second=-1: use more than 0")
}

// doctor finds nothing in a healthy database, and names what is wrong in another.
func TestDoctor(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	want(t, cmdtest.Start(t, env, "doctor"), 1, "note   the tables belong to ", ", a superuser, ", "→ workflowctl roles")
	want(t, cmdtest.Start(t, env, "roles", "--named", pgtest.RolesName(t, url)), 0)
	healthy, _ := cmdtest.Run(t, env, "doctor", "--thorough")
	// The test server is not durable, and doctor says so.
	for _, line := range strings.Split(strings.TrimSpace(healthy.Stdout.String()), "\n") {
		if !strings.Contains(line, "is off") && !strings.Contains(line, "ALTER SYSTEM") && !strings.Contains(line, "holds a snapshot") && !strings.Contains(line, "pg_terminate_backend") {
			t.Errorf("of a healthy database it says %q", line)
		}
	}
	for _, statement := range []string{
		`INSERT INTO workflow_run (type, run_at) VALUES ('billing.charge', now() - interval '5 minutes')`,
		`SELECT workflow_pause('media.', 'why not')`,
		`ALTER TABLE workflow_run DISABLE TRIGGER workflow_run_update_guard`,
		`DROP INDEX workflow_run_leased_idx`,
		`GRANT EXECUTE ON FUNCTION workflow_cancel TO PUBLIC`,
		`INSERT INTO outbox_sink (name, seen_at) VALUES ('kafka', now() - interval '1 hour')`,
		`SELECT workflow_fault_v1('settle', '42P01', 'relation "workflow_history" does not exist')`,
		`SELECT workflow_unremoved_v1('workflow_run', ARRAY[(SELECT id::text FROM workflow_run)], '{XX777}', '{kept by law}', '{law}')`,
	} {
		if _, err := connect(t, url).Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	want(t, cmdtest.Start(t, env, "doctor"), 1, "findings are grave",
		"GRAVE  billing.charge: no live worker covers this type: 1 due, for 5 min", "→ start a worker with WORKER_TYPE_PREFIXES",
		"note   prefix media. is paused for ", " by postgres", "→ workflowctl resume media.",
		"note   trigger workflow_run_update_guard on workflow_run is disabled", "→ ALTER TABLE workflow_run ENABLE TRIGGER workflow_run_update_guard",
		"GRAVE  index workflow_run_leased_idx is missing",
		"GRAVE  every role may call 1 functions, workflow_cancel(uuid,text,text) for one", "→ workflowctl roles revokes that",
		"GRAVE  sink kafka is not served for 60 min, 0 events wait",
		"GRAVE  the statement «settle» fails for every row, for ", " as role postgres (SQLSTATE 42P01): no row is to blame", "→ SELECT message FROM workflow_fault WHERE statement = 'settle'",
		"note   retention: 1 rows of workflow_run cannot be removed, for ", " (SQLSTATE XX777)", "→ SELECT id, message FROM workflow_set_aside WHERE kind = 'retention' AND type = 'workflow_run'")
	other := connect(t, url)
	if _, err := other.Exec(t.Context(), `BEGIN; LOCK TABLE outbox_event IN SHARE MODE; SELECT pg_sleep(1.1)`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	want(t, cmdtest.Start(t, env, "doctor"), 1, "GRAVE  session ", " holds ShareLock on outbox_event, for ", "→ SELECT pg_terminate_backend(")
	p, _ := cmdtest.Run(t, env, "doctor", "--json")
	var found []struct {
		Grave     bool
		What, Fix string
	}
	if err := json.Unmarshal([]byte(p.Stdout.String()), &found); err != nil || len(found) < 5 {
		t.Errorf("as JSON: %v: %s", err, p.Stdout.String())
	}
	bare := pgtest.Empty(t)
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + bare}, "doctor"), 1, "GRAVE", "workflowctl migrate up")
}

// A lease whose outcome is kept is reported as that, with what to do, and not as one that nobody reclaims.
func TestDoctorOfKept(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	conn := connect(t, url)
	if _, err := conn.Exec(t.Context(), `
		BEGIN; SET LOCAL workflow.override = 'a test'; SET LOCAL workflow.advance = 'on';
		INSERT INTO workflow_run (id, type) VALUES ('00000000-0000-4000-8000-000000000001', 'billing.charge');
		UPDATE workflow_run SET status = 'leased', lease_token = id, leased_by = 'w', lease_no = 1, started_at = now(), lease_until = now() - interval '5 minutes', updated_at = clock_timestamp();
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) SELECT 'run', id, type, 'settle', 'XX123', 'never', '', xmin FROM workflow_run;
		INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) SELECT id, id, 'succeeded', 0, false, 'w' FROM workflow_run;
		COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	p, _ := cmdtest.Run(t, []string{"DATABASE_URL=" + url}, "doctor")
	if said := p.Stdout.String(); strings.Contains(said, "leases have run out") || !strings.Contains(said, "GRAVE  run 00000000-0000-4000-8000-000000000001 of type billing.charge is set aside for ") ||
		!strings.Contains(said, "SELECT workflow_settle_again('00000000-0000-4000-8000-000000000001')") {
		t.Errorf("doctor says\n%s", said)
	}
}

func TestTop(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.charge') RETURNING id::text`)
	want(t, cmdtest.Start(t, env, "top", "--once"), 0, "WAITS           DUE", "billing.charge  1 ", "NOBODY", "NEEDS YOU  ")
	want(t, cmdtest.Start(t, env, "top"), 2, "top needs a terminal; use --once")
	want(t, cmdtest.Start(t, env, "top", "--every", "1ms"), 2, "--every=1ms: use 200ms or more")
}
