package graph

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/internal/leasing"
)

// steps inserts the runs of tokens, and gives those that are due to the carrier. after is the result of leasesEnd.
func (w *writer) steps(all []*instance, after map[uuid.UUID]time.Time) {
	if len(w.consumed) > 0 {
		w.do(`UPDATE message SET consumed_at = now() WHERE id = ANY ($1)`, w.consumed)
	}
	var tokens []uuid.UUID
	var types, nodes, payloads, tenants []string
	var attempts, priorities []int
	var delays []float64
	var until []*time.Time
	var previous []uuid.NullUUID
	var traces []json.RawMessage
	var paused []uuid.NullUUID
	urgent := slices.SortedStableFunc(slices.Values(all), func(a, b *instance) int { return cmp.Compare(b.priority, a.priority) }) // what room there is, is theirs
	for _, i := range urgent {
		for _, s := range i.changes.steps {
			if alive(s.token.state) == 0 || w.carry(i, s, after) {
				continue
			}
			tokens, tenants, types, nodes = append(tokens, s.token.id), append(tenants, i.tenant), append(types, s.typ), append(nodes, s.node)
			payloads, paused = append(payloads, string(s.payload)), append(paused, uuid.NullUUID{UUID: i.id, Valid: i.paused})
			attempts, priorities = append(attempts, s.attempts), append(priorities, i.priority)
			delays = append(delays, s.due.after.Seconds())
			traces = append(traces, i.trace)
			var at *time.Time
			if !s.due.until.IsZero() {
				at = &s.due.until
			} else if t, ok := after[i.id]; ok && s.afterLeases {
				at = &t
			}
			until = append(until, at)
			before := uuid.NullUUID{}
			if s.due.tick != nil && s.due.tick.after != uuid.Nil {
				before = uuid.NullUUID{UUID: s.due.tick.after, Valid: true}
			}
			previous = append(previous, before)
		}
	}
	w.carrier.Queue(w.ready)
	if len(tokens) == 0 {
		return
	}
	w.carrier.Leave()
	// created_at is not the beginning of the transaction, but after the events that are stored with the run: the run is
	// an event in process_history, too. A run of a paused instance is held: its held_at is the time of the pause, by
	// which process_resume finds it. A tick of a repeated timer is due by the schedule, not relative to when the previous
	// tick was handled. Ticks that were missed are skipped. Nothing is due before the run that led to it has finished, at
	// the time of a statement of this transaction: a lease that began in between would seem to have begun before that.
	w.do(`
		INSERT INTO workflow_run (created_at, token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at, run_at)
		SELECT statement_timestamp(), n.token, n.type, n.node, n.payload, coalesce(nullif(n.attempts, 0), 3), n.priority,
		       nullif(n.tenant, ''), n.trace, CASE WHEN n.paused IS NOT NULL THEN (SELECT i.paused_at FROM process_instance i WHERE i.id = n.paused) END,
		       CASE WHEN n.until IS NOT NULL THEN least(greatest(n.until, statement_timestamp()), now() + interval '9 years')
		            WHEN b.run_at IS NOT NULL THEN b.run_at + n.delay * interval '1 second'
		                * greatest(1, ceil(extract(epoch FROM now() - b.run_at) / n.delay::numeric))::float8
		            ELSE statement_timestamp() + n.delay * interval '1 second' END
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::jsonb[], $5::int[], $6::int[], $7::float8[], $8::timestamptz[], $9::uuid[], $10::uuid[], $11::text[], $12::jsonb[])
		  AS n (token, type, node, payload, attempts, priority, delay, until, previous, paused, tenant, trace)
		LEFT JOIN workflow_run b ON b.id = n.previous`,
		tokens, types, nodes, payloads, attempts, priorities, delays, until, previous, paused, tenants, traces)
}

// carry gives a step to the carrier, and reports whether it took it. A step that is due later, or that is held because its
// instance is paused, is not for it.
func (w *writer) carry(i *instance, s step, after map[uuid.UUID]time.Time) bool {
	if _, waits := after[i.id]; s.due != (due{}) || i.paused || s.afterLeases && waits {
		return false
	}
	return w.carrier.Take(leasing.Step{
		Token: s.token.id, Type: s.typ, Node: s.node, Payload: s.payload, MaxAttempts: cmp.Or(s.attempts, 3), Priority: i.priority,
		Tenant: i.tenant, Metadata: i.trace, Instance: i.id, BusinessKey: i.key, Chain: i.chain,
	})
}

// undos inserts the runs of undo steps. The payload has the payload ("input") and the result ("output") of the step,
// unless both together exceed jsondoc.MaxPayload or are nested too deep: then it has only the id of the step's run.
func (w *writer) undos(all []*instance) {
	var tokens, records []uuid.UUID
	for _, i := range all {
		for _, u := range i.changes.undo {
			tokens, records = append(tokens, u.token.id), append(records, u.record)
		}
	}
	if len(tokens) == 0 {
		return
	}
	w.carrier.Leave()
	w.do(`
		UPDATE compensation_record c SET undo_run_id = workflow_uuid()
		WHERE id = ANY ($1)`, records)
	w.do(`
		INSERT INTO workflow_run (id, token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at, run_at)
		SELECT c.undo_run_id, n.token, c.handler_ref, c.node_id || '/undo',
		       CASE WHEN octet_length(p.payload::text) <= $3 AND NOT jsonb_path_exists(p.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")')
		            THEN p.payload ELSE p.payload - 'input' - 'output' END,
		       CASE WHEN workflow_follows(r.max_attempts, r.policy_attempts) THEN 3 ELSE r.max_attempts END, i.priority, i.tenant_id, process_trace(i.metadata), i.paused_at, greatest(statement_timestamp(), c.not_before)
		FROM unnest($1::uuid[], $2::uuid[]) AS n (token, record)
		JOIN compensation_record c ON c.id = n.record
		JOIN workflow_run r ON r.id = c.run_id
		JOIN process_instance i ON i.id = c.instance_id
		CROSS JOIN LATERAL (SELECT jsonb_build_object('input', r.payload, 'output', r.result, 'run', r.id, 'certain', c.certain) AS payload) AS p`,
		tokens, records, jsondoc.MaxPayload)
}

// tasks inserts user tasks.
func (w *writer) tasks(all []*instance) {
	var owners, tokens []uuid.UUID
	var nodes, assignees []string
	var groups, payloads []json.RawMessage
	var due []float64
	for _, i := range all {
		for _, k := range i.changes.tasks {
			if alive(k.token.state) == 0 {
				continue
			}
			h := k.token.node.Human
			names, _ := json.Marshal(append([]string{}, h.Groups...)) // cannot fail: strings
			owners, tokens, nodes = append(owners, i.id), append(tokens, k.token.id), append(nodes, k.token.node.name)
			assignees, groups, payloads = append(assignees, k.assignee), append(groups, names), append(payloads, k.payload)
			due = append(due, time.Duration(h.Due).Seconds())
		}
	}
	if len(owners) == 0 {
		return
	}
	w.do(`
		INSERT INTO user_task (instance_id, token_id, node, assignee, groups, payload, due_at)
		SELECT instance, token, node, nullif(assignee, ''), ARRAY(SELECT jsonb_array_elements_text(groups)), payload,
		       now() + nullif(due, 0) * interval '1 second'
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::jsonb[], $6::jsonb[], $7::float8[])
		  AS n (instance, token, node, assignee, groups, payload, due)`, owners, tokens, nodes, assignees, groups, payloads, due)
}

// children inserts runs that start called instances, and runs that report the end of a called instance to the token
// that waits for it.
func (w *writer) children(all []*instance) {
	var starts, news, traces []json.RawMessage
	var priorities []int
	var tenants []string
	var tokens []uuid.UUID
	var visits []int64
	for _, i := range all {
		for _, c := range i.changes.children {
			if alive(c.token.state) == 0 {
				continue
			}
			call := c.token.node.Call
			p := startPayload{
				Process: call.Process, Version: call.Version, Input: c.input, Priority: i.priority,
				Parent: &parentPayload{Instance: i.id, Token: c.token.id, Visit: c.token.version + 1, Depth: i.depth + 1, Undo: call.Undo == propagate},
			}
			text, err := json.Marshal(p)
			if err != nil {
				panic(err) // cannot happen: the input is valid JSON
			}
			starts, priorities, tenants = append(starts, text), append(priorities, i.priority), append(tenants, i.tenant)
			traces = append(traces, i.trace)
		}
		if i.parent != nil && i.status.final() {
			tokens, visits = append(tokens, i.parent.token), append(visits, i.parent.visit)
			news = append(news, position{Visit: i.parent.visit, Child: i.id}.json())
		}
	}
	if len(starts)+len(tokens) > 0 {
		w.carrier.Leave()
	}
	if len(starts) > 0 {
		w.do(`
			INSERT INTO workflow_run (type, payload, priority, tenant_id, metadata, max_attempts)
			SELECT $1, n.payload, n.priority, nullif(n.tenant, ''), n.trace, 1000
			FROM unnest($2::jsonb[], $3::int[], $4::text[], $5::jsonb[]) AS n (payload, priority, tenant, trace)`, startType, starts, priorities, tenants, traces)
	}
	if len(tokens) > 0 {
		w.do(`
			INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at)
			SELECT t.id, $1, t.node, n.payload, 1000, p.priority, p.tenant_id, process_trace(p.metadata), p.paused_at
			FROM unnest($2::uuid[], $3::bigint[], $4::jsonb[]) AS n (token, visit, payload)
			JOIN process_token t ON t.id = n.token AND t.version = n.visit AND t.state = 'Waiting'
			JOIN process_instance p ON p.id = t.instance_id
			JOIN process_instance c ON c.id = (n.payload->>'child')::uuid AND c.parent_process_instance_id = p.id AND c.parent_token_id = t.id
			     AND c.parent_visit = t.version AND c.tenant_id IS NOT DISTINCT FROM p.tenant_id -- both ends agree
			FOR SHARE OF t -- we do not hold its instance: if it ends at this moment, one of us sees the other`, arriveType, tokens, visits, news)
	}
}
