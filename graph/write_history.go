package graph

import (
	"encoding/json"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/outbox"
)

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
			w.emit(i, "incident.opened", map[string]any{"code": x.code, "node": x.node})
		}
	}
	if len(owners) > 0 {
		w.do(`
			INSERT INTO incident (instance_id, token_id, node, code, message)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[])`, owners, tokens, nodes, codes, messages)
	}
	if len(w.resolved) > 0 {
		w.do(`
			UPDATE incident SET resolved_at = now(), resolved_by = concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))
			WHERE id = ANY ($1) AND resolved_at IS NULL`, w.resolved)
	}
}

// statusEvents are the outbox events that tell of a new status.
var statusEvents = map[Status]string{
	InProgress: "process.started", Completed: "process.completed", Failed: "process.failed", Cancelled: "process.cancelled",
}

func (w *writer) history(all []*instance) {
	var owners, eventOwners []uuid.UUID
	var from []*string
	var to, reasons, names, nodes []string
	var tokens []uuid.UUID // zero: none
	var data []json.RawMessage
	for _, i := range all {
		for _, h := range i.changes.history {
			owners, to, reasons = append(owners, i.id), append(to, string(h.to)), append(reasons, h.reason)
			was := string(h.from)
			from = append(from, &was)
			if name := statusEvents[h.to]; name != "" && (h.to != InProgress || h.from == Created) {
				w.emit(i, name, map[string]any{})
			}
		}
		for _, e := range i.changes.events {
			var text json.RawMessage
			if e.data != nil {
				text, _ = json.Marshal(e.data) // words and numbers
			}
			token := uuid.Nil
			if e.token != nil {
				token = e.token.id
			}
			eventOwners, tokens = append(eventOwners, i.id), append(tokens, token)
			names, nodes, data = append(names, e.name), append(nodes, e.node), append(data, text)
		}
	}
	if len(owners) > 0 {
		w.do(`
			INSERT INTO process_state_history (instance_id, from_status, to_status, version, reason, actor)
			SELECT n.instance, n.was, n.is, i.version, nullif(n.reason, ''), concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY AS n (instance, was, "is", reason, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, owners, from, to, reasons)
	}
	if len(eventOwners) > 0 {
		w.do(`
			INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
			SELECT n.instance, nullif(n.token, '00000000-0000-0000-0000-000000000000'), n.event, nullif(n.node, ''), i.version, n.data
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::jsonb[]) WITH ORDINALITY AS n (instance, token, event, node, data, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, eventOwners, tokens, names, nodes, data)
	}
}

// emit has an event about an instance leave the database.
func (w *writer) emit(i *instance, name string, data map[string]any) {
	d := i.process.Definition
	data["instance"], data["process"], data["version"] = i.id, d.Process, d.Version
	w.events = append(w.events, outbox.Event{Aggregate: i.id, Type: name, Payload: data, Held: true})
}
