package graph

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// loadJoins reads the activations that tokens may arrive at.
func (s *scene) loadJoins(ctx context.Context, tx pgx.Tx, batch int) error {
	var owners []uuid.UUID
	var nodes []string
	edges := map[string]bool{}
	for id, t := range s.tokens {
		i := s.owners[id]
		for _, j := range t.node.ahead.joins {
			owners, nodes = append(owners, i.id), append(nodes, j.name)
		}
		for _, e := range t.node.ahead.edges {
			edges[e] = true
		}
	}
	for _, i := range s.instances {
		if i.process.survey {
			for name, n := range i.process.nodes {
				if n.kind == join {
					owners, nodes = append(owners, i.id), append(nodes, name)
				}
			}
		}
	}
	if len(owners) == 0 {
		return nil
	}
	var groups []uuid.UUID
	for id := range s.groups {
		groups = append(groups, id)
	}
	rows, _ := query(ctx, tx, `
		SELECT DISTINCT ON (j.instance_id, j.node, j.parallel_group_id)
		       j.id, j.instance_id, j.node, j.parallel_group_id, j.round, j.expected, j.joined, j.fired
		FROM parallel_join j JOIN unnest($1::uuid[], $2::text[]) AS w (instance_id, node) USING (instance_id, node)
		WHERE j.parallel_group_id IS NULL OR j.parallel_group_id = ANY ($3)
		ORDER BY j.instance_id, j.node, j.parallel_group_id, j.round DESC`, owners, nodes, groups)
	found := map[uuid.UUID]*joining{}
	ids := []uuid.UUID{}
	var j joining
	var owner uuid.UUID
	var node string
	var inGroup *uuid.UUID
	_, err := pgx.ForEachRow(rows, []any{&j.id, &owner, &node, &inGroup, &j.round, &j.expected, &j.joined, &j.fired}, func() error {
		known, i := j, s.instances[owner]
		known.node, known.has, known.waiting = i.process.nodes[node], map[string]bool{}, map[*group]int{}
		if inGroup != nil {
			known.group = s.groups[*inGroup]
		}
		if known.fired && known.node.Join.Need == 0 { // what comes now is the next round's
			known = joining{node: known.node, group: known.group, round: known.round + 1, expected: known.node.expects(), has: known.has, waiting: known.waiting}
		}
		i.activations++
		known.place = i.activations
		i.joins[joinKey{node, known.group}] = &known
		if !known.fired && known.id != uuid.Nil {
			found[known.id] = &known
			ids = append(ids, known.id)
		}
		return nil
	})
	if err != nil || len(found) == 0 {
		return err
	}
	return s.loadArrivals(ctx, tx, found, ids, edges, batch)
}

// loadArrivals reads over which edges tokens have come, as far as others may come over them,
// and, of joins that a batch of so many may fire, how many wait in which group.
func (s *scene) loadArrivals(ctx context.Context, tx pgx.Tx, joins map[uuid.UUID]*joining, ids []uuid.UUID, edges map[string]bool, batch int) error {
	var names []string
	for e := range edges {
		names = append(names, e)
	}
	rows, _ := query(ctx, tx, `
		SELECT join_id, edge FROM join_arrival
		WHERE join_id = ANY ($1) AND edge = ANY ($2) AND NOT surplus`, ids, names)
	var id uuid.UUID
	var edge string
	if _, err := pgx.ForEachRow(rows, []any{&id, &edge}, func() error {
		joins[id].has[edge] = true
		return nil
	}); err != nil {
		return err
	}
	var close []uuid.UUID
	for _, id := range ids {
		j := joins[id]
		over := 0 // edges that a token of the batch may come over, each more than once if it forks
		for _, e := range j.node.incoming {
			over += count(edges[e.id])
		}
		if j.node.Join.Taken || j.joined+batch*over >= j.expected || s.waitsAt(j.node) {
			close = append(close, id)
		}
	}
	if len(close) == 0 {
		return nil
	}
	return s.loadWaiting(ctx, tx, joins, close)
}

// waitsAt reports whether a token of the batch waits at a join: it is tried again.
func (s *scene) waitsAt(n *node) bool {
	for _, t := range s.tokens {
		if t.joining && t.node == n {
			return true
		}
	}
	return false
}

// loadWaiting reads who waits at joins: those that count by their groups, the others one by one.
func (s *scene) loadWaiting(ctx context.Context, tx pgx.Tx, joins map[uuid.UUID]*joining, ids []uuid.UUID) error {
	type waiting struct {
		join  uuid.UUID
		group uuid.NullUUID
		n     int
	}
	rows, _ := query(ctx, tx, `
		SELECT a.join_id, t.parallel_group_id, count(*)
		FROM join_arrival a JOIN process_token t ON t.id = a.token_id
		WHERE a.join_id = ANY ($1) AND NOT a.surplus AND t.state = 'Waiting'
		GROUP BY a.join_id, t.parallel_group_id`, ids)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (w waiting, err error) {
		return w, row.Scan(&w.join, &w.group, &w.n)
	})
	if err != nil {
		return err
	}
	var groups []uuid.UUID
	for _, w := range all {
		if w.group.Valid {
			groups = append(groups, w.group.UUID)
		}
	}
	if err := s.loadGroups(ctx, tx, groups); err != nil {
		return err
	}
	for _, w := range all {
		joins[w.join].waiting[s.groups[w.group.UUID]] += w.n // none: nil
	}
	rows, _ = query(ctx, tx, `
		SELECT a.join_id, a.edge, t.id, t.parallel_group_id, t.version
		FROM join_arrival a JOIN process_token t ON t.id = a.token_id
		WHERE a.join_id = ANY ($1) AND a.surplus AND t.state = 'Waiting'
		ORDER BY t.id`, ids)
	var id uuid.UUID
	var inGroup uuid.NullUUID
	var t token
	in := map[*token]uuid.UUID{}
	if _, err := pgx.ForEachRow(rows, []any{&id, &t.edge, &t.id, &inGroup, &t.version}, func() error {
		known := t
		known.node, known.state, known.joining = joins[id].node, tokenWaiting, true
		joins[id].surplus = append(joins[id].surplus, &known)
		if inGroup.Valid {
			in[&known] = inGroup.UUID
		}
		return nil
	}); err != nil {
		return err
	}
	return s.enterGroups(ctx, tx, in)
}
