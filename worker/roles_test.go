package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/outbox"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/sql"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A worker whose role is bound to a prefix can do all that workers do with runs under it: lease, extend,
// settle, retry, append events, take back expired leases, keep refused outcomes, observe a pause, and report
// its presence. It does not see other runs, whatever prefixes it is configured with. An event that it may not
// append fails the run.
func TestBoundWorker(t *testing.T) {
	t.Parallel()
	owner, mux := pgtest.New(t), worker.NewMux()
	named := pgtest.Roles(t, owner)
	conn, err := pgx.ConnectConfig(t.Context(), owner.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if err := sql.BindWorker(t.Context(), conn, named, named+"_bound", []string{"test."}); err != nil {
		t.Fatal(err)
	}
	var twice, odd, others atomic.Int32
	handle(mux, "test.fine", func(context.Context) error { return nil })
	handle(mux, "test.long", func(ctx context.Context) error { time.Sleep(3 * time.Second); return ctx.Err() }) // needs heartbeats
	handle(mux, "test.twice", func(ctx context.Context) error {
		if twice.Add(1) == 1 {
			return errors.New("not now")
		}
		return worker.Emit(ctx, outbox.Event{Aggregate: run.FromContext(ctx).ID, Type: "test.done", Payload: empty{}})
	})
	handle(mux, "test.never", func(context.Context) error { return run.Permanent(errors.New("no")) })
	handle(mux, "test.odd", func(context.Context) error { odd.Add(1); return nil })
	handle(mux, "test.forges", func(ctx context.Context) error {
		return worker.Emit(ctx, outbox.Event{Aggregate: run.FromContext(ctx).ID, Type: "process.completed", Payload: empty{}})
	})
	handle(mux, "other.x", func(context.Context) error { others.Add(1); return nil })

	expired := enqueue(t, owner, "test.fine", empty{})
	execute(t, owner, `UPDATE workflow_run SET status = 'leased', lease_no = 1, attempt = 1, lease_token = gen_random_uuid(), lease_until = now() + interval '100 ms', leased_by = 'dead',
		started_at = clock_timestamp(), updated_at = clock_timestamp() WHERE id = $1`, expired)
	foreign := enqueue(t, owner, "other.x", empty{})
	w, _ := work(t, pgtest.As(t, owner, named, "bound"), mux, func(c *worker.Config) { c.Prefixes = []string{"test.", "other."} })
	for typ, want := range map[string]run.Status{"test.fine": run.Succeeded, "test.long": run.Succeeded, "test.twice": run.Succeeded, "test.never": run.Failed, "test.forges": run.Failed} {
		if r := finished(t, owner, enqueue(t, owner, typ, empty{})); r.Status != want {
			t.Errorf("%s is %s, want %s", typ, r.Status, want)
		}
	}
	refuse(t, owner, "test.odd", "XX123", leaves)
	refused := enqueue(t, owner, "test.odd", empty{})
	told(t, owner, refused)
	execute(t, owner, `DROP TRIGGER refuse ON workflow_run`)
	if r := finished(t, owner, refused); r.Status != run.Succeeded || odd.Load() != 1 {
		t.Errorf("what was refused is %s, and was started %d times", r.Status, odd.Load())
	}
	if r := finished(t, owner, expired); r.Status != run.Succeeded || r.Attempt != 2 {
		t.Errorf("what had expired is %s at attempt %d, want succeeded at 2", r.Status, r.Attempt)
	}
	if r := read(t, owner, foreign); r.Status != run.Pending || others.Load() > 0 {
		t.Errorf("a run of another prefix is %s, started %d times", r.Status, others.Load())
	}
	for what, is := range map[string]string{
		`SELECT string_agg(DISTINCT event_type, ' ' ORDER BY event_type) FROM workflow_history`: "expired failed retried",
		`SELECT string_agg(event_type, ' ') FROM outbox_event`:                                  "test.done",
		`SELECT name FROM workflow_live_worker`:                                                 named + "_login_bound/" + w.Name(),
	} {
		if got := query[string](t, owner, what); got != is {
			t.Errorf("%s: %q, want %q", what, got, is)
		}
	}
}
