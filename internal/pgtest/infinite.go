package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// ID is the id of everything that Infinite stores, except of runs in other states than pending.
const ID = "01890a5d-ac96-774b-bcce-b302099a8057"

// Infinite stores at least one row in each table of ours, one for each state that rows of the table can have. The
// rows refer to each other by their ids. It then calls look with each timestamp of each table at both infinities in
// turn, and restores the value after each call. This takes a superuser: triggers are off, and the checks are dropped.
func Infinite(t testing.TB, conn *pgx.Conn, look func(what string)) {
	t.Helper()
	do := func(statements string) {
		t.Helper()
		if _, err := conn.PgConn().Exec(t.Context(), statements).ReadAll(); err != nil {
			t.Fatalf("%s: %v", statements, err)
		}
	}
	list := func(query string) []string {
		t.Helper()
		rows, _ := conn.Query(t.Context(), query)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		return all
	}
	const tables = `SELECT c.oid FROM pg_class c WHERE c.oid IN (SELECT workflow_relations()) AND c.relkind = 'r' AND c.relname <> 'workflow_schema'`
	do(`SET session_replication_role = replica; SET statement_timeout = '10s'`)
	for _, drop := range list(`SELECT format('ALTER TABLE %s DROP CONSTRAINT %I CASCADE', conrelid::regclass, conname) FROM pg_constraint WHERE contype = 'c' AND conrelid IN (` + tables + `)`) {
		do(drop)
	}
	// A value for each column by its type. For states, each one that some query asks for.
	for _, insert := range list(`
		SELECT format('INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM unnest(%L::text[]) WITH ORDINALITY AS s (state, n)', a.attrelid::regclass,
			string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum),
			string_agg(CASE
				WHEN a.attname IN ('status', 'state') THEN 'state'
				WHEN a.attname = 'id' AND a.atttypid = 'uuid'::regtype THEN 'CASE n WHEN 1 THEN ''` + ID + `''::uuid ELSE gen_random_uuid() END'
				WHEN a.attname = 'definition' THEN '''{"process": "x", "version": 1, "nodes": {"x": {"do": "x.y.v1"}}}'''
				WHEN NOT a.attnotnull AND a.attname IN ('deleted_at', 'parked_at', 'published_at', 'resolved_at', 'resumed_at', 'held_at', 'consumed_at', 'paused_at', 'ending', 'host_token_id', 'parallel_group_id', 'parent_group_id', 'parent_token_id', 'idempotency_key', 'retry_of', 'parent_process_instance_id') THEN 'NULL'
				WHEN a.attname IN ('finished_at', 'completed_at') THEN 'CASE WHEN state IN (''succeeded'', ''failed'', ''cancelled'', ''COMPLETED'', ''completed'') THEN now() END'
				WHEN a.attname IN ('token_id', 'node') AND a.attrelid = 'workflow_run'::regclass THEN 'NULL'
				WHEN a.attname = 'lease_token' THEN 'CASE state WHEN ''leased'' THEN gen_random_uuid() END'
				WHEN a.attidentity <> '' THEN 'n'
				WHEN a.attname IN ('delivered_to', 'parked_by', 'types') THEN '''{}'''
				WHEN a.attname = 'prefixes' OR a.attname = 'handlers' THEN '''{x.}'''
				WHEN a.attname = 'prefix' THEN '''x.'''
				WHEN a.attname = 'type' THEN '''x.y.v1'''
				WHEN a.attname = 'floor' THEN '0'
				ELSE CASE format_type(a.atttypid, NULL)
					WHEN 'uuid' THEN '''` + ID + `''' WHEN 'text' THEN '''x''' WHEN 'jsonb' THEN '''{"code": "x"}''' WHEN 'boolean' THEN 'false' WHEN 'timestamp with time zone' THEN 'now()'
					WHEN 'text[]' THEN '''{x}''' WHEN 'uuid[]' THEN '''{` + ID + `}''' WHEN 'interval' THEN '''1 s''' WHEN 'xid8' THEN '''1''' WHEN 'xid' THEN '''1''' WHEN 'pg_snapshot' THEN '''1:1:''' WHEN 'timestamp with time zone[]' THEN '''{2026-01-01}''' WHEN 'bytea' THEN '''x''' WHEN 'regrole' THEN '''pg_monitor''' ELSE '1' END
			END, ', ' ORDER BY a.attnum),
			CASE WHEN bool_or(a.attname IN ('status', 'state')) THEN CASE a.attrelid::regclass::text
				WHEN 'workflow_run' THEN '{pending,leased,succeeded,failed,cancelled}' WHEN 'process_instance' THEN '{RUNNING,COMPLETED}' WHEN 'process_token' THEN '{Waiting,Ready,Completed}'
				WHEN 'user_task' THEN '{open,completed}' WHEN 'compensation_record' THEN '{Pending,Completed}' ELSE '{x}' END ELSE '{x}' END)
		FROM pg_attribute a
		WHERE a.attrelid IN (` + tables + `) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
		GROUP BY a.attrelid`) {
		do(insert)
	}
	do(`UPDATE outbox_lane SET lane = (SELECT e.lane FROM outbox_event e)`)
	do(`INSERT INTO workflow_run (type, token_id, node) VALUES ('x.y.v1', '` + ID + `', 'x')`) // this one is a step
	columns := list(`
		SELECT a.attrelid::regclass || ' ' || quote_ident(a.attname)
		FROM pg_attribute a
		WHERE a.attrelid IN (` + tables + `) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.atttypid = 'timestamptz'::regtype
		ORDER BY 1`)
	if len(columns) < 50 {
		t.Fatalf("there are %d timestamps, want 50 or more", len(columns))
	}
	for _, column := range columns {
		table, name, _ := strings.Cut(column, " ")
		for _, value := range []string{"infinity", "-infinity"} {
			do(fmt.Sprintf(`BEGIN; UPDATE %s SET %s = '%s'`, table, name, value))
			look(fmt.Sprintf("%s.%s = %s", table, name, value))
			do(`ROLLBACK`)
		}
	}
}

// Unbound drops the CHECKs that hold the bounds of columns, so that a test can store rows as they were possible
// before the bounds.
func Unbound(t testing.TB, url string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, _ := conn.Query(t.Context(), `SELECT format('ALTER TABLE %I DROP CONSTRAINT %I', relation, name) FROM workflow_bound_check WHERE valid IS NOT NULL AND kind <> 'states'`)
	drops, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, drop := range drops { // each alone, so that running workers do not wait for one table while this waits for another
		if _, err := conn.Exec(t.Context(), drop); err != nil {
			t.Fatal(err)
		}
	}
}
