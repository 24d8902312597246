package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// The handlers file registers report.sh for a type: it sums a day's sales, is retried while the file is missing, and
// fails at once on a payload or file it cannot read.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "sales"), 0o755); err != nil {
		t.Fatal(err)
	}
	for day, sales := range map[string]string{
		"2026-01-31": "cup,2,500\nplate,5,300\ncup,1,450\n",
		"2026-02-01": "cup,two,500\n",
		"2026-02-02": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, "sales", day+".csv"), []byte(sales), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	home, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("SHOP_HOME", home)
	t.Setenv("SHOP_DIR", dir)
	bindings, err := handlers.Load("handlers.yaml")
	if err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	if err := handlers.Register(mux, bindings, slog.Default()); err != nil {
		t.Fatal(err)
	}
	pool := pgtest.New(t)
	pgtest.Attempts(t, pool, 3)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- worker.Run(ctx, worker.Config{Pool: pool, Mux: mux, Prefixes: []string{"report."},
			PollInterval: 50 * time.Millisecond, Backoff: run.Backoff{Base: 10 * time.Millisecond}})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	for _, test := range []struct {
		payload  string
		status   run.Status
		attempts int
		result   string
	}{
		{`{"day": "2026-01-31"}`, run.Succeeded, 1, `{"day": "2026-01-31", "best": "plate", "cents": 2950, "pieces": 8}`},
		{`{"day": "2026-02-02"}`, run.Succeeded, 1, `{"day": "2026-02-02", "best": "", "cents": 0, "pieces": 0}`},
		{`{"day": "2026-02-01"}`, run.Failed, 1, ""},
		{`{"day": "2026-02-03"}`, run.Failed, 3, ""},
		{`{"day": "../secret"}`, run.Failed, 1, ""},
		{`{}`, run.Failed, 1, ""},
	} {
		enqueued, err := run.Enqueue(t.Context(), pool, run.New{Type: "report.sales.v1", Payload: json.RawMessage(test.payload)})
		if err != nil {
			t.Fatal(err)
		}
		r := await(t, pool, enqueued.ID, test.status)
		if r.Attempt != test.attempts || string(r.Result) != test.result {
			t.Errorf("%s: %d attempts, result %s; want %d, %s", test.payload, r.Attempt, r.Result, test.attempts, test.result)
		}
	}
}

func await(t *testing.T, db run.DB, id uuid.UUID, status run.Status) (r *run.Run) {
	t.Helper()
	pgtest.Await(t, "the run is "+string(status), func() bool {
		var err error
		if r, err = run.Read(t.Context(), db, id); err != nil {
			t.Fatal(err)
		}
		return r.Status == status
	})
	return r
}
