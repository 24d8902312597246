package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/lease"
	"github.com/simple-workflow/simple-workflow/run"
)

// Lock locks the instances that a batch moves, in order of id: whoever advances an instance
// holds its row. It comes first in a settle transaction, before any run is touched.
func (e *Engine) Lock(ctx context.Context, tx pgx.Tx, batch []lease.Settlement) error {
	tokens, instances, err := concerned(batch)
	if err != nil || len(tokens)+len(instances) == 0 {
		return err
	}
	_, err = tx.Exec(ctx, `
		SELECT FROM process_instance
		WHERE id = ANY (ARRAY(SELECT instance_id FROM process_token WHERE id = ANY ($1)) || $2::uuid[])
		ORDER BY id
		FOR NO KEY UPDATE`, tokens, instances)
	if err != nil {
		return fmt.Errorf("lock process instances: %w", err)
	}
	return nil
}

// concerned lists the tokens and instances that a batch is about.
func concerned(batch []lease.Settlement) (tokens, instances []uuid.UUID, err error) {
	tokens, instances = []uuid.UUID{}, []uuid.UUID{} // not null, in which nothing is found
	for _, s := range batch {
		switch {
		case s.Verdict != run.Succeed && s.Verdict != run.Fail:
		case s.Step != uuid.Nil:
			tokens = append(tokens, s.Step)
		case s.Type == StartType:
			var p StartPayload
			problem := json.Unmarshal(s.Payload, &p)
			if s.Verdict == run.Succeed {
				err = errors.Join(err, problem)
			}
			if problem == nil && p.Parent != nil {
				tokens, instances = append(tokens, p.Parent.Token), append(instances, p.Parent.Instance)
			}
		case s.Verdict == run.Fail:
		case s.Type == cutOffType:
			var c cutOff
			err = errors.Join(err, json.Unmarshal(s.Payload, &c))
			tokens = append(tokens, c.Token)
		case s.Type == CompleteTaskType:
			var r taskRef
			err = errors.Join(err, json.Unmarshal(s.Result, &r))
			tokens, instances = append(tokens, r.Token), append(instances, r.Instance)
		case s.Type == CancelType:
			var p CancelPayload
			err = errors.Join(err, json.Unmarshal(s.Payload, &p))
			instances = append(instances, p.Instance)
		case s.Type == RetryType:
			var r retried
			err = errors.Join(err, json.Unmarshal(s.Result, &r))
			instances = append(instances, r.Instance)
			if r.Token != uuid.Nil {
				tokens = append(tokens, r.Token)
			}
		}
	}
	return tokens, instances, err
}

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
		func() error { return s.loadGroups(ctx, tx, tokens) },
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
	rows, _ := tx.Query(ctx, `
		SELECT id, process_definition_id, status, priority, input_payload, live_tokens, ready_tokens, joining_tokens, open_incidents,
		       depth, parent_token_id, parent_visit, coalesce(ending, ''), coalesce(ending_reason, ''), paused_at IS NOT NULL
		FROM process_instance
		WHERE id = ANY (ARRAY(SELECT instance_id FROM process_token WHERE id = ANY ($1)) || $2::uuid[])`, tokens, ids)
	definitions := map[*instance]uuid.UUID{}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*instance, error) {
		i := newInstance()
		var definition uuid.UUID
		var parent uuid.NullUUID
		var visit *int64
		err := row.Scan(&i.id, &definition, &i.status, &i.priority, &i.input, &i.live, &i.ready, &i.joining, &i.incidents,
			&i.depth, &parent, &visit, &i.ending, &i.endingReason, &i.paused)
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

func newInstance() *instance {
	return &instance{facts: facts{steps: map[string]any{}}, joins: map[joinKey]*joining{}}
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

// loadGroups reads the groups of the tokens and all that these lie within.
func (s *scene) loadGroups(ctx context.Context, tx pgx.Tx, tokens []uuid.UUID) error {
	rows, _ := tx.Query(ctx, `
		SELECT DISTINCT parallel_group_id
		FROM process_token
		WHERE (id = ANY ($1) OR instance_id = ANY ($2) AND state IN ('Created', 'Ready', 'Waiting')) AND parallel_group_id IS NOT NULL`,
		tokens, s.surveyed())
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return err
	}
	return s.fetchGroups(ctx, tx, ids)
}

// fetchGroups reads groups and all that they lie within, as far as they are not there.
func (s *scene) fetchGroups(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
	ids = slices.DeleteFunc(ids, func(id uuid.UUID) bool { return s.groups[id] != nil })
	if len(ids) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, `
		WITH RECURSIVE chain AS (
			SELECT id, parent_group_id, node, live, host_token_id
			FROM parallel_group
			WHERE id = ANY ($1)
			UNION
			SELECT g.id, g.parent_group_id, g.node, g.live, g.host_token_id
			FROM parallel_group g JOIN chain c ON g.id = c.parent_group_id
		)
		SELECT id, parent_group_id, node, live, host_token_id FROM chain`, ids)
	parents := map[*group]uuid.UUID{}
	var g group
	var parent *uuid.UUID
	var host uuid.NullUUID
	_, err := pgx.ForEachRow(rows, []any{&g.id, &parent, &g.node, &g.live, &host}, func() error {
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
	rows, _ := tx.Query(ctx, `
		SELECT t.id, t.instance_id, t.node, coalesce(t.edge, ''), t.state, t.mode, coalesce(t.item, -1), t.parallel_group_id, t.version,
		       t.id = ANY ($1) AS wanted,
		       EXISTS (SELECT FROM join_arrival a WHERE a.token_id = t.id) AND t.state = 'Waiting' AS joining,
		       EXISTS (SELECT FROM incident x WHERE x.token_id = t.id AND x.resolved_at IS NULL) AS stopped
		FROM process_token t
		WHERE t.id = ANY ($1) OR t.instance_id = ANY ($2) AND t.state IN ('Created', 'Ready', 'Waiting')
		ORDER BY t.id`, ids, s.surveyed())
	var t token
	var owner uuid.UUID
	var node string
	var inGroup *uuid.UUID
	var wanted bool
	known := map[uuid.UUID]*token{}
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
		if inGroup != nil {
			one.group = s.groups[*inGroup]
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
	for g, id := range s.hosts {
		g.host = known[id] // with scopes and eaches, every live token is known
	}
	return err
}

// loadEaches reads how far the lists have come whose elements are in the batch.
func (s *scene) loadEaches(ctx context.Context, tx pgx.Tx, batch int) error {
	var ids []uuid.UUID
	for _, t := range s.tokens {
		if t.hasItem && t.group != nil {
			ids = append(ids, t.group.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT e.group_id, e.instance_id, e.next, e.done, e.total,
		       coalesce((SELECT jsonb_agg(e.items->k ORDER BY k) FROM generate_series(e.next, least(e.next + $2, e.total) - 1) AS k), '[]')
		FROM each_progress e
		WHERE e.group_id = ANY ($1)`, ids, batch)
	var id, owner uuid.UUID
	var p progress
	var items []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &owner, &p.next, &p.done, &p.total, &items}, func() error {
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

// loadDebts reads what is undone next, where something is being undone.
func (s *scene) loadDebts(ctx context.Context, tx pgx.Tx) error {
	var owners []uuid.UUID
	for id, t := range s.tokens {
		if t.mode == compensation {
			owners = append(owners, s.owners[id].id)
		}
	}
	if len(owners) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT DISTINCT ON (instance_id) instance_id, id
		FROM compensation_record
		WHERE instance_id = ANY ($1) AND status = 'Pending' AND undo_run_id IS NULL
		ORDER BY instance_id, "order" DESC`, owners)
	var owner uuid.UUID
	var record uuid.UUID
	if _, err := pgx.ForEachRow(rows, []any{&owner, &record}, func() error {
		s.instances[owner].debt = record
		return nil
	}); err != nil {
		return err
	}
	rows, _ = tx.Query(ctx, `
		SELECT DISTINCT c.instance_id
		FROM compensation_record c JOIN workflow_run r ON r.id = c.undo_run_id
		WHERE c.instance_id = ANY ($1) AND c.status = 'Pending' AND r.finished_at IS NULL`, owners)
	_, err := pgx.ForEachRow(rows, []any{&owner}, func() error {
		s.instances[owner].undoing = true
		return nil
	})
	return err
}

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
	rows, _ := tx.Query(ctx, `
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
	rows, _ := tx.Query(ctx, `
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
		if j.node.Join.Taken || j.joined+batch*over >= j.expected {
			close = append(close, id)
		}
	}
	if len(close) == 0 {
		return nil
	}
	return s.loadWaiting(ctx, tx, joins, close)
}

// loadWaiting reads who waits at joins: those that count by their groups, the others one by one.
func (s *scene) loadWaiting(ctx context.Context, tx pgx.Tx, joins map[uuid.UUID]*joining, ids []uuid.UUID) error {
	type waiting struct {
		join  uuid.UUID
		group uuid.NullUUID
		n     int
	}
	rows, _ := tx.Query(ctx, `
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
	if err := s.fetchGroups(ctx, tx, groups); err != nil {
		return err
	}
	for _, w := range all {
		joins[w.join].waiting[s.groups[w.group.UUID]] += w.n // none: nil
	}
	rows, _ = tx.Query(ctx, `
		SELECT a.join_id, a.edge, t.id, t.parallel_group_id, t.version
		FROM join_arrival a JOIN process_token t ON t.id = a.token_id
		WHERE a.join_id = ANY ($1) AND a.surplus AND t.state = 'Waiting'
		ORDER BY t.id`, ids)
	var id uuid.UUID
	var in uuid.NullUUID
	var t token
	owners := map[*token]uuid.UUID{}
	if _, err := pgx.ForEachRow(rows, []any{&id, &t.edge, &t.id, &in, &t.version}, func() error {
		known := t
		known.node, known.state, known.joining = joins[id].node, tokenWaiting, true
		joins[id].surplus = append(joins[id].surplus, &known)
		if in.Valid {
			owners[&known] = in.UUID
		}
		return nil
	}); err != nil {
		return err
	}
	groups = groups[:0]
	for _, g := range owners {
		groups = append(groups, g)
	}
	if err := s.fetchGroups(ctx, tx, groups); err != nil {
		return err
	}
	for t, g := range owners {
		t.group = s.groups[g]
	}
	return nil
}

// loadFacts reads the latest results of the nodes that expressions on the way may read.
func (s *scene) loadFacts(ctx context.Context, tx pgx.Tx) error {
	var owners []uuid.UUID
	var nodes []string
	wanted := map[*instance]map[string]bool{}
	for id, t := range s.tokens {
		i := s.owners[id]
		if wanted[i] == nil {
			wanted[i] = map[string]bool{}
		}
		names := t.node.ahead.reads
		if t.node.ahead.all {
			names = nil
			for name := range i.process.nodes {
				names = append(names, name)
			}
		}
		for _, name := range names {
			if !wanted[i][name] {
				wanted[i][name] = true
				owners, nodes = append(owners, i.id), append(nodes, name)
			}
		}
	}
	for id, t := range s.tokens {
		if i := s.owners[id]; t.node.ahead.input && i.facts.input == nil {
			if err := json.Unmarshal(i.input, &i.facts.input); err != nil {
				return err
			}
		}
	}
	if len(owners) == 0 {
		return nil
	}
	if err := s.loadTaskFacts(ctx, tx, owners, nodes); err != nil {
		return err
	}
	if err := s.loadEachFacts(ctx, tx, owners, nodes); err != nil {
		return err
	}
	rows, _ := tx.Query(ctx, `
		SELECT DISTINCT ON (t.instance_id, r.node) t.instance_id, r.node, r.status, r.result, r.error
		FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node)
		JOIN process_token t USING (instance_id)
		JOIN workflow_run r ON r.token_id = t.id AND r.node = w.node COLLATE "C" AND r.status IN ('succeeded', 'failed')
		ORDER BY t.instance_id, r.node, r.finished_at DESC, r.id DESC`, owners, nodes)
	var owner uuid.UUID
	var node, status string
	var result, problem []byte
	_, err := pgx.ForEachRow(rows, []any{&owner, &node, &status, &result, &problem}, func() error {
		i := s.instances[owner]
		if status == "failed" {
			var f run.Failure
			if problem != nil {
				if err := json.Unmarshal(problem, &f); err != nil {
					return err
				}
			}
			i.facts.steps[node] = failure(f.Code, f.Message)
			return nil
		}
		// A mapping that fails has stopped its token, or does so now: there is no fact then.
		if value, err := fact(i.process.nodes[node], result); err == nil {
			i.facts.steps[node] = value
		}
		return nil
	})
	return err
}

// loadTaskFacts reads what people have answered.
func (s *scene) loadTaskFacts(ctx context.Context, tx pgx.Tx, owners []uuid.UUID, nodes []string) error {
	owners, nodes = s.ofKind(human, owners, nodes)
	if len(owners) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT DISTINCT ON (k.instance_id, k.node) k.instance_id, k.node, k.output
		FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node) JOIN user_task k USING (instance_id, node)
		WHERE k.state = 'completed'
		ORDER BY k.instance_id, k.node, k.completed_at DESC, k.id DESC`, owners, nodes)
	return s.takeFacts(rows)
}

// loadEachFacts reads the results for the elements of lists, in the order of the elements.
func (s *scene) loadEachFacts(ctx context.Context, tx pgx.Tx, owners []uuid.UUID, nodes []string) error {
	owners, nodes = s.ofKind(each, owners, nodes)
	if len(owners) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT e.instance_id, e.node, coalesce((
			SELECT jsonb_agg(CASE r.status WHEN 'succeeded' THEN r.result END ORDER BY k)
			FROM generate_series(0, e.total - 1) AS k
			LEFT JOIN process_token t ON t.parallel_group_id = e.group_id AND t.item = k
			LEFT JOIN workflow_run r ON r.token_id = t.id AND r.node = e.node || '/item'), '[]')
		FROM (SELECT DISTINCT ON (instance_id, node) *
		      FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node) JOIN each_progress USING (instance_id, node)
		      ORDER BY instance_id, node, group_id DESC) AS e`, owners, nodes)
	return s.takeFacts(rows)
}

// ofKind returns those nodes that are of a kind.
func (s *scene) ofKind(k kind, owners []uuid.UUID, nodes []string) (ids []uuid.UUID, names []string) {
	for n := range owners {
		if s.instances[owners[n]].process.nodes[nodes[n]].kind == k {
			ids, names = append(ids, owners[n]), append(names, nodes[n])
		}
	}
	return ids, names
}

func (s *scene) takeFacts(rows pgx.Rows) error {
	var owner uuid.UUID
	var node string
	var output []byte
	_, err := pgx.ForEachRow(rows, []any{&owner, &node, &output}, func() error {
		i := s.instances[owner]
		if value, err := fact(i.process.nodes[node], output); err == nil {
			i.facts.steps[node] = value
		}
		return nil
	})
	return err
}
