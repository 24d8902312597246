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

	"github.com/simple-workflow/simple-workflow/lease"
)

// A birth is an instance that is to be started.
type birth struct {
	asked    StartPayload
	started  Started
	metadata []byte
}

// start inserts the instances of a batch and places their first tokens. One that is there already
// is left as it is.
func (s *scene) start(ctx context.Context, tx *transaction, e *Engine, batch []lease.Settlement) error {
	births, err := s.births(batch)
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
	fresh, err := insertInstances(ctx, tx, births)
	if err != nil {
		return fmt.Errorf("insert %d process instances: %w", len(births), err)
	}
	for _, b := range births {
		if !fresh[b.started.Instance] {
			continue
		}
		delete(fresh, b.started.Instance) // of two in one batch the first
		i := newInstance()
		i.id, i.process, i.status, i.priority, i.tenant, i.input = b.started.Instance, processes[b.started.Definition], Created, b.asked.Priority, b.asked.Tenant, b.asked.Input
		if p := b.asked.Parent; p != nil {
			i.depth, i.parent, i.lends = p.Depth, &parentRef{p.Token, p.Visit}, p.Undo
			if i.paused = s.owners[p.Token].paused; i.paused {
				i.changes.events = append(i.changes.events, event{name: "instance.paused", data: map[string]any{"with": p.Instance}})
			}
		}
		if err := json.Unmarshal(b.asked.Input, &i.facts.input); err != nil {
			return err
		}
		s.instances[i.id] = i
		i.begin()
	}
	return nil
}

// births reads what is to be started, in order of the instances' ids: two batches that start the
// same ones do not wait for each other in a circle.
func (s *scene) births(batch []lease.Settlement) (all []birth, err error) {
	for _, settled := range batch {
		b := birth{metadata: settled.Metadata}
		if err := errors.Join(json.Unmarshal(settled.Payload, &b.asked), json.Unmarshal(settled.Result, &b.started)); err != nil {
			return nil, err
		}
		if len(b.asked.Input) == 0 {
			b.asked.Input = json.RawMessage("{}")
		}
		if b.asked.Parent == nil || s.calls(b.asked, settled.Tenant) && !slices.ContainsFunc(all, b.sameCall) {
			b.asked.Tenant = cmp.Or(b.asked.Tenant, settled.Tenant) // a called one has that of its caller's row
			all = append(all, b)
		}
	}
	slices.SortStableFunc(all, func(a, b birth) int { return compareIDs(a.started.Instance, b.started.Instance) })
	return all, nil
}

// calls reports whether the token that is said to wait for an instance does: all that the payload says
// of it is what its call node would say. tenant is that of the run.
func (s *scene) calls(p StartPayload, tenant string) bool {
	t, i := s.tokens[p.Parent.Token], s.owners[p.Parent.Token]
	return t != nil && i.id == p.Parent.Instance && t.version == p.Parent.Visit && !i.passed(t) && t.state == tokenWaiting &&
		t.node.starts(p) && p.Parent.Depth == i.depth+1 && p.ID == uuid.Nil && p.Key == "" && p.Tenant == "" && tenant == i.tenant
}

// sameCall reports whether another instance is for the same visit of a call node.
func (b birth) sameCall(other birth) bool {
	return b.asked.Parent != nil && other.asked.Parent != nil &&
		b.asked.Parent.Token == other.asked.Parent.Token && b.asked.Parent.Visit == other.asked.Parent.Visit
}

// insertInstances returns those that were not there.
func insertInstances(ctx context.Context, tx *transaction, births []birth) (map[uuid.UUID]bool, error) {
	n := len(births)
	ids, definitions := make([]uuid.UUID, n), make([]uuid.UUID, n)
	keys, tenants := make([]string, n), make([]string, n)
	priorities, depths := make([]int, n), make([]int, n)
	inputs, metadata := make([]json.RawMessage, n), make([][]byte, n)
	parents, tokens := make([]uuid.NullUUID, n), make([]uuid.NullUUID, n)
	visits, lends := make([]*int64, n), make([]bool, n)
	for k, b := range births {
		ids[k], definitions[k], keys[k], tenants[k] = b.started.Instance, b.started.Definition, b.asked.Key, b.asked.Tenant
		priorities[k], inputs[k], metadata[k] = b.asked.Priority, b.asked.Input, b.metadata
		if p := b.asked.Parent; p != nil {
			parents[k], tokens[k] = uuid.NullUUID{UUID: p.Instance, Valid: true}, uuid.NullUUID{UUID: p.Token, Valid: true}
			visits[k], depths[k], lends[k] = &p.Visit, p.Depth, p.Undo
		}
	}
	fresh := map[uuid.UUID]bool{}
	inserting := tx.statements()
	inserting.work()
	inserting.ask(func(rows pgx.Rows) error {
		var id uuid.UUID
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error { fresh[id] = true; return nil })
		return err
	}, `
		INSERT INTO process_instance (id, process_definition_id, business_key, tenant_id, priority, input_payload, metadata,
		                              parent_process_instance_id, parent_token_id, parent_visit, depth, undone_with_parent, paused_at)
		SELECT id, definition, nullif(key, ''), nullif(tenant, ''), priority, input, coalesce(metadata, '{}'), parent, token, visit, depth, lends,
		       (SELECT p.paused_at FROM process_instance p WHERE p.id = n.parent) -- which is locked
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::jsonb[], $7::jsonb[], $8::uuid[], $9::uuid[], $10::bigint[], $11::int[], $12::boolean[])
		  WITH ORDINALITY AS n (id, definition, key, tenant, priority, input, metadata, parent, token, visit, depth, lends, place)
		WHERE NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = n.token AND c.parent_visit = n.visit AND c.id <> n.id)
		ORDER BY place
		ON CONFLICT (id) DO NOTHING
		RETURNING id`, ids, definitions, keys, tenants, priorities, inputs, metadata, parents, tokens, visits, depths, lends)
	return fresh, inserting.send(ctx)
}
