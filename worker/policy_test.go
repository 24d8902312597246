package worker_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

var errDown = errors.New("connection refused")

// A run that says nothing follows the policy of its type, one that says how often it is tried does not.
func TestPolicyAttempts(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 5, backoff_base => '1 ms', curve => 'constant'), workflow_set_policy('test.once.v1', attempts => 1)`)
	mux := worker.NewMux()
	var last atomic.Int64
	for _, typ := range []string{"test.five.v1", "test.once.v1"} {
		handle(mux, typ, func(ctx context.Context) error {
			last.Store(int64(run.FromContext(ctx).MaxAttempts))
			return errDown
		})
	}
	handle(mux, "test.lowered.v1", func(context.Context) error { return errDown }, worker.Options{MaxAttempts: 2})
	work(t, pool, mux, nil)
	for _, c := range []struct {
		typ                  string
		given, attempts, row int
	}{
		{"test.five.v1", 0, 5, 5},
		{"test.five.v1", 3, 5, 5},
		{"test.five.v1", 2, 2, 2},
		{"test.five.v1", 7, 7, 7},
		{"test.once.v1", 0, 1, 1},
		{"test.once.v1", 4, 4, 4},
		{"test.lowered.v1", 0, 2, 5},
	} {
		r := finished(t, pool, add(t, pool, run.New{Type: c.typ, MaxAttempts: c.given}))
		if r.Status != run.Failed || r.Attempt != c.attempts || r.MaxAttempts != c.row {
			t.Errorf("%s with max_attempts %d: %s at attempt %d of %d, want failed at %d of %d", c.typ, c.given, r.Status, r.Attempt, r.MaxAttempts, c.attempts, c.row)
		}
	}
	if last.Load() != 4 {
		t.Errorf("the last handler was told that it has %d attempts, want 4", last.Load())
	}
}

// A policy counts for runs that were tried before it was set, too: raised as well as lowered.
func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 900, backoff_base => '20 ms', curve => 'constant')`)
	mux := worker.NewMux()
	var tries atomic.Int64
	handle(mux, "test.down.v1", func(context.Context) error { tries.Add(1); return errDown })
	work(t, pool, mux, nil)
	id := add(t, pool, run.New{Type: "test.down.v1"})
	pgtest.Await(t, "its fourth attempt", func() bool { return tries.Load() > 3 })
	if r := read(t, pool, id); r.MaxAttempts != 900 {
		t.Errorf("it may be tried %d times, want 900", r.MaxAttempts)
	}
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 1000, backoff_base => '20 ms', curve => 'constant')`)
	pgtest.Await(t, "it to have 1000", func() bool { return read(t, pool, id).MaxAttempts == 1000 })
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 2)`)
	if r := finished(t, pool, id); r.Status != run.Failed || r.MaxAttempts != r.Attempt {
		t.Errorf("after the policy was lowered: %s at attempt %d of %d", r.Status, r.Attempt, r.MaxAttempts)
	}
	// What a person grants is what it has.
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 900, backoff_base => '1 ms', curve => 'constant')`)
	time.Sleep(2 * time.Second) // until it has reached the worker
	before := read(t, pool, id).Attempt
	execute(t, pool, `SELECT workflow_retry($1, 4)`, id)
	if r := finished(t, pool, id); r.Attempt != before+4 || r.MaxAttempts != before+4 {
		t.Errorf("after four more were granted: %s at attempt %d of %d, before it was %d", r.Status, r.Attempt, r.MaxAttempts, before)
	}
}

// A lease that expires is charged by the policy, and the pause after it is the policy's.
func TestPolicyOfLostLeases(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 2, backoff_base => '300 s')`)
	first := add(t, pool, run.New{Type: "test.lost.v1"})
	second := add(t, pool, run.New{Type: "test.lost.v1"})
	lose := func(id any) {
		execute(t, pool, `UPDATE workflow_run SET status = 'leased', lease_no = lease_no + 1, attempt = attempt + 1, lease_token = gen_random_uuid(), leased_by = 'lost', started_at = now() - interval '1 minute',
			lease_until = now() - interval '30 s', deadline_at = now() + interval '1 hour', suspect = false WHERE id = $1`, id)
	}
	lose(first)
	mux := worker.NewMux()
	handle(mux, "test.lost.v1", func(context.Context) error { return nil })
	work(t, pool, mux, nil)
	pgtest.Await(t, "its lease to be taken back", func() bool { return read(t, pool, first).Status == run.Pending })
	r := read(t, pool, first)
	if wait := time.Until(r.RunAt); r.MaxAttempts != 2 || wait < 290*time.Second || wait > 450*time.Second {
		t.Errorf("after the first it has %d attempts, and is due in %s", r.MaxAttempts, wait)
	}
	lose(first)
	if r := finished(t, pool, first); r.Status != run.Failed || r.Attempt != 2 || r.MaxAttempts != 2 || !strings.Contains(*r.LastError, "all 2 attempts") {
		t.Errorf("after the second: %s at attempt %d of %d, %q", r.Status, r.Attempt, r.MaxAttempts, *r.LastError)
	}
	if r := finished(t, pool, second); r.Status != run.Succeeded {
		t.Errorf("the other one has %s", r.Status)
	}
}

// What a policy lets start once is not started again after its lease was lost.
func TestPolicyOfOneStart(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.once.v1', attempts => 1)`)
	id := add(t, pool, run.New{Type: "test.once.v1"})
	execute(t, pool, `UPDATE workflow_run SET status = 'leased', lease_no = 1, attempt = 1, lease_token = gen_random_uuid(), leased_by = 'lost', started_at = now() - interval '1 minute',
		lease_until = now() - interval '30 s', deadline_at = now() + interval '1 hour'`)
	mux := worker.NewMux()
	var started atomic.Int64
	handle(mux, "test.once.v1", func(context.Context) error { started.Add(1); return nil })
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Failed || r.Attempt != 1 || started.Load() != 0 {
		t.Errorf("it has %s at attempt %d, started %d times more", r.Status, r.Attempt, started.Load())
	}
}

// After the deadline of its policy a run is not started any more, whether it was never tried, is tried again or was put off.
func TestPolicyDeadline(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 1000, deadline => '4 s', backoff_base => '100 ms', curve => 'constant')`)
	mux := worker.NewMux()
	var started atomic.Int64
	handle(mux, "test.late.v1", func(context.Context) error { started.Add(1); return nil })
	handle(mux, "test.down.v1", func(context.Context) error { return errDown })
	handle(mux, "test.again.v1", func(context.Context) error { return run.Again(time.Hour) })
	late := add(t, pool, run.New{Type: "test.late.v1", RunAt: time.Now().Add(5 * time.Second)})
	down, again := add(t, pool, run.New{Type: "test.down.v1"}), add(t, pool, run.New{Type: "test.again.v1"})
	work(t, pool, mux, nil)
	if r := finished(t, pool, down); r.Status != run.Failed || !strings.Contains(*r.LastError, "4s after it was enqueued") || r.FinishedAt.Sub(r.CreatedAt) > time.Minute {
		t.Errorf("what fails all the time: %s after %s, %q", r.Status, r.FinishedAt.Sub(r.CreatedAt), *r.LastError)
	}
	for _, r := range []*run.Run{finished(t, pool, late), finished(t, pool, again)} {
		if r.Status != run.Failed || failureOf(t, r).Code != settling.CodeTooLate {
			t.Errorf("%s: %s, %s", r.Type, r.Status, r.Error)
		}
	}
	if started.Load() != 0 {
		t.Errorf("a handler was started %d times after the deadline", started.Load())
	}
	execute(t, pool, `SELECT workflow_retry($1)`, late) // a person knows that it is late
	if r := finished(t, pool, late); r.Status != run.Succeeded {
		t.Errorf("tried again by a person, it has %s: %s", r.Status, r.Error)
	}
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 1000, deadline => '1 s', backoff_base => '1500 ms', curve => 'constant')`)
	time.Sleep(2 * time.Second) // until it has reached the worker
	execute(t, pool, `SELECT workflow_retry($1, 2), workflow_retry($2)`, down, again)
	before := read(t, pool, down).Attempt
	pgtest.Await(t, "it to be put off for as long as it asks", func() bool { return time.Until(read(t, pool, again).RunAt) > 50*time.Minute })
	pgtest.Await(t, "it to be tried on", func() bool { return read(t, pool, down).Attempt >= before+3 })
}

// A number that somebody writes is the run's own, and 3 has it follow its policy again: also where a policy's number stood there, and at an attempt
// that is beyond 3.
func TestPolicyByHand(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 7, backoff_base => '1 ms', curve => 'constant')`)
	set := func(id any, n int) {
		t.Helper()
		execute(t, pool, `UPDATE workflow_run SET max_attempts = $2 WHERE id = $1`, id, n)
	}
	want := map[any]int{}
	own := add(t, pool, run.New{Type: "test.down.v1"})
	set(own, 5)
	want[own] = 5
	back := add(t, pool, run.New{Type: "test.down.v1", MaxAttempts: 5})
	set(back, 3)
	want[back] = 7
	there := add(t, pool, run.New{Type: "test.down.v1"})
	pgtest.ByHand(t, pool, `UPDATE workflow_run SET max_attempts = 6, policy_attempts = 6, attempt = 4 WHERE id = '`+there.String()+`'`) // as a policy of then had it
	set(there, 10)
	set(there, 3)
	want[there] = 7
	same := add(t, pool, run.New{Type: "test.down.v1"})
	set(same, 7)
	want[same] = 7
	mux := worker.NewMux()
	handle(mux, "test.down.v1", func(context.Context) error { return errDown })
	work(t, pool, mux, nil)
	for id, n := range want {
		if r := finished(t, pool, id.(uuid.UUID)); r.Attempt != n || r.MaxAttempts != n || failureOf(t, r).Code != settling.CodeHandler {
			t.Errorf("it failed at attempt %d of %d as %s, want %d", r.Attempt, r.MaxAttempts, failureOf(t, r).Code, n)
		}
	}
}

// Leases that an operator takes away are charged, and do not use up what the policy allows.
func TestPolicyOfReleased(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	id := add(t, pool, run.New{Type: "test.released.v1"})
	mux := worker.NewMux()
	begun, free := make(chan int, 10), make(chan struct{})
	handle(mux, "test.released.v1", func(ctx context.Context) error {
		begun <- run.FromContext(ctx).Attempt
		select {
		case <-free:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	work(t, pool, mux, nil)
	for attempt := 1; attempt <= 5; attempt++ {
		if got := <-begun; got != attempt {
			t.Fatalf("attempt %d begins, want %d", got, attempt)
		}
		if attempt < 5 {
			execute(t, pool, `SELECT workflow_release(leased_by, 'it hangs') FROM workflow_run WHERE id = $1`, id)
		}
	}
	close(free)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 5 || r.MaxAttempts != 25 {
		t.Errorf("it has %s at attempt %d of %d", r.Status, r.Attempt, r.MaxAttempts)
	}
}

// An outcome that is kept has the number of its policy written when it is settled at last, too: at the third attempt of a run
// that says nothing there is another one.
func TestPolicyOfKept(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	refuse(t, pool, "test.odd.v1", "P0001", "'pending'")
	handle(mux, "test.odd.v1", func(ctx context.Context) error {
		if run.FromContext(ctx).Attempt == 3 {
			return errDown
		}
		return nil
	})
	id := enqueue(t, pool, "test.odd.v1", empty{})
	pgtest.ByHand(t, pool, `UPDATE workflow_run SET attempt = 2`)
	work(t, pool, mux, nil)
	told(t, pool, id)
	execute(t, pool, `DROP TRIGGER refuse ON workflow_run`)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.Attempt != 4 || r.MaxAttempts != 25 {
		t.Errorf("it is %s at attempt %d of %d", r.Status, r.Attempt, r.MaxAttempts)
	}
}
