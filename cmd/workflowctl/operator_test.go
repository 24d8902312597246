package main_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// loginAs makes a login that has one of the roles of workflowctl, and returns the connection string for it.
func loginAs(t *testing.T, address, named, role string) string {
	t.Helper()
	login := named + "_login_" + role
	if _, err := connect(t, address).Exec(t.Context(), fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD 'secret' IN ROLE %s_%s`, login, named, role)); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, "secret")
	return u.String()
}

// Each command that acts works for an operator whose login has the operator role and nothing else. A viewer, and a
// client who may only enqueue, are refused with a message, and nothing is changed.
func TestCommandsAsOperator(t *testing.T) {
	t.Parallel()
	address := pgtest.URL(t)
	named := pgtest.RolesName(t, address)
	want(t, cmdtest.Start(t, []string{"DATABASE_URL=" + address}, "roles", "--named", named), 0)
	as := map[string][]string{}
	for _, role := range []string{"operator", "viewer", "enqueue"} {
		as[role] = []string{"DATABASE_URL=" + loginAs(t, address, named, role)}
	}
	owner := connect(t, address)
	ask := func(t *testing.T, query string) (answer string) {
		t.Helper()
		if err := owner.QueryRow(t.Context(), query).Scan(&answer); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		return answer
	}
	file := save(t, "p.json", `{"process": "p", "version": 1, "start": "paid", "nodes": {
		"paid": {"await": {"message": "paid", "key": "input.order"}, "to": "open"}, "open": {"await": {"signal": "open"}, "to": "check"},
		"check": {"human": {"groups": ["sales"]}, "to": "late"}, "late": {"choose": [{"if": "steps.check.n > 1", "to": "done"}], "else": "done"}, "done": {"end": true}}}`)
	if _, err := owner.Exec(t.Context(), `
		INSERT INTO workflow_run (id, type) VALUES ('00000000-0000-4000-8000-000000000001', 'billing.waits');
		BEGIN; SET LOCAL workflow.override = 'a test'; SET LOCAL workflow.advance = 'on';
		INSERT INTO workflow_run (id, type) VALUES ('00000000-0000-4000-8000-000000000002', 'billing.again'), ('00000000-0000-4000-8000-000000000003', 'billing.fails');
		UPDATE workflow_run SET status = 'leased', lease_token = id, leased_by = 'w', lease_no = 1, started_at = now(), lease_until = now() - interval '5 minutes', updated_at = clock_timestamp() WHERE type <> 'billing.waits';
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) SELECT 'run', id, type, 'settle', 'XX123', 'never', '', xmin FROM workflow_run WHERE status = 'leased';
		INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) SELECT id, id, 'succeeded', 0, false, 'w' FROM workflow_run WHERE status = 'leased';
		INSERT INTO outbox_sink (name) VALUES ('kafka');
		SELECT outbox_emit(gen_random_uuid(), 'billing.paid', '{}');
		UPDATE outbox_event SET published_at = created_at, delivered_to = '{kafka}';
		COMMIT; BEGIN; SET LOCAL workflow.override = 'a test';
		SELECT outbox_emit(gen_random_uuid(), 'billing.lost', '{}');
		UPDATE outbox_event SET parked_by = '{kafka}', parked_at = created_at WHERE event_type = 'billing.lost';
		INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, last_error, parked_at) SELECT id, 'kafka', aggregate_id, 9, 'never', now() FROM outbox_event WHERE event_type = 'billing.lost';
		COMMIT`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	const (
		first  = `SELECT id::text FROM process_instance WHERE business_key = 'o-1'`
		second = `SELECT id::text FROM process_instance WHERE business_key = 'o-2'`
		ninth  = `SELECT id::text FROM process_instance WHERE business_key = 'o-9'`
		at     = `SELECT coalesce((SELECT i.status || coalesce((SELECT ' at ' || t.node FROM process_token t WHERE t.instance_id = i.id AND t.state IN ('Created', 'Ready', 'Waiting')), '') FROM process_instance i WHERE i.business_key = 'o-%d'), '')`
		waits  = "00000000-0000-4000-8000-000000000001"
		again  = "00000000-0000-4000-8000-000000000002"
		fails  = "00000000-0000-4000-8000-000000000003"
		policy = `SELECT coalesce(string_agg(attempts || ' by ' || split_part(set_by, ' ', 1), ''), 'none') FROM workflow_policy WHERE pattern = 'billing.'`
		paused = `SELECT (paused_at IS NOT NULL)::text FROM process_instance WHERE business_key = 'o-2'`
		open   = `SELECT count(*)::text FROM outbox_event WHERE event_type = '%s' AND published_at IS NULL AND parked_at IS NULL`
	)
	outer, started := t, false // nobody executes what comes before the first start
	at1, at2, at9 := fmt.Sprintf(at, 1), fmt.Sprintf(at, 2), fmt.Sprintf(at, 9)
	for _, c := range []struct {
		args   []string // one that begins with SELECT is sent to the database
		says   string
		query  string // reads the state before
		after  string // the state afterwards; empty: the command only looks
		client bool   // a role that may enqueue may do this, too
	}{
		{[]string{"hold", waits}, "held\n", `SELECT (held_at IS NOT NULL)::text FROM workflow_run WHERE type = 'billing.waits'`, "true", false},
		{[]string{"let-go", waits}, "let go\n", `SELECT (held_at IS NOT NULL)::text FROM workflow_run WHERE type = 'billing.waits'`, "false", false},
		{[]string{"events", waits}, "held", "", "", false},
		{[]string{"settle-again", again}, "tried again", `SELECT due::text FROM workflow_set_aside WHERE type = 'billing.again'`, "true", false},
		{[]string{"fail-run", fails, "it is no use"}, "to be failed", `SELECT verdict FROM workflow_kept WHERE run = '` + fails + `'`, "failed", false},
		{[]string{"replay-parked", "kafka"}, "1 events are published again\n", `SELECT count(*)::text FROM outbox_event WHERE 'kafka' = ANY (parked_by)`, "0", false},
		{[]string{"replay", "2020-01-01T00:00:00Z", "2200-01-01T00:00:00Z"}, " events are published again\n", fmt.Sprintf(open, "billing.paid"), "1", false},
		{[]string{"policy", "billing.", "--attempts", "7"}, "set; workers read it every second\n", policy, "7 by " + named + "_login_operator", false},
		{[]string{"policy", "billing.", "--drop"}, "dropped\n", policy, "none", false},
		{[]string{"define", file}, "p version 1 is deployed", `SELECT count(*)::text FROM process_definition WHERE name = 'p'`, "1", false},
		{[]string{"start", "p", "--key", "o-1", "--input", `{"order": "o-1"}`}, `"instance": "`, at1, "WAITING at paid", true},
		{[]string{"start", "p", "--key", "o-2", "--input", `{"order": "o-2"}`}, `"instance": "`, at2, "WAITING at paid", true},
		{[]string{"pause-process", second}, "paused\n", paused, "true", false},
		{[]string{"resume-process", second}, "resumed\n", paused, "false", false},
		{[]string{"cancel-process", second, "not wanted"}, "", at2, "CANCELLED", false},
		{[]string{"start", "p", "--key", "o-9", "--input", `{"order": "o-9"}`}, `"instance": "`, at9, "WAITING at paid", true},
		{[]string{"fail", ninth, "--reason", "the ship has sunk"}, "", at9, "FAILED", false},
		{[]string{"message", "paid", "o-1", "--payload", `{"cents": 100}`}, "", at1, "WAITING at open", true},
		{[]string{"signal", "open"}, `"reached": 1`, at1, "WAITING at check", true},
		{[]string{"assign", `SELECT id::text FROM user_task`, "anna"}, "assigned to anna\n", `SELECT coalesce(assignee, '') FROM user_task`, "anna", false},
		{[]string{"join-group", named + "_viewer", "sales"}, "joined\n", `SELECT count(*)::text FROM workflow_member WHERE left_at IS NULL`, "1", false},
		{[]string{"leave-group", named + "_viewer", "sales"}, "left\n", `SELECT count(*)::text FROM workflow_member WHERE left_at IS NULL`, "0", false},
		{[]string{"complete", `SELECT id::text FROM user_task`, "--by", "anna", "--output", `{"m": 2}`}, "", `SELECT state FROM user_task`, "completed", true},
		{[]string{"correct", first, "check", `{"n": 2}`, "she has typed m"}, "corrected\n", `SELECT coalesce(string_agg(value::text || ' ' || reason, ''), '') FROM process_correction`, `{"n": 2} she has typed m`, false},
		{[]string{"retry-incidents", "--process", "p"}, "expression_failed", "", "", false},
		{[]string{"retry-incident", `SELECT id::text FROM incident WHERE resolved_at IS NULL`}, "", at1, "COMPLETED", false},
		{[]string{"events", first}, "to COMPLETED", "", "", false},
	} {
		t.Run(c.args[0], func(t *testing.T) {
			if c.args[0] == "start" && !started {
				started = true
				engineAt(outer, address)
			}
			args := make([]string, len(c.args))
			for k, arg := range c.args {
				if args[k] = arg; strings.HasPrefix(arg, "SELECT ") {
					args[k] = ask(t, arg)
				}
			}
			before := ""
			if c.query != "" {
				before = ask(t, c.query)
			}
			for _, role := range []string{"viewer", "enqueue"} {
				if c.client && role == "enqueue" {
					continue
				}
				want(t, cmdtest.Start(t, as[role], args...), 1, "the role that you are logged in as may not do this", "docs/roles.md says which may")
				if c.query != "" {
					if now := ask(t, c.query); now != before {
						t.Errorf("it was refused to the %s, and now it is %q", role, now)
					}
				}
			}
			want(t, cmdtest.Start(t, as["operator"], args...), 0, c.says)
			if c.query == "" {
				return
			}
			if before == c.after {
				t.Errorf("it is %q before: this shows nothing", before)
			}
			pgtest.Await(t, c.after, func() bool { return ask(t, c.query) == c.after })
		})
	}

	// A client starts a process, and is told that its role may not see the outcome.
	want(t, cmdtest.Start(t, as["enqueue"], "start", "p", "--key", "o-3", "--input", `{"order": "o-3"}`, "--wait", "0"), 0, "enqueued as run ")
	want(t, cmdtest.Start(t, as["enqueue"], "start", "p", "--key", "o-4", "--input", `{"order": "o-4"}`), 1, ": it is enqueued, but this role may not see its outcome: use --wait 0")
	for n := 3; n <= 4; n++ {
		pgtest.Await(t, "its instance", func() bool { return ask(t, fmt.Sprintf(at, n)) == "WAITING at paid" })
	}
}
