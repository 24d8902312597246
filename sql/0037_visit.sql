-- simple-workflow 0037: visits that runs report are read from the runs.
--
--   process_history           is the whole list of what happened in an instance: what process_event stores, and visits of steps
--   activity_instance, process_fault, process_misrecorded, process_unearned
--                             read it
--
-- A run with a token and the name of a node is a visit of that node. The engine stores no node.entered and no node.completed for
-- it any more. Workers of earlier versions do, and their rows stay: such a visit is shown by its row.
DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Before this time every event was stored, so no run reports one. It also holds for a run that has succeeded without completing its
-- node, of which earlier versions say nothing.
--
-- Which run a stored row belongs to is told by the times. A token is at one node at a time, and does not come to it again before the
-- run of its visit is over. So of the entries of a token into a node, in the order of their times, the row comes next after its run,
-- which was not over then; and likewise of the ends. What is not told of a run by its end is a stored row, too: run.unheeded, or
-- the incident of a result that its mapping refuses, which is all that earlier versions say of that.
--
-- created_at of such a run is the time of its INSERT, not the beginning of the transaction: the engine writes it so, after the rows
-- that it stores in the same transaction. So the events of a token come in their order.
DO $do$
BEGIN
    EXECUTE format($view$
CREATE VIEW process_history AS
    SELECT l.id, l.instance_id, l.token_id, l.event_type, l.node, l.version, l.data, l.created_at, l.place, l.run_id
    FROM (
        SELECT h.*, lead(h.id) OVER line AS next_id, lead(h.created_at) OVER line AS next_at
        FROM (
            SELECT e.id, e.instance_id, e.token_id, e.event_type, e.node, e.version, e.data, e.created_at, 1::smallint AS place, NULL::uuid AS run_id,
                   CASE WHEN e.event_type = 'node.entered' THEN 2
                        WHEN e.event_type IN ('node.completed', 'run.unheeded') OR e.event_type = 'incident.opened' AND e.data->>'code' = 'mapping_failed' THEN 0
                        ELSE 1 END AS kind,
                   e.event_type <> 'run.unheeded' AS shown, NULL::timestamptz AS until
            FROM process_event e
            UNION ALL
            SELECT NULL, t.instance_id, r.token_id, v.event_type COLLATE "C", r.node, NULL, NULL, v.created_at, v.kind::smallint, r.id, v.kind, v.shown, v.until
            FROM process_token t JOIN workflow_run r ON r.token_id = t.id
            CROSS JOIN LATERAL (VALUES ('node.entered', 2, r.created_at, true, coalesce(r.finished_at, r.deleted_at, 'infinity')),
                                       ('node.completed', 0, r.finished_at, r.status = 'succeeded', 'infinity')) AS v (event_type, kind, created_at, shown, until)
            WHERE r.type <> ALL ('{graph.timer.v1, graph.arrive.v1, graph.undo.v1}') AND strpos(r.node, '/') = 0 -- those have a suffix, as undo steps and elements of lists
              AND v.created_at >= %L) h
        WINDOW line AS (PARTITION BY h.instance_id, h.token_id, h.node, h.kind ORDER BY h.created_at, h.id NULLS FIRST)) l
    WHERE l.shown AND (l.run_id IS NULL OR l.next_id IS NULL OR l.next_at >= l.until)
    $view$, CASE WHEN EXISTS (SELECT FROM process_event) THEN now() ELSE '-infinity' END);
END
$do$;
COMMENT ON VIEW   process_history IS 'What happened within instances, in the order of created_at, place, id. Ask by instance_id.';
COMMENT ON COLUMN process_history.id IS 'That of its row of process_event; null: run_id reports it.';
COMMENT ON COLUMN process_history.version IS 'That of the instance; null where a run reports it.';
COMMENT ON COLUMN process_history.place IS 'The place among events of one time.';
COMMENT ON COLUMN process_history.run_id IS 'The run that is the visit; null: the event is stored.';
COMMENT ON TABLE  process_event IS 'What happened within instances, except for visits that runs report: read it as process_history. Rows of one transaction carry one version.';

-- As in 0005, from process_history.
CREATE OR REPLACE VIEW activity_instance AS
    WITH visit AS NOT MATERIALIZED (
        SELECT e.instance_id, e.token_id, e.event_type, e.node, e.created_at, e.run_id,
               lead(e.event_type) OVER line AS next_type, lead(e.node) OVER line AS next_node, lead(e.created_at) OVER line AS until
        FROM process_history e
        WHERE e.event_type IN ('node.entered', 'node.completed', 'node.failed') AND e.token_id IS NOT NULL
        WINDOW line AS (PARTITION BY e.instance_id, e.token_id ORDER BY e.created_at, e.place, e.id))
    SELECT r.id, t.instance_id, r.token_id, r.node AS node_id, r.type AS run_type, r.status, r.attempt AS attempts,
           r.payload AS input, r.result AS output, r.last_error,
           coalesce(v.created_at, r.created_at) AS created_at, coalesce(v.created_at, r.started_at) AS started_at, r.finished_at AS completed_at
    FROM workflow_run r JOIN process_token t ON t.id = r.token_id
    LEFT JOIN visit v ON r.type = 'graph.arrive.v1' AND v.event_type = 'node.entered' AND v.instance_id = t.instance_id -- it came, and ended the waiting
        AND v.token_id = r.token_id AND v.node = r.node AND r.created_at > v.created_at AND (v.until IS NULL OR r.created_at < v.until)
    UNION ALL
    SELECT k.id, v.instance_id, v.token_id, v.node, NULL,
           CASE WHEN v.next_type = 'node.completed' AND v.next_node = v.node THEN 'succeeded'
                WHEN v.next_type = 'node.failed' AND v.next_node = v.node THEN 'failed'
                WHEN v.until IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND t.node = v.node THEN 'waiting'
                ELSE 'cancelled' END,
           0, k.payload, k.output, NULL, v.created_at, v.created_at,
           coalesce(v.until, CASE WHEN t.node <> v.node OR t.state NOT IN ('Created', 'Ready', 'Waiting') THEN t.updated_at END)
    FROM visit v
    JOIN process_token t ON t.id = v.token_id
    LEFT JOIN LATERAL (
        SELECT u.id, u.payload, u.output FROM user_task u
        WHERE u.token_id = v.token_id AND u.node = v.node AND u.created_at <= v.created_at
        ORDER BY u.created_at DESC LIMIT 1) k ON true
    WHERE v.event_type = 'node.entered' AND v.run_id IS NULL
      AND NOT EXISTS (SELECT FROM workflow_run r
                      WHERE r.token_id = v.token_id AND r.node = v.node
                        AND CASE WHEN r.finished_at IS NULL THEN v.until IS NULL
                                 ELSE r.finished_at > v.created_at AND (v.until IS NULL OR r.finished_at <= v.until) END);

-- As in 0005. Runs that are visits count, too.
CREATE OR REPLACE VIEW process_misrecorded AS
    SELECT i.id AS instance_id, h.id AS history_id, i.status, i.version
    FROM process_instance i
    JOIN (SELECT h.*, lag(to_status) OVER line AS was, lag(version) OVER line AS version_before, lead(h.id) OVER line AS next
          FROM process_state_history h
          WINDOW line AS (PARTITION BY instance_id ORDER BY id)) h ON h.instance_id = i.id
    WHERE h.from_status IS DISTINCT FROM coalesce(h.was, 'CREATED') OR h.version < h.version_before OR h.version > i.version
       OR h.next IS NULL AND h.to_status <> i.status
    UNION ALL
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    WHERE i.status <> 'CREATED' AND NOT EXISTS (SELECT FROM process_state_history h WHERE h.instance_id = i.id)
    UNION -- versions only grow: of instances with each event, and of tokens with each node
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    JOIN (SELECT instance_id, version, lag(version) OVER (PARTITION BY instance_id ORDER BY id) AS before FROM process_event) e ON e.instance_id = i.id
    WHERE e.version < e.before OR e.version > i.version
    UNION
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    JOIN process_token t ON t.instance_id = i.id
    JOIN (SELECT token_id, count(DISTINCT version) AS entered FROM process_event WHERE event_type = 'node.entered' GROUP BY token_id
          UNION ALL -- a step gets at most one run in a transaction
          SELECT token_id, count(*) FROM workflow_run WHERE token_id IS NOT NULL AND type <> ALL ('{graph.timer.v1, graph.arrive.v1, graph.undo.v1}') AND strpos(node, '/') = 0 GROUP BY token_id
    ) e ON e.token_id = t.id
    WHERE t.version < e.entered;

-- As in 0024. A run that reports its visit has no row of node.completed. But when its token comes to another node, or is found
-- somewhere else, the run must be over.
CREATE OR REPLACE VIEW process_unearned AS
    SELECT e.instance_id, e.token_id, e.node, e.completions, r.successes
    FROM (SELECT instance_id, token_id, node, count(*) AS completions
          FROM process_event WHERE event_type = 'node.completed' GROUP BY 1, 2, 3) e
    JOIN process_instance i ON i.id = e.instance_id
    JOIN process_node n ON n.process_definition_id = i.process_definition_id AND n.node = e.node COLLATE "C" AND n.definition ? 'do'
    CROSS JOIN LATERAL (SELECT count(*) AS successes FROM workflow_run r WHERE r.token_id = e.token_id AND r.node = e.node
                        AND (r.status = 'succeeded' OR r.status = 'failed' AND r.error->>'code' = 'result_rejected')) r
    WHERE e.completions > r.successes
    UNION ALL
    SELECT v.instance_id, v.token_id, v.node, count(*), count(*) FILTER (WHERE NOT v.unearned)
    FROM (
        SELECT h.instance_id, h.token_id, h.node,
               CASE WHEN h.left_at IS NOT NULL THEN r.finished_at IS NULL OR r.finished_at > h.left_at
                    ELSE r.finished_at IS NULL OR r.status IN ('succeeded', 'failed') AND r.finished_at > t.updated_at END AS unearned
        FROM (SELECT e.instance_id, e.token_id, e.node, e.run_id, lead(e.created_at) OVER (PARTITION BY e.instance_id, e.token_id ORDER BY e.created_at, e.place, e.id) AS left_at
              FROM process_history e WHERE e.event_type = 'node.entered') h
        JOIN workflow_run r ON r.id = h.run_id AND r.deleted_at IS NULL
        JOIN process_token t ON t.id = h.token_id
        WHERE h.left_at IS NOT NULL OR t.node <> h.node OR t.state NOT IN ('Created', 'Ready', 'Waiting')) v
    GROUP BY v.instance_id, v.token_id, v.node
    HAVING bool_or(v.unearned);

-- As in 0016: the node that was entered last is asked of process_history.
CREATE OR REPLACE VIEW process_fault AS
    SELECT u.instance_id, 'signal ' || u.signal || ' cannot be brought to ' || u.node || ' for ' || workflow_span(workflow_age(u.since)) || ': ' || u.problem
               || coalesce(' (SQLSTATE ' || nullif(u.sqlstate, '') || ')', '') AS problem, u.fix
    FROM process_unreachable u
    UNION ALL -- both ends of a wait: the token is wrong where one of the instance waits there without
    SELECT x.instance_id, 'message_wait.' || CASE WHEN o.id IS NULL THEN 'instance_id of token ' || w.token_id || ' is not that of its token' ELSE 'token_id ' || w.token_id || ' is not a token of instance ' || w.instance_id END,
           format(CASE WHEN o.id IS NULL THEN 'UPDATE message_wait SET instance_id = %L' ELSE 'UPDATE message_wait SET token_id = %L' END || ' WHERE token_id = %L AND place = %L', coalesce(o.id, t.instance_id), w.token_id, w.place)
    FROM message_wait w JOIN process_token t ON t.id = w.token_id AND t.instance_id <> w.instance_id
    LEFT JOIN LATERAL (SELECT o.id FROM process_token o WHERE o.instance_id = w.instance_id AND o.node = w.node AND o.state IN ('Created', 'Ready', 'Waiting')
                         AND NOT EXISTS (SELECT FROM message_wait m WHERE m.token_id = o.id) LIMIT 1) o ON true
    CROSS JOIN LATERAL (VALUES (w.instance_id), (t.instance_id)) AS x (instance_id)
    UNION ALL
    SELECT i.id, 'process_instance.' || x.problem, format('UPDATE process_instance SET %s WHERE id = %L', x.fix, i.id)
    FROM process_instance i
    CROSS JOIN LATERAL (VALUES
        (i.priority NOT BETWEEN -100 AND 100, 'priority is ' || i.priority, 'priority = 0'),
        (length(i.tenant_id) NOT BETWEEN 1 AND 200, 'tenant_id has ' || length(i.tenant_id) || ' characters', 'tenant_id = NULL'),
        (i.version >= 1000000000000000, 'version is ' || i.version, 'version = ' || coalesce((SELECT max(e.version) FROM process_event e WHERE e.instance_id = i.id AND e.version < 1000000000000000), 1) + 1000)
    ) AS x (holds, problem, fix)
    WHERE i.completed_at IS NULL AND x.holds
      AND (i.priority NOT BETWEEN -100 AND 100 OR length(i.tenant_id) NOT BETWEEN 1 AND 200 OR i.version >= 1000000000000000)
      AND NOT EXISTS (SELECT FROM process_unreachable u WHERE u.instance_id = i.id)
    UNION ALL
    SELECT i.id, 'process_token.version of ' || t.id || ' is ' || t.version, format('UPDATE process_token SET version = 1000000 WHERE id = %L', t.id)
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id
    WHERE i.completed_at IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND t.version >= 1000000000000000
    UNION ALL -- the definition is another one if it does not have the node that was entered last
    (WITH known AS MATERIALIZED (SELECT n.process_definition_id, n.node COLLATE "C" AS node FROM process_node n)
    SELECT i.id, CASE WHEN k.known THEN 'process_token.node of ' || t.id || ' is ' || left(t.node, 100) || ', which the process does not have'
                      ELSE 'process_instance.process_definition_id is that of another process, which does not have node ' || left(t.node, 100) END,
           CASE WHEN k.known THEN format('UPDATE process_token SET node = %L WHERE id = %L', k.last, t.id)
                ELSE format('UPDATE process_instance SET process_definition_id = %L WHERE id = %L',
                            (SELECT d.id FROM process_definition d WHERE d.definition->'nodes' ? t.node ORDER BY d.version DESC, d.id LIMIT 1), i.id) END
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id
    LEFT JOIN known n ON n.process_definition_id = i.process_definition_id AND n.node = t.node
    CROSS JOIN LATERAL (
        SELECT e.node AS last, EXISTS (SELECT FROM known o WHERE o.process_definition_id = i.process_definition_id AND o.node = e.node) AS known
        FROM (SELECT (SELECT v.node FROM process_history v WHERE v.instance_id = i.id AND v.token_id = t.id AND v.event_type = 'node.entered' ORDER BY v.created_at DESC, v.place DESC, v.id DESC LIMIT 1) AS node OFFSET 0) e) k
    WHERE i.completed_at IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND n.node IS NULL)
    UNION ALL
    SELECT g.instance_id, 'each_progress.' || x.problem || ', group ' || e.group_id, format('UPDATE each_progress SET %s WHERE group_id = %L', x.fix, e.group_id)
    FROM each_progress e JOIN parallel_group g ON g.id = e.group_id JOIN process_instance i ON i.id = g.instance_id
    CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(e.items) WHEN 'array' THEN jsonb_array_length(e.items) END AS length) l
    CROSS JOIN LATERAL (VALUES
        (e.instance_id <> g.instance_id, 'instance_id is not that of its group', format('instance_id = %L', g.instance_id)),
        (jsonb_typeof(e.items) <> 'array', 'items is no list, but a JSON ' || jsonb_typeof(e.items) || ', and what it was is written nowhere else: cancel the instance', NULL),
        (e.total <> l.length, 'total is ' || e.total || ' of ' || l.length, 'total = jsonb_array_length(items)'),
        (e.next <> (SELECT coalesce(max(t.item), -1) + 1 FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item <= 10000000), 'next is ' || e.next,
         'next = ' || (SELECT coalesce(max(t.item), -1) + 1 FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item <= 10000000)),
        (e.done <> (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item IS NOT NULL AND t.state = 'Completed'), 'done is ' || e.done,
         'done = ' || (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item IS NOT NULL AND t.state = 'Completed'))
    ) AS x (holds, problem, fix)
    WHERE i.completed_at IS NULL AND e.over_at IS NULL AND x.holds
    UNION ALL -- both ends of a task
    SELECT x.instance_id, 'user_task.' || CASE WHEN o.id IS NULL THEN 'instance_id of ' || k.id || ' is not that of its token' ELSE 'token_id of ' || k.id || ' is not a token of its instance at ' || k.node END,
           format(CASE WHEN o.id IS NULL THEN 'UPDATE user_task SET instance_id = %L' ELSE 'UPDATE user_task SET token_id = %L' END || ' WHERE id = %L', coalesce(o.id, t.instance_id), k.id)
    FROM user_task k JOIN process_token t ON t.id = k.token_id AND (t.instance_id <> k.instance_id OR t.node <> k.node)
    LEFT JOIN LATERAL (SELECT o.id FROM process_token o WHERE o.instance_id = k.instance_id AND o.node = k.node AND o.state = 'Waiting'
                         AND NOT EXISTS (SELECT FROM user_task m WHERE m.token_id = o.id AND m.state = 'open') LIMIT 1) o ON true
    CROSS JOIN LATERAL (SELECT k.instance_id UNION SELECT t.instance_id) AS x (instance_id)
    WHERE k.state = 'open'
    UNION ALL -- both ends of a call
    SELECT c.parent_process_instance_id, 'process_instance.parent_token_id of ' || c.id || ' is not a token of its caller',
           format('UPDATE process_instance SET parent_token_id = %L WHERE id = %L', o.id, c.id)
               || CASE WHEN c.completed_at IS NOT NULL THEN format('; INSERT INTO workflow_run (token_id, type, node, payload, max_attempts) VALUES (%L, ''graph.arrive.v1'', %L, %L, 1000)', o.id, o.node,
                                                                   jsonb_build_object('visit', o.version, 'child', c.id)) ELSE '' END
    FROM process_instance c JOIN process_instance p ON p.id = c.parent_process_instance_id
    JOIN process_token o ON o.instance_id = p.id AND o.state = 'Waiting' AND o.version = c.parent_visit
    WHERE p.completed_at IS NULL AND NOT EXISTS (SELECT FROM process_token t WHERE t.id = c.parent_token_id AND t.instance_id = p.id)
      AND NOT EXISTS (SELECT FROM process_instance b WHERE b.parent_token_id = o.id)
    UNION ALL
    SELECT t.instance_id, 'workflow_run.payload of timer ' || r.id || ' is ' || left(r.payload::text, 40),
           CASE WHEN r.finished_at IS NULL THEN format('UPDATE workflow_run SET payload = %L WHERE id = %L', x.payload, r.id)
                ELSE format('INSERT INTO workflow_run (token_id, type, node, payload, max_attempts) VALUES (%L, %L, %L, %L, 1000)', r.token_id, r.type, r.node, x.payload) END
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id JOIN workflow_run r ON r.token_id = t.id
    CROSS JOIN LATERAL (SELECT CASE WHEN r.node ~ '/(on|race)/\d+$' THEN jsonb_build_object('at', substring(r.node FROM '(?:on|race)/\d+$')) ELSE '{}' END AS payload) x
    WHERE i.completed_at IS NULL AND t.state = 'Waiting' AND r.type = 'graph.timer.v1' AND jsonb_typeof(r.payload) <> 'object' AND r.status <> 'cancelled'
      AND NOT EXISTS (SELECT FROM incident d WHERE d.token_id = t.id AND d.resolved_at IS NULL) -- to retry that sets the timer anew
      AND NOT EXISTS (SELECT FROM workflow_run o WHERE o.token_id = t.id AND o.id > r.id AND o.type = r.type AND o.node = r.node);

-- What the engine inserts is created when it is inserted, which is no reason to look at it more closely.
DO $do$
DECLARE
    made text := pg_get_triggerdef((SELECT g.oid FROM pg_trigger g WHERE g.tgrelid = 'workflow_run'::regclass AND g.tgname = 'workflow_run_insert_guard'));
    new  text := replace(replace(made, 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), 'new.created_at = now()', 'new.created_at >= now() AND new.created_at <= clock_timestamp()');
BEGIN
    IF strpos(new, 'clock_timestamp()') = 0 OR strpos(new, 'OR REPLACE') = 0 THEN
        RAISE EXCEPTION 'the trigger workflow_run_insert_guard is not as expected: %', made;
    END IF;
    EXECUTE new;
    EXECUTE replace(pg_get_functiondef('process_why(uuid)'::regprocedure), $q$SELECT * FROM process_event WHERE instance_id = ' || quote_literal(i.id)$q$,
        $q$SELECT * FROM process_history WHERE instance_id = ' || quote_literal(i.id) || ' ORDER BY created_at, place, id'$q$);
    -- What is new is ours, in the list of 0020.
    EXECUTE replace(pg_get_functiondef('workflow_relations()'::regprocedure), $q$'{$q$, $q$'{process_history, $q$);
END
$do$;

-- Who may read process_event may read it, and it belongs to whom the rest belongs to.
DO $do$
DECLARE
    r regrole;
BEGIN
    REVOKE ALL ON process_history FROM PUBLIC;
    FOR r IN
        SELECT DISTINCT x.grantee
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
        WHERE c.oid = 'process_event'::regclass AND x.privilege_type = 'SELECT' AND x.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON process_history TO %s', r);
    END LOOP;
    IF (SELECT c.relowner FROM pg_class c WHERE c.oid = 'process_history'::regclass) <> (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) THEN
        EXECUTE format('ALTER VIEW process_history OWNER TO %s', (SELECT c.relowner::regrole FROM pg_class c WHERE c.oid = 'workflow_run'::regclass));
    END IF;
END
$do$;
