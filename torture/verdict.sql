-- The verdict, from the database after the drain and from the ledgers outside it. t.ledger and t.exec_log have been
-- loaded from the files. Only this file knows the product's tables. The table t.invariant below has one row for each
-- rule, and n must be 0.

CREATE TABLE t.back AS SELECT id FROM (SELECT id FROM process_instance UNION ALL SELECT id FROM t.removed_process_instance) i GROUP BY id HAVING count(*) > 1;
SELECT t.put_back(); -- the rows that retention has removed
CREATE INDEX ON chaos_effect (run_id);
CREATE INDEX ON outbox_event (aggregate_id);
CREATE INDEX ON t.ledger (kind, at);
CREATE INDEX ON t.may_begin (token);
ANALYZE;

CREATE TABLE t.enqueue AS
    SELECT (line->>'run')::uuid AS run, line->>'type' AS type, line->>'case' AS kase, line->'payload' AS payload, line->>'key' AS key,
           coalesce((line->>'emit')::int, 0) AS emit, (line->>'run_at')::timestamptz AS run_at, line->>'answer' AS answer, at
    FROM t.ledger WHERE kind = 'enqueue';
CREATE INDEX ON t.enqueue (run);

-- Each run as the clients know it: acknowledged, or at least sent.
CREATE TABLE t.known AS
    SELECT DISTINCT ON (run) * FROM t.enqueue WHERE answer IN ('done', 'unknown') ORDER BY run, answer;
CREATE UNIQUE INDEX ON t.known (run);

-- Also what the engine has enqueued for instances, according to the rows that needed it. I24 and I31 check whether
-- they did need it.
INSERT INTO t.known
    SELECT r.id, r.type, CASE WHEN r.type = 'chaos.step' AND coalesce(r.payload->>'fail', '') <> '' THEN 'declined'
                              WHEN r.type = 'chaos.step' AND (coalesce(r.payload->>'times', '0') <> '0' OR r.payload->>'breaks' = 'true') THEN 'fail'
                              WHEN r.type = 'chaos.step' THEN 'step'
                              WHEN r.type = 'chaos.undo' AND r.payload->'input'->>'reluctant' = 'true' THEN 'reluctant'
                              WHEN r.type = 'chaos.undo' THEN 'undo'
                              WHEN r.type = 'graph.arrive.v1' AND r.payload ? 'child' THEN 'child'
                              WHEN r.type = 'default.cleanup.v1' THEN 'cleanup'
                              ELSE 'engine' END,
           r.payload, NULL, 0, NULL, 'by the engine', r.created_at
    FROM workflow_run r
    WHERE r.created_by ~ ' \[w\d+\]$'
      AND (r.token_id IS NOT NULL OR r.type IN ('graph.match.v1', 'graph.cancel.v1', 'default.cleanup.v1') OR r.type = 'graph.start.v1' AND r.payload ? 'parent');

CREATE TABLE t.call AS
    SELECT kind, (line->>'run')::uuid AS run, line->>'answer' AS answer, (line->>'sent')::timestamptz AS sent, at
    FROM t.ledger WHERE kind IN ('cancel', 'retry', 'delete', 'hold', 'resume', 'priority', 'pause');

CREATE INDEX ON t.call (run);

CREATE TABLE t.outage AS SELECT at AS started, (line->>'until')::timestamptz AS ready FROM t.ledger WHERE kind = 'outage';

-- What keeps a worker from settling for a while, and whom: all, one worker, or some runs.
CREATE TABLE t.hindrance AS
    SELECT line->>'fault' AS fault, line->>'worker' AS whom, at AS began, (line->>'until')::timestamptz AS ended
    FROM t.ledger WHERE kind = 'strike' AND line->>'fault' NOT IN ('kill', 'kill-ahead', 'stop', 'memory', 'answer-lost', 'never-sent', 'sessions', 'snapshot', 'forge')
    UNION ALL
    SELECT 'busy', 'all', at, (line->>'until')::timestamptz FROM t.ledger WHERE kind = 'busy'; -- not a fault: the machine was overloaded

-- What the product reports as set aside because the database refuses to have it leased.
CREATE TABLE IF NOT EXISTS t.aside (kind text, id text, sqlstate text, message text);
DO $$
BEGIN
    IF to_regclass('workflow_set_aside') IS NOT NULL THEN
        INSERT INTO t.aside SELECT kind, id::text, sqlstate, message FROM workflow_set_aside;
    END IF;
END
$$;

-- Leases and how they ended, from the log of transitions.
CREATE TABLE t.lease AS
    SELECT run, lease_no, at, split_part(leased_by, '-', 1) AS slot, attempt, attempt_was, max_attempts, run_at, seq
    FROM t.transition WHERE status = 'leased' AND lease_no > lease_no_was;
CREATE UNIQUE INDEX ON t.lease (run, lease_no);

CREATE TABLE t.ending AS
    SELECT run, lease_no_was AS lease_no, at, begun, run_at, status, coalesce(by_holder, false) AS by_holder, coalesce(joined, false) AS joined, code, app,
           lease_until_was, attempt, attempt_was, seq,
           -- A lease ahead has a token of UUID version 8. Nobody has stored that its handler may begin.
           get_byte(uuid_send(token_was), 6) >> 4 = 8 AND NOT EXISTS (SELECT FROM t.may_begin m WHERE m.token = token_was) AS unmarked,
           false AS unbegun
    FROM t.transition WHERE was = 'leased' AND (status IS DISTINCT FROM 'leased' OR lease_no > lease_no_was);
CREATE INDEX ON t.ending (run, lease_no);
-- A lease ahead that was taken back before its handler might begin, without a charge.
UPDATE t.ending SET unbegun = true WHERE unmarked AND status = 'pending' AND NOT by_holder AND attempt = attempt_was - 1;

CREATE TABLE t.start AS SELECT run, lease_no, min(at) AS at, count(*) AS n, min(split_part(worker, '-', 1)) AS slot FROM t.exec_log WHERE event = 'start' GROUP BY 1, 2;
CREATE TABLE t.finish AS SELECT run, lease_no, max(at) AS at, max(outcome) AS outcome FROM t.exec_log WHERE event = 'end' GROUP BY 1, 2;
CREATE UNIQUE INDEX ON t.start (run, lease_no);
CREATE UNIQUE INDEX ON t.finish (run, lease_no);

-- What the history must say, and what it says, in the same form.
CREATE TABLE t.told AS
    SELECT workflow_id AS run, CASE WHEN event_type IN ('retried', 'postponed', 'released') THEN 'handed back' ELSE event_type END AS event,
           CASE WHEN event_type NOT IN ('created', 'deleted', 'requeued') THEN lease_no END AS lease_no, id
    FROM workflow_event WHERE event_type NOT IN ('held', 'resumed', 'edited', 'started') AND NOT event_type ^@ 'app.';
CREATE TABLE t.seen_to_happen AS
    SELECT run, 'created' AS event, NULL::bigint AS lease_no FROM t.transition WHERE was IS NULL
    UNION ALL
    SELECT run, 'leased', lease_no FROM t.lease
    UNION ALL
    SELECT run, CASE WHEN status = 'leased' OR status = 'pending' AND NOT by_holder AND NOT unbegun THEN 'expired'
                     WHEN status = 'pending' THEN 'handed back' ELSE status END, lease_no FROM t.ending
    UNION ALL
    SELECT run, CASE status WHEN 'pending' THEN 'requeued' ELSE status END, CASE WHEN status <> 'pending' THEN lease_no END
    FROM t.transition WHERE was <> 'leased' AND status <> was AND status <> 'leased'
    UNION ALL
    SELECT run, 'deleted', NULL FROM (SELECT run, deleted, lag(deleted) OVER (PARTITION BY run ORDER BY seq) AS was FROM t.transition) d
    WHERE deleted AND NOT was;

-- Instances, as their clients requested them.
CREATE TABLE t.born AS
    SELECT line->>'text' AS tag, line->>'process' AS process, line->>'key' AS key, line->'expect' AS expect, line->>'answer' AS ends FROM t.ledger WHERE kind = 'instance';
CREATE TABLE t.wish AS
    SELECT b.tag, w.key AS node, (w.value->>0)::int AS least, (w.value->>1)::int AS most FROM t.born b, jsonb_each(b.expect) w;
CREATE INDEX ON t.wish (tag);
-- For each join, the step after it and the last steps before it; and the lengths of waits.
CREATE TABLE t.joint AS
    SELECT line->>'process' AS process, j->>'after' AS after, b AS branch
    FROM t.ledger, jsonb_array_elements(CASE jsonb_typeof(line->'payload'->'joins') WHEN 'array' THEN line->'payload'->'joins' ELSE '[]' END) j, jsonb_array_elements_text(j->'branches') b
    WHERE kind = 'define';
CREATE TABLE t.pause AS
    SELECT line->>'process' AS process, w.key AS node, w.value::float8 * interval '1 ms' AS long FROM t.ledger, jsonb_each_text(line->'payload'->'waits') w WHERE kind = 'define';

CREATE TABLE t.instance AS
    SELECT i.id AS instance, i.status, i.ending, i.parent_process_instance_id AS parent, i.undone_with_parent AS lent, i.input_payload->>'tag' AS tag, i.business_key AS key, d.name AS process,
        (SELECT jsonb_object_agg(n.key, n.value) FROM (
            SELECT key, value FROM jsonb_each(d.definition->'nodes')
            UNION ALL SELECT n.key, n.value FROM jsonb_each(d.definition->'nodes') o, jsonb_each(o.value->'scope'->'nodes') n) n) AS nodes
    FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id;
CREATE UNIQUE INDEX ON t.instance (instance);
-- An instance with its direct and indirect callers.
CREATE TABLE t.kin AS
    WITH RECURSIVE up AS (SELECT instance, instance AS elder FROM t.instance
                          UNION SELECT up.instance, i.parent FROM up JOIN t.instance i ON i.instance = up.elder WHERE i.parent IS NOT NULL)
    SELECT * FROM up;
CREATE INDEX ON t.kin (instance);
CREATE TABLE t.final AS SELECT instance, min(at) AS at, min(begun) AS begun FROM t.turn WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED') GROUP BY 1;
CREATE TABLE t.step AS
    SELECT r.id AS run, r.token_id AS token, k.instance_id AS instance, r.node, r.type, r.status, r.payload
    FROM workflow_run r LEFT JOIN process_token k ON k.id = r.token_id WHERE r.token_id IS NOT NULL;
CREATE UNIQUE INDEX ON t.step (run);
CREATE INDEX ON t.step (token, node);
CREATE INDEX ON t.step (instance);
-- Effects of steps, as the steps recorded them.
CREATE TABLE t.deed AS SELECT e.run_id AS run, e.tag, e.node, e.undoes, e.at, s.instance FROM chaos_effect e JOIN t.step s ON s.run = e.run_id;
CREATE INDEX ON t.deed (tag, node);
CREATE INDEX ON t.deed (undoes);
CREATE INDEX ON t.deed (run);
-- Commands to the engine about instances, and when they took effect.
CREATE TABLE t.order AS
    SELECT k.run, k.kase, k.payload, k.answer, e.at, e.begun, r.status, r.result FROM t.known k JOIN workflow_run r ON r.id = k.run
    LEFT JOIN t.ending e ON e.run = k.run AND e.status = 'succeeded'
    WHERE k.kase IN ('start', 'message', 'task', 'halt', 'again', 'signal');
ANALYZE;

-- Events as their consumer has seen them, with the first and last time, and those that it has acknowledged.
CREATE TABLE t.arrival AS
    SELECT (line->>'run')::uuid AS event, line->>'type' AS type, line->>'key' AS aggregate, line->'payload' AS payload,
           coalesce(line->>'answer', '') = 'ok' AS ok, (line->>'sent')::timestamptz AS began, at AS ended
    FROM t.ledger WHERE kind = 'event';
CREATE INDEX ON t.arrival (event);
CREATE INDEX ON outbox_event (event_uuid);
CREATE TABLE t.sent AS
    SELECT o.id, o.event_uuid AS event, o.aggregate_id AS aggregate, o.parked_at IS NOT NULL AS parked, min(a.began) AS first_seen, min(a.ended) FILTER (WHERE a.ok) AS first_ok
    FROM outbox_event o LEFT JOIN t.arrival a ON a.event = o.event_uuid GROUP BY o.id;
CREATE TABLE t.dispatching AS SELECT min(created_at) AS since FROM outbox_sink; -- null: no dispatcher runs
ANALYZE;

-- The allowed outcomes of cases. blameless: a case that never fails on its own, so any failure has another cause.
CREATE TABLE t.kase (kase text PRIMARY KEY, blameless boolean NOT NULL, may_succeed boolean NOT NULL);
INSERT INTO t.kase VALUES
    ('effect', true, true), ('sleep', true, true), ('delayed', true, true), ('deaf', true, true), ('rival', true, true), ('leak', true, true),
    ('fail', false, true), ('external', false, true), ('permanent', false, false), ('overdue', false, true), ('panic', false, false),
    ('badresult', false, false), ('unleasable', false, true), ('cleanup', false, true), ('forged', false, true), ('exit', true, false), ('gopanic', true, false),
    ('step', true, true), ('declined', false, false), ('undo', true, true), ('reluctant', false, true), ('engine', true, true), ('child', false, true),
    ('start', true, true), ('message', true, true), ('signal', true, true), ('task', false, true), ('halt', false, true), ('again', false, true);

CREATE VIEW t.broken (rule, run) AS
    SELECT 'I01 enqueue was acknowledged, and is lost or altered', e.run
    FROM t.enqueue e LEFT JOIN workflow_run r ON r.id = e.run
    WHERE e.answer = 'done' AND (r.id IS NULL OR r.type <> e.type OR r.payload IS DISTINCT FROM e.payload OR r.idempotency_key IS DISTINCT FROM e.key)
UNION ALL
    SELECT 'I01b run that nobody has enqueued, or that was rolled back', r.id
    FROM workflow_run r WHERE NOT EXISTS (SELECT FROM t.known k WHERE k.run = r.id)
UNION ALL
    SELECT 'I02 stuck: not finished after the drain', r.id FROM workflow_run r
    WHERE r.status IN ('pending', 'leased') AND r.deleted_at IS NULL AND NOT EXISTS (SELECT FROM t.known k WHERE k.run = r.id AND k.kase IN ('unleasable', 'cleanup'))
UNION ALL
    SELECT 'I03 succeeded without exactly one effect', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id
    WHERE r.status = 'succeeded' AND r.type IN ('chaos.effect', 'chaos.step', 'chaos.undo') AND (SELECT count(*) FROM chaos_effect e WHERE e.run_id = r.id) <> 1
UNION ALL
    SELECT 'I04 effect of a run that did not succeed', e.run_id FROM chaos_effect e LEFT JOIN workflow_run r ON r.id = e.run_id
    WHERE r.status IS DISTINCT FROM 'succeeded'
UNION ALL
    SELECT 'I05 effect of another lease than the one that succeeded', e.run_id FROM chaos_effect e
    WHERE NOT EXISTS (SELECT FROM t.ending s WHERE s.run = e.run_id AND s.lease_no = e.lease_no AND s.status = 'succeeded' AND s.by_holder)
UNION ALL
    SELECT 'I05b settled by another process than the one that held the lease', run FROM t.transition
    WHERE was = 'leased' AND (settled OR status IN ('succeeded', 'failed')) AND by_holder IS NOT TRUE
UNION ALL
    SELECT 'I05c settled without a start under that lease', e.run
    FROM t.ending e JOIN t.lease l USING (run, lease_no) LEFT JOIN t.start s USING (run, lease_no)
    WHERE e.by_holder AND l.attempt > l.attempt_was AND e.attempt = e.attempt_was AND e.status <> 'cancelled' AND s.run IS NULL
      AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = e.run AND r.type ^@ 'graph.') -- the handlers of the engine keep no log
UNION ALL
    SELECT 'I06 success of which no handler knows', s.run FROM t.ending s LEFT JOIN t.finish f USING (run, lease_no)
    WHERE s.status = 'succeeded' AND f.outcome IS DISTINCT FROM 'ok' AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = s.run AND r.type ^@ 'graph.')
UNION ALL
    SELECT 'I07 lease taken away while it was valid', run FROM t.ending
    WHERE NOT by_holder AND status IN ('pending', 'leased') AND at < lease_until_was
UNION ALL
    SELECT 'I07b lease extended by somebody else', run FROM t.transition
    WHERE was = 'leased' AND status = 'leased' AND lease_no = lease_no_was AND lease_until <> lease_until_was
      AND app <> split_part(leased_by_was, '-', 1)
UNION ALL
    SELECT 'I08 lease numbers with gaps', run FROM t.lease GROUP BY run HAVING max(lease_no) <> count(*) OR min(lease_no) <> 1
UNION ALL
    SELECT 'I09 lease that was not charged', run FROM t.lease WHERE attempt <> attempt_was + CASE WHEN attempt_was < max_attempts THEN 1 ELSE 0 END
UNION ALL
    SELECT 'I09b attempt given back by other than a hand-over', run FROM t.ending
    WHERE attempt <> attempt_was AND NOT (attempt = attempt_was - 1 AND status = 'pending' AND (by_holder OR joined OR unbegun))
UNION ALL
    SELECT 'I09c begun and not charged', s.run FROM t.start s JOIN t.ending e USING (run, lease_no) WHERE e.unbegun
UNION ALL
    -- The second is for exhausted runs, which are charged nothing, and never begin.
    SELECT 'I09d charged though it may not have begun', e.run FROM t.ending e JOIN t.lease l USING (run, lease_no)
    WHERE e.unmarked AND NOT e.by_holder AND e.status IN ('pending', 'leased') AND e.attempt = e.attempt_was
      AND l.attempt > l.attempt_was
UNION ALL
    SELECT 'I10 more charged starts than max_attempts', s.run
    FROM t.start s JOIN workflow_run r ON r.id = s.run
    WHERE NOT EXISTS (SELECT FROM t.ending e WHERE e.run = s.run AND e.lease_no = s.lease_no AND e.attempt < e.attempt_was)
    GROUP BY s.run, r.max_attempts HAVING count(*) > r.max_attempts
UNION ALL
    SELECT 'I11 started without a lease, or twice on one', s.run FROM t.start s LEFT JOIN t.lease l USING (run, lease_no)
    WHERE l.run IS NULL OR s.n > 1 OR s.slot <> l.slot
UNION ALL
    SELECT 'I11b one lease that called the outside twice', (line->>'run')::uuid FROM t.ledger WHERE kind = 'call'
    GROUP BY line->>'run', line->>'lease_no' HAVING count(*) > 1
UNION ALL
    SELECT 'I12 something after the end', run FROM t.transition
    WHERE was IN ('succeeded', 'cancelled', 'failed') AND (status <> was AND was <> 'failed' OR status = was AND (lease_no <> lease_no_was OR attempt <> attempt_was))
UNION ALL
    SELECT 'I12b failed run that came back unasked', x.run FROM t.transition x WHERE x.was = 'failed' AND x.status <> 'failed'
    GROUP BY x.run HAVING count(*) > (SELECT count(*) FROM t.call c WHERE c.kind = 'retry' AND c.run = x.run AND c.answer IN ('pending', 'unknown'))
UNION ALL
    SELECT 'I13 history lacks an event', run FROM (SELECT run, event, lease_no FROM t.seen_to_happen EXCEPT ALL SELECT run, event, lease_no FROM t.told) x
UNION ALL
    SELECT 'I13b history tells what did not happen', run FROM (SELECT run, event, lease_no FROM t.told EXCEPT ALL SELECT run, event, lease_no FROM t.seen_to_happen) x
UNION ALL
    SELECT 'I13c history does not end with the status', r.id
    FROM workflow_run r JOIN (SELECT DISTINCT ON (run) run, event FROM t.told WHERE event <> 'deleted' ORDER BY run, id DESC) l ON l.run = r.id
    WHERE r.status <> CASE WHEN l.event IN ('created', 'handed back', 'expired', 'requeued') THEN 'pending' ELSE l.event END
UNION ALL
    SELECT 'I14 acknowledged cancel that did not hold', c.run FROM t.call c LEFT JOIN workflow_run r ON r.id = c.run
    WHERE c.kind = 'cancel' AND c.answer = 'cancelled' AND r.status IS DISTINCT FROM 'cancelled'
UNION ALL
    SELECT 'I14b acknowledged delete that did not hold', c.run FROM t.call c LEFT JOIN workflow_run r ON r.id = c.run
    WHERE c.kind = 'delete' AND c.answer = 'deleted' AND (r.deleted_at IS NULL OR r.status = 'leased')
UNION ALL
    SELECT 'I15 events that do not match the success', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id
    WHERE (SELECT count(*) FROM outbox_event o WHERE o.aggregate_id = r.id AND o.event_type = 'chaos.effect'
           AND (o.payload->>'lease_no')::bigint = r.lease_no) <> CASE r.status WHEN 'succeeded' THEN k.emit ELSE 0 END
       OR (SELECT count(*) FROM outbox_event o WHERE o.aggregate_id = r.id AND o.event_type NOT LIKE ALL ('{process.%,incident.%,run.%,torture.%}')) <> CASE r.status WHEN 'succeeded' THEN k.emit ELSE 0 END
UNION ALL
    SELECT 'I15c runs that failed, and events of it: not as many', coalesce(f.run, o.run)
    FROM (SELECT run, count(*) AS n FROM t.transition WHERE status = 'failed' AND was <> 'failed' AND begun >= (SELECT since FROM t.dispatching) GROUP BY run) f
    FULL JOIN (SELECT aggregate_id AS run, count(*) AS n FROM outbox_event WHERE event_type = 'run.failed' GROUP BY 1) o USING (run)
    WHERE f.n IS DISTINCT FROM o.n
UNION ALL
    SELECT 'I17 event that came altered, or from nowhere', a.event FROM t.arrival a LEFT JOIN outbox_event o ON o.event_uuid = a.event
    WHERE o.id IS NULL OR (o.event_type, o.aggregate_id::text, o.payload) IS DISTINCT FROM (a.type, a.aggregate, a.payload)
UNION ALL
    SELECT 'I18 event marked as published that was never acknowledged', o.event_uuid FROM outbox_event o JOIN t.sent s USING (id)
    WHERE (o.published_at IS NOT NULL OR 'events' = ANY (o.delivered_to)) AND s.first_ok IS NULL
UNION ALL
    SELECT 'I18b event neither published nor parked', o.event_uuid FROM outbox_event o
    WHERE o.published_at IS NULL AND o.parked_at IS NULL AND (SELECT since FROM t.dispatching) IS NOT NULL AND o.event_type <> 'torture.unmarkable'
UNION ALL
    SELECT 'I19 event that came before the one before it of its aggregate', event
    FROM (SELECT event, first_seen, row_number() OVER w > 1 AS second, lag(first_ok) OVER w AS before FROM t.sent WHERE NOT parked WINDOW w AS (PARTITION BY aggregate ORDER BY id)) x
    WHERE second AND first_seen < coalesce(before, 'infinity')
UNION ALL
    SELECT 'I15b event of a run or an instance that is not there', o.aggregate_id FROM outbox_event o
    WHERE CASE WHEN o.event_type LIKE ANY ('{process.%,incident.%}') THEN NOT EXISTS (SELECT FROM process_instance i WHERE i.id = o.aggregate_id)
               ELSE NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = o.aggregate_id) END
      AND o.event_type <> 'torture.unmarkable'
UNION ALL
    -- The worker lived, it had time, nothing blocked it, and still the outcome of the handler was not recorded.
    SELECT 'I16 outcome that its worker has forgotten', f.run
    FROM t.finish f JOIN t.ending e USING (run, lease_no) JOIN t.lease l USING (run, lease_no)
    WHERE f.outcome = 'ok' AND NOT e.by_holder AND e.status IN ('pending', 'leased') AND e.lease_until_was > f.at + interval '2 seconds'
      AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind = 'exit' AND x.line->>'worker' = l.slot AND x.at BETWEEN f.at AND e.at)
      AND NOT EXISTS (SELECT FROM t.hindrance h WHERE (h.whom IN ('all', l.slot) OR h.whom LIKE '%' || f.run || '%')
                      AND h.began < e.at AND h.ended > f.at - interval '0.5 seconds') -- a process that thaws gives its leases up at once
UNION ALL
    -- The same if something had blocked it, but not in the last four seconds, in which it still held the lease.
    SELECT 'I16b outcome that its worker has forgotten over trouble', f.run
    FROM t.finish f JOIN t.ending e USING (run, lease_no) JOIN t.lease l USING (run, lease_no)
    WHERE f.outcome = 'ok' AND NOT e.by_holder AND e.status IN ('pending', 'leased')
      AND f.at < e.at - interval '4 seconds' AND e.lease_until_was > e.at - interval '1.5 seconds'
      AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind = 'exit' AND x.line->>'worker' = l.slot AND x.at BETWEEN f.at AND e.at)
      AND NOT EXISTS (SELECT FROM t.hindrance h WHERE (h.whom IN ('all', l.slot) OR h.whom LIKE '%' || f.run || '%') AND h.began < e.at AND h.ended > e.at - interval '4 seconds')
UNION ALL
    SELECT 'I30 two runs for one key', min(id::text)::uuid FROM workflow_run
    WHERE idempotency_key IS NOT NULL AND deleted_at IS NULL GROUP BY idempotency_key HAVING count(*) > 1
UNION ALL
    SELECT 'I30b one key, two answers', min(e.run::text)::uuid FROM t.enqueue e
    WHERE e.key IS NOT NULL AND e.answer = 'done' GROUP BY e.key
    HAVING count(DISTINCT e.run) > 1 AND NOT bool_or(EXISTS (SELECT FROM t.call c WHERE c.kind = 'delete' AND c.run = e.run))
UNION ALL
    SELECT 'I32 started before its time', s.run FROM t.start s JOIN t.known k USING (run) WHERE s.at < k.run_at - interval '5 ms'
UNION ALL
    SELECT 'I32b leased before its time', run FROM t.lease WHERE at < run_at - interval '5 ms'
UNION ALL
    SELECT 'I34 trouble of the database charged to a run', s.run FROM t.ending s JOIN t.known k USING (run) JOIN t.kase c USING (kase)
    LEFT JOIN t.finish f ON f.run = s.run AND f.lease_no = s.lease_no
    WHERE c.blameless AND s.by_holder AND s.code IS DISTINCT FROM 'lease_expired' AND (s.code = 'time_limit' AND f.outcome = 'deadline') IS NOT TRUE -- it was executing for all of its time
      AND (s.status = 'failed' OR s.status = 'pending' AND s.attempt = s.attempt_was)
UNION ALL
    SELECT 'I35 given up with attempts left', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id JOIN t.kase c USING (kase)
    WHERE r.status = 'failed' AND r.attempt < r.max_attempts AND k.kase NOT IN ('permanent', 'badresult', 'declined', 'reluctant', 'child', 'task', 'halt', 'again', 'forged')
UNION ALL
    SELECT 'I36 succeeded though it cannot', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id JOIN t.kase c USING (kase)
    WHERE r.status = 'succeeded' AND NOT c.may_succeed
UNION ALL
    SELECT 'I38 lease that reaches beyond its deadline', x.run FROM t.transition x JOIN t.lease l USING (run, lease_no)
    WHERE x.status = 'leased' AND (x.deadline_at IS NULL OR x.deadline_at > l.at + interval '500 ms' AND x.lease_until > x.deadline_at)
UNION ALL
    SELECT 'I47 run that cannot be leased, and nobody is told', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id
    WHERE k.kase = 'unleasable' AND r.status IN ('pending', 'leased') AND r.deleted_at IS NULL
      AND NOT EXISTS (SELECT FROM t.aside a WHERE a.id = r.id::text AND a.message <> '')
UNION ALL
    SELECT 'I47b run that was set aside, and can be leased', r.id FROM t.aside a JOIN workflow_run r ON r.id::text = a.id
    WHERE NOT EXISTS (SELECT FROM t.known k WHERE k.run = r.id AND k.kase = 'unleasable')
UNION ALL
    -- From before the run was due until the end there was a worker that nothing blocked.
    SELECT 'I47c run kept waiting since there was one that cannot be leased', k.run
    FROM t.known k JOIN t.lease l ON l.run = k.run AND l.lease_no = 1
    CROSS JOIN LATERAL (SELECT greatest(k.at, l.run_at, (SELECT min(at) FROM t.enqueue WHERE kase = 'unleasable')) AS at) due
    WHERE k.answer = 'done' AND k.kase <> 'unleasable' AND EXISTS (SELECT FROM t.enqueue WHERE kase = 'unleasable') AND l.at > due.at + interval '5 seconds'
      AND NOT EXISTS (SELECT FROM t.call c WHERE c.run = k.run AND c.kind = 'hold')
      AND EXISTS (SELECT FROM (SELECT DISTINCT slot FROM t.lease) s
                  WHERE NOT EXISTS (SELECT FROM t.hindrance h WHERE h.whom IN ('all', s.slot) AND h.began < due.at + interval '5 seconds' AND h.ended > due.at - interval '3 seconds')
                    AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind IN ('start', 'exit') AND x.line->>'worker' = s.slot
                                    AND x.at BETWEEN due.at - interval '5 seconds' AND due.at + interval '5 seconds'))

UNION ALL
    -- The row accepts no change: outbox_delivery says where the event is parked, and why.
    SELECT 'I48 event that cannot be marked, and nobody is told', o.event_uuid FROM outbox_event o
    WHERE o.event_type = 'torture.unmarkable' AND (SELECT since FROM t.dispatching) IS NOT NULL
      AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id AND d.parked_at IS NOT NULL AND d.last_error LIKE '%this row is not for you%')
UNION ALL
    -- Nothing else blocked anybody.
    SELECT 'I48b event kept waiting since there was one that cannot be marked', s.event
    FROM t.sent s JOIN outbox_event o USING (id)
    WHERE o.event_type <> 'torture.unmarkable' AND NOT s.parked AND coalesce(s.first_ok, 'infinity') > o.created_at + interval '5 seconds'
      AND EXISTS (SELECT FROM outbox_event u WHERE u.event_type = 'torture.unmarkable' AND u.created_at < o.created_at)
      AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind = 'strike' AND x.line->>'fault' NOT IN ('unmarkable', 'events', 'unleasable', 'forge')
                      AND x.at < o.created_at + interval '5 seconds' AND coalesce((x.line->>'until')::timestamptz, x.at) > o.created_at - interval '10 seconds')
      AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind IN ('start', 'exit') AND x.line->>'worker' LIKE 'd%'
                      AND x.at BETWEEN o.created_at - interval '10 seconds' AND o.created_at + interval '5 seconds')
UNION ALL
    -- Retention keeps everything that something alive may still read.
    SELECT 'I49 what had come to an instance was removed before it took it', r.id FROM workflow_run r WHERE r.type = 'graph.arrive.v1' AND r.error->>'code' = 'gone'
UNION ALL
    SELECT 'I49b instance removed before one that has called it was over', x.id
    FROM t.removed_process_instance x JOIN t.kin k ON k.instance = x.id LEFT JOIN t.final f ON f.instance = k.elder WHERE coalesce(f.at, 'infinity') > x.t_at
UNION ALL
    SELECT 'I50 command that only the engine may enqueue was taken from a client', (line->>'run')::uuid FROM t.ledger WHERE kind = 'forged'
UNION ALL
    SELECT 'I50b instance started in the name of a token that has not called it', i.id
    FROM process_instance i JOIN t.known k ON k.run = i.id AND k.kase = 'forged'

-- Processes. The rules return the instance, unless the rule is about one run.
UNION ALL
    SELECT 'I01c start that succeeded without an instance', o.run FROM t.order o
    WHERE o.kase = 'start' AND o.status = 'succeeded' AND NOT EXISTS (SELECT FROM t.instance i WHERE i.instance::text = o.result->>'instance' AND i.tag = o.payload->'input'->>'tag')
UNION ALL
    SELECT 'I01d instance that nobody has started', i.instance FROM t.instance i
    WHERE i.parent IS NULL AND NOT EXISTS (SELECT FROM t.order o WHERE o.kase = 'start' AND o.payload->'input'->>'tag' = i.tag AND o.payload->>'process' = i.process)
UNION ALL
    SELECT 'I14c cancel of an instance that did not hold', i.instance
    FROM t.order o JOIN t.instance i ON i.instance::text = o.payload->>'instance' LEFT JOIN t.final f USING (instance)
    WHERE o.kase = 'halt' AND o.at IS NOT NULL AND i.status <> 'CANCELLED'
      AND (f.at IS NULL OR f.at > o.at AND f.begun <> o.begun) -- in one transaction, the step that ended it may have come first
UNION ALL
    -- According to those who did the work: a step after a join has taken effect only as often as each of its branches
    -- had before.
    SELECT 'I20 join passed before its branches, or too often', i.instance
    FROM (SELECT instance, tag, node, at, row_number() OVER (PARTITION BY tag, node ORDER BY at) AS n FROM t.deed WHERE undoes IS NULL) d
    JOIN t.instance i USING (instance) JOIN t.joint j ON j.process = i.process AND j.after = d.node
    WHERE (SELECT count(*) FROM t.deed b WHERE b.tag = d.tag AND b.node = j.branch AND b.undoes IS NULL AND b.at < d.at) < d.n
UNION ALL
    SELECT 'I20b join that fired otherwise than once, when all had come', j.instance_id FROM parallel_join j
    WHERE (SELECT count(*) FROM t.firing f WHERE f.join_id = j.id) <> CASE WHEN j.fired THEN 1 ELSE 0 END
       OR j.joined <> (SELECT count(DISTINCT a.edge) FROM join_arrival a WHERE a.join_id = j.id AND NOT a.surplus)
       OR j.expected > 0 AND j.fired <> (j.joined >= j.expected)
UNION ALL
    SELECT 'I21 finished instance in which something lives', i.id FROM process_instance i
    WHERE i.completed_at IS NOT NULL AND (i.open_incidents <> 0
       OR EXISTS (SELECT FROM process_token k WHERE k.instance_id = i.id AND k.state IN ('Created', 'Ready', 'Waiting'))
       OR EXISTS (SELECT FROM t.step s WHERE s.instance = i.id AND s.status IN ('pending', 'leased'))
       OR EXISTS (SELECT FROM message_wait w WHERE w.instance_id = i.id)
       OR EXISTS (SELECT FROM user_task u WHERE u.instance_id = i.id AND u.state = 'open')
       OR EXISTS (SELECT FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL AND x.code NOT IN ('not_leased', 'not_reached')))
UNION ALL
    SELECT 'I21b step recorded after its instance was over', e.run FROM t.ending e JOIN t.step s USING (run) JOIN t.final f USING (instance)
    WHERE e.status IN ('succeeded', 'failed') AND e.at > f.at
UNION ALL
    SELECT 'I22 stuck: neither over nor an incident', i.id FROM process_instance i
    WHERE i.completed_at IS NULL AND NOT EXISTS (SELECT FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL)
UNION ALL
    SELECT 'I22b instance that was seen as it can never be', (line->>'run')::uuid FROM t.ledger WHERE kind = 'odd'
UNION ALL
    SELECT 'I23 token that is due without exactly one open run', k.instance_id FROM process_token k
    WHERE k.state = 'Ready' AND (SELECT count(*) FROM t.step s WHERE s.token = k.id AND s.status IN ('pending', 'leased')) <> 1
UNION ALL
    SELECT 'I24 step without a token, or open without a live one', s.run FROM t.step s LEFT JOIN process_token k ON k.id = s.token
    WHERE k.id IS NULL OR s.status IN ('pending', 'leased') AND k.state NOT IN ('Ready', 'Waiting')
UNION ALL
    SELECT 'I25 undone twice', min(instance::text)::uuid FROM t.deed WHERE undoes IS NOT NULL GROUP BY undoes HAVING count(*) > 1
UNION ALL
    SELECT 'I25b undoing recorded twice', min(instance_id::text)::uuid FROM compensation_record WHERE status = 'Completed' GROUP BY run_id HAVING count(*) > 1
UNION ALL
    SELECT 'I26 undone without ever having been done', u.instance FROM t.deed u
    WHERE u.undoes IS NOT NULL AND NOT EXISTS (SELECT FROM t.deed d WHERE d.run = u.undoes)
      AND NOT EXISTS (SELECT FROM compensation_record c WHERE c.run_id = u.undoes AND NOT c.certain)
UNION ALL
    SELECT 'I27 step left over by an instance that has undone its steps', d.instance
    FROM t.instance i JOIN t.deed d USING (instance) JOIN t.step s USING (run)
    WHERE (i.status = 'FAILED' OR i.status = i.ending
       OR i.lent AND i.status = 'COMPLETED' AND EXISTS (SELECT FROM t.instance p WHERE p.instance = i.parent AND (p.status = 'FAILED' OR p.status = p.ending)))
      AND s.payload->>'owes' = 'true' AND d.undoes IS NULL AND NOT EXISTS (SELECT FROM t.deed u WHERE u.undoes = d.run)
UNION ALL
    SELECT 'I28 undone in another order than the reverse', a.instance
    FROM t.deed a JOIN t.deed b USING (instance) JOIN t.ending ua ON ua.run = a.run JOIN t.ending ub ON ub.run = b.run
    JOIN t.ending fa ON fa.run = a.undoes JOIN t.ending fb ON fb.run = b.undoes JOIN t.transition ca ON ca.run = a.run AND ca.was IS NULL
    WHERE ua.status = 'succeeded' AND ub.status = 'succeeded' AND fa.status = 'succeeded' AND fb.status = 'succeeded'
      AND ua.at < ub.at AND fa.at < fb.at AND fb.at < ca.at
UNION ALL
    SELECT 'I29 step went on after its instance had begun to undo', s.instance
    FROM (SELECT instance, min(at) AS at FROM t.turn WHERE ending IS NOT NULL GROUP BY 1) b JOIN t.step s USING (instance) JOIN t.ending e USING (run)
    WHERE s.node NOT LIKE '%/undo' AND e.status IN ('succeeded', 'failed') AND e.at > b.at
UNION ALL
    SELECT 'I30d instance that was started again after its removal', id FROM t.back
UNION ALL
    SELECT 'I30c two instances for one key', min(instance::text)::uuid FROM t.instance WHERE key IS NOT NULL GROUP BY process, key HAVING count(*) > 1
UNION ALL
    -- Each time a token arrives at a step or a timer, its run is enqueued once.
    SELECT 'I31 visit of a node without exactly one run', coalesce(v.instance, r.instance)
    FROM (SELECT m.instance, m.token, m.node, count(*) AS n FROM t.movement m JOIN t.instance i USING (instance)
          WHERE m.mode = 'Forward' AND (i.nodes->m.node ? 'do' AND m.state = 'Ready' OR i.nodes->m.node ? 'wait' AND m.state = 'Waiting' OR i.nodes->m.node ? 'each' AND m.state = 'Ready')
          GROUP BY 1, 2, 3) v
    FULL JOIN (SELECT s.instance, s.token, split_part(s.node, '/', 1) AS node, count(*) AS n FROM t.step s
               WHERE s.node NOT LIKE ALL ('{%/undo,%/on/%,o\_%}') AND s.type IN ('chaos.step', 'graph.timer.v1') AND s.instance IS NOT NULL GROUP BY 1, 2, 3) r USING (token, node)
    WHERE v.n IS DISTINCT FROM r.n
UNION ALL
    SELECT 'I32c wait that was cut short', s.run
    FROM t.step s JOIN t.instance i USING (instance) JOIN t.pause p ON p.process = i.process AND p.node = s.node
    JOIN t.transition c ON c.run = s.run AND c.was IS NULL JOIN t.lease l ON l.run = s.run
    WHERE s.type = 'graph.timer.v1' AND l.at < c.begun + p.long - interval '5 ms'
UNION ALL
    SELECT 'I39 steps took effect otherwise than the graph says', i.instance
    FROM t.instance i JOIN t.born b USING (tag)
    WHERE i.parent IS NULL AND EXISTS (
        SELECT FROM (SELECT CASE WHEN d.undoes IS NULL THEN d.node ELSE 'undo ' || d.node END AS node, count(*) AS n FROM t.deed d
                     WHERE d.tag = i.tag AND (d.undoes IS NULL OR i.status = 'COMPLETED') GROUP BY 1) d
        FULL JOIN (SELECT node, least, most FROM t.wish w WHERE w.tag = i.tag) w USING (node)
        WHERE coalesce(d.n, 0) > coalesce(w.most, 0) OR i.status = 'COMPLETED' AND coalesce(d.n, 0) < w.least)
UNION ALL
    SELECT 'I40 instance that ended otherwise than its graph says', i.instance FROM t.instance i JOIN t.born b USING (tag)
    WHERE i.parent IS NULL AND i.status IN ('COMPLETED', 'FAILED', 'CANCELLED') AND i.status <> b.ends
      AND NOT (i.status = 'CANCELLED' AND EXISTS (SELECT FROM t.order o WHERE o.kase = 'halt' AND o.payload->>'instance' = i.instance::text))
UNION ALL
    SELECT 'I40b child that ended otherwise than its parent went on', c.instance FROM t.instance c JOIN t.instance p ON p.instance = c.parent
    WHERE c.status <> 'COMPLETED' AND (p.status = 'COMPLETED' OR c.status <> 'CANCELLED')
UNION ALL
    SELECT 'I41 history of an instance that is no legal path', instance_id
    FROM (SELECT *, lag(to_status, 1, 'CREATED') OVER (PARTITION BY instance_id ORDER BY id) AS before, lag(version, 1, 0::bigint) OVER (PARTITION BY instance_id ORDER BY id) AS version_before
          FROM process_state_history) h
    WHERE from_status IS DISTINCT FROM before OR version < version_before
       OR (from_status, to_status) NOT IN (('CREATED', 'IN_PROGRESS'), ('CREATED', 'CANCELLED'), ('IN_PROGRESS', 'WAITING'), ('WAITING', 'IN_PROGRESS'), ('IN_PROGRESS', 'COMPLETED'),
                                           ('IN_PROGRESS', 'FAILED'), ('WAITING', 'FAILED'), ('IN_PROGRESS', 'CANCELLED'), ('WAITING', 'CANCELLED'))
UNION ALL
    SELECT 'I41b history of an instance that does not end with its status', i.instance FROM t.instance i
    WHERE i.status IS DISTINCT FROM (SELECT h.to_status FROM process_state_history h WHERE h.instance_id = i.instance ORDER BY id DESC LIMIT 1)
UNION ALL
    SELECT 'I41c instance that changed after its end', instance FROM t.turn WHERE was IN ('COMPLETED', 'FAILED', 'CANCELLED')
UNION ALL
    SELECT 'I42 instance whose counts differ from its tokens', i.id FROM process_instance i
    WHERE (i.live_tokens, i.ready_tokens, i.joining_tokens) NOT IN (
        SELECT count(*) FILTER (WHERE k.state IN ('Created', 'Ready', 'Waiting')), count(*) FILTER (WHERE k.state = 'Ready'),
               count(*) FILTER (WHERE k.state = 'Waiting' AND EXISTS (SELECT FROM join_arrival a WHERE a.token_id = k.id))
        FROM process_token k WHERE k.instance_id = i.id)
       OR i.completed_at IS NULL AND i.open_incidents <> (SELECT count(*) FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL AND x.code NOT IN ('not_leased', 'not_reached'))
UNION ALL
    SELECT 'I43 events that do not match the instance', i.instance FROM t.instance i
    WHERE ARRAY(SELECT o.event_type::text FROM outbox_event o WHERE o.aggregate_id = i.instance AND o.event_type LIKE 'process.%' ORDER BY o.id)
          <> CASE WHEN i.status IN ('COMPLETED', 'FAILED', 'CANCELLED') THEN ARRAY['process.started', 'process.' || lower(i.status)] ELSE ARRAY['process.started'] END
       OR (SELECT count(*) FROM outbox_event o WHERE o.aggregate_id = i.instance AND o.event_type = 'incident.opened') <> (SELECT count(*) FROM incident x WHERE x.instance_id = i.instance)
UNION ALL
    SELECT 'I44 message that came to more than one', min(s.instance::text)::uuid FROM t.step s
    WHERE s.type = 'graph.arrive.v1' AND s.status = 'succeeded' AND s.payload ? 'message' GROUP BY s.payload->>'message' HAVING count(*) > 1
UNION ALL
    SELECT 'I44b one message under two ids', min(m.id::text)::uuid FROM t.order o JOIN message m ON m.id = o.run
    WHERE o.kase = 'message' GROUP BY o.payload->>'id' HAVING count(*) > 1
UNION ALL
    SELECT 'I45 task completed twice', min(run::text)::uuid FROM t.order WHERE kase = 'task' AND status = 'succeeded' GROUP BY payload->>'task' HAVING count(*) > 1
UNION ALL
    -- The second is for runs that were about to be leased or held. A pause without an answer yet may still wait for a
    -- lock on its runs; if its answer was lost, it may wait a while longer.
    SELECT 'I46 step leased while its instance was paused', s.run
    FROM (SELECT instance, paused AND status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED') AS paused, -- an instance that ends while it is paused stays paused, but those that it has called do not
                 at, coalesce(lead(at) OVER (PARTITION BY instance ORDER BY seq), 'infinity') AS until FROM t.turn) p
    JOIN t.kin e ON e.elder = p.instance JOIN t.step s ON s.instance = e.instance JOIN t.lease l USING (run)
    WHERE p.paused AND l.at > p.at + interval '1 s' AND l.at < p.until
      AND NOT EXISTS (SELECT FROM t.ledger u JOIN t.kin k ON k.elder = (u.line->>'run')::uuid -- or it was resumed itself
                      WHERE k.instance = s.instance AND k.elder <> p.instance AND u.kind = 'unpause' AND (u.line->>'sent')::timestamptz < l.at AND u.at > p.at)
      AND NOT EXISTS (SELECT FROM t.call c JOIN t.kin k ON k.elder = c.run WHERE k.instance = s.instance AND c.kind = 'pause' AND c.sent <= p.at
                      AND l.at <= c.at + CASE WHEN c.answer = 'unknown' THEN interval '10 s' ELSE '0' END);

CREATE TABLE t.invariant AS
    SELECT rule, count(DISTINCT run) AS n, (array_agg(DISTINCT run))[1:3] AS examples FROM t.broken GROUP BY rule;
