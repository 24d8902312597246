//go:build pooler

package graph_test

import (
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/session"
)

// The engine's handlers work through a pooler that shares its sessions among clients, even if their pool prepares
// statements: no query fails.
func TestEngineBehindAPooler(t *testing.T) {
	url := pgtest.URL(t)
	direct, pool := pgtest.Open(t, url), pgtest.Open(t, pgtest.Bouncer(t, url)+"&pool_max_conns=20")
	define(t, direct, `{"process": "p", "version": 1, "start": "A", "nodes": {"A": {"do": "test.step.v1"}}}`)
	start := graph.New(pool).Parts().Handlers["graph.start.v1"]
	var all sync.WaitGroup
	var lost atomic.Int64
	for range 20 {
		all.Go(func() {
			for range 50 {
				if _, err := start(t.Context(), json.RawMessage(fmt.Sprintf(`{"process": "p", "id": %q}`, uuid.New()))); err != nil {
					t.Error(err)
				}
				if _, err := pool.Exec(t.Context(), `SELECT $1::int`, 1); session.Lost(err) {
					lost.Add(1)
				}
			}
		})
	}
	all.Wait()
	if lost.Load() == 0 {
		t.Error("every session had what was prepared in it, so this shows nothing")
	}
}
