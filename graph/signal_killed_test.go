package graph_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// TestKilledBroadcastChild is the worker process that TestKilledBroadcast starts.
func TestKilledBroadcastChild(t *testing.T) {
	url := os.Getenv("KILLED_BROADCAST_CHILD")
	if url == "" {
		return // not started by TestKilledBroadcast
	}
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		t.Fatal(err)
	}
	mux := worker.NewMux()
	_ = worker.Run(context.Background(), worker.Config{Pool: pool, Processes: graph.New(pool), Mux: mux, Prefixes: []string{"graph."}, Lease: 2 * time.Second, PollInterval: 50 * time.Millisecond,
		Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond}})
}

// If several worker processes in a row are killed while they deliver a signal to 10,000 tokens, its run fails when its
// attempts are used up, like any other run. After workflow_retry it continues from there: each token gets the signal
// exactly once, and the result counts them all.
func TestKilledBroadcast(t *testing.T) {
	const n, kills = 10_000, 5
	s := newEmptySite(t)
	t.Parallel()
	audience(t, s.pool, s.deploy("S", `"S": {"await": {"signal": "go"}}`), n)
	signal := s.enqueue("graph.signal.v1", `{"name": "go"}`)
	reached := func() int {
		return query[int](t, s.pool, `SELECT coalesce((SELECT reached FROM process_broadcast), 0)`)
	}
	failed := false
	over := func() bool {
		if query[string](t, s.pool, `SELECT status FROM workflow_run WHERE id = $1`, signal) == "failed" {
			failed = true
			query[string](t, s.pool, `SELECT workflow_retry($1)`, signal)
		}
		return query[bool](t, s.pool, `SELECT NOT EXISTS (SELECT FROM workflow_run WHERE status IN ('pending', 'leased'))`)
	}
	limit, before, deaths := time.Now().Add(2*time.Minute), 0, 0
	for !over() && time.Now().Before(limit) {
		child := exec.Command(os.Args[0], "-test.run=^TestKilledBroadcastChild$")
		child.Env = append(os.Environ(), "KILLED_BROADCAST_CHILD="+s.pool.Config().ConnString())
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		for !over() && time.Now().Before(limit) {
			if now := reached(); deaths < kills && now > before && now < n {
				before = now
				deaths++
				break
			}
			time.Sleep(time.Millisecond)
		}
		_ = child.Process.Kill()
		_ = child.Wait()
	}
	if deaths < 3 || !failed {
		t.Errorf("%d were killed in the middle of it, want 3 at least; the signal has failed: %v, want true", deaths, failed)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', status, result->>'reached', result->>'set_aside') FROM workflow_run WHERE id = $1`, signal); got != "succeeded 10000 0" {
		t.Errorf("the signal: %s", got)
	}
	if got := query[string](t, s.pool, `SELECT concat_ws(' ', count(*), count(DISTINCT token_id), count(*) FILTER (WHERE status = 'succeeded'), (SELECT count(*) FROM process_instance WHERE status = 'COMPLETED')) FROM workflow_run WHERE type = 'graph.arrive.v1'`); got != "10000 10000 10000 10000" {
		t.Errorf("runs, tokens, successes and completed instances are %s", got)
	}
}
