package main_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// say posts a body to /complete.
func say(t *testing.T, p *cmdtest.Process, body string) (int, string) {
	t.Helper()
	response, err := http.Post("http://"+address(t, p)+"/complete", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// A program that exits with 202 hands its run on, and knows its token. POST /complete accepts an outcome with
// that token, and refuses everything else with a message. Nothing of that is logged.
func TestComplete(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	dir := t.TempDir()
	program, file := filepath.Join(dir, "away"), filepath.Join(dir, "handlers.yaml")
	for path, text := range map[string]string{
		program: "#!/bin/sh\nprintf %s $WORKFLOW_TOKEN > $0.new && mv $0.new $0.$WORKFLOW_RUN_ID\ncase $(cat) in *slow*) sleep 1;; esac\nexit 202\n",
		file:    "default.away.: {program: " + program + "}\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_HTTP_COMPLETE=true", "WORKER_HANDLERS=" + file, "WORKER_POLL_INTERVAL=50ms", "WORKER_CLEANUP_EVERY=0", "WORKER_LOG_LEVEL=debug"})
	handedOn := func(payload string) (id, token string) {
		id = uuid.NewString()
		exec(t, url, `INSERT INTO workflow_run (id, type, payload) VALUES ($1, 'default.away.x', $2)`, id, payload)
		pgtest.Await(t, "the program to run", func() bool {
			text, err := os.ReadFile(program + "." + id)
			token = string(text)
			return err == nil
		})
		return id, token
	}
	id, token := handedOn(`{}`)
	pgtest.Await(t, "it to be handed on", func() bool { return count(t, url, `id IN (SELECT run FROM workflow_accepted)`) == 1 })
	body := func(run, token, rest string) string {
		return fmt.Sprintf(`{"run": %q, "token": %q%s}`, run, token, rest)
	}
	const other = "7d1f0f0e-0000-4000-8000-000000000001"
	for _, c := range []struct {
		body string
		want int
		says string
	}{
		{body(id, token, `, "result": {"s3cret": 1}, "error": {}`), 400, "a result and an error"},
		{body(id, token, `, "more": "s3cret"`), 400, "not a JSON object of run, token, and result or error"},
		{body(id, token, `, "result": {"a": 1, "a": "s3cret"}`), 400, "the body is not"},
		{body(id, token, `, "error": {"code": "s3cret code"}`), 400, `error: "code" is not what may stand there`},
		{body("s3cret", token, ``), 400, "run is not an id"},
		{body(id, "s3cret", ``), 400, "token is not a token"},
		{`s3cret`, 400, "not a JSON object"},
		{`{"result": "` + strings.Repeat("s3cret", 300000) + `"}`, 413, "the body has more than 1114112 bytes"},
		{body(other, token, ``), 404, "there is no run " + other},
		{body(id, other, ``), 403, "not leased with this token"},
		{body(id, token, `, "result": {"s3cret": [1, 2]}`), 200, "completed\n"},
		{body(id, token, `, "result": {"s3cret": [1, 2]}, "error": null`), 200, "completed already\n"},
		{body(id, token, `, "error": {"code": "NO"}`), 409, "another outcome"},
	} {
		if status, text := say(t, p, c.body); status != c.want || !strings.Contains(text, c.says) || strings.Contains(text, "s3cret") {
			t.Errorf("%.100s: %d %s, want %d, %s", c.body, status, text, c.want, c.says)
		}
	}
	pgtest.Await(t, "it to be recorded", func() bool { return count(t, url, `status = 'succeeded' AND result = '{"s3cret": [1, 2]}'`) == 1 })
	// A request that arrives before the program has ended waits for its end.
	quick, its := handedOn(`{"slow": true}`)
	if status, text := say(t, p, body(quick, its, `, "error": {"code": "NO", "permanent": true}`)); status != 200 {
		t.Errorf("before the program has ended: %d %s", status, text)
	}
	pgtest.Await(t, "it to be recorded", func() bool { return count(t, url, `status = 'failed' AND error->>'code' = 'NO'`) == 1 })
	if status, _, header := ask(t, p, "GET", "/complete", ""); status != 405 || header.Get("Allow") != "POST" {
		t.Errorf("GET: %d, Allow %s", status, header.Get("Allow"))
	}
	if _, metrics := get(t, p, "/metrics"); !strings.Contains(metrics, `workflow_settled_total{outcome="elsewhere"} 2`) || !strings.Contains(metrics, "workflow_elsewhere ") {
		t.Error("metrics do not tell of what was handed on")
	}
	for _, secret := range []string{"s3cret", token, its} {
		if strings.Contains(p.Stderr.String(), secret) {
			t.Errorf("the log has %s", secret)
		}
	}
}

// While somebody has one run locked, others can be completed, however many requests name the locked run.
func TestCompleteBesideALock(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := cmdtest.Start(t, []string{"DATABASE_URL=" + url, "WORKER_HTTP_ADDR=127.0.0.1:0", "WORKER_HTTP_COMPLETE=true", "WORKER_CLEANUP_EVERY=0"})
	held, token := uuid.New(), uuid.New()
	exec(t, url, `INSERT INTO workflow_run (id, type) VALUES ($1, 'other.x')`, held)
	exec(t, url, `UPDATE workflow_run SET status = 'leased', lease_token = $2, lease_no = 1, attempt = 1, lease_until = now() + interval '1 hour', leased_by = 'w', started_at = now() WHERE id = $1`, held, token)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var its string
	if err := conn.QueryRow(t.Context(), `SELECT workflow_handed($1, $2)`, held, token).Scan(&its); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `BEGIN; SELECT FROM workflow_run FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	said := make(chan int, 3)
	for range cap(said) {
		go func() {
			status, _ := say(t, p, fmt.Sprintf(`{"run": %q, "token": %q}`, held, its))
			said <- status
		}()
	}
	pgtest.Await(t, "one of them to wait for the lock", func() bool {
		return count(t, url, `EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database())`) == 1
	})
	begun := time.Now()
	for range 3 {
		if status, text := say(t, p, `{"run": "7d1f0f0e-0000-4000-8000-000000000001", "token": "7d1f0f0e-0000-4000-8000-000000000001"}`); status != 404 {
			t.Errorf("another one: %d %s", status, text)
		}
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("others have waited for %s", took)
	}
	for range cap(said) {
		if status := <-said; status != 503 {
			t.Errorf("the one that is held: %d, want 503", status)
		}
	}
	if _, err := conn.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
}

// POST /complete is off by default, and turning it on requires an address.
func TestCompleteIsOff(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_HTTP_ADDR=127.0.0.1:0"})
	if status, _ := say(t, p, `{}`); status != 405 {
		t.Errorf("%d, want 405", status)
	}
	p = cmdtest.Start(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "WORKER_HTTP_COMPLETE=true"})
	wantExit(t, p, 2, "WORKER_HTTP_COMPLETE=\"true\": there is no address")
}
