package graph

import (
	"context"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// waitingTokens collects the tokens that wait at joins while they are read.
type waitingTokens struct {
	joins   map[uuid.UUID]*joining // activations that have not fired, by id
	counted []counted
	surplus map[*token]uuid.UUID // tokens that arrived over an edge which has an arrival already (see joining.surplus), with the ids of their groups
}

// A counted is the number of tokens of one group that wait at a join.
type counted struct {
	join  uuid.UUID
	group uuid.NullUUID
	n     int
}

// askJoins queries what the decisions of a batch may need to know about joins, and no more. A join of a thousand
// branches has a thousand arrivals. If each arrival read all earlier ones, the join would read a million rows. So
// askJoins queries
//
//   - the activations near the tokens of the batch: one row each, with the number of tokens that have joined
//     (nearJoins);
//   - of the edges over which a token of the batch may arrive, those over which one has arrived already, because a
//     second arrival over an edge does not count;
//   - how many tokens wait, by group, and the surplus arrivals, but only for joins that the batch may fire
//     (joined + coming >= expected), because the waiting tokens matter only when the join fires. If the number coming
//     is not known, the join is assumed to be one that may fire.
func (s *scene) askJoins(asked *statements) *waitingTokens {
	w := &waitingTokens{joins: map[uuid.UUID]*joining{}, surplus: map[*token]uuid.UUID{}}
	near, edges := s.near()
	if len(near) == 0 {
		return w
	}
	var owners, groups []uuid.UUID
	var nodes []string
	var coming []int // how many tokens of the batch may arrive at the join
	for a, many := range near {
		n := 0
		for _, e := range a.node.incoming {
			n += len(s.tokens) * count(edges[e.id])
		}
		if many || a.node.Join.Taken || s.waitsAt(a.node) {
			n = maxMoves // the number is not known, or the join may fire without an arrival
		}
		owners, nodes, coming = append(owners, a.owner), append(nodes, a.node.name), append(coming, n)
	}
	for id := range s.groups {
		groups = append(groups, id)
	}
	over := slices.Collect(maps.Keys(edges))
	asked.plan(keptPlans)
	asked.ask(func(rows pgx.Rows) error { return s.takeJoins(rows, w) }, nearJoins+`
		SELECT id, instance_id, node, parallel_group_id, round, expected, joined, fired FROM j ORDER BY instance_id, node, parallel_group_id`, owners, nodes, groups, coming)
	asked.ask(w.takeArrivals, nearJoins+`
		SELECT a.join_id, a.edge
		FROM j JOIN join_arrival a ON a.join_id = j.id
		WHERE NOT j.fired AND a.edge = ANY ($5) AND NOT a.surplus`, owners, nodes, groups, coming, over)
	asked.ask(w.takeCounts, nearJoins+`
		SELECT a.join_id, t.parallel_group_id, count(*)
		FROM j JOIN join_arrival a ON a.join_id = j.id JOIN process_token t ON t.id = a.token_id
		WHERE NOT j.fired AND j.joined + j.coming >= j.expected AND NOT a.surplus AND t.state = 'Waiting'
		GROUP BY a.join_id, t.parallel_group_id`, owners, nodes, groups, coming)
	asked.ask(func(rows pgx.Rows) error { return s.takeSurplus(rows, w) }, nearJoins+`
		SELECT a.join_id, a.edge, t.id, t.parallel_group_id, t.version
		FROM j JOIN join_arrival a ON a.join_id = j.id JOIN process_token t ON t.id = a.token_id
		WHERE NOT j.fired AND j.joined + j.coming >= j.expected AND a.surplus AND t.state = 'Waiting'
		ORDER BY t.id`, owners, nodes, groups, coming)
	return w
}

// A joinAt is a join node of an instance.
type joinAt struct {
	owner uuid.UUID
	node  *node
}

// near returns the joins at which tokens of the batch may arrive, and the edges over which they may. The value of a
// join is true if a single token of the batch may lead to several arrivals over one edge, because it may fork on the
// way. In a process that is surveyed (Process.survey), all joins count as near.
func (s *scene) near() (joins map[joinAt]bool, edges map[string]bool) {
	joins, edges = map[joinAt]bool{}, map[string]bool{}
	for id, t := range s.tokens {
		ahead := t.node.ahead()
		for _, j := range ahead.joins {
			a := joinAt{s.owners[id].id, j}
			joins[a] = joins[a] || ahead.many[j]
		}
		for _, e := range ahead.edges {
			edges[e] = true
		}
	}
	for _, i := range s.instances {
		if !i.process.survey {
			continue
		}
		for _, n := range i.process.nodes {
			if a := (joinAt{i.id, n}); n.kind == join && !joins[a] {
				joins[a] = false // no token arrives, but the join may fire when one ends
			}
		}
	}
	return joins, edges
}

// nearJoins selects the latest round of each join at given nodes, in given groups.
const nearJoins = `
		WITH j AS MATERIALIZED (
			SELECT DISTINCT ON (j.instance_id, j.node, j.parallel_group_id)
			       j.id, j.instance_id, j.node, j.parallel_group_id, j.round, j.expected, j.joined, j.fired, w.coming
			FROM unnest($1::uuid[], $2::text[], $4::int[]) AS w (instance_id, node, coming) JOIN parallel_join j USING (instance_id, node)
			WHERE j.parallel_group_id IS NULL OR j.parallel_group_id = ANY ($3)
			ORDER BY j.instance_id, j.node, j.parallel_group_id, j.round DESC
		)`

func (s *scene) takeJoins(rows pgx.Rows, w *waitingTokens) error {
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
		if known.fired && known.node.Join.Need == 0 { // an arrival now belongs to the next round
			known = joining{node: known.node, group: known.group, round: known.round + 1, expected: known.node.expects(), has: known.has, waiting: known.waiting}
		}
		i.activations++
		known.nth = i.activations
		i.joins[joinKey{node, known.group}] = &known
		if !known.fired && known.id != uuid.Nil {
			w.joins[known.id] = &known
		}
		return nil
	})
	return err
}

func (w *waitingTokens) takeArrivals(rows pgx.Rows) error {
	var id uuid.UUID
	var edge string
	_, err := pgx.ForEachRow(rows, []any{&id, &edge}, func() error {
		w.joins[id].has[edge] = true
		return nil
	})
	return err
}

func (w *waitingTokens) takeCounts(rows pgx.Rows) error {
	var c counted
	_, err := pgx.ForEachRow(rows, []any{&c.join, &c.group, &c.n}, func() error {
		w.counted = append(w.counted, c)
		return nil
	})
	return err
}

func (s *scene) takeSurplus(rows pgx.Rows, w *waitingTokens) error {
	var id uuid.UUID
	var inGroup uuid.NullUUID
	var t token
	_, err := pgx.ForEachRow(rows, []any{&id, &t.edge, &t.id, &inGroup, &t.version}, func() error {
		if there := s.token(t.id); there != nil {
			w.joins[id].surplus = append(w.joins[id].surplus, there)
			return nil
		}
		known := t
		known.node, known.state, known.joining = w.joins[id].node, tokenWaiting, true
		w.joins[id].surplus = append(w.joins[id].surplus, &known)
		if inGroup.Valid {
			w.surplus[&known] = inGroup.UUID
		}
		return nil
	})
	return err
}

// waitsAt reports whether a token of the batch waits at the join n, which happens when an incident at a join is
// retried.
func (s *scene) waitsAt(n *node) bool {
	for _, t := range s.tokens {
		if t.joining && t.node == n {
			return true
		}
	}
	return false
}

// enterJoins adds to each join the number of waiting tokens by group. It reads the groups that are not known yet.
func (s *scene) enterJoins(ctx context.Context, tx *transaction, w *waitingTokens) error {
	var groups []uuid.UUID
	for _, c := range w.counted {
		if c.group.Valid {
			groups = append(groups, c.group.UUID)
		}
	}
	if err := s.loadGroups(ctx, tx, groups); err != nil {
		return err
	}
	for _, c := range w.counted {
		w.joins[c.join].waiting[s.groups[c.group.UUID]] += c.n // a token without a group counts for nil
	}
	return s.enterGroups(ctx, tx, w.surplus)
}

// token returns the token with an id if it was read as a token of its own, or nil.
func (s *scene) token(id uuid.UUID) *token {
	if t := s.tokens[id]; t != nil || s.owners[id] == nil {
		return t
	}
	for _, t := range s.owners[id].loaded {
		if t.id == id {
			return t
		}
	}
	return nil
}
