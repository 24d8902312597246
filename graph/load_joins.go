package graph

import (
	"context"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// waitingTokens are those that wait at joins, as they are read.
type waitingTokens struct {
	joins   map[uuid.UUID]*joining // by their ids, which have not fired
	counted []counted
	surplus map[*token]uuid.UUID // those that do not count, with their groups
}

// counted are tokens of a group that wait at a join.
type counted struct {
	join  uuid.UUID
	group uuid.NullUUID
	n     int
}

// askJoins asks for what the decisions of a batch may need to know of joins, and for no more. A join of a thousand branches has
// a thousand arrivals: if each read all that have come before, the join would cost a million rows. So it asks for
//
//   - the activations near the tokens of the batch: one row each, with the number that have joined (nearJoins);
//   - over which of those edges somebody has come already over which a token of the batch may come: a second arrival over an
//     edge does not count;
//   - how many wait, by group, and the surplus, but only for joins that the batch may fire, as joined + coming says. Only
//     firing ends those who wait. If coming is not known, it is taken for enough.
func (s *scene) askJoins(asked *statements) *waitingTokens {
	w := &waitingTokens{joins: map[uuid.UUID]*joining{}, surplus: map[*token]uuid.UUID{}}
	near, edges := s.near()
	if len(near) == 0 {
		return w
	}
	var owners, groups []uuid.UUID
	var nodes []string
	var coming []int // how many tokens of the batch may arrive there
	for a, many := range near {
		n := 0
		for _, e := range a.node.incoming {
			n += len(s.tokens) * count(edges[e.id])
		}
		if many || a.node.Join.Taken || s.waitsAt(a.node) {
			n = maxMoves // or it may fire without any
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

// near returns the joins near the tokens of the batch, with whether more than one token may arrive there over an edge for each
// of these; and the edges that lead there. Where every live token has to be known, each join is near.
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
				joins[a] = false // near all the same
			}
		}
	}
	return joins, edges
}

// nearJoins are the latest rounds of the joins at given nodes, in given groups.
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
		if known.fired && known.node.Join.Need == 0 { // what comes now is the next round's
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

// waitsAt reports whether a token of the batch waits at a join: it is tried again.
func (s *scene) waitsAt(n *node) bool {
	for _, t := range s.tokens {
		if t.joining && t.node == n {
			return true
		}
	}
	return false
}

// enterJoins tells the joins who waits there, by their groups, which are read as far as they are not there.
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
		w.joins[c.join].waiting[s.groups[c.group.UUID]] += c.n // none: nil
	}
	return s.enterGroups(ctx, tx, w.surplus)
}

// token returns a token that is known one by one already; nil: it is not.
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
