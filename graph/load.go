package graph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// A scene is everything that the decisions about a batch need to know.
type scene struct {
	instances map[uuid.UUID]*instance
	tokens    map[uuid.UUID]*token    // the tokens of the batch
	owners    map[uuid.UUID]*instance // of all tokens that were read, by the id of the token
	groups    map[uuid.UUID]*group
	hosts     map[*group]uuid.UUID // the token that stands for a group, for groups of a scope or each

	// Rows as they were read, to be linked once all of them are there: see load.
	definitions map[*instance]uuid.UUID
	untied      []untied
	parents     map[*group]uuid.UUID
}

// An untied is a token that is not linked yet to its instance, node and group.
type untied struct {
	*token
	owner  uuid.UUID
	at     string // the name of its node
	group  uuid.NullUUID
	wanted bool // it belongs to the batch
}

func newScene() *scene {
	return &scene{
		instances: map[uuid.UUID]*instance{}, tokens: map[uuid.UUID]*token{}, owners: map[uuid.UUID]*instance{},
		groups: map[uuid.UUID]*group{}, hosts: map[*group]uuid.UUID{},
		definitions: map[*instance]uuid.UUID{}, parents: map[*group]uuid.UUID{},
	}
}

// lock queues statements that lock and read instances: those of the tokens, those in instances, and those in created
// that are not started yet. They also read the tokens and their groups.
func (s *scene) lock(first *pgx.Batch, tokens, instances, created []uuid.UUID) {
	which, args := `ARRAY(SELECT instance_id FROM process_token WHERE id = ANY ($1)) || $2::uuid[]`, []any{tokens, instances}
	if len(created) > 0 {
		which, args = which+` || ARRAY(SELECT id FROM process_instance WHERE id = ANY ($3) AND status = 'CREATED')`, append(args, created)
	}
	ask(first, s.takeInstances, `
		SELECT id, process_definition_id, status, priority, input_payload, live_tokens, ready_tokens, joining_tokens, open_incidents,
		       depth, parent_token_id, parent_visit, undone_with_parent, coalesce(ending, ''), coalesce(ending_reason, ''), paused_at IS NOT NULL, corrected, coalesce(tenant_id, ''), coalesce(business_key, ''), version, process_trace(metadata)
		FROM process_instance
		WHERE id = ANY (`+which+`)
		ORDER BY id
		FOR NO KEY UPDATE`, args...)
	if len(tokens) == 0 {
		return
	}
	ask(first, func(rows pgx.Rows) error { return s.takeTokens(rows, true) }, `
		SELECT `+tokenColumns+`
		FROM process_token t
		WHERE t.id = ANY ($1)`, tokens)
	ask(first, s.takeGroups, `
		SELECT `+groupColumns+`
		FROM parallel_group g
		WHERE id = ANY (ARRAY(SELECT parallel_group_id FROM process_token WHERE id = ANY ($1)))`, tokens)
}

// load links what was read when the instances were locked, and reads what else the decisions need: definitions, live
// tokens, groups, joins, lists, records and facts.
func (s *scene) load(ctx context.Context, tx *transaction, e *Engine) error {
	if len(s.instances) == 0 {
		return nil
	}
	for _, step := range []func() error{
		func() error { return s.define(ctx, tx, e) },
		func() error { return s.survey(ctx, tx) },
		func() error { return s.tie(ctx, tx) },
		func() error { return s.ask(ctx, tx) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("load process instances: %w", err)
		}
	}
	return nil
}

// ask reads, in one round trip, which timers have not fired, the progress of lists and joins, what is to be undone
// next, and facts. Joins may take one more, for groups.
func (s *scene) ask(ctx context.Context, tx *transaction) error {
	asked := tx.statements()
	s.askTimers(asked)
	s.askEaches(asked)
	waiting := s.askJoins(asked)
	s.askDebts(asked)
	if err := s.askFacts(asked); err != nil {
		return err
	}
	if err := asked.send(ctx); err != nil {
		return err
	}
	return s.enterJoins(ctx, tx, waiting)
}

func (s *scene) takeInstances(rows pgx.Rows) error {
	_, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*instance, error) {
		i := newInstance()
		var definition uuid.UUID
		var parent uuid.NullUUID
		var visit *int64
		err := row.Scan(&i.id, &definition, &i.status, &i.priority, &i.input, &i.live, &i.ready, &i.joining, &i.incidents,
			&i.depth, &parent, &visit, &i.lends, &i.ending, &i.endingReason, &i.paused, &i.corrected, &i.tenant, &i.key, &i.version, &i.trace)
		if parent.Valid && visit != nil {
			i.parent = &parentRef{parent.UUID, *visit}
		}
		i.read = i.columns()
		s.instances[i.id], s.definitions[i] = i, definition
		return i, err
	})
	return err
}

// define links instances to their definitions.
func (s *scene) define(ctx context.Context, tx *transaction, e *Engine) error {
	processes, err := e.processes(ctx, tx, slices.Collect(maps.Values(s.definitions)))
	if err != nil {
		return err
	}
	for i, id := range s.definitions {
		i.process = processes[id]
		if i.version > maxVersion { // the database would refuse the next version, and the run that is settled is not to blame
			return &misplaced{i.id, fmt.Errorf("process_instance.version of %s is %d; see process_fault", i.id, i.version)}
		}
	}
	return nil
}

// surveyed returns the ids of the instances whose live tokens must all be read, see Process.survey.
func (s *scene) surveyed() (ids []uuid.UUID) {
	for _, i := range s.instances {
		if i.process.survey {
			ids = append(ids, i.id)
		}
	}
	return ids
}

// groupColumns uses no EXISTS: a plan for that may read the whole table once and hash it.
const groupColumns = `g.id, g.parent_group_id, g.node, g.live, g.host_token_id, (SELECT e.over_at FROM each_progress e WHERE e.group_id = g.id) IS NOT NULL`

func (s *scene) takeGroups(rows pgx.Rows) error {
	var g group
	var parent *uuid.UUID
	var host uuid.NullUUID
	_, err := pgx.ForEachRow(rows, []any{&g.id, &parent, &g.node, &g.live, &host, &g.restOfList}, func() error {
		if s.groups[g.id] != nil {
			return nil
		}
		known := g
		s.groups[g.id] = &known
		if host.Valid {
			s.hosts[&known] = host.UUID
		}
		if parent != nil {
			s.parents[&known] = *parent
		}
		return nil
	})
	return err
}

// loadGroups reads the groups with these ids, and all groups around them and around those known, unless they are known
// already. Then it links each group to its parent.
func (s *scene) loadGroups(ctx context.Context, tx *transaction, ids []uuid.UUID) error {
	ids = slices.DeleteFunc(slices.AppendSeq(ids, maps.Values(s.parents)), func(id uuid.UUID) bool { return s.groups[id] != nil })
	if len(ids) > 0 {
		asked := tx.statements()
		asked.plan(keptPlans)
		asked.ask(s.takeGroups, `
			WITH RECURSIVE g AS (
				SELECT id, parent_group_id, node, live, host_token_id
				FROM parallel_group
				WHERE id = ANY ($1)
				UNION
				SELECT o.id, o.parent_group_id, o.node, o.live, o.host_token_id
				FROM parallel_group o JOIN g ON o.id = g.parent_group_id
			)
			SELECT `+groupColumns+` FROM g`, ids)
		if err := asked.send(ctx); err != nil {
			return err
		}
	}
	for g, id := range s.parents {
		g.parent = s.groups[id]
	}
	clear(s.parents)
	return s.ringless(ctx, tx)
}

// ringless returns an error if a group lies within itself, because every loop over parents would then run for ever. The
// database raises the error, so that it is treated as a refusal by the database.
func (s *scene) ringless(ctx context.Context, tx *transaction) error {
	known := map[*group]bool{}
	for _, g := range s.groups {
		path := map[*group]bool{}
		for ; g != nil && !known[g]; g = g.parent {
			if path[g] {
				_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'parallel_group `+g.id.String()+` lies within itself'; END $$`)
				return err
			}
			path[g] = true
		}
		maps.Copy(known, path)
	}
	return nil
}

const tokenColumns = `t.id, t.instance_id, t.node, coalesce(t.edge, ''), t.state, t.mode, coalesce(t.item, -1), t.parallel_group_id, t.version,
		       (SELECT true FROM join_arrival a WHERE a.token_id = t.id LIMIT 1) IS NOT NULL AND t.state = 'Waiting' AS joining,
		       (SELECT true FROM incident x WHERE x.token_id = t.id AND x.resolved_at IS NULL LIMIT 1) IS NOT NULL AS stopped`

func (s *scene) takeTokens(rows pgx.Rows, wanted bool) error {
	var t token
	u := untied{wanted: wanted}
	_, err := pgx.ForEachRow(rows, []any{&t.id, &u.owner, &u.at, &t.edge, &t.state, &t.mode, &t.item, &u.group, &t.version, &t.joining, &t.stopped}, func() error {
		one := t
		one.hasItem = one.item >= 0
		u.token = &one
		s.untied = append(s.untied, u)
		return nil
	})
	return err
}

// survey reads all live tokens of the surveyed instances.
func (s *scene) survey(ctx context.Context, tx *transaction) error {
	surveyed := s.surveyed()
	if len(surveyed) == 0 {
		return nil
	}
	asked := tx.statements()
	asked.plan(ownPlans)
	asked.ask(func(rows pgx.Rows) error { return s.takeTokens(rows, false) }, `
		SELECT `+tokenColumns+`
		FROM process_token t
		WHERE t.instance_id = ANY ($1) AND t.state IN ('Created', 'Ready', 'Waiting')`, surveyed)
	return asked.send(ctx)
}

// tie links tokens to their instances, nodes and groups.
func (s *scene) tie(ctx context.Context, tx *transaction) error {
	slices.SortStableFunc(s.untied, func(a, b untied) int { return compareIDs(a.id, b.id) }) // of two rows with one id, that of the batch stays first
	s.untied = slices.CompactFunc(s.untied, func(a, b untied) bool { return a.id == b.id })
	known := map[uuid.UUID]*token{}
	within := map[*token]uuid.UUID{}
	for _, u := range s.untied {
		t, i := u.token, s.instances[u.owner]
		if i == nil {
			continue // the instance was deleted
		}
		if t.node = i.process.nodes[u.at]; t.node == nil {
			return &misplaced{i.id, fmt.Errorf("token %s is at node %.100q, which process %q version %d does not have; see process_fault",
				t.id, u.at, i.process.Definition.Process, i.process.Definition.Version)}
		}
		if t.version > maxVersion {
			return &misplaced{i.id, fmt.Errorf("process_token.version of %s is %d; see process_fault", t.id, t.version)}
		}
		known[t.id], s.owners[t.id], t.from = t, i, t.node
		if u.group.Valid {
			within[t] = u.group.UUID
		}
		if u.wanted {
			s.tokens[t.id] = t
		}
		if i.process.survey {
			i.loaded = append(i.loaded, t)
		}
	}
	if err := s.enterGroups(ctx, tx, within); err != nil {
		return err
	}
	for g, id := range s.hosts {
		g.host = known[id] // always found: a process with a scope or each is surveyed
	}
	return nil
}

// maxVersion is the largest version of an instance or token that is accepted. The engine never counts that far.
const maxVersion = 1 << 62

// A misplaced error is about one instance, whose rows are inconsistent.
type misplaced struct {
	instance uuid.UUID
	error
}

func (e *misplaced) Unwrap() error { return e.error }

// blame adds to a misplaced error a run of the batch that concerns the instance, as a leasing.SettleError, so that the
// other runs are settled without it. It returns other errors unchanged.
func (s *scene) blame(err error, batch []leasing.Settlement) error {
	var m *misplaced
	if !errors.As(err, &m) {
		return err
	}
	for _, settled := range batch {
		var of subjects
		_ = of.add(settled)
		if slices.Contains(of.instances, m.instance) || slices.Contains(of.created, m.instance) || slices.ContainsFunc(s.untied, func(u untied) bool { return u.owner == m.instance && slices.Contains(of.tokens, u.id) }) {
			return &leasing.SettleError{Run: settled.Outcome.ID, Err: err}
		}
	}
	return err
}

// enterGroups links tokens to their groups. It reads the groups that are not known yet.
func (s *scene) enterGroups(ctx context.Context, tx *transaction, within map[*token]uuid.UUID) error {
	if err := s.loadGroups(ctx, tx, slices.Collect(maps.Values(within))); err != nil {
		return err
	}
	for t, g := range within {
		t.group = s.groups[g]
	}
	return nil
}

// askEaches queries the progress of the lists whose elements are in the batch, together with as many next elements as
// the batch may start. It reads each list once, because every use of a long list decompresses all of it.
func (s *scene) askEaches(asked *statements) {
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
		return
	}
	s.askElements(asked, stopped)
	asked.plan(keptPlans)
	asked.ask(s.takeEaches, `
		SELECT e.group_id, e.instance_id, e.next, e.done, e.total, e.over_at IS NOT NULL, CASE jsonb_typeof(e.list) WHEN 'array' THEN jsonb_array_length(e.list) ELSE -1 END,
		       jsonb_path_query_array(e.list, '$[$from to $to]', jsonb_build_object('from', greatest(e.next, 0), 'to', least(e.next::bigint + $2, e.total) - 1))
		FROM (SELECT p.*, p.items #> '{}' AS list FROM each_progress p WHERE p.group_id = ANY ($1) OFFSET 0) e`, ids, len(s.tokens))
}

func (s *scene) takeEaches(rows pgx.Rows) error {
	var id, owner uuid.UUID
	var p progress
	var length int
	var items []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &owner, &p.next, &p.done, &p.total, &p.over, &length, &items}, func() error {
		known := p
		known.group, known.from = s.groups[id], p.next
		if err := json.Unmarshal(items, &known.items); err != nil {
			return err
		}
		of := s.ofGroup(known.group)
		switch {
		case of.id != owner:
			known.problem = "each_progress.instance_id is not that of its group"
		case p.over:
		case length < 0:
			known.problem = "each_progress.items is no list"
		case p.total != length:
			known.problem = fmt.Sprintf("each_progress.total is %d, and the list has %d elements", p.total, length)
		case p.next != p.done+known.group.live || p.done < 0 || p.next > p.total:
			known.problem = fmt.Sprintf("each_progress.next is %d and done is %d, of %d elements, with %d under way", p.next, p.done, p.total, known.group.live)
		}
		of.eaches = append(of.eaches, &known)
		return nil
	})
	return err
}

// ofGroup returns the instance of a group, found through a token of the batch in that group.
func (s *scene) ofGroup(g *group) *instance {
	for id, t := range s.tokens {
		if t.group == g {
			return s.owners[id]
		}
	}
	return nil
}

// askElements queries the list elements of tokens that an incident has stopped, for their retry.
func (s *scene) askElements(asked *statements, tokens []uuid.UUID) {
	if len(tokens) == 0 {
		return
	}
	asked.plan(keptPlans)
	asked.ask(s.takeElements, `
		SELECT t.id, e.items->t.item
		FROM process_token t JOIN each_progress e ON e.group_id = t.parallel_group_id
		WHERE t.id = ANY ($1)`, tokens)
}

func (s *scene) takeElements(rows pgx.Rows) error {
	var id uuid.UUID
	var element []byte
	_, err := pgx.ForEachRow(rows, []any{&id, &element}, func() error {
		s.tokens[id].element = slices.Clone(element)
		return nil
	})
	return err
}

// askDebts queries, for each token that compensates, which record it undoes next. In an instance that is ending, these
// are all records. A token at a throw undoes what was done in its own scope, and in scopes within that are over.
func (s *scene) askDebts(asked *statements) {
	var tokens, owners []uuid.UUID
	for id, t := range s.tokens {
		if t.mode == compensation {
			tokens, owners = append(tokens, id), append(owners, s.owners[id].id)
		}
	}
	if len(tokens) == 0 {
		return
	}
	asked.plan(ownPlans)
	// First query whether an undo step is still under way. In this order the second query sees the records that a
	// called instance has lent if it ends between the two.
	asked.ask(func(rows pgx.Rows) error {
		var owner uuid.UUID
		_, err := pgx.ForEachRow(rows, []any{&owner}, func() error {
			s.instances[owner].undoing = true
			return nil
		})
		return err
	}, `
		SELECT c.instance_id
		FROM compensation_record c JOIN workflow_run r ON r.id = c.undo_run_id
		WHERE c.instance_id = ANY ($1) AND c.status = 'Pending' AND r.finished_at IS NULL
		UNION
		SELECT p.id -- a called instance undoes what it has done itself, or lends it when it is over
		FROM process_instance c JOIN process_instance p ON p.id = c.parent_process_instance_id
		WHERE p.id = ANY ($1) AND c.undone_with_parent AND c.completed_at IS NULL
		  AND (p.ending IS NOT NULL
		       OR NOT EXISTS (SELECT FROM process_token w WHERE w.id = c.parent_token_id AND w.state = 'Waiting' AND w.version = c.parent_visit) -- nobody waits for it any more
		          AND EXISTS (SELECT FROM process_token t WHERE t.id = ANY ($2) AND t.instance_id = p.id AND process_undoes(t.id, c.parent_token_id)))`, owners, tokens)
	asked.ask(func(rows pgx.Rows) error {
		var id, record uuid.UUID
		_, err := pgx.ForEachRow(rows, []any{&id, &record}, func() error {
			s.owners[id].debts[s.tokens[id]] = record
			return nil
		})
		return err
	}, `
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
}
