package worker_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// However a run fails for good, its dead letter reaches a handler, once, and says which run it was, with what code and payload: a handler says so, attempts are used up, its process
// dies at its last attempt, it is too late, nobody knows its type, its result is refused, an operator fails what is kept.
func TestDeadLettersReachAHandler(t *testing.T) {
	t.Parallel()
	pool, mux := pgtest.New(t), worker.NewMux()
	execute(t, pool, `SELECT workflow_set_policy('test.', attempts => 2, backoff_base => '1 ms', curve => 'constant', dead_letter => 'test.dead.v1'), workflow_set_policy('test.late.v1', deadline => '1 s')`)
	type letter struct {
		Run     uuid.UUID      `json:"run"`
		Type    string         `json:"type"`
		Code    string         `json:"code"`
		Payload map[string]int `json:"payload"`
	}
	var mu sync.Mutex
	got := map[uuid.UUID][]letter{}
	worker.Handle(mux, "test.dead.v1", func(_ context.Context, l letter) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		got[l.Run] = append(got[l.Run], l)
		return "", run.Permanent(errors.New("no letter of a letter"))
	})
	handle(mux, "test.permanent.v1", func(context.Context) error { return run.Permanent(errors.New("never")) })
	handle(mux, "test.down.v1", func(context.Context) error { return errDown })
	handle(mux, "test.late.v1", func(context.Context) error { return nil })
	handle(mux, "test.killed.v1", func(context.Context) error { return nil })
	handle(mux, "test.kept.v1", func(context.Context) error { return nil })
	worker.Handle(mux, "test.result.v1", func(context.Context, empty) (string, error) { return "a\x00b", nil })
	refuse(t, pool, "test.kept.v1", "XX123", `'succeeded', 'pending'`)

	ids := map[string]uuid.UUID{}
	for typ, code := range map[string]string{"test.permanent.v1": settling.CodeHandler, "test.down.v1": settling.CodeHandler, "test.late.v1": settling.CodeTooLate, "test.killed.v1": "lease_expired",
		"test.unknown.v1": "no_handler_registered", "test.result.v1": "result_rejected", "test.kept.v1": "failed_by_hand"} {
		n := run.New{Type: typ, Payload: map[string]int{"order": 7}, MaxAttempts: 1}
		switch typ {
		case "test.late.v1":
			n.RunAt = time.Now().Add(1500 * time.Millisecond)
		case "test.down.v1":
			n.MaxAttempts = 3
		}
		ids[code+" "+typ] = add(t, pool, n)
	}
	expire(t, pool, ids["lease_expired test.killed.v1"])
	kept := ids["failed_by_hand test.kept.v1"]
	work(t, pool, mux, nil)
	told(t, pool, kept)
	execute(t, pool, `SELECT workflow_fail($1, 'no use')`, kept)
	drained(t, pool)
	for name, id := range ids {
		letters := got[id]
		if len(letters) != 1 || letters[0].Code+" "+letters[0].Type != name || letters[0].Payload["order"] != 7 {
			t.Errorf("%s has the letters %v", name, letters)
		}
	}
	if n := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'test.dead.v1' AND status = 'failed'`); n != len(ids) || len(got) != len(ids) {
		t.Errorf("%d letters have failed, %d runs have one, want %d", n, len(got), len(ids))
	}
}
