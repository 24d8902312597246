//go:build attack

package attack

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/delivery"
	"github.com/simple-workflow/simple-workflow/internal/pgserver"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// There are several specimens of each kind: some to be changed, once each, and some that are left alone. More victims
// mean fewer and longer trials.
var victims, controls = 8, 2

// plainKinds are runs in all states, and the UPDATE without guards that produces each.
var plainKinds = map[string]string{
	"due":       ``,
	"later":     `run_at = now() + interval '1 hour'`,
	"retried":   `attempt = 1, last_error = 'not now', error = '{"code": "handler_error"}', lease_no = 1, started_at = now()`,
	"leased":    `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() + interval '2 seconds', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now()`,
	"expired":   `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() - interval '1 second', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now() - interval '3 seconds'`,
	"kept":      `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() - interval '1 second', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now() - interval '3 seconds'`,
	"elsewhere": `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute', deadline_at = now() + interval '1 minute', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now() - interval '3 seconds'`,
	"exhausted": `status = 'leased', lease_token = gen_random_uuid(), lease_until = now() - interval '1 second', leased_by = 'somebody', lease_no = 3, attempt = 2, max_attempts = 2, started_at = now() - interval '3 seconds'`,
	"suspect":   `suspect = true, attempt = 1, lease_no = 1, started_at = now() - interval '1 minute'`,
	"succeeded": `status = 'succeeded', finished_at = now(), result = '{"n": 1}', attempt = 1, lease_no = 1, started_at = now(), settled_token = gen_random_uuid(), settled_by = 'somebody'`,
	"failed":    `status = 'failed', finished_at = now(), error = '{"code": "handler_error"}', last_error = 'no', attempt = 3, lease_no = 3, started_at = now(), settled_token = gen_random_uuid(), settled_by = 'somebody'`,
	"cancelled": `status = 'cancelled', finished_at = now(), last_error = 'cancelled'`,
	"held":      `held_at = now()`,
	"deleted":   `deleted_at = now(), delete_reason = 'unwanted'`,
	"aside":     ``,
}

// processKinds are processes whose instances stop at a stage. Runs of test. wait for the workers of the trial; those
// of build. are done already.
var processKinds = map[string]string{
	"step":     `"A": {"do": "test.step.v1"}`,
	"boundary": `"A": {"do": "test.step.v1", "on": [{"after": "PT1H", "to": "B"}]}, "B": {"end": true}`,
	"task":     `"A": {"human": {"groups": ["sales"]}}`,
	"message":  `"A": {"await": {"message": "paid", "key": "input.key"}}`,
	"signal":   `"A": {"await": {"signal": "go"}}`,
	"owed":     `"A": {"await": {"signal": "owed"}}`,
	"sent":     `"A": {"await": {"signal": "sent"}}`,
	"timer":    `"A": {"wait": "PT1H"}`,
	"race":     `"A": {"race": ["M", "T"]}, "M": {"await": {"message": "paid", "key": "input.key"}}, "T": {"wait": "PT1H"}`,
	"call":     `"A": {"call": {"process": "step", "undo": "propagate"}}`,
	"join":     `"A": {"fork": ["B", "C"]}, "B": {"do": "build.step.v1", "to": "J"}, "C": {"do": "test.step.v1", "to": "J"}, "J": {"join": "all", "to": "Z"}, "Z": {"end": true}`,
	"each":     `"A": {"each": {"list": "input.items", "do": "test.step.v1", "limit": 2}}`,
	"scope":    `"A": {"scope": {"start": "X", "nodes": {"X": {"do": "test.step.v1"}}}}`,
	"undoing":  `"A": {"do": "build.step.v1", "undo": "test.undo.v1", "to": "B"}, "B": {"do": "build.fail.v1"}`,
	"paused":   `"A": {"do": "test.step.v1"}`,
	"incident": `"A": {"choose": [{"if": "input.none == 1", "to": "B"}], "else": "B"}, "B": {"end": true}`,
	"finished": `"A": {"do": "build.step.v1"}`,
	"broken":   `"A": {"do": "build.fail.v1"}`,
	"revoked":  `"A": {"do": "test.step.v1"}`,
}

// eventKinds are events in all states, in the same form.
var eventKinds = map[string]string{
	"event-open":      ``,
	"event-delivered": `published_at = now(), delivered_to = ARRAY(SELECT name FROM outbox_sink)`,
	"event-retried":   ``,
	"event-parked":    `parked_at = now(), parked_by = ARRAY(SELECT name FROM outbox_sink)`,
}

// A world is a database in which nothing moves, to be copied.
type world struct {
	t      *testing.T
	server *pgserver.Server
	tables map[string]*table
	rows   []row
	of     map[string]string // the specimen of each row, by table and key
}

// A row, as it is in the world.
type row struct {
	table    string
	key      string // as SQL
	specimen string // kind/number of the specimen that it belongs to; empty: none
	class    string // rows of one class are in the same state
	data     map[string]any
	text     string // data
}

// ours reports whether the row may be changed. The others show what happens to rows that no deed has touched.
func (r row) ours() bool {
	kind, number, _ := strings.Cut(r.specimen, "/")
	return kind != "" && number != "" && number < fmt.Sprint(victims)
}

func newWorld(t *testing.T) *world {
	// Tables that are changed and rolled back look large to the planner, which would then compile each statement of
	// the tools.
	w := &world{t: t, server: pgtest.Server(t, pgserver.Options{Settings: map[string]string{"max_connections": "400", "jit": "off"}})}
	w.must("postgres", `CREATE DATABASE world`)
	w.with("world", func(conn *pgx.Conn) error { return makeRoles(t.Context(), conn) })
	w.fill()
	w.with("world", w.read)
	return w
}

// with connects to a database of the server as its superuser.
func (w *world) with(database string, do func(*pgx.Conn) error) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.server.URL(database))
	if err == nil {
		err = do(conn)
		_ = conn.Close(context.WithoutCancel(w.t.Context()))
	}
	if err != nil {
		w.t.Fatalf("%s: %v", database, err)
	}
}

func (w *world) must(database, script string) {
	w.t.Helper()
	w.with(database, func(conn *pgx.Conn) error {
		_, err := conn.PgConn().Exec(w.t.Context(), script).ReadAll()
		return err
	})
}

// unguarded allows rows as they may exist from before guards: no trigger and no foreign key applies. (CHECKs do.)
const unguarded = "SET LOCAL session_replication_role = replica;\n"

// fill creates everything, and lets a worker advance instances as far as they get.
func (w *world) fill() {
	var b strings.Builder
	each := func(kinds map[string]string, do func(kind, specimen, change string)) {
		for kind, change := range kinds {
			for n := range victims + controls {
				do(kind, fmt.Sprintf("%s/%d", kind, n), change)
			}
		}
	}
	define := func(name, nodes string) {
		fmt.Fprintf(&b, "INSERT INTO process_definition (definition) VALUES ('{\"process\": %q, \"version\": 1, \"start\": \"A\", \"nodes\": {%s}}');\n", name, strings.ReplaceAll(nodes, "'", "''"))
	}
	start := func(process, specimen string) {
		fmt.Fprintf(&b, `INSERT INTO workflow_run (type, payload) VALUES ('graph.start.v1', '{"process": %q, "key": %q, "input": {"key": %[2]q, "items": [1, 2, 3]}}');`+"\n", process, specimen)
	}
	for kind, nodes := range processKinds {
		define(kind, nodes)
	}
	each(processKinds, func(kind, specimen, _ string) { start(kind, specimen) })
	each(map[string]string{"own": ""}, func(_, specimen, _ string) { // each instance has a definition of its own, which can be changed
		define(strings.ReplaceAll(specimen, "/", ""), processKinds["step"])
		start(strings.ReplaceAll(specimen, "/", ""), specimen)
	})
	w.must("world", b.String())
	w.build()

	b.Reset()
	b.WriteString(`
		SELECT process_pause(id) FROM process_instance WHERE business_key ^@ 'paused/';
		INSERT INTO workflow_run (type, payload) SELECT 'graph.cancel.v1', jsonb_build_object('instance', id) FROM process_instance WHERE business_key ^@ 'revoked/';
		SELECT workflow_pause('never.', 'a test');` + "\n")
	each(plainKinds, func(_, specimen, _ string) {
		for _, prefix := range []string{"media", "billing"} {
			kind, number, _ := strings.Cut(specimen, "/")
			fmt.Fprintf(&b, "INSERT INTO workflow_run (type, payload) VALUES ('%s.work.v1', '{\"specimen\": \"%s-%s/%s\"}');\n", prefix, prefix, kind, number)
		}
	})
	each(eventKinds, func(_, specimen, _ string) {
		fmt.Fprintf(&b, "SELECT outbox_emit(gen_random_uuid(), 'test.happened.v1', '{\"specimen\": %q}');\n", specimen)
	})
	w.must("world", b.String())
	w.build()

	b.Reset()
	for kind, change := range plainKinds {
		if change != "" {
			fmt.Fprintf(&b, `UPDATE workflow_run SET %s WHERE payload->>'specimen' ~ '^(media|billing)-%s/';`+"\n", change, kind)
		}
	}
	for kind, change := range eventKinds {
		if change != "" {
			fmt.Fprintf(&b, `UPDATE outbox_event SET %s WHERE payload->>'specimen' ^@ '%s/';`+"\n", change, kind)
		}
	}
	b.WriteString(`
		INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, next_attempt_at, last_error)
		SELECT id, 'control', aggregate_id, 1, now(), 'not now' FROM outbox_event WHERE payload->>'specimen' ^@ 'event-retried/';
		INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, last_error, parked_at)
		SELECT id, 'control', aggregate_id, 3, 'never', now() FROM outbox_event WHERE payload->>'specimen' ^@ 'event-parked/';
		UPDATE outbox_lane SET claim_token = gen_random_uuid(), claimed_by = 'somebody', claim_until = now() + interval '1 second' WHERE sink <> 'control' AND lane % 8 = 1;
		INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, secret_hash)
		SELECT gen_random_uuid(), 'presence/' || n, '{media.}', '{media.}', false, 10, 0, '', 'here', 1, '\x5ec3e7' FROM generate_series(0, 9) AS n;
		INSERT INTO message (id, message_id, name, key, payload, expires_at) SELECT gen_random_uuid(), 'm' || n, 'kept', 'kept/' || n, '{}', now() + interval '1 day' FROM generate_series(0, 9) AS n;
		INSERT INTO workflow_override (actor, reason, table_name, operation, statement) SELECT 'somebody', 'override/' || n, 'workflow_run', 'UPDATE', 'a test' FROM generate_series(0, 9) AS n;
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version)
		SELECT 'run', id, type, 'lease', '23514', 'it is refused', '', xmin FROM workflow_run WHERE payload->>'specimen' ~ '-aside/';
		INSERT INTO workflow_kept (run, token, verdict, result, delay, effects, worker)
		SELECT id, lease_token, 'succeeded', '{"n": 1}', 0, false, 'somebody' FROM workflow_run WHERE payload->>'specimen' ~ '-kept/';
		INSERT INTO workflow_begun (token, begun) SELECT DISTINCT lease_token, true FROM workflow_run WHERE status = 'leased' AND payload ? 'specimen';
		INSERT INTO workflow_accepted (run, token, type, until) SELECT id, lease_token, type, lease_until FROM workflow_run WHERE payload->>'specimen' ~ '-elsewhere/';
		-- Signals that are owed to those of owed, and signals to those of sent that are on their way.
		INSERT INTO workflow_run (id, type, payload, idempotency_key, status, attempt, lease_no, started_at, finished_at, settled_token, settled_by)
		SELECT md5('owed' || id)::uuid, 'graph.signal.v1', '{"name": "owed"}', 'signal-' || business_key, 'succeeded', 1, 1, now(), now(), gen_random_uuid(), 'somebody' FROM process_instance WHERE business_key ^@ 'owed/';
		INSERT INTO process_unreached (token_id, place, signal_id, visit)
		SELECT t.id, m.place, md5('owed' || i.id)::uuid, t.version FROM process_instance i JOIN process_token t ON t.instance_id = i.id JOIN message_wait m ON m.token_id = t.id WHERE i.business_key ^@ 'owed/';
		INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", last_tried_at, row_version)
		SELECT 'wait', u.token_id, 'graph.arrive.v1', 'signal', '23514', 'it is refused', '', now() - interval '1 minute', '1' FROM process_unreached u;
		INSERT INTO workflow_run (type, payload, idempotency_key) SELECT 'graph.signal.v1', '{"name": "sent"}', 'signal-' || business_key FROM process_instance WHERE business_key ^@ 'sent/';
		INSERT INTO process_broadcast (signal_id, name) SELECT id, 'sent' FROM workflow_run WHERE idempotency_key ^@ 'signal-sent/';
		INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, started_at)
		SELECT id, 'failed', 'somebody', 1, 1, now() FROM workflow_run WHERE payload->>'specimen' ~ '-(failed|retried)/'`)
	w.must("world", "BEGIN;"+unguarded+b.String()+";COMMIT; ANALYZE")
}

// build lets a worker do all runs of the engine's own types and of build.
func (w *world) build() {
	ctx, stop := context.WithCancel(w.t.Context())
	pool, err := pgxpool.New(ctx, w.server.URL("world"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, sink := range sinks() {
		if err := delivery.Register(ctx, pool, sink, nil); err != nil {
			w.t.Fatal(err)
		}
	}
	mux := worker.NewMux()
	worker.Handle(mux, "build.step.v1", func(context.Context, json.RawMessage) (struct{}, error) { return struct{}{}, nil })
	worker.Handle(mux, "build.fail.v1", func(context.Context, json.RawMessage) (struct{}, error) {
		return struct{}{}, run.Permanent(fmt.Errorf("it was told to fail"))
	})
	done := make(chan error)
	go func() { done <- worker.Run(ctx, config(pool, mux, "build.", "graph.")) }()
	pgtest.Await(w.t, "all instances to come to their stage", func() (idle bool) {
		err := pool.QueryRow(ctx, `
			SELECT NOT EXISTS (SELECT FROM workflow_run WHERE status IN ('pending', 'leased') AND run_at <= now() AND held_at IS NULL
			                   AND (type ^@ 'graph.' OR type ^@ 'build.'))`).Scan(&idle)
		if err != nil {
			w.t.Fatal(err)
		}
		return idle
	})
	stop()
	if err := <-done; err != nil {
		w.t.Fatal(err)
	}
	pool.Close()
}

// config is that of a fast worker, with the engine of processes if it takes steps.
func config(pool *pgxpool.Pool, mux *worker.Mux, prefixes ...string) worker.Config {
	c := worker.Config{
		Pool: pool, Mux: mux, Prefixes: prefixes, Retention: worker.Retention{Off: true}, Lease: shipped.MinLease, PollInterval: 20 * time.Millisecond, ShutdownGrace: -1,
		Backoff: run.Backoff{Base: 10 * time.Millisecond, Cap: 20 * time.Millisecond}, Logger: quiet,
	}
	for _, p := range prefixes {
		if p == "graph." {
			c.Processes = graph.New(pool)
		}
	}
	return c
}

// sinks are one that is left alone, and some to be changed.
func sinks() []string {
	names := []string{"control"}
	for n := range victims {
		names = append(names, fmt.Sprintf("sink%d", n))
	}
	return names
}

// belongs says which specimen a row x of a table belongs to, where it is not that of its instance.
var belongs = map[string]string{
	"workflow_run":       `coalesce(x.payload->>'specimen', CASE WHEN x.idempotency_key ^@ 'signal-' THEN x.idempotency_key END, (SELECT f.specimen FROM family f JOIN process_token t ON t.instance_id = f.id WHERE t.id = x.token_id))`,
	"workflow_history":   `(SELECT coalesce(r.payload->>'specimen', (SELECT f.specimen FROM family f JOIN process_token t ON t.instance_id = f.id WHERE t.id = r.token_id)) FROM workflow_run r WHERE r.id = x.workflow_id)`,
	"outbox_event":       `x.payload->>'specimen'`,
	"outbox_delivery":    `(SELECT e.payload->>'specimen' FROM outbox_event e WHERE e.id = x.event_id)`,
	"outbox_sink":        `regexp_replace(x.name, '^sink', 'sink/')`,
	"outbox_lane":        `regexp_replace(x.sink, '^sink', 'sink/')`,
	"process_definition": `CASE WHEN x.name ^@ 'own' THEN 'own/' || substr(x.name, 4) END`,
	"process_instance":   `(SELECT f.specimen FROM family f WHERE f.id = x.id)`,
	"join_arrival":       `(SELECT f.specimen FROM family f JOIN process_token t ON t.instance_id = f.id WHERE t.id = x.token_id)`,
	"message":            `x.key`,
	"workflow_worker":    `x.name`,
	"workflow_pause":     `'pause/0'`,
	"workflow_override":  `x.reason`,
	"workflow_binding":   `'binding/' || CASE x.role::text WHEN 'media' THEN 0 ELSE 9 END`,
	"workflow_set_aside": `coalesce((SELECT r.payload->>'specimen' FROM workflow_run r WHERE r.id = x.id), (SELECT f.specimen FROM family f JOIN process_token t ON t.instance_id = f.id WHERE t.id = x.id))`,
	"workflow_accepted":  `(SELECT r.payload->>'specimen' FROM workflow_run r WHERE r.id = x.run)`,
	"workflow_kept":      `(SELECT r.payload->>'specimen' FROM workflow_run r WHERE r.id = x.run)`,
	"outbox_aggregate":   `NULL::text`,
	"outbox_replayed":    `NULL::text`,
	"message_key":        `NULL::text`,
	"process_broadcast":  `(SELECT r.idempotency_key FROM workflow_run r WHERE r.id = x.signal_id)`,
	"process_unreached":  `(SELECT f.specimen FROM family f JOIN process_token t ON t.instance_id = f.id WHERE t.id = x.token_id)`,

	"workflow_console_role": `NULL::text`,
	"workflow_fault":        `NULL::text`,
	"workflow_minute":       `NULL::text`,
	"workflow_policy":       `NULL::text`,
	"workflow_outage":       `NULL::text`,
	"workflow_begun":        `(SELECT min(r.payload->>'specimen') FROM workflow_run r WHERE r.lease_token = x.token)`,
	"workflow_member":       `NULL::text`,

	"workflow_retention":      `NULL::text`,
	"workflow_retention_turn": `NULL::text`,
	"workflow_policy_history": `NULL::text`,
}

// unchanged is a table that only migrations use.
const unchanged = "workflow_schema"

// family names instances, and the instances that they have called, by the key of the outermost one.
const family = `
	WITH RECURSIVE family (id, specimen) AS (
		SELECT id, business_key FROM process_instance WHERE parent_process_instance_id IS NULL
		UNION ALL
		SELECT c.id, f.specimen FROM process_instance c JOIN family f ON f.id = c.parent_process_instance_id
	)`

// read lists the tables with their columns, and all rows.
func (w *world) read(conn *pgx.Conn) (err error) {
	if w.tables, err = readTables(w.t.Context(), conn); err != nil {
		return err
	}
	w.of = map[string]string{}
	for _, name := range sorted(w.tables) {
		found, err := w.rowsOf(conn, name)
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		for _, r := range found {
			w.rows = append(w.rows, r)
			w.of[r.table+" "+r.key] = r.specimen
		}
	}
	return nil
}

func (w *world) rowsOf(conn *pgx.Conn, name string) (found []row, err error) {
	t := w.tables[name]
	owner, ok := belongs[name]
	if !ok {
		owner = `(SELECT f.specimen FROM family f WHERE f.id = x.instance_id)`
	}
	state := `''`
	for _, column := range []string{"node", "state", "status", "claimed_by", "event_type"} {
		if t.has(column) {
			state += fmt.Sprintf(" || '/' || coalesce(x.%s, '')", column)
		}
	}
	rows, _ := conn.Query(w.t.Context(), family+fmt.Sprintf(`
		SELECT %s, coalesce(%s, ''), %s, to_jsonb(x) FROM %s x ORDER BY 2, 1`, t.keyText(), owner, state, name))
	var key, specimen, class string
	var data []byte
	_, err = pgx.ForEachRow(rows, []any{&key, &specimen, &class, &data}, func() error {
		r := row{table: name, key: key, specimen: specimen, text: string(data)}
		kind, _, _ := strings.Cut(specimen, "/")
		r.class = name + " " + kind + class
		r.data, err = decode(data)
		found = append(found, r)
		return err
	})
	return found, err
}
