package sql_test

import (
	"fmt"
	"strings"
	"testing"
)

// unboundedColumns are the columns without bounds, and the reason for each.
var unboundedColumns = map[string]string{
	"message_key.hash":               "any number may be a hash",
	"outbox_lane.next_xid":           "a transaction's number, which the server counts",
	"outbox_replayed.since":          "as it was asked for: -infinity is from the beginning",
	"outbox_replayed.until":          "as it was asked for: infinity is without an end",
	"outbox_event.lane":              "computed: 0 to 63",
	"process_broadcast.next":         "-infinity is the beginning, infinity the end",
	"process_broadcast.snapshot":     "transactions' numbers, which the server counts",
	"workflow_schema.version":        "written by migrations alone, which read nothing of it but what they have written",
	"workflow_schema.name":           "likewise",
	"workflow_schema.sha256":         "likewise",
	"workflow_schema.applied_at":     "likewise",
	"workflow_set_aside.row_version": "a transaction's number, which the server counts",
}

// boundless types have no extreme values, because no value is larger than another.
const boundless = `('uuid'::regtype, 'boolean'::regtype, 'regrole'::regtype)`

// Every column of every table has bounds that a CHECK or a guard holds, or is in unboundedColumns. Nothing in that
// list, and no bound, names a column that does not exist.
func TestEveryColumnIsBounded(t *testing.T) {
	s, _ := psql(t)
	columns := s.list(`
		SELECT c.relname || '.' || a.attname || CASE
			WHEN k.valid AND a.attnum = ANY (x.conkey) THEN ' bounded'
			WHEN EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND g.tgname = b.guard UNION ALL SELECT FROM pg_constraint g WHERE g.conrelid = c.oid AND g.conname = b.guard) THEN ' bounded'
			ELSE '' END
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		LEFT JOIN workflow_bound b ON b.relation = c.relname AND b."column" = a.attname
		LEFT JOIN workflow_bound_check k ON k.relation = b.relation AND k.kind = b.kind AND b.guard IS NULL
		LEFT JOIN pg_constraint x ON x.conrelid = c.oid AND x.conname = k.name
		WHERE c.oid IN (SELECT workflow_relations()) AND c.relkind = 'r' AND a.atttypid NOT IN ` + boundless + ` ORDER BY 1`)
	seen := map[string]bool{}
	for _, c := range columns {
		name, bounded := strings.CutSuffix(c, " bounded")
		seen[name] = true
		if why := unboundedColumns[name]; bounded == (why != "") {
			t.Errorf("%s: bounded %v, and in the list of those that are not: %q", name, bounded, why)
		}
	}
	for name := range unboundedColumns {
		if !seen[name] {
			t.Errorf("%s is in the list, and no column", name)
		}
	}
	s.expect("bounds of what is not there", s.do(`
		SELECT coalesce(string_agg(relation || '.' || "column", ', '), 'none') FROM workflow_bound b
		WHERE NOT EXISTS (SELECT FROM workflow_bound_rule r WHERE r.relation = b.relation AND r."column" = b."column")`), "none")
}

// extremes are values beyond every bound, by type.
var extremes = map[string][]string{
	"timestamp with time zone": {`'infinity'`, `'-infinity'`, `'4713-01-01 BC'`, `'294000-01-01'`},
	"smallint":                 {`-32768`, `32767`},
	"integer":                  {`-2147483648`, `2147483647`},
	"bigint":                   {`-9223372036854775808`, `9223372036854775807`},
	"text":                     {`repeat('x', 1000000)`},
	"text[]":                   {`array_fill('x'::text, ARRAY[100000])`, `'{NULL}'`, `'{{a,b},{c,d}}'`, `ARRAY[repeat('x', 3000000)]`},
	"jsonb":                    {`jsonb_build_object('process', 'p', 'version', 1, 'x', repeat('x', 17000000))`},
	"bytea":                    {`convert_to(repeat('x', 1000), 'UTF8')`},
}

// plain stores one row with plain values in a table. Triggers must be off.
func (s *session) plain(table string) {
	s.t.Helper()
	names, values := []string{}, []string{}
	for _, c := range s.list(`
		SELECT format('%I=%s', a.attname, CASE
			WHEN a.attname = 'status' AND a.attrelid = 'workflow_run'::regclass THEN '''pending'''
			WHEN a.attname = 'status' AND a.attrelid = 'process_instance'::regclass THEN '''IN_PROGRESS'''
			WHEN a.attname = 'status' THEN '''Pending''' WHEN a.attname = 'state' AND a.attrelid = 'user_task'::regclass THEN '''open''' WHEN a.attname = 'state' THEN '''Ready'''
			WHEN a.attname = 'mode' THEN '''Forward''' WHEN a.attname = 'prefix' THEN '''a.''' WHEN a.attname = 'definition' THEN '''{"process": "p", "version": 1}'''
			WHEN a.atttypid = 'text[]'::regtype THEN '''{}''' WHEN a.atttypid = 'text'::regtype THEN '''x'''
			WHEN a.atttypid = 'uuid'::regtype THEN 'gen_random_uuid()' WHEN a.atttypid = 'jsonb'::regtype THEN '''{}''' WHEN a.atttypid = 'boolean'::regtype THEN 'false' WHEN a.atttypid = 'xid'::regtype THEN '''1'''
			WHEN a.atttypid = 'timestamptz'::regtype THEN 'now()' WHEN a.atttypid = 'regrole'::regtype THEN 'current_role::regrole' ELSE '1' END)
		FROM pg_attribute a
		WHERE a.attrelid = '` + table + `'::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' ORDER BY a.attnum`) {
		name, value, _ := strings.Cut(c, "=")
		names, values = append(names, name), append(values, value)
	}
	s.do(`DELETE FROM ` + table)
	if len(names) == 0 {
		s.do(`INSERT INTO ` + table + ` DEFAULT VALUES`)
	} else {
		s.do(`INSERT INTO ` + table + ` (` + strings.Join(names, ", ") + `) VALUES (` + strings.Join(values, ", ") + `)`)
	}
}

// Without any trigger, every column that has bounds refuses values beyond them, and accepts a value within them.
func TestExtremesAreRefused(t *testing.T) {
	s, _ := psql(t)
	s.do(`SET session_replication_role = replica`)
	tables := s.list(`SELECT DISTINCT relation FROM workflow_bound WHERE guard IS NULL ORDER BY 1`)
	tried := 0
	for _, table := range tables {
		s.plain(table)
		for _, c := range s.list(`
			SELECT format('%I=%s', b."column", format_type(a.atttypid, NULL)) FROM workflow_bound b JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column"
			WHERE b.relation = '` + table + `' AND b.guard IS NULL AND a.attgenerated = '' AND a.attidentity <> 'a'`) {
			name, typ, _ := strings.Cut(c, "=")
			if len(extremes[typ]) == 0 {
				t.Errorf("%s.%s: no extremes of type %s", table, name, typ)
			}
			s.do(fmt.Sprintf(`UPDATE %s SET %s = %[2]s`, table, name))
			for _, value := range extremes[typ] {
				if table == "outbox_event" { // whose bounds are wider
					value = strings.Replace(value, "17000000", "70000000", 1)
				}
				err := s.undone(fmt.Sprintf(`UPDATE %s SET %s = %s`, table, name, value))
				if err == nil {
					t.Errorf("%s.%s = %s was taken", table, name, value)
				} else if !strings.Contains(err.Error(), "23514") {
					t.Errorf("%s.%s = %s: %v", table, name, value, err)
				}
				tried++
			}
		}
	}
	if tried < 350 {
		t.Errorf("%d values tried, want at least 350", tried)
	}
}

// The numbers of a run may be at both ends of their bounds, and not one beyond.
func TestEndsOfBounds(t *testing.T) {
	s, _ := psql(t)
	id := s.enqueue()
	s.do(`SET session_replication_role = replica`)
	bounds := s.list(`SELECT format('%s %s %s', "column", low, high) FROM workflow_bound WHERE relation = 'workflow_run' AND kind = 'numbers'`)
	if len(bounds) != 6 {
		t.Errorf("bounds = %v", bounds)
	}
	for _, b := range bounds {
		var name string
		var low, high int
		if _, err := fmt.Sscan(b, &name, &low, &high); err != nil {
			t.Fatal(err)
		}
		for value, taken := range map[int]bool{low: true, high: true, low - 1: false, high + 1: false} {
			err := s.undone(fmt.Sprintf(`UPDATE workflow_run SET %s = %d WHERE id = '%s'`, name, value, id))
			if taken != (err == nil) {
				t.Errorf("%s = %d: %v", name, value, err)
			}
		}
	}
}

// Bounds that guards hold instead of CHECKs also apply to the owner, in each state and on insert.
func TestGuardsBound(t *testing.T) {
	s, _ := psql(t)
	ids := []string{s.enqueue(), s.leased(), s.in("succeeded"), s.in("failed")}
	s.do(`CREATE TEMP TABLE huge AS SELECT jsonb_build_object('x', string_agg(md5(g::text), '')) AS v FROM generate_series(1, 600000) AS g`)
	tried := 0
	for _, c := range s.list(`
		SELECT format('%I=%s', b."column", format_type(a.atttypid, NULL)) FROM workflow_bound b JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column"
		WHERE b.relation = 'workflow_run' AND b.guard IS NOT NULL`) {
		name, typ, _ := strings.Cut(c, "=")
		values := extremes[typ]
		if typ == "jsonb" { // the stored size counts
			values = []string{`(SELECT v FROM huge)`}
		}
		for _, value := range values {
			for _, id := range ids {
				if err := s.undone(`UPDATE workflow_run SET ` + name + ` = ` + value + ` WHERE id = '` + id + `'`); err == nil || strings.Contains(err.Error(), "huge") {
					t.Errorf("%s: %s = %s: %v, want that it is refused", s.of(id, "status"), name, value, err)
				}
			}
			with := ""
			if name != "type" {
				with = "type, "
			}
			if s.undone(`INSERT INTO workflow_run (`+with+name+`) VALUES (`+strings.ReplaceAll(with, "type", "'a.b'")+value+`)`) == nil {
				t.Errorf("inserted: %s = %s was taken", name, value)
			}
			tried++
		}
	}
	if tried < 20 {
		t.Errorf("%d values tried, want at least 20", tried)
	}
}

// A number or a time beyond its bound, written while no guard and no CHECK existed, can be brought back within it
// with the guards on: by workflow_mend_v1, and by the statement that workflow_out_of_bounds names.
func TestEachExtremeIsMendedAsTold(t *testing.T) {
	s, _ := psql(t)
	s.unbound()
	tried := 0
	for _, table := range s.list(`SELECT DISTINCT relation FROM workflow_bound ORDER BY 1`) {
		for _, c := range s.list(`
			SELECT format('%I=%s=%s', b."column", format_type(a.atttypid, NULL), b.kind) FROM workflow_bound b JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column"
			WHERE b.relation = '` + table + `' AND b.kind IN ('numbers', 'times') AND b.guard IS NULL AND a.attgenerated = '' AND a.attidentity <> 'a' AND b."column" <> ALL (workflow_key_of(b.relation))`) {
			part := strings.Split(c, "=")
			for _, value := range extremes[part[1]] {
				for _, status := range []string{"pending", "leased", "succeeded"} {
					if table != "workflow_run" && status != "pending" {
						continue
					}
					s.do(`SET session_replication_role = replica`)
					s.plain(table)
					if table == "workflow_run" {
						s.do(`UPDATE workflow_run SET status = '` + status + `'` + map[string]string{"pending": ``, "succeeded": `, finished_at = now()`,
							"leased": `, attempt = 1, lease_no = 1, lease_token = gen_random_uuid(), lease_until = now(), leased_by = 'w', started_at = now()`}[status])
					}
					if _, err := s.try(`UPDATE ` + table + ` SET ` + part[0] + ` = ` + value); err != nil || s.do(`SELECT count(*) FROM workflow_out_of_bounds('`+table+`') WHERE "column" = '`+part[0]+`'`) == "0" {
						s.do(`SET session_replication_role = origin`)
						continue // another rule of the table applies
					}
					s.do(`SET session_replication_role = origin`)
					tried++
					if table == "workflow_override" {
						s.expect("fix", s.do(`SELECT fix FROM workflow_out_of_bounds('workflow_override')`), "none: it is a record, which nobody changes")
						continue
					}
					what := fmt.Sprintf("%s %s.%s = %s", status, table, part[0], value)
					s.do(`BEGIN`)
					s.expect(what+" mended", s.do(`SELECT mended || ' ' || stuck FROM workflow_mend_v1('`+table+`', NULL, 10)`), "1 0")
					s.do(`ROLLBACK`)
					for _, fix := range s.list(`SELECT fix FROM workflow_out_of_bounds('` + table + `')`) {
						if _, err := s.try(fix); err != nil {
							t.Errorf("%s: %s: %v", what, fix, err)
							s.do(`ROLLBACK`)
						}
					}
					s.expect(what+": beyond", s.do(`SELECT count(*) FROM workflow_out_of_bounds('`+table+`')`), "0")
				}
			}
		}
	}
	if tried < 150 {
		t.Errorf("%d values tried, want at least 150", tried)
	}
}
