package graph_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A command is a run of one of the engine's types, with the fields of its payload that refer to something.
type command struct {
	typ     string
	payload map[string]any
	parent  bool // fields are keys of payload.parent
	fields  []string
	private bool // only the engine may enqueue it
}

// references returns wrong values for a field: ids of things that belong to others or do not exist, and values of other
// types.
func (b *bystanders) references(field string) []any {
	wrong := []any{uuid.New(), 7, -1, "text", nil, missing{}, map[string]any{}, []any{}, true, ""}
	switch field {
	case "process":
		return append(wrong, b.called, b.caller, "not_deployed")
	case "visit", "depth", "version", "tick":
		return append(wrong, 1, 2, 3, int64(1)<<40)
	case "name":
		return append(wrong, "news", "paid")
	case "at":
		return append(wrong, "on/0", "race/0", "on/99")
	}
	for _, id := range b.ids {
		wrong = append(wrong, id)
	}
	return wrong
}

// missing stands for an absent key.
type missing struct{}

func (b *bystanders) commands() []command {
	start := command{typ: "graph.start.v1", payload: map[string]any{"process": b.called, "input": map[string]any{}}, fields: []string{"process", "id"}}
	parent := start
	parent.parent, parent.private = true, true
	parent.payload = map[string]any{"process": b.called, "input": map[string]any{}, "parent": map[string]any{"instance": b.id["caller"], "token": b.id["caller's token"], "visit": 2, "depth": 1}}
	parent.fields = []string{"instance", "token", "visit", "depth", "undo"}
	undeployed := parent
	undeployed.payload = maps.Clone(parent.payload)
	undeployed.payload["process"] = "not_deployed"
	cut := command{typ: "graph.cut_off.v1", private: true, payload: map[string]any{"token": b.id["caller's token"], "visit": 7}, fields: []string{"token", "visit"}}
	return []command{
		start, parent, undeployed, cut,
		{typ: "graph.message.v1", payload: map[string]any{"name": "paid", "key": "nobody's"}, fields: []string{"key", "id"}},
		{typ: "graph.signal.v1", payload: map[string]any{"name": "other"}, fields: []string{"name"}},
		{typ: "graph.complete_task.v1", payload: map[string]any{"task": uuid.New(), "by": "eve"}, fields: []string{"task", "version"}},
		{typ: "graph.cancel.v1", payload: map[string]any{"instance": uuid.New()}, fields: []string{"instance"}},
		{typ: "graph.retry.v1", payload: map[string]any{"incident": b.id["incident"], "instance": b.id["waiter"]}, fields: []string{"incident", "instance"}},
		{typ: "graph.match.v1", private: true, payload: map[string]any{"name": "paid", "key": "1"}, fields: []string{"name", "key"}},
		{typ: "graph.arrive.v1", private: true, payload: map[string]any{"visit": 2, "child": b.id["called"]}, fields: []string{"visit", "message", "signal", "child", "at"}},
		{typ: "graph.timer.v1", private: true, payload: map[string]any{}, fields: []string{"at", "tick", "visit"}},
		{typ: "graph.undo.v1", private: true, payload: map[string]any{}, fields: []string{"at", "tick", "visit"}},
		{typ: "graph.call.v1", private: true, payload: map[string]any{}, fields: []string{"instance"}}, // there is no such type
	}
}

// variants returns the payload of a command, and copies of it in which one reference is replaced.
func (b *bystanders) variants(c command) (all []map[string]any) {
	all = append(all, c.payload)
	for _, field := range c.fields {
		for _, value := range b.references(field) {
			payload := maps.Clone(c.payload)
			in := payload
			if c.parent {
				in = maps.Clone(payload["parent"].(map[string]any))
				payload["parent"] = in
			}
			in[field] = value
			if _, none := value.(missing); none {
				delete(in, field)
			}
			all = append(all, payload)
		}
	}
	if c.parent {
		for _, wrong := range []any{nil, 7, "text", []any{}, map[string]any{}} {
			payload := maps.Clone(c.payload)
			payload["parent"] = wrong
			all = append(all, payload)
		}
	}
	return all
}

// rightful reports whether a command may change what it names, so that it is not a forgery.
func (b *bystanders) rightful(c command, payload map[string]any) bool {
	is := func(field, name string) bool { return fmt.Sprint(payload[field]) == b.id[name].String() }
	switch c.typ {
	case "graph.complete_task.v1":
		return slices.ContainsFunc(b.tasks, func(id uuid.UUID) bool { return payload["task"] == id })
	case "graph.cancel.v1":
		return slices.ContainsFunc(b.instances, func(id uuid.UUID) bool { return payload["instance"] == id })
	case "graph.retry.v1":
		incident, instance := payload["incident"], payload["instance"]
		return is("incident", "incident") && (is("instance", "stopped") || instance == nil) || is("instance", "stopped") && incident == nil
	case "graph.signal.v1":
		return payload["name"] == "news"
	case "graph.arrive.v1": // an arrival of something that does not exist fails the waiting token
		id, ok := payload["child"].(uuid.UUID)
		return !ok || !slices.Contains(b.instances, id)
	case "graph.timer.v1": // the waiter has a timer at this place
		return payload["at"] == "on/0"
	case "graph.start.v1": // everything that the payload says about its parent is true
		parent, ok := payload["parent"].(map[string]any)
		undo := parent["undo"] == nil
		return ok && payload["process"] == b.called && fmt.Sprint(parent["instance"]) == b.id["caller"].String() && fmt.Sprint(parent["token"]) == b.id["caller's token"].String() &&
			fmt.Sprint(parent["visit"]) == b.visit && fmt.Sprint(parent["depth"]) == "1" && undo
	}
	return false
}

// bystanders are waiting instances of every kind, with the ids of what belongs to them.
type bystanders struct {
	*site
	called, caller   string
	visit            string
	id               map[string]uuid.UUID
	ids              []uuid.UUID
	instances, tasks []uuid.UUID
}

func standBy(s *site) *bystanders {
	s.t.Helper()
	b := &bystanders{site: s, id: map[string]uuid.UUID{}}
	b.called = s.deploy("U", `"U": {"human": {}, "to": "X"},`+step("X", ""))
	b.caller = s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}, "to": "A"},`, b.called)+step("A", ""))
	b.id["caller"] = s.start(b.caller, `{}`)
	b.id["person"] = s.start(s.deploy("H", `"H": {"human": {}, "to": "A"},`+step("A", "")), `{}`)
	b.id["waiter"] = s.start(s.deploy("M", `"M": {"await": {"message": "paid", "key": "'1'"}, "on": [{"after": "P1D", "to": "A"}], "to": "A"},`+step("A", "")), `{}`)
	b.id["listener"] = s.start(s.deploy("S", `"S": {"await": {"signal": "news"}, "to": "A"},`+step("A", "")), `{}`)
	b.id["sleeper"] = s.start(s.deploy("W", `"W": {"wait": "P1D", "to": "A"},`+step("A", "")), `{}`)
	b.id["stopped"] = s.start(s.deploy("X", `"X": {"choose": [{"if": "input.n == 1.0", "to": "A"}]},`+step("A", "")), `{"n": 2}`)
	b.id["paused"] = s.start(s.deploy("P", `"P": {"wait": "P1D", "to": "A"},`+step("A", "")), `{}`)
	await(s.t, "all to wait", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'WAITING'`) == 8
	})
	query[string](s.t, s.pool, `SELECT process_pause($1)`, b.id["paused"])
	one := func(name, sql string, args ...any) { b.id[name] = query[uuid.UUID](s.t, s.pool, sql, args...) }
	one("called", `SELECT id FROM process_instance WHERE parent_process_instance_id = $1`, b.id["caller"])
	for _, name := range []string{"caller", "called", "person", "waiter", "listener", "sleeper", "stopped", "paused"} {
		b.instances = append(b.instances, b.id[name])
		one(name+"'s token", `SELECT id FROM process_token WHERE instance_id = $1`, b.id[name])
	}
	one("task", `SELECT id FROM user_task WHERE instance_id = $1`, b.id["person"])
	one("called's task", `SELECT id FROM user_task WHERE instance_id = $1`, b.id["called"])
	one("incident", `SELECT id FROM incident WHERE instance_id = $1`, b.id["stopped"])
	one("timer", `SELECT id FROM workflow_run WHERE token_id = $1`, b.id["sleeper's token"])
	b.tasks = []uuid.UUID{b.id["task"], b.id["called's task"]}
	b.visit = fmt.Sprint(query[int64](s.t, s.pool, `SELECT version FROM process_token WHERE id = $1`, b.id["caller's token"]))
	for _, name := range []string{"called", "person", "person's token", "waiter's token", "task", "called's task", "incident", "timer"} {
		b.ids = append(b.ids, b.id[name])
	}
	return b
}

// look returns the state of the bystanders as text, by instance.
func (b *bystanders) look() map[string]string {
	b.t.Helper()
	rows, _ := b.pool.Query(b.t.Context(), `
		SELECT i.id::text, to_jsonb(i)::text || coalesce((SELECT jsonb_agg(to_jsonb(t) ORDER BY t.id) FROM process_token t WHERE t.instance_id = i.id)::text, '')
		       || coalesce((SELECT jsonb_agg(to_jsonb(u) ORDER BY u.id) FROM user_task u WHERE u.instance_id = i.id)::text, '')
		       || coalesce((SELECT jsonb_agg(to_jsonb(x) ORDER BY x.id) FROM incident x WHERE x.instance_id = i.id)::text, '')
		       || (SELECT count(*) FROM message_wait w WHERE w.instance_id = i.id) || ' waits, '
		       || (SELECT count(*) FROM process_instance c WHERE c.parent_process_instance_id = i.id) || ' called'
		FROM process_instance i WHERE i.id = ANY ($1)`, b.instances)
	seen := map[string]string{}
	var id, text string
	if _, err := pgx.ForEachRow(rows, []any{&id, &text}, func() error { seen[id] = text; return nil }); err != nil {
		b.t.Fatal(err)
	}
	return seen
}

// unchanged waits until all due runs are over, and checks that the bystanders are as they were.
func (b *bystanders) unchanged(before map[string]string, who string) {
	b.t.Helper()
	b.t.Cleanup(func() {
		if b.t.Failed() {
			b.t.Log(query[string](b.t, b.pool, `SELECT coalesce(string_agg(concat_ws(' ', type, status, payload, attempt, postponed, last_error), E'\n'), 'all are done')
				FROM (SELECT * FROM workflow_run WHERE status IN ('pending', 'leased') AND held_at IS NULL AND run_at < now() + interval '1 minute' LIMIT 10) r`))
		}
	})
	await(b.t, "commands to be carried out", func() bool {
		return query[int](b.t, b.pool, `SELECT count(*) FROM workflow_run WHERE status IN ('pending', 'leased') AND run_at <= now() AND held_at IS NULL`) == 0
	})
	for id, text := range b.look() {
		if before[id] != text {
			b.t.Errorf("%s has changed an instance that is not his from\n%s\nto\n%s", who, before[id], text)
		}
	}
}

// A command that names something that does not belong to it changes nothing of another instance, whether a role that
// may only enqueue, an operator or the owner enqueues it. Runs that only the engine may enqueue are refused from the
// roles, even if they set workflow.advance.
func TestForgedCommands(t *testing.T) {
	s := newSite(t)
	b := standBy(s)
	named := pgtest.Roles(t, s.pool)
	for _, role := range []string{"enqueue", "operator"} {
		theirs := pgtest.As(t, s.pool, named, role)
		before := b.look()
		for _, c := range b.commands() {
			for _, payload := range b.variants(c) {
				if !c.private && b.rightful(c, payload) {
					continue
				}
				_, parent := payload["parent"]
				private := c.private && (c.typ != "graph.start.v1" || parent)
				for _, sql := range []string{`SELECT workflow_enqueue($1, $2)`, `INSERT INTO workflow_run (type, payload) VALUES ($1, $2)`} {
					if err := b.as(theirs, sql, c.typ, payload); err == nil && private {
						t.Errorf("%s may enqueue %s %v", role, c.typ, payload)
					}
				}
			}
		}
		for _, column := range []string{`token_id) VALUES ('test.step.v1', '` + b.id["person's token"].String(), `node) VALUES ('test.step.v1', 'A`} {
			if err := b.as(theirs, `INSERT INTO workflow_run (type, `+column+`')`); err == nil {
				t.Errorf("%s may insert %s", role, column)
			}
		}
		b.unchanged(before, role)
	}

	before := b.look()
	for _, c := range b.commands() {
		for _, payload := range b.variants(c) {
			if b.rightful(c, payload) {
				continue
			}
			text, _ := json.Marshal(payload)
			if c.typ != "graph.arrive.v1" && c.typ != "graph.timer.v1" && c.typ != "graph.undo.v1" {
				b.force(`INSERT INTO workflow_run (type, payload) VALUES ($1, $2)`, c.typ, text)
				for _, end := range []string{`workflow_cancel(id)`, `workflow_delete(id, 'no')`} { // end a run that has not started
					b.force(`SELECT `+end+` FROM workflow_run WHERE id = $1`,
						query[uuid.UUID](t, s.pool, `INSERT INTO workflow_run (type, payload, run_at) SELECT $1, $2, now() + interval '1 hour' FROM set_config('workflow.advance', 'on', true) RETURNING id`, c.typ, text))
				}
				continue
			}
			for _, at := range []string{"caller", "person", "waiter", "listener", "stopped"} { // none of them waits for this
				b.force(`INSERT INTO workflow_run (type, payload, token_id, node) SELECT $1, $2, t.id, t.node FROM process_token t WHERE id = $3`, c.typ, text, b.id[at+"'s token"])
			}
		}
	}
	b.unchanged(before, "the owner")
	s.healthy()
}

// as executes a statement in a transaction with all the settings that the engine uses.
func (b *bystanders) as(pool *pgxpool.Pool, sql string, args ...any) error {
	if len(args) == 2 {
		text, err := json.Marshal(args[1])
		if err != nil {
			return err
		}
		args[1] = text
	}
	return pgx.BeginFunc(b.t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.t.Context(), `SELECT set_config(n, 'on', true) FROM unnest('{workflow.advance,workflow.retry,workflow.audit}'::text[]) n`); err != nil {
			return err
		}
		_, err := tx.Exec(b.t.Context(), sql, args...)
		return err
	})
}

// force executes a statement as the owner; an INSERT passes the guard that refuses it from others.
func (b *bystanders) force(sql string, args ...any) {
	b.t.Helper()
	err := pgx.BeginFunc(context.Background(), b.pool, func(tx pgx.Tx) error {
		if strings.HasPrefix(sql, "INSERT") {
			if _, err := tx.Exec(b.t.Context(), `SELECT set_config('workflow.advance', 'on', true)`); err != nil {
				return err
			}
		}
		_, err := tx.Exec(b.t.Context(), sql, args...)
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// A call that was enqueued before any worker ran starts its instance, and the end of that instance moves the caller.
func TestStartOfTheOldForm(t *testing.T) {
	s := newEmptySite(t)
	child := s.deploy("X", step("X", ""))
	id := s.start(s.deploy("C", fmt.Sprintf(`"C": {"call": {"process": %q, "undo": "none"}, "to": "A"},`, child)+step("A", "")), `{}`)
	s.worker = s.hire()
	s.status(id, graph.Completed)
	s.want(map[string]int{"X": 1, "A": 1})
	s.healthy()
}
