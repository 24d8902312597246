-- The verdict, from the database after the drain and from the ledgers that were kept outside of
-- it. t.ledger and t.exec_log have been filled from the files. This file alone knows the
-- product's tables; t.invariant below has one row for each rule, and n must be 0.

CREATE INDEX ON chaos_effect (run_id);
CREATE INDEX ON outbox_event (aggregate_id);
CREATE INDEX ON t.ledger (kind, at);
ANALYZE;

CREATE TABLE t.enqueue AS
    SELECT (line->>'run')::uuid AS run, line->>'type' AS type, line->>'case' AS kase, line->'payload' AS payload, line->>'key' AS key,
           coalesce((line->>'emit')::int, 0) AS emit, (line->>'run_at')::timestamptz AS run_at, line->>'answer' AS answer, at
    FROM t.ledger WHERE kind = 'enqueue';
CREATE INDEX ON t.enqueue (run);

-- What each run is, as the clients know it: acknowledged, or at least sent.
CREATE TABLE t.known AS
    SELECT DISTINCT ON (run) * FROM t.enqueue WHERE answer IN ('done', 'unknown') ORDER BY run, answer;
CREATE UNIQUE INDEX ON t.known (run);

CREATE TABLE t.call AS
    SELECT kind, (line->>'run')::uuid AS run, line->>'answer' AS answer, (line->>'sent')::timestamptz AS sent, at
    FROM t.ledger WHERE kind IN ('cancel', 'retry', 'delete', 'hold', 'resume', 'priority');

CREATE INDEX ON t.call (run);

CREATE TABLE t.outage AS SELECT at AS started, (line->>'until')::timestamptz AS ready FROM t.ledger WHERE kind = 'outage';

-- What keeps a worker from settling for a while, and whom: all, one worker, or some runs.
CREATE TABLE t.hindrance AS
    SELECT line->>'fault' AS fault, line->>'worker' AS whom, at AS began, (line->>'until')::timestamptz AS ended
    FROM t.ledger WHERE kind = 'strike' AND line->>'fault' NOT IN ('kill', 'stop', 'memory', 'answer-lost', 'never-sent', 'sessions', 'snapshot');

-- Leases and how they ended, as the log of transitions tells it.
CREATE TABLE t.lease AS
    SELECT run, lease_no, at, split_part(leased_by, '-', 1) AS slot, attempt, attempt_was, max_attempts, run_at, seq
    FROM t.transition WHERE status = 'leased' AND lease_no > lease_no_was;
CREATE UNIQUE INDEX ON t.lease (run, lease_no);

CREATE TABLE t.ending AS
    SELECT run, lease_no_was AS lease_no, at, status, coalesce(by_holder, false) AS by_holder, code, app,
           lease_until_was, attempt, attempt_was, seq
    FROM t.transition WHERE was = 'leased' AND (status IS DISTINCT FROM 'leased' OR lease_no > lease_no_was);
CREATE INDEX ON t.ending (run, lease_no);

CREATE TABLE t.start AS SELECT run, lease_no, min(at) AS at, count(*) AS n, min(split_part(worker, '-', 1)) AS slot FROM t.exec_log WHERE event = 'start' GROUP BY 1, 2;
CREATE TABLE t.finish AS SELECT run, lease_no, max(at) AS at, max(outcome) AS outcome FROM t.exec_log WHERE event = 'end' GROUP BY 1, 2;
CREATE UNIQUE INDEX ON t.start (run, lease_no);
CREATE UNIQUE INDEX ON t.finish (run, lease_no);

-- What the history must say, and what it says, in the same words.
CREATE TABLE t.told AS
    SELECT workflow_id AS run, CASE WHEN event_type IN ('retried', 'postponed', 'released') THEN 'handed back' ELSE event_type END AS event,
           CASE WHEN event_type NOT IN ('created', 'deleted', 'requeued') THEN lease_no END AS lease_no, id
    FROM workflow_event WHERE event_type NOT IN ('held', 'resumed', 'edited');
CREATE TABLE t.seen_to_happen AS
    SELECT run, 'created' AS event, NULL::bigint AS lease_no FROM t.transition WHERE was IS NULL
    UNION ALL
    SELECT run, 'leased', lease_no FROM t.lease
    UNION ALL
    SELECT run, CASE WHEN status = 'leased' OR status = 'pending' AND NOT by_holder THEN 'expired'
                     WHEN status = 'pending' THEN 'handed back' ELSE status END, lease_no FROM t.ending
    UNION ALL
    SELECT run, CASE status WHEN 'pending' THEN 'requeued' ELSE status END, CASE WHEN status <> 'pending' THEN lease_no END
    FROM t.transition WHERE was <> 'leased' AND status <> was AND status <> 'leased'
    UNION ALL
    SELECT run, 'deleted', NULL FROM (SELECT run, deleted, lag(deleted) OVER (PARTITION BY run ORDER BY seq) AS was FROM t.transition) d
    WHERE deleted AND NOT was;
ANALYZE;

-- Which cases may end how. Cases that never fail by themselves: whatever goes wrong with them is not theirs.
CREATE TABLE t.kase (kase text PRIMARY KEY, blameless boolean NOT NULL, may_succeed boolean NOT NULL);
INSERT INTO t.kase VALUES
    ('effect', true, true), ('sleep', true, true), ('delayed', true, true), ('deaf', true, true), ('rival', true, true), ('leak', true, true),
    ('fail', false, true), ('external', false, true), ('permanent', false, false), ('overdue', false, true), ('panic', false, false),
    ('badresult', false, false), ('exit', true, false), ('gopanic', true, false);

CREATE VIEW t.broken (rule, run) AS
    SELECT 'I01 enqueue was acknowledged, and is lost or altered', e.run
    FROM t.enqueue e LEFT JOIN workflow_run r ON r.id = e.run
    WHERE e.answer = 'done' AND (r.id IS NULL OR r.type <> e.type OR r.payload IS DISTINCT FROM e.payload OR r.idempotency_key IS DISTINCT FROM e.key)
UNION ALL
    SELECT 'I01b run that nobody has enqueued, or that was rolled back', r.id
    FROM workflow_run r WHERE NOT EXISTS (SELECT FROM t.known k WHERE k.run = r.id)
UNION ALL
    SELECT 'I02 stuck: not finished after the drain', id FROM workflow_run WHERE status IN ('pending', 'leased') AND deleted_at IS NULL
UNION ALL
    SELECT 'I03 succeeded without exactly one effect', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id
    WHERE r.status = 'succeeded' AND r.type = 'chaos.effect' AND (SELECT count(*) FROM chaos_effect e WHERE e.run_id = r.id) <> 1
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
UNION ALL
    SELECT 'I06 success of which no handler knows', s.run FROM t.ending s LEFT JOIN t.finish f USING (run, lease_no)
    WHERE s.status = 'succeeded' AND f.outcome IS DISTINCT FROM 'ok'
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
    WHERE attempt <> attempt_was AND NOT (attempt = attempt_was - 1 AND status = 'pending' AND by_holder)
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
    WHERE (SELECT count(*) FROM outbox_event o WHERE o.aggregate_id = r.id
           AND (o.payload->>'lease_no')::bigint = r.lease_no) <> CASE r.status WHEN 'succeeded' THEN k.emit ELSE 0 END
       OR (SELECT count(*) FROM outbox_event o WHERE o.aggregate_id = r.id) <> CASE r.status WHEN 'succeeded' THEN k.emit ELSE 0 END
UNION ALL
    SELECT 'I15b event of a run that is not there', o.aggregate_id FROM outbox_event o
    WHERE NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = o.aggregate_id)
UNION ALL
    -- The worker lived, it had time, nothing was in its way, and yet what the handler had done was not recorded.
    SELECT 'I16 outcome that its worker has forgotten', f.run
    FROM t.finish f JOIN t.ending e USING (run, lease_no) JOIN t.lease l USING (run, lease_no)
    WHERE f.outcome = 'ok' AND NOT e.by_holder AND e.status IN ('pending', 'leased') AND e.lease_until_was > f.at + interval '2 seconds'
      AND NOT EXISTS (SELECT FROM t.ledger x WHERE x.kind = 'exit' AND x.line->>'worker' = l.slot AND x.at BETWEEN f.at AND e.at)
      AND NOT EXISTS (SELECT FROM t.hindrance h WHERE (h.whom IN ('all', l.slot) OR h.whom LIKE '%' || f.run || '%') AND h.began < e.at AND h.ended > f.at)
UNION ALL
    -- The same where something had been in its way, but not for the last four seconds, in which it still kept the lease.
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
    WHERE c.blameless AND s.by_holder AND s.code IS DISTINCT FROM 'lease_expired'
      AND (s.status = 'failed' OR s.status = 'pending' AND s.attempt = s.attempt_was)
UNION ALL
    SELECT 'I35 given up with attempts left', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id JOIN t.kase c USING (kase)
    WHERE r.status = 'failed' AND r.attempt < r.max_attempts AND k.kase NOT IN ('permanent', 'badresult')
UNION ALL
    SELECT 'I36 succeeded though it cannot', r.id FROM workflow_run r JOIN t.known k ON k.run = r.id JOIN t.kase c USING (kase)
    WHERE r.status = 'succeeded' AND NOT c.may_succeed
UNION ALL
    SELECT 'I38 lease that reaches beyond its deadline', x.run FROM t.transition x JOIN t.lease l USING (run, lease_no)
    WHERE x.status = 'leased' AND (x.deadline_at IS NULL OR x.deadline_at > l.at + interval '500 ms' AND x.lease_until > x.deadline_at);

CREATE TABLE t.invariant AS
    SELECT rule, count(DISTINCT run) AS n, (array_agg(DISTINCT run))[1:3] AS examples FROM t.broken GROUP BY rule;
