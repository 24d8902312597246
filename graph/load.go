package graph

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// A scene is all that the decisions about a batch need to know.
type scene struct {
	instances map[uuid.UUID]*instance
	tokens    map[uuid.UUID]*token
	owners    map[uuid.UUID]*instance // of tokens
	groups    map[uuid.UUID]*group
	hosts     map[*group]uuid.UUID // tokens that stand for groups
}

func newScene() *scene {
	return &scene{
		instances: map[uuid.UUID]*instance{}, tokens: map[uuid.UUID]*token{}, owners: map[uuid.UUID]*instance{},
		groups: map[uuid.UUID]*group{}, hosts: map[*group]uuid.UUID{},
	}
}

// load reads the scene for tokens and instances, which are locked.
func (s *scene) load(ctx context.Context, tx pgx.Tx, e *Engine, tokens, instances []uuid.UUID) error {
	for _, step := range []func() error{
		func() error { return s.loadInstances(ctx, tx, e, tokens, instances) },
		func() error { return s.loadTokens(ctx, tx, tokens) },
		func() error { return s.loadEaches(ctx, tx, len(tokens)) },
		func() error { return s.loadDebts(ctx, tx) },
		func() error { return s.loadJoins(ctx, tx, len(tokens)) },
		func() error { return s.loadFacts(ctx, tx) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("load process instances: %w", err)
		}
	}
	return nil
}

func (s *scene) loadInstances(ctx context.Context, tx pgx.Tx, e *Engine, tokens, ids []uuid.UUID) error {
	rows, _ := query(ctx, tx, `
		SELECT id, process_definition_id, status, priority, input_payload, live_tokens, ready_tokens, joining_tokens, open_incidents,
		       depth, parent_token_id, parent_visit, undone_with_parent, coalesce(ending, ''), coalesce(ending_reason, ''), paused_at IS NOT NULL, corrected
		FROM process_instance
		WHERE id = ANY (ARRAY(SELECT instance_id FROM process_token WHERE id = ANY ($1)) || $2::uuid[])`, tokens, ids)
	definitions := map[*instance]uuid.UUID{}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*instance, error) {
		i := newInstance()
		var definition uuid.UUID
		var parent uuid.NullUUID
		var visit *int64
		err := row.Scan(&i.id, &definition, &i.status, &i.priority, &i.input, &i.live, &i.ready, &i.joining, &i.incidents,
			&i.depth, &parent, &visit, &i.lends, &i.ending, &i.endingReason, &i.paused, &i.corrected)
		if parent.Valid && visit != nil {
			i.parent = &parentRef{parent.UUID, *visit}
		}
		definitions[i] = definition
		return i, err
	})
	if err != nil {
		return err
	}
	var wanted []uuid.UUID
	for _, i := range all {
		wanted = append(wanted, definitions[i])
	}
	slices.SortFunc(wanted, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
	processes, err := e.processes(ctx, tx, slices.Compact(wanted))
	if err != nil {
		return err
	}
	for _, i := range all {
		i.process = processes[definitions[i]]
		s.instances[i.id] = i
	}
	return nil
}

// surveyed are the instances of which every live token has to be known.
func (s *scene) surveyed() (ids []uuid.UUID) {
	for _, i := range s.instances {
		if i.process.survey {
			ids = append(ids, i.id)
		}
	}
	return ids
}

// loadGroups reads groups and all that they lie within, as far as they are not there.
func (s *scene) loadGroups(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
	ids = slices.DeleteFunc(ids, func(id uuid.UUID) bool { return s.groups[id] != nil })
	if len(ids) == 0 {
		return nil
	}
	rows, _ := query(ctx, tx, `
		WITH RECURSIVE chain AS (
			SELECT id, parent_group_id, node, live, host_token_id
			FROM parallel_group
			WHERE id = ANY ($1)
			UNION
			SELECT g.id, g.parent_group_id, g.node, g.live, g.host_token_id
			FROM parallel_group g JOIN chain c ON g.id = c.parent_group_id
		)
		SELECT id, parent_group_id, node, live, host_token_id, EXISTS (SELECT FROM each_progress e WHERE e.group_id = c.id AND e.over_at IS NOT NULL) FROM chain c`, ids)
	parents := map[*group]uuid.UUID{}
	var g group
	var parent *uuid.UUID
	var host uuid.NullUUID
	_, err := pgx.ForEachRow(rows, []any{&g.id, &parent, &g.node, &g.live, &host, &g.over}, func() error {
		if s.groups[g.id] != nil {
			return nil
		}
		known := g
		s.groups[g.id] = &known
		if host.Valid {
			s.hosts[&known] = host.UUID
		}
		if parent != nil {
			parents[&known] = *parent
		}
		return nil
	})
	for g, id := range parents {
		g.parent = s.groups[id]
	}
	return err
}

// loadTokens reads the tokens, and all live ones of instances that are surveyed.
func (s *scene) loadTokens(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
	which, args := `t.id = ANY ($1)`, []any{ids}
	if surveyed := s.surveyed(); len(surveyed) > 0 {
		if err := ownPlan(ctx, tx); err != nil {
			return err
		}
		which, args = `t.id = ANY ($1) OR t.instance_id = ANY ($2) AND t.state IN ('Created', 'Ready', 'Waiting')`, append(args, surveyed)
	}
	rows, _ := query(ctx, tx, `
		SELECT t.id, t.instance_id, t.node, coalesce(t.edge, ''), t.state, t.mode, coalesce(t.item, -1), t.parallel_group_id, t.version,
		       t.id = ANY ($1) AS wanted,
		       EXISTS (SELECT FROM join_arrival a WHERE a.token_id = t.id) AND t.state = 'Waiting' AS joining,
		       EXISTS (SELECT FROM incident x WHERE x.token_id = t.id AND x.resolved_at IS NULL) AS stopped
		FROM process_token t
		WHERE `+which+`
		ORDER BY t.id`, args...)
	var t token
	var owner uuid.UUID
	var node string
	var inGroup uuid.NullUUID
	var wanted bool
	known := map[uuid.UUID]*token{}
	in := map[*token]uuid.UUID{}
	_, err := pgx.ForEachRow(rows, []any{&t.id, &owner, &node, &t.edge, &t.state, &t.mode, &t.item, &inGroup, &t.version, &wanted, &t.joining, &t.stopped}, func() error {
		one, i := t, s.instances[owner]
		if i == nil {
			return nil // it was deleted meanwhile
		}
		one.hasItem = one.item >= 0
		known[one.id] = &one
		if one.node = i.process.nodes[node]; one.node == nil {
			return fmt.Errorf("token %s is at node %q, which process %q version %d does not have",
				t.id, node, i.process.Definition.Process, i.process.Definition.Version)
		}
		if inGroup.Valid {
			in[&one] = inGroup.UUID
		}
		s.owners[t.id] = i
		one.from = one.node
		if wanted {
			s.tokens[t.id] = &one
		}
		if i.process.survey {
			i.others = append(i.others, &one)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := s.enterGroups(ctx, tx, in); err != nil {
		return err
	}
	for g, id := range s.hosts {
		g.host = known[id] // with scopes and eaches, every live token is known
	}
	return nil
}

// enterGroups puts tokens into their groups, which are read as far as they are not there.
func (s *scene) enterGroups(ctx context.Context, tx pgx.Tx, in map[*token]uuid.UUID) error {
	if err := s.loadGroups(ctx, tx, slices.Collect(maps.Values(in))); err != nil {
		return err
	}
	for t, g := range in {
		t.group = s.groups[g]
	}
	return nil
}

// loadEaches reads how far the lists have come whose elements are in the batch.
func (s *scene) loadEaches(ctx context.Context, tx pgx.Tx, batch int) error {
	var ids, stopped []uuid.UUID
	for _, t := range s.tokens {
		if t.hasItem && t.group != nil {
			ids = append(ids, t.group.id)
		}
		if t.hasItem && t.stopped {
			stopped = append(stopped, t.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if err := s.loadElements(ctx, tx, stopped); err != nil {
		return err
	}
	rows, _ := query(ctx, tx, `
		SELECT e.group_id, e.instance_id, e.next, e.done, e.total, e.over_at IS NOT NULL,
		       coalesce((SELECT jsonb_agg(e.items->k ORDER BY k) FROM generate_series(e.next, least(e.next + $2, e.total) - 1) AS k), '[]')
		FROM each_progress e
		WHERE e.group_id = ANY ($1)`, ids, batch)
	var id, owner uuid.UUID
	var p progress
	var items []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &owner, &p.next, &p.done, &p.total, &p.over, &items}, func() error {
		known := p
		known.group, known.from = s.groups[id], p.next
		if err := json.Unmarshal(items, &known.items); err != nil {
			return err
		}
		s.instances[owner].eaches = append(s.instances[owner].eaches, &known)
		return nil
	})
	return err
}

// loadElements reads the elements of tokens that are tried again.
func (s *scene) loadElements(ctx context.Context, tx pgx.Tx, tokens []uuid.UUID) error {
	if len(tokens) == 0 {
		return nil
	}
	rows, _ := query(ctx, tx, `
		SELECT t.id, e.items->t.item
		FROM process_token t JOIN each_progress e ON e.group_id = t.parallel_group_id
		WHERE t.id = ANY ($1)`, tokens)
	var id uuid.UUID
	var element []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &element}, func() error {
		s.tokens[id].element = slices.Clone(element)
		return nil
	})
	return err
}

// loadDebts reads what is undone next, where something is being undone. When an instance ends that
// is all it has done; what is thrown undoes what was done in its own scope, and in scopes within
// that are over.
func (s *scene) loadDebts(ctx context.Context, tx pgx.Tx) error {
	var tokens, owners []uuid.UUID
	for id, t := range s.tokens {
		if t.mode == compensation {
			tokens, owners = append(tokens, id), append(owners, s.owners[id].id)
		}
	}
	if len(tokens) == 0 {
		return nil
	}
	if err := ownPlan(ctx, tx); err != nil {
		return err
	}
	// This first: what a called instance that has just ended has lent is then seen below.
	rows, _ := query(ctx, tx, `
		SELECT c.instance_id
		FROM compensation_record c JOIN workflow_run r ON r.id = c.undo_run_id
		WHERE c.instance_id = ANY ($1) AND c.status = 'Pending' AND r.finished_at IS NULL
		UNION
		SELECT c.parent_process_instance_id -- it undoes what it has done itself, or lends it when it is over
		FROM process_instance c JOIN process_instance p ON p.id = c.parent_process_instance_id
		WHERE p.id = ANY ($1) AND p.ending IS NOT NULL AND c.undone_with_parent AND c.completed_at IS NULL`, owners)
	var id, owner, record uuid.UUID
	if _, err := pgx.ForEachRow(rows, []any{&owner}, func() error {
		s.instances[owner].undoing = true
		return nil
	}); err != nil {
		return err
	}
	rows, _ = query(ctx, tx, `
		SELECT t.id, d.id
		FROM process_token t
		JOIN process_instance i ON i.id = t.instance_id
		CROSS JOIN LATERAL (
			SELECT c.id
			FROM compensation_record c
			WHERE c.instance_id = i.id AND c.status = 'Pending' AND c.undo_run_id IS NULL
			  AND (i.ending IS NOT NULL OR process_undoes(t.id, c.token_id))
			ORDER BY c."order" DESC
			LIMIT 1) d
		WHERE t.id = ANY ($1)`, tokens)
	_, err := pgx.ForEachRow(rows, []any{&id, &record}, func() error {
		s.owners[id].debts[s.tokens[id]] = record
		return nil
	})
	return err
}
