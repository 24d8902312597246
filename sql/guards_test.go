package sql_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// planted stores a row in every table that the engine would not leave like this, so that only guards can refuse
// changes to it. $ is an id.
const planted = `
	INSERT INTO process_definition (id, definition, hash) VALUES ('$', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"end": true}}}', 'x');
	INSERT INTO process_instance (id, process_definition_id) VALUES ('$', '$');
	INSERT INTO parallel_group (id, instance_id, node, live) VALUES ('$', '$', 'a', 1);
	INSERT INTO process_token (id, instance_id, node, state) VALUES ('$', '$', 'a', 'Ready');
	INSERT INTO parallel_join (id, instance_id, node, expected, joined) VALUES ('$', '$', 'a', 2, 1);
	INSERT INTO join_arrival (join_id, token_id, edge) VALUES ('$', '$', 'a');
	INSERT INTO each_progress (group_id, instance_id, node, items, next, done, total) VALUES ('$', '$', 'a', '[]', 0, 0, 1);
	INSERT INTO message (id, message_id, name, key, payload, expires_at) VALUES ('$', 'm', 'm', 'k', '{}', now());
	INSERT INTO message_wait (token_id, place, instance_id, node, name) VALUES ('$', 'a', '$', 'a', 'm');
	INSERT INTO user_task (id, instance_id, token_id, node, payload) VALUES ('$', '$', '$', 'a', '{}');
	INSERT INTO compensation_record (id, instance_id, token_id, run_id, node_id, handler_ref) VALUES ('$', '$', '$', '$', 'a', 'a.b');
	INSERT INTO incident (id, instance_id, node, code, message) VALUES ('$', '$', 'a', 'x', 'x');
	INSERT INTO process_state_history (instance_id, to_status, version, actor) VALUES ('$', 'CREATED', 1, 'x');
	INSERT INTO process_event (instance_id, event_type, version) VALUES ('$', 'x', 1);
	INSERT INTO process_correction (instance_id, node, value, reason) VALUES ('$', 'a', '{}', 'x');
	INSERT INTO workflow_run (id, type, status, token_id, node, finished_at, started_at, result, settled_by, settled_token)
		VALUES ('$', 'a.b', 'succeeded', '$', 'a', now(), now(), '{}', 'w', '$');
	INSERT INTO workflow_history (workflow_id, event_type) VALUES ('$', 'retried');
	INSERT INTO workflow_worker (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid) VALUES ('$', 'w', '{}', '{}', true, 1, 0, 'v', 'h', 1);
	INSERT INTO workflow_pause (prefix, reason) VALUES ('a.', 'x');
	INSERT INTO outbox_event (aggregate_id, event_type, payload) VALUES ('$', 'a.b', '{}');
	INSERT INTO outbox_sink (name) VALUES ('s');
	INSERT INTO outbox_lane (sink, lane) VALUES ('s', 1);
	INSERT INTO outbox_delivery (event_id, sink, aggregate_id, attempt, last_error) SELECT id, 's', '$', 1, 'x' FROM outbox_event;
	INSERT INTO workflow_override (actor, reason, table_name, operation, statement) VALUES ('x', 'x', 'x', 'x', 'x');
	INSERT INTO workflow_binding (role, prefixes) VALUES ('pg_monitor', '{a.}');
	INSERT INTO workflow_console_role (role) VALUES ('pg_monitor');
	INSERT INTO outbox_replayed (actor, events) VALUES ('x', 1);
	INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", row_version) VALUES ('run', '$', 'a.b', 'lease', 'P0001', 'x', '', '1');
	INSERT INTO workflow_policy (pattern, attempts) VALUES ('a.', 1);
	INSERT INTO workflow_outage (type, bound, in_a_row, runs, code) VALUES ('a.b', false, 1, 1, 'x');
	INSERT INTO workflow_member (role, group_name) VALUES ('pg_monitor', 'x');
	INSERT INTO workflow_policy_history (pattern, became) VALUES ('a.', '{}');
	INSERT INTO workflow_fault VALUES ('lease', 'x', '42P01', 'x', now(), now());
	INSERT INTO workflow_kept (run, token, verdict, delay, effects, worker) VALUES ('$', '$', 'succeeded', 0, false, 'w');
	INSERT INTO workflow_accepted (run, token, type, until) VALUES ('$', '$', 'a.b', now());
	INSERT INTO workflow_begun (token, begun) VALUES ('$', true);
	INSERT INTO workflow_minute (minute, role, type) VALUES (date_trunc('minute', now()), 'x', 'a.b');
	INSERT INTO process_broadcast (signal_id, name) VALUES ('$', 'a');
	INSERT INTO process_unreached (token_id, place, signal_id, visit) VALUES ('$', '', '$', 1);
	INSERT INTO workflow_retention (prefix, kind, period, set_by) VALUES ('a.', 'failed', 60, 'x');
	INSERT INTO workflow_retention_turn (prefix, kind, taken_at, every) VALUES ('a.', 'failed', now(), 60);
	INSERT INTO outbox_aggregate (id) VALUES ('$');
	INSERT INTO message_key (hash) VALUES (1);
	INSERT INTO workflow_schema (version, name, sha256) VALUES (9999, 'x', 'x');`

// byHand is what the owner may do to tables without an override, and why. The key is a table and INSERT, DELETE,
// TRUNCATE or a column that may be set.
var byHand = map[string]string{
	"workflow_run INSERT":           "that is how work is enqueued",
	"workflow_run idempotency_key":  "a key is freed, or given to another run",
	"workflow_run metadata":         "people tag runs",
	"workflow_run priority":         "another priority, if it is tried again",
	"workflow_run max_attempts":     "more attempts, before it is tried again",
	"workflow_run policy_attempts":  "whoever may set max_attempts may have a run follow its policy",
	"workflow_run run_at":           "of what waits; of what is over it says nothing",
	"workflow_run held_at":          "that is how a run is paused",
	"workflow_run deleted_at":       "that is how a run is hidden; it is recorded",
	"workflow_run delete_reason":    "likewise",
	"workflow_run updated_at":       "it is kept by whoever writes, and nothing is decided by it",
	"workflow_run lease_until":      "it goes with the lease: of what is over it becomes null",
	"workflow_run lease_token":      "likewise",
	"workflow_run leased_by":        "likewise",
	"workflow_run deadline_at":      "likewise",
	"workflow_run alone":            "it says something of a suspect, which is not over",
	"process_definition INSERT":     "that is how a process is deployed",
	"process_instance INSERT":       "that starts an instance",
	"process_instance business_key": "people name instances",
	"process_instance priority":     "that of the steps that are to come",
	"process_instance metadata":     "people tag instances",
	"workflow_pause INSERT":         "it is what workflow_pause does, by the same rules",
	"workflow_pause resumed_at":     "it is what workflow_resume does, once",
	"workflow_pause resumed_by":     "likewise, with the own name",
	"outbox_event INSERT":           "that is how an event is appended",
	"outbox_event published_at":     "the dispatcher's role marks events",
	"outbox_event parked_at":        "likewise",
	"outbox_event delivered_to":     "likewise",
	"outbox_event parked_by":        "likewise",
	"workflow_schema INSERT":        "migrations note themselves",
	"workflow_set_aside DELETE":     "what is forgotten is found again",
	"workflow_fault DELETE":         "what is forgotten is noted again",
	"workflow_minute DELETE":        "what is forgotten is no run's business",
	"workflow_worker INSERT":        "workers say themselves that they live; nothing is decided by it",
	"workflow_worker DELETE":        "likewise",
	"outbox_sink INSERT":            "dispatchers keep their sinks, lanes and deliveries; it is no record of what has happened",
	"outbox_sink DELETE":            "likewise",
	"outbox_lane INSERT":            "likewise",
	"outbox_delivery INSERT":        "likewise",
	"outbox_delivery DELETE":        "likewise",
	"outbox_aggregate INSERT":       "no row of it stays; one that was left by hand is taken over, and goes, when somebody appends",
	"outbox_aggregate id":           "likewise",
	"outbox_aggregate DELETE":       "likewise",
	"outbox_aggregate TRUNCATE":     "likewise",
	"message_key INSERT":            "likewise, when somebody brings a message or a wait",
	"message_key hash":              "likewise",
	"message_key DELETE":            "likewise",
	"message_key TRUNCATE":          "likewise",
}

func init() {
	for table, columns := range map[string]string{
		"workflow_worker": "id name prefixes handlers steps concurrency running version host pid started_at seen_at secret_hash lost_at",
		"outbox_sink":     "name types created_at seen_at paused_until last_error down_since back_at",
		"outbox_lane":     "sink lane claim_token claimed_by claim_until served_at floor next_floor next_xid replays",
		"outbox_delivery": "event_id sink aggregate_id attempt rejected next_attempt_at last_error updated_at parked_at",
	} {
		for column := range strings.FieldsSeq(columns) {
			byHand[table+" "+column] = "the programs' own book-keeping"
		}
	}
}

// otherwise are values for columns where a value derived from the type would violate a CHECK before a guard sees it.
var otherwise = map[string]string{
	"workflow_run.status": `'pending'`, "workflow_run.lease_until": `now()`, "workflow_run.type": `'a.c'`, "process_instance.status": `'WAITING'`, "process_instance.tenant_id": `'t'`,
	"process_instance.completed_at": `now()`, "process_token.state": `'Waiting'`, "process_token.mode": `'Compensation'`, "user_task.state": `'cancelled'`,
	"compensation_record.status": `'Failed'`, "outbox_event.event_type": `'a.c'`, "workflow_fault.statement": `'settle'`, "workflow_fault.sqlstate": `'P0001'`, "workflow_pause.prefix": `'b.'`, "outbox_sink.name": `'t'`,
	"process_broadcast.snapshot": `'1:1:'`, "process_broadcast.tokens": `'{}'`, "process_broadcast.began": `'{}'`, "process_broadcast.places": `'{}'`,
	"workflow_pause.resumed_by": `session_user`, "workflow_pause.resumed_at": `now()`, "process_instance.failure_reason": `'x'`, "process_instance.output_payload": `'{}'`,
}

// another returns an expression for another value of a column.
func another(table, column, typ, identity string) string {
	if identity == "a" {
		return `DEFAULT`
	}
	if value, ok := otherwise[table+"."+column]; ok {
		return value
	}
	switch typ {
	case "uuid":
		return `gen_random_uuid()`
	case "text":
		return `coalesce(` + column + `, '') || 'x'`
	case "integer", "bigint", "smallint", "double precision":
		return `coalesce(` + column + `, 0) + 1`
	case "boolean":
		return `NOT ` + column
	case "timestamp with time zone":
		return `now() + interval '1 minute'`
	case "jsonb":
		return `'{"forged": true}'`
	case "text[]":
		return `'{x}'`
	case "bytea":
		return `'\x00'`
	case "regrole":
		return `'pg_read_all_data'`
	case "xid":
		return `'2'`
	case "xid8":
		return `pg_current_xact_id()`
	}
	return "no value of " + typ
}

type column struct{ Name, Type, Identity, Generated string }

// Every table of ours has guards: what its owner does by hand, without an override, is refused with a message that
// names the table and says what to do instead, or is in the list of what is allowed. A new table or column is in
// neither, and fails the test.
func TestEveryTableIsGuarded(t *testing.T) {
	s, _ := psql(t)
	const id = "00000000-0000-4000-8000-000000000001"
	s.do(`DO $$ DECLARE c record; BEGIN -- what guards refuse, no key refuses before
		FOR c IN SELECT conrelid::regclass AS t, conname FROM pg_constraint WHERE conrelid IN (SELECT workflow_relations()) AND (contype = 'f' OR contype = 'c' AND conrelid = 'process_instance'::regclass) LOOP
			EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.t, c.conname);
		END LOOP; END $$;
		BEGIN; SET LOCAL session_replication_role = replica; ` + strings.ReplaceAll(planted, "$", id) + `; COMMIT`)
	tables := s.list(`SELECT r::text FROM workflow_relations() AS r JOIN pg_class c ON c.oid = r WHERE c.relkind = 'r' ORDER BY 1`)
	unused := maps.Clone(byHand)
	try := func(what, table, statement string) {
		t.Helper()
		err := s.undone(statement)
		_, allowed := byHand[what]
		delete(unused, what)
		var pg *pgconn.PgError
		switch {
		case err == nil && !allowed:
			t.Errorf("%s is done by hand: %s", what, statement)
		case err != nil && allowed:
			t.Errorf("%s is allowed, and refused: %v", what, err)
		case err != nil && (!errors.As(err, &pg) || pg.Code != "23000" && pg.Code != "23514" && pg.Code != "23503" || !strings.HasPrefix(pg.Message, table) || pg.Hint == ""):
			t.Errorf("%s is refused, but not by a guard: %v", what, err)
		}
	}
	for _, table := range tables {
		if n := s.do(`SELECT count(*) FROM ` + table); n == "0" {
			t.Errorf("%s has no row here: say in planted what one looks like", table)
			continue
		}
		rows, _ := s.conn.Query(t.Context(), `SELECT attname, format_type(atttypid, NULL), attidentity::text, attgenerated::text FROM pg_attribute
			WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, table)
		columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
		if err != nil {
			t.Fatal(err)
		}
		columns = slices.DeleteFunc(columns, func(c column) bool { return c.Generated != "" }) // PostgreSQL refuses to set these
		for _, c := range columns {
			name := c.Name
			if name == "order" || name == "constraint" {
				name = `"` + name + `"`
			}
			try(table+" "+c.Name, table, fmt.Sprintf(`UPDATE %s SET %s = %s`, table, name, another(table, name, c.Type, c.Identity)))
		}
		try(table+" DELETE", table, `DELETE FROM `+table)
		try(table+" TRUNCATE", table, `TRUNCATE `+table)
		insert := planted[strings.Index(planted, "INSERT INTO "+table+" "):]
		insert = insert[:strings.Index(insert, ";")]
		if table == "workflow_run" {
			insert = `INSERT INTO workflow_run (type) VALUES ('a.b')`
		}
		insert = strings.ReplaceAll(strings.ReplaceAll(insert, "9999", "9998"), "'a.', 'x'", "'c.', 'x'")
		if table == "outbox_sink" || table == "outbox_lane" || table == "outbox_delivery" || table == "process_definition" || table == "workflow_worker" || table == "workflow_binding" || table == "workflow_console_role" || table == "workflow_set_aside" || table == "workflow_fault" || table == "workflow_policy" ||
			table == "workflow_outage" ||
			table == "workflow_minute" ||
			table == "outbox_aggregate" || table == "message_key" || table == "process_instance" {
			insert += ` ON CONFLICT DO NOTHING` // the triggers before it have been called by then
		}
		try(table+" INSERT", table, strings.ReplaceAll(insert, "$", id))
	}
	for what := range unused {
		t.Errorf("%s is in the list of what is allowed, and does not exist", what)
	}
}

// list returns the first column of a query.
func (s *session) list(query string) []string {
	s.t.Helper()
	rows, _ := s.conn.Query(s.t.Context(), query)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// undone executes a statement and rolls it back.
func (s *session) undone(statement string) error {
	s.t.Helper()
	s.do(`BEGIN`)
	_, err := s.try(statement)
	s.do(`ROLLBACK`)
	return err
}

// The guard of updates looks at what follows a statement of the engine in its transaction: each takes back what it has said
// about its own update.
func TestTransitionIsTakenBack(t *testing.T) {
	s, _ := psql(t)
	const token, none = `00000000-0000-4000-8000-000000000001`, `00000000-0000-0000-0000-000000000000`
	s.do(`BEGIN`)
	for _, c := range []struct{ lease, verdict string }{
		{`workflow_lease_v2('{f}', '{a.x}', '{0}', '{1901-01-01}', '{` + none + `}', '{0}', '{1}', '{null}', '{null}', true, 0, 1, false, false, false, '` + token + `', 'w', '{a.x}', '{60}', '{null}', '{}', '{}', false, false, false)`, "succeeded"},
		{`workflow_lease_ahead_v1('{a.x}', '{0}', '{1901-01-01}', '{` + none + `}', '{0}', true, 1, 1000, 1, 1, '{` + token + `}', 'w', '{a.x}', '{60}', '{null}')`, "failed"},
	} {
		id := s.do(`INSERT INTO workflow_run (type) VALUES ('a.x') RETURNING id`)
		for _, statement := range []string{
			`SELECT id FROM ` + c.lease,
			`SELECT * FROM workflow_extend_v1('{` + id + `}', '{` + token + `}', '{90}')`,
			`SELECT unnest(workflow_settle_v1('{` + id + `}', '{` + token + `}', '{` + c.verdict + `}', '{null}', '{null}', '{null}', '{0}', 'w'))`,
		} {
			s.expect("done", s.do(`SELECT count(*) FROM (`+statement+`) AS done`), "1")
			s.expect(statement, s.do(`SELECT current_setting('workflow.transition')`), "")
		}
		s.expect("status", s.do(`SELECT status FROM workflow_run WHERE id = '`+id+`'`), c.verdict)
	}
	s.refused(`UPDATE workflow_run SET status = 'leased' WHERE status = 'succeeded'`, "23514", "Enqueue a new run", "which is final")
	s.do(`ROLLBACK`)
}

// A statement that leases, settles or inserts a single run spends most of its time on the conditions of triggers and CHECKs,
// which PostgreSQL parses anew for each statement: five microseconds for each 1,000 characters. PostgreSQL 18 writes them
// with 8 % more than 15.
func TestConditionsAreShort(t *testing.T) {
	s, _ := psql(t)
	for name, c := range map[string]struct {
		event   int // of pg_trigger.tgtype
		columns string
		most    int
	}{
		"lease":  {16, "{status, lease_token, leased_by, lease_no, attempt, alone, started_at, updated_at, lease_until, deadline_at}", 31_500},
		"settle": {16, "{status, result, suspect, finished_at, settled_token, settled_by, updated_at, lease_token, lease_until, leased_by, deadline_at}", 33_500},
		"insert": {4, "{}", 14_000},
	} {
		n, err := strconv.Atoi(s.do(fmt.Sprintf(`
			SELECT (SELECT sum(length(t.tgqual)) FROM pg_trigger t
			        WHERE t.tgrelid = 'workflow_run'::regclass AND t.tgtype & %d > 0
			          AND (t.tgattr = '' OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = t.tgrelid AND a.attnum = ANY (t.tgattr) AND a.attname = ANY ('%s'))))
			     + (SELECT sum(length(c.conbin)) FROM pg_constraint c WHERE c.conrelid = 'workflow_run'::regclass AND c.contype = 'c')`, c.event, c.columns)))
		if err != nil {
			t.Fatal(err)
		}
		if n > c.most {
			t.Errorf("%s: %d characters, want %d at most", name, n, c.most)
		}
	}
}
