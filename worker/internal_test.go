package worker

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
)

// An idle worker does not count as stalled, however long its poll interval is.
func TestStallLimit(t *testing.T) {
	w := &Worker{config: Config{Lease: 2 * time.Second, PollInterval: time.Hour}}
	if got := w.stallLimit(); got <= time.Hour {
		t.Errorf("stall limit = %s, want more than the poll interval", got)
	}
}

// Effects that continue after the time of their transaction, with any context, are cut off, and that counts as
// the handler's failure.
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

// If the server ended a transaction because this process was frozen in the middle of an effect, the effect is
// repeated and no attempt is charged. If the effect was merely slow, the attempt is charged.
func TestEffectOfAFrozenProcess(t *testing.T) {
	t.Parallel()
	for frozen, want := range map[bool]run.Status{true: run.Succeeded, false: run.Failed} {
		pool := pgtest.New(t)
		mux := NewMux()
		w, err := New(Config{Pool: pool, Mux: mux, Prefixes: []string{"test."}, ShutdownGrace: -1, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		calls := 0
		Handle(mux, "test.freeze.v1", func(ctx context.Context, _ struct{}) (int, error) {
			return 1, InSettle(ctx, func(tx pgx.Tx) error {
				if calls++; calls > 1 {
					return nil
				}
				if frozen {
					w.stood.now() // as watch does after SIGCONT
				}
				_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'idle' USING ERRCODE = '25P03'; END $$`)
				return err
			})
		})
		e, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.freeze.v1", MaxAttempts: 1})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		var r *run.Run
		pgtest.Await(t, "the run to finish", func() bool { r, err = run.Read(t.Context(), pool, e.ID); return err != nil || r.Status.Finished() })
		cancel()
		_ = <-ended
		if err != nil || r.Status != want || r.Attempt != 1 {
			t.Errorf("frozen %v: run is %v, %v; want %s at its first attempt", frozen, r, err, want)
		}
	}
}

// Effects that hang outside of the database do not take up turns for ever: other outcomes are settled, the
// effects count as stuck, and the worker can stop.
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

// A lost lease and the current lease of the same run may be settled in one batch. Events of the lost one are
// dropped, hooks do not see it, and events of the current one are appended.
func TestTwoLeasesInOneBatch(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var seen []string
	act := func(_ context.Context, _ pgx.Tx, batch []leasing.Settlement, _ *leasing.Carrier) error {
		for _, s := range batch {
			seen = append(seen, string(s.Result))
		}
		return nil
	}
	w, err := New(Config{Pool: pool, Mux: NewMux(), Prefixes: []string{"test."}, hooks: []hook.Hook{{Begin: func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) { return act, nil }}}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	w.db, w.beats = pool, pool
	if _, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.twice.v1"}); err != nil {
		t.Fatal(err)
	}
	var batch []*job
	for _, result := range []string{`"old"`, `"new"`} {
		if _, err := pool.Exec(t.Context(), `UPDATE workflow_run SET status = 'pending'`); err != nil {
			t.Fatal(err)
		}
		j := take(t, w, settling.Outcome{Verdict: settling.Succeed, Result: json.RawMessage(result)})
		j.extras.events = []outbox.Event{{Aggregate: j.ID, Type: "test.told", Payload: json.RawMessage(result)}}
		batch = append(batch, j)
	}
	lost, _, err := w.commit(t.Context(), batch)
	if err != nil || len(lost) != 1 || lost[0].Token != batch[0].Token {
		t.Errorf("lost %v, %v; want the old lease", lost, err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT payload::text FROM outbox_event`)
	events, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || !slices.Equal(events, []string{`"new"`}) || !slices.Equal(seen, events) {
		t.Errorf("events %v, %v; hooks have seen %v; want those of the new lease", events, err, seen)
	}
}

// take leases the only due run, and gives the job its outcome.
func take(t *testing.T, w *Worker, outcome settling.Outcome) *job {
	t.Helper()
	p := &leasing.Poller{DB: w.db, Prefixes: []string{"test."}, Worker: w.name, Terms: func(string) leasing.Terms { return leasing.Terms{Length: time.Minute, Room: -1} }}
	leases, _, err := p.Acquire(t.Context(), 1, 1)
	if err != nil || len(leases) != 1 {
		t.Fatalf("leased %d, %v", len(leases), err)
	}
	outcome.ID, outcome.Token = leases[0].ID, leases[0].Token
	return &job{Lease: leases[0], outcome: outcome}
}

// A lease past half its length is extended before its outcome is settled, even if the last try still locks the
// row at first.
func TestProlong(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	tries := 0
	var before pgx.Tx
	w, err := New(Config{Pool: pool, Mux: NewMux(), Prefixes: []string{"test."}, Logger: slog.New(slog.DiscardHandler), Observe: Observer{
		Extended: func(int, time.Duration, error) {
			if tries++; tries == 6 {
				if err := before.Rollback(t.Context()); err != nil {
					t.Error(err)
				}
			}
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	w.db, w.beats = pool, pool
	if _, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.slow.v1"}); err != nil {
		t.Fatal(err)
	}
	j := take(t, w, settling.Outcome{Verdict: settling.Succeed})
	j.extended = time.Now().Add(-40 * time.Second)
	w.jobs.add(j)
	if before, err = pool.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = before.Rollback(context.Background()) }()
	if _, err := before.Exec(t.Context(), `SELECT FROM workflow_run FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	w.prolong(t.Context(), []*job{j})
	if time.Since(j.extended) > 20*time.Second {
		t.Errorf("after %d tries the lease was not extended", tries)
	}
}

// A heartbeat may look for leases that are about to expire while a handler returns its outcome, which it does
// not read. The race detector would report it.
func TestAgeingBesideAReturn(t *testing.T) {
	t.Parallel()
	var w Worker
	j := &job{Lease: leasing.Lease{Length: time.Second}, extended: time.Now().Add(-time.Minute)}
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		j.outcome = settling.Outcome{Verdict: settling.TryAgain} // as finish does
	}()
	if due := w.ageing([]*job{j}); len(due) != 1 {
		t.Errorf("%d leases are about to run out, want 1", len(due))
	}
	<-returned
}

// A try to settle that fails after half of a lease is over costs no lease: outcomes that wait while others of
// the batch are tried were extended before. Nothing else extends leases in this test.
func TestProlongedAfterATry(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	const length = 4 * time.Second
	w, err := New(Config{Pool: pool, Mux: NewMux(), Prefixes: []string{"test."}, Lease: length, Logger: slog.New(slog.DiscardHandler), hooks: []hook.Hook{{
		Begin: func(*pgx.Batch, []leasing.Settlement) (hook.Act, error) {
			return func(ctx context.Context, tx pgx.Tx, _ []leasing.Settlement, _ *leasing.Carrier) error {
				_, err := tx.Exec(ctx, `DO $$ BEGIN PERFORM pg_sleep(1.2); RAISE EXCEPTION 'never' USING ERRCODE = 'XX123'; END $$`)
				return err
			}, nil
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	w.db, w.beats = pool, pool
	for range 2 {
		if _, err := run.Enqueue(t.Context(), pool, run.New{Type: "test.slow.v1"}); err != nil {
			t.Fatal(err)
		}
	}
	p := &leasing.Poller{DB: w.db, Prefixes: w.config.Prefixes, Worker: w.name, Terms: func(string) leasing.Terms { return leasing.Terms{Length: length, Room: -1} }}
	leases, _, err := p.Acquire(t.Context(), 2, 0)
	if err != nil || len(leases) != 2 {
		t.Fatalf("leased %d, %v", len(leases), err)
	}
	var batch []*job
	for _, l := range leases {
		j := &job{Lease: l, outcome: settling.Outcome{ID: l.ID, Token: l.Token, Verdict: settling.Succeed}, done: true, confirmed: l.Taken, extended: l.Taken}
		w.jobs.add(j)
		batch = append(batch, j)
	}
	time.Sleep(1700 * time.Millisecond) // not yet half
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		w.settle(t.Context(), batch)
	}()
	for over := false; !over; {
		var out int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM workflow_run WHERE status = 'leased' AND lease_until < clock_timestamp()`).Scan(&out); err != nil || out > 0 {
			t.Fatalf("%d leases have run out, %v", out, err)
		}
		select {
		case <-settled:
			over = true
		case <-time.After(5 * time.Millisecond):
		}
	}
	if n := len(w.solos); n != 2 {
		t.Errorf("%d are left to be settled alone, want 2", n)
	}
}
