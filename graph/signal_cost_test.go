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

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// audience has n instances wait for signal go at S, from before: by SQL, as the owner.
func audience(t *testing.T, pool *pgxpool.Pool, process string, n int) {
	t.Helper()
	unguarded(t, pool, `
		CREATE TEMP TABLE crowd AS SELECT gen_random_uuid() AS id, gen_random_uuid() AS token, g FROM generate_series(1, `+strconv.Itoa(n)+`) AS g;
		INSERT INTO process_instance (id, process_definition_id, status, live_tokens, version, started_at)
		SELECT c.id, (SELECT id FROM process_definition WHERE name = '`+process+`'), 'WAITING', 1, 2, now() FROM crowd c;
		INSERT INTO process_state_history (instance_id, from_status, to_status, version, actor) SELECT c.id, f, s, 2, 'x' FROM crowd c, (VALUES ('CREATED', 'IN_PROGRESS'), ('IN_PROGRESS', 'WAITING')) AS v (f, s);
		INSERT INTO process_token (id, instance_id, node, edge, state) SELECT c.token, c.id, 'S', '>S', 'Waiting' FROM crowd c;
		INSERT INTO message_wait (token_id, place, instance_id, node, name) SELECT c.token, '', c.id, 'S', 'go' FROM crowd c ORDER BY c.g;
		DROP TABLE crowd`)
}

// unguarded executes statements as the owner without triggers, as rows from before are.
func unguarded(t *testing.T, pool *pgxpool.Pool, statements string) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SET LOCAL session_replication_role = replica;`+statements, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What a signal to n tokens costs, in one statement as it was sent before, and as it is now: BROADCAST=100000 go test -run TestBroadcastCost -v.
// With refusing, a trigger refuses one in a hundred, or their instances break a bound. It is measured on a server of its own, in turns.
func TestBroadcastCost(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv("BROADCAST"))
	if err != nil {
		t.Skip("BROADCAST is not set: this is a measurement, and takes minutes")
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

// leased returns the run of a signal go, which is leased.
func leased(t *testing.T, pool *pgxpool.Pool) uuid.UUID {
	t.Helper()
	id := query[uuid.UUID](t, pool, `INSERT INTO workflow_run (type, payload) VALUES ('graph.signal.v1', '{"name": "go"}') RETURNING id`)
	unguarded(t, pool, fmt.Sprintf(`UPDATE workflow_run SET status = 'leased', lease_no = 1, lease_token = gen_random_uuid(), leased_by = 'test', lease_until = now() + interval '1 hour', started_at = now() WHERE id = '%s'`, id))
	return id
}

// broadcast gives a signal to most at a time, and calls between before each batch.
func broadcast(t *testing.T, pool *pgxpool.Pool, signal uuid.UUID, most int, between func(batch int)) (reached, aside int) {
	t.Helper()
	finished := false
	for batch := 0; !finished; batch++ {
		if between != nil {
			between(batch)
		}
		if err := pool.QueryRow(t.Context(), `SELECT reached, set_aside, finished FROM process_signal_v1($1, $2, false)`, signal, most).Scan(&reached, &aside, &finished); err != nil {
			t.Fatal(err)
		}
	}
	return reached, aside
}

func execute(t *testing.T, pool *pgxpool.Pool, statements string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), statements, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
}

// burned is how many seconds of a processor the pool's one session has used.
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
