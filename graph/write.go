package graph

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/outbox"
)

// A writer writes what was decided: a few statements for a whole batch, sent together.
type writer struct {
	scene    *scene
	resolved []uuid.UUID // incidents

	batch  pgx.Batch
	events []outbox.Event
}

// write sends everything in the order of the locks: instance → join → token → run → outbox.
func (w *writer) write(ctx context.Context, tx pgx.Tx) error {
	var changed []*instance
	for _, id := range slices.SortedFunc(maps.Keys(w.scene.instances), compareIDs) {
		if i := w.scene.instances[id]; i.changes.touched {
			changed = append(changed, i)
			if err := i.name(); err != nil {
				return err
			}
		}
	}
	if len(changed) == 0 {
		return nil
	}
	w.instances(changed)
	w.groups(changed)
	w.tokens(changed)
	w.joins(changed)
	w.ends(changed)
	w.steps(changed)
	w.incidents(changed)
	w.history(changed)
	if err := tx.SendBatch(ctx, &w.batch).Close(); err != nil {
		return fmt.Errorf("move process instances: %w", err)
	}
	return outbox.Append(ctx, tx, w.events...)
}

func compareIDs(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) }

// name gives ids to what is new.
func (i *instance) name() (err error) {
	draw := func(id *uuid.UUID) {
		if *id == uuid.Nil && err == nil {
			*id, err = uuid.NewV7()
		}
	}
	for _, g := range i.changes.groups {
		draw(&g.id)
	}
	for _, t := range i.changes.tokens {
		draw(&t.id)
	}
	for _, j := range i.changes.joins {
		draw(&j.id)
	}
	return err
}

func (w *writer) queue(sql string, args ...any) { w.batch.Queue(sql, args...) }

func (w *writer) instances(all []*instance) {
	n := len(all)
	ids, status := make([]uuid.UUID, n), make([]string, n)
	live, ready, joining, incidents := make([]int, n), make([]int, n), make([]int, n), make([]int, n)
	failures, outputs := make([]*string, n), make([]json.RawMessage, n)
	for k, i := range all {
		ids[k], status[k] = i.id, string(i.status)
		live[k], ready[k], joining[k], incidents[k] = i.live, i.ready, i.joining, i.incidents
		if i.status.Final() {
			incidents[k] = 0
		}
		if i.failure != "" {
			failures[k] = &i.failure
		}
		if i.status == Completed {
			outputs[k] = i.output
		}
	}
	w.queue(`
		UPDATE process_instance i
		SET status = n.status, live_tokens = n.live, ready_tokens = n.ready, joining_tokens = n.joining, open_incidents = n.incidents,
		    version = i.version + 1, updated_at = statement_timestamp(),
		    started_at = coalesce(i.started_at, statement_timestamp()),
		    completed_at = CASE WHEN n.status IN ('COMPLETED', 'FAILED', 'CANCELLED') THEN statement_timestamp() END,
		    failure_reason = n.failure, output_payload = n.output
		FROM unnest($1::uuid[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::text[], $8::jsonb[])
		  AS n (id, status, live, ready, joining, incidents, failure, output)
		WHERE i.id = n.id`, ids, status, live, ready, joining, incidents, failures, outputs)
}

func (w *writer) groups(all []*instance) {
	var fresh, old, owners []uuid.UUID
	var parents []uuid.NullUUID
	var nodes []string
	var lives, oldLives []int
	for _, i := range all {
		for _, g := range outerFirst(i.changes.groups) {
			if !g.fresh {
				old, oldLives = append(old, g.id), append(oldLives, g.live)
				continue
			}
			fresh, owners, nodes, lives = append(fresh, g.id), append(owners, i.id), append(nodes, g.node), append(lives, g.live)
			parents = append(parents, g.parent.ref())
		}
	}
	if len(fresh) > 0 {
		w.queue(`
			INSERT INTO parallel_group (id, instance_id, parent_group_id, node, live)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::int[])`, fresh, owners, parents, nodes, lives)
	}
	if len(old) > 0 {
		w.queue(`
			UPDATE parallel_group g SET live = n.live
			FROM unnest($1::uuid[], $2::int[]) AS n (id, live)
			WHERE g.id = n.id`, old, oldLives)
	}
}

// outerFirst orders groups so that parents come before those within them. All of them were
// listed when they, or one within them, changed.
func outerFirst(groups []*group) []*group {
	depth := func(g *group) (n int) {
		for ; g != nil; g = g.parent {
			n++
		}
		return n
	}
	return slices.SortedStableFunc(slices.Values(groups), func(a, b *group) int { return depth(a) - depth(b) })
}

// ref is the group's id as a column that may be null.
func (g *group) ref() uuid.NullUUID {
	if g == nil {
		return uuid.NullUUID{}
	}
	return uuid.NullUUID{UUID: g.id, Valid: true}
}

func (w *writer) tokens(all []*instance) {
	type columns struct {
		ids, owners         []uuid.UUID
		nodes, edges, state []string
		groups              []uuid.NullUUID
	}
	var fresh, old columns
	for _, i := range all {
		for _, t := range i.changes.tokens {
			c := &old
			if t.version == 0 {
				c = &fresh
			}
			c.ids, c.owners = append(c.ids, t.id), append(c.owners, i.id)
			c.nodes, c.edges, c.state = append(c.nodes, t.node.name), append(c.edges, t.edge), append(c.state, string(t.state))
			c.groups = append(c.groups, t.group.ref())
		}
	}
	if len(fresh.ids) > 0 {
		w.queue(`
			INSERT INTO process_token (id, instance_id, node, edge, state, parallel_group_id)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[])`,
			fresh.ids, fresh.owners, fresh.nodes, fresh.edges, fresh.state, fresh.groups)
	}
	if len(old.ids) > 0 {
		w.queue(`
			UPDATE process_token t
			SET node = n.node, edge = n.edge, state = n.state, parallel_group_id = n.group_id, version = t.version + 1, updated_at = statement_timestamp()
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[]) AS n (id, node, edge, state, group_id)
			WHERE t.id = n.id`, old.ids, old.nodes, old.edges, old.state, old.groups)
	}
}

func (w *writer) joins(all []*instance) {
	var ids, owners, fired []uuid.UUID
	var nodes []string
	var groups []uuid.NullUUID
	var rounds, expected, joined []int
	var done []bool
	var at, tokens []uuid.UUID
	var edges []string
	var surplus []bool
	for _, i := range all {
		for _, j := range i.changes.joins {
			ids, owners, nodes, groups = append(ids, j.id), append(owners, i.id), append(nodes, j.node.name), append(groups, j.group.ref())
			rounds, expected, joined = append(rounds, j.round), append(expected, j.expected), append(joined, j.joined)
			done = append(done, j.fired)
			if j.fires {
				fired = append(fired, j.id)
			}
		}
		for _, a := range i.changes.arrivals {
			at, tokens = append(at, a.join.id), append(tokens, a.token.id)
			edges, surplus = append(edges, a.edge), append(surplus, a.surplus)
		}
	}
	if len(ids) > 0 {
		w.queue(`
			INSERT INTO parallel_join (id, instance_id, node, parallel_group_id, round, expected, joined, fired)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::int[], $6::int[], $7::int[], $8::boolean[])
			ON CONFLICT (id) DO UPDATE SET joined = excluded.joined, fired = excluded.fired`,
			ids, owners, nodes, groups, rounds, expected, joined, done)
	}
	if len(at) > 0 {
		w.queue(`
			INSERT INTO join_arrival (join_id, token_id, edge, surplus)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::boolean[])`, at, tokens, edges, surplus)
	}
	if len(fired) > 0 {
		w.queue(`
			UPDATE process_token
			SET state = 'Completed', version = version + 1, updated_at = statement_timestamp()
			WHERE state = 'Waiting' AND id = ANY (ARRAY(SELECT token_id FROM join_arrival WHERE join_id = ANY ($1) AND NOT surplus))`, fired)
	}
}

// ends ends tokens that nobody knows one by one, and the runs of all that were ended.
func (w *writer) ends(all []*instance) {
	var instances, tokens []uuid.UUID
	for _, i := range all {
		if i.changes.ended {
			instances = append(instances, i.id)
		}
		for _, t := range i.changes.tokens {
			if t.state == tokenTerminated && t.version > 0 {
				tokens = append(tokens, t.id)
			}
		}
	}
	if len(instances) > 0 {
		w.queue(`
			UPDATE process_token
			SET state = 'Terminated', version = version + 1, updated_at = statement_timestamp()
			WHERE instance_id = ANY ($1) AND state IN ('Created', 'Ready', 'Waiting')`, instances)
		w.queue(`UPDATE incident SET resolved_at = now(), resolved_by = 'the end of the instance' WHERE instance_id = ANY ($1) AND resolved_at IS NULL`, instances)
	}
	if len(instances)+len(tokens) > 0 {
		w.queue(`
			UPDATE workflow_run
			SET status = 'cancelled', finished_at = statement_timestamp(), updated_at = clock_timestamp(), suspect = false,
			    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, last_error = 'cancelled: its process has moved on'
			WHERE id = ANY (ARRAY(
				SELECT r.id FROM workflow_run r JOIN process_token t ON t.id = r.token_id
				WHERE (t.instance_id = ANY ($1) OR t.id = ANY ($2)) AND r.status IN ('pending', 'leased')
				ORDER BY r.id))
			  AND status IN ('pending', 'leased')`, instances, tokens)
	}
}

func (w *writer) steps(all []*instance) {
	var tokens []uuid.UUID
	var types, nodes, payloads []string
	var attempts, priorities []int
	var delays []float64
	var until []*time.Time
	for _, i := range all {
		for _, s := range i.changes.steps {
			if alive(s.token.state) == 0 {
				continue
			}
			tokens, types, nodes = append(tokens, s.token.id), append(types, s.typ), append(nodes, s.node)
			payloads = append(payloads, string(s.payload))
			attempts, priorities = append(attempts, s.attempts), append(priorities, i.priority)
			delays = append(delays, s.delay.Seconds())
			var at *time.Time
			if t, err := time.Parse(time.RFC3339, s.until); err == nil {
				at = &t
			}
			until = append(until, at)
		}
	}
	if len(tokens) > 0 {
		w.queue(`
			INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, run_at)
			SELECT n.token, n.type, n.node, n.payload, coalesce(nullif(n.attempts, 0), 3), n.priority,
			       CASE WHEN n.until IS NULL THEN now() + n.delay * interval '1 second' ELSE greatest(n.until, now()) END
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::jsonb[], $5::int[], $6::int[], $7::float8[], $8::timestamptz[])
			  AS n (token, type, node, payload, attempts, priority, delay, until)`,
			tokens, types, nodes, payloads, attempts, priorities, delays, until)
	}
}

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
		w.queue(`
			INSERT INTO incident (instance_id, token_id, node, code, message)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[])`, owners, tokens, nodes, codes, messages)
	}
	if len(w.resolved) > 0 {
		w.queue(`
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
	var tokens []uuid.UUID
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
			eventOwners, tokens = append(eventOwners, i.id), append(tokens, e.token.id)
			names, nodes, data = append(names, e.name), append(nodes, e.node), append(data, text)
		}
	}
	if len(owners) > 0 {
		w.queue(`
			INSERT INTO process_state_history (instance_id, from_status, to_status, version, reason, actor)
			SELECT n.instance, n.was, n.is, i.version, nullif(n.reason, ''), concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY AS n (instance, was, "is", reason, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, owners, from, to, reasons)
	}
	if len(eventOwners) > 0 {
		w.queue(`
			INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
			SELECT n.instance, n.token, n.event, n.node, i.version, n.data
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::jsonb[]) WITH ORDINALITY AS n (instance, token, event, node, data, place)
			JOIN process_instance i ON i.id = n.instance
			ORDER BY n.place`, eventOwners, tokens, names, nodes, data)
	}
}

// emit has an event about an instance leave the database.
func (w *writer) emit(i *instance, name string, data map[string]any) {
	d := i.process.Definition
	data["instance"], data["process"], data["version"] = i.id, d.Process, d.Version
	w.events = append(w.events, outbox.Event{Aggregate: i.id, Type: name, Payload: data})
}
