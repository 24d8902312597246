package graph

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/leasing"
	"github.com/simple-workflow/simple-workflow/run"
)

// restart checks whether an instance may be started again, and decides the id of the instance that continues it.
// Whether the new instance can take over everything that is done is checked when the run is settled: see leaves.
func (e *Engine) restart(ctx context.Context, p restartPayload) (Started, error) {
	s := Started{After: p.Instance}
	var status status
	var process, key, tenant string
	var called bool
	err := e.pool.QueryRow(ctx, `
		SELECT i.status, i.process_definition_id, d.name, d.version, coalesce(i.business_key, ''), coalesce(i.tenant_id, ''), i.parent_token_id IS NOT NULL
		FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id
		WHERE i.id = $1`, unprepared, p.Instance).Scan(&status, &s.Definition, &process, &s.Version, &key, &tenant, &called)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return s, run.Permanent(fmt.Errorf("instance: there is no instance %s, or retention has removed it", p.Instance))
	case err != nil:
		return s, fmt.Errorf("look for instance %s: %w", p.Instance, err)
	case status != statusFailed && status.final():
		return s, cannot("instance: %s is %s; only a FAILED instance can be started again", p.Instance, status)
	case status != statusFailed:
		return s, cannot("instance: %s is %s; retry its incident (graph.retry.v1), or fail it first (graph.fail.v1)", p.Instance, status)
	case called:
		return s, cannot("instance: %s was called by another instance, which has processed its end; start that one again", p.Instance)
	}
	s.Instance = uuid.NewSHA1(keys, []byte("\x00restart\x00"+p.Instance.String()))
	if key != "" && p.Instance.Version() == 5 { // its id is derived from the key: nobody wrote the key into the column by hand
		s.Instance = keyed(startPayload{Process: process, Key: key, Tenant: tenant}, p.Instance.String())
	}
	var taken bool
	err = e.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM process_instance WHERE id = $1)`, unprepared, s.Instance).Scan(&taken)
	if err == nil && taken {
		err = restarted(s)
	}
	return s, err
}

// restarted returns the error of a restart whose new instance exists already.
func restarted(s Started) error {
	return cannot("instance: %s was started again already, or its key was used again: as %s", s.After, s.Instance)
}

// reborn returns the instance that continues a failed one, from the settled run that restarts it.
func (s *scene) reborn(ctx context.Context, tx *transaction, settled leasing.Settlement) (b birth, err error) {
	var p restartPayload
	b.run = settled.Outcome.ID
	if err := errors.Join(json.Unmarshal(settled.Payload, &p), json.Unmarshal(settled.Result, &b.started)); err != nil {
		return b, err
	}
	old := s.instances[p.Instance]
	if old == nil {
		return b, cannot("instance: retention has just removed %s", p.Instance)
	}
	b.asked = startPayload{Process: old.process.Definition.Process, Input: old.input, Priority: old.priority, Tenant: old.tenant}
	if err := tx.QueryRow(ctx, `SELECT metadata, coalesce(business_key, '') FROM process_instance WHERE id = $1`, old.id).Scan(&b.metadata, &b.asked.Key); err != nil {
		return b, err
	}
	b.from, err = s.leaves(ctx, tx, old)
	return b, err
}

// cutOffPause is how long the handler of a cancelled run may still be running. It learns of the cancellation at the
// next heartbeat, or when its lease expires.
const cutOffPause = 2 * time.Minute

// An estate collects what a failed instance leaves to the one that continues it.
type estate struct {
	*legacy
	old     *instance
	undone  map[string]bool // nodes with a compensation record, even if it was not carried out
	refusal error           // the first reason why the instance cannot be continued
}

// refuse notes a reason why the instance cannot be continued. Only the first reason is kept.
func (l *estate) refuse(format string, args ...any) {
	if l.refusal == nil {
		l.refusal = cannot("instance: %s cannot be started again where it failed: "+format, append([]any{l.old.id}, args...)...)
	}
}

// kept reports whether a node is done and its effect still holds: nothing of it was undone, and it has no undo step. An
// example is a call node whose first called instance failed and whose retry completed. Call kept only once askVisits
// and askUndone are answered.
func (l *estate) kept(node string) bool {
	_, done := l.done[node]
	return done && !l.undone[node] && l.old.process.nodes[node].Undo == ""
}

// leaves reads what a failed instance leaves to the one that continues it. If it is not certain what was done, it
// returns an error with the code conflict.
func (s *scene) leaves(ctx context.Context, tx *transaction, old *instance) (*legacy, error) {
	l := &estate{legacy: &legacy{of: old.id, done: map[string]visit{}}, old: old, undone: map[string]bool{}}
	asked := tx.statements()
	asked.plan(ownPlans)
	l.askCutOff(asked)
	l.askUndone(asked)
	l.askVisits(asked)
	l.askSuccessor(asked)
	l.askLists(asked)
	l.askCalled(asked)
	l.askRemoved(asked)
	if err := asked.send(ctx); err != nil {
		return nil, err
	}
	if l.refusal != nil {
		return nil, l.refusal
	}
	for node := range l.done { // nodes that were undone are done again
		if !l.kept(node) {
			delete(l.done, node)
		}
	}
	behind := old.process.behind(l.undone) // so are the nodes behind them, which the new instance does not reach at once
	l.entered = slices.DeleteFunc(l.entered, func(node string) bool { return behind[old.process.nodes[node].index] })
	return l.legacy, s.leaveFacts(ctx, tx, old, l.legacy)
}

// askCutOff queries steps that were cancelled so recently that their handlers may still be running.
func (l *estate) askCutOff(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var node string
		var ago time.Duration
		_, err := pgx.ForEachRow(rows, []any{&node, &ago}, func() error {
			l.refuse("step %s was cut off %s ago, and may still be running; try again in %s", node, ago.Round(time.Second), (cutOffPause - ago).Round(time.Second))
			return nil
		})
		return err
	}, `
		SELECT r.node, now() - r.finished_at
		FROM process_token t JOIN workflow_run r ON r.token_id = t.id
		WHERE t.instance_id = $1 AND r.status = 'cancelled' AND r.finished_at > now() - $2::interval AND r.type NOT LIKE 'graph.%'
		  AND EXISTS (SELECT FROM workflow_history h WHERE h.workflow_id = r.id AND h.event_type = 'cancelled' AND h.data->>'was' = 'leased')
		ORDER BY r.finished_at DESC LIMIT 1`, l.old.id, cutOffPause)
}

// askUndone queries the nodes that have compensation records. A record that is not Completed is a refusal.
func (l *estate) askUndone(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var at, status string
		_, err := pgx.ForEachRow(rows, []any{&at, &status}, func() error {
			if name, known := l.old.process.named(at); known {
				l.undone[name] = true
			}
			if status != "Completed" {
				l.refuse("step %s is not undone: its compensation record is %s", at, status)
			}
			return nil
		})
		return err
	}, `
		SELECT c.node_id, c.status FROM compensation_record c
		WHERE c.instance_id = $1 AND NOT EXISTS (SELECT FROM compensation_record n WHERE n.retry_of = c.id)`, l.old.id)
}

// askVisits queries the nodes that were entered, and those that are done. A node that was visited more than once is a
// refusal.
func (l *estate) askVisits(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var node, option string
		var completions, tokens int
		var again bool
		_, err := pgx.ForEachRow(rows, []any{&node, &completions, &tokens, &again, &option}, func() error {
			n := l.old.process.nodes[node]
			switch {
			case n == nil:
				l.refuse("its definition has no node %.100q", node)
			case completions > 1 || tokens > 1 || again:
				l.refuse("node %s was visited more than once, so it is not known which result belongs to which visit", node)
			case completions == 1 && n.kind != scope:
				l.done[node] = visit{option: option}
			}
			l.entered = append(l.entered, node)
			return nil
		})
		return err
	}, `
		SELECT e.node, count(*) FILTER (WHERE e.event_type <> 'node.entered'), count(DISTINCT e.token_id),
		       coalesce(max(e.nth) FILTER (WHERE e.event_type = 'node.entered') > min(e.nth) FILTER (WHERE e.event_type <> 'node.entered'), false),
		       coalesce(max(e.data->>'option'), '')
		FROM (SELECT h.*, row_number() OVER (ORDER BY h.created_at, h.place, h.id) AS nth
		      FROM process_history h
		      WHERE h.instance_id = $1 AND h.event_type IN ('node.entered', 'node.completed', 'node.taken_over') AND h.node IS NOT NULL) e
		GROUP BY e.node ORDER BY e.node`, l.old.id)
}

// askSuccessor queries whether another instance continues this one already.
func (l *estate) askSuccessor(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var as string
		_, err := pgx.ForEachRow(rows, []any{&as}, func() error {
			l.refuse("it was started again already, as %s", as)
			return nil
		})
		return err
	}, `SELECT e.data->>'as' FROM process_event e WHERE e.instance_id = $1 AND e.event_type = 'instance.restarted' LIMIT 1`, l.old.id)
}

// askLists queries lists (each) of which only some elements are done.
func (l *estate) askLists(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var node string
		var done, total int
		_, err := pgx.ForEachRow(rows, []any{&node, &done, &total}, func() error {
			l.refuse("%d of the %d elements of list %s are done, and would be done again", done, total, node)
			return nil
		})
		return err
	}, `SELECT node, done, total FROM each_progress WHERE instance_id = $1 AND over_at IS NULL AND done > 0 AND done < total`, l.old.id)
}

// askCalled queries instances that this one called, directly or through others, and that are not over or have done
// steps which nobody undid.
func (l *estate) askCalled(asked *statements) {
	asked.ask(func(rows pgx.Rows) error {
		var id uuid.UUID
		var at, step string
		var over bool
		_, err := pgx.ForEachRow(rows, []any{&id, &at, &over, &step}, func() error {
			if !over {
				l.refuse("instance %s, called at %s, is not over yet", id, at)
			} else if !l.kept(at) {
				l.refuse("instance %s, called at %s, has done %s, which is not undone, and would be done again", id, at, step)
			}
			return nil
		})
		return err
	}, `
		WITH RECURSIVE called AS (
			SELECT c.id, c.completed_at, coalesce(a.node, t.node) AS at, a.status IS NOT DISTINCT FROM 'succeeded' AS answered, 1 AS depth
			FROM process_instance c
			JOIN process_token t ON t.id = c.parent_token_id
			LEFT JOIN LATERAL (SELECT r.node, r.status FROM workflow_run r
			                   WHERE r.token_id = t.id AND r.type = 'graph.arrive.v1' AND r.payload->>'child' = c.id::text ORDER BY r.status = 'succeeded' DESC LIMIT 1) a ON true
			WHERE c.parent_process_instance_id = $1
			UNION ALL
			SELECT c.id, c.completed_at, p.at, p.answered, p.depth + 1 FROM called p JOIN process_instance c ON c.parent_process_instance_id = p.id WHERE p.depth <= $2
		)
		SELECT c.id, c.at, c.completed_at IS NOT NULL, coalesce(r.node, '')
		FROM called c
		LEFT JOIN LATERAL (
			SELECT r.node FROM process_token t JOIN workflow_run r ON r.token_id = t.id
			WHERE NOT c.answered AND t.instance_id = c.id AND r.status = 'succeeded' AND r.type NOT LIKE 'graph.%' AND r.node NOT LIKE '%/undo'
			  AND NOT EXISTS (SELECT FROM compensation_record k WHERE k.run_id = r.id AND k.status = 'Completed')
			LIMIT 1) r ON true
		WHERE c.completed_at IS NULL OR r.node IS NOT NULL`, l.old.id, maxDepth)
}

// askRemoved queries called instances that retention has removed.
func (l *estate) askRemoved(asked *statements) {
	// Retention removes called instances before their callers, and with them the record of what they did. If the called
	// instance had reported its end, the run that did so (graph.arrive.v1) remains. If not, the event of entering the
	// call node remains. If no instance was ever started for it, there is an incident with the code child_not_started.
	var calls []string
	for name, n := range l.old.process.nodes {
		if n.kind == call {
			calls = append(calls, name)
		}
	}
	asked.ask(func(rows pgx.Rows) error {
		var at string
		var direct bool
		_, err := pgx.ForEachRow(rows, []any{&at, &direct}, func() error {
			if direct && l.kept(at) {
				return nil
			}
			l.refuse("the instance that node %s called was removed by retention, so it is not known what it did", at)
			return nil
		})
		return err
	}, `
		WITH RECURSIVE caller AS (
			SELECT $1::uuid AS id, 0 AS depth
			UNION ALL
			SELECT c.id, p.depth + 1 FROM caller p JOIN process_instance c ON c.parent_process_instance_id = p.id WHERE p.depth <= $3 AND c.status <> 'COMPLETED'
		)
		SELECT r.node, p.depth = 0
		FROM caller p JOIN process_token t ON t.instance_id = p.id JOIN workflow_run r ON r.token_id = t.id
		WHERE r.type = 'graph.arrive.v1' AND r.status <> 'succeeded' AND r.payload ? 'child' AND NOT EXISTS (SELECT FROM process_instance c WHERE c.id::text = r.payload->>'child')
		UNION ALL
		SELECT e.node, false
		FROM process_event e JOIN process_instance i ON i.id = e.instance_id
		WHERE e.instance_id = $1 AND e.event_type = 'node.entered' AND e.node = ANY ($2) AND i.completed_at < now() - interval '1 minute' -- it is kept as long at least
		  AND NOT EXISTS (SELECT FROM process_event d WHERE d.instance_id = $1 AND d.event_type IN ('node.completed', 'node.failed') AND d.token_id = e.token_id AND d.node = e.node)
		  AND NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = e.token_id)
		  AND NOT EXISTS (SELECT FROM incident x WHERE x.instance_id = $1 AND x.token_id = e.token_id AND x.code = $4)`, l.old.id, calls, maxDepth, childNotStarted)
}

// leaveFacts reads the results of the nodes that are done into l.done. A result that does not fit its mapping, or is
// larger than maxFact, is an error with the code conflict.
func (s *scene) leaveFacts(ctx context.Context, tx *transaction, old *instance, l *legacy) error {
	var owners []uuid.UUID
	var nodes []string
	for name, v := range l.done {
		if v.option != "" {
			name = v.option
		}
		if old.process.nodes[name] == nil {
			return cannot("instance: %s cannot be started again where it failed: its definition has no node %.100q", old.id, name)
		}
		owners, nodes = append(owners, old.id), append(nodes, name)
	}
	if len(nodes) == 0 {
		return nil
	}
	clear(old.facts.steps)
	asked := tx.statements()
	s.askFactsOf(asked, owners, nodes)
	if err := asked.send(ctx); err != nil {
		return err
	}
	for name, v := range l.done {
		at := name
		if v.option != "" {
			at = v.option
		}
		if old.unfit[at] != nil {
			return cannot("instance: %s cannot be started again where it failed: the result of %s is not what its mapping expects", old.id, at)
		}
		if v.fact, v.has = old.facts.steps[at]; v.has {
			if size, err := stored(v.fact); err != nil || size > maxFact {
				return cannot("instance: %s cannot be started again where it failed: what %s has returned has %d bytes, the limit is %d", old.id, at, size, maxFact)
			}
		}
		l.done[name] = v
	}
	return nil
}

// maxFact is the limit, in bytes, of a fact that is stored outside of runs: in process_correction.
const maxFact = 1 << 20

// stored returns an upper bound of the size of a value in bytes as the database counts them: its jsonb text has a space
// after each colon and comma.
func stored(value any) (int, error) {
	text, err := json.Marshal(value)
	return len(text) + bytes.Count(text, []byte{':'}) + bytes.Count(text, []byte{','}), err
}

// restarts writes process events to both instances of each restart.
func (w *writer) restarts(all []*instance) {
	var olds, news, runs []uuid.UUID
	for _, i := range all {
		if i.changes.restart != uuid.Nil {
			olds, news, runs = append(olds, i.changes.after), append(news, i.id), append(runs, i.changes.restart)
		}
	}
	if len(olds) == 0 {
		return
	}
	w.do(`
		INSERT INTO process_event (instance_id, event_type, version, data)
		SELECT i.id, x.event, i.version, x.data || jsonb_build_object('by', coalesce(nullif(r.payload->>'by', ''), r.created_by))
		FROM unnest($1::uuid[], $2::uuid[], $3::uuid[]) AS n (old, new, run)
		JOIN workflow_run r ON r.id = n.run
		CROSS JOIN LATERAL (VALUES (n.old, 'instance.restarted', jsonb_build_object('as', n.new)), (n.new, 'instance.restarts', jsonb_build_object('from', n.old))) AS x (id, event, data)
		JOIN process_instance i ON i.id = x.id`, olds, news, runs)
}
