package graph

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/outbox"
)

// A writer writes the decisions about a batch: a few statements for the whole batch, sent together.
type writer struct {
	scene *scene
	tx    *transaction

	starts []leasing.Settlement // runs that start instances
	again  []leasing.Settlement // runs that restart failed instances

	*statements
	carrier  *leasing.Carrier
	resolved []uuid.UUID // incidents that a retry resolves
	consumed []uuid.UUID // messages that tokens have taken

	messages []arrived
	signals  []uuid.UUID // signal runs that are over
	slots    []slot      // names and keys (see slot) for which messages and waits have to be paired

	copies string // a table that gets all events of the core, for tests; empty: none

	emits  []outbox.Event
	finals []outbox.Event // events that an instance has ended; they come after all other events of their instances
	told   bool           // the answers to queued statements will add events, so events are sent after them
}

// write writes everything, in the lock order: instance → join → token → run → outbox.
func (w *writer) write(ctx context.Context) error {
	var changed []*instance
	for _, id := range slices.SortedFunc(maps.Keys(w.scene.instances), compareIDs) {
		if i := w.scene.instances[id]; i.changes.touched {
			changed = append(changed, i)
			if err := name(i); err != nil {
				return err
			}
		}
	}
	if len(changed) > 0 {
		if err := w.changes(ctx, changed); err != nil {
			return err
		}
	}
	w.plan(ownPlans)
	if len(changed) == 0 && len(w.messages)+len(w.signals)+len(w.slots) > 0 {
		w.do(atWork)
	}
	w.meet(changed)
	if events := append(w.emits, w.finals...); len(events) > 0 && !w.told {
		w.plan(w.tx.mode) // keep the current mode: it does not matter for these statements
		if err := outbox.Queue(w.ready(), events...); err != nil {
			return err
		}
		w.emits, w.finals = nil, nil
	}
	if w.tx.mode == keptPlans {
		w.plan(ownPlans) // for the statements that follow the engine's in this transaction
		w.ready()
	}
	if err := w.send(ctx); err != nil {
		return fmt.Errorf("move process instances: %w", err)
	}
	return outbox.Append(ctx, w.tx, append(w.emits, w.finals...)...)
}

// changes queues everything that was decided about instances.
func (w *writer) changes(ctx context.Context, changed []*instance) error {
	after, err := w.leasesEnd(ctx, w.tx, changed)
	if err != nil {
		return err
	}
	for _, i := range changed {
		i.changes.stored = unreported(i)
	}
	w.plan(keptPlans)
	w.do(atWork)
	w.instances(changed)
	w.groups(changed)
	w.tokens(changed)
	w.joins(changed)
	w.eaches(changed)
	w.plan(ownPlans)
	w.records(changed)
	w.ends(changed)
	w.plan(keptPlans)
	w.restarts(changed)
	w.events(changed)
	w.steps(changed, after)
	w.undos(changed)
	w.tasks(changed)
	w.children(changed)
	w.incidents(changed)
	w.failures(changed)
	w.history(changed)
	return nil
}

func compareIDs(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) }

// name gives ids to new groups, tokens and joins.
func name(i *instance) (err error) {
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

// instances updates the rows of instances. A row stays as it is if neither a column of it nor a stored event shows what
// has happened: if a token went from one step to the next, for example. The row is locked all the same. Each version has
// the events of one transaction.
func (w *writer) instances(all []*instance) {
	all = filter(all, func(i *instance) bool {
		return i.columns() != i.read || len(i.changes.stored) > 0 && i.version > 0
	})
	if len(all) == 0 {
		return
	}
	n := len(all)
	ids, status := make([]uuid.UUID, n), make([]string, n)
	live, ready, joining, incidents := make([]int, n), make([]int, n), make([]int, n), make([]int, n)
	failures, outputs := make([]*string, n), make([]json.RawMessage, n)
	endings, reasons := make([]string, n), make([]string, n)
	for k, i := range all {
		ids[k], status[k] = i.id, string(i.status)
		live[k], ready[k], joining[k], incidents[k] = i.live, i.ready, i.joining, i.incidents
		endings[k], reasons[k] = string(i.ending), i.endingReason
		if i.failure != "" {
			failures[k] = &i.failure
		}
		if i.status == statusCompleted {
			outputs[k] = i.output
		}
	}
	w.do(`
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

// groups inserts new groups, and updates the live-token counts of the others.
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
		w.do(`
			INSERT INTO parallel_group (id, instance_id, parent_group_id, node, live, host_token_id)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::uuid[])`, fresh, owners, parents, nodes, lives, hosts)
	}
	if len(old) > 0 {
		w.do(`
			UPDATE parallel_group g SET live = n.live
			FROM unnest($1::uuid[], $2::int[]) AS n (id, live)
			WHERE g.id = n.id`, old, oldLives)
	}
}

// outerFirst sorts groups so that a parent comes before the groups within it, as the foreign key demands. If a group
// changes, the groups around it are listed as well.
func outerFirst(groups []*group) []*group {
	depth := func(g *group) (n int) {
		for ; g != nil; g = g.parent {
			n++
		}
		return n
	}
	return slices.SortedStableFunc(slices.Values(groups), func(a, b *group) int { return depth(a) - depth(b) })
}

// tokens inserts new tokens and updates the others.
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
		w.do(`
			INSERT INTO process_token (id, instance_id, node, edge, state, parallel_group_id, mode, item)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[], $7::text[], $8::int[])`,
			fresh.ids, fresh.owners, fresh.nodes, fresh.edges, fresh.state, fresh.groups, fresh.modes, fresh.items)
	}
	if len(old.ids) > 0 {
		w.do(`
			UPDATE process_token t
			SET node = n.node, edge = n.edge, state = n.state, parallel_group_id = n.group_id, mode = n.mode, version = t.version + 1, updated_at = statement_timestamp()
			FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::text[]) AS n (id, node, edge, state, group_id, mode)
			WHERE t.id = n.id`, old.ids, old.nodes, old.edges, old.state, old.groups, old.modes)
	}
}

// joins writes activations of joins and the arrivals at them, and completes the tokens that wait at a join which fires.
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
		w.do(`
			INSERT INTO parallel_join (id, instance_id, node, parallel_group_id, round, expected, joined, fired)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::int[], $6::int[], $7::int[], $8::boolean[])
			ON CONFLICT (id) DO UPDATE SET expected = excluded.expected, joined = excluded.joined, fired = excluded.fired`,
			ids, owners, nodes, groups, rounds, expected, joined, done)
	}
	if len(at) > 0 {
		w.do(`
			INSERT INTO join_arrival (join_id, token_id, edge, surplus)
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::boolean[])`, at, tokens, edges, surplus)
	}
	if len(fired) > 0 {
		w.do(`
			UPDATE process_token
			SET state = 'Completed', version = version + 1, updated_at = statement_timestamp()
			WHERE state = 'Waiting' AND id = ANY (ARRAY(SELECT token_id FROM join_arrival WHERE join_id = ANY ($1) AND NOT surplus))`, fired)
	}
}

// eaches writes the progress of lists.
func (w *writer) eaches(all []*instance) {
	var fresh, owners, old []uuid.UUID
	var nodes []string
	var lists []json.RawMessage
	var next, done, total, oldNext, oldDone []int
	var over, oldOver []bool
	for _, i := range all {
		for _, p := range i.eaches {
			switch {
			case p.all != nil:
				fresh, owners, nodes, lists = append(fresh, p.group.id), append(owners, i.id), append(nodes, p.group.node), append(lists, p.all)
				next, done, total, over = append(next, p.next), append(done, p.done), append(total, p.total), append(over, p.over)
			case p.changed:
				old, oldNext, oldDone, oldOver = append(old, p.group.id), append(oldNext, p.next), append(oldDone, p.done), append(oldOver, p.over)
			}
		}
	}
	if len(fresh) > 0 {
		w.do(`
			INSERT INTO each_progress (group_id, instance_id, node, items, next, done, total, over_at)
			SELECT n.id, n.owner, n.node, n.items, n.next, n.done, n.total, CASE WHEN n.over THEN statement_timestamp() END
			FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::jsonb[], $5::int[], $6::int[], $7::int[], $8::boolean[])
			  AS n (id, owner, node, items, next, done, total, over)`,
			fresh, owners, nodes, lists, next, done, total, over)
	}
	if len(old) > 0 {
		w.do(`
			UPDATE each_progress e SET next = n.next, done = n.done, over_at = CASE WHEN n.over THEN statement_timestamp() END
			FROM unnest($1::uuid[], $2::int[], $3::int[], $4::boolean[]) AS n (id, next, done, over)
			WHERE e.group_id = n.id`, old, oldNext, oldDone, oldOver)
	}
}
