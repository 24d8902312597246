package graph_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/hook"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/session"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// prepared returns a pool of one connection, set up like those of a worker.
func prepared(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 1
	session.Prepare(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// In a session that belongs to the worker alone, the engine's statements are prepared and their plans are kept. When a
// table has grown, they are planned again.
func TestPlansAreKept(t *testing.T) {
	pool := prepared(t, pgtest.URL(t))
	do := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	fill := func(from, to int) {
		do(fmt.Sprintf(`BEGIN; SET LOCAL session_replication_role = replica; SET LOCAL workflow.advance = 'on';
			INSERT INTO each_progress (group_id, instance_id, node, items, next, done, total) SELECT gen_random_uuid(), gen_random_uuid(), 'n', '[]', 0, 0, 0 FROM generate_series(%d, %d); COMMIT`, from, to))
	}
	do(`ALTER TABLE each_progress SET (autovacuum_enabled = off)`)
	fill(1, 10)
	do(`ANALYZE each_progress`)
	// look executes the statement in the way the engine does, and returns its plan.
	look := func() (plan string) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			planned := &pgx.Batch{}
			session.Planned(tx.Conn(), planned)
			if err := tx.SendBatch(t.Context(), planned).Close(); err != nil {
				return err
			}
			if err := graph.Do(t.Context(), tx, `SELECT FROM each_progress JOIN unnest($1::uuid[]) AS n (group_id) USING (group_id)`, [][16]byte{{1}}); err != nil {
				return err
			}
			var name string
			if err := tx.QueryRow(t.Context(), `SELECT name FROM pg_prepared_statements WHERE statement LIKE 'SELECT FROM each_progress%'`).Scan(&name); err != nil {
				return err
			}
			rows, _ := tx.Query(t.Context(), `EXPLAIN EXECUTE `+pgx.Identifier{name}.Sanitize()+` ('{}')`, pgx.QueryExecModeSimpleProtocol)
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
	time.Sleep(150 * time.Millisecond) // more than lookPause, between two looks at table sizes
	if plan := look(); !strings.Contains(plan, "Index") {
		t.Errorf("the plan is still that for a small table:\n%s", plan)
	}
	var kept, custom int
	if err := pool.QueryRow(t.Context(), `SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE 'SELECT FROM each_progress%'`).Scan(&kept, &custom); err != nil {
		t.Fatal(err)
	}
	if kept < 2 || custom != 0 {
		t.Errorf("%d executions kept their plan, and %d had one of their own", kept, custom)
	}
}

// The statements that lock and read the instances of a batch find rows by their keys, even with plans made while the
// tables were empty.
func TestPlansOfLocks(t *testing.T) {
	pool := prepared(t, pgtest.URL(t))
	if _, err := pool.Exec(t.Context(), `VACUUM ANALYZE`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	first := &pgx.Batch{}
	if _, err := graph.New(pool).Parts().Hook.Begin(first, []leasing.Settlement{{Lease: leasing.Lease{Step: uuid.New()}, Outcome: settling.Outcome{Verdict: settling.Succeed}}}); err != nil {
		t.Fatal(err)
	}
	queued := len(first.QueuedQueries)
	if err := pool.SendBatch(t.Context(), first).Close(); err != nil {
		t.Fatal(err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT name FROM pg_prepared_statements WHERE statement LIKE '%FROM process_%' OR statement LIKE '%FROM parallel_group%'`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || queued != 3 {
		t.Fatalf("%d statements, %v", queued, err)
	}
	seen := 0
	for _, name := range names {
		if !strings.HasPrefix(name, "stmtcache") {
			continue
		}
		arguments := "('{}')"
		if query[int](t, pool, `SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = $1`, name) == 2 {
			arguments = "('{}', '{}')"
		}
		rows, _ := pool.Query(t.Context(), `EXPLAIN EXECUTE `+pgx.Identifier{name}.Sanitize()+arguments, pgx.QueryExecModeSimpleProtocol)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			continue // this is the query of pg_prepared_statements itself
		}
		seen++
		plan := strings.Join(lines, "\n")
		if strings.Contains(plan, "Seq Scan") || strings.Contains(plan, "Join") || strings.Contains(plan, "Nested") {
			t.Errorf("it reads more than what it looks for:\n%s", plan)
		}
	}
	if seen < queued {
		t.Errorf("%d plans of %d statements", seen, queued)
	}
}

// Processes complete even if sessions lose their prepared statements.
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

// The statements that follow the engine's in a settle transaction run with custom plans and with sequential scans
// enabled.
func TestPlansOfOthers(t *testing.T) {
	s := newEmptySite(t)
	var mu sync.Mutex
	modes := map[string]int{}
	look := func(ctx context.Context, tx pgx.Tx, _ []leasing.Settlement, _ *leasing.Carrier) error {
		var mode string
		if err := tx.QueryRow(ctx, `SELECT current_setting('plan_cache_mode') || current_setting('enable_seqscan')`).Scan(&mode); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		modes[mode]++
		return nil
	}
	s.engine = altered{s.engine, func(e *hook.Engine) {
		begin := e.Hook.Begin
		e.Hook.Begin = func(first *pgx.Batch, batch []leasing.Settlement) (hook.Act, error) {
			act, err := begin(first, batch)
			return func(ctx context.Context, tx pgx.Tx, settled []leasing.Settlement, carrier *leasing.Carrier) error {
				if act != nil {
					if err := act(ctx, tx, settled, carrier); err != nil {
						return err
					}
				}
				return look(ctx, tx, settled, carrier)
			}, err
		}
	}}
	s.worker = s.hire()
	p := s.deploy("A", step("A", "M")+`, "M": {"await": {"message": "paid", "key": "'1'"}, "to": "B"},`+step("B", ""))
	id := s.start(p, `{}`)
	s.enqueue("graph.message.v1", `{"name": "other", "key": "2"}`) // moves no token
	s.enqueue("graph.message.v1", `{"name": "paid", "key": "1"}`)
	s.status(id, graph.Completed)
	mu.Lock()
	defer mu.Unlock()
	if len(modes) != 1 || modes["force_custom_planon"] == 0 {
		t.Errorf("plans are made as %v", modes)
	}
}
