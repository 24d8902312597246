-- Figures of a torture run: name, value, unit, and the goal, if there is one, which the value must not exceed.

-- When the server was down or unusable: read-only, locked, or refusing at random or for lack of time or connections.
CREATE TABLE t.unusable AS SELECT began, ended FROM t.hindrance WHERE whom = 'all' AND fault <> 'cpu';

-- When faults began to strike one at a time; null if they never did.
CREATE VIEW t.singles AS SELECT min(at) AS since FROM t.ledger WHERE kind = 'singles';

CREATE VIEW t.recovery AS -- from the kill of a worker to the next lease of what it held
    SELECT extract(epoch FROM n.at - x.at) AS seconds, coalesce(x.at > (SELECT since FROM t.singles), false) AS single
    FROM t.ledger x
    JOIN t.lease l ON l.slot = x.line->>'worker' AND l.at < x.at
    JOIN t.ending e ON e.run = l.run AND e.lease_no = l.lease_no AND e.at > x.at AND e.status = 'pending' AND NOT e.by_holder
    JOIN t.lease n ON n.run = l.run AND n.lease_no = l.lease_no + 1
    WHERE x.kind = 'exit' AND x.line->>'answer' = 'kill'
      AND NOT EXISTS (SELECT FROM t.ledger s WHERE s.kind = 'start' AND s.line->>'worker' = l.slot AND s.at > l.at AND s.at < x.at)
      AND NOT EXISTS (SELECT FROM t.unusable u WHERE u.began < n.at AND u.ended > x.at);

CREATE VIEW t.reconnect AS -- from the restart of a server to the first success
    SELECT extract(epoch FROM (SELECT min(at) FROM t.ending e WHERE e.at > o.ready AND e.by_holder) - o.ready) AS seconds,
        coalesce(o.ready > (SELECT since FROM t.singles), false) AS single
    FROM t.outage o;

CREATE VIEW t.handover AS -- from when a worker gives a run back to its next lease
    SELECT extract(epoch FROM n.at - e.at) AS seconds, coalesce(e.at > (SELECT since FROM t.singles), false) AS single
    FROM t.ending e JOIN t.lease n ON n.run = e.run AND n.lease_no = e.lease_no + 1
    WHERE e.status = 'pending' AND e.by_holder AND e.attempt < e.attempt_was AND e.run_at <= e.at -- later: it was postponed
      AND NOT EXISTS (SELECT FROM t.unusable u WHERE u.began < n.at AND u.ended > e.at);

CREATE TABLE t.figure AS
    SELECT * FROM (VALUES
        ('runs that ended', (SELECT count(*)::float8 FROM workflow_run WHERE status IN ('succeeded', 'failed', 'cancelled')), '', NULL::float8),
        ('succeeded', (SELECT count(*) FROM workflow_run WHERE status = 'succeeded'), '', NULL),
        ('failed', (SELECT count(*) FROM workflow_run WHERE status = 'failed'), '', NULL),
        ('cancelled', (SELECT count(*) FROM workflow_run WHERE status = 'cancelled'), '', NULL),
        ('instances finished', (SELECT count(*) FROM t.instance WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED')), '', NULL),
        ('instances completed', (SELECT count(*) FROM t.instance WHERE status = 'COMPLETED'), '', NULL),
        ('instances failed', (SELECT count(*) FROM t.instance WHERE status = 'FAILED'), '', NULL),
        ('instances cancelled', (SELECT count(*) FROM t.instance WHERE status = 'CANCELLED'), '', NULL),
        ('steps of instances done', (SELECT count(*) FROM t.deed WHERE undoes IS NULL), '', NULL),
        ('steps of instances undone', (SELECT count(*) FROM t.deed WHERE undoes IS NOT NULL), '', NULL),
        ('incidents', (SELECT count(*) FROM incident), '', NULL),
        ('events published', (SELECT count(*) FROM outbox_event WHERE published_at IS NOT NULL), '', NULL),
        ('events parked', (SELECT count(*) FROM outbox_event WHERE parked_at IS NOT NULL), '', NULL),
        ('times that an acknowledged event came', (SELECT count(*)::float8 / nullif(count(DISTINCT event), 0) FROM t.arrival WHERE ok), '', NULL),
        ('leases', (SELECT count(*) FROM t.lease), '', NULL),
        ('handler starts', (SELECT count(*) FROM t.exec_log WHERE event = 'start'), '', NULL),
        -- Only runs that need one start, so that failures on purpose do not count.
        ('handler starts of a run that needs one', (SELECT sum(s.n) / count(DISTINCT s.run) FROM t.start s JOIN t.known k USING (run)
             WHERE k.kase IN ('effect', 'sleep', 'delayed', 'deaf', 'rival', 'permanent', 'badresult')), '', 1.25),
        ('the same before the first fault', (SELECT sum(s.n) / count(DISTINCT s.run) FROM t.start s JOIN t.known k USING (run)
             JOIN workflow_run r ON r.id = s.run
             WHERE k.kase IN ('effect', 'sleep', 'delayed', 'deaf', 'rival', 'permanent', 'badresult')
               AND r.finished_at < (SELECT min(at) FROM t.ledger WHERE kind IN ('strike', 'exit'))
               AND NOT EXISTS (SELECT FROM t.call c WHERE c.kind = 'retry' AND c.run = r.id)), '', 1),
        ('recovery of a killed worker''s run, p50', (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE single), 's', 4),
        ('recovery of a killed worker''s run, p95', (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE single), 's', 6),
        ('recovery of a killed worker''s run, p99', (SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE single), 's', 8),
        ('server ready to first settle, longest', (SELECT max(seconds) FROM t.reconnect WHERE single), 's', 5),
        ('handed back to leased again, p95', (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FROM t.handover WHERE single), 's', 1),
        ('runs of killed workers that were recovered', (SELECT count(*) FROM t.recovery WHERE single), '', NULL),
        ('recovery of a killed worker''s run amid other faults, p50', (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE NOT single), 's', NULL),
        ('recovery of a killed worker''s run amid other faults, p95', (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE NOT single), 's', NULL),
        ('recovery of a killed worker''s run amid other faults, p99', (SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY seconds) FROM t.recovery WHERE NOT single), 's', NULL),
        ('server ready to first settle amid other faults, longest', (SELECT max(seconds) FROM t.reconnect WHERE NOT single), 's', NULL),
        ('handed back to leased again amid other faults, p95', (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FROM t.handover WHERE NOT single), 's', NULL),
        ('calls to the outside per run that made one', (SELECT count(*)::float8 / nullif(count(DISTINCT line->>'run'), 0) FROM t.ledger WHERE kind = 'call'), '', NULL)
    ) f (name, value, unit, goal);

-- What must have happened; otherwise the run has not tested it. said is filled from the workers' logs.
CREATE TABLE t.must AS
    SELECT * FROM (VALUES
        ('stale settle refused', (SELECT sum(n)::bigint FROM t.said WHERE what = 'stale settle refused')),
        ('stale heartbeat refused', (SELECT sum(n)::bigint FROM t.said WHERE what = 'lease is gone')),
        ('commit of a settle unknown, and done', (SELECT count(*) FROM t.ledger WHERE kind = 'cut' AND line->>'statement' IN ('settle', 'commit') AND line->>'worker' <> 'client' AND (line->>'committed')::boolean)),
        ('commit of a settle unknown, and not done', (SELECT count(*) FROM t.ledger WHERE kind = 'cut' AND line->>'statement' IN ('settle', 'commit') AND line->>'worker' <> 'client' AND (line->>'committed')::boolean IS NOT TRUE)),
        ('settle came before the cancel', (SELECT count(*) FROM t.call c JOIN workflow_run r ON r.id = c.run
             WHERE c.kind = 'cancel' AND c.answer LIKE 'too late%' AND r.finished_at BETWEEN c.sent - interval '200 ms' AND c.at)),
        ('cancel came before the settle', (SELECT count(*) FROM t.ending e JOIN t.finish f USING (run, lease_no) WHERE e.status = 'cancelled' AND f.outcome IN ('ok', 'cancelled'))),
        ('lease expired under a living handler', (SELECT count(*) FROM t.ending e JOIN t.finish f USING (run, lease_no)
             WHERE e.status = 'pending' AND NOT e.by_holder AND f.at > e.at)),
        ('deadlock or serialization failure repeated', (SELECT sum(n)::bigint FROM t.said WHERE what = 'deadlock')),
        ('run failed because it killed its process', (SELECT count(*) FROM workflow_run WHERE status = 'failed' AND error->>'code' = 'lease_expired')),
        ('worker handed its runs back', (SELECT count(*) FROM t.ending WHERE status = 'pending' AND by_holder AND attempt < attempt_was)),
        ('step carried on', (SELECT count(*) FROM t.transition s JOIN t.transition l ON l.run = s.run AND l.begun = s.begun WHERE s.was IS NULL AND l.was = 'pending' AND l.status = 'leased')),
        ('lease ahead taken back that had not begun', (SELECT count(*) FROM t.ending WHERE unbegun)),
        ('worker gave up a lease it could not extend', (SELECT sum(n)::bigint FROM t.said WHERE what = 'lease given up')),
        ('enqueue unknown, and done', (SELECT count(*) FROM t.ledger WHERE kind = 'cut' AND line->>'statement' = 'enqueue' AND (line->>'committed')::boolean)),
        ('worker ended because its memory was gone', (SELECT sum(n)::bigint FROM t.said WHERE what = 'out of memory')),
        ('server restarted', (SELECT count(*) FROM t.outage)),
        ('transaction rolled back after an enqueue', (SELECT count(*) FROM t.enqueue WHERE answer = 'rolled back')),
        ('duplicate enqueue answered with the first run', (SELECT count(*) FROM (SELECT key FROM t.enqueue WHERE key IS NOT NULL AND answer = 'done' GROUP BY key HAVING count(*) > 1) d)),
        ('duplicate enqueue with another payload refused', (SELECT count(*) FROM t.enqueue WHERE answer = 'conflict')),
        ('step''s lease lost, and taken over by another', (SELECT count(*) FROM t.ending e JOIN t.step s USING (run) JOIN t.lease was USING (run, lease_no)
             JOIN t.lease n ON n.run = e.run AND n.lease_no = e.lease_no + 1 AND n.slot <> was.slot WHERE NOT e.by_holder AND e.status IN ('pending', 'leased'))),
        ('join fired after a branch''s worker was killed', (SELECT count(*) FROM t.firing f JOIN t.step s USING (instance) JOIN t.lease l USING (run) JOIN t.ending e USING (run, lease_no)
             JOIN t.ledger x ON x.kind = 'exit' AND x.line->>'worker' = l.slot AND x.line->>'answer' = 'kill' AND x.at BETWEEN l.at AND e.at
             WHERE NOT e.by_holder AND e.at < f.at)),
        ('branches of a join were done within 5 ms', (SELECT count(*) FROM (SELECT f.at - lag(f.at) OVER (PARTITION BY a.join_id ORDER BY f.at) AS apart
             FROM join_arrival a JOIN t.step s ON s.token = a.token_id AND s.status = 'succeeded' JOIN t.finish f USING (run) WHERE f.outcome = 'ok') g WHERE apart <= interval '5 ms')),
        ('loop re-entered a fork', (SELECT count(*) FROM (SELECT instance_id FROM parallel_group GROUP BY instance_id, node, parent_group_id HAVING count(*) > 1) g)),
        ('step undone after its instance failed', (SELECT count(*) FROM t.deed d JOIN t.instance i USING (instance) WHERE d.undoes IS NOT NULL AND i.status = 'FAILED')),
        ('undo of a step that nobody knows to have been done', (SELECT count(*) FROM compensation_record WHERE NOT certain)),
        ('message came before its wait', (SELECT count(*) FROM message m JOIN t.step s ON s.payload->>'message' = m.id::text
             WHERE m.received_at < (SELECT max(v.at) FROM t.movement v WHERE v.token = s.token AND v.node = s.node AND v.state = 'Waiting'))),
        ('wait came before its message', (SELECT count(*) FROM message m JOIN t.step s ON s.payload->>'message' = m.id::text
             WHERE m.received_at > (SELECT max(v.at) FROM t.movement v WHERE v.token = s.token AND v.node = s.node AND v.state = 'Waiting'))),
        ('instance cancelled while a step was at work', (SELECT count(*) FROM t.ending e JOIN t.step s USING (run) JOIN t.instance i USING (instance) WHERE e.status = 'cancelled' AND i.status = 'CANCELLED')),
        ('instance paused', (SELECT count(*) FROM t.turn WHERE paused)),
        ('incident tried again', (SELECT count(*) FROM t.order WHERE kase = 'again' AND status = 'succeeded')),
        ('step stopped by an incident, and done when it was tried again', (SELECT count(DISTINCT s.run) FROM incident x JOIN t.step s ON s.token = x.token_id AND s.node = x.node AND s.status = 'succeeded'
             WHERE x.code = 'handler_error' AND x.resolved_at IS NOT NULL)),
        ('second start with a key', (SELECT count(*) FROM (SELECT result->>'instance' FROM t.order WHERE kase = 'start' AND status = 'succeeded' GROUP BY 1 HAVING count(*) > 1) k)),
        ('event came twice', (SELECT count(*) FROM (SELECT event FROM t.arrival WHERE ok GROUP BY event HAVING count(*) > 1) e)),
        ('event was refused, and came later', (SELECT count(*) FROM t.sent s WHERE s.first_ok IS NOT NULL AND EXISTS (SELECT FROM t.arrival a WHERE a.event = s.event AND NOT a.ok AND a.ended < s.first_ok))),
        ('run that cannot be leased was set aside', (SELECT count(*) FROM t.aside a JOIN t.known k ON k.run::text = a.id WHERE k.kase = 'unleasable')),
        ('event that cannot be marked was parked', (SELECT count(*) FROM outbox_delivery d JOIN outbox_event o ON o.id = d.event_id WHERE o.event_type = 'torture.unmarkable' AND d.parked_at IS NOT NULL)),
        ('instance removed by retention', (SELECT count(*) FROM t.removed_process_instance)),
        ('instance paused for longer than retention keeps what is over', (SELECT count(*)
             FROM (SELECT paused, at, lead(at) OVER (PARTITION BY instance ORDER BY seq) AS until FROM t.turn) p
             WHERE p.paused AND p.until > p.at + (SELECT min(x.t_at - i.at) FROM t.removed_process_instance x JOIN t.final i ON i.instance = x.id))),
        ('task completed too late', (SELECT count(*) FROM t.order WHERE kase = 'task' AND status = 'failed'))
    ) m (what, n);
