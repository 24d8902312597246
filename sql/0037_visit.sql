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

-- As in 0016, but the node that was entered last is asked of process_history.
DO $do$
DECLARE
    was text := pg_get_viewdef('process_fault'::regclass);
    now text := replace(replace(was, 'process_event v', 'process_history v'), 'ORDER BY v.id DESC', 'ORDER BY v.created_at DESC, v.place DESC, v.id DESC');
BEGIN
    IF strpos(now, 'process_history v') = 0 OR strpos(now, 'v.place DESC') = 0 THEN
        RAISE EXCEPTION 'the view process_fault is not that of 0016';
    END IF;
    EXECUTE 'CREATE OR REPLACE VIEW process_fault AS ' || now;
END
$do$;

-- Who asks process_why is sent to the whole list.
DO $do$
BEGIN
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
