package main

// redrawn gives an event a newly drawn id. (Failed deliveries refer to the event by its id, so they are deleted.)
const redrawn = `format('BEGIN; SET LOCAL workflow.override = ''why''; DELETE FROM outbox_delivery WHERE event_id = %1$s; UPDATE outbox_event SET id = DEFAULT WHERE id = %1$s; COMMIT', e.id)`

// outboxExaminations check the rows that dispatchers depend on and maintain. They also list what a dispatcher repairs
// within 30 s, because none may be running.
var outboxExaminations = []string{
	// Ids.
	`SELECT true, 'outbox_event.id is not GENERATED ALWAYS: ids can be set by mistake', 'ALTER TABLE outbox_event ALTER COLUMN id ' || CASE attidentity WHEN 'd' THEN 'SET GENERATED ALWAYS' ELSE 'ADD GENERATED ALWAYS AS IDENTITY; SELECT outbox_set_right_v1()' END
	 FROM pg_attribute WHERE attrelid = 'outbox_event'::regclass AND attname = 'id' AND attidentity <> 'a'`,
	`SELECT true, 'the sequence of outbox_event.id has ' || p.what, 'ALTER TABLE outbox_event ALTER COLUMN id SET ' || p.fix
	 FROM pg_sequence q CROSS JOIN LATERAL (VALUES
	     (q.seqcache <> 1, 'CACHE ' || q.seqcache || ': ids are not in the order of commits', 'CACHE 1'),
	     (q.seqincrement <> 1, 'INCREMENT ' || q.seqincrement || ': ids do not grow one by one', 'INCREMENT 1'),
	     (q.seqmax < 9223372036854775807, 'MAXVALUE ' || q.seqmax || ': then nothing can be appended', 'NO MAXVALUE'),
	     (q.seqcycle, 'CYCLE: ids begin anew', 'NO CYCLE')) AS p (wrong, what, fix)
	 WHERE q.seqrelid = pg_get_serial_sequence('outbox_event', 'id')::regclass AND p.wrong`,
	`SELECT true, 'the sequence of outbox_event.id is at ' || d.last || ', near its end: then nothing can be appended',
	        format('SELECT setval(%L, %s); SELECT outbox_set_right_v1()', pg_get_serial_sequence('outbox_event', 'id'), coalesce((SELECT e.id FROM outbox_event e WHERE e.id BETWEEN 1 AND 4611686018427387904 ORDER BY e.id DESC LIMIT 1), 1))
	 FROM (SELECT outbox_last_id_v1() AS last) d WHERE d.last > 4611686018427387904`,
	`SELECT true, 'outbox_event.id of event ' || e.id || ' is above the sequence, which is at ' || d.last || ': new events draw ids that are taken, or lower than existing ones', 'workflowctl set-right, or SELECT outbox_set_right_v1()'
	 FROM (SELECT outbox_last_id_v1() AS last) d CROSS JOIN LATERAL (
	     SELECT e.id FROM outbox_event e WHERE e.id <= least(d.last, 9223372036854775807 - 1099511627776) + 1099511627776 ORDER BY e.id DESC LIMIT 1) e
	 WHERE e.id > d.last`,
	`SELECT false, 'outbox_event.id of event ' || e.id || ' was not drawn: it is too far above the sequence, which is at ' || d.last || ', to be followed', ` + redrawn + `
	 FROM (SELECT outbox_last_id_v1() AS last) d CROSS JOIN LATERAL (SELECT e.id FROM outbox_event e ORDER BY e.id DESC LIMIT 5) e
	 WHERE e.id > least(d.last, 9223372036854775807 - 1099511627776) + 1099511627776`,
	// For each lane, open events that a dispatcher skips because they are not above the floor.
	`SELECT true, 'outbox_event ' || e.id || ' is not above outbox_lane.floor of sink ' || s.name || ', lane ' || g.lane || ', and is open: it is not read',
	        CASE e.id WHEN -9223372036854775808 THEN ` + redrawn + ` ELSE format('SELECT outbox_set_right_v1(%L)', s.name) END
	 FROM outbox_sink s CROSS JOIN generate_series(0, 63) AS g (lane) LEFT JOIN outbox_lane l ON l.sink = s.name AND l.lane = g.lane CROSS JOIN LATERAL (
	     SELECT e.id
	     FROM (SELECT e.id, e.event_type, e.delivered_to, e.parked_by FROM outbox_event e
	           WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = g.lane AND e.id <= coalesce(l.floor, -9223372036854775808) ORDER BY e.lane, e.id LIMIT 500) e
	     WHERE outbox_wants(s.types, e.event_type) AND (s.name = ANY (e.delivered_to)) IS NOT TRUE AND (s.name = ANY (e.parked_by)) IS NOT TRUE
	       AND (SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE
	     LIMIT 1) e
	 LIMIT 20`,
	`SELECT false, 'outbox_event.' || m.name || ' of event ' || e.id || ' holds NULL, or has several dimensions', format('UPDATE outbox_event SET %1$I = ARRAY(SELECT DISTINCT m FROM unnest(%1$I) AS m WHERE m IS NOT NULL) WHERE id = %2$s', m.name, e.id)
	 FROM generate_series(0, 63) AS g (lane) CROSS JOIN LATERAL (
	     SELECT e.id, e.delivered_to, e.parked_by FROM outbox_event e WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = g.lane ORDER BY e.lane, e.id LIMIT 500) e
	   CROSS JOIN LATERAL (VALUES ('delivered_to', e.delivered_to), ('parked_by', e.parked_by)) AS m (name, marks)
	 WHERE CASE WHEN array_ndims(m.marks) > 1 THEN true ELSE array_position(m.marks, NULL) IS NOT NULL END
	 LIMIT 20`,
	// Lanes.
	`SELECT true, 'outbox_lane: ' || count(*) || ' lanes of sink ' || s.name || ' have no row, for example lane ' || min(g.lane) || ': none of their events is delivered', format('SELECT outbox_set_right_v1(%L)', s.name)
	 FROM outbox_sink s CROSS JOIN generate_series(0, 63) AS g (lane)
	 WHERE EXISTS (SELECT FROM outbox_lane l WHERE l.sink = s.name) AND NOT EXISTS (SELECT FROM outbox_lane l WHERE l.sink = s.name AND l.lane = g.lane)
	 GROUP BY s.name`,
	`SELECT v.grave, 'outbox_lane.' || v.name || ' of sink ' || l.sink || ', lane ' || l.lane || ' is ' || v.value || ': ' || v.what, format('SELECT outbox_set_right_v1(%L)', l.sink)
	 FROM (SELECT outbox_last_id_v1() AS last) d CROSS JOIN outbox_lane l CROSS JOIN LATERAL (VALUES
	     (false, 'claim_until', l.claim_until::text, 'no claim lasts so long; it counts as expired', l.claim_until NOT BETWEEN '2000-01-01' AND now() + interval '61 minutes'),
	     (true, 'floor', l.floor::text, 'no id that high has been drawn, and new events are skipped', l.floor > d.last),
	     (false, 'next_floor', l.next_floor::text, 'no id that high has been drawn', l.next_floor > d.last),
	     (false, 'served_at', l.served_at::text, 'it is not a time in the past', l.served_at NOT BETWEEN '2000-01-01' AND now() + interval '1 minute' AND l.served_at NOT IN ('-infinity', '1970-01-01 00:00:00+00')),
	     (false, 'replays', l.replays::text, 'nobody has replayed so often', l.replays NOT BETWEEN 0 AND 1000000000000000)) AS v (grave, name, value, what, wrong)
	 WHERE l.lane BETWEEN 0 AND 63 AND v.wrong
	 LIMIT 20`,
	`SELECT false, 'outbox_lane of sink ' || l.sink || ', lane ' || l.lane || ': there is no such ' || CASE WHEN l.lane BETWEEN 0 AND 63 THEN 'sink' ELSE 'lane' END,
	        format('BEGIN; SET LOCAL workflow.override = ''why''; DELETE FROM outbox_lane WHERE sink = %L AND lane = %s; COMMIT', l.sink, l.lane)
	 FROM outbox_lane l WHERE l.lane NOT BETWEEN 0 AND 63 OR NOT EXISTS (SELECT FROM outbox_sink s WHERE s.name = l.sink)
	 LIMIT 20`,
	// Sinks and deliveries.
	`SELECT false, 'outbox_sink.seen_at of sink ' || s.name || ' is ' || s.seen_at || ', which is in the future', format('UPDATE outbox_sink SET seen_at = now() WHERE name = %L', s.name)
	 FROM outbox_sink s WHERE s.seen_at > now() + interval '1 minute'`,
	`SELECT true, 'outbox_sink.paused_until of sink ' || s.name || ' is ' || s.paused_until || ': it receives nothing until then', format('UPDATE outbox_sink SET paused_until = NULL WHERE name = %L', s.name)
	 FROM outbox_sink s WHERE s.paused_until > now() + interval '61 minutes'`,
	`SELECT true, 'outbox_sink.types of sink ' || s.name || CASE WHEN cardinality(s.types) > 1000 THEN ' has ' || cardinality(s.types) || ' prefixes' ELSE ' holds NULL, or has several dimensions' END || ': no dispatcher registers such types',
	        format('UPDATE outbox_sink SET types = ''{}'' WHERE name = %L', s.name) || '; -- it then gets all types, until its dispatcher is started again'
	 FROM outbox_sink s WHERE cardinality(s.types) > 1000 OR CASE WHEN array_ndims(s.types) > 1 THEN true ELSE array_position(s.types, NULL) IS NOT NULL END`,
	`SELECT false, 'outbox_delivery.' || v.name || ' of event ' || d.event_id || ', sink ' || d.sink || ' is ' || v.value || ': ' || v.what, format('DELETE FROM outbox_delivery WHERE event_id = %s AND sink = %L', d.event_id, d.sink)
	 FROM (SELECT d.*, e.aggregate_id AS aggregate FROM outbox_delivery d LEFT JOIN outbox_event e ON e.id = d.event_id WHERE d.parked_at IS NULL LIMIT 1000) d CROSS JOIN LATERAL (VALUES
	     ('next_attempt_at', d.next_attempt_at::text, 'no pause lasts so long; it counts as over', d.next_attempt_at > now() + interval '2 years'),
	     ('attempt', d.attempt::text, 'nobody has tried so often', d.attempt NOT BETWEEN 0 AND 1000000000),
	     ('rejected', d.rejected::text, 'it was not rejected so often', d.rejected NOT BETWEEN 0 AND 1000000000),
	     ('aggregate_id', d.aggregate_id::text, 'the event has ' || coalesce(d.aggregate::text, 'gone') || '; another aggregate waits for it', d.aggregate_id IS DISTINCT FROM d.aggregate)) AS v (name, value, what, wrong)
	 WHERE v.wrong
	 LIMIT 20`,
}
