package worker_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// Whatever happens to the connection while an outcome is settled, before the commit or before its answer
// arrives, the handler is started once, its effect is there once, and no attempt is lost.
func TestUnknownCommit(t *testing.T) {
	t.Parallel()
	const settle, take = "workflow_settle_v1(", "workflow_lease_v2("
	cases := []struct {
		name, cutAt  string
		answered     bool
		effect, hook bool
	}{
		{"plain, answer lost", settle, true, false, false},
		{"plain, never sent", settle, false, false, false},
		{"effect, answer lost", "commit", true, true, false},
		{"effect, never sent", "commit", false, true, false},
		{"effect, settle statement cut", settle, true, true, false},
		{"hook, answer lost", "commit", true, false, true},
		{"lease, answer lost", take, true, true, false},
		{"lease, never sent", take, false, true, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			direct := pgtest.URL(t)
			pool := pgtest.Open(t, direct)
			execute(t, pool, `CREATE TABLE ledger (run_id uuid)`)
			p, through := newProxy(t, direct)
			p.cutAt(c.cutAt, c.answered, 2)
			mux := worker.NewMux()
			var starts atomic.Int32
			handle(mux, "test.once.v1", func(ctx context.Context) error {
				starts.Add(1)
				if !c.effect {
					return nil
				}
				if err := worker.Emit(ctx, outbox.Event{Type: "test.once", Payload: 1}); err != nil {
					return err
				}
				return worker.InSettle(ctx, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ($1)`, run.FromContext(ctx).ID)
					return err
				})
			})
			var s seen
			pgtest.LogTransitions(t, pool)
			id := enqueue(t, pool, "test.once.v1", empty{})
			_, stop := work(t, pgtest.Open(t, through), mux, func(config *worker.Config) {
				s.observe(config)
				config.Concurrency = 1
				if c.hook {
					*config.Hooks() = []hook.Hook{{Begin: acting(func(context.Context, pgx.Tx, []leasing.Settlement, *leasing.Carrier) error { return nil })}}
				}
			})
			r := finished(t, pool, id)
			pgtest.Await(t, "the worker to know", func() bool { return s.verdicts(settling.Succeed)+s.get(&s.refused) > 0 })
			_ = stop()
			want := 0
			if c.effect {
				want = 1
			}
			entries := query[int](t, pool, `SELECT count(*) FROM ledger`)
			events := query[int](t, pool, `SELECT count(*) FROM outbox_event`)
			told := query[int](t, pool, `SELECT count(*) FROM transition WHERE status = 'succeeded'`)
			if r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 || entries != want || events != want || told != 1 {
				t.Errorf("run is %s, attempt %d, %d starts, %d entries, %d events, told %d times; want succeeded, 1, 1, %d, %d, 1",
					r.Status, r.Attempt, starts.Load(), entries, events, told, want, want)
			}
			if p.cutCount() == 0 || s.verdicts(settling.Succeed) != 1 || s.get(&s.refused) != 0 {
				t.Errorf("%d cuts, %d successes and %d refusals seen; want some, 1, 0", p.cutCount(), s.verdicts(settling.Succeed), s.get(&s.refused))
			}
		})
	}
}

// If a backend is killed while it settles, the same outcome is settled again and no attempt is charged.
func TestKilledWhileSettling(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	mux := worker.NewMux()
	var starts atomic.Int32
	started, gate := make(chan bool, 1), make(chan bool)
	handle(mux, "test.killed.v1", func(context.Context) error { starts.Add(1); started <- true; <-gate; return nil })
	var s seen
	work(t, pool, mux, s.observe)
	id := enqueue(t, pool, "test.killed.v1", empty{})
	<-started
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run WHERE id = $1 FOR UPDATE`, id); err != nil {
		t.Fatal(err)
	}
	close(gate)
	pgtest.Blocked(t, pool, 1)
	killed := query[int](t, pool, `
		SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%workflow_settle_v1(%'`)
	pgtest.Await(t, "the worker to notice", func() bool { return s.get(&s.failedTry) > 0 })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 1 || starts.Load() != 1 || killed == 0 {
		t.Errorf("run is %s, attempt %d, %d starts, %d killed; want succeeded, 1, 1, 1", r.Status, r.Attempt, starts.Load(), killed)
	}
}
