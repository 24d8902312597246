package graph_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/worker"
)

// In a session that is ours the engine's statements are prepared and their plans kept, until a
// table has grown: a plan for a small table does not outlive that.
func TestPlansAreKept(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	do := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	fill := func(from, to int) {
		do(fmt.Sprintf(`SET session_replication_role = replica; SET workflow.advance = 'on';
			INSERT INTO each_progress (group_id, instance_id, node, items, next, done, total) SELECT gen_random_uuid(), gen_random_uuid(), 'n', '[]', 0, 0, 0 FROM generate_series(%d, %d)`, from, to))
	}
	do(`ALTER TABLE each_progress SET (autovacuum_enabled = off)`)
	fill(1, 10)
	do(`ANALYZE each_progress`)
	engine := graph.New(nil)
	// look executes the statement, and returns its plan.
	look := func() (plan string) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			tx, lasts, err := engine.Last(t.Context(), tx)
			if err != nil || !lasts {
				t.Fatalf("the transaction lasts: %v, %v", lasts, err)
			}
			if _, err := tx.Exec(t.Context(), `SELECT FROM each_progress JOIN unnest($1::uuid[]) AS n (group_id) USING (group_id)`, [][16]byte{{1}}); err != nil {
				return err
			}
			var name string
			if err := conn.QueryRow(t.Context(), `SELECT name FROM pg_prepared_statements WHERE statement LIKE 'SELECT FROM each_progress%'`).Scan(&name); err != nil {
				return err
			}
			rows, _ := conn.Query(t.Context(), `EXPLAIN EXECUTE `+pgx.Identifier{name}.Sanitize()+` ('{}')`, pgx.QueryExecModeSimpleProtocol)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			plan = strings.Join(lines, "\n")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return plan
	}
	if plan := look(); !strings.Contains(plan, "Seq Scan") {
		t.Fatalf("the plan for a table of one page:\n%s", plan)
	}
	fill(11, 20_000)
	time.Sleep(150 * time.Millisecond) // it does not look at once
	if plan := look(); !strings.Contains(plan, "Index") {
		t.Errorf("the plan is still that for a small table:\n%s", plan)
	}
	var kept, custom int
	if err := conn.QueryRow(t.Context(), `SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE 'SELECT FROM each_progress%'`).Scan(&kept, &custom); err != nil {
		t.Fatal(err)
	}
	if kept < 2 || custom != 0 {
		t.Errorf("%d executions kept their plan, and %d had one of their own", kept, custom)
	}
}

// Behind a pooler nothing is prepared: the next transaction may be in another session.
func TestNothingLastsBehindAPooler(t *testing.T) {
	config, err := pgx.ParseConfig(pgtest.Bouncer(t, pgtest.URL(t)))
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	engine := graph.New(nil)
	for range 2 {
		if err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, lasts, err := engine.Last(t.Context(), tx)
			if lasts {
				t.Error("the transaction lasts")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// Where sessions lose what is prepared in them, processes go on all the same.
func TestSessionsThatForget(t *testing.T) {
	t.Parallel()
	s := newEmptySite(t)
	config := s.pool.Config()
	config.AfterRelease = func(conn *pgx.Conn) bool {
		_, err := conn.Exec(context.Background(), `DISCARD ALL`)
		return err == nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	s.pool = pool
	s.worker = s.hire()
	p := s.deploy("A", step("A", "B")+","+step("B", "C")+","+step("C", ""))
	for range 5 {
		s.status(s.start(p, `{}`), graph.Completed)
	}
	s.healthy()
}

// What comes after the engine in a settle transaction is planned with its values, as it was before.
func TestPlansOfOthers(t *testing.T) {
	s := newEmptySite(t)
	var mu sync.Mutex
	modes := map[string]int{}
	s.hooks = append(s.hooks, worker.Hook{Act: func(ctx context.Context, tx pgx.Tx, _ []lease.Settlement) error {
		var mode string
		if err := tx.QueryRow(ctx, `SELECT current_setting('plan_cache_mode') || current_setting('enable_seqscan')`).Scan(&mode); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		modes[mode]++
		return nil
	}})
	s.worker = s.hire()
	p := s.deploy("A", step("A", "M")+`, "M": {"await": {"message": "paid", "key": "'1'"}, "to": "B"},`+step("B", ""))
	id := s.start(p, `{}`)
	s.enqueue("graph.message.v1", `{"name": "other", "key": "2"}`) // moves nobody
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	s.status(id, graph.Completed)
	mu.Lock()
	defer mu.Unlock()
	if len(modes) != 1 || modes["force_custom_planon"] == 0 {
		t.Errorf("plans are made as %v", modes)
	}
}
