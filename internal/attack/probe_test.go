//go:build attack

package attack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// A probe tries statements in transactions that are rolled back. It finds out what is refused, what changes, and
// whether the tools still work.
type probe struct {
	w     *world
	conn  *pgx.Conn
	rows  map[string]row // of the world, by table and key
	views []string
	first map[string]row // one of each class, to be changed

	denied map[string]answer // answers that depend on privileges alone, so that values make no difference
}

func (w *world) newProbe(conn *pgx.Conn) *probe {
	p := &probe{w: w, conn: conn, rows: map[string]row{}, first: map[string]row{}, denied: map[string]answer{}}
	for _, r := range w.rows {
		p.rows[r.table+" "+r.key] = r
		if _, ok := p.first[r.class]; !ok && r.ours() {
			p.first[r.class] = r
		}
	}
	rows, _ := conn.Query(w.t.Context(), `SELECT ours::text FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours WHERE c.relkind = 'v' ORDER BY 1`)
	var err error
	if p.views, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		w.t.Fatal(err)
	}
	return p
}

// An answer is the result of a statement.
type answer struct {
	refused string // the SQLSTATE; empty: accepted
	words   string
	changes []change
	problem string // what was wrong with it, apart from what it changed
}

// try executes a statement as an actor, finds out what it changed, and rolls back.
func (p *probe) try(ctx context.Context, a *actor, m *mutation, tools bool) (answer, error) {
	right := a.name + " " + m.place()
	if m.op == "call" {
		right = a.name + " " + m.on
	}
	if reply, ok := p.denied[right]; ok {
		return reply, nil
	}
	statement := m.sql(p.first[m.class])
	defer func() { _, _ = p.conn.PgConn().Exec(ctx, "ROLLBACK").ReadAll() }()
	err := execute(ctx, p.conn.PgConn(), a, statement)
	if refusal := (*pgconn.PgError)(nil); errors.As(err, &refusal) {
		reply := answer{refused: refusal.Code, words: refusal.Message}
		switch {
		case strings.HasPrefix(refusal.Code, "XX") || strings.HasPrefix(refusal.Code, "54001"):
			reply.problem = "the server is at its wits' end: " + refusal.Message
		case refusal.Code == "42601":
			return reply, fmt.Errorf("%s: %w", statement, err) // the statement is wrong, which is our mistake
		case refusal.Code == "57014":
			reply.problem = "it goes on without end"
		case strings.TrimSpace(refusal.Message) == "":
			reply.problem = "it is refused without words"
		case refusal.Code == "42501" && m.op != "command" && (refusal.Message == "permission denied for table "+m.on || refusal.Message == "permission denied for function "+m.on):
			p.denied[right] = reply
		}
		return reply, nil
	}
	if err != nil {
		return answer{}, err // the server crashed
	}
	var reply answer
	if reply.changes, err = p.changes(ctx); err != nil {
		return answer{}, err
	}
	for _, c := range reply.changes {
		why := a.forbids(m, c)
		if run, _ := c.after["workflow_id"].(string); why == "" && c.table == "workflow_history" && (a.name == "media" || a.name == "billing") &&
			!strings.HasPrefix(p.w.of["workflow_run id = "+quoted(run)], a.name+"-") {
			why = "it tells of a run that is not of its prefix"
		}
		if why != "" {
			reply.problem = fmt.Sprintf("%s of %s (%s): %s", c.op(), c.table, strings.Join(c.columns[:min(len(c.columns), 6)], ", "), why)
			break
		}
	}
	if m.op == "truncate" && slices.Contains(append([]string{"workflow_run", "process_instance", "process_definition", "outbox_event"}, engines...), m.on) && !(slices.Contains(keys, m.on) && slices.Contains([]string{"owner", "before"}, a.name)) {
		reply.problem = "a table of the engine is emptied" // TRUNCATE counts no rows
	}
	if tools && reply.problem == "" && len(reply.changes) > 0 {
		reply.problem, err = p.look(ctx, reply.changes)
	}
	return reply, err
}

// execute leaves a transaction open in which the statement was executed. If a CHECK refuses a statement of the actor
// without guards, it is dropped first, because rows from before may violate it.
func execute(ctx context.Context, conn *pgconn.PgConn, a *actor, statement string) error {
	script := a.begin() + statement + "; SET CONSTRAINTS ALL IMMEDIATE; RESET SESSION AUTHORIZATION; SET LOCAL session_replication_role = origin"
	_, err := conn.Exec(ctx, "SET statement_timeout = '10s';"+script).ReadAll()
	var dropped []string
	for problem := (*pgconn.PgError)(nil); a.role == "" && len(dropped) < 5 && errors.As(err, &problem) && problem.Code == "23514" && problem.ConstraintName != ""; {
		_, _ = conn.Exec(ctx, "ROLLBACK").ReadAll()
		dropped = append(dropped, fmt.Sprintf("ALTER TABLE %s DROP CONSTRAINT %s; ", problem.TableName, problem.ConstraintName))
		_, err = conn.Exec(ctx, strings.Replace(script, "BEGIN;", "BEGIN; "+strings.Join(dropped, ""), 1)).ReadAll()
	}
	return err
}

// changes compares the tables that the transaction has written to with the world.
func (p *probe) changes(ctx context.Context) (all []change, err error) {
	rows, _ := p.conn.Query(ctx, `SELECT relname FROM pg_stat_xact_user_tables WHERE n_tup_ins + n_tup_upd + n_tup_del > 0 ORDER BY relname`)
	touched, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	for _, name := range touched {
		if p.w.tables[name] == nil {
			continue
		}
		more, err := p.w.compare(ctx, p.conn, name, p.rows, byMe)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// compare lists how a table differs from the world. It looks at all rows, or only at those that match written.
func (w *world) compare(ctx context.Context, conn *pgx.Conn, name string, was map[string]row, written string) (all []change, err error) {
	seen := map[string]bool{}
	rows, _ := conn.Query(ctx, fmt.Sprintf(`SELECT %s FROM %s x`, w.tables[name].keyText(), name))
	var key string
	if _, err := pgx.ForEachRow(rows, []any{&key}, func() error { seen[key] = true; return nil }); err != nil {
		return nil, err
	}
	rows, _ = conn.Query(ctx, fmt.Sprintf(`SELECT %s, to_jsonb(x) FROM %s x %s ORDER BY 1`, w.tables[name].keyText(), name, written))
	var data []byte
	_, err = pgx.ForEachRow(rows, []any{&key, &data}, func() error {
		before, known := was[name+" "+key]
		if known && before.text == string(data) {
			return nil
		}
		c := change{table: name, key: key, before: before.data}
		if c.after, err = decode(data); err != nil {
			return err
		}
		for _, column := range sorted(c.after) {
			if !known || !reflect.DeepEqual(c.after[column], before.data[column]) {
				c.columns = append(c.columns, column)
			}
		}
		all = append(all, c)
		return nil
	})
	for id, r := range was {
		if r.table == name && !seen[r.key] {
			all = append(all, change{table: name, key: strings.TrimPrefix(id, name+" "), before: r.data})
		}
	}
	slices.SortFunc(all, func(a, b change) int { return strings.Compare(a.key, b.key) })
	return all, err
}

// byMe selects the rows that the current transaction has written, in any subtransaction.
const byMe = "WHERE age(x.xmin) <= 0"

// decode keeps numbers as they are written, because some exceed every Go type.
func decode(text []byte) (data map[string]any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return data, d.Decode(&data)
}

// look reads all views, and asks why changed things wait. It returns the first failure.
func (p *probe) look(ctx context.Context, changes []change) (problem string, err error) {
	var questions []string
	for _, v := range p.views {
		questions = append(questions, fmt.Sprintf("SELECT count(to_jsonb(v)::text) FROM %s v", v))
	}
	asked := map[string]bool{}
	for _, c := range changes {
		for column, function := range map[string]string{"id": "", "instance_id": "process_why", "workflow_id": "workflow_why", "token_id": ""} {
			id, ok := c.after[column].(string)
			if c.table == "workflow_run" && column == "id" {
				function = "workflow_why"
			} else if c.table == "process_instance" && column == "id" {
				function = "process_why"
			}
			if ok && function != "" && !asked[id] && len(asked) < 10 {
				asked[id] = true
				questions = append(questions, fmt.Sprintf("SELECT coalesce(%s(%s), 'NULL')", function, quoted(id)))
			}
		}
	}
	_, err = p.conn.PgConn().Exec(ctx, "SAVEPOINT looking; SELECT ("+strings.Join(questions, ")::text, (")+")::text").ReadAll()
	if err == nil {
		return "", nil
	}
	for _, q := range questions { // find out which one it was
		_, _ = p.conn.PgConn().Exec(ctx, "ROLLBACK TO looking").ReadAll()
		_, err := p.conn.PgConn().Exec(ctx, q).ReadAll()
		if refusal := (*pgconn.PgError)(nil); errors.As(err, &refusal) {
			return fmt.Sprintf("a tool fails: %s: %s (%s)", q, refusal.Message, refusal.Code), nil
		} else if err != nil {
			return "", err
		}
	}
	return "", nil
}
