package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// A live worker has a row in workflow_worker, and removes it when it stops.
func TestPresence(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	begun, end := make(chan struct{}), make(chan struct{})
	handle(mux, "test.a", func(context.Context) error { close(begun); <-end; return nil })
	w, stop := work(t, pool, mux, func(c *worker.Config) { c.Concurrency = 7 })
	row := func() string {
		return query[string](t, pool, `SELECT coalesce(string_agg(concat_ws(' ', name, prefixes, handlers, concurrency, running, pid > 0, seen_at > now() - interval '5 s'), ', '), '') FROM workflow_live_worker`)
	}
	pgtest.Await(t, "its row", func() bool { return row() == w.Name()+" {test.} {test.a} 7 0 t t" })
	enqueue(t, pool, "test.a", empty{})
	<-begun
	if got := row(); got != w.Name()+" {test.} {test.a} 7 1 t t" { // at once, since the view counts leases
		t.Errorf("while it runs one: %s", got)
	}
	close(end)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := row(); got != "" {
		t.Errorf("a worker that has stopped is still there: %s", got)
	}
}

// A worker works even if the table for its presence is missing, and even without the right to write to it.
func TestPresenceIsNoCondition(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	handle(mux, "test.a", func(context.Context) error { return nil })
	execute(t, pool, `DROP TABLE workflow_worker CASCADE`)
	_, stop := work(t, pool, mux, nil)
	finished(t, pool, enqueue(t, pool, "test.a", empty{}))
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// No run of a paused prefix or type is leased, however it is enqueued, until the pause is ended. All other runs
// continue.
func TestPause(t *testing.T) {
	pool, mux := pgtest.New(t), worker.NewMux()
	for _, typ := range []string{"test.a.x", "test.a.y", "test.ab", "test.b"} {
		handle(mux, typ, func(context.Context) error { return nil })
	}
	work(t, pool, mux, nil)
	finished(t, pool, enqueue(t, pool, "test.a.x", empty{})) // the worker knows that lane now, and looks there first when woken
	execute(t, pool, `SELECT workflow_pause('test.a.', 'the partner is down'), workflow_pause('test.b', 'so is this one')`)
	var held []uuid.UUID
	pgtest.Await(t, "the worker to know", func() bool {
		id := enqueue(t, pool, "test.a.x", empty{})
		time.Sleep(100 * time.Millisecond)
		held = append([]uuid.UUID{}, id)
		return read(t, pool, id).Status == run.Pending
	})
	for _, typ := range []string{"test.a.x", "test.a.y", "test.b", "test.a.x"} {
		held = append(held, enqueue(t, pool, typ, empty{}))
		finished(t, pool, enqueue(t, pool, "test.ab", empty{}))
	}
	time.Sleep(300 * time.Millisecond)
	for _, id := range held {
		if r := read(t, pool, id); r.Status != run.Pending {
			t.Errorf("%s is %s while it is paused", r.Type, r.Status)
		}
	}
	execute(t, pool, `SELECT workflow_resume('test.a.')`)
	for _, k := range []int{0, 1, 2, 4} {
		finished(t, pool, held[k])
	}
	if r := read(t, pool, held[3]); r.Status != run.Pending {
		t.Errorf("%s is %s while it is paused", r.Type, r.Status)
	}
	execute(t, pool, `SELECT workflow_resume('test.b')`)
	finished(t, pool, held[3])
}

// workflow_why gives each reason why a run does not continue, in a real situation.
func TestWhy(t *testing.T) {
	pool := pgtest.New(t)
	why := func(id uuid.UUID) string { return query[string](t, pool, `SELECT workflow_why($1)`, id) }
	says := func(id uuid.UUID, words ...string) {
		t.Helper()
		got := ""
		defer func() { t.Log(got) }()
		pgtest.Await(t, strings.Join(words, " … "), func() bool {
			got = why(id)
			for _, w := range words {
				if !strings.Contains(got, w) {
					return false
				}
			}
			return true
		})
	}
	says(uuid.New(), "there is no such run")
	first := enqueue(t, pool, "test.sleep", empty{})
	says(first, "no live worker covers test.sleep", "none lives at all")

	mux, woken := worker.NewMux(), make(chan struct{})
	handle(mux, "test.sleep", func(ctx context.Context) error {
		select {
		case <-woken:
		case <-ctx.Done():
		}
		return nil
	})
	handle(mux, "test.fails", func(context.Context) error { return errors.New("connection refused") })
	handle(mux, "test.refuses", func(context.Context) error {
		return run.Permanent(run.WithCode("declined", errors.New("no money")))
	})
	handle(mux, "test.waits", func(context.Context) error { return run.Again(time.Hour) })
	w, stop := work(t, pool, mux, func(c *worker.Config) {
		c.Concurrency, c.Backoff, c.UnknownTypeGrace = 2, run.Backoff{Base: time.Minute, Cap: time.Hour}, time.Hour
	})
	says(first, "runs at "+w.Name()+" for ", ", attempt 1 of 25 (policy as shipped)", "its lease goes until")
	says(enqueue(t, pool, "other.x", empty{}), "no live worker covers other.x; those that live cover test.")
	says(add(t, pool, run.New{Type: "test.sleep", RunAt: time.Now().Add(2 * time.Hour)}), "due in 2 h")
	says(enqueue(t, pool, "test.unknown", empty{}), w.Name()+" will take it and fail it: no handler for test.unknown")
	failed := enqueue(t, pool, "test.refuses", empty{})
	says(failed, "failed ", " s ago, at attempt 1 of 3 after «", "no money»", "workflow_retry('"+failed.String()+"')")
	says(enqueue(t, pool, "test.fails", empty{}), "due in ", ": attempt 2 of 25 (policy as shipped) after «", "connection refused")
	says(enqueue(t, pool, "test.waits", empty{}), "due in 60 min: its handler has put it off, 1 times so far")

	held := add(t, pool, run.New{Type: "test.sleep", RunAt: time.Now().Add(time.Hour)})
	execute(t, pool, `UPDATE workflow_run SET held_at = now() WHERE id = $1`, held)
	says(held, "held since ", "SET held_at = NULL")
	execute(t, pool, `SELECT workflow_pause('test.', 'the bank is down')`)
	paused := add(t, pool, run.New{Type: "test.sleep", RunAt: time.Now().Add(time.Hour)})
	says(paused, "prefix test. is paused since ", " by postgres", ": the bank is down; SELECT workflow_resume('test.')")
	execute(t, pool, `SELECT workflow_resume('test.')`)
	says(paused, "due in 60 min")
	execute(t, pool, `SELECT workflow_reschedule($1, now())`, paused)
	says(paused, "runs at ")

	// Both slots are taken.
	second := enqueue(t, pool, "test.sleep", empty{})
	execute(t, pool, `UPDATE workflow_worker SET running = 2`)
	says(second, "due for ", w.Name()+" cover it, and have no slot free")
	third := add(t, pool, run.New{Type: "test.sleep", Priority: -5})
	says(third, " runs of higher priority go first at "+w.Name())
	execute(t, pool, `UPDATE workflow_run SET suspect = true WHERE id = $1`, second)
	says(second, "its last lease ran out, so it is watched")

	execute(t, pool, `SELECT workflow_cancel($1, 'not wanted any more')`, third)
	says(third, "cancelled ", " s ago: cancelled: not wanted any more")
	execute(t, pool, `SELECT workflow_delete($1, 'by mistake')`, held)
	says(held, "deleted ", " s ago: by mistake")
	close(woken)
	says(first, "succeeded ", " s ago, at attempt 1 of 3, by "+w.Name())

	// The worker is gone: its lease has expired, and nobody is there to take it back.
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	lost := enqueue(t, pool, "test.sleep", empty{})
	execute(t, pool, `UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_no = 1, attempt = 1, started_at = now() - interval '1 hour',
		lease_until = now() - interval '10 minutes', leased_by = 'dead' WHERE id = $1`, lost)
	says(lost, "its lease at dead ran out 10 min ago: no worker lives to take it back; start one that covers test.sleep")
}
