package sql_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Rows that no worker could handle are refused on insert, with the column, the value and a way out, and nothing is
// stored. The names are those of the table of bad SQL.
func TestRefusedInserts(t *testing.T) {
	s, _ := psql(t)
	typed := func(typ string) string { return `(type) VALUES ('` + typ + `')` }
	with := func(column, value string) string {
		return `(type, ` + column + `) VALUES ('a.b', ` + value + `)`
	}
	const pattern, range100, object = "segments of a-z, 0-9, _ and -", "from -100 (last) to 100 (first)", `{"value": …}`
	tests := []struct {
		name, row, state, hint string
		words                  []string
	}{
		{"S1 empty type", typed(""), "23514", pattern, []string{"type ''"}},
		{"S2 space", typed("a b.c"), "23514", pattern, []string{"type 'a b.c'"}},
		{"S2 upper case", typed("Billing.charge"), "23514", pattern, []string{"type 'Billing.charge'"}},
		{"S2 wildcard", typed("billing.%"), "23514", pattern, []string{"type 'billing.%'"}},
		{"S2 leading dot", typed(".a.b"), "23514", pattern, []string{"type '.a.b'"}},
		{"S2 two dots", typed("a..b"), "23514", pattern, []string{"type 'a..b'"}},
		{"S2 trailing dot", typed("a.b."), "23514", pattern, []string{"type 'a.b.'"}},
		{"S2 no dot", typed("a"), "23514", pattern, []string{"type 'a'"}},
		{"S2 line break", `(type) VALUES (E'a.b\n')`, "23514", pattern, []string{"type"}},
		{"S3 long type", typed("a." + strings.Repeat("b", 298)), "23514", "Shorten", []string{"type has 300 characters", "200"}},
		{"S3 very long type", typed("a." + strings.Repeat("b", 12_000)), "23514", "Shorten", []string{"12002", "200"}},
		{"S4 no type", `(type) VALUES (NULL)`, "23502", "", []string{`"type"`}},
		{"S5 leased", with("status", "'leased'"), "23514", "Leave status out", []string{"status 'leased'", "pending"}},
		{"S6 succeeded", with("status", "'succeeded'"), "23514", "Leave status out", []string{"status 'succeeded'"}},
		{"somebody else's name", with("created_by", "'the pope'"), "23514", "Leave created_by out", []string{"created_by 'the pope'", "is not you"}},
		{"S7 upper case", with("status", "'PENDING'"), "23514", "pending, leased, succeeded, failed and cancelled", []string{"status 'PENDING'"}},
		{"S7 typing error", with("status", "'panding'"), "23514", "pending, leased, succeeded, failed and cancelled", []string{"status 'panding'"}},
		{"S8 no payload", with("payload", "NULL"), "23502", "", []string{`"payload"`}},
		{"S9 null", with("payload", "'null'"), "23514", object, []string{"payload is a JSON null"}},
		{"S9 number", with("payload", "'1'"), "23514", object, []string{"payload is a JSON number"}},
		{"S9 string", with("payload", `'"x"'`), "23514", object, []string{"payload is a JSON string"}},
		{"S9 array", with("payload", "'[]'"), "23514", object, []string{"payload is a JSON array"}},
		{"S10 bad JSON", with("payload", "'{bad'"), "22P02", "", []string{"json"}},
		{"S11 NUL", with("payload", `'{"a":"\u0000"}'`), "22P05", "", []string{"Unicode"}},
		{"S12 2 MB", with("payload", `jsonb_build_object('a', repeat('x', 2097152))`), "23514", "elsewhere", []string{"payload has 2097161 bytes", "262144"}},
		{"S13 256 MB", with("payload", `jsonb_build_object('a', repeat('x', 256 << 20))`), "54000", "", nil},
		{"S14 depth 65", with("payload", nested(65)), "23514", "Flatten", []string{"payload", "64 levels"}},
		{"S14 depth 65, arrays", with("payload", `('{"a":' || repeat('[', 64) || repeat(']', 64) || '}')::jsonb`), "23514", "Flatten", []string{"64 levels"}},
		{"S14 depth 3,000", with("payload", nested(3000)), "23514", "Flatten", []string{"64 levels"}},
		{"S14 depth of metadata", with("metadata", nested(65)), "23514", "Flatten", []string{"metadata", "64 levels"}},
		{"S15 high priority", with("priority", "2147483647"), "23514", range100, []string{"priority 2147483647", "-100 to 100"}},
		{"S15 low priority", with("priority", "-2147483648"), "23514", range100, []string{"priority -2147483648"}},
		{"S16 priority no integer", with("priority", "3e9"), "22003", "", []string{"integer"}},
		{"S17 attempt", with("attempt", "5"), "23514", "Leave out attempt", []string{"attempts"}},
		{"S17 negative attempt", with("attempt", "-5"), "23514", "Leave out attempt", []string{"attempts"}},
		{"S18 no attempts", with("max_attempts", "0"), "23514", "Use 1", []string{"max_attempts 0", "1 to 1000"}},
		{"S18 negative attempts", with("max_attempts", "-1"), "23514", "Use 1", []string{"max_attempts -1"}},
		{"S18 a million attempts", with("max_attempts", "1000000"), "23514", "Use 1", []string{"max_attempts 1000000"}},
		{"S19 never", with("run_at", "'infinity'"), "23514", "ten years ahead", []string{"run_at infinity"}},
		{"S19 always", with("run_at", "'-infinity'"), "23514", "ten years ahead", []string{"run_at -infinity"}},
		{"S20 year 1", with("run_at", "'0001-01-01'"), "23514", "from the year 2000", []string{"run_at 0001-01-01"}},
		{"S21 year 294276", with("run_at", "'294276-01-01'"), "23514", "ten years ahead", []string{"run_at 294276-01-01"}},
		{"S24 id", with("id", "'abc'"), "22P02", "", []string{"uuid", "abc"}},
		{"S27 empty key", with("idempotency_key", "''"), "23514", "leave it out", []string{"idempotency_key has 0 characters", "1 to 200"}},
		{"S27 long key", with("idempotency_key", "repeat('k', 5000)"), "23514", "hash", []string{"idempotency_key has 5000 characters", "1 to 200"}},
		{"empty tenant", with("tenant_id", "''"), "23514", "leave it out", []string{"tenant_id has 0 characters", "1 to 200"}},
		{"long tenant", with("tenant_id", "repeat('t', 201)"), "23514", "shorter", []string{"tenant_id has 201 characters", "1 to 200"}},
		{"metadata", with("metadata", "'[]'"), "23514", "an object such as", []string{"metadata is a JSON array"}},
		{"large metadata", with("metadata", "jsonb_build_object('a', repeat('x', 20000))"), "23514", "tags", []string{"metadata has 20009 bytes", "16384"}},
		{"lease token", with("lease_token", "gen_random_uuid()"), "23514", "Leave out", []string{"lease"}},
		{"finished", with("finished_at", "now()"), "23514", "Leave out", []string{"a new run"}},
		{"result", with("result", "'{}'"), "23514", "Leave out", []string{"result"}},
		{"S50 quoting attack", typed("billing.''; DROP TABLE workflow_run;--"), "23514", pattern, []string{"DROP TABLE"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := &session{t, s.conn}
			s.refused(`INSERT INTO workflow_run `+test.row, test.state, test.hint, test.words...)
		})
	}
	s.expect("rows stored", s.do(`SELECT count(*) FROM workflow_run`), "0")
}

// S13, S14: a document that Postgres itself cannot parse is a Postgres error, and the session survives.
func TestDepthBeyondPostgres(t *testing.T) {
	s, _ := psql(t)
	s.refused(`SET max_stack_depth = '100kB'; SELECT `+nested(7000), "54001", "", "stack depth")
	s.expect("next answer", s.do(`SELECT 1`), "1")
}

// Correct rows are accepted: type and payload are enough, and all limits are inclusive.
func TestAcceptedInserts(t *testing.T) {
	s, _ := psql(t)
	for _, row := range []string{
		`(type, payload) VALUES ('billing.invoice_charge.v1', '{"invoice": 7}')`,
		`(type) VALUES ('a.b')`,
		`(type) VALUES ('a.` + strings.Repeat("b", 198) + `')`,
		`(type, priority, max_attempts) VALUES ('a-1.b_2', 100, 1000), ('0.0', -100, 1)`,
		`(type, payload) VALUES ('a.b', ` + nested(64) + `)`,
		`(type, payload) VALUES ('a.b', (` + strings.Replace(nested(64), "{}", `{"a":[{"b":1}]}`, 1) + `) #- '{a,a}')`,
		`(type, payload) VALUES ('a.b', jsonb_build_object('a', repeat('x', 262144 - 9)))`,
		`(type, payload) VALUES ('a.b', jsonb_build_object('a', repeat('[{', 1000)))`,
		`(type, run_at) VALUES ('a.b', '2000-01-02'), ('a.b', now() + interval '9 years')`,
		`(type, idempotency_key) VALUES ('a.b', repeat('k', 200))`,
		`(type, tenant_id) VALUES ('a.b', repeat('t', 200))`,
		`(type, metadata) VALUES ('a.b', '{"tag": "nightly"}')`,
		`(type, held_at) VALUES ('a.b', now())`,
	} {
		s.do(`INSERT INTO workflow_run ` + row)
	}
}

// nested is SQL for an object with depth levels.
func nested(depth int) string {
	return `(repeat('{"a":', ` + strconv.Itoa(depth-1) + `) || '{}' || repeat('}', ` + strconv.Itoa(depth-1) + `))::jsonb`
}

// S22, S23, W49: the type alone is enough, because of the defaults. The ids are of version 7 and grow with time.
func TestDefaults(t *testing.T) {
	s, _ := psql(t)
	first := s.enqueue()
	second := s.enqueue()
	s.expect("status", s.of(first, `status`), "pending")
	s.expect("run_at is now", s.of(first, `run_at = created_at AND run_at BETWEEN now() - interval '1 minute' AND now()`), "t")
	s.expect("payload", s.of(first, `payload`), "{}")
	s.expect("attempts", s.of(first, `attempt || '/' || max_attempts`), "0/3")
	for _, id := range []string{first, second} {
		s.expect("version of "+id, s.of(id, `substr(id::text, 15, 1) || (substr(id::text, 20, 1) IN ('8', '9', 'a', 'b'))`), "7true")
	}
	if first[:13] > second[:13] { // milliseconds
		t.Errorf("%s before %s", first, second)
	}
	s.expect("its time is now", s.of(second, `abs(('x' || substr(replace(id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000
		- extract(epoch FROM now())) < 60`), "t")
}

// S25, S26, S28: a key or id stands for one run. Keys are compared byte by byte.
func TestPlainDuplicates(t *testing.T) {
	s, _ := psql(t)
	id := s.do(`INSERT INTO workflow_run (type, idempotency_key) VALUES ('a.b', 'k') RETURNING id`)
	s.refused(`INSERT INTO workflow_run (id, type) VALUES ('`+id+`', 'a.b')`, "23505", "", "workflow_run_pkey")
	s.refused(`INSERT INTO workflow_run (type, idempotency_key) VALUES ('a.b', 'k')`, "23505", "", "workflow_run_idempotency_idx")
	s.do(`INSERT INTO workflow_run (type, idempotency_key) VALUES ('a.b', 'k '), ('a.b', 'K'), ('a.b', ' k')`)
	s.expect("runs", s.do(`SELECT count(*) FROM workflow_run`), "4")
}

// S29: a run inserted in a transaction that did not commit leaves nothing.
func TestRolledBackInsert(t *testing.T) {
	s, _ := psql(t)
	s.do(`BEGIN; INSERT INTO workflow_run (type) VALUES ('a.b'); ROLLBACK`)
	s.expect("rows", s.do(`SELECT count(*) FROM workflow_run`), "0")
	s.expect("events", s.do(`SELECT count(*) FROM workflow_event`), "0")
}

// S49: text from a client with another encoding is stored as UTF-8.
func TestClientEncoding(t *testing.T) {
	s, _ := psql(t)
	s.do("SET client_encoding = 'LATIN1'")
	id := s.do("INSERT INTO workflow_run (type, payload, idempotency_key) VALUES ('a.b', '{\"name\": \"M\xfcller\"}', '\xe9') RETURNING id")
	s.do(`SET client_encoding = 'UTF8'`)
	s.expect("name", s.of(id, `payload ->> 'name'`), "Müller")
	s.expect("key", s.of(id, `idempotency_key`), "é")
}

// A role that puts operators and functions of its own before those of PostgreSQL and ours has its rows looked at all the same.
func TestInsertInAnotherSearchPath(t *testing.T) {
	s, _ := psql(t)
	home := s.do(`SELECT quote_ident(current_schema())`)
	s.do(`CREATE SCHEMA decoy;
		CREATE FUNCTION decoy.yes(text, text) RETURNS boolean LANGUAGE sql RETURN true;
		CREATE FUNCTION decoy.yes(integer, integer) RETURNS boolean LANGUAGE sql RETURN true;
		CREATE OPERATOR decoy.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = decoy.yes);
		CREATE OPERATOR decoy.= (LEFTARG = text, RIGHTARG = text, FUNCTION = decoy.yes);
		CREATE OPERATOR decoy.<= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = decoy.yes);
		CREATE FUNCTION decoy.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql RETURN 'object';
		CREATE FUNCTION decoy.workflow_run_refuse_insert(` + home + `.workflow_run) RETURNS void LANGUAGE sql RETURN NULL;
		CREATE FUNCTION decoy.workflow_run_refuse_reserved(` + home + `.workflow_run) RETURNS void LANGUAGE sql RETURN NULL;
		SET search_path = decoy, pg_catalog, ` + home)
	for _, row := range []string{
		`(type) VALUES ('no type')`, `(type, created_by) VALUES ('a.b', 'the pope')`, `(type, priority) VALUES ('a.b', 101)`, `(type, payload) VALUES ('a.b', '[]')`,
	} {
		s.refused(`INSERT INTO workflow_run `+row, "23514", "", "workflow_run: ")
	}
	s.refused(`INSERT INTO workflow_run (type) VALUES ('graph.timer.v1')`, "42501", "Commands to processes", "engine alone")
	s.do(`INSERT INTO workflow_run (type) VALUES ('a.b')`)
}

// A role that was granted by hand what docs/roles.md names may insert whatever anybody may, and is refused in words.
func TestInsertWithGrantsByHand(t *testing.T) {
	s, _ := psql(t)
	hand := pgtest.RolesName(t, s.conn.Config().ConnString()) + "_hand"
	s.do(`CREATE ROLE ` + hand + `; GRANT INSERT (type, payload, metadata), SELECT (id) ON workflow_run TO ` + hand + `;
		DO $$ DECLARE f regprocedure; BEGIN
			FOR f IN SELECT oid FROM pg_proc WHERE proname IN ('workflow_uuid', 'workflow_run_is_new', 'workflow_run_refuse_insert', 'workflow_run_refuse_reserved') LOOP
				EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO ` + hand + `', f);
			END LOOP;
		END $$; SET ROLE ` + hand)
	for _, row := range []string{
		`(type) VALUES ('a.b')`,
		`(type, metadata) VALUES ('a.b', jsonb_build_object('tag', repeat('x', 200)))`,
		`(type, payload) VALUES ('a.b', jsonb_build_object('text', repeat('x', 50000)))`,
		`(type) VALUES ('graph.message.v1')`,
	} {
		s.do(`INSERT INTO workflow_run ` + row)
	}
	s.refused(`INSERT INTO workflow_run (type) VALUES ('graph.timer.v1')`, "42501", "Commands to processes", "engine alone")
	s.refused(`INSERT INTO workflow_run (type) VALUES ('a b')`, "23514", "segments of a-z", "type 'a b'")
}

// A row that lacks a value is refused for that, whatever else it has.
func TestInsertWithoutValues(t *testing.T) {
	s, _ := psql(t)
	long := `jsonb_build_object('tag', repeat('x', 200))`
	s.refused(`INSERT INTO workflow_run (type, priority) VALUES (NULL, 500)`, "23502", "", `"type"`)
	s.refused(`INSERT INTO workflow_run (type, metadata) VALUES (NULL, `+long+`)`, "23502", "", `"type"`)
	s.refused(`INSERT INTO workflow_run (type, payload, metadata) VALUES ('graph.start.v1', NULL, `+long+`)`, "23502", "", `"payload"`)
}
