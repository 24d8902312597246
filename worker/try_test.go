package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A handler with effects and events can be tried without a worker: they are in the test's transaction, and gone with it; what fails has none.
func TestTry(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE ledger (run uuid, cents int CHECK (cents > 0))`)
	wrapped := 0
	mux.Use(func(next worker.Handler) worker.Handler {
		return func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
			wrapped++
			return next(ctx, payload)
		}
	})
	type charge struct{ Cents int }
	worker.Handle(mux, "test.charge.v1", func(ctx context.Context, in charge) (string, error) {
		if in.Cents == 0 {
			return "", run.Permanent(errors.New("nothing to charge"))
		}
		err := worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1, $2)`, run.FromContext(ctx).ID, in.Cents)
			return err
		})
		return "charged", errors.Join(err, worker.Emit(ctx, outbox.Event{Type: "charged", Payload: in}))
	})
	in := func(try func(tx pgx.Tx)) {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		try(tx)
	}
	in(func(tx pgx.Tx) {
		result, err := worker.Try(t.Context(), tx, mux, run.Info{Type: "test.charge.v1"}, charge{100})
		if string(result) != `"charged"` || err != nil {
			t.Errorf("it returned %s, %v", result, err)
		}
		var both int
		if err := tx.QueryRow(t.Context(), `SELECT count(*) FROM ledger l JOIN outbox_event e ON e.aggregate_id = l.run AND e.event_type = 'charged'`).Scan(&both); err != nil || both != 1 {
			t.Errorf("%d effects with their event, want 1; %v", both, err)
		}
	})
	in(func(tx pgx.Tx) {
		if _, err := worker.Try(t.Context(), tx, mux, run.Info{Type: "test.charge.v1"}, charge{}); !run.IsPermanent(err) {
			t.Errorf("an error of the handler: %v", err)
		}
		if _, err := worker.Try(t.Context(), tx, mux, run.Info{Type: "test.charge.v1"}, map[string]string{"Cents": "x"}); run.Code(err) != settling.CodePayload {
			t.Errorf("a payload that does not fit: %v", err)
		}
		if _, err := worker.Try(t.Context(), tx, mux, run.Info{Type: "test.other.v1"}, charge{}); err == nil {
			t.Error("a type without a handler: no error")
		}
		if _, err := worker.Try(t.Context(), tx, mux, run.Info{Type: "test.charge.v1"}, charge{-1}); err == nil {
			t.Error("an effect that fails: no error")
		}
	})
	var left int
	if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM ledger) + (SELECT count(*) FROM outbox_event) + (SELECT count(*) FROM workflow_run)`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows are left, %v", left, err)
	}
	if wrapped != 4 {
		t.Errorf("the middleware was called %d times, want 4", wrapped)
	}
}
