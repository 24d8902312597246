package graph

import (
	"encoding/json"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/outbox"
)

// incidents inserts the incidents that were opened, and publishes an event for each.
func (w *writer) incidents(all []*instance) {
	var owners []uuid.UUID
	var tokens []uuid.NullUUID
	var nodes, codes, messages []string
	for _, i := range all {
		for _, x := range i.changes.incidents {
			var token uuid.NullUUID
			if x.token != nil {
				token = uuid.NullUUID{UUID: x.token.id, Valid: true}
			}
			owners, tokens = append(owners, i.id), append(tokens, token)
			nodes, codes, messages = append(nodes, x.node), append(codes, x.code), append(messages, firstLine(x.message))
		}
	}
	if len(owners) > 0 {
		w.tells("incident.opened", `
			INSERT INTO incident (instance_id, token_id, node, code, message)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[])
			RETURNING id, instance_id, node, code, resolved_by`, owners, tokens, nodes, codes, messages)
	}
}

// resolve resolves the open incidents for which the condition which holds ($1 is ids), and records an event for each.
// by is an SQL expression for the column resolved_by.
func (w *writer) resolve(which, by string, ids []uuid.UUID) {
	w.tells("incident.resolved", `
		WITH over AS (
			UPDATE incident x SET resolved_at = now(), resolved_by = `+by+`
			WHERE `+which+` AND x.resolved_at IS NULL
			RETURNING x.id, x.instance_id, x.token_id, x.node, x.code, x.resolved_by
		), told AS (
			INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
			SELECT o.instance_id, o.token_id, 'incident.resolved', nullif(o.node, ''), (SELECT i.version FROM process_instance i WHERE i.id = o.instance_id),
			       jsonb_build_object('incident', o.id, 'code', o.code, 'by', o.resolved_by)
			FROM over o
		)
		SELECT id, instance_id, node, code, resolved_by FROM over`, ids)
}

// tells queues a statement, and publishes an event for each incident that it returns.
func (w *writer) tells(name, sql string, args ...any) {
	w.told = true
	w.ask(func(rows pgx.Rows) error {
		var id, owner uuid.UUID
		var node, code string
		var by *string
		_, err := pgx.ForEachRow(rows, []any{&id, &owner, &node, &code, &by}, func() error {
			data := map[string]any{"incident": id, "code": code, "node": node}
			if by != nil {
				data["by"] = *by
			}
			w.emit(w.scene.instances[owner], name, data)
			return nil
		})
		return err
	}, sql, args...)
}

// role is an SQL expression for the connected role, in the form of workflow_run.created_by: the role, and in brackets
// the application name, if there is one.
const role = `session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')`

// asker returns an SQL expression for who asked for the change: "by" of the run r that this transaction has settled,
// with this type and for which the condition which holds, or the role that enqueued that run. If there is no such run,
// it is role.
func asker(typ, which string) string {
	return `coalesce((SELECT coalesce(nullif(r.payload->>'by', ''), r.created_by) FROM workflow_run r
			WHERE r.status = 'succeeded' AND r.token_id IS NULL AND r.finished_at >= now() AND r.type = '` + typ + `' AND ` + which + `
			ORDER BY r.finished_at DESC LIMIT 1), ` + role + `)`
}

// statusEvents are the types of the outbox events that report a new status.
var statusEvents = map[status]string{
	statusInProgress: "process.started", statusCompleted: "process.completed", statusFailed: "process.failed", statusCancelled: "process.cancelled",
}

// history writes the changes of status of instances, and publishes them.
func (w *writer) history(all []*instance) {
	var owners []uuid.UUID
	var from []*string
	var to, reasons []string
	for _, i := range all {
		for _, h := range i.changes.history {
			owners, to, reasons = append(owners, i.id), append(to, string(h.to)), append(reasons, h.reason)
			was := string(h.from)
			from = append(from, &was)
			if name := statusEvents[h.to]; name != "" && (h.to != statusInProgress || h.from == statusCreated) {
				w.emit(i, name, map[string]any{})
			}
		}
	}
	const own = `r.payload->>'instance' = i.id::text`
	if len(owners) > 0 {
		w.do(`
			INSERT INTO process_state_history (instance_id, from_status, to_status, version, reason, actor)
			SELECT n.instance, n.was, n.is, i.version, nullif(n.reason, ''),
			       CASE n.is WHEN 'CANCELLED' THEN `+asker(cancelType, own)+` WHEN 'FAILED' THEN `+asker(failType, own)+` ELSE `+role+` END
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY AS n (instance, was, "is", reason, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, owners, from, to, reasons)
	}
}

// events writes the process events that no run reports. The view process_history adds the others from the runs.
//
// It is called after the tokens have moved and before the runs of their steps are inserted. So the times of a token's
// events are in the order in which they happened: the success of a run comes before the events that are stored with it,
// and these come before the run of the next step.
func (w *writer) events(all []*instance) {
	if w.copies != "" {
		w.store(w.copies, all, func(i *instance) []event { return i.changes.events })
	}
	w.store("process_event", all, func(i *instance) []event { return i.changes.stored })
}

// unheeded is the event of a run that has succeeded without completing its node: the token had left the node in the same
// batch, or the mapping of the node refuses the result. The view process_history does not show this event, and does not
// show the node as completed by the run.
const unheeded = "run.unheeded"

// unreported returns the events that no run reports, and adds unheeded ones. A run of a do node reports that a token has
// entered the node, if the run is about to be inserted. Its success reports that the node is completed, unless another
// event of the token comes first: the order in the history would be wrong then.
func unreported(i *instance) (stored []event) {
	entered := map[*entry]bool{}
	for _, s := range i.changes.steps {
		if s.entry != nil && alive(s.token.state) > 0 {
			entered[s.entry] = true
		}
	}
	succeeded := map[runRef]bool{}
	for _, s := range i.changes.successes {
		succeeded[s.run] = true
	}
	heeded, before := map[runRef]bool{}, map[*token]bool{}
	for _, e := range i.changes.events {
		if succeeded[e.run] {
			heeded[e.run] = true
		}
		if entered[e.entry] || succeeded[e.run] && !before[e.token] {
			continue
		}
		stored, before[e.token] = append(stored, e), true
	}
	for _, s := range i.changes.successes {
		if !heeded[s.run] {
			stored = append(stored, event{token: s.token, name: unheeded, node: s.node.name, data: map[string]any{"run": s.run}})
		}
	}
	return stored
}

// store inserts events of instances into a table.
func (w *writer) store(table string, all []*instance, which func(*instance) []event) {
	var owners []uuid.UUID
	var tokens []uuid.UUID // zero: none
	var names, nodes []string
	var data []json.RawMessage
	for _, i := range all {
		for _, e := range which(i) {
			var text json.RawMessage
			if e.data != nil {
				text, _ = json.Marshal(e.data) // cannot fail: strings, numbers and ids
			}
			token := uuid.Nil
			if e.token != nil {
				token = e.token.id
			}
			owners, tokens = append(owners, i.id), append(tokens, token)
			names, nodes, data = append(names, e.name), append(nodes, e.node), append(data, text)
		}
	}
	if len(owners) > 0 {
		w.do(`
			INSERT INTO `+table+` (instance_id, token_id, event_type, node, version, data)
			SELECT n.instance, nullif(n.token, '00000000-0000-0000-0000-000000000000'), n.event, nullif(n.node, ''), i.version, n.data
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::jsonb[]) WITH ORDINALITY AS n (instance, token, event, node, data, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, owners, tokens, names, nodes, data)
	}
}

// emit publishes an event about an instance through the outbox.
func (w *writer) emit(i *instance, name string, data map[string]any) {
	d := i.process.Definition
	data["instance"], data["process"], data["version"] = i.id, d.Process, d.Version
	e := outbox.Event{Aggregate: i.id, Type: name, Payload: data, Held: true}
	if i.trace != nil {
		_ = json.Unmarshal(i.trace, &e.Headers) // cannot fail: process_trace returns an object with one string
	}
	if i.status.final() && strings.HasPrefix(name, "process.") {
		w.finals = append(w.finals, e)
		return
	}
	w.emits = append(w.emits, e)
}
