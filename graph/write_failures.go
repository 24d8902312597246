package graph

import (
	"encoding/json"

	"github.com/google/uuid"
)

// failures stores facts that no run of the instance contains: failures that were not the outcome of a run, and results
// that a restarted instance has taken over. Each is stored as a correction of its node, which expressions read until a
// later visit of the node ends.
func (w *writer) failures(all []*instance) {
	var owners []uuid.UUID
	var nodes, reasons []string
	var values []json.RawMessage
	for _, i := range all {
		all := i.changes.facts
		for _, f := range i.changes.failures {
			all = append(all, known{f.node, failure(f.code, f.message), f.code})
		}
		for _, f := range all {
			value, err := json.Marshal(f.value)
			if err != nil {
				panic(err) // cannot happen: the value is made of strings, or was decoded from JSON
			}
			owners, nodes = append(owners, i.id), append(nodes, f.node)
			values, reasons = append(values, value), append(reasons, f.reason)
		}
	}
	if len(owners) == 0 {
		return
	}
	w.do(`UPDATE process_instance SET corrected = true WHERE id = ANY ($1) AND NOT corrected`, owners)
	w.do(`
		INSERT INTO process_correction (instance_id, node, value, reason)
		SELECT * FROM unnest($1::uuid[], $2::text[], $3::jsonb[], $4::text[])`, owners, nodes, values, reasons)
}
