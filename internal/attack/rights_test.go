//go:build attack

package attack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// docs/rights.md lists exactly what each role can change through functions: which columns of which rows. The test
// calls functions with generated arguments in transactions that are rolled back, and compares all tables afterwards.
// A bound worker changes and locks only what is its own. RIGHTS=write writes the file instead: make rights.
func TestRights(t *testing.T) {
	begun := time.Now()
	victims, controls = 1, 1
	w := newWorld(t)
	var found string
	w.with("world", func(conn *pgx.Conn) error {
		if _, err := conn.PgConn().Exec(t.Context(), "BEGIN;"+unguarded+stand+";COMMIT").ReadAll(); err != nil {
			return err
		}
		w.rows, w.of = nil, nil
		if err := w.read(conn); err != nil {
			return err
		}
		var err error
		if found, err = granted(t.Context(), conn); err != nil {
			return err
		}
		return nil
	})
	// Calls take most of the time. Two surveys, each in a database of its own, share the roles.
	two := make([]*survey, 2)
	w.must("postgres", "CREATE DATABASE again TEMPLATE world")
	w.with("world", func(conn *pgx.Conn) error {
		w.with("again", func(other *pgx.Conn) error {
			queue, ended := make(chan string, len(roles)), make(chan error, 2)
			for _, r := range roles {
				queue <- r.role
			}
			close(queue)
			for k, conn := range []*pgx.Conn{conn, other} {
				two[k] = &survey{w: w, p: w.newProbe(conn), conn: conn, seen: map[string]map[effect]*effects{}}
			}
			for _, s := range two {
				go func() { ended <- s.all(t.Context(), queue) }()
			}
			return errors.Join(<-ended, <-ended)
		})
		return nil
	})
	s := two[0]
	maps.Copy(s.seen, two[1].seen)
	found += s.told()
	s.judge()
	t.Logf("%d calls, %d accepted; %.0f s", s.calls+two[1].calls, s.accepted+two[1].accepted, time.Since(begun).Seconds())
	if os.Getenv("RIGHTS") == "write" {
		if err := os.WriteFile(rightsFile, []byte(found), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	compareRights(t, readRights(t), found)
}

// secret is that of the worker presence/0. stand keeps the world from changing on its own during the test, and adds
// rows that some functions look for.
const (
	secret = "'7d1f0f0e-0000-4000-8000-0000000000aa'::uuid"
	stand  = `
		UPDATE workflow_run SET lease_until = now() + interval '1 hour' WHERE payload->>'specimen' ~ '-leased/';
		UPDATE outbox_lane SET claim_until = now() + interval '1 hour' WHERE claim_until IS NOT NULL;
		UPDATE workflow_run SET lease_until = now() + interval '1 hour', deadline_at = now() + interval '1 hour' WHERE payload->>'specimen' ~ '-elsewhere/';
		UPDATE workflow_accepted a SET until = r.lease_until FROM workflow_run r WHERE r.id = a.run;
		UPDATE workflow_accepted SET token = gen_random_uuid(), until = now() - interval '1 hour' WHERE run IN (SELECT id FROM workflow_run WHERE payload->>'specimen' ~ '-elsewhere/1$');
		UPDATE workflow_worker SET secret_hash = sha256(uuid_send(` + secret + `)) WHERE name = 'presence/0';
		UPDATE workflow_worker SET seen_at = now() - interval '2 days' WHERE name = 'presence/2';
		UPDATE workflow_worker SET seen_at = now() - interval '5 seconds' WHERE name = 'presence/3';
		UPDATE workflow_run SET leased_by = 'presence/3' WHERE leased_by = 'somebody' AND lease_until < now();
		UPDATE workflow_set_aside SET last_tried_at = now() - interval '1 hour', since = now() - interval '1 hour';
		UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_until = now() - interval '1 second', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now()
		WHERE token_id IN (SELECT t.id FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE i.business_key = 'boundary/0') AND type = 'test.step.v1';
		UPDATE workflow_run SET status = 'leased', lease_token = gen_random_uuid(), lease_until = now() + interval '1 hour', leased_by = 'somebody', lease_no = 1, attempt = 1, started_at = now()
		WHERE token_id IN (SELECT t.id FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE i.business_key = 'scope/0') AND type = 'test.step.v1';
		UPDATE workflow_run SET type = 'media.work.v1' -- steps of a bound worker's prefix, which are not its own
		WHERE token_id IN (SELECT t.id FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE i.business_key IN ('scope/0', 'boundary/0', 'each/0')) AND type = 'test.step.v1';
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'it is refused' USING ERRCODE = '23514'; END $$`
)

// A survey calls functions as roles.
type survey struct {
	w               *world
	p               *probe
	conn            *pgx.Conn
	functions       []function
	seen            map[string]map[effect]*effects // by role and function
	calls, accepted int
}

type function struct {
	name, signature, source string
	names, types            []string
	optional                int  // how many of the last arguments have defaults
	volatile                bool // whether it can write; others write only through functions that they call, and get fewer calls
}

// An effect is a kind of change. effects are what was observed of it.
type effect struct{ op, table, rows string }

type effects struct{ columns, states map[string]bool }

// surveyed are the listed roles, as actors.
var surveyed = map[string]string{"workflow_enqueue": "enqueue", "media": "media", "workflow_engine": "engine", "workflow_dispatcher": "dispatcher", "workflow_operator": "operator",
	"workflow_tasks":  "tasks",
	"workflow_viewer": "viewer", "desk": "console", "workflow_owner": "owner"}

// all calls all functions as each role that the queue has.
func (s *survey) all(ctx context.Context, queue <-chan string) error {
	rows, _ := s.conn.Query(ctx, `
		SELECT p.proname, p.oid::regprocedure::text, p.prosrc, coalesce(p.proargnames[1:p.pronargs], '{}'), ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) AS t), p.pronargdefaults, p.provolatile = 'v'
		FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.prorettype <> 'trigger'::regtype ORDER BY 1, 2`)
	var err error
	if s.functions, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f function, err error) {
		return f, row.Scan(&f.name, &f.signature, &f.source, &f.names, &f.types, &f.optional, &f.volatile)
	}); err != nil {
		return err
	}
	for role := range queue {
		k := slices.IndexFunc(actors, func(a *actor) bool { return a.name == surveyed[role] })
		if k < 0 {
			continue
		}
		for _, f := range s.functions {
			var may bool
			if err := s.conn.QueryRow(ctx, `SELECT has_function_privilege($1::name, $2::text, 'EXECUTE')`, role, f.signature).Scan(&may); err != nil {
				return err
			}
			if !may {
				continue
			}
			begun := time.Now()
			for _, call := range s.callsOf(f, actors[k]) {
				if err := s.call(ctx, actors[k], f, call); err != nil {
					return fmt.Errorf("%s, as %s: %w", call, role, err)
				}
			}
			if os.Getenv("RIGHTS_TIMES") != "" {
				s.w.t.Logf("%s %s %v", role, f.name, time.Since(begun))
			}
		}
		if _, err := s.conn.Exec(ctx, "VACUUM"); err != nil { // rows that were rolled back stay in the tables, and are read each time
			return err
		}
	}
	return nil
}

// call makes one call, records what it changed, and rolls back.
func (s *survey) call(ctx context.Context, a *actor, f function, call string) error {
	s.calls++
	defer func() { _, _ = s.conn.PgConn().Exec(ctx, "ROLLBACK").ReadAll() }()
	script := strings.Replace(a.begin(), "BEGIN; ", "BEGIN; "+obstaclesOf[f.name], 1) + call + "; SET CONSTRAINTS ALL IMMEDIATE; RESET SESSION AUTHORIZATION"
	_, err := s.conn.PgConn().Exec(ctx, script).ReadAll()
	if refusal := (*pgconn.PgError)(nil); errors.As(err, &refusal) {
		if refusal.Code == "42601" || refusal.Code == "42883" || refusal.Code == "57014" {
			return err // the call is wrong, which is our mistake
		}
		if os.Getenv("RIGHTS_TIMES") == f.name {
			s.w.t.Logf("%s %s: %v", a.name, call, err)
		}
		return nil
	} else if err != nil {
		return err
	}
	s.accepted++
	changes, err := s.p.changes(ctx)
	if err != nil {
		return err
	}
	of := a.role + " " + f.signature
	if slices.Contains(weak, a.name) {
		locked, err := s.locked(ctx)
		if err != nil {
			return err
		}
		changes = append(changes, locked...)
	}
	for _, c := range changes {
		e := effect{c.op(), c.table, s.whose(a, c)}
		if c.columns != nil && c.after == nil {
			e.op = "lock"
		}
		if s.seen[of] == nil {
			s.seen[of] = map[effect]*effects{}
		}
		if s.seen[of][e] == nil {
			s.seen[of][e] = &effects{map[string]bool{}, map[string]bool{}}
		}
		if e.op != "insert" {
			for _, state := range []string{"status", "state", "mode"} {
				if was, _ := c.before[state].(string); was != "" {
					s.seen[of][e].states[was] = true
					break
				}
			}
		}
		if e.op == "update" {
			for _, column := range c.columns {
				s.seen[of][e].columns[column] = true
			}
		}
	}
	return nil
}

// weak are the actors who must not even block what is not their own: for them, the page also lists locks.
var weak = []string{"viewer", "enqueue", "tasks", "dispatcher", "media"}

// locked returns the rows that the transaction has locked, as changes without a row afterwards and without columns.
func (s *survey) locked(ctx context.Context) (all []change, err error) {
	for _, table := range []string{"workflow_run", "process_instance", "process_token", "outbox_event", "outbox_lane", "workflow_set_aside", "workflow_worker", "workflow_binding", "workflow_pause"} {
		rows, _ := s.conn.Query(ctx, fmt.Sprintf(`SELECT %s FROM %s x WHERE x.xmax <> '0' AND age(x.xmax) <= 0`, s.w.tables[table].keyText(), table))
		keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			if r, ok := s.p.rows[table+" "+key]; ok {
				all = append(all, change{table: table, key: key, before: r.data, columns: []string{}})
			}
		}
	}
	return all, nil
}

// whose says which rows these are, where that makes a difference.
func (s *survey) whose(a *actor, c change) string {
	data := c.before
	if data == nil {
		data = c.after
	}
	if c.table == "workflow_worker" && c.op() != "insert" {
		switch s.p.w.of[c.table+" "+c.key] {
		case "presence/0":
			return "whose secret is given"
		case "presence/2":
			return "that was not seen for a day"
		case "presence/3":
			return "whose lease ran out"
		}
		return "of others"
	}
	if c.table == "outbox_event" {
		if typ, _ := data["event_type"].(string); strings.HasPrefix(typ, "run.") || strings.HasPrefix(typ, "process.") || strings.HasPrefix(typ, "incident.") {
			return "told by the engine"
		}
		return ""
	}
	for table, column := range map[string]string{"workflow_history": "workflow_id", "workflow_set_aside": "id"} {
		if c.table == table {
			if data = s.p.rows["workflow_run id = "+quoted(fmt.Sprint(data[column]))].data; data == nil {
				return "of a new run"
			}
		}
	}
	typ, run := data["type"].(string)
	switch {
	case c.table != "workflow_run" && c.table != "workflow_history" && c.table != "workflow_set_aside" || !run:
		return ""
	case a.name == "media" && strings.HasPrefix(typ, "media.") && data["token_id"] == nil:
		return "of its prefix"
	case a.name == "media":
		return "of others"
	case data["token_id"] != nil:
		return "of steps"
	case strings.HasPrefix(typ, "graph."):
		return "of commands"
	}
	return "of plain runs"
}

// callsOf are calls of a function. Its first argument that names a thing is one of each kind of thing in each state,
// and one more argument at a time takes each of its values.
func (s *survey) callsOf(f function, a *actor) (calls []string) {
	choices := make([][]string, len(f.types))
	first := -1
	for k, typ := range f.types {
		name := ""
		if k < len(f.names) {
			name = f.names[k]
		}
		choices[k] = s.choices(f, a, name, typ, k >= len(f.types)-f.optional)
		if first < 0 && (strings.HasPrefix(typ, "uuid") || name == "prefix" || name == "types" || name == "type" || name == "relation") && name != "from_id" {
			first = k
		}
	}
	tokens := slices.Index(f.names, "tokens")
	done := map[string]bool{}
	call := func(set map[int]int) {
		var arguments []string
		for k, typ := range f.types {
			use := choices[k][set[k]]
			if k == tokens && slices.Index(f.names, "ids") == first && set[k] == 0 {
				use = "ARRAY[" + s.tokenOf(choices[first][set[first]]) + "]"
			} else if f.names[k] == "token" && slices.Index(f.names, "id") == first && set[k] == 0 {
				use = s.tokenOf(choices[first][set[first]])
			} else if f.names[k] == "token" && f.name == "workflow_complete" && set[k] == 0 {
				use = handed(choices[first][set[first]], s.tokenOf(choices[first][set[first]]))
			}
			if use != "" {
				arguments = append(arguments, fmt.Sprintf("%q => CAST(%s AS %s)", f.names[k], use, typ))
			}
		}
		text := fmt.Sprintf("SELECT * FROM %s(%s)", f.name, strings.Join(arguments, ", "))
		if !done[text] {
			done[text] = true
			calls = append(calls, text)
		}
	}
	many := 1
	if first >= 0 {
		many = len(choices[first])
	}
	for n := range many {
		for k := range choices {
			if k == first || !f.volatile {
				continue
			}
			for v := range choices[k] {
				call(map[int]int{first: n, k: v})
			}
		}
		call(map[int]int{first: n})
	}
	return append(calls, crafted[f.name]...)
}

// crafted are additional calls, which name lanes of others after one's own.
var crafted = map[string][]string{
	"workflow_lease_v1": {`SELECT * FROM workflow_lease_v1('{f,f}', '{media.work.v1,billing.work.v1}', '{0,0}', '{1901-01-01,1901-01-01}', '{00000000-0000-0000-0000-000000000000,00000000-0000-0000-0000-000000000000}', '{0,0}',
		'{100,100}', '{NULL,NULL}', '{NULL,NULL}', true, 10, 1000, true, false, false, '7d1f0f0e-0000-4000-8000-000000000001', 'somebody', '{media.work.v1,billing.work.v1}', '{60,60}', '{NULL,NULL}')`},
	"workflow_lease_v2": {`SELECT * FROM workflow_lease_v2('{f,f}', '{media.work.v1,billing.work.v1}', '{0,0}', '{1901-01-01,1901-01-01}', '{00000000-0000-0000-0000-000000000000,00000000-0000-0000-0000-000000000000}', '{0,0}',
		'{100,100}', '{NULL,NULL}', '{NULL,NULL}', true, 10, 1000, true, false, false, '7d1f0f0e-0000-4000-8000-000000000001', 'somebody', '{media.work.v1,billing.work.v1}', '{60,60}', '{NULL,NULL}',
		'{}', '{}', false, false, false)`},
	"workflow_lease_refused_v1": {`SELECT * FROM workflow_lease_refused_v1('{f,f}', '{media.work.v1,billing.work.v1}', '{0,0}', '{1901-01-01,1901-01-01}', '{00000000-0000-0000-0000-000000000000,00000000-0000-0000-0000-000000000000}', '{0,0}',
		true, 1000, true, 'somebody', '{media.work.v1,billing.work.v1}', '{60,60}', '{NULL,NULL}')`},
}

// obstaclesOf are triggers for functions that look for rows that the database refuses to change.
var obstaclesOf = map[string]string{
	"workflow_lease_refused_v1":     "CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.payload->>'specimen' ~ '-retried/') EXECUTE FUNCTION refuse(); ",
	"workflow_take_back_refused_v1": "CREATE TRIGGER refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.payload->>'specimen' ~ '-exhausted/') EXECUTE FUNCTION refuse(); ",
}

// choices are the values of an argument, the usual one first; empty means that it is left out.
func (s *survey) choices(f function, a *actor, name, typ string, optional bool) (all []string) {
	elem, many := strings.CutSuffix(typ, "[]")
	named, ok := values[f.name+" "+name]
	if !ok {
		named, ok = values[name]
	}
	switch {
	case name == "on_behalf_of":
		if a.name == "console" {
			return []string{"'anna'"}
		}
		return []string{""}
	case ok:
		all = slices.Clone(named)
	case elem == "uuid":
		all = s.things(f, name)
	default:
		all = slices.Clone(usual[elem])
	}
	if len(all) == 0 {
		all = []string{"NULL"}
	}
	if many {
		for k, v := range all {
			if v != "NULL" && !strings.HasPrefix(v, "ARRAY") && (elem == "jsonb" || !strings.HasPrefix(v, "'{")) {
				all[k] = "ARRAY[" + v + "]"
			}
		}
	}
	if optional {
		all = append([]string{""}, all...)
	}
	return all
}

// usual are values of each type. values are those of arguments with a meaning, by the name of the argument, or of the
// function and the argument.
var (
	usual = map[string][]string{
		"text": {"'media.work.v1'"}, "jsonb": {`'{"n": 1}'`}, "timestamp with time zone": {"'2001-01-01'", "now() + interval '1 hour'"}, "interval": {"'1 second'"}, "smallint": {"1"}, "integer": {"100", "1"},
		"bigint": {"1", "0"}, "double precision": {"1"}, "boolean": {"false", "true"}, "regprocedure": {"'workflow_cancel'::regproc::regprocedure"},
	}
	values = map[string][]string{
		"prefix":       {"'media.'", "'billing.'", "'never.'", "'graph.'", "'test.'"},
		"prefixes":     {"'{media.}'", "'{billing.}'", "'{media.,billing.,test.,graph.}'"},
		"handlers":     {"'{media.}'", "'{billing.}'"},
		"types":        {"'{media.work.v1}'", "'{billing.work.v1}'", "'{test.step.v1}'", "'{graph.timer.v1}'"},
		"type":         {"'media.new.v1'", "'billing.new.v1'", "'graph.start.v1'", "'graph.cancel.v1'", "'graph.timer.v1'"},
		"event_type":   {"'media.made.v1'", "'run.failed'", "'process.completed'"},
		"term_types":   {"'{media.work.v1,billing.work.v1,test.step.v1,graph.timer.v1}'"},
		"teams":        {"ARRAY[NULL]"},
		"mosts":        {"ARRAY[NULL]"},
		"graces":       {"0"},
		"rooms":        {"100"},
		"priorities":   {"0"},
		"from_id":      {"'00000000-0000-0000-0000-000000000000'"},
		"from_at":      {"'1901-01-01'"},
		"within":       {"3600"},
		"verdicts":     {"'succeeded'", "'failed'", "'retried'", "'postponed'", "'released'", "'cancelled'"},
		"results":      {`'{"n": 1}'`, "ARRAY[NULL]"},
		"errors":       {"ARRAY[NULL]", `'{"code": "handler_error"}'`},
		"last_errors":  {"'not now'", "ARRAY[NULL]"},
		"timeouts":     {"'{60,60,60,60}'", "'{NULL,NULL,NULL,NULL}'"},
		"tokens":       {noToken, "'7d1f0f0e-0000-4000-8000-000000000005'"}, // the first is replaced by the token of the lease
		"lengths":      {"60"},
		"worker":       {"'somebody'", "'nobody'"},
		"statement":    {"'lease'", "'settle'", "'take back'"},
		"sqlstate":     {"'23514'", "'54000'", "'40001'"},
		"secret":       {secret, "'7d1f0f0e-0000-4000-8000-0000000000bb'"},
		"node":         {"'A'", "'B'"},
		"who":          {"'anna'"},
		"assignee":     {"'anna'", "NULL"},
		"sink":         {"'control'", "'sink0'"},
		"since":        {"'2001-01-01'"},
		"until":        {"'infinity'"},
		"reason":       {"'a reason'"},
		"payload":      {"'{}'"},
		"priority":     {"5"},
		"max_attempts": {"2"},
		"concurrency":  {"10"},
		"running":      {"1", "0"},
		"most":         {"100"},
		"names":        {"'paid'"},
		"keys":         {"'message/0'"},

		"idempotency_key":                      {"'a key'"},
		"outbox_replay types":                  {"'{}'"},
		"outbox_replay_parked types":           {"'{}'"},
		"outbox_append_v1 types":               {"'media.made.v1'", "'run.failed'", "'process.completed'"},
		"outbox_append_v1 ids":                 {"NULL"},
		"workflow_lease_v1 token":              {"'7d1f0f0e-0000-4000-8000-000000000001'"},
		"workflow_take_back_v1 token":          {"'7d1f0f0e-0000-4000-8000-000000000001'"},
		"workflow_take_back token":             {"'7d1f0f0e-0000-4000-8000-000000000001'"},
		"workflow_enqueue id":                  {"'7d1f0f0e-0000-4000-8000-000000000002'"},
		"workflow_enqueue_once id":             {"'7d1f0f0e-0000-4000-8000-000000000002'"},
		"workflow_lease_v1 most":               {"1000"},
		"workflow_lease_v2 token":              {"'7d1f0f0e-0000-4000-8000-000000000001'"},
		"workflow_lease_v2 most":               {"1000"},
		"workflow_lease_v2 lengths":            {"'{60,60,60,60}'"},
		"workflow_settle_v2 mosts":             {"ARRAY[NULL]", "ARRAY[9]"},
		"workflow_out_of_bounds most":          {"100"},
		"workflow_lease_v1 lengths":            {"'{60,60,60,60}'"},
		"workflow_lease_refused_v1 lengths":    {"'{60,60,60,60}'"},
		"workflow_isolate lengths":             {"'{60,60,60,60}'"},
		"workflow_try lengths":                 {"'{60,60,60,60}'"},
		"workflow_advance setting":             {"'on'"},
		"workflow_add_bounds_v1 relation":      {"'workflow_run'", "'outbox_event'", "'process_instance'"},
		"workflow_mend_v1 relation":            {"'workflow_run'", "'outbox_event'", "'process_instance'"},
		"workflow_validate_bounds_v1 relation": {"'workflow_run'", "'outbox_event'", "'process_instance'"},
		"workflow_mend_v1 after":               {"NULL"},
		"row_key":                              {`'{"id": "00000000-0000-4000-8000-000000000000"}'`},
		"table_name":                           {"'workflow_run'"},
		"operation":                            {"'UPDATE'"},
	}
)

// things are the ids of one of each kind of thing, in each state, as SQL.
func (s *survey) things(f function, name string) (all []string) {
	tables := []string{"workflow_run"}
	switch {
	case name == "task":
		tables = []string{"user_task"}
	case f.name == "workflow_present_v1" || f.name == "workflow_absent_v1":
		tables = []string{"workflow_worker"}
	case f.name == "outbox_append_v1" || f.name == "outbox_emit":
		tables = []string{"workflow_run", "process_instance"}
	case strings.HasPrefix(f.name, "process_") && (name == "token" || name == "thrower" || name == "doer"):
		tables = []string{"process_token"}
	case strings.HasPrefix(f.name, "process_"):
		tables = []string{"process_instance"}
	}
	classes := map[string]bool{}
	for _, r := range s.w.rows {
		class := r.class
		if r.table == "workflow_worker" {
			class = r.specimen
		}
		if slices.Contains(tables, r.table) && !classes[class] {
			classes[class] = true
			all = append(all, quoted(fmt.Sprint(r.data["id"])))
			if name == "token" && r.table == "workflow_run" {
				if all[len(all)-1] = s.tokenOf(all[len(all)-1]); all[len(all)-1] == noToken {
					all = all[:len(all)-1]
				}
			}
		}
	}
	return append(all, "'7d1f0f0e-0000-4000-8000-000000000003'") // of no thing
}

// handed is the token that the handler of a run gets for a lease token, as SQL. It computes workflow_handed, which no
// role may call.
func handed(id, token string) string {
	run, err := uuid.Parse(strings.Trim(id, "'"))
	of, problem := uuid.Parse(strings.Trim(token, "'"))
	if err != nil || problem != nil {
		return token
	}
	sum := sha256.Sum256(append(of[:], run[:]...))
	return quoted(uuid.UUID(sum[:16]).String())
}

const noToken = "'7d1f0f0e-0000-4000-8000-000000000004'"

// tokenOf is the token of a run's lease, as SQL, which its worker knows.
func (s *survey) tokenOf(id string) string {
	id = strings.TrimSuffix(strings.TrimPrefix(id, "ARRAY["), "]")
	token := noToken
	if held := s.p.rows["workflow_run id = "+id].data["lease_token"]; held != nil {
		token = quoted(fmt.Sprint(held))
	}
	return token
}

// reachesOthers are the functions through which a bound worker changes or blocks what is not its own, and why that is
// open.
var reachesOthers = map[string]string{}

// judge fails for each function through which a bound worker reaches what is not its own, unless it is in
// reachesOthers.
func (s *survey) judge() {
	for _, f := range s.functions {
		var reached []string
		for e := range s.seen["media "+f.signature] {
			if e.rows == "of others" {
				reached = append(reached, e.op+" "+e.table)
			}
		}
		slices.Sort(reached)
		switch why, known := reachesOthers[f.name]; {
		case len(reached) > 0 && !known:
			s.w.t.Errorf("a worker bound to media. reaches what is not its own by %s: %s", f.name, strings.Join(reached, ", "))
		case len(reached) == 0 && known:
			s.w.t.Errorf("by %s a bound worker reaches its own alone: take it out of reachesOthers (%s)", f.name, why)
		}
	}
}

var (
	literals = regexp.MustCompile(`--[^\n]*|'[^']*'`)
	writes   = regexp.MustCompile(`(?i)\b(INSERT INTO|UPDATE|DELETE FROM)\s+([a-z_]+)\b`)
)

// told is the second part of the page.
func (s *survey) told() string {
	var b strings.Builder
	b.WriteString(changedHeading + `
Seen, not derived: each function is called with generated arguments as each role that may execute it, for one thing of each kind and state, in a transaction that is rolled back, and all tables are compared. Updates are told by column;
what triggers and what is called write is part of it. In parentheses is in which state rows were. A row that is locked and not changed is told of those who may hold up nothing but their own: enqueuers, bound workers, dispatchers and viewers.
A console acts as a person who is an operator.

`)
	reached := map[string]bool{}
	for _, r := range roles {
		if surveyed[r.role] == "" {
			continue
		}
		fmt.Fprintf(&b, "### %s, by functions\n\n```\n", r.name)
		none := true
		for _, f := range s.functions {
			seen := s.seen[r.role+" "+f.signature]
			if len(seen) == 0 {
				continue
			}
			none = false
			fmt.Fprintf(&b, "%s\n", f.name)
			for _, e := range slices.SortedFunc(maps.Keys(seen), func(x, y effect) int {
				return strings.Compare(x.table+" "+x.op+" "+x.rows, y.table+" "+y.op+" "+y.rows)
			}) {
				reached[f.name+" "+e.op+" "+e.table] = true
				if e.op == "lock" && (seen[effect{"update", e.table, e.rows}] != nil || seen[effect{"delete", e.table, e.rows}] != nil) {
					continue // a changed row is always locked
				}
				line := "    " + e.op + " " + e.table
				if e.rows != "" {
					line += ", " + e.rows
				}
				if states := sorted(seen[e].states); len(states) > 0 {
					line += " (" + strings.Join(states, ", ") + ")"
				}
				if columns := sorted(seen[e].columns); len(columns) > 0 {
					line += ": " + strings.Join(columns, ", ")
				}
				b.WriteString(line + "\n")
			}
		}
		if none {
			b.WriteString("nothing\n")
		}
		b.WriteString("```\n\n")
	}
	b.WriteString("### What no call has reached\n\nStatements that stand in the text of a function and that no call was seen to have an effect of. Some undo what they do before they return; what is said above may lack the others.\n\n```\n")
	for _, f := range s.functions {
		var missing []string
		source := f.source
		if !strings.Contains(source, "EXECUTE") {
			source = literals.ReplaceAllString(source, "")
		}
		for _, found := range writes.FindAllStringSubmatch(source, -1) {
			op := strings.ToLower(strings.Fields(found[1])[0])
			if what := op + " " + found[2]; s.w.tables[found[2]] != nil && !reached[f.name+" "+what] && !slices.Contains(missing, what) {
				missing = append(missing, what)
			}
		}
		if len(missing) > 0 {
			fmt.Fprintf(&b, "%s: %s\n", f.name, strings.Join(missing, ", "))
		}
	}
	b.WriteString("```\n")
	return b.String()
}
