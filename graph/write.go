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
	consumed []uuid.UUID // messages

	messages    []arrived
	signals     []uuid.UUID // runs
	signalNames []string
	slots       []slot // where messages and waits have to be brought together

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
		return w.meet(ctx, tx, nil)
	}
	after, err := w.leasesEnd(ctx, tx, changed)
	if err != nil {
		return err
	}
	w.instances(changed)
	w.groups(changed)
	w.tokens(changed)
	w.joins(changed)
	w.eaches(changed)
	w.records(changed)
	w.ends(changed)
	w.steps(changed, after)
	w.undos(changed)
	w.tasks(changed)
	w.children(changed)
	w.incidents(changed)
	w.history(changed)
	if err := tx.SendBatch(ctx, &w.batch).Close(); err != nil {
		return fmt.Errorf("move process instances: %w", err)
	}
	if err := w.meet(ctx, tx, changed); err != nil {
		return err
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
	endings, reasons := make([]string, n), make([]string, n)
	for k, i := range all {
		ids[k], status[k] = i.id, string(i.status)
		live[k], ready[k], joining[k], incidents[k] = i.live, i.ready, i.joining, i.incidents
		if i.status.Final() {
			incidents[k] = 0
		}
		endings[k], reasons[k] = string(i.ending), i.endingReason
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
		    failure_reason = n.failure, output_payload = n.output, ending = nullif(n.ending, ''), ending_reason = nullif(n.ending_reason, '')
		FROM unnest($1::uuid[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::text[], $8::jsonb[], $9::text[], $10::text[])
		  AS n (id, status, live, ready, joining, incidents, failure, output, ending, ending_reason)
		WHERE i.id = n.id`, ids, status, live, ready, joining, incidents, failures, outputs, endings, reasons)
}

func (w *writer) groups(all []*instance) {
	var fresh, old, owners []uuid.UUID
	var parents, hosts []uuid.NullUUID
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
			host := uuid.NullUUID{}
			if g.host != nil {
				host = uuid.NullUUID{UUID: g.host.id, Valid: true}
			}
			hosts = append(hosts, host)
		}
	}
	if len(fresh) > 0 {
		w.queue(`
			INSERT INTO parallel_group (id, instance_id, parent_group_id, node, live, host_token_id)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::uuid[])`, fresh, owners, parents, nodes, lives, hosts)
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
		modes               []string
		items               []*int
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
			c.groups, c.modes = append(c.groups, t.group.ref()), append(c.modes, string(t.mode))
			var item *int
			if t.hasItem {
				item = &t.item
			}
			c.items = append(c.items, item)
		}
	}
	if len(fresh.ids) > 0 {
		w.queue(`
			INSERT INTO process_token (id, instance_id, node, edge, state, parallel_group_id, mode, item)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[], $7::text[], $8::int[])`,
			fresh.ids, fresh.owners, fresh.nodes, fresh.edges, fresh.state, fresh.groups, fresh.modes, fresh.items)
	}
	if len(old.ids) > 0 {
		w.queue(`
			UPDATE process_token t
			SET node = n.node, edge = n.edge, state = n.state, parallel_group_id = n.group_id, mode = n.mode, version = t.version + 1, updated_at = statement_timestamp()
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::text[]) AS n (id, node, edge, state, group_id, mode)
			WHERE t.id = n.id`, old.ids, old.nodes, old.edges, old.state, old.groups, old.modes)
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

// eaches writes how far lists have come.
func (w *writer) eaches(all []*instance) {
	for _, i := range all {
		for _, p := range i.eaches {
			switch {
			case p.all != nil:
				w.queue(`
					INSERT INTO each_progress (group_id, instance_id, node, items, next, done, total)
					VALUES ($1, $2, $3, $4, $5, $6, $7)`, p.group.id, i.id, p.group.node, p.all, p.next, p.done, p.total)
			case p.changed:
				w.queue(`UPDATE each_progress SET next = $2, done = $3 WHERE group_id = $1`, p.group.id, p.next, p.done)
			}
		}
	}
}

// records writes what may have to be undone, and what has been.
func (w *writer) records(all []*instance) {
	var owners, runs, undone, failed, again []uuid.UUID
	var nodes, undos []string
	for _, i := range all {
		for _, r := range i.changes.records {
			owners, runs, nodes, undos = append(owners, i.id), append(runs, r.run), append(nodes, r.node.name), append(undos, r.node.Undo)
		}
		undone, failed = append(undone, i.changes.undone...), append(failed, i.changes.notUndone...)
		if i.changes.undoAgain {
			again = append(again, i.id)
		}
		if i.changes.unknown {
			w.unknown(i)
		}
	}
	if len(owners) > 0 {
		w.queue(`
			INSERT INTO compensation_record (instance_id, run_id, node_id, handler_ref)
			SELECT n.instance, n.run, n.node, n.undo
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) WITH ORDINALITY AS n (instance, run, node, undo, place)
			ORDER BY n.place`, owners, runs, nodes, undos)
	}
	if len(undone) > 0 {
		w.queue(`UPDATE compensation_record SET status = 'Completed' WHERE undo_run_id = ANY ($1) AND status = 'Pending'`, undone)
	}
	if len(failed) > 0 {
		w.queue(`UPDATE compensation_record SET status = 'Failed' WHERE undo_run_id = ANY ($1) AND status = 'Pending'`, failed)
	}
	if len(again) > 0 { // a new record for each that has failed: the old one stays as it is
		w.queue(`
			INSERT INTO compensation_record (instance_id, run_id, node_id, handler_ref, certain, retry_of)
			SELECT r.instance_id, r.run_id, r.node_id, r.handler_ref, r.certain, r.id
			FROM compensation_record r
			WHERE r.instance_id = ANY ($1) AND r.status = 'Failed' AND NOT EXISTS (SELECT FROM compensation_record n WHERE n.retry_of = r.id)
			ORDER BY r."order"`, again)
	}
}

// unknown records the steps that may have taken effect without anybody knowing: those that run
// now, and those of which an attempt was cut off or never heard of again.
func (w *writer) unknown(i *instance) {
	var nodes, undos []string
	for name, n := range i.process.nodes {
		if n.Undo != "" {
			nodes, undos = append(nodes, name), append(undos, n.Undo)
		}
	}
	w.queue(`UPDATE compensation_record SET undo_run_id = NULL WHERE instance_id = $1 AND status = 'Pending' AND undo_run_id IS NOT NULL`, i.id)
	w.queue(`
		INSERT INTO compensation_record (instance_id, run_id, node_id, handler_ref, certain)
		SELECT t.instance_id, r.id, u.node, u.undo, false
		FROM process_token t
		JOIN workflow_run r ON r.token_id = t.id
		JOIN unnest($2::text[], $3::text[]) AS u (node, undo) ON u.node = r.node
		WHERE t.instance_id = $1
		  AND (r.status = 'leased' OR r.status IN ('pending', 'failed', 'cancelled')
		       AND (r.error->>'code' = 'lease_expired'
		            OR EXISTS (SELECT FROM workflow_history h WHERE h.workflow_id = r.id
		                       AND (h.event_type = 'expired' OR h.event_type = 'cancelled' AND h.data->>'was' = 'leased'))))
		ORDER BY r.started_at, r.id`, i.id, nodes, undos)
}

// leasesEnd returns, for instances that begin to undo, when the leases of the runs that are cut
// off end: no undo step starts before.
func (w *writer) leasesEnd(ctx context.Context, tx pgx.Tx, all []*instance) (map[uuid.UUID]time.Time, error) {
	var ids []uuid.UUID
	for _, i := range all {
		if i.changes.unknown {
			ids = append(ids, i.id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT t.instance_id, max(r.lease_until)
		FROM process_token t JOIN workflow_run r ON r.token_id = t.id
		WHERE t.instance_id = ANY ($1) AND r.status = 'leased'
		GROUP BY t.instance_id`, ids)
	after := map[uuid.UUID]time.Time{}
	var id uuid.UUID
	var end time.Time
	if _, err := pgx.ForEachRow(rows, []any{&id, &end}, func() error { after[id] = end; return nil }); err != nil {
		return nil, fmt.Errorf("look for leases that are cut off: %w", err)
	}
	return after, nil
}

// ends ends tokens that nobody knows one by one, and what belongs to tokens that were ended or
// have left their node: runs, waits, tasks, children. Waits go first: a message that has just been
// brought to a token is then seen as its run.
func (w *writer) ends(all []*instance) {
	var instances, tokens []uuid.UUID
	stays := []uuid.UUID{} // not null: nothing would differ from it
	for _, i := range all {
		if i.changes.ended || i.changes.endedBut != nil {
			instances = append(instances, i.id)
		}
		if t := i.changes.endedBut; t != nil && !i.changes.ended {
			stays = append(stays, t.id)
		}
		for _, t := range i.changes.tokens {
			if (t.state == tokenTerminated || t.state == tokenFailed) && t.version > 0 {
				tokens = append(tokens, t.id)
			}
		}
		for _, t := range i.changes.left {
			tokens = append(tokens, t.id)
		}
	}
	if len(instances)+len(tokens) == 0 {
		return
	}
	if len(instances) > 0 {
		w.queue(`
			UPDATE process_token
			SET state = 'Terminated', version = version + 1, updated_at = statement_timestamp()
			WHERE instance_id = ANY ($1) AND state IN ('Created', 'Ready', 'Waiting') AND id <> ALL ($2)`, instances, stays)
		w.queue(`
			UPDATE incident SET resolved_at = now(), resolved_by = 'the end of the instance'
			WHERE instance_id = ANY ($1) AND resolved_at IS NULL`, instances)
	}
	if len(tokens) > 0 {
		w.queue(`
			UPDATE incident SET resolved_at = now(), resolved_by = 'its token has moved on'
			WHERE token_id = ANY ($1) AND resolved_at IS NULL`, tokens)
	}
	gone := `(SELECT id FROM process_token WHERE instance_id = ANY ($1) OR id = ANY ($2))`
	w.queue(`DELETE FROM message_wait WHERE instance_id = ANY ($1) OR token_id = ANY ($2)`, instances, tokens)
	w.queue(`
		UPDATE workflow_run
		SET status = 'cancelled', finished_at = statement_timestamp(), updated_at = clock_timestamp(), suspect = false,
		    lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, last_error = 'cancelled: its token has moved on'
		WHERE id = ANY (ARRAY(SELECT id FROM workflow_run WHERE token_id IN `+gone+` AND status IN ('pending', 'leased') ORDER BY id))
		  AND status IN ('pending', 'leased')`, instances, tokens)
	w.queue(`
		UPDATE compensation_record c SET undo_run_id = NULL
		FROM workflow_run r
		WHERE c.instance_id = ANY ($1) AND c.status = 'Pending' AND r.id = c.undo_run_id AND r.status = 'cancelled'`, instances)
	w.queue(`
		WITH freed AS (
			UPDATE message SET token_id = NULL
			WHERE token_id IN `+gone+` AND consumed_at IS NULL AND id <> ALL ($3)
			RETURNING name, key
		)
		INSERT INTO workflow_run (type, payload, max_attempts) SELECT DISTINCT $4, jsonb_build_object('name', name, 'key', key), 1000 FROM freed`,
		instances, tokens, append([]uuid.UUID{}, w.consumed...), matchType)
	w.queue(`UPDATE user_task SET state = 'cancelled', version = version + 1 WHERE token_id IN `+gone+` AND state = 'open'`, instances, tokens)
	w.queue(`
		INSERT INTO workflow_run (type, payload, max_attempts)
		SELECT $3, jsonb_build_object('instance', id, 'reason', 'nobody waits for it any more'), 1000
		FROM process_instance
		WHERE parent_token_id IN `+gone+` AND completed_at IS NULL`, instances, tokens, CancelType)
}

func (w *writer) steps(all []*instance, after map[uuid.UUID]time.Time) {
	if len(w.consumed) > 0 {
		w.queue(`UPDATE message SET consumed_at = now() WHERE id = ANY ($1)`, w.consumed)
	}
	var tokens []uuid.UUID
	var types, nodes, payloads []string
	var attempts, priorities []int
	var delays []float64
	var until []*time.Time
	var previous []uuid.NullUUID
	var held []bool
	for _, i := range all {
		for _, s := range i.changes.steps {
			if alive(s.token.state) == 0 {
				continue
			}
			tokens, types, nodes = append(tokens, s.token.id), append(types, s.typ), append(nodes, s.node)
			payloads, held = append(payloads, string(s.payload)), append(held, i.paused)
			attempts, priorities = append(attempts, s.attempts), append(priorities, i.priority)
			delays = append(delays, s.delay.Seconds())
			var at *time.Time
			if t, err := time.Parse(time.RFC3339, s.until); err == nil {
				at = &t
			} else if t, ok := after[i.id]; ok && s.afterLeases {
				at = &t
			}
			until = append(until, at)
			before := uuid.NullUUID{}
			if s.tick != nil && s.tick.after != uuid.Nil {
				before = uuid.NullUUID{UUID: s.tick.after, Valid: true}
			}
			previous = append(previous, before)
		}
	}
	if len(tokens) == 0 {
		return
	}
	// A tick is due by the schedule, not by when the one before was noticed; those that were
	// missed meanwhile are passed over.
	w.queue(`
		INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, held_at, run_at)
		SELECT n.token, n.type, n.node, n.payload, coalesce(nullif(n.attempts, 0), 3), n.priority, CASE WHEN n.held THEN now() END,
		       CASE WHEN n.until IS NOT NULL THEN least(greatest(n.until, now()), now() + interval '9 years')
		            WHEN b.run_at IS NOT NULL THEN b.run_at + n.delay * interval '1 second'
		                * greatest(1, ceil(extract(epoch FROM now() - b.run_at) / n.delay::numeric))::float8
		            ELSE now() + n.delay * interval '1 second' END
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::jsonb[], $5::int[], $6::int[], $7::float8[], $8::timestamptz[], $9::uuid[], $10::boolean[])
		  AS n (token, type, node, payload, attempts, priority, delay, until, previous, held)
		LEFT JOIN workflow_run b ON b.id = n.previous`,
		tokens, types, nodes, payloads, attempts, priorities, delays, until, previous, held)
}

// undos enqueues undo steps: each gets what the step had been given, and what it had returned.
func (w *writer) undos(all []*instance) {
	for _, i := range all {
		for _, u := range i.changes.undo {
			w.queue(`
				WITH undo AS (
					INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, held_at)
					SELECT $1, c.handler_ref, c.node_id || '/undo',
					       jsonb_build_object('input', r.payload, 'output', r.result, 'run', r.id, 'certain', c.certain), r.max_attempts, $3, CASE WHEN $4 THEN now() END
					FROM compensation_record c JOIN workflow_run r ON r.id = c.run_id
					WHERE c.id = $2
					RETURNING id
				)
				UPDATE compensation_record SET undo_run_id = (SELECT id FROM undo) WHERE id = $2`, u.token.id, u.record, i.priority, i.paused)
		}
	}
}

func (w *writer) tasks(all []*instance) {
	for _, i := range all {
		for _, k := range i.changes.tasks {
			if alive(k.token.state) == 0 {
				continue
			}
			h := k.token.node.Human
			groups := h.Groups
			if groups == nil {
				groups = []string{}
			}
			w.queue(`
				INSERT INTO user_task (instance_id, token_id, node, assignee, groups, payload, due_at)
				VALUES ($1, $2, $3, nullif($4, ''), $5, $6, now() + nullif($7::float8, 0) * interval '1 second')`,
				i.id, k.token.id, k.token.node.name, k.assignee, groups, k.payload, time.Duration(h.Due).Seconds())
		}
	}
}

// children starts instances for those who wait for them, and tells those who wait for one that is
// over.
func (w *writer) children(all []*instance) {
	for _, i := range all {
		for _, c := range i.changes.children {
			if alive(c.token.state) == 0 {
				continue
			}
			call := c.token.node.Call
			p := StartPayload{
				Process: call.Process, Version: call.Version, Input: c.input, Priority: i.priority,
				Parent: &parentPayload{Instance: i.id, Token: c.token.id, Visit: c.token.version + 1, Depth: i.depth + 1},
			}
			text, err := json.Marshal(p)
			if err != nil {
				panic(err) // it was JSON before
			}
			w.queue(`INSERT INTO workflow_run (type, payload, priority, max_attempts) VALUES ($1, $2, $3, 1000)`, StartType, text, i.priority)
		}
		if i.parent != nil && i.status.Final() {
			w.queue(`
				INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, held_at)
				SELECT t.id, $3, t.node, $4, 1000, $5, p.paused_at
				FROM process_token t JOIN process_instance p ON p.id = t.instance_id
				WHERE t.id = $1 AND t.version = $2 AND t.state = 'Waiting'`,
				i.parent.token, i.parent.visit, arriveType, position{Visit: i.parent.visit, Child: i.id}.json(), i.priority)
		}
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
