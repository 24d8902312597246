package main_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/worker"
)

// engineAt starts a worker that executes commands.
func engineAt(t *testing.T, url string) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	w, err := worker.New(worker.Config{Pool: pool, Prefixes: []string{"graph."}, Mux: worker.NewMux(), Processes: graph.New(pool)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the worker: %v", err)
		}
		pool.Close()
	})
}

// Commands alone can take a process from its start to its end.
func TestProcessByCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	file := save(t, "p.json", `{"process": "p", "version": 1, "start": "paid", "nodes": {
		"paid": {"await": {"message": "paid", "key": "input.order"}, "to": "open"}, "open": {"await": {"signal": "open"}, "to": "check"},
		"check": {"human": {"groups": ["sales"]}, "to": "late"}, "late": {"choose": [{"if": "steps.check.n > 1", "to": "done"}], "else": "done"}, "done": {"end": true}}}`)
	want(t, cmdtest.Start(t, env, "define", file), 0, "p version 1 is deployed")
	want(t, cmdtest.Start(t, env, "start", "p", "--wait", "100ms"), 1, "it is enqueued, but not executed yet: no live worker covers graph.start.v1; none lives at all")
	want(t, cmdtest.Start(t, env, "start", "p", "--wait", "0"), 0, "enqueued as run ")
	engineAt(t, url)

	started, code := cmdtest.Run(t, env, "start", "p", "--key", "o-17", "--input", `{"order": "o-17"}`)
	var instance struct{ Instance string }
	if err := json.Unmarshal([]byte(started.Stdout.String()), &instance); code != 0 || err != nil {
		t.Fatalf("start: %d, %v, %s", code, err, started.Stderr.String())
	}
	at := func(state string) {
		t.Helper()
		pgtest.Await(t, "the instance to be "+state, func() bool {
			return value[string](t, url, `SELECT i.status || coalesce((SELECT ' at ' || t.node FROM process_token t WHERE t.instance_id = i.id AND t.state IN ('Created', 'Ready', 'Waiting')), '')
				FROM process_instance i WHERE i.id = '`+instance.Instance+`'`) == state
		})
	}
	at("WAITING at paid")
	want(t, cmdtest.Start(t, env, "pause-process", instance.Instance), 0, "paused\n")
	want(t, cmdtest.Start(t, env, "pause-process", instance.Instance), 1, "already paused")
	want(t, cmdtest.Start(t, env, "resume-process", instance.Instance), 0, "resumed\n")
	want(t, cmdtest.Start(t, env, "message", "paid", "o-17", "--payload", `{"cents": 100}`), 0)
	at("WAITING at open")
	want(t, cmdtest.Start(t, env, "signal", "open"), 0, `"reached": 1`)
	at("WAITING at check")
	task := value[string](t, url, `SELECT id::text FROM user_task`)
	want(t, cmdtest.Start(t, env, "assign", task, "anna"), 0, "assigned to anna\n")
	want(t, cmdtest.Start(t, env, "complete", task, "--by", "bob", "--output", `{"n"`), 2, `--output="{\"n\"": use a JSON object`)
	want(t, cmdtest.Start(t, env, "complete", task, "--by", "anna", "--output", `{"m": 2}`), 0, task)
	want(t, cmdtest.Start(t, env, "complete", task, "--by", "anna"), 1, "failed: task: "+task+" is completed")
	incident := value[string](t, url, `SELECT id::text FROM incident WHERE resolved_at IS NULL AND instance_id = '`+instance.Instance+`'`) // n is missing
	want(t, cmdtest.Start(t, env, "correct", instance.Instance, "check", `{"n": 2}`, "she has typed m"), 0, "corrected\n")
	want(t, cmdtest.Start(t, env, "retry-incident", incident), 0, instance.Instance)
	at("COMPLETED")
	events, _ := cmdtest.Run(t, env, "events", instance.Instance)
	for _, what := range []string{"node.entered", "incident.opened", "to COMPLETED"} {
		if !strings.Contains(events.Stdout.String(), what) {
			t.Errorf("no %s in\n%s", what, events.Stdout.String())
		}
	}
	if _, err := connect(t, url).Exec(t.Context(), `DROP VIEW process_stuck`); err != nil {
		t.Fatal(err)
	}
	want(t, cmdtest.Start(t, env, "show", "stuck"), 1, `workflowctl: relation "process_stuck" does not exist`)
	want(t, cmdtest.Start(t, env, "cancel-process", instance.Instance, "not wanted"), 1, "too late: COMPLETED")
	want(t, cmdtest.Start(t, env, "cancel-process", "17", "not wanted"), 2, `INSTANCE="17": use an id, a uuid`)
	want(t, cmdtest.Start(t, env, "restart", instance.Instance), 1, "failed: instance: "+instance.Instance+" is COMPLETED; only a FAILED instance can be started again")
	want(t, cmdtest.Start(t, env, "start", "p", "--key", "o-17", "--again", "--input", `{"order": "o-18"}`), 0, `"after": "`+instance.Instance+`"`)
	want(t, cmdtest.Start(t, env, "start", "p", "--again"), 1, "again: there is no key to use again")
	want(t, cmdtest.Start(t, env, "complete", task), 1, "not found among the tasks of this role and its groups; a role that may complete any task")
	want(t, cmdtest.Start(t, env, "events", task), 1, "there is no such run or instance")

	id := value[string](t, url, `INSERT INTO workflow_run (type) VALUES ('billing.x') RETURNING id::text`)
	want(t, cmdtest.Start(t, env, "hold", id), 0, "held\n")
	want(t, cmdtest.Start(t, env, "hold", id), 1, "already held")
	want(t, cmdtest.Start(t, env, "let-go", id), 0, "let go\n")
	want(t, cmdtest.Start(t, env, "let-go", id), 1, "not held: pending")
	want(t, cmdtest.Start(t, env, "events", id), 0, "created", "held", "resumed")
	want(t, cmdtest.Start(t, env, "settle-again", id), 1, "not set aside: pending")
	want(t, cmdtest.Start(t, env, "fail-run", id, "why not"), 1, "not kept: pending")
	want(t, cmdtest.Start(t, env, "replay", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"), 1, "0 events are published again")
	want(t, cmdtest.Start(t, env, "correct", id, "x", "{", "why"), 2, `VALUE="{": use JSON, with quotes around a text`)
}
