package sql_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/sql"
)

// beforeBounds is the last version before columns had bounds.
const beforeBounds = 12

// An oldWorker leases, settles and reclaims like a worker of the previous version, through the first version of each
// function.
type oldWorker struct{ conn *pgx.Conn }

func (w oldWorker) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.turn(ctx)
		time.Sleep(5 * time.Millisecond)
	}
}

func (w oldWorker) turn(ctx context.Context) {
	const none = `'00000000-0000-0000-0000-000000000000'::uuid`
	rows, _ := w.conn.Query(ctx, `SELECT suspect, type, priority FROM workflow_lanes_v1('{up.}') WHERE type IS NOT NULL`)
	type lane struct {
		Suspect  bool
		Type     string
		Priority int
	}
	lanes, _ := pgx.CollectRows(rows, pgx.RowToStructByPos[lane])
	for _, l := range lanes {
		token := uuid.New()
		rows, _ := w.conn.Query(ctx, `SELECT id FROM workflow_lease_v1(ARRAY[$1::boolean], ARRAY[$2::text], ARRAY[$3::int], '{-infinity}', ARRAY[`+none+`], '{0}', '{100}', NULL, NULL,
			true, 100, 100, false, false, false, $4, 'old', ARRAY[$2::text], '{60}', '{3600}')`, l.Suspect, l.Type, l.Priority, token)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		if err != nil {
			_, _ = w.conn.Exec(ctx, `SELECT FROM workflow_lease_refused_v1(ARRAY[$1::boolean], ARRAY[$2::text], ARRAY[$3::int], '{-infinity}', ARRAY[`+none+`], '{0}', true, 100, true, 'old', ARRAY[$2::text], '{60}', '{3600}')`,
				l.Suspect, l.Type, l.Priority)
			continue
		}
		w.settle(ctx, "succeeded", token, ids...)
	}
	token := uuid.New()
	rows, _ = w.conn.Query(ctx, `SELECT id FROM workflow_take_back_v1('-infinity', true, 100, '{0.01}', $1, 'old', 60) WHERE exhausted`, token)
	exhausted, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		_, _ = w.conn.Exec(ctx, `SELECT FROM workflow_take_back_refused_v1('-infinity', true, true, 'old', 60)`)
	}
	w.settle(ctx, "failed", token, exhausted...)
}

func (w oldWorker) settle(ctx context.Context, verdict string, token uuid.UUID, ids ...uuid.UUID) {
	for _, id := range ids {
		_, err := w.conn.Exec(ctx, `SELECT workflow_settle_v1(ARRAY[$1::uuid], ARRAY[$2::uuid], ARRAY[$3::text], '{null}', '{null}', '{null}', '{0}', 'old')`, id, token, verdict)
		if err != nil {
			_, _ = w.conn.Exec(ctx, `SELECT workflow_unsettled_v1($1, $2, '23514', $3, '')`, id, token, err.Error())
		}
	}
}

// Rows beyond a bound, written under the schema before there were bounds, in each state: while a worker of that
// version runs, the schema is upgraded, and each of the rows ends or is reported. A value without a nearest value
// within its bound stops the upgrade, which names the row and what to do; after that the upgrade continues. Rows that
// are over and cannot be mended are listed, and their CHECK stays not valid.
func TestUpgradeOfRowsBeyondBounds(t *testing.T) {
	url := pgtest.Empty(t)
	s := connect(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	s.do(`SET session_replication_role = replica`)
	written := 0
	for _, column := range s.list(`
		SELECT a.attname || '=' || format_type(a.atttypid, NULL) FROM pg_attribute a
		WHERE a.attrelid = 'workflow_run'::regclass AND a.attnum > 0 AND a.attname NOT IN ('id', 'lease_until') ORDER BY a.attnum`) {
		name, typ, _ := strings.Cut(column, "=")
		if typ == "jsonb" {
			continue
		}
		for k, value := range extremes[typ] {
			for state, with := range map[string]string{
				"pending": `status = 'pending'`,
				"leased":  `status = 'leased', attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), lease_until = now(), leased_by = 'dead', started_at = now() - interval '1 minute'`,
				"done":    `status = 'succeeded', finished_at = now()`,
			} {
				id := s.do(fmt.Sprintf(`INSERT INTO workflow_run (type, idempotency_key) VALUES ('up.a', 'key %s %d %s') RETURNING id`, name, k, state))
				s.do(`UPDATE workflow_run SET ` + with + ` WHERE id = '` + id + `'`)
				if _, err := s.try(`UPDATE workflow_run SET ` + name + ` = ` + value + ` WHERE id = '` + id + `'`); err == nil {
					written++
				}
			}
		}
	}
	if written < 90 {
		t.Errorf("%d rows are beyond a bound, want at least 90", written)
	}
	large := `(SELECT jsonb_object_agg(g, x) FROM (SELECT g, string_agg(md5(random()::text || g || h), '') AS x FROM generate_series(1, 600) AS g, generate_series(1, 1000) AS h GROUP BY g) AS y)`
	open := s.do(`INSERT INTO message (id, message_id, name, key, payload, expires_at) VALUES (gen_random_uuid(), 'm', 'n', 'k', ` + large + `, now() + interval '1 day') RETURNING id`)
	over := s.do(`INSERT INTO process_event (instance_id, event_type, version, data) VALUES (gen_random_uuid(), 'node.entered', 1, ` + large + `) RETURNING id`)
	s.do(`SET session_replication_role = origin`)

	working, stop := context.WithCancel(t.Context())
	worked := make(chan struct{})
	go func() {
		defer close(worked)
		oldWorker{connect(t, url).conn}.run(working)
	}()
	defer func() { stop(); <-worked }()

	err := sql.Up(t.Context(), s.conn)
	if err == nil || !strings.Contains(err.Error(), open) || !strings.Contains(err.Error(), "payload") {
		t.Fatalf("upgrade beside an open row that is too large: %v", err)
	}
	_, fix, _ := strings.Cut(err.Error(), "→ ")
	s.do(fix) // as the error says
	up(t, s)

	pgtest.Await(t, "each row has ended, or is told of", func() bool {
		return s.do(`
			SELECT count(*) FROM workflow_run r
			WHERE r.type = 'up.a' AND r.finished_at IS NULL AND r.held_at IS NULL AND r.run_at < now() + interval '1 day' AND r.deleted_at IS NULL
			  AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.id = r.id)`) == "0"
	})
	s.expect("values kept in the audit", s.do(`SELECT count(DISTINCT row_key->>'id') >= `+fmt.Sprint(written/3)+` FROM workflow_override WHERE table_name = 'workflow_run' AND row_key ? 'was'`), "t")
	s.expect("beyond bounds", s.do(`SELECT string_agg(concat_ws(' ', "table", key->>'id', "column", open::text), ', ') FROM workflow_out_of_bounds()`), "process_event "+over+" data false")
	s.expect("CHECKs that are not valid", s.do(`SELECT string_agg(name, ' ') FROM workflow_bound_check WHERE valid IS NOT TRUE`), "process_event_documents_bound")
	s.do(`BEGIN; SET LOCAL workflow.advance = 'on'; DELETE FROM process_event WHERE id = ` + over + `; COMMIT`)
	s.expect("after they are gone", s.do(`SELECT cardinality(workflow_validate_bounds_v1('process_event'))`), "0")
	s.expect("all valid", s.do(`SELECT bool_and(valid) FROM workflow_bound_check`), "t")
}

// The same for every column of every table that has bounds: the upgrade succeeds, if necessary after the fixes that
// it names. Then each row is within its bounds or, if it is over, is listed with the statement that mends it.
func TestUpgradeOfEveryTable(t *testing.T) {
	url := pgtest.Empty(t)
	s := connect(t, url)
	if err := sql.UpTo(t.Context(), s.conn, beforeBounds); err != nil {
		t.Fatal(err)
	}
	bounds, _ := psql(t)
	s.do(`SET session_replication_role = replica`)
	written, tables := 0, map[string]bool{}
	for statement := range strings.SplitSeq(planted, ";") {
		if strings.Contains(statement, "workflow_schema") {
			continue
		}
		_, rest, is := strings.Cut(statement, "INSERT INTO ")
		if _, err := s.try(strings.ReplaceAll(statement, "$", "00000000-0000-4000-8000-000000000001")); is && err == nil {
			table, _, _ := strings.Cut(rest, " ")
			tables[table] = true
		}
	}
	for table := range tables {
		if table == "workflow_run" {
			continue // see above
		}
		var all, copied []string // columns, and the values for a copy of a row, whose keys are drawn
		for _, c := range s.list(`
			SELECT format('%I', a.attname) || '=' || CASE
				WHEN NOT a.attnum = ANY (coalesce((SELECT array_agg(k) FROM pg_index i, unnest(i.indkey) AS k WHERE i.indrelid = a.attrelid AND i.indisunique), '{}')) THEN format('%I', a.attname)
				WHEN a.atttypid = 'uuid'::regtype THEN 'gen_random_uuid()' WHEN a.atttypid = 'text'::regtype THEN 'md5(random()::text)'
				WHEN a.atttypid = 'regrole'::regtype THEN format('%I', a.attname) ELSE '(random() * 30000)::int' END
			FROM pg_attribute a WHERE a.attrelid = '` + table + `'::regclass AND a.attnum > 0 AND a.attgenerated = '' ORDER BY a.attnum`) {
			name, value, _ := strings.Cut(c, "=")
			all, copied = append(all, name), append(copied, value)
		}
		for _, c := range bounds.list(`
			SELECT format('%I=%s', b."column", format_type(a.atttypid, NULL)) FROM workflow_bound b JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column"
			WHERE b.relation = '` + table + `' AND b.guard IS NULL AND a.attgenerated = ''
			  AND NOT EXISTS (SELECT FROM pg_constraint f WHERE f.contype = 'f' AND f.conrelid = a.attrelid AND a.attnum = ANY (f.conkey)) -- that kept it within bounds`) {
			name, typ, _ := strings.Cut(c, "=")
			for _, value := range extremes[typ] {
				if table == "outbox_event" {
					value = strings.Replace(value, "17000000", "70000000", 1)
				}
				row, err := s.try(`WITH one AS (INSERT INTO ` + table + ` (` + strings.Join(all, ", ") + `) OVERRIDING SYSTEM VALUE SELECT ` + strings.Join(copied, ", ") + ` FROM ` + table + ` LIMIT 1 RETURNING *) SELECT to_jsonb(one) FROM one`)
				if err != nil {
					continue // a key that allows one row only
				}
				if _, err := s.try(`UPDATE ` + table + ` SET ` + name + ` = ` + value + ` WHERE to_jsonb(` + table + `) = '` + strings.ReplaceAll(row, "'", "''") + `'`); err == nil {
					written++
				}
			}
		}
	}
	s.do(`SET session_replication_role = origin`)
	if written < 200 {
		t.Errorf("%d values are beyond a bound, want at least 200", written)
	}
	t.Logf("%d values beyond bounds in %d tables", written, len(tables))
	for range 100 {
		err := sql.Up(t.Context(), s.conn)
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "→ ") {
			t.Fatal(err)
		}
		for _, part := range strings.Split(err.Error(), "→ ")[1:] { // as the error says
			fix, _, _ := strings.Cut(part, "\n")
			if _, err := s.try(fix); err != nil {
				t.Fatalf("%.300s: %v", fix, err)
			}
		}
	}
	if err := sql.Up(t.Context(), s.conn); err != nil {
		t.Fatalf("%.1000s", err)
	}
	for _, b := range s.list(`SELECT concat_ws(' ', "table", "column", value, key, fix) FROM workflow_out_of_bounds(most => 10000) WHERE open`) {
		t.Errorf("not over, and beyond its bounds: %.300s", b)
	}
	for _, fix := range s.list(`SELECT fix FROM workflow_out_of_bounds(most => 10000) WHERE "table" <> 'workflow_override'`) { // workflow_override is a record that nobody changes
		if _, err := s.try(fix); err != nil {
			_, _ = s.try(`ROLLBACK`)
			t.Errorf("%.300s: %v", fix, err)
		}
	}
	for _, check := range s.list(`SELECT relation || ' ' || name FROM workflow_bound_check WHERE valid IS NOT TRUE AND relation <> 'workflow_override'`) {
		table, _, _ := strings.Cut(check, " ")
		if left := s.do(`SELECT cardinality(workflow_validate_bounds_v1('` + table + `'))`); left != "0" {
			t.Errorf("%s is not valid after all is done as told: %s", check, s.do(`SELECT string_agg(concat_ws(' ', "column", value, fix), '; ') FROM workflow_out_of_bounds('`+table+`')`))
		}
	}
}

// Executed alone, the migration that adds the CHECKs stops at an open row that is beyond one, and names the row and
// what to do, because afterwards a CHECK would refuse to have the row cancelled. Rows that are over do not stop it.
// After the fix it continues.
func TestBoundsAreNotAddedOverOpenRows(t *testing.T) {
	s := connect(t, pgtest.Empty(t))
	const bounded = 22
	if err := sql.UpTo(t.Context(), s.conn, bounded-1); err != nil {
		t.Fatal(err)
	}
	s.do(`SET session_replication_role = replica`)
	over, open := s.enqueue(), s.enqueue()
	s.do(`UPDATE workflow_run SET postponed = 2147483647; UPDATE workflow_run SET status = 'succeeded', finished_at = now() WHERE id = '` + over + `'`)
	s.do(`SET session_replication_role = origin`)
	s.refused(`BEGIN; `+sql.Migrations()[bounded-1].SQL, "23514", "workflowctl migrate up", "workflow_run", open, "postponed")
	s.do(`ROLLBACK`)
	s.do(`SELECT workflow_cancel('` + open + `')`)
	s.do(`BEGIN; ` + sql.Migrations()[bounded-1].SQL + `; COMMIT`)
	s.expect("CHECKs that are missing", s.do(`SELECT count(*) FROM workflow_bound_check WHERE valid IS NULL`), "0")
}
