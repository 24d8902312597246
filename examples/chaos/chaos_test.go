package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A bench is a database with a chaos worker in this process.
type bench struct {
	pool    *pgxpool.Pool
	execLog string
	stop    func() // stops the worker, without a grace period
}

// setup starts a worker on a new database, or on pool if it is not nil.
func setup(t *testing.T, pool *pgxpool.Pool) *bench {
	t.Helper()
	if pool == nil {
		pool = pgtest.New(t)
	}
	pgtest.Attempts(t, pool, 3)
	b := &bench{pool: pool, execLog: filepath.Join(t.TempDir(), "exec.log")}
	engine := graph.New(pool)
	mux, err := newMux(pool, engine, b.execLog)
	if err != nil {
		t.Fatal(err)
	}
	s := settings{Prefixes: []string{"chaos.", "graph."}, Name: "chaos", PollInterval: 50 * time.Millisecond, Lease: 2 * time.Second,
		ShutdownGrace: -1, BackoffBase: 10 * time.Millisecond, BackoffCap: 20 * time.Millisecond}
	log, err := newLogger("text")
	if err != nil {
		t.Fatal(err)
	}
	if err := createTable(t.Context(), pool, log, 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx, s.config(pool, mux, engine, log)) }()
	b.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		ended <- nil
	}
	t.Cleanup(b.stop)
	return b
}

func enqueue(t *testing.T, pool *pgxpool.Pool, n run.New) uuid.UUID {
	t.Helper()
	done, err := run.Enqueue(t.Context(), pool, n)
	if err != nil {
		t.Fatal(err)
	}
	return done.ID
}

func read(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) *run.Run {
	t.Helper()
	r, err := run.Read(t.Context(), pool, id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// await returns the run once it has the status.
func await(t *testing.T, pool *pgxpool.Pool, id uuid.UUID, status run.Status) (r *run.Run) {
	t.Helper()
	pgtest.Await(t, "the run is "+string(status), func() bool {
		r = read(t, pool, id)
		return r.Status == status
	})
	return r
}

// lines returns the execution log of one run without its varying fields, once it has n lines.
func (b *bench) lines(t *testing.T, id uuid.UUID, n int) (lines []string) {
	t.Helper()
	form := regexp.MustCompile(`^(start|end),` + id.String() + `,(\d+),chaos-[0-9a-f]{8},\d{13},(\w*)$`)
	pgtest.Await(t, "the execution log is complete", func() bool {
		text, err := os.ReadFile(b.execLog)
		if err != nil {
			t.Fatal(err)
		}
		lines = nil
		for line := range strings.Lines(string(text)) {
			if m := form.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
				lines = append(lines, strings.Join(m[1:], ","))
			}
		}
		return len(lines) >= n
	})
	return lines
}

// Each handler that returns does what its name says: it succeeds, fails, is retried or gives up at once. The
// execution log agrees.
func TestOutcomes(t *testing.T) {
	b := setup(t, nil)
	tests := []struct {
		typ, payload string
		status       run.Status
		attempts     int
		code         string // of the last error
		log          []string
	}{
		{"chaos.sleep", `{"ms": 5}`, run.Succeeded, 1, "", []string{"start,1,", "end,1,ok"}},
		{"chaos.fail", `{"times": 1}`, run.Succeeded, 2, "", []string{"start,1,", "end,1,error", "start,2,", "end,2,ok"}},
		{"chaos.fail", `{"times": 9}`, run.Failed, 3, settling.CodeHandler, nil},
		{"chaos.fail", `{"times": 9, "permanent": true}`, run.Failed, 1, settling.CodeHandler, []string{"start,1,", "end,1,error"}},
		{"chaos.panic", `{}`, run.Failed, 3, settling.CodePanic, []string{"start,1,", "end,1,panic", "start,2,", "end,2,panic", "start,3,", "end,3,panic"}},
		{"chaos.ignorecancel", `{"ms": 5}`, run.Succeeded, 1, "", nil},
		{"chaos.effect", `{"ms": 5, "key": "k"}`, run.Succeeded, 1, "", nil},
		{"chaos.leak", `{"mb": 2}`, run.Succeeded, 1, "", nil},
		{"chaos.holdconn", `{"ms": 5}`, run.Succeeded, 1, "", nil},
		{"chaos.result", `{"kind": "nul"}`, run.Failed, 1, settling.CodeResult, nil},
		{"chaos.result", `{"kind": "surrogate"}`, run.Failed, 1, settling.CodeResult, nil},
		{"chaos.result", `{"kind": "big"}`, run.Failed, 1, settling.CodeResult, nil},
		{"chaos.result", `{"kind": "nan"}`, run.Failed, 1, settling.CodeResult, nil},
		{"chaos.result", `{"kind": "deep"}`, run.Failed, 1, settling.CodeResult, nil},
		{"chaos.result", `{"kind": "nice"}`, run.Failed, 1, settling.CodeHandler, nil},
	}
	for _, test := range tests {
		t.Run(test.typ+test.payload, func(t *testing.T) {
			id := enqueue(t, b.pool, run.New{Type: test.typ, Payload: json.RawMessage(test.payload)})
			r := await(t, b.pool, id, test.status)
			if r.Attempt != test.attempts {
				t.Errorf("attempts = %d, want %d", r.Attempt, test.attempts)
			}
			if got := codeOf(t, r); test.status == run.Failed && got != test.code {
				t.Errorf("code = %q, want %q: %s", got, test.code, *r.LastError)
			}
			if test.log != nil {
				if got := b.lines(t, id, len(test.log)); !slices.Equal(got, test.log) {
					t.Errorf("execution log = %q, want %q", got, test.log)
				}
			}
		})
	}
}

func codeOf(t *testing.T, r *run.Run) string {
	t.Helper()
	var e struct{ Code string }
	if r.Error != nil {
		if err := json.Unmarshal(r.Error, &e); err != nil {
			t.Fatal(err)
		}
	}
	return e.Code
}

// An effect is one row that names its run, lease and key, together with the requested events.
func TestEffect(t *testing.T) {
	b := setup(t, nil)
	id := enqueue(t, b.pool, run.New{Type: "chaos.effect", Payload: effect{Key: "once", Emit: 2}})
	r := await(t, b.pool, id, run.Succeeded)
	var n int
	if err := b.pool.QueryRow(t.Context(), `
		SELECT count(*)
		FROM chaos_effect
		WHERE run_id = $1 AND lease_no = $2 AND key = 'once'`, id, r.LeaseNo).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
	if err := b.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_event WHERE aggregate_id = $1`, id).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 2 {
		t.Errorf("%d events, want 2", n)
	}
}

// A cancelled effect leaves no row, and its handler sees why it ended.
func TestCancelledEffect(t *testing.T) {
	b := setup(t, nil)
	id := enqueue(t, b.pool, run.New{Type: "chaos.effect", Payload: effect{nap: nap{MS: 60_000}, Key: "never"}})
	b.lines(t, id, 1)
	if err := run.Cancel(t.Context(), b.pool, id, "test"); err != nil {
		t.Fatal(err)
	}
	if got, want := b.lines(t, id, 2), []string{"start,1,", "end,1,cancelled"}; !slices.Equal(got, want) {
		t.Errorf("execution log = %q, want %q", got, want)
	}
	var n int
	if err := b.pool.QueryRow(t.Context(), `SELECT count(*) FROM chaos_effect`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Errorf("%d rows, want 0", n)
	}
}

// A handler that ignores its cancel continues to its end, and the run stays cancelled.
func TestIgnoreCancel(t *testing.T) {
	b := setup(t, nil)
	id := enqueue(t, b.pool, run.New{Type: "chaos.ignorecancel", Payload: nap{MS: 1500}})
	b.lines(t, id, 1)
	if err := run.Cancel(t.Context(), b.pool, id, "test"); err != nil {
		t.Fatal(err)
	}
	if got, want := b.lines(t, id, 2), []string{"start,1,", "end,1,ok"}; !slices.Equal(got, want) {
		t.Errorf("execution log = %q, want %q", got, want)
	}
	await(t, b.pool, id, run.Cancelled)
}

// An external server receives run, lease and attempt. Its refusal is an ordinary failure.
func TestExternal(t *testing.T) {
	b := setup(t, nil)
	bodies := make(chan call, 2)
	refusals := 1
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		var c call
		if err := json.Unmarshal(data, &c); err != nil {
			t.Error(err)
		}
		bodies <- c
		if refusals > 0 {
			refusals--
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	t.Cleanup(server.Close)
	id := enqueue(t, b.pool, run.New{Type: "chaos.external", Payload: target{URL: server.URL}})
	await(t, b.pool, id, run.Succeeded)
	for n := range 2 {
		want := call{RunID: id.String(), LeaseNo: int64(n + 1), Attempt: n + 1}
		if got := <-bodies; got != want {
			t.Errorf("call %d = %+v, want %+v", n+1, got, want)
		}
	}
}

// Each visit of a step leaves a row that names its process and node, and so does its undo. A reluctant undo succeeds
// when it is retried often enough.
func TestSteps(t *testing.T) {
	b := setup(t, nil)
	d, err := graph.Parse([]byte(`{"process": "regret", "version": 1, "start": "A", "nodes": {
		"A": {"do": "chaos.step", "in": {"tag": "input.tag", "node": "'A'", "n": "'A' in steps ? steps.A.n + 1.0 : 1.0"}, "undo": "chaos.undo", "to": "X"},
		"X": {"choose": [{"if": "steps.A.n < 3", "to": "A"}], "else": "B"},
		"B": {"do": "chaos.step", "in": {"tag": "input.tag", "node": "'B'", "fail": "'declined'"}}}}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := graph.Deploy(t.Context(), b.pool, d); err != nil {
		t.Fatal(err)
	}
	id := uuid.New()
	enqueue(t, b.pool, run.New{Type: "graph.start.v1", Payload: map[string]any{"process": "regret", "id": id, "input": map[string]string{"tag": "x"}}})
	var status string
	pgtest.Await(t, "the process to fail", func() bool {
		if err := b.pool.QueryRow(t.Context(), `SELECT coalesce((SELECT status FROM process_instance WHERE id = $1), '')`, id).Scan(&status); err != nil {
			t.Fatal(err)
		}
		return status == string("FAILED")
	})
	var got string
	if err := b.pool.QueryRow(t.Context(), `
		SELECT string_agg(concat_ws(' ', e.key, r.result->>'n'), ', ' ORDER BY e.at)
		FROM chaos_effect e LEFT JOIN workflow_run r ON r.id = coalesce(e.undoes, e.run_id)`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := "x/A 1, x/A 2, x/A 3, undo x/A 3, undo x/A 2, undo x/A 1"; got != want {
		t.Errorf("effects: %s, want %s", got, want)
	}
}

// The connections that handlers hold are the user's: even if all of them are taken, the worker still settles.
func TestHoldConn(t *testing.T) {
	b := setup(t, nil)
	all := b.pool.Config().MaxConns
	ids := make([]uuid.UUID, 0, all)
	for range all {
		ids = append(ids, enqueue(t, b.pool, run.New{Type: "chaos.holdconn", Payload: nap{MS: 1500}}))
	}
	pgtest.Await(t, "the pool is empty", func() bool { return b.pool.Stat().AcquiredConns() == all })
	for _, id := range ids {
		await(t, b.pool, id, run.Succeeded)
	}
}

// Any number of processes may create the table at the same time.
func TestCreateTable(t *testing.T) {
	pool := pgtest.New(t)
	errs := make(chan error)
	for range 8 {
		go func() {
			errs <- pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
				tx, err := c.Begin(t.Context())
				if err != nil {
					return err
				}
				if err := createIn(t.Context(), true)(tx); err != nil {
					return err
				}
				return tx.Commit(t.Context())
			})
		}()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
