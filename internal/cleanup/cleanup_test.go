package cleanup

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

func count(t *testing.T, pool *pgxpool.Pool, query string) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func exec(t *testing.T, pool *pgxpool.Pool, query string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), query); err != nil {
		t.Fatal(err)
	}
}

// cleaner returns a Cleaner that removes all that is older than keep says, at once, whatever was asked for
// before.
func cleaner(t *testing.T, pool *pgxpool.Pool, keep Keep) func(context.Context, struct{}) (Removed, error) {
	t.Helper()
	pgtest.ByHand(t, pool, `DELETE FROM workflow_retention`)
	return New(pool, []string{"default."}, time.Hour, keep).Handle
}

// Each kind is removed with its history, in batches, once it is older than its own limit. Rows that are
// younger, unfinished, leased, unpublished or steps of a process stay.
func TestRetention(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `
		INSERT INTO workflow_run (type, metadata)
		SELECT 'test.' || kind || '.v1', jsonb_build_object('kind', kind)
		FROM unnest('{succeeded,failed,cancelled,pending,leased,deleted,step}'::text[]) kind, generate_series(1, CASE kind WHEN 'succeeded' THEN 2500 ELSE 3 END)`)
	exec(t, pool, `
		UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute', leased_by = 'w', lease_no = 1
		WHERE metadata->>'kind' IN ('succeeded', 'failed', 'leased', 'step')`)
	pgtest.ByHand(t, pool, `UPDATE workflow_run SET token_id = id WHERE metadata->>'kind' = 'step'`)
	exec(t, pool, `UPDATE workflow_run SET status = 'succeeded' WHERE metadata->>'kind' IN ('succeeded', 'step')`)
	exec(t, pool, `UPDATE workflow_run SET status = 'failed' WHERE metadata->>'kind' = 'failed'`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE metadata->>'kind' = 'cancelled'`)
	exec(t, pool, `UPDATE workflow_run SET deleted_at = now() WHERE metadata->>'kind' = 'deleted'`)
	exec(t, pool, `SELECT outbox_emit(gen_random_uuid(), 'test.event', '{}') FROM generate_series(1, 3)`)
	exec(t, pool, `UPDATE outbox_event SET published_at = now() WHERE id <> 1`)
	pgtest.Elapse(t, pool, 2*time.Hour)

	removed, err := cleaner(t, pool, Keep{Finished: time.Hour, Failed: 3 * time.Hour, Deleted: time.Hour, Published: time.Hour})(t.Context(), struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Removed{Finished: 2503, Failed: 0, Deleted: 3, Published: 2}); removed != want {
		t.Errorf("removed %+v, want %+v", removed, want)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_run`); n != 12 {
		t.Errorf("%d runs are left, want 3 each of failed, pending, leased, step", n)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_event e WHERE NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = e.workflow_id)`); n != 0 {
		t.Errorf("%d events of removed runs are left", n)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_event`); n != 1 {
		t.Errorf("%d outbox events are left, want the unpublished one", n)
	}

	removed, err = cleaner(t, pool, Keep{Failed: time.Hour})(t.Context(), struct{}{})
	if err != nil || removed != (Removed{Failed: 3}) {
		t.Errorf("removed %+v, %v; want the 3 failed ones only", removed, err)
	}
}

// Finished instances are removed with all their rows, called ones first. An instance stays while one that
// called it, directly or not, is not over, because that one may still undo what it has done.
func TestFinishedProcesses(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}')`)
	pgtest.ByHand(t, pool, `
		INSERT INTO process_instance (id, process_definition_id, status, live_tokens, completed_at, parent_process_instance_id, business_key)
		SELECT md5(tree || depth)::uuid, (SELECT id FROM process_definition), CASE WHEN depth = 1 AND tree = 'open' THEN 'WAITING' ELSE 'COMPLETED' END,
		       CASE WHEN depth = 1 AND tree = 'open' THEN 1 ELSE 0 END, CASE WHEN depth > 1 OR tree <> 'open' THEN now() - depth * interval '1 s' END,
		       CASE WHEN depth > 1 THEN md5(tree || depth - 1)::uuid END, tree || depth
		FROM unnest('{open,over}'::text[]) AS tree, generate_series(1, 3) AS depth`)
	pgtest.ByHand(t, pool, `INSERT INTO process_token (id, instance_id, node, state) SELECT id, id, 'a', CASE WHEN completed_at IS NULL THEN 'Waiting' ELSE 'Completed' END FROM process_instance`)
	pgtest.ByHand(t, pool, `INSERT INTO workflow_run (type, token_id, node) SELECT 'test.step.v1', id, 'a' FROM process_token`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	clean := cleaner(t, pool, Keep{Processes: time.Hour})
	removed := 0
	for range 4 {
		r, err := clean(t.Context(), struct{}{})
		if err != nil {
			t.Fatal(err)
		}
		removed += r.Processes
	}
	if n := count(t, pool, `SELECT count(*) FROM process_instance WHERE business_key LIKE 'open%'`); removed != 3 || n != 3 {
		t.Errorf("%d instances are removed, and %d are left of those whose caller goes on; want 3 and 3", removed, n)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_run`) + count(t, pool, `SELECT count(*) FROM process_token`); n != 6 {
		t.Errorf("%d steps and tokens are left, want 6", n)
	}
}

// A row that somebody has locked does not stop the cleanup. It is removed the next time.
func TestLockedRowIsLeft(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO workflow_run (type) SELECT 'test.a.v1' FROM generate_series(1, 3)`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run LIMIT 1 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	clean := cleaner(t, pool, Keep{Finished: time.Hour})
	if r, err := clean(t.Context(), struct{}{}); err != nil || r.Finished != 2 {
		t.Errorf("removed %d, %v; want 2", r.Finished, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r, err := clean(t.Context(), struct{}{}); err != nil || r.Finished != 1 {
		t.Errorf("removed %d, %v; want 1", r.Finished, err)
	}
}

// plant inserts finished instances p0, p1, … with a step, its history, and a row in each table that belongs to
// instances.
func plant(t *testing.T, pool *pgxpool.Pool, n int) {
	exec(t, pool, `INSERT INTO process_definition (definition) VALUES ('{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}')`)
	pgtest.ByHand(t, pool, `
		INSERT INTO process_instance (id, process_definition_id, status, completed_at, business_key)
		SELECT md5('p' || n)::uuid, (SELECT id FROM process_definition), 'COMPLETED', now(), 'p' || n FROM generate_series(0, `+strconv.Itoa(n-1)+`) AS n`)
	pgtest.ByHand(t, pool, `INSERT INTO parallel_group (id, instance_id, node, live) SELECT id, id, 'f', 0 FROM process_instance`)
	pgtest.ByHand(t, pool, `INSERT INTO process_token (id, instance_id, node, state, parallel_group_id) SELECT md5(id || k::text)::uuid, id, 'a', 'Completed', id FROM process_instance, generate_series(1, 2) AS k`)
	pgtest.ByHand(t, pool, `INSERT INTO workflow_run (type, token_id, node) SELECT 'test.step.v1', id, 'a' FROM process_token`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	pgtest.ByHand(t, pool, `INSERT INTO process_event (instance_id, event_type, version) SELECT id, 'x', 1 FROM process_instance`)
	pgtest.ByHand(t, pool, `INSERT INTO process_state_history (instance_id, to_status, version, actor) SELECT id, 'COMPLETED', 1, 'x' FROM process_instance`)
	pgtest.ByHand(t, pool, `INSERT INTO user_task (instance_id, token_id, node, state, payload) SELECT instance_id, id, 'a', 'completed', '{}' FROM process_token`)
	pgtest.ByHand(t, pool, `INSERT INTO incident (instance_id, token_id, node, code, message, resolved_at) SELECT instance_id, id, 'a', 'x', 'x', now() FROM process_token`)
	pgtest.ByHand(t, pool, `INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref) SELECT instance_id, id, id, 'a', 'x.y' FROM process_token`)
}

// rest counts the rows in all tables that belong to instances, in the order of plant.
const rest = `SELECT (SELECT count(*) FROM process_instance) + (SELECT count(*) FROM parallel_group) + (SELECT count(*) FROM process_token) + (SELECT count(*) FROM workflow_run)
	+ (SELECT count(*) FROM workflow_history) + (SELECT count(*) FROM process_event) + (SELECT count(*) FROM process_state_history) + (SELECT count(*) FROM user_task)
	+ (SELECT count(*) FROM incident) + (SELECT count(*) FROM compensation_record)`

// If the owner of the schema deletes a finished instance by hand, and so that it is recorded, all rows of that instance
// are deleted with it, and no other rows.
func TestDeletedByHand(t *testing.T) {
	pool := pgtest.New(t)
	plant(t, pool, 2)
	exec(t, pool, `INSERT INTO workflow_run (type) VALUES ('test.plain.v1')`)
	if _, err := pool.Exec(t.Context(), `DELETE FROM process_instance`); err == nil || !strings.Contains(err.Error(), "deleted by the engine alone") {
		t.Errorf("without a word: %v", err)
	}
	pgtest.ByHand(t, pool, `DELETE FROM process_instance WHERE business_key = 'p0'`)
	if n := count(t, pool, rest); n != 17 {
		t.Errorf("%d rows are left, want the 16 of the other instance and the plain run", n)
	}
	pgtest.ByHand(t, pool, `DELETE FROM process_instance`)
	if n := count(t, pool, rest); n != 1 {
		t.Errorf("%d rows are left, want the plain run", n)
	}
}

// A user's BEFORE DELETE trigger on instances, such as one that archives them, finds all rows of the instance,
// whatever else the cleanup removes with it. An instance that it refuses or skips stays completely. The others
// are removed by the same cleanup, and refused ones are set aside.
func TestArchive(t *testing.T) {
	pool := pgtest.New(t)
	plant(t, pool, 2*batch+10)
	exec(t, pool, `CREATE TABLE archive (instance jsonb, activities jsonb, rows int)`)
	exec(t, pool, `CREATE FUNCTION archive_instance() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF OLD.business_key IN ('p3', 'p1500') THEN
				RAISE EXCEPTION 'the archive does not want %', OLD.business_key;
			ELSIF OLD.business_key = 'p7' THEN
				RETURN NULL;
			END IF;
			INSERT INTO archive VALUES (to_jsonb(OLD), (SELECT jsonb_agg(a) FROM activity_instance a WHERE a.instance_id = OLD.id),
				(SELECT count(*) FROM parallel_group x WHERE x.instance_id = OLD.id) + (SELECT count(*) FROM process_event x WHERE x.instance_id = OLD.id)
				+ (SELECT count(*) FROM process_state_history x WHERE x.instance_id = OLD.id) + (SELECT count(*) FROM user_task x WHERE x.instance_id = OLD.id)
				+ (SELECT count(*) FROM incident x WHERE x.instance_id = OLD.id) + (SELECT count(*) FROM compensation_record x WHERE x.instance_id = OLD.id)
				+ (SELECT count(*) FROM process_token x JOIN workflow_run r ON r.token_id = x.id JOIN workflow_history h ON h.workflow_id = r.id WHERE x.instance_id = OLD.id));
			RETURN OLD;
		END $$`)
	exec(t, pool, `CREATE TRIGGER archive BEFORE DELETE ON process_instance FOR EACH ROW EXECUTE FUNCTION archive_instance()`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	r, err := cleaner(t, pool, Keep{Processes: time.Hour, Finished: time.Hour})(t.Context(), struct{}{})
	if err != nil || r.Processes != 2*batch+7 || r.Refused != 2 {
		t.Errorf("removed %+v, want %d; %v", r, 2*batch+7, err)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_set_aside a JOIN process_instance i ON i.id = a.id
		WHERE a.kind = 'retention' AND a.type = 'process_instance' AND a.sqlstate = 'P0001' AND a.message = 'the archive does not want ' || i.business_key`); n != 2 {
		t.Errorf("%d are set aside, want 2", n)
	}
	if n := count(t, pool, rest); n != 3*16 {
		t.Errorf("%d rows are left, want all 48 of those that stay", n)
	}
	if n := count(t, pool, `SELECT count(*) FROM archive WHERE rows = 11 AND jsonb_array_length(activities) = 2`); n != 2*batch+7 {
		t.Errorf("%d instances were archived with all that is theirs, want %d", n, 2*batch+7)
	}
	exec(t, pool, `DROP TRIGGER archive ON process_instance`)
	due(t, pool)
	if r, err := cleaner(t, pool, Keep{Processes: time.Hour})(t.Context(), struct{}{}); err != nil || r.Processes != 3 {
		t.Errorf("removed %d, %v; want those that had stayed", r.Processes, err)
	}
}

// due does what workers do every ten seconds: for each reason for which rows are set aside, it makes one of these rows
// due for another try.
func due(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.ByHand(t, pool, `UPDATE workflow_set_aside SET last_tried_at = last_tried_at - interval '10 seconds'`)
	exec(t, pool, `SELECT workflow_try_again_v1()`)
}

// A row of any kind whose deletion is refused with an unusual SQLSTATE is set aside, and the same cleanup
// removes all others. Rows that are set aside are skipped. From time to time one of the rows with the same reason is
// tried again, and if it is removed, all are. If too many rows of a kind are refused, the rest waits for the next
// cleanup.
func TestRefusedRows(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'kept by law' USING ERRCODE = 'XX777', CONSTRAINT = 'law'; END $$`)
	exec(t, pool, `INSERT INTO workflow_run (type, priority) SELECT 'test.a.v1', CASE WHEN n % 700 = 0 THEN 1 ELSE 0 END FROM generate_series(1, 2500) n`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	exec(t, pool, `SELECT outbox_emit(gen_random_uuid(), CASE WHEN n = 7 THEN 'test.kept' ELSE 'test.event' END, '{}') FROM generate_series(1, 20) n`)
	exec(t, pool, `UPDATE outbox_event SET published_at = now()`)
	pgtest.ByHand(t, pool, `INSERT INTO message (id, message_id, name, key, payload, expires_at) SELECT gen_random_uuid(), n::text, 'm', n::text, '{}', now() FROM generate_series(1, 20) n`)
	exec(t, pool, `CREATE TRIGGER keep BEFORE DELETE ON workflow_run FOR EACH ROW WHEN (OLD.priority = 1) EXECUTE FUNCTION refuse()`)
	exec(t, pool, `CREATE TRIGGER keep BEFORE DELETE ON outbox_event FOR EACH ROW WHEN (OLD.event_type = 'test.kept') EXECUTE FUNCTION refuse()`)
	exec(t, pool, `CREATE TRIGGER keep BEFORE DELETE ON message FOR EACH ROW WHEN (OLD.key = '7') EXECUTE FUNCTION refuse()`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	clean := cleaner(t, pool, Keep{Finished: time.Hour, Published: time.Hour, Processes: time.Hour})
	expect := func(want Removed) {
		t.Helper()
		if r, err := clean(t.Context(), struct{}{}); err != nil || r != want {
			t.Errorf("removed %+v, %v; want %+v", r, err, want)
		}
	}
	expect(Removed{Finished: 2497, Published: 19, Messages: 19, Refused: 5})
	const aside = `SELECT count(*) FROM workflow_set_aside WHERE kind = 'retention' AND sqlstate = 'XX777' AND "constraint" = 'law' AND message = 'kept by law'`
	for table, want := range map[string]int{"workflow_run": 3, "outbox_event": 1, "message": 1} {
		if n := count(t, pool, aside+` AND type = '`+table+`' AND id IN (SELECT workflow_unremoved_id(id::text) FROM `+table+`)`); n != want {
			t.Errorf("%d rows of %s are set aside, want %d", n, table, want)
		}
	}
	expect(Removed{})
	due(t, pool)
	expect(Removed{Refused: 3})
	exec(t, pool, `DROP TRIGGER keep ON message; DROP TRIGGER keep ON workflow_run; DROP TRIGGER keep ON outbox_event`)
	due(t, pool)
	expect(Removed{Finished: 3, Published: 1, Messages: 1})
	if n := count(t, pool, `SELECT count(*) FROM workflow_set_aside`); n != 0 {
		t.Errorf("%d are still set aside", n)
	}

	exec(t, pool, `CREATE TRIGGER keep BEFORE DELETE ON workflow_run FOR EACH ROW WHEN (OLD.priority = 1) EXECUTE FUNCTION refuse()`)
	exec(t, pool, `INSERT INTO workflow_run (type, priority) SELECT 'test.a.v1', CASE WHEN n <= 2500 THEN 1 ELSE 0 END FROM generate_series(1, 2600) n`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE status = 'pending'`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	total := Removed{}
	for range 2 {
		r, err := clean(t.Context(), struct{}{})
		if err != nil {
			t.Fatal(err)
		}
		total.Finished, total.Refused = total.Finished+r.Finished, total.Refused+r.Refused
	}
	if total.Finished != 100 || total.Refused != 2500 {
		t.Errorf("in two cleanups %+v; want the 100 that may go, and the others set aside", total)
	}
}

// A row for which a user's trigger raises an SQLSTATE of passing trouble delays the others for a minute at
// most. Until then the cleanup is tried again every five seconds, and no attempt is charged. Then the row is
// set aside, and the others are removed. If it is raised for all rows, it is the statement's error.
func TestPassingStateOfARow(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `CREATE FUNCTION busy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END $$`)
	exec(t, pool, `CREATE TRIGGER busy BEFORE DELETE ON workflow_run FOR EACH ROW WHEN (OLD.priority = 1) EXECUTE FUNCTION busy()`)
	exec(t, pool, `INSERT INTO workflow_run (type, priority) SELECT 'test.a.v1', CASE WHEN n = 25 THEN 1 ELSE 0 END FROM generate_series(1, 50) n`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	c := New(pool, []string{"default."}, time.Hour, Keep{Finished: time.Hour})
	clean := c.Handle
	later := func() {
		for _, s := range c.faults.series {
			s.Age(2 * fault.Patience)
		}
	}
	for range 2 {
		if r, err := clean(t.Context(), struct{}{}); fmt.Sprint(err) != "try again in 5s" || r.Finished+r.Refused > 0 {
			t.Errorf("at first: removed %+v, %v", r, err)
		}
	}
	later()
	if r, err := clean(t.Context(), struct{}{}); err != nil || r.Finished != 49 || r.Refused != 1 {
		t.Errorf("after a minute: removed %+v, %v", r, err)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_set_aside a JOIN workflow_run r ON r.id = a.id WHERE a.kind = 'retention' AND a.sqlstate = '40001' AND r.priority = 1`); n != 1 {
		t.Errorf("%d are set aside, want the one", n)
	}
	exec(t, pool, `DROP TRIGGER busy ON workflow_run; CREATE TRIGGER busy BEFORE DELETE ON workflow_run FOR EACH ROW EXECUTE FUNCTION busy()`)
	exec(t, pool, `INSERT INTO workflow_run (type) SELECT 'test.a.v1' FROM generate_series(1, 50) n`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE status = 'pending'`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	for range 2 {
		if r, err := clean(t.Context(), struct{}{}); fmt.Sprint(err) != "try again in 5s" || r.Finished+r.Refused > 0 {
			t.Errorf("for all: removed %+v, %v", r, err)
		}
		later()
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_fault WHERE statement = 'retention' AND sqlstate = '40001'`); n != 1 {
		t.Error("it is not told of as the statement's error")
	}
}

// What is refused for every row is the statement's error. Nothing is set aside, the cleanup is tried again
// after five seconds with no attempt charged, and workflow_fault reports it while it lasts. All other kinds are
// removed.
func TestStatementAtFault(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO workflow_run (type) SELECT 'test.a.v1' FROM generate_series(1, 500) n`)
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled'`)
	pgtest.ByHand(t, pool, `INSERT INTO message (id, message_id, name, key, payload, expires_at) SELECT gen_random_uuid(), n::text, 'm', n::text, '{}', now() FROM generate_series(1, 20) n`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	clean := cleaner(t, pool, Keep{Finished: time.Hour, Processes: time.Hour})
	for name, broken := range map[string][2]string{
		"a table is missing": {`ALTER TABLE workflow_history RENAME TO moved`, `ALTER TABLE moved RENAME TO workflow_history`},
		"a trigger for all": {`CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'never' USING ERRCODE = 'XX777'; END $$;
			CREATE TRIGGER never BEFORE DELETE ON workflow_run FOR EACH ROW EXECUTE FUNCTION never()`, `DROP TRIGGER never ON workflow_run`},
	} {
		exec(t, pool, broken[0])
		r, err := clean(t.Context(), struct{}{})
		if fmt.Sprint(err) != "try again in 5s" || r.Finished+r.Refused > 0 {
			t.Errorf("%s: removed %+v, %v", name, r, err)
		}
		if n := count(t, pool, `SELECT count(*) FROM workflow_fault WHERE statement = 'retention'`); n != 1 {
			t.Errorf("%s: workflow_fault has %d", name, n)
		}
		exec(t, pool, broken[1])
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_set_aside`) + count(t, pool, `SELECT count(*) FROM message`); n != 0 {
		t.Errorf("%d are set aside, or stay", n)
	}
	if r, err := clean(t.Context(), struct{}{}); err != nil || r.Finished != 500 {
		t.Errorf("removed %+v, %v, once it was mended", r, err)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_fault`); n != 0 {
		t.Errorf("workflow_fault still has %d", n)
	}
}

// statements records the statements of a pool.
type statements struct {
	mu  sync.Mutex
	sql []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sql = append(s.sql, data.SQL)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Each statement of the cleanup is in a transaction of its own, without JIT: the server overestimates the cost
// of some statements, and compiling them takes seconds.
func TestNothingIsCompiled(t *testing.T) {
	config := pgtest.New(t).Config()
	seen := &statements{}
	config.ConnConfig.Tracer = seen
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	plant(t, pool, 10)
	pgtest.Elapse(t, pool, 2*time.Hour)
	seen.sql = nil
	if _, err := cleaner(t, pool, Keep{Finished: time.Hour, Failed: time.Hour, Deleted: time.Hour, Published: time.Hour, Processes: time.Hour})(t.Context(), struct{}{}); err != nil {
		t.Fatal(err)
	}
	n := 0
	for i, sql := range seen.sql {
		if strings.Contains(sql, "WITH ") || strings.Contains(sql, "workflow_remov") {
			if n++; i == 0 || seen.sql[i-1] != "begin; SET LOCAL jit = off" {
				t.Errorf("%s may be compiled", sql)
			}
		}
	}
	if n < 8 {
		t.Errorf("%d statements were seen", n)
	}
}

// over inserts runs of a type that were cancelled so long ago.
func over(t *testing.T, pool *pgxpool.Pool, typ string, n int) {
	t.Helper()
	exec(t, pool, fmt.Sprintf(`INSERT INTO workflow_run (type) SELECT '%s' FROM generate_series(1, %d)`, typ, n))
	exec(t, pool, `UPDATE workflow_run SET status = 'cancelled' WHERE status = 'pending'`)
}

// remaining returns how many runs there are of each type.
func remaining(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	var all string
	if err := pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(type || ' ' || n, ', ' ORDER BY type), '') FROM (SELECT type, count(*) AS n FROM workflow_run GROUP BY 1) r`).Scan(&all); err != nil {
		t.Fatal(err)
	}
	return all
}

// at takes all turns that are due as a worker with these prefixes.
func at(t *testing.T, pool *pgxpool.Pool, keep time.Duration, prefixes ...string) Removed {
	t.Helper()
	r, err := New(pool, prefixes, time.Hour, Keep{Finished: keep}).Handle(t.Context(), struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Whichever worker removes rows of a prefix, the longest period applies that any worker has asked for: for the same
// prefix, for one that covers it, or for one that it covers. For ever is the longest. A period that was last asked for
// over a day ago still applies until another period is asked for. So the period of a group of workers that is away
// is kept.
func TestLongestPeriodCounts(t *testing.T) {
	pool := pgtest.New(t)
	for _, typ := range []string{"a.x.v1", "b.x.v1", "b.c.x.v1", "d.x.v1", "d.e.x.v1", "f.x.v1", "g.x.v1"} {
		over(t, pool, typ, 3)
	}
	pgtest.Elapse(t, pool, 2*time.Hour)
	at(t, pool, 240*time.Hour, "a.", "b.", "d.e.")
	at(t, pool, 0, "f.")
	if r := at(t, pool, time.Hour, "a.", "b.c.", "d.", "f.", "default."); r.Finished != 6 {
		t.Errorf("%d are removed, want 3 of d.x.v1, and 3 that nobody asks for", r.Finished)
	}
	if got, want := remaining(t, pool), "a.x.v1 3, b.c.x.v1 3, b.x.v1 3, d.e.x.v1 3, f.x.v1 3"; got != want {
		t.Errorf("there are %s, want %s", got, want)
	}
	pgtest.Elapse(t, pool, 23*time.Hour)
	at(t, pool, 240*time.Hour, "d.")
	pgtest.Elapse(t, pool, 2*time.Hour)
	pgtest.ByHand(t, pool, `UPDATE workflow_retention SET asked_at = now() - interval '11 minutes' WHERE period = 3600`) // the worker that asks for less was there all day
	at(t, pool, time.Hour, "a.", "b.c.", "f.", "default.")
	if got, want := remaining(t, pool), "b.c.x.v1 3, b.x.v1 3, d.e.x.v1 3"; got != want {
		t.Errorf("a day later there are %s, want %s: a. and f. are asked to be kept for less, the others are nobody's to remove, or kept by d. for ten days", got, want)
	}
}

// If no worker has asked for a period for days, because all workers or the database were down, the first worker that
// returns does not remove rows that others wanted to keep. The others have another day to ask again.
func TestWhoComesBackFirst(t *testing.T) {
	pool := pgtest.New(t)
	over(t, pool, "a.x.v1", 3)
	pgtest.Elapse(t, pool, 2*time.Hour)
	at(t, pool, 0, "a.")
	at(t, pool, time.Hour, "a.")
	pgtest.Elapse(t, pool, 48*time.Hour)
	for range 2 {
		if r := at(t, pool, time.Hour, "a."); r.Finished != 0 {
			t.Errorf("%d are removed that others ask to be kept for ever", r.Finished)
		}
		pgtest.ByHand(t, pool, `UPDATE workflow_retention SET asked_at = now() - CASE period WHEN 0 THEN interval '23 hours' ELSE interval '11 minutes' END`)
	}
	pgtest.ByHand(t, pool, `UPDATE workflow_retention SET asked_at = now() - CASE period WHEN 0 THEN interval '25 hours' ELSE interval '11 minutes' END`)
	if r := at(t, pool, time.Hour, "a."); r.Finished != 3 {
		t.Errorf("%d are removed once they have not come back for a day, want 3", r.Finished)
	}
}

// The first worker that asks for a prefix gets no turn at once, because another one that asks for a longer
// period may start a moment later.
func TestFirstTurnIsNotAtOnce(t *testing.T) {
	pool := pgtest.New(t)
	over(t, pool, "a.x.v1", 3)
	pgtest.Elapse(t, pool, 2*time.Hour)
	now := func() *float64 { return nil }
	first, second := New(pool, []string{"a."}, time.Hour, Keep{Finished: time.Hour}), New(pool, []string{"a."}, time.Hour, Keep{})
	if r, _, err := first.round(t.Context(), pool, now); err != nil || r.Finished != 0 {
		t.Errorf("%d are removed at once, %v", r.Finished, err)
	}
	if _, _, err := second.round(t.Context(), pool, now); err != nil {
		t.Fatal(err)
	}
	pgtest.Elapse(t, pool, 2*time.Hour)
	if r, _, err := first.round(t.Context(), pool, now); err != nil || r.Finished != 0 {
		t.Errorf("%d are removed, %v, though another asks to have them kept", r.Finished, err)
	}
}

// However many workers take turns at the same time, each turn belongs to one worker, and no two remove the same
// rows. A turn is not taken before it is due.
func TestOneTurnAtATime(t *testing.T) {
	pool := pgtest.New(t)
	over(t, pool, "a.x.v1", 20)
	pgtest.Elapse(t, pool, 2*time.Hour)
	var turns atomic.Int64
	all := func() {
		var workers sync.WaitGroup
		for range 8 {
			workers.Go(func() {
				c := New(pool, []string{"a.", "b."}, time.Hour, Keep{Finished: time.Hour, Failed: time.Hour, Deleted: time.Hour, Published: time.Hour, Processes: time.Hour})
				for {
					switch turn, err := c.take(t.Context(), pool, nil); {
					case err != nil:
						t.Error(err)
						return
					case turn == nil:
						return
					}
					turns.Add(1)
				}
			})
		}
		workers.Wait()
	}
	all() // asks for periods
	pgtest.Elapse(t, pool, time.Hour)
	all()
	all()
	if n := turns.Load(); n != 2*4+3 {
		t.Errorf("%d turns were taken, want 4 for each prefix, and 3 of what is of no type", n)
	}
	pgtest.Elapse(t, pool, time.Hour)
	all()
	if n := turns.Load(); n != 2*(2*4+3) {
		t.Errorf("%d turns were taken an hour later, want as many again", n)
	}
}

// A turn continues where the one before ended, so rows that stay because of other prefixes are looked at once, and again
// only a day later. Rows before that place that were locked are removed later.
func TestGoesOnFromWhereItWas(t *testing.T) {
	pool := pgtest.New(t)
	over(t, pool, "kept.x.v1", 10*batch+500)
	over(t, pool, "a.x.v1", 2*batch+1)
	pgtest.Elapse(t, pool, 2*time.Hour)
	at(t, pool, 0, "kept.")
	if r := at(t, pool, time.Hour, "a."); r.Finished != 2*batch+1 {
		t.Errorf("%d are removed, want all of a. behind those of others", r.Finished)
	}
	const from = `SELECT count(*) FROM workflow_retention_turn WHERE prefix = 'a.' AND kind = 'cancelled' AND reached > now() - interval '61 minutes'`
	if n := count(t, pool, from); n != 1 {
		t.Error("the next turn begins with the oldest, or looks at what is of others again")
	}
	over(t, pool, "a.x.v1", 3)
	pgtest.Elapse(t, pool, 2*time.Hour)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM workflow_run WHERE type = 'a.x.v1' LIMIT 1 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	if r := at(t, pool, time.Hour, "a."); r.Finished != 2 {
		t.Errorf("%d are removed, want 2 that are not locked", r.Finished)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := at(t, pool, time.Hour, "a."); r.Finished != 1 {
		t.Errorf("%d are removed, want the one that was locked", r.Finished)
	}
	over(t, pool, "a.x.v1", 1)
	pgtest.ByHand(t, pool, `UPDATE workflow_run SET finished_at = now() - interval '3 days' WHERE type = 'a.x.v1'`) // as if a commit had arrived days late
	if r := at(t, pool, time.Hour, "a."); r.Finished != 0 {
		t.Errorf("%d are removed from before what was looked at", r.Finished)
	}
	pgtest.Elapse(t, pool, 25*time.Hour)
	if r := at(t, pool, time.Hour, "a."); r.Finished != 1 {
		t.Errorf("%d are removed by the sweep a day later, want 1", r.Finished)
	}
}

// A turn that takes too long ends between two batches, and the next turn continues.
func TestTurnThatTakesLong(t *testing.T) {
	pool := pgtest.New(t)
	over(t, pool, "a.x.v1", 10*batch+5)
	pgtest.Elapse(t, pool, 2*time.Hour)
	c := New(pool, []string{"a."}, time.Hour, Keep{Finished: time.Hour})
	c.limit = -1
	for _, want := range []int{0, 10 * batch, 5} {
		if want == 10*batch { // the first turn is not at once
			pgtest.Elapse(t, pool, time.Hour)
		}
		if r, _, err := c.round(t.Context(), pool, func() *float64 { return nil }); err != nil || r.Finished != want {
			t.Errorf("%d are removed, %v; want %d", r.Finished, err, want)
		}
	}
}

// A role bound to prefixes removes old rows of its prefixes, and sets aside what is refused. It can neither
// remove, see nor ask for rows of other prefixes, nor remove rows that others want kept.
func TestBoundRolesRemoveTheirOwn(t *testing.T) {
	pool := pgtest.New(t)
	named := pgtest.Roles(t, pool)
	err := pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
		return sql.BindWorker(t.Context(), c.Conn(), named, named+"_media", []string{"media."})
	})
	if err != nil {
		t.Fatal(err)
	}
	media := pgtest.As(t, pool, named, "media")
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'kept by law' USING ERRCODE = 'XX777'; END $$`)
	exec(t, pool, `CREATE TRIGGER keep BEFORE DELETE ON workflow_run FOR EACH ROW WHEN (OLD.type = 'media.kept.v1') EXECUTE FUNCTION refuse()`)
	for _, typ := range []string{"media.x.v1", "media.kept.v1", "media.long.x.v1", "billing.x.v1"} {
		over(t, pool, typ, 3)
	}
	exec(t, pool, `SELECT outbox_emit(gen_random_uuid(), 'test.event', '{}'); UPDATE outbox_event SET published_at = now()`)
	pgtest.Elapse(t, pool, 2*time.Hour)
	at(t, pool, 24*time.Hour, "media.long.")
	r, err := New(media, []string{"billing.", "media.", "default."}, time.Hour, Keep{Finished: time.Hour, Published: time.Hour}).Handle(t.Context(), struct{}{})
	if err != nil || r.Finished != 3 || r.Refused != 3 {
		t.Errorf("removed %+v, %v; want 3 runs, and 3 refused", r, err)
	}
	if got, want := remaining(t, pool), "billing.x.v1 3, media.kept.v1 3, media.long.x.v1 3"; got != want {
		t.Errorf("there are %s, want %s", got, want)
	}
	if n := count(t, pool, `SELECT count(*) FROM workflow_retention WHERE set_by ^@ '`+named+`_login' AND (prefix <> 'media.' OR kind IN ('events', 'messages', 'processes'))`); n != 0 {
		t.Errorf("the role has asked for %d things that are not its own", n)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_event`); n != 1 {
		t.Error("the role has removed an event")
	}
	for _, prefix := range []string{"billing.", "*", "med", ""} {
		for _, call := range []string{
			`SELECT workflow_remove_v1('%s', 'cancelled', '{}')`, `SELECT * FROM workflow_removable_v1('%s', 'cancelled', '-infinity', gen_random_uuid(), 10)`,
			`SELECT workflow_retention_done_v1('%s', 'cancelled', now(), 0, 0)`,
		} {
			if _, err := media.Exec(t.Context(), fmt.Sprintf(call, prefix)); err == nil || !strings.Contains(err.Error(), "is not bound to prefix") {
				t.Errorf("%s: %v", fmt.Sprintf(call, prefix), err)
			}
		}
	}
	exec(t, pool, `DROP TRIGGER keep ON workflow_run`)
	var ids []string
	if err := pool.QueryRow(t.Context(), `SELECT array_agg(id::text) FROM workflow_run`).Scan(&ids); err != nil {
		t.Fatal(err)
	}
	for _, prefix := range []string{"media.long.", "media."} {
		if _, err := media.Exec(t.Context(), `SELECT workflow_remove_v1($1, 'cancelled', $2)`, prefix, ids); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := remaining(t, pool), "billing.x.v1 3, media.long.x.v1 3"; got != want {
		t.Errorf("by their ids: there are %s, want %s", got, want)
	}
}

// A period below a minute is refused with a message, and so are an invalid prefix and an unknown kind. Only the
// owner can change by hand what workers have asked for.
func TestPeriodsThatAreMistakes(t *testing.T) {
	pool := pgtest.New(t)
	for call, want := range map[string]string{
		`SELECT workflow_retention_v1('{a.}', '{failed}', '{59}', 60, NULL)`:                             "period 59",
		`SELECT workflow_retention_v1('{a.}', '{failed}', '{4000000000}', 60, NULL)`:                     "period 4000000000",
		`SELECT workflow_retention_v1('{a}', '{failed}', '{60}', 60, NULL)`:                              "prefix 'a' is none",
		`SELECT workflow_retention_v1('{a.}', '{finished}', '{60}', 60, NULL)`:                           "kinds {finished} do not go",
		`SELECT workflow_retention_v1('{a.}', '{failed}', '{60,60}', 60, NULL)`:                          "kinds {failed} do not go",
		`SELECT workflow_retention_v1('{a.}', '{failed}', '{60}', -1, NULL)`:                             "every -1",
		`SELECT workflow_remove_v1('a.', 'leased', '{}')`:                                                "kind 'leased' is none",
		`INSERT INTO workflow_retention (prefix, kind, period, set_by) VALUES ('a.', 'failed', 60, 'x')`: "workflow_retention: ",
	} {
		if _, err := pool.Exec(t.Context(), call); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", call, err, want)
		}
	}
	pgtest.ByHand(t, pool, `INSERT INTO workflow_retention (prefix, kind, period, set_by) VALUES ('a.', 'failed', 60, 'x')`)
}
