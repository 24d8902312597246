package graph_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// large returns n with GRAPH_LARGE=1, and a tenth of it otherwise.
func large(n int) int {
	if os.Getenv("GRAPH_LARGE") != "" {
		return n
	}
	return n / 10
}

// A fork of many branches joins exactly once. The test logs how long that takes, and sets no limit.
func TestLargeFork(t *testing.T) {
	s, n := newSite(t), large(1000)
	var names, nodes []string
	for k := range n {
		names = append(names, fmt.Sprintf(`"s%d"`, k))
		nodes = append(nodes, fmt.Sprintf(`"s%d": {"do": "test.step.v1", "to": "J"}`, k))
	}
	p := s.deploy("F", `"F": {"fork": [`+strings.Join(names, ", ")+`]}, "J": {"join": "all", "to": "C"},`+strings.Join(nodes, ",")+","+step("C", ""))
	began := time.Now()
	id := s.start(p, `{}`)
	pgtest.Await(t, "the end", func() bool {
		return query[int](t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED' AND id = $1`, id) == 1
	})
	t.Logf("a fork of %d branches took %v", n, time.Since(began).Round(time.Millisecond))
	s.want(map[string]int{"C": 1})
	s.healthy()
}

// S44 (g): no more elements of a long list are under way at once than its limit. The test logs the memory in use, and
// sets no limit.
func TestLargeEach(t *testing.T) {
	s, n := newSite(t), large(10_000)
	p := s.deploy("E", `"E": {"each": {"list": "input.items", "do": "test.step.v1", "limit": 50}}`)
	began := time.Now()
	id := query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload) SELECT 'graph.start.v1', jsonb_build_object('process', $1::text, 'input',
		jsonb_build_object('items', (SELECT jsonb_agg(g) FROM generate_series(1, $2) g))) RETURNING id`, p, n)
	most, memory := 0, uint64(0)
	pgtest.Await(t, "the end", func() bool {
		most = max(most, query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE instance_id = $1 AND item IS NOT NULL AND state = 'Ready'`, id))
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		memory = max(memory, m.HeapInuse)
		time.Sleep(20 * time.Millisecond)
		return query[string](t, s.pool, `SELECT coalesce((SELECT status FROM process_instance WHERE id = $1), '')`, id) == string(graph.Completed)
	})
	t.Logf("%d elements took %v; at most %d at once; heap in use at most %d MB", n, time.Since(began).Round(time.Millisecond), most, memory>>20)
	if most == 0 || most > 50 {
		t.Errorf("%d elements at once, want 1 to 50", most)
	}
	if done := query[int](t, s.pool, `SELECT count(*) FROM process_token WHERE item IS NOT NULL AND state = 'Completed'`); done != n {
		t.Errorf("%d elements, want %d", done, n)
	}
	s.healthy()
}
