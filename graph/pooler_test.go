package graph_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// An engine whose pool prepares statements, behind a pooler that gives its sessions to others: what is
// asked for is tried again, and charged to no run.
func TestPreparedBehindAPooler(t *testing.T) {
	url := pgtest.URL(t)
	direct, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(direct.Close)
	d, err := graph.Parse([]byte(`{"process": "p", "version": 1, "start": "A", "nodes": {"A": {"do": "test.step.v1"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := graph.Deploy(t.Context(), direct, d); err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), pgtest.Bouncer(t, url)+"&pool_max_conns=20")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	start := graph.New(pool).Handlers()[graph.StartType]
	var all sync.WaitGroup
	var later atomic.Int64
	for range 20 {
		all.Go(func() {
			for range 50 {
				_, err := start(t.Context(), json.RawMessage(fmt.Sprintf(`{"process": "p", "id": %q}`, uuid.New())))
				if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
					t.Errorf("charged to the run: %v", err)
				} else if err != nil {
					later.Add(1)
				}
			}
		})
	}
	all.Wait()
	if later.Load() == 0 {
		t.Error("every session had what was prepared in it, so this shows nothing")
	}
}
