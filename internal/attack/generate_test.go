//go:build attack

package attack

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// A table, as described by the catalogs.
type table struct {
	name    string
	columns []column
	key     []string
}

type column struct {
	name, typ string
	computed  bool // generated: nobody can write it
	required  bool // NOT NULL without a default
	drawn     bool // GENERATED ALWAYS AS IDENTITY: an explicit value needs OVERRIDING SYSTEM VALUE
}

func (t *table) has(name string) bool {
	return slices.ContainsFunc(t.columns, func(c column) bool { return c.name == name })
}

// keyText is an expression for the condition that finds a row x.
func (t *table) keyText() string {
	var parts []string
	for _, k := range t.key {
		parts = append(parts, fmt.Sprintf("format('%%I = %%L', '%s', x.%q::text)", k, k))
	}
	return strings.Join(parts, " || ' AND ' || ")
}

func readTables(ctx context.Context, conn *pgx.Conn) (map[string]*table, error) {
	tables := map[string]*table{}
	rows, _ := conn.Query(ctx, `
		SELECT c.relname, a.attname, format_type(a.atttypid, NULL), a.attgenerated <> '', a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attidentity = 'a',
		       coalesce(a.attnum = ANY (x.indkey), false)
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		LEFT JOIN pg_index x ON x.indrelid = c.oid AND x.indisprimary
		WHERE c.oid IN (SELECT workflow_relations()) AND c.relkind IN ('r', 'p') AND c.relname <> $1
		ORDER BY c.relname, a.attnum`, unchanged)
	var name string
	var c column
	var isKey bool
	_, err := pgx.ForEachRow(rows, []any{&name, &c.name, &c.typ, &c.computed, &c.required, &c.drawn, &isKey}, func() error {
		if tables[name] == nil {
			tables[name] = &table{name: name}
		}
		tables[name].columns = append(tables[name].columns, c)
		if isKey {
			tables[name].key = append(tables[name].key, c.name)
		}
		return nil
	})
	return tables, err
}

// extremes are values of each type, as SQL, by name.
var extremes = map[string]map[string]string{
	"timestamp with time zone": {"NULL": "NULL", "-infinity": "'-infinity'", "infinity": "'infinity'", "1999": "'1999-01-01'", "9999": "'9999-12-31'"},
	"smallint":                 {"NULL": "NULL", "least": "-32768", "-1": "-1", "0": "0", "greatest": "32767"},
	"integer":                  {"NULL": "NULL", "least": "-2147483648", "-1": "-1", "0": "0", "greatest": "2147483647"},
	"bigint":                   {"NULL": "NULL", "least": "-9223372036854775808", "-1": "-1", "0": "0", "greatest": "9223372036854775807"},
	"xid8":                     {"NULL": "NULL", "0": "'0'", "greatest": "'18446744073709551615'"},
	"text":                     {"NULL": "NULL", "empty": "''", "huge": "repeat('x', 1000000)", "control": `E'\x01\n\x1b[31m\u202e'`},
	"jsonb": {"NULL": "NULL", "{}": "'{}'", "[]": "'[]'", "null": "'null'", "huge": "jsonb_build_object('x', repeat('x', 1000000))",
		"deep": "(repeat('{\"a\":', 1000) || '1' || repeat('}', 1000))::jsonb", "number": `'{"n": 1e400, "specimen": 7, "parent": [], "token": 1}'`},
	"uuid":    {"NULL": "NULL", "random": "gen_random_uuid()"},
	"text[]":  {"NULL": "NULL", "empty": "'{}'", "null element": "'{NULL}'", "huge": "array_fill('x'::text, ARRAY[100000])", "two dimensions": "'{{a,b},{c,d}}'"},
	"boolean": {"NULL": "NULL", "true": "true", "false": "false"},
	"bytea":   {"NULL": "NULL", "empty": "''", "huge": "convert_to(repeat('x', 1000000), 'UTF8')"},
	"xid":     {"NULL": "NULL", "0": "'0'", "greatest": "'4294967295'"},
	"regrole": {"NULL": "NULL", "nobody": "'4294967295'", "operator": "'workflow_operator'", "desk": "'desk'"},

	"uuid[]":                     {"NULL": "NULL", "empty": "'{}'", "null element": "'{NULL}'", "huge": "array_fill(gen_random_uuid(), ARRAY[100000])", "two dimensions": "ARRAY[ARRAY[gen_random_uuid()], ARRAY[gen_random_uuid()]]"},
	"timestamp with time zone[]": {"NULL": "NULL", "empty": "'{}'", "null element": "'{NULL}'", "infinity": "'{infinity,-infinity}'", "huge": "array_fill(now(), ARRAY[100000])"},
	"pg_snapshot":                {"NULL": "NULL", "nobody": "'1:1:'", "everybody": "'9000000000000000:9000000000000000:'"},

	"double precision": {"NULL": "NULL", "NaN": "'NaN'", "infinity": "'infinity'", "-infinity": "'-infinity'", "-1": "-1", "greatest": "1e300"},
	"interval":         {"NULL": "NULL", "huge": "'10000 years'", "negative": "'-10000 years'"},
}

// A mutation is something to try on one row of a class, or on no particular row.
type mutation struct {
	op     string // update, insert, delete, truncate, obstacle, call or command
	class  string // of the row; empty: no particular row
	on     string // table, or function, or type of command
	column string // or argument, or key of the payload
	value  string // name of the value
	sql    func(r row) string
}

// name is the same in each world.
func (m *mutation) name() string {
	return strings.Join(slices.DeleteFunc([]string{m.op, m.class, m.on, m.column, m.value}, func(s string) bool { return s == "" }), " | ")
}

// lot is the number that a mutation draws for a seed.
func (m *mutation) lot(seed uint64) uint64 {
	sum := sha256.Sum256([]byte(fmt.Sprint(seed, m.name())))
	return binary.BigEndian.Uint64(sum[:])
}

// place is the subject of a finding: further mutations of the same place rarely show anything new.
func (m *mutation) place() string {
	kind := m.op
	if kind == "insert" && m.column == "" {
		kind = "insert row"
	}
	return strings.Join([]string{kind, m.on, m.column}, " ")
}

// generate returns all mutations, in the same order for each world.
func (w *world) generate() (all []*mutation) {
	first, other := map[string]row{}, map[string]row{} // of each class, one row to change and one to leave alone
	for _, r := range w.rows {
		if _, ok := first[r.class]; !ok && r.ours() {
			first[r.class] = r
		}
		if _, ok := other[r.class]; !ok && !r.ours() {
			other[r.class] = r
		}
	}
	inserted := map[string]bool{}
	for _, class := range sorted(first) {
		t := w.tables[first[class].table]
		for _, c := range t.columns {
			if c.computed {
				continue
			}
			for _, value := range sorted(w.values(c, first[class], other[class])) {
				expression := w.values(c, first[class], other[class])[value]
				all = append(all, &mutation{"update", class, t.name, c.name, value, func(r row) string {
					return fmt.Sprintf("UPDATE %s SET %q = %s WHERE %s", t.name, c.name, expression, r.key)
				}})
				if !inserted[t.name] || t.name == "workflow_run" && strings.Contains(class, "media-due") {
					all = append(all, &mutation{"insert", class, t.name, c.name, value, func(r row) string { return t.copyOf(r, c.name, expression) }})
				}
			}
		}
		inserted[t.name] = true
		all = append(all,
			&mutation{"insert", class, t.name, "", "copy", func(r row) string { return t.copyOf(r, "", "") }},
			&mutation{"delete", class, t.name, "", "", func(r row) string { return fmt.Sprintf("DELETE FROM %s WHERE %s", t.name, r.key) }})
	}
	for _, name := range sorted(w.tables) {
		t := w.tables[name]
		all = append(all,
			&mutation{"insert", "", name, "", "minimal", func(row) string { return t.minimal() }},
			&mutation{"truncate", "", name, "", "", func(row) string { return "TRUNCATE " + name + " CASCADE" }})
	}
	if w.tables["outbox_aggregate"] != nil { // it is empty: a row would block everyone who appends
		all = append(all, &mutation{"insert", "", "outbox_aggregate", "id", "another's", func(row) string {
			return "INSERT INTO outbox_aggregate SELECT aggregate_id FROM outbox_event"
		}})
	}
	return slices.Concat(all, w.obstacles(sorted(first)), w.calls(), w.commands())
}

// obstacles are triggers, such as users write, that refuse every UPDATE of one row, for reasons that we expect or do
// not.
func (w *world) obstacles(classes []string) (all []*mutation) {
	for _, class := range classes {
		name, _, _ := strings.Cut(class, " ")
		if !slices.Contains([]string{"workflow_run", "outbox_event", "process_instance", "process_token"}, name) {
			continue
		}
		for _, code := range []string{"22003", "23514", "P0001", "54000", "55000", "XX001"} {
			all = append(all, &mutation{"obstacle", class, name, "trigger", code, func(r row) string {
				called := fmt.Sprintf("refuse_%x", sha256.Sum256([]byte(r.key+code)))[:30]
				return fmt.Sprintf("CREATE FUNCTION %[1]s() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'it is refused' USING ERRCODE = '%[2]s'; END $$; "+
					"CREATE TRIGGER %[1]s BEFORE UPDATE ON %[3]s FOR EACH ROW WHEN (OLD.%[4]s) EXECUTE FUNCTION %[1]s()", called, code, name, r.key)
			}})
		}
	}
	return all
}

// values are what to set a column to: the extremes of its type, and the value of another row.
func (w *world) values(c column, mine, other row) map[string]string {
	values := maps.Clone(extremes[c.typ])
	if values == nil {
		panic("no extremes for type " + c.typ + " of column " + c.name)
	}
	if c.typ == "bigint" || c.typ == "integer" {
		values["one more"] = fmt.Sprintf("%q + 1", c.name)
	}
	if other.data != nil && other.data[c.name] != nil && fmt.Sprint(other.data[c.name]) != fmt.Sprint(mine.data[c.name]) && c.typ != "boolean" {
		values["another's"] = w.literal(c, other)
	}
	for _, allowed := range states[mine.table+" "+c.name] {
		values["state "+allowed] = "'" + allowed + "'"
	}
	return values
}

// states are the values of columns whose CHECKs list them.
var states = map[string][]string{
	"workflow_run status":        {"pending", "leased", "succeeded", "failed", "cancelled"},
	"process_instance status":    {"CREATED", "IN_PROGRESS", "WAITING", "COMPLETED", "FAILED", "CANCELLED"},
	"process_token state":        {"Created", "Ready", "Waiting", "Completed", "Failed", "Terminated"},
	"process_token mode":         {"Forward", "Compensation"},
	"user_task state":            {"open", "completed", "cancelled"},
	"compensation_record status": {"Pending", "Completed", "Failed"},
}

// literal is the value of a column in a row, as SQL.
func (w *world) literal(c column, r row) string {
	return fmt.Sprintf("(SELECT x.%q FROM jsonb_populate_record(NULL::%s, %s) AS x)", c.name, r.table, quoted(r.text))
}

// copyOf inserts a copy of a row with a new key, or with one column set.
func (t *table) copyOf(r row, column, value string) string {
	var names, values []string
	overriding := ""
	for _, c := range t.columns {
		expression := "x." + fmt.Sprintf("%q", c.name)
		switch {
		case c.computed:
			continue
		case c.name == column:
			if c.drawn {
				overriding = "OVERRIDING SYSTEM VALUE "
			}
			expression = fmt.Sprintf("CAST(%s AS %s)", strings.ReplaceAll(value, fmt.Sprintf("%q + 1", c.name), fmt.Sprintf("x.%q + 1", c.name)), c.typ)
		case len(t.key) == 1 && c.name == t.key[0] && c.typ == "uuid":
			expression = "gen_random_uuid()"
		case slices.Contains(t.key, c.name) && c.typ == "bigint" && c.name == "id":
			continue // drawn from the sequence
		case c.name == "event_uuid" || c.name == "hash":
			continue
		case c.name == "created_by" || c.name == "idempotency_key":
			continue
		}
		names, values = append(names, fmt.Sprintf("%q", c.name)), append(values, expression)
	}
	return fmt.Sprintf("INSERT INTO %s (%s) %sSELECT %s FROM jsonb_populate_record(NULL::%s, %s) AS x", t.name, strings.Join(names, ", "), overriding, strings.Join(values, ", "), t.name, quoted(r.text))
}

// minimal inserts a row with the required columns only.
func (t *table) minimal() string {
	usual := map[string]string{"timestamp with time zone": "now()", "smallint": "1", "integer": "1", "bigint": "1", "text": "'media.made.v1'", "jsonb": "'{}'", "uuid": "gen_random_uuid()", "text[]": "'{}'", "boolean": "false",
		"bytea": "''", "xid": "'1'", "regrole": "'pg_monitor'", "double precision": "1"}
	var names, values []string
	for _, c := range t.columns {
		if c.required && !c.computed {
			if usual[c.typ] == "" {
				panic(fmt.Sprintf("%s.%s: no value of type %s", t.name, c.name, c.typ))
			}
			names, values = append(names, fmt.Sprintf("%q", c.name)), append(values, usual[c.typ])
		}
	}
	return fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s)", t.name, strings.Join(names, ", "), strings.Join(values, ", "))
}

// calls are calls of all functions, with one argument at a time at its extremes. The other arguments are meaningful
// ids, among them ids of billing's things, and a prefix that nobody else has, because a role that may pause media. is
// right to stop it. Functions for workers are called for a lease of media's, with its token.
func (w *world) calls() (all []*mutation) {
	ids, tokens := w.ids(), w.leases()
	usual := map[string]string{"uuid": ids["billing-due"], "text": "'never.work.v1'", "jsonb": "'{}'", "timestamp with time zone": "now()", "interval": "'1 second'", "integer": "1", "bigint": "1",
		"double precision": "1", "boolean": "false", "text[]": "'{never.}'", "regprocedure": "'workflow_cancel'::regproc::regprocedure"}
	working := maps.Clone(usual) // also by the name of the argument
	maps.Copy(working, map[string]string{"text[]": "'{media.work.v1}'", "timestamp with time zone": "'2001-01-01'", "ids": "ARRAY[" + ids["media-leased"] + "]", "tokens": "ARRAY[" + tokens["media-leased"] + "]",
		"verdicts": "'{succeeded}'", "token": tokens["media-leased"], "id": "gen_random_uuid()", "aggregates": "ARRAY[" + ids["media-leased"] + "]", "prefixes": "'{media.}'", "handlers": "'{media.}'"})
	w.with("world", func(conn *pgx.Conn) error {
		rows, _ := conn.Query(w.t.Context(), `
			SELECT p.proname, coalesce(p.proargnames[1:p.pronargs], '{}'), ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) AS t)
			FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.prorettype <> 'trigger'::regtype ORDER BY 1, 3`)
		var name string
		var names, types []string
		_, err := pgx.ForEachRow(rows, []any{&name, &names, &types}, func() error {
			defaults := usual
			if forWorkers.MatchString(name) {
				defaults = working
			}
			call := func(value string, set map[string]string) {
				var arguments, columns []string
				for k, typ := range types {
					argument := ""
					if k < len(names) {
						argument = names[k]
					}
					elem, many := strings.CutSuffix(typ, "[]")
					use, ok := set[argument]
					if ok {
						columns = append(columns, argument)
					} else if argument == "on_behalf_of" { // only roles that may act for others pass it
						use = "nullif(current_setting('attack.person', true), '')"
					} else if use, ok = defaults[argument]; !ok {
						if use, ok = defaults[typ]; !ok && many {
							use, ok = "ARRAY["+defaults[elem]+"]", true
						}
						if !ok {
							use = "NULL"
						}
					}
					arguments = append(arguments, fmt.Sprintf("CAST(%s AS %s)", use, typ))
				}
				text := fmt.Sprintf("SELECT * FROM %s(%s)", name, strings.Join(arguments, ", "))
				all = append(all, &mutation{"call", "", name, strings.Join(columns, ", "), value, func(row) string { return text }})
			}
			call("usual", nil)
			for k, typ := range types {
				if k >= len(names) || names[k] == "" {
					continue
				}
				elem, many := strings.CutSuffix(typ, "[]")
				values := maps.Clone(extremes[elem])
				switch {
				case elem == "uuid":
					maps.Copy(values, ids)
				case names[k] == "on_behalf_of":
					maps.Copy(values, map[string]string{"operator": "'anna'", "owner": "'workflow_owner'", "console": "'desk'", "nobody": "'nobody'"})
				case names[k] == "verdicts":
					maps.Copy(values, map[string]string{"failed": "'failed'", "postponed": "'postponed'", "released": "'released'", "cancelled": "'cancelled'", "retried": "'retried'"})
				case elem == "text":
					maps.Copy(values, map[string]string{"of the engine": "'graph.start.v1'", "another's": "'billing.work.v1'", "told by the engine": "'run.failed'"})
				}
				for _, value := range sorted(values) {
					expression := values[value]
					if many {
						expression = fmt.Sprintf("ARRAY[%s]::%s", expression, typ)
					}
					call(value, map[string]string{names[k]: expression})
				}
				if many {
					for _, value := range sorted(extremes["text[]"]) {
						if expression := extremes["text[]"][value]; elem == "text" || value == "NULL" || value == "empty" {
							call("array "+value, map[string]string{names[k]: expression})
						}
					}
					if first := sorted(extremes[elem]); len(first) > 0 {
						call("array many", map[string]string{names[k]: fmt.Sprintf("array_fill(CAST(%s AS %s), ARRAY[10000])", extremes[elem][first[0]], elem)})
					}
				}
			}
			if slices.Contains(names, "ids") && slices.Contains(names, "tokens") {
				for _, kind := range []string{"media-leased", "media-expired", "media-exhausted", "billing-leased", "billing-expired", "step run"} {
					if tokens[kind] != "" {
						call("lease of "+kind, map[string]string{"ids": "ARRAY[" + ids[kind] + "]", "tokens": "ARRAY[" + tokens[kind] + "]"})
					}
				}
			}
			return nil
		})
		return err
	})
	return all
}

var forWorkers = regexp.MustCompile(`_v\d+$`)

// leases are the tokens of one lease of each kind, as SQL.
func (w *world) leases() map[string]string {
	tokens := map[string]string{}
	for _, r := range w.rows {
		if kind, number, _ := strings.Cut(r.specimen, "/"); r.table == "workflow_run" && number == "0" && r.data["lease_token"] != nil {
			tokens[kind] = quoted(fmt.Sprint(r.data["lease_token"]))
		}
	}
	return tokens
}

// ids are the ids of one thing of each kind that may be changed, as SQL.
func (w *world) ids() map[string]string {
	ids := map[string]string{"random": "'00000000-0000-4000-8000-000000000000'"}
	for _, r := range w.rows {
		kind, number, _ := strings.Cut(r.specimen, "/")
		if number != "0" {
			continue
		}
		switch r.table {
		case "process_instance":
			if r.data["parent_process_instance_id"] == nil {
				ids[kind] = quoted(fmt.Sprint(r.data["id"]))
			}
		case "process_token", "user_task", "incident":
			ids[kind+" "+r.table] = quoted(fmt.Sprint(r.data["id"]))
		case "workflow_run":
			if r.data["token_id"] == nil {
				ids[kind] = quoted(fmt.Sprint(r.data["id"]))
			} else {
				ids[kind+" run"] = quoted(fmt.Sprint(r.data["id"]))
			}
		}
	}
	return ids
}

// commands are runs of the engine's own types with payloads that name things of others. Some are types that anybody
// may enqueue, and some only the engine may.
func (w *world) commands() (all []*mutation) {
	ids, visits := w.ids(), map[string]string{}
	for _, r := range w.rows {
		if r.table == "process_token" {
			visits[quoted(fmt.Sprint(r.data["id"]))] = fmt.Sprint(r.data["version"])
		}
	}
	for _, name := range []string{"start", "cancel", "retry", "restart", "message", "signal", "complete_task", "arrive", "match", "cut_off", "timer", "undo"} {
		command := func(key, value, payload string) {
			text := fmt.Sprintf("INSERT INTO workflow_run (type, payload) VALUES ('graph.%s.v1', %s)", name, payload)
			all = append(all, &mutation{"command", "", "graph." + name + ".v1", key, value, func(row) string { return text }})
			called := fmt.Sprintf("SELECT workflow_enqueue('graph.%s.v1', %s)", name, payload)
			all = append(all, &mutation{"command", "", "workflow_enqueue graph." + name + ".v1", key, value, func(row) string { return called }})
		}
		command("", "empty", "'{}'")
		for _, kind := range []string{"step", "task", "message", "signal", "timer", "call", "join", "each", "undoing", "paused", "incident"} {
			token, instance := ids[kind+" process_token"], ids[kind]
			foreign := ids["step"] // not the owner of the token
			if kind == "step" {
				foreign = ids["call"]
			}
			parent := func(instance string) string {
				return fmt.Sprintf("'parent', jsonb_build_object('instance', %s, 'token', %s, 'visit', %s, 'depth', 1)", instance, token, visits[token])
			}
			switch name {
			case "start":
				command("parent", kind+", of a process that is not deployed", "jsonb_build_object('process', 'nothing', "+parent(instance)+")")
				command("parent", kind+", of a process that is deployed", "jsonb_build_object('process', 'finished', "+parent(instance)+")")
				command("parent", kind+", with another's instance", "jsonb_build_object('process', 'step', "+parent(foreign)+")")
				command("parent", kind+", itself", "jsonb_build_object('process', 'step', 'id', "+instance+", "+parent(instance)+")")
			case "arrive", "timer", "undo", "cut_off":
				for _, visit := range []string{visits[token], "9223372036854775807"} {
					command("token", kind+", visit "+visit, fmt.Sprintf("jsonb_build_object('token', %s, 'visit', %s)", token, visit))
				}
			}
		}
		switch name {
		case "start":
			command("key", "taken", `'{"process": "step", "key": "message/0"}'`)
			command("input", "deep", `jsonb_build_object('process', 'step', 'input', (repeat('{"a":', 60) || '1' || repeat('}', 60))::jsonb)`)
			command("priority", "greatest", `'{"process": "step", "priority": 2147483647}'`)
		case "message":
			command("key", "control", `'{"name": "paid", "key": "\u0001\u202e"}'`)
			command("ttl", "huge", `'{"name": "paid", "key": "nobody", "ttl": "P9999999D"}'`)
		case "match":
			command("name", "paid", `'{"name": "paid", "key": "message/0"}'`)
		}
	}
	return all
}

func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
