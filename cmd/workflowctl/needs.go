package main

import (
	"context"
	"slices"
)

// needs are queries that find work that stands still, fails or falls behind, so that a person must act now or soon.
// doctor reports all findings, with what to do. top shows them while they last. Each query returns findings, and is
// cheap even with a million rows.
var needs = []string{
	// Work that waits for a person's decision.
	`SELECT true, CASE WHEN count(*) >= 1000 THEN 'at least ' ELSE '' END || count(*) || CASE count(*) WHEN 1 THEN ' instance' ELSE ' instances' END || ' of process ' || name || ': incident ' || code
	        || CASE WHEN node = '' THEN '' ELSE ' at ' || node END || ', the oldest for ' || workflow_span(workflow_age(min(created_at))),
	        'workflowctl why ' || (array_agg(instance_id ORDER BY created_at))[1] || '; once its cause is fixed: workflowctl retry-incidents --process ' || name || ' --code ' || code || CASE WHEN node = '' THEN '' ELSE ' --node ' || node END
	 FROM (SELECT x.*, d.name FROM (SELECT * FROM incident WHERE resolved_at IS NULL ORDER BY created_at LIMIT 1000) x
	       JOIN process_instance i ON i.id = x.instance_id JOIN process_definition d ON d.id = i.process_definition_id) x
	 GROUP BY name, code, node ORDER BY min(created_at) LIMIT 20`,
	`SELECT sqlstate <> '55P03', 'run ' || id || ' of type ' || type || ' is set aside for ' || workflow_span(workflow_age(since)) || ': '
	        || CASE WHEN sqlstate = '55P03' THEN 'it waits for a lock' WHEN statement = 'extend' THEN 'the database refuses its heartbeat, and its lease runs out' ELSE problem END || coalesce(' (SQLSTATE ' || nullif(sqlstate, '') || ')', ''),
	        CASE WHEN fix IS NOT NULL THEN format('BEGIN; SET LOCAL workflow.override = ''why''; UPDATE workflow_run SET %s WHERE id = %L; COMMIT', fix, id)
	             ELSE format('SELECT message FROM workflow_unleasable WHERE id = %L says what refuses it; once that is fixed it continues', id)
	                  || CASE WHEN kept IS NOT NULL THEN format(', or at once: SELECT workflow_settle_again(%L)', id) ELSE '' END END
	 FROM workflow_unleasable u WHERE statement <> 'retention' AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.id = u.id AND a.kind = 'wait') ORDER BY since LIMIT 20`,
	// Statements and workers.
	`SELECT true, 'the statement «' || statement || '» fails for every row, for ' || workflow_span(workflow_age(since)) || ', as role ' || role || coalesce(' (SQLSTATE ' || nullif(sqlstate, '') || ')', '') || ': no row is to blame, and none continues',
	        format('SELECT message FROM workflow_fault WHERE statement = %L says what is wrong: a table, right, function or sequence, or a trigger that refuses everything. Once that is fixed it continues', statement)
	 FROM workflow_fault WHERE seen_at > clock_timestamp() - interval '1 minute' ORDER BY since`,
	`SELECT problem LIKE 'no%', subject || ': ' || problem, 'start a worker with WORKER_TYPE_PREFIXES that cover it, or a handler for it; see workflowctl show workers' FROM workflow_coverage WHERE problem NOT LIKE 'prefixes overlap%'`,
	`SELECT true, count(*) || CASE count(*) WHEN 1 THEN ' lease has' ELSE ' leases have' END || ' run out, the oldest ' || workflow_span(workflow_age(min(lease_until))) || ' ago: no worker takes ' || CASE count(*) WHEN 1 THEN 'it' ELSE 'them' END || ' back', 'start a worker that covers ' || min(type)
	 FROM workflow_run r WHERE status = 'leased' AND lease_until < now() - interval '1 minute'
	   AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id) AND NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = r.id AND k.token = r.lease_token)
	 HAVING count(*) > 0`,
	`SELECT true, 'nothing of type ' || type || ' is leased, though it has been due for ' || workflow_span(due_for) || ', and ' || covered_by || ' could take it', 'the logs of these workers say why'
	 FROM workflow_stalled`,
	`SELECT true, 'what runs of type ' || type || ' need is out of reach for ' || workflow_span(workflow_age(since)) || ' (' || code || '): its breaker is open, and one of them at a time is started, as a probe', 'it closes with the first success; at once: workflowctl close-breaker ' || type
	 FROM workflow_breaker ORDER BY since LIMIT 20`,
	`SELECT false, 'type ' || type || ' does not keep up: ' || due || CASE WHEN due >= 1000 AND 10 * due <= 11 * due_before THEN ' or more' ELSE '' END || ' are due, the first for ' || workflow_span(oldest) || ', ' || due_before || ' were '
	        || workflow_span(within) || ' ago; ' || covered_by || CASE WHEN covered_by LIKE '%, %' THEN ' cover it' ELSE ' covers it' END, 'more workers, or more slots (WORKER_CONCURRENCY); why is one slow? workflowctl show rate, workflowctl show working'
	 FROM workflow_growing ORDER BY due DESC LIMIT 20`,
	`SELECT true, 'signal ' || b.signal_id || ' is refused to all tokens that wait for it, for ' || workflow_span(workflow_age(b.refused_at)) || ' (SQLSTATE ' || b.sqlstate || ')',
	        'SELECT message FROM process_broadcast WHERE signal_id = ' || quote_literal(b.signal_id) || ' says what refuses it: a trigger or a constraint of workflow_run; it is tried again every few seconds'
	 FROM process_broadcast b WHERE b.refused_at IS NOT NULL LIMIT 20`,
	// Failures.
	`SELECT percent >= 50, percent || ' % of the attempts of type ' || type || ' have failed within 15 min: ' || failed || CASE failed WHEN 1 THEN ' run' ELSE ' runs' END || ' for good, ' || retried || ' retried, ' || succeeded || ' succeeded; the last '
	        || workflow_span(latest) || ' ago' || coalesce(': «' || left(last_error, 120) || '»', ''), coalesce('workflowctl why ' || such_as, 'workflowctl show failing') || ' shows the error; to stop it meanwhile: workflowctl pause ' || type || ' REASON'
	 FROM workflow_erring WHERE type <> 'other' ORDER BY percent DESC, failed DESC LIMIT 20`,
	`SELECT false, CASE WHEN bool_or(i.full) THEN 'at least ' ELSE '' END || count(*) || CASE count(*) WHEN 1 THEN ' instance' ELSE ' instances' END || ' of process ' || max(d.name) || ' failed within an hour, the last ' || workflow_span(workflow_age(max(i.completed_at))) || ' ago',
	        format('workflowctl why %1$s gives the reason; once that is fixed: workflowctl restart %1$s starts it again from where it failed', (array_agg(i.id ORDER BY i.completed_at DESC))[1])
	 FROM (SELECT p.*, count(*) OVER () >= 1000 AS full FROM (
	      SELECT * FROM process_instance WHERE failure_reason IS NOT NULL AND completed_at > now() - interval '1 hour' ORDER BY completed_at DESC LIMIT 1000) p) i
	 JOIN process_definition d ON d.id = i.process_definition_id GROUP BY d.name`,
	`SELECT false, CASE WHEN at_least THEN 'at least ' ELSE '' END || within_hour || CASE within_hour WHEN 1 THEN ' run' ELSE ' runs' END || ' of type ' || type || ' failed for good within an hour as ' || code || ', the last '
	        || workflow_span(workflow_age(latest)) || ' ago: «' || left(coalesce(last_error, ''), 120) || '»',
	        CASE WHEN type ^@ 'graph.' OR EXISTS (SELECT FROM workflow_run r WHERE r.id = last_run AND r.token_id IS NOT NULL) THEN 'workflowctl why ' || last_run
	             ELSE 'fix the cause; then: workflowctl redrive ' || type || ' --code ' || code END
	 FROM workflow_failing WHERE within_hour > 0 ORDER BY within_hour DESC LIMIT 20`,
	`SELECT true, 'the dead letter ' || type || ' of ' || count(*) || CASE count(*) WHEN 1 THEN ' run' ELSE ' runs' END || ' that failed within a day was refused (SQLSTATE ' || sqlstate || '), for example of run ' || min(id::text) || ': nobody is notified of these runs',
	        'workflowctl events ' || min(id::text) || ' says by what; fix that, look at them with workflowctl show failing, and retry them or notify somebody by hand'
	 FROM (SELECT r.id, h.data->>'type' AS type, h.data->>'sqlstate' AS sqlstate
	       FROM (SELECT id FROM workflow_run WHERE status = 'failed' AND finished_at > now() - interval '1 day' AND token_id IS NULL AND deleted_at IS NULL ORDER BY finished_at DESC LIMIT 1000) r
	       JOIN workflow_history h ON h.workflow_id = r.id AND h.event_type = 'dead_letter_refused') x
	 GROUP BY type, sqlstate LIMIT 20`,
	// Sinks.
	`SELECT true, 'sink ' || sink || ' takes nothing for ' || workflow_span(down_for) || ', ' || CASE WHEN at_least THEN 'at least ' ELSE '' END || open || CASE open WHEN 1 THEN ' event waits' ELSE ' events wait' END || coalesce(': «' || left(last_error, 120) || '»', ''),
	        'fix the sink, or its address in DISPATCHER_SINKS; it is tried every 30 s, and nothing is lost meanwhile'
	 FROM outbox_lag WHERE down_for IS NOT NULL AND unserved < interval '5 minutes'`,
	`SELECT true, 'sink ' || sink || ' is not served for ' || workflow_span(unserved) || ', ' || CASE WHEN at_least THEN 'at least ' ELSE '' END || open || CASE open WHEN 1 THEN ' event waits' ELSE ' events wait' END, 'start a dispatcher with it in DISPATCHER_SINKS, or give it up with --abandon'
	 FROM outbox_lag WHERE unserved > interval '5 minutes'`,
	`SELECT false, 'sink ' || sink || ' has parked ' || parked || CASE parked WHEN 1 THEN ' event' ELSE ' events' END, 'workflowctl show parked; then SELECT outbox_replay_parked(' || quote_literal(sink) || ')' FROM outbox_lag WHERE parked > 0`,
	// Tables that grow.
	turnOfNobody, keptByNobody,
}

// collectNeeds returns what needs a person, grave findings first.
func collectNeeds(ctx context.Context, db querier) (found []finding, err error) {
	if found, err = collect(ctx, db, needs...); err != nil {
		return nil, err
	}
	slices.SortStableFunc(found, func(a, b finding) int {
		switch {
		case a.Grave == b.Grave:
			return 0
		case a.Grave:
			return -1
		}
		return 1
	})
	return found, nil
}
