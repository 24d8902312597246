package main

// Differences between the retention periods that workers ask for, and rows that nobody removes.
const (
	// For types that no worker asks for (*), the longest period counts; workers that ask for it mean other prefixes.
	keptLonger = `SELECT DISTINCT false, 'retention (' || y.kind || '): workers of prefix ' || y.prefix || ' ask to keep what is over for ' || workflow_span(y.period * interval '1 second') || ', others'
	        || CASE WHEN x.prefix <> y.prefix THEN ' of prefix ' || x.prefix ELSE '' END || ' for ' || CASE x.period WHEN 0 THEN 'ever' ELSE workflow_span(x.period * interval '1 second') END || ', which counts',
	        'give them the same WORKER_KEEP_…, or Retention of worker.Config; a period that no worker has asked for within a day no longer counts'
	 FROM workflow_retention y JOIN workflow_retention x ON x.kind = y.kind AND (x.prefix = y.prefix OR x.prefix <> '*' AND y.prefix ^@ x.prefix) AND y.period > 0 AND (x.period = 0 OR x.period > y.period)
	 WHERE least(y.asked_at, x.asked_at) > now() - interval '1 hour' AND y.kind NOT IN ('cancelled', 'messages') AND (y.prefix <> '*' OR y.kind IN ('events', 'processes'))
	 LIMIT 20`
	turnOfNobody = `SELECT false, 'nobody removes what is over of prefix ' || t.prefix || ' (' || string_agg(t.kind, ', ' ORDER BY t.kind) || '): the last turn was ' || workflow_span(workflow_age(max(t.taken_at))) || ' ago',
	        'start a worker that covers it, with WORKER_CLEANUP_EVERY above 0' || CASE t.prefix WHEN '*' THEN ', whose role has the rights of the engine' ELSE '. If there are no more of them: BEGIN; SET LOCAL workflow.override = ''why''; DELETE FROM workflow_retention WHERE prefix = '
	        || quote_literal(t.prefix) || '; COMMIT; then workers that cover default. remove it' END
	 FROM workflow_retention_turn t
	 WHERE t.taken_at < now() - greatest(interval '1 day', 3 * t.every * interval '1 second') AND EXISTS (SELECT FROM workflow_retention a WHERE a.prefix = t.prefix AND a.kind = t.kind)
	   AND NOT EXISTS (SELECT FROM workflow_retention a WHERE a.kind = t.kind AND a.period = 0 AND (a.prefix = t.prefix OR a.prefix <> '*' AND t.prefix ^@ a.prefix))
	 GROUP BY t.prefix LIMIT 20`
	keptByNobody = `SELECT false, 'nobody removes ' || CASE WHEN r.n >= 1000 THEN 'at least ' ELSE '' END || r.n || ' ' || r.what || ', over for more than 100 days: no worker says how long to keep them',
	        'start a worker that covers ' || r.who || ', with WORKER_CLEANUP_EVERY above 0'
	 FROM (
	     SELECT count(*) AS n, 'runs of prefix ' || split_part(x.type, '.', 1) || '.' AS what, split_part(x.type, '.', 1) || '., or default.' AS who
	     FROM unnest('{succeeded,cancelled,failed}'::text[]) AS s CROSS JOIN LATERAL (
	         SELECT w.type FROM workflow_run w WHERE w.status = s AND w.finished_at < now() - interval '100 days' AND w.token_id IS NULL ORDER BY w.finished_at LIMIT 1000) x
	     WHERE NOT EXISTS (SELECT FROM workflow_retention a WHERE a.kind = s AND (a.prefix = '*' OR x.type ^@ a.prefix))
	     GROUP BY 2, 3
	     UNION ALL
	     SELECT count(*), 'published events', 'any prefix, with the rights of the engine'
	     FROM (SELECT FROM outbox_event e WHERE e.published_at < now() - interval '100 days' ORDER BY e.published_at LIMIT 1000) x
	     WHERE NOT EXISTS (SELECT FROM workflow_retention a WHERE a.kind = 'events')
	     UNION ALL
	     SELECT count(*), 'instances of processes', 'any prefix, with the rights of the engine'
	     FROM (SELECT FROM process_instance i WHERE i.completed_at < now() - interval '100 days' ORDER BY i.completed_at LIMIT 1000) x
	     WHERE NOT EXISTS (SELECT FROM workflow_retention a WHERE a.kind = 'processes')
	 ) r WHERE r.n > 0 LIMIT 20`
)
