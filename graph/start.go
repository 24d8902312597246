package graph

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// A birth is an instance to start.
type birth struct {
	run      uuid.UUID // the run that starts it
	asked    startPayload
	started  Started
	metadata []byte
	from     *legacy   // what it takes over from the failed instance that it continues; nil: it continues none
	begun    *instance // what becomes of it: see bring
}

// start inserts the instances of a batch and places their first tokens. An instance that exists already is not changed,
// except that one with the status CREATED (a user inserted its row) is begun. A start that differs from the existing
// instance is refused: see refuse.
func (s *scene) start(ctx context.Context, tx *transaction, e *Engine, batch, restarts []leasing.Settlement) error {
	births, err := s.allBirths(ctx, tx, batch, restarts)
	if err != nil || len(births) == 0 {
		return err
	}
	var definitions []uuid.UUID
	for _, b := range births {
		definitions = append(definitions, b.started.Definition)
	}
	processes, err := e.processes(ctx, tx, definitions)
	if err != nil {
		return err
	}
	for k, b := range births {
		process := processes[b.started.Definition]
		if process == nil {
			return &leasing.SettleError{Run: b.run, Err: run.Permanent(fmt.Errorf("process: %.100q version %d was deleted while this start was under way; start it again", b.asked.Process, b.started.Version))}
		}
		if err := s.bring(&births[k], process); err != nil {
			return err
		}
	}
	fresh, err := insertInstances(ctx, tx, births)
	if err != nil {
		return fmt.Errorf("insert %d process instances: %w", len(births), err)
	}
	var again []birth
	for _, b := range births {
		trace, isFresh := fresh[b.started.Instance]
		switch {
		case isFresh:
			delete(fresh, b.started.Instance) // if two starts of the batch have one id, the first makes the instance
			i := b.begun
			s.instances[i.id], i.trace, i.read = i, trace, i.inserted()
			if i.from != nil {
				if err := i.inherit(); err != nil {
					return &leasing.SettleError{Run: b.run, Err: err}
				}
			}
		case b.from != nil:
			return &leasing.SettleError{Run: b.run, Err: restarted(b.started)}
		default:
			again = append(again, b)
		}
	}
	if err := refuse(ctx, tx, again); err != nil {
		return err
	}
	for _, b := range again {
		if i := s.instances[b.started.Instance]; i != nil && i.status == statusCreated {
			if err := i.begin(); err != nil {
				return err
			}
		}
	}
	return nil
}

// allBirths returns the instances to start, from runs of both start and restart, in order of their ids. The order
// prevents a deadlock between two batches that insert the same instances.
func (s *scene) allBirths(ctx context.Context, tx *transaction, batch, restarts []leasing.Settlement) ([]birth, error) {
	births, err := s.births(batch)
	if err != nil {
		return nil, err
	}
	for _, settled := range restarts {
		b, err := s.reborn(ctx, tx, settled)
		if err != nil {
			return nil, &leasing.SettleError{Run: settled.Outcome.ID, Err: err}
		}
		births = append(births, b)
	}
	slices.SortStableFunc(births, func(a, b birth) int { return compareIDs(a.started.Instance, b.started.Instance) })
	for _, b := range births {
		if last := b.started.After; last != uuid.Nil && s.instances[last] == nil { // without it another start would find the key free
			return nil, &leasing.SettleError{Run: b.run, Err: run.Permanent(run.WithCode("conflict",
				fmt.Errorf("key: instance %s, which had it, has just been removed by retention; start the new one again", last)))}
		}
	}
	return births, nil
}

// bring begins the instance of a birth. So the row of the instance is inserted with what its first token has made of it.
func (s *scene) bring(b *birth, process *Process) error {
	i := newInstance()
	i.id, i.process, i.status, i.priority, i.tenant, i.input = b.started.Instance, process, statusCreated, b.asked.Priority, b.asked.Tenant, b.asked.Input
	i.key = b.asked.Key
	if p := b.asked.Parent; p != nil {
		i.depth, i.parent, i.lends = p.Depth, &parentRef{p.Token, p.Visit}, p.Undo
		if i.paused = s.owners[p.Token].paused; i.paused {
			i.changes.events = append(i.changes.events, event{name: "instance.paused", data: map[string]any{"with": p.Instance}})
		}
	}
	if i.from = b.from; i.from != nil {
		i.changes.restart, i.changes.after = b.run, i.from.of
	}
	b.begun = i
	return i.begin()
}

// refuse compares the starts in again with the existing instances that have their ids. It returns an error that names
// the runs of all starts that differ. The existing instances are committed or belong to this batch, because
// insertInstances has waited for every other transaction that was inserting one of these ids.
func refuse(ctx context.Context, tx *transaction, again []birth) error {
	var differ []uuid.UUID
	var why error // the first conflict
	asked := tx.statements()
	for _, b := range again {
		asked.ask(func(rows pgx.Rows) error {
			_, _, conflict, err := b.meet(rows)
			if conflict != nil {
				differ, why = append(differ, b.run), cmp.Or(why, conflict)
			}
			return err
		}, meeting, b.started.Instance, b.asked.Tenant, b.asked.Input)
	}
	if err := asked.send(ctx); err != nil {
		return fmt.Errorf("compare %d starts with the instances that exist: %w", len(again), err)
	}
	if why != nil {
		return &leasing.SettleError{Run: differ[0], Others: differ[1:], Err: why}
	}
	return nil
}

// meeting selects the instance with an id ($1) and compares its tenant ($2) and its input ($3).
const meeting = meets + `
	WHERE i.id = $1`

// newest selects the same for the newest instance that has had a key ($4) of a process ($5); $1 is the id of the first
// instance with that key. It passes over rows in which somebody set business_key by hand: only an id derived from a key
// is a UUID of version 5.
const newest = meets + `
	WHERE i.id = ANY (ARRAY(
		SELECT k.id
		FROM process_instance k JOIN process_definition n ON n.id = k.process_definition_id
		WHERE k.business_key = $4 AND coalesce(k.tenant_id, '') = $2 AND n.name = $5 AND substr(k.id::text, 15, 1) = '5'
		ORDER BY k.created_at DESC
		LIMIT 1) || $1::uuid)
	ORDER BY i.created_at DESC, i.id = $1, i.id
	LIMIT 1`

const meets = `
	SELECT i.id, d.id, d.name, d.version, coalesce(i.tenant_id, '') = $2, i.input_payload = $3, i.completed_at IS NOT NULL
	FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id`

// meet reads the rows of meeting or newest. If the instance exists, first describes it and over reports whether it is
// over; if not, first is b.started. conflict is a permanent error with the code conflict if the start asks for another
// process, tenant, input or version than the instance has. Its text never quotes an input, which may be confidential.
func (b birth) meet(rows pgx.Rows) (first Started, over bool, conflict, err error) {
	var process string
	var tenant, input bool
	first = b.started
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&first.Instance, &first.Definition, &process, &first.Version, &tenant, &input, &over)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return first, false, nil, nil
	} else if err != nil {
		return first, false, nil, err
	}
	first.After = uuid.Nil
	name, what := "id", fmt.Sprintf("instance %s", first.Instance)
	if b.asked.Key != "" {
		name, what = "key", fmt.Sprintf("an instance of %.100q with key %.200q", b.asked.Process, b.asked.Key)
	}
	switch {
	case process != b.asked.Process:
		conflict = fmt.Errorf("%s: %s is an instance of %s; choose another %[1]s, or leave it out", name, first.Instance, process)
	case !tenant:
		conflict = fmt.Errorf("%s: %s is an instance of another tenant; choose another %[1]s, or leave it out", name, first.Instance)
	case !input:
		conflict = fmt.Errorf("%s: %s was started with another input; use another %[1]s, or the same input", name, what)
	case b.asked.Version != 0 && b.asked.Version != first.Version:
		conflict = fmt.Errorf("%s: %s was started with version %d; use another %[1]s, or that version", name, what, first.Version)
	}
	return first, over, run.Permanent(run.WithCode("conflict", conflict)), nil
}

// births returns the instances that a batch starts. It leaves out starts from call nodes whose token does not wait for
// the instance any more, and all but the first start for one visit of a call node.
func (s *scene) births(batch []leasing.Settlement) (all []birth, err error) {
	for _, settled := range batch {
		b := birth{run: settled.Outcome.ID, metadata: settled.Metadata}
		if err := errors.Join(json.Unmarshal(settled.Payload, &b.asked), json.Unmarshal(settled.Result, &b.started)); err != nil {
			return nil, err
		}
		b.asked.Input = b.asked.input()
		if b.asked.Parent == nil || s.calls(b.asked, settled.Tenant) && !slices.ContainsFunc(all, b.sameCall) {
			b.asked.Tenant = cmp.Or(b.asked.Tenant, settled.Tenant) // for a called instance this is the caller's tenant: see calls
			all = append(all, b)
		}
	}
	return all, nil
}

// calls reports whether the token that p.Parent names waits for the instance, and every field of p is what its call
// node would have written. tenant is the tenant of the run.
func (s *scene) calls(p startPayload, tenant string) bool {
	t, i := s.tokens[p.Parent.Token], s.owners[p.Parent.Token]
	return t != nil && i.id == p.Parent.Instance && t.version == p.Parent.Visit && !i.passed(t) && t.state == tokenWaiting &&
		starts(t.node, p) && p.Parent.Depth == i.depth+1 && p.ID == uuid.Nil && p.Key == "" && p.Tenant == "" && tenant == i.tenant
}

// sameCall reports whether b and other are for the same visit of the same call node.
func (b birth) sameCall(other birth) bool {
	return b.asked.Parent != nil && other.asked.Parent != nil &&
		b.asked.Parent.Token == other.asked.Parent.Token && b.asked.Parent.Visit == other.asked.Parent.Visit
}

// insertInstances inserts the instances of births that do not exist, each as its first token has left it. It returns the
// ids of those it inserted, each with the trace metadata for the runs of the instance.
func insertInstances(ctx context.Context, tx *transaction, births []birth) (map[uuid.UUID]json.RawMessage, error) {
	n := len(births)
	ids, definitions := make([]uuid.UUID, n), make([]uuid.UUID, n)
	keys, tenants := make([]string, n), make([]string, n)
	priorities, depths := make([]int, n), make([]int, n)
	inputs, metadata := make([]json.RawMessage, n), make([][]byte, n)
	parents, tokens := make([]uuid.NullUUID, n), make([]uuid.NullUUID, n)
	visits, lends := make([]*int64, n), make([]bool, n)
	status := make([]string, n)
	live, ready, joining, incidents := make([]int, n), make([]int, n), make([]int, n), make([]int, n)
	for k, b := range births {
		ids[k], definitions[k], keys[k], tenants[k] = b.started.Instance, b.started.Definition, b.asked.Key, b.asked.Tenant
		priorities[k], inputs[k], metadata[k] = b.asked.Priority, b.asked.Input, b.metadata
		first := b.begun.inserted()
		status[k], live[k], ready[k], joining[k], incidents[k] = string(first.status), first.live, first.ready, first.joining, first.incidents
		if p := b.asked.Parent; p != nil {
			parents[k], tokens[k] = uuid.NullUUID{UUID: p.Instance, Valid: true}, uuid.NullUUID{UUID: p.Token, Valid: true}
			visits[k], depths[k], lends[k] = &p.Visit, p.Depth, p.Undo
		}
	}
	fresh := map[uuid.UUID]json.RawMessage{}
	inserting := tx.statements()
	inserting.work()
	inserting.ask(func(rows pgx.Rows) error {
		var id uuid.UUID
		var trace []byte
		_, err := pgx.ForEachRow(rows, []any{&id, &trace}, func() error { fresh[id] = slices.Clone(trace); return nil })
		return err
	}, `
		INSERT INTO process_instance (id, process_definition_id, business_key, tenant_id, priority, input_payload, metadata,
		                              parent_process_instance_id, parent_token_id, parent_visit, depth, undone_with_parent, paused_at,
		                              status, live_tokens, ready_tokens, joining_tokens, open_incidents, started_at)
		SELECT id, definition, nullif(key, ''), nullif(tenant, ''), priority, input, coalesce(metadata, '{}'), parent, token, visit, depth, lends,
		       (SELECT p.paused_at FROM process_instance p WHERE p.id = n.parent), -- which is locked
		       status, live, ready, joining, incidents, CASE WHEN status <> 'CREATED' THEN statement_timestamp() END
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::jsonb[], $7::jsonb[], $8::uuid[], $9::uuid[], $10::bigint[], $11::int[], $12::boolean[],
		            $13::text[], $14::int[], $15::int[], $16::int[], $17::int[])
		  WITH ORDINALITY AS n (id, definition, key, tenant, priority, input, metadata, parent, token, visit, depth, lends, status, live, ready, joining, incidents, place)
		WHERE NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = n.token AND c.parent_visit = n.visit AND c.id <> n.id)
		ORDER BY place
		ON CONFLICT (id) DO NOTHING
		RETURNING id, process_trace(metadata)`, ids, definitions, keys, tenants, priorities, inputs, metadata, parents, tokens, visits, depths, lends,
		status, live, ready, joining, incidents)
	return fresh, inserting.send(ctx)
}
