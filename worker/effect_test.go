package worker_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// ledger returns a database with a table for effects, in which each n stands once.
func ledger(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	execute(t, pool, `CREATE TABLE ledger (n int UNIQUE DEFERRABLE INITIALLY IMMEDIATE)`)
	return pool
}

func booked(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return query[int](t, pool, `SELECT count(*) FROM ledger`)
}

// book is an effect that enters n.
func book(ctx context.Context, n int) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1)`, n)
		return err
	}
}

// effects registers a handler that does nothing but hand over effects.
func effects(mux *worker.Mux, typ string, list func(context.Context) []func(pgx.Tx) error) {
	handle(mux, typ, func(ctx context.Context) error {
		for _, effect := range list(ctx) {
			if err := worker.InSettle(ctx, effect); err != nil {
				return err
			}
		}
		return nil
	})
}

// An effect that fails, in whatever way, takes everything in its transaction with it and
// counts as the handler's failure; nothing is settled without its effects.
func TestEffectFails(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		effect func(context.Context, pgx.Tx) error
		code   string
		want   string
	}{
		{"error", func(context.Context, pgx.Tx) error { return errors.New("no") }, settling.CodeHandler, "effect: no"},
		{"panic", func(context.Context, pgx.Tx) error { panic("ouch") }, settling.CodePanic, "panic: ouch"},
		{"goexit", func(context.Context, pgx.Tx) error { runtime.Goexit(); return nil }, settling.CodeHandler, "Goexit"},
		{"commit", func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }, settling.CodeHandler, "ended by the worker"},
		{"rollback", func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }, settling.CodeHandler, "ended by the worker"},
		{"rollback by SQL", func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `ROLLBACK`)
			return err
		}, settling.CodeHandler, "it ended the settle transaction"},
		{"ignored error", func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
			return nil
		}, settling.CodeHandler, "its error was ignored"},
		{"unique", func(ctx context.Context, tx pgx.Tx) error { return book(ctx, 1)(tx) }, settling.CodeHandler, "SQLSTATE 23505"},
		{"deferred unique", func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `SET CONSTRAINTS ALL DEFERRED`); err != nil {
				return err
			}
			return book(ctx, 1)(tx)
		}, settling.CodeHandler, "SQLSTATE 23505"},
	}
	pool := ledger(t)
	execute(t, pool, `INSERT INTO ledger VALUES (1)`)
	mux := worker.NewMux()
	ids := make([]uuid.UUID, len(cases))
	for i, c := range cases {
		typ := "test." + strings.ReplaceAll(strings.ToLower(c.name), " ", "_")
		effects(mux, typ, func(ctx context.Context) []func(pgx.Tx) error {
			return []func(pgx.Tx) error{book(ctx, 100+i), func(tx pgx.Tx) error { return c.effect(ctx, tx) }}
		})
		ids[i] = add(t, pool, run.New{Type: typ, MaxAttempts: 2})
	}
	w, _ := work(t, pool, mux, nil)
	for i, c := range cases {
		r := finished(t, pool, ids[i])
		if f := failureOf(t, r); r.Status != run.Failed || r.Attempt != 2 || f.Code != c.code || !strings.Contains(f.Message, c.want) {
			t.Errorf("%s: run is %s after %d attempts, %s: %s; want failed after 2, %s: %s", c.name, r.Status, r.Attempt, f.Code, f.Message, c.code, c.want)
		}
	}
	if n := booked(t, pool); n != 1 {
		t.Errorf("%d entries, want only the one that was there", n)
	}
	pgtest.Await(t, "all slots to be free", func() bool { return w.InFlight() == 0 })
}

// A permanent error of an effect fails the run at once; Again puts it off uncharged.
func TestEffectDecides(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var calls atomic.Int32
	effects(mux, "test.permanent.v1", func(context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(pgx.Tx) error { return fmt.Errorf("book: %w", run.Permanent(errors.New("closed"))) }}
	})
	effects(mux, "test.again.v1", func(context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(pgx.Tx) error {
			if calls.Add(1) == 1 {
				return run.Again(0)
			}
			return nil
		}}
	})
	permanent, again := enqueue(t, pool, "test.permanent.v1", empty{}), enqueue(t, pool, "test.again.v1", empty{})
	work(t, pool, mux, nil)
	if r := finished(t, pool, permanent); r.Status != run.Failed || r.Attempt != 1 || *r.LastError != "effect: book: closed" {
		t.Errorf("permanent: run is %s after %d attempts, %s; want failed after 1", r.Status, r.Attempt, *r.LastError)
	}
	if r := finished(t, pool, again); r.Status != run.Succeeded || r.Attempt != 1 || r.Postponed != 1 {
		t.Errorf("again: run is %s after %d attempts, postponed %d; want succeeded, 1, 1", r.Status, r.Attempt, r.Postponed)
	}
}

// A deadlock, a serialization failure or a killed connection in the settle transaction
// repeats its effects, not the handler, and is charged to nobody.
func TestEffectIsRepeated(t *testing.T) {
	t.Parallel()
	raised := func(code string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'forced' USING ERRCODE = '`+code+`'; END $$`)
			return err
		}
	}
	cases := map[string]func(context.Context, pgx.Tx) error{
		"closed": func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(errors.New("gone"), tx.Conn().Close(ctx))
		},
		"deadlock":      raised("40P01"),
		"serialization": raised("40001"),
		"killed": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return err
		},
	}
	pool := ledger(t)
	mux := worker.NewMux()
	var starts, calls atomic.Int32
	ids := map[string]uuid.UUID{}
	for name, trouble := range cases {
		var tries atomic.Int32
		n := len(ids)
		effects(mux, "test."+name, func(ctx context.Context) []func(pgx.Tx) error {
			starts.Add(1)
			return []func(pgx.Tx) error{book(ctx, n), func(tx pgx.Tx) error {
				calls.Add(1)
				if tries.Add(1) <= 2 {
					return trouble(ctx, tx)
				}
				return nil
			}}
		})
		ids[name] = enqueue(t, pool, "test."+name, empty{})
	}
	work(t, pool, mux, nil)
	for name, id := range ids {
		if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || r.LeaseNo != 1 {
			t.Errorf("%s: run is %s, attempt %d, lease %d; want succeeded, 1, 1", name, r.Status, r.Attempt, r.LeaseNo)
		}
	}
	if n := booked(t, pool); starts.Load() != 4 || calls.Load() != 12 || n != 4 {
		t.Errorf("%d starts, %d calls of effects, %d entries; want 4, 12, 4", starts.Load(), calls.Load(), n)
	}
}

// Effects are not executed when the handler fails, nor when the lease has been lost, and
// neither are events appended.
func TestEffectsAreDropped(t *testing.T) {
	t.Parallel()
	pool := ledger(t)
	mux := worker.NewMux()
	var calls atomic.Int32
	both := func(ctx context.Context) error {
		return errors.Join(worker.InSettle(ctx, func(pgx.Tx) error { calls.Add(1); return nil }),
			worker.Emit(ctx, outbox.Event{Type: "test.never", Payload: 1}))
	}
	handle(mux, "test.fails.v1", func(ctx context.Context) error { return errors.Join(both(ctx), errors.New("no")) })
	handle(mux, "test.loses.v1", func(ctx context.Context) error {
		execute(t, pool, `UPDATE workflow_run SET status = 'pending', run_at = now() + interval '1 hour' WHERE id = $1`, run.FromContext(ctx).ID)
		return both(ctx)
	})
	var s seen
	work(t, pool, mux, s.observe)
	fails := add(t, pool, run.New{Type: "test.fails.v1", MaxAttempts: 1})
	loses := enqueue(t, pool, "test.loses.v1", empty{})
	finished(t, pool, fails)
	pgtest.Await(t, "the stale outcome to be refused", func() bool { return s.get(&s.refused) == 1 })
	if r := read(t, pool, loses); r.Status != run.Pending {
		t.Errorf("run that was taken away is %s, want pending", r.Status)
	}
	if n := query[int](t, pool, `SELECT count(*) FROM outbox_event`); n != 0 || calls.Load() != 0 {
		t.Errorf("%d events, %d effects; want none", n, calls.Load())
	}
}

// What a handler has left behind can no longer hand over effects, nor use the transaction.
func TestTooLateForEffects(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var kept context.Context
	var leaked pgx.Tx
	handle(mux, "test.leak.v1", func(ctx context.Context) error {
		kept = ctx
		return worker.InSettle(ctx, func(tx pgx.Tx) error { leaked = tx; return nil })
	})
	_, stop := work(t, pool, mux, nil)
	finished(t, pool, enqueue(t, pool, "test.leak.v1", empty{}))
	_ = stop()
	if err := worker.InSettle(kept, func(pgx.Tx) error { return nil }); !errors.Is(err, worker.ErrNoRun) {
		t.Errorf("InSettle = %v, want %v", err, worker.ErrNoRun)
	}
	if err := worker.Emit(kept, outbox.Event{Type: "test.late"}); !errors.Is(err, worker.ErrNoRun) {
		t.Errorf("Emit = %v, want %v", err, worker.ErrNoRun)
	}
	if err := worker.InSettle(t.Context(), nil); !errors.Is(err, worker.ErrNoRun) {
		t.Errorf("InSettle outside of a handler = %v, want %v", err, worker.ErrNoRun)
	}
	if _, err := leaked.Exec(t.Context(), `SELECT 1`); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("late use of the transaction = %v, want %v", err, pgx.ErrTxClosed)
	}
}

// The server itself ends a settle transaction whose worker can no longer: frozen in the
// middle of it, a process would keep its runs locked and out of reach for everybody.
func TestSettleTransactionIsBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	bounds := make(chan string, 1)
	effects(mux, "test.bound.v1", func(ctx context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(tx pgx.Tx) error {
			var b string
			err := tx.QueryRow(ctx, `SELECT current_setting('statement_timeout') || ' ' || current_setting('idle_in_transaction_session_timeout')`).Scan(&b)
			bounds <- b
			return err
		}}
	})
	work(t, pool, mux, brief)
	finished(t, pool, enqueue(t, pool, "test.bound.v1", empty{}))
	if got := <-bounds; got != "1min 4s" {
		t.Errorf("statements and pauses are limited to %s, want 1min, and 4s: the lease", got)
	}
}

// An effect's statements are planned as the user has it, not as the worker's own; and what it does to
// prepared statements keeps nobody from going on.
func TestSessionOfEffects(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	modes := make(chan string, 100)
	effects(mux, "test.one", func(ctx context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(tx pgx.Tx) error {
			var mode string
			if err := tx.QueryRow(ctx, `SELECT current_setting('plan_cache_mode') || current_setting('enable_seqscan')`, pgx.QueryExecModeSimpleProtocol).Scan(&mode); err != nil {
				return err
			}
			modes <- mode
			_, err := tx.Exec(ctx, `DEALLOCATE ALL`, pgx.QueryExecModeSimpleProtocol)
			return err
		}}
	})
	_, stop := work(t, pool, mux, nil)
	for range 10 {
		id := enqueue(t, pool, "test.one", empty{})
		if r := finished(t, pool, id); r.Status != run.Succeeded {
			t.Errorf("%s: %+v", r.Status, r)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for len(modes) > 0 {
		if mode := <-modes; mode != "autoon" {
			t.Errorf("plan_cache_mode and enable_seqscan are %s", mode)
		}
	}
}

// A statement of an effect that is prepared, and of no use because its table was altered meanwhile, is
// repeated and charged to nobody. One that the user has not prepared is the user's mistake.
func TestOutdatedStatements(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE wide (a int)`)
	effects(mux, "test.altered", func(ctx context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT * FROM wide WHERE a = $1`, 1)
			return err
		}}
	})
	effects(mux, "test.mistake", func(ctx context.Context) []func(pgx.Tx) error {
		return []func(pgx.Tx) error{func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `EXECUTE nosuch`, pgx.QueryExecModeSimpleProtocol)
			return err
		}}
	})
	work(t, pool, mux, nil)
	for n := range 20 {
		id := add(t, pool, run.New{Type: "test.altered", MaxAttempts: 1})
		if r := finished(t, pool, id); r.Status != run.Succeeded {
			t.Errorf("after %d columns more: %s", n, r.Status)
		}
		execute(t, pool, fmt.Sprintf(`ALTER TABLE wide ADD COLUMN c%d int`, n))
	}
	if r := finished(t, pool, add(t, pool, run.New{Type: "test.mistake", MaxAttempts: 1})); r.Status != run.Failed {
		t.Errorf("a mistake: %s", r.Status)
	}
}
