package worker

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// An idle worker is not taken for a stalled one, however long its poll interval.
func TestStallLimit(t *testing.T) {
	w := &Worker{config: Config{Lease: 2 * time.Second, PollInterval: time.Hour}}
	if got := w.stallLimit(); got <= time.Hour {
		t.Errorf("stall limit = %s, want more than the poll interval", got)
	}
}

// Effects that go on after their transaction's time, whatever context they use, are cut off,
// and that counts as the handler's failure.
func TestEffectTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := NewMux()
	Handle(mux, "test.hang.v1", func(ctx context.Context, _ struct{}) (int, error) {
		return 1, InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		})
	})
	w, err := New(Config{Pool: pool, Mux: mux, Prefixes: []string{"test."}, ShutdownGrace: -1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	w.effectTimeout = 300 * time.Millisecond
	e, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.hang.v1", MaxAttempts: 1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	var r *run.Run
	pgtest.Await(t, "the run to fail", func() bool { r, err = run.Read(t.Context(), pool, e.ID); return err != nil || r.Status.Finished() })
	cancel()
	_ = <-ended
	if err != nil || r.Status != run.Failed || !strings.Contains(*r.LastError, "took too long") {
		t.Errorf("run is %v, %v; want failed for the time it took", r, err)
	}
}

// Effects that hang on something of their own, not on the database, take nobody's turn for
// ever: others are settled, they count as stuck, and the worker can stop.
func TestHungEffects(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := NewMux()
	hang := make(chan bool)
	defer close(hang)
	Handle(mux, "test.hang.v1", func(ctx context.Context, _ struct{}) (int, error) {
		return 1, InSettle(ctx, func(pgx.Tx) error { <-hang; return nil })
	})
	Handle(mux, "test.good.v1", func(ctx context.Context, _ struct{}) (int, error) {
		return 1, InSettle(ctx, func(pgx.Tx) error { return nil })
	})
	w, err := New(Config{Pool: pool, Mux: mux, Prefixes: []string{"test."}, ShutdownGrace: -1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	w.effectTimeout = 300 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	for range soloSettlers {
		if _, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.hang.v1", MaxAttempts: 1}); err != nil {
			t.Fatal(err)
		}
	}
	pgtest.Await(t, "effects to be left behind", func() bool { return w.jobs.stuckCount() == soloSettlers })
	e, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.good.v1"})
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Await(t, "another run to succeed", func() bool {
		r, err := run.Read(t.Context(), pool, e.ID)
		return err != nil || r.Status == run.Succeeded
	})
	cancel()
	select {
	case _ = <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the worker does not stop")
	}
}
