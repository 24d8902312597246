package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// If any time of any row is infinite, every view can still be read and every function that only reads still answers:
// one such row, written by hand with triggers off, does not hide all the others from operators.
func TestInfiniteTimes(t *testing.T) {
	s, _ := psql(t)
	views := s.list(`SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid IN (SELECT workflow_relations()) AND c.relkind = 'v'`)
	// Arguments by type: ids of existing rows, and times. A function that takes neither is called once.
	calls := s.list(`
		SELECT 'SELECT ' || called
		       || CASE WHEN strpos(called, 'x.id') > 0 THEN ' FROM (SELECT id FROM workflow_run UNION ALL SELECT id FROM process_instance) x' ELSE ' FROM (SELECT) x' END
		       || CASE WHEN strpos(called, 'y.at') > 0 THEN ', unnest(''{infinity,-infinity,2026-01-01}''::timestamptz[]) AS y (at)' ELSE '' END
		FROM pg_proc p
		CROSS JOIN LATERAL format('%s(%s)', p.oid::regproc,
		              (SELECT string_agg(CASE format_type(a, NULL) WHEN 'uuid' THEN 'x.id' WHEN 'timestamp with time zone' THEN CASE n WHEN 1 THEN 'y.at' ELSE 'now()' END
		                                 WHEN 'interval' THEN '''1 s''' WHEN 'integer' THEN '1' WHEN 'regprocedure' THEN 'NULL' WHEN 'text[]' THEN '''{x}''' WHEN 'uuid[]' THEN 'ARRAY[x.id]' WHEN 'double precision[]' THEN '''{1}''' WHEN 'jsonb' THEN '''{}''' WHEN 'xid' THEN '''1''::xid' WHEN 'pg_snapshot' THEN 'pg_current_snapshot()' WHEN 'boolean' THEN 'false' ELSE 'current_user::text' END, ', ' ORDER BY n)
		               FROM unnest(p.proargtypes) WITH ORDINALITY AS a (a, n))) AS called
		WHERE p.oid IN (SELECT workflow_functions()) AND p.provolatile <> 'v' AND p.prorettype <> 'trigger'::regtype AND p.proname <> 'workflow_backlog'`) // its text argument is a prefix
	calls = append(calls, `SELECT * FROM workflow_backlog('x.')`, `SELECT * FROM workflow_redrive('x.')`, `SELECT * FROM workflow_redrive('x.', since => 'infinity', until => '-infinity')`)
	if len(views) < 30 || len(calls) < 14 {
		t.Fatalf("%d views and %d functions, want 30 and 14 or more", len(views), len(calls))
	}
	all := append(calls, `SELECT 1 / (SELECT CASE WHEN count(workflow_why(id)) = count(*) THEN 1 ELSE 0 END FROM workflow_run)`,
		`SELECT 1 / (SELECT CASE WHEN count(process_why(id)) = count(*) THEN 1 ELSE 0 END FROM process_instance)`)
	for _, view := range views {
		all = append(all, `SELECT jsonb_agg(to_jsonb(v)) FROM `+view+` v`)
	}
	once := make([]string, len(all)) // each is planned only once, or planning would take most of the time
	for n, query := range all {
		s.do(fmt.Sprintf(`PREPARE q%d AS %s`, n, query))
		once[n] = fmt.Sprintf(`EXECUTE q%d`, n)
	}
	pgtest.Infinite(t, s.conn, func(what string) {
		s.do(`SAVEPOINT here`)
		if _, err := s.try(strings.Join(once, "; ")); err == nil {
			return
		}
		for _, query := range all { // find out which query fails
			s.do(`ROLLBACK TO here`)
			if _, err := s.try(query); err != nil {
				t.Errorf("%s: %s: %v", what, query, err)
			}
		}
		s.do(`ROLLBACK TO here`)
	})
}
