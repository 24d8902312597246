//go:build cost

package graph_test

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// TestBroadcastCost measures the cost of a signal to BROADCAST tokens, in one statement as in earlier versions and in
// batches as now, also with 1 % of the tokens refused by a trigger or with instances beyond a bound. It alternates
// between these kinds on a server of its own. Run it with BROADCAST=100000 go test -tags cost -run TestBroadcastCost
// -v. It takes minutes.
func TestBroadcastCost(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv("BROADCAST"))
	if err != nil {
		t.Fatal("BROADCAST is not set: how many wait")
	}
	rounds, err := strconv.Atoi(cmp.Or(os.Getenv("ROUNDS"), "3"))
	if err != nil {
		t.Fatal(err)
	}
	server := pgtest.Server(t, pgserver.Options{Settings: map[string]string{"shared_buffers": "1GB", "max_wal_size": "8GB", "autovacuum": "off", "checkpoint_timeout": "1h"}})
	config, _ := pgxpool.ParseConfig(server.URL("postgres"))
	config.MaxConns = 1
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := sql.Up(t.Context(), conn.Conn()); err != nil {
		t.Fatal(err)
	}
	conn.Release()
	define(t, pool, `{"process": "go", "version": 1, "start": "S", "nodes": {"S": {"await": {"signal": "go"}}}}`)
	type figure struct{ wall, cpu, wal float64 }
	kinds := []string{"before", "now", "now, 1 % refused by a trigger", "now, 1 % out of bounds"}
	if only := os.Getenv("KINDS"); only != "" {
		kinds = strings.Split(only, "|")
	}
	figures := map[string][]figure{}
	for range rounds {
		for _, kind := range kinds {
			unguarded(t, pool, `TRUNCATE process_instance, workflow_run, message_wait, process_token, workflow_set_aside, process_broadcast, process_unreached CASCADE`)
			audience(t, pool, "go", n)
			if strings.Contains(kind, "trigger") {
				execute(t, pool, `CREATE FUNCTION picky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'XX999'; END $$;
					CREATE TRIGGER picky BEFORE INSERT ON workflow_run FOR EACH ROW WHEN (hashtext(NEW.token_id::text) % 100 = 0) EXECUTE FUNCTION picky()`)
			}
			if strings.Contains(kind, "bounds") {
				unguarded(t, pool, `UPDATE process_instance i SET priority = -2147483648 FROM process_token t WHERE t.instance_id = i.id AND hashtext(t.id::text) % 100 = 0`)
			}
			execute(t, pool, `VACUUM ANALYZE`)
			execute(t, pool, `CHECKPOINT`)
			signal := leased(t, pool)
			wal, cpu, begun := query[string](t, pool, `SELECT pg_current_wal_insert_lsn()::text`), burned(t, pool), time.Now()
			if kind == "before" {
				execute(t, pool, `BEGIN; SELECT set_config('workflow.advance', 'on', true);
					WITH served AS (
						DELETE FROM message_wait w USING unnest('{`+signal.String()+`}'::uuid[], '{go}'::text[]) AS s (signal, name)
						WHERE w.name = s.name COLLATE "C" AND w.key IS NULL
						RETURNING w.token_id, w.place, w.node, s.signal
					)
					INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, tenant_id, held_at)
					SELECT p.token_id, 'graph.arrive.v1', p.node, jsonb_strip_nulls(jsonb_build_object('at', nullif(p.place, ''), 'signal', p.signal, 'visit', t.version)), 1000, i.priority, i.tenant_id, i.paused_at
					FROM served p JOIN process_token t ON t.id = p.token_id JOIN process_instance i ON i.id = t.instance_id; COMMIT`)
			} else {
				broadcast(t, pool, signal, 1000, nil)
			}
			figures[kind] = append(figures[kind], figure{time.Since(begun).Seconds(), burned(t, pool) - cpu,
				query[float64](t, pool, `SELECT (pg_current_wal_insert_lsn() - $1::pg_lsn)::float8 / 1e6`, wal)})
			reached, aside := query[int](t, pool, `SELECT count(*) FROM workflow_run WHERE type = 'graph.arrive.v1'`), query[int](t, pool, `SELECT count(*) FROM process_unreached`)
			if reached+aside != n || (aside > 0) != strings.Contains(kind, "%") {
				t.Errorf("%s: %d are reached, %d set aside", kind, reached, aside)
			}
			execute(t, pool, `DROP FUNCTION IF EXISTS picky() CASCADE`)
		}
	}
	for _, kind := range kinds {
		var text []string
		for k, f := range figures[kind] {
			b := figures["before"][k]
			text = append(text, fmt.Sprintf("%.2f s (%.3f), CPU %.2f s (%.3f), %.0f MB of WAL (%.3f)", f.wall, f.wall/b.wall, f.cpu, f.cpu/b.cpu, f.wal, f.wal/b.wal))
		}
		slices.Sort(text)
		t.Logf("%s:\n%s", kind, strings.Join(text, "\n"))
	}
}

// burned returns the CPU time, in seconds, that the only session of the pool has used.
func burned(t *testing.T, pool *pgxpool.Pool) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", query[int](t, pool, `SELECT pg_backend_pid()`)))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndex(string(text), ")")+1:]))
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100
}
