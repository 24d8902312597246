package graph

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// A slot is where a message meets the tokens that wait for its name and key. A transaction that adds a message or a
// wait locks the slot first (process_hold_v1), so that a message and a wait that come at the same time cannot miss each
// other.
type slot struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

// An arrived is a message to be stored.
type arrived struct {
	id      uuid.UUID
	sender  string // the idempotency key of the sender: the column message_id
	slot    slot
	payload json.RawMessage
	ttl     time.Duration
}

// defaultTTL is how long a message without a TTL is kept while no token waits for it.
const defaultTTL = 24 * time.Hour

// message adds the message of a settled run to the messages to be stored.
func (w *writer) message(settled leasing.Settlement) error {
	var p messagePayload
	if err := json.Unmarshal(settled.Payload, &p); err != nil {
		return err
	}
	if len(p.Payload) == 0 {
		p.Payload = json.RawMessage("{}")
	}
	id := settled.Outcome.ID
	m := arrived{id: id, sender: cmp.Or(p.ID, id.String()), slot: slot{p.Name, p.Key}, payload: p.Payload, ttl: cmp.Or(time.Duration(p.TTL), defaultTTL)}
	if slices.ContainsFunc(w.messages, func(o arrived) bool { return o.slot == m.slot && o.sender == m.sender }) {
		return nil // the batch has the same message already
	}
	w.messages = append(w.messages, m)
	return nil
}

// sent sends the message of a settled step that sends one. A signal was delivered by its handler; sent notes that its
// run is over.
func (w *writer) sent(step leasing.Settlement) error {
	switch step.Type {
	case messageType:
		return w.message(step)
	case signalType:
		w.signals = append(w.signals, step.Outcome.ID)
	}
	return nil
}

// match looks again in the slot of a settled graph.match.v1 run, in which a message has become free.
func (w *writer) match(settled leasing.Settlement) error {
	var s slot
	err := json.Unmarshal(settled.Payload, &s)
	w.slots = append(w.slots, s)
	return err
}

// meet stores messages and waits, and pairs them. A message that is paired travels as a run of its token. If the token
// leaves its node before that run is settled, the run is cancelled and the message is free again.
func (w *writer) meet(all []*instance) {
	waits := w.waits(all)
	for _, m := range w.messages {
		w.slots = append(w.slots, m.slot)
	}
	slices.SortFunc(w.slots, func(a, b slot) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key)) })
	w.slots = slices.Compact(w.slots)
	if len(w.slots)+len(waits.tokens)+len(w.signals) > 0 {
		w.carrier.Leave()
		w.work()
	}
	names, keys := make([]string, len(w.slots)), make([]string, len(w.slots))
	for k, s := range w.slots {
		names[k], keys[k] = s.Name, s.Key
	}
	if len(w.slots) > 0 {
		w.do(`SELECT process_hold_v1($1::text[], $2::text[])`, names, keys)
	}
	if len(waits.tokens) > 0 {
		w.do(`
			INSERT INTO message_wait (token_id, instance_id, place, node, name, key)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[])`,
			waits.tokens, waits.owners, waits.places, waits.nodes, waits.names, waits.keys)
	}
	if len(w.messages) > 0 {
		w.storeMessages()
	}
	if len(w.slots) > 0 {
		w.do(pair, names, keys, arriveType, matchType)
	}
	if len(w.signals) > 0 { // these runs are over, so the record of their progress is not needed any more
		w.do(`DELETE FROM process_broadcast WHERE signal_id = ANY ($1)`, w.signals)
	}
}

// waitColumns are the columns of waits to be stored.
type waitColumns struct {
	tokens, owners       []uuid.UUID
	places, nodes, names []string
	keys                 []*string
}

// waits returns the new waits of instances, and adds the slots of those that wait for messages (not signals) to
// w.slots.
func (w *writer) waits(all []*instance) (c waitColumns) {
	for _, i := range all {
		for _, s := range i.changes.waits {
			if alive(s.token.state) == 0 {
				continue
			}
			c.tokens, c.owners, c.places, c.nodes = append(c.tokens, s.token.id), append(c.owners, i.id), append(c.places, s.place), append(c.nodes, s.node)
			c.names, c.keys = append(c.names, s.name), append(c.keys, s.key)
			if s.key != nil {
				w.slots = append(w.slots, slot{s.name, *s.key})
			}
		}
	}
	return c
}

// storeMessages inserts the messages. One with the name, key and message_id of a stored message is ignored, unless the
// stored one has expired without being delivered: then it replaces that one.
func (w *writer) storeMessages() {
	n := len(w.messages)
	ids, senders, ttls := make([]uuid.UUID, n), make([]string, n), make([]float64, n)
	names, keys, payloads := make([]string, n), make([]string, n), make([]json.RawMessage, n)
	for k, m := range w.messages {
		ids[k], senders[k], ttls[k] = m.id, m.sender, m.ttl.Seconds()
		names[k], keys[k], payloads[k] = m.slot.Name, m.slot.Key, m.payload
	}
	w.do(`
		INSERT INTO message (id, message_id, name, key, payload, expires_at)
		SELECT id, sender, name, key, payload, now() + ttl * interval '1 second'
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::jsonb[], $6::float8[]) AS m (id, sender, name, key, payload, ttl)
		ON CONFLICT (name, key, message_id) DO UPDATE -- the one before came too early, and nobody wanted it
		SET id = excluded.id, payload = excluded.payload, received_at = now(), expires_at = excluded.expires_at
		WHERE message.expires_at <= now() AND message.consumed_at IS NULL AND message.token_id IS NULL`, ids, senders, names, keys, payloads, ttls)
}

// pair gives each free message of the slots to one token that waits there, first come, first served on both sides. A
// token that leaves at this moment gets no message; a graph.match.v1 run then looks for the next token in line.
const pair = `
	WITH free AS (
		SELECT m.id, m.name, m.key, row_number() OVER (PARTITION BY m.name, m.key ORDER BY m.received_at, m.id) AS place
		FROM unnest($1::text[], $2::text[]) AS s (name, key) JOIN message m USING (name, key)
		WHERE m.token_id IS NULL AND m.expires_at > now()
	), waiting AS (
		SELECT w.token_id, w.place AS at, w.node, w.name, w.key, row_number() OVER (PARTITION BY w.name, w.key ORDER BY w.created_at, w.token_id) AS place
		FROM unnest($1::text[], $2::text[]) AS s (name, key) JOIN message_wait w USING (name, key)
		JOIN process_token t ON t.id = w.token_id AND t.instance_id = w.instance_id AND t.state IN ('Created', 'Ready', 'Waiting') -- both ends agree
	), pairs AS (
		SELECT f.id, f.name, f.key, w.token_id, w.at, w.node FROM free f JOIN waiting w USING (name, key, place)
	), held AS ( -- in the order of process_lock_waits
		SELECT w.token_id, w.place FROM pairs p JOIN message_wait w ON w.token_id = p.token_id AND w.place = p.at
		ORDER BY w.name, w.key, w.created_at, w.token_id, w.place FOR UPDATE OF w
	), served AS ( -- a token that leaves at this moment has taken its wait along
		DELETE FROM message_wait w USING held h, pairs p WHERE w.token_id = h.token_id AND w.place = h.place AND p.token_id = h.token_id AND p.at = h.place
		RETURNING p.id, p.token_id, p.at, p.node
	), again AS (
		INSERT INTO workflow_run (type, payload, max_attempts)
		SELECT DISTINCT $4, jsonb_build_object('name', p.name, 'key', p.key), 1000
		FROM pairs p WHERE NOT EXISTS (SELECT FROM held h WHERE h.token_id = p.token_id AND h.place = p.at)
	), taken AS (
		UPDATE message m SET token_id = p.token_id FROM served p WHERE m.id = p.id
	)
	INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at)
	SELECT p.token_id, $3, p.node || CASE WHEN p.at LIKE 'on/%' THEN '/' || p.at ELSE '' END,
	       jsonb_strip_nulls(jsonb_build_object('at', nullif(p.at, ''), 'message', p.id, 'visit', t.version)), 1000, i.priority, i.tenant_id, process_trace(i.metadata), process_paused_since(i.id)
	FROM served p JOIN process_token t ON t.id = p.token_id JOIN process_instance i ON i.id = t.instance_id`
