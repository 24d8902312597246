package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// away registers a handler that hands its run on, and returns where it puts the tokens of its starts.
func away(mux *worker.Mux, typ string, how error) chan string {
	tokens := make(chan string, 100)
	handle(mux, typ, func(ctx context.Context) error {
		token, err := worker.Token(ctx)
		if err != nil {
			return err
		}
		tokens <- token
		return how
	})
	return tokens
}

// isElsewhere waits until a run has been handed on.
func isElsewhere(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) {
	t.Helper()
	pgtest.Await(t, "the run to be handed on", func() bool {
		return query[bool](t, pool, `SELECT EXISTS (SELECT FROM workflow_accepted a JOIN workflow_run r ON r.id = a.run AND r.lease_token = a.token WHERE a.run = $1)`, id)
	})
}

// A run that is handed on stays leased, takes no slot, and is recorded within two seconds of being completed, by any worker. The token is the one that
// workflow_handed makes of the lease's.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	tokens := away(mux, "test.away.v1", run.ErrElsewhere)
	handle(mux, "test.here.v1", func(context.Context) error { return nil })
	var counted, refused atomic.Int32
	w, stop := work(t, pool, mux, func(c *worker.Config) {
		c.Concurrency = 1
		c.Observe.Refused = func(string) { refused.Add(1) }
		c.Observe.Elsewhere = func(n int) { counted.Store(int32(n)) }
	})
	id := enqueue(t, pool, "test.away.v1", empty{})
	token := <-tokens
	isElsewhere(t, pool, id)
	pgtest.Await(t, "the slot to be free", func() bool { return w.InFlight() == 0 })
	finished(t, pool, enqueue(t, pool, "test.here.v1", empty{})) // its only slot
	if made := query[string](t, pool, `SELECT workflow_handed(id, lease_token)::text FROM workflow_run WHERE id = $1`, id); made != token {
		t.Errorf("the handler got %s, the database makes %s", token, made)
	}
	if why := query[string](t, pool, `SELECT workflow_why($1)`, id); !strings.HasPrefix(why, "goes on elsewhere: worker") || strings.Contains(why, token) {
		t.Errorf("why: %s", why)
	}
	if got := query[int](t, pool, `SELECT sum(running)::int FROM workflow_live_worker`); got != 0 {
		t.Errorf("%d are told of as running", got)
	}
	other := enqueue(t, pool, "test.away.v1", empty{})
	its := <-tokens
	isElsewhere(t, pool, other)
	completed := func(id uuid.UUID, token string) *run.Run {
		if err := run.Complete(t.Context(), pool, id, token, json.RawMessage(`{"n": 12345678901234567890}`), nil); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		r := finished(t, pool, id)
		if took := time.Since(start); took > 30*time.Second { // two are promised, by a machine that has time
			t.Errorf("it was recorded after %s", took)
		}
		return r
	}
	completed(other, its)
	pgtest.Await(t, "the first to be counted", func() bool { return counted.Load() == 1 })
	if refused.Load() != 0 {
		t.Errorf("%d outcomes were refused", refused.Load())
	}
	if err := stop(); err != nil { // another worker does as well
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Status != run.Leased || r.Attempt != 1 {
		t.Fatalf("after its worker has stopped it is %s at attempt %d", r.Status, r.Attempt)
	}
	work(t, pool, mux, nil)
	finished(t, pool, enqueue(t, pool, "test.here.v1", empty{}))
	r := completed(id, token)
	if r.Status != run.Succeeded || string(r.Result) != `{"n": 12345678901234567890}` || r.Attempt != 1 || r.LeaseNo != 1 {
		t.Errorf("it is %s with %s at attempt %d, lease %d", r.Status, r.Result, r.Attempt, r.LeaseNo)
	}
	if err := run.Complete(t.Context(), pool, id, token, json.RawMessage(`{"n": 12345678901234567890}`), nil); err != nil {
		t.Errorf("said again: %v", err)
	}
	if n := query[int](t, pool, `SELECT (SELECT count(*) FROM workflow_accepted) + (SELECT count(*) FROM workflow_kept)`); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// An error from elsewhere counts as a handler's: it is tried again, put off, or fails at once, with its code.
func TestErrorsFromElsewhere(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	tokens := away(mux, "test.away.v1", run.ErrElsewhere)
	work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.away.v1", empty{})
	for i, c := range []struct {
		err                error
		status             run.Status
		attempt, postponed int
		code               string
	}{
		{run.Again(0), run.Leased, 1, 1, ""},
		{run.RetryAfter(run.WithCode("busy", errors.New("come back")), 0), run.Leased, 2, 1, "busy"},
		{errors.New("who knows"), run.Leased, 3, 1, settling.CodeHandler},
		{run.Permanent(run.WithCode("CARD_DECLINED", errors.New("no money left"))), run.Failed, 3, 1, "CARD_DECLINED"},
	} {
		token := <-tokens
		isElsewhere(t, pool, id)
		if err := run.Complete(t.Context(), pool, id, token, nil, c.err); err != nil {
			t.Fatal(err)
		}
		pgtest.Await(t, c.err.Error(), func() bool {
			r := read(t, pool, id)
			return r.Status == c.status && r.LeaseNo >= int64(min(i+2, 4)) && r.Attempt == c.attempt && r.Postponed == c.postponed
		})
		if err := run.Complete(t.Context(), pool, id, token, nil, c.err); err != nil {
			t.Errorf("%v, said again: %v", c.err, err)
		}
		var e struct{ Code, Message string }
		if r := read(t, pool, id); c.code != "" && (json.Unmarshal(r.Error, &e) != nil || e.Code != c.code || e.Message != c.err.Error()) {
			t.Errorf("%v: recorded as %s", c.err, r.Error)
		}
	}
}

// Once its time is over it is taken back, the attempt charged, and started again: not as a suspect, for it has killed no process. What was completed in time is
// recorded though nobody did before that.
func TestTimeElsewhereIsOver(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	tokens := away(mux, "test.away.v1", run.Elsewhere(time.Second))
	_, stop := work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.away.v1", empty{})
	first := <-tokens
	second := <-tokens
	isElsewhere(t, pool, id)
	var suspect bool
	var last string
	if err := pool.QueryRow(t.Context(), `SELECT suspect, last_error FROM workflow_run WHERE id = $1`, id).Scan(&suspect, &last); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Attempt < 2 || suspect || !strings.HasPrefix(last, "lease_expired: not completed in time elsewhere") {
		t.Errorf("attempt %d, suspect %t, %s", r.Attempt, suspect, last)
	}
	if err := run.Complete(t.Context(), pool, id, first, nil, nil); err == nil || !strings.Contains(err.Error(), "not leased with this token") {
		t.Errorf("with the token of the first start: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for len(tokens) > 0 {
		second = <-tokens
	}
	if err := run.Complete(t.Context(), pool, id, second, json.RawMessage(`1`), nil); err != nil {
		t.Fatal(err)
	}
	no := read(t, pool, id).LeaseNo
	pgtest.Await(t, "its time to be over", func() bool {
		return query[bool](t, pool, `SELECT lease_until < now() - interval '1 second' FROM workflow_run WHERE id = $1`, id)
	})
	work(t, pool, mux, nil)
	if r := finished(t, pool, id); r.Status != run.Succeeded || r.LeaseNo != no || string(r.Result) != "1" {
		t.Errorf("it is %s at lease %d, with %s; want that of lease %d", r.Status, r.LeaseNo, r.Result, no)
	}
}

// A heartbeat that comes after a run was handed on does not shorten its time, and a run that is cancelled is nobody's to complete.
func TestActingOnElsewhere(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	tokens := away(mux, "test.away.v1", run.ErrElsewhere)
	_, stop := work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.away.v1", empty{})
	token := <-tokens
	isElsewhere(t, pool, id)
	const left = `SELECT extract(epoch FROM lease_until - clock_timestamp())::int FROM workflow_run WHERE id = $1`
	execute(t, pool, `SELECT workflow_extend_v1(ARRAY[id], ARRAY[lease_token], '{2}') FROM workflow_run`)
	if n := query[int](t, pool, left, id); n < 3000 {
		t.Errorf("after a heartbeat %d seconds are left", n)
	}
	if n := query[int64](t, pool, `SELECT workflow_release(leased_by, 'why') FROM workflow_run WHERE id = $1`, id); n != 0 {
		t.Errorf("%d were released", n)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if r := read(t, pool, id); r.Status != run.Leased || r.LeaseNo != 1 {
		t.Errorf("it is %s at lease %d", r.Status, r.LeaseNo)
	}
	if err := run.Cancel(t.Context(), pool, id, "not needed"); err != nil {
		t.Fatal(err)
	}
	if err := run.Complete(t.Context(), pool, id, token, nil, nil); err == nil || !strings.Contains(err.Error(), "not leased with this token") {
		t.Errorf("completed although it was cancelled: %v", err)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM workflow_accepted`); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// Effects and events of a handler that hands its run on are dropped, and a handler that hands it on while its worker stops has handed it on.
func TestHandedOnWhileStopping(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `CREATE TABLE effects (n int)`)
	begun := make(chan struct{})
	handle(mux, "test.away.v1", func(ctx context.Context) error {
		close(begun)
		_ = worker.InSettle(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(context.Background(), `INSERT INTO effects VALUES (1)`)
			return err
		})
		<-ctx.Done()
		return run.Elsewhere(time.Hour)
	})
	w, stop := work(t, pool, mux, nil)
	id := enqueue(t, pool, "test.away.v1", empty{})
	<-begun
	w.StopNow()
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	isElsewhere(t, pool, id)
	if n := query[int](t, pool, `SELECT count(*)::int FROM effects`); n != 0 {
		t.Errorf("%d effects", n)
	}
}

// A handler whose lease seemed lost while it handed its run on has handed it on, if nobody has taken that lease: the fence knows better.
func TestHandedOnThoughLost(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	begun := make(chan struct{})
	handle(mux, "test.away.v1", func(ctx context.Context) error {
		close(begun)
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), run.ErrLost) {
			t.Errorf("cause = %v, want %v", context.Cause(ctx), run.ErrLost)
		}
		return run.ErrElsewhere
	})
	var s seen
	w, _ := work(t, pool, mux, func(c *worker.Config) { s.observe(c); brief(c) })
	id := enqueue(t, pool, "test.away.v1", empty{})
	<-begun
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE workflow_run SET lease_until = now() + interval '1 hour' WHERE id = $1`, id); err != nil { // no heartbeat gets through
		t.Fatal(err)
	}
	pgtest.Await(t, "the lease to be given up", func() bool { return s.causes(run.ErrLost) == 1 })
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	isElsewhere(t, pool, id)
	pgtest.Await(t, "the slot to be free", func() bool { return w.InFlight() == 0 })
}
