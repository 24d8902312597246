package graph

import (
	"encoding/json"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// askFacts queries the latest results of the nodes that expressions ahead of the tokens may read. If a node has facts
// of several kinds, the kind that is read last counts: results of tasks and lists, then of runs, then corrections.
func (s *scene) askFacts(asked *statements) error {
	var owners []uuid.UUID
	var nodes []string
	wanted := map[*instance]map[string]bool{}
	for id, t := range s.tokens {
		i := s.owners[id]
		if wanted[i] == nil {
			wanted[i] = map[string]bool{}
		}
		names := t.node.ahead().reads
		if t.stopped {
			names = append([]string{t.node.name}, names...) // an operator may have corrected the fact it stopped for
		}
		if t.node.ahead().all {
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
		if i := s.owners[id]; t.node.ahead().input && i.facts.input == nil {
			if err := json.Unmarshal(i.input, &i.facts.input); err != nil {
				return err
			}
		}
	}
	if len(owners) > 0 {
		s.askFactsOf(asked, owners, nodes)
	}
	return nil
}

// askFactsOf queries the latest results of nodes: of nodes[n] in the instance owners[n].
func (s *scene) askFactsOf(asked *statements, owners []uuid.UUID, nodes []string) {
	asked.plan(ownPlans)
	s.askTaskFacts(asked, owners, nodes)
	s.askEachFacts(asked, owners, nodes)
	asked.ask(s.takeRuns, `
		SELECT DISTINCT ON (t.instance_id, r.node) t.instance_id, r.node, r.status, r.result, r.error
		FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node)
		JOIN process_token t USING (instance_id)
		JOIN workflow_run r ON r.token_id = t.id AND r.node = w.node COLLATE "C" AND r.status IN ('succeeded', 'failed')
		ORDER BY t.instance_id, r.node, r.finished_at DESC, r.id DESC`, owners, nodes)
	s.askCorrections(asked, owners, nodes)
}

// takeRuns reads the results and failures of steps.
func (s *scene) takeRuns(rows pgx.Rows) error {
	var owner uuid.UUID
	var node, status string
	var result, problem []byte
	_, err := pgx.ForEachRow(rows, []any{&owner, &node, &status, &result, &problem}, func() error {
		i := s.instances[owner]
		if status == "failed" {
			var f settling.Failure
			if problem != nil {
				if err := json.Unmarshal(problem, &f); err != nil {
					return err
				}
			}
			i.know(node, failure(f.Code, f.Message))
			return nil
		}
		i.remember(i.process.nodes[node], result)
		return nil
	})
	return err
}

// askCorrections queries corrected facts. A correction does not count if a visit of its node has ended since.
func (s *scene) askCorrections(asked *statements, owners []uuid.UUID, nodes []string) {
	var in []uuid.UUID
	var at []string
	for n, id := range owners {
		if s.instances[id].corrected {
			in, at = append(in, id), append(at, nodes[n])
		}
	}
	if len(in) == 0 {
		return
	}
	asked.ask(s.takeCorrections, `
		SELECT DISTINCT ON (c.instance_id, c.node) c.instance_id, c.node, c.value
		FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node) JOIN process_correction c USING (instance_id, node)
		WHERE NOT EXISTS (SELECT FROM process_token t JOIN workflow_run r ON r.token_id = t.id
		                  WHERE t.instance_id = c.instance_id AND r.finished_at > c.created_at AND r.status IN ('succeeded', 'failed')
		                    AND (r.node = c.node
		                         OR r.node = c.node || '/item' AND NOT EXISTS ( -- what is left of a list that is over
		                             SELECT FROM each_progress e WHERE e.group_id = t.parallel_group_id AND e.over_at < r.finished_at)))
		  AND NOT EXISTS (SELECT FROM user_task k WHERE k.instance_id = c.instance_id AND k.node = c.node AND k.completed_at > c.created_at)
		ORDER BY c.instance_id, c.node, c.id DESC`, in, at)
}

func (s *scene) takeCorrections(rows pgx.Rows) error {
	var owner uuid.UUID
	var node string
	var value []byte
	_, err := pgx.ForEachRow(rows, []any{&owner, &node, &value}, func() error {
		var known any
		if err := json.Unmarshal(value, &known); err != nil {
			return err
		}
		s.instances[owner].know(node, known)
		return nil
	})
	return err
}

// askTaskFacts queries the outputs of user tasks.
func (s *scene) askTaskFacts(asked *statements, owners []uuid.UUID, nodes []string) {
	owners, nodes = s.ofKind(human, owners, nodes)
	if len(owners) == 0 {
		return
	}
	asked.ask(s.takeFacts, `
		SELECT DISTINCT ON (k.instance_id, k.node) k.instance_id, k.node, k.output
		FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node) JOIN user_task k USING (instance_id, node)
		WHERE k.state = 'completed'
		ORDER BY k.instance_id, k.node, k.completed_at DESC, k.id DESC`, owners, nodes)
}

// askEachFacts queries the results of lists: an array with the result of each element, in the order of the elements.
func (s *scene) askEachFacts(asked *statements, owners []uuid.UUID, nodes []string) {
	owners, nodes = s.ofKind(each, owners, nodes)
	if len(owners) == 0 {
		return
	}
	asked.ask(s.takeFacts, `
		SELECT e.instance_id, e.node, coalesce((
			SELECT jsonb_agg(CASE r.status WHEN 'succeeded' THEN r.result END ORDER BY k)
			FROM generate_series(0, e.total - 1) AS k
			LEFT JOIN process_token t ON t.parallel_group_id = e.group_id AND t.item = k
			LEFT JOIN LATERAL ( -- one that an incident stopped has been tried again
				SELECT r.status, r.result FROM workflow_run r
				WHERE r.token_id = t.id AND r.node = e.node || '/item' AND (e.over_at IS NULL OR r.finished_at <= e.over_at)
				ORDER BY r.finished_at DESC, r.id DESC LIMIT 1) r ON true), '[]')
		FROM (SELECT DISTINCT ON (instance_id, node) *
		      FROM unnest($1::uuid[], $2::text[]) AS w (instance_id, node) JOIN each_progress USING (instance_id, node)
		      ORDER BY instance_id, node, group_id DESC) AS e`, owners, nodes)
}

// ofKind returns the pairs of owner and node whose node is of kind k.
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
		i.remember(i.process.nodes[node], output)
		return nil
	})
	return err
}
