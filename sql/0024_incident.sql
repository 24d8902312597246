-- simple-workflow 0024: what becomes of an instance when a step fails.
--
--   graph.fail.v1, graph.restart.v1   fail an instance, and start it again: operators enqueue them, as they do graph.cancel.v1
--   process_retry_incidents   has many incidents tried again
--   process_unearned          knows that a step whose result was refused is done

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- As in 0010, and graph.fail.v1 and graph.restart.v1 are commands, too.
CREATE OR REPLACE FUNCTION workflow_run_refuse_reserved() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    IF NEW.token_id IS NULL AND NEW.node IS NULL AND NEW.type = ANY ('{graph.start.v1, graph.message.v1, graph.signal.v1, graph.complete_task.v1, graph.cancel.v1, graph.fail.v1, graph.retry.v1, graph.restart.v1}')
       AND NOT (NEW.type = 'graph.start.v1' AND NEW.payload ? 'parent') THEN
        RETURN NEW;
    -- Workers from before this migration bring messages and signals without saying that they are the engine: there its
    -- role is enough, and what such a run names is checked when it is carried out.
    ELSIF NEW.type = 'graph.arrive.v1' AND NEW.token_id IS NOT NULL AND NEW.payload ?| '{message,signal}' AND has_table_privilege('process_token'::regclass, 'UPDATE') THEN
        RETURN NEW;
    ELSIF coalesce(current_setting('workflow.override', true), '') ~ '\S' THEN
        IF workflow_overrides('workflow_run', 'INSERT', jsonb_build_object('id', NEW.id)) THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'workflow_run: %', CASE
            WHEN NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL THEN 'a run of a process, with token_id or node, is inserted by the engine alone'
            WHEN NEW.type = 'graph.start.v1' THEN 'parent in the payload of graph.start.v1 is set by the engine alone'
            ELSE format('%L is enqueued by the engine alone', left(NEW.type, 120)) END
        USING ERRCODE = 'insufficient_privilege', TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_reserved_guard',
              HINT = CASE WHEN NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL THEN 'Leave them out: a process enqueues its steps itself.'
                          WHEN NEW.type = 'graph.start.v1' THEN 'Leave parent out: only a call node of a process starts an instance that it waits for.'
                          ELSE 'Commands to processes are graph.start.v1, message, signal, complete_task, cancel, fail, retry and restart: see docs/processes.md.' END
                     || ' The owner can, on record: SET LOCAL workflow.override = ''why''.';
END
$fn$;

-- As in 0012, with the same.
CREATE OR REPLACE FUNCTION workflow_enqueue_once(
    type            text,
    payload         jsonb       DEFAULT '{}',
    run_at          timestamptz DEFAULT NULL,
    delay           interval    DEFAULT NULL,
    priority        integer     DEFAULT 0,
    max_attempts    integer     DEFAULT 3,
    idempotency_key text        DEFAULT NULL,
    metadata        jsonb       DEFAULT NULL,
    id              uuid        DEFAULT NULL,
    tenant          text        DEFAULT NULL,
    on_behalf_of    text        DEFAULT NULL,
    OUT run         uuid,
    OUT existing    boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    given uuid := coalesce(workflow_enqueue_once.id, workflow_uuid());
    whose text := coalesce(workflow_enqueue_once.on_behalf_of, workflow_role());
    other workflow_run;
BEGIN
    -- As everywhere, but called only where it has something to do: for somebody, after somebody, or for a console. The current user
    -- here is the owner. Most work comes in this way.
    IF workflow_enqueue_once.on_behalf_of IS NOT NULL OR current_setting('workflow.on_behalf_of', true) <> ''
       OR workflow_role() <> current_user AND workflow_console(workflow_role()) THEN
        PERFORM workflow_behalf(workflow_enqueue_once.on_behalf_of, 'workflow_enqueue_once(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text, text)'::regprocedure);
    END IF;
    -- It runs with the owner's rights. What acts on processes is for those who may hold runs; what only the
    -- engine may say, nobody says by this function.
    IF workflow_enqueue_once.type ^@ 'graph.' THEN
        IF workflow_enqueue_once.type <> ALL ('{graph.start.v1, graph.message.v1, graph.signal.v1, graph.complete_task.v1, graph.cancel.v1, graph.fail.v1, graph.retry.v1, graph.restart.v1}'::text[]) THEN
            RAISE EXCEPTION 'workflow_enqueue: % is enqueued by the engine alone', quote_literal(left(workflow_enqueue_once.type, 120))
                USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are graph.start.v1, message, signal, complete_task, cancel, fail, retry and restart: see docs/processes.md.';
        ELSIF workflow_enqueue_once.type = 'graph.start.v1' AND workflow_enqueue_once.payload ? 'parent' THEN
            RAISE EXCEPTION 'workflow_enqueue: parent is set by the engine alone'
                USING ERRCODE = 'insufficient_privilege', HINT = 'Leave parent out: only a call node of a process starts an instance that it waits for.';
        ELSIF workflow_enqueue_once.type IN ('graph.cancel.v1', 'graph.fail.v1', 'graph.retry.v1', 'graph.restart.v1')
           AND NOT has_column_privilege(whose, 'workflow_run'::regclass, 'held_at', 'UPDATE') THEN
            RAISE EXCEPTION 'workflow_enqueue: % may not enqueue %', whose, quote_literal(workflow_enqueue_once.type)
                USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are for operators: see docs/roles.md.';
        END IF;
    END IF;
    FOR round IN 1..10 LOOP
        INSERT INTO workflow_run (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata, tenant_id, created_by)
        VALUES (given, workflow_enqueue_once.type, workflow_enqueue_once.payload,
                coalesce(workflow_enqueue_once.run_at, now()) + coalesce(workflow_enqueue_once.delay, '0'),
                workflow_enqueue_once.priority, workflow_enqueue_once.max_attempts,
                workflow_enqueue_once.idempotency_key, workflow_enqueue_once.metadata, workflow_enqueue_once.tenant,
                session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '') || coalesce(' for ' || workflow_enqueue_once.on_behalf_of, ''))
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            run := given;
            existing := false;
            RETURN;
        END IF;
        SELECT * INTO other FROM workflow_run r
        WHERE r.id = given
           OR r.idempotency_key = workflow_enqueue_once.idempotency_key AND r.deleted_at IS NULL
        ORDER BY r.id = given DESC
        LIMIT 1;
        IF FOUND AND other.type = workflow_enqueue_once.type AND other.payload = workflow_enqueue_once.payload
           AND other.idempotency_key IS NOT DISTINCT FROM workflow_enqueue_once.idempotency_key
           AND other.tenant_id IS NOT DISTINCT FROM workflow_enqueue_once.tenant THEN
            run := other.id;
            existing := true;
            RETURN;
        ELSIF FOUND THEN
            -- Both ids come first, so that programs can tell them from what users wrote.
            RAISE EXCEPTION 'workflow_enqueue: new run % is refused: run % has the same %',
                given, other.id, CASE WHEN other.id = given THEN 'id, with another type, payload, key or tenant'
                    ELSE format('idempotency key %L, with another type, payload or tenant', workflow_enqueue_once.idempotency_key) END
                USING ERRCODE = 'unique_violation', TABLE = 'workflow_run',
                      CONSTRAINT = CASE WHEN other.id = given THEN 'workflow_run_pkey' ELSE 'workflow_run_idempotency_idx' END,
                      HINT = CASE WHEN other.id = given THEN 'Use another id for other work, or leave it out.'
                             ELSE format('Use another key for other work, or free it with SELECT workflow_delete(%L, ''reason'').', other.id) END;
        END IF;
        -- The row that was in the way has gone since: try again.
    END LOOP;
    RAISE EXCEPTION 'workflow_enqueue: idempotency key % keeps changing hands', quote_literal(workflow_enqueue_once.idempotency_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$fn$;

-- Many incidents, the oldest first, as workflow_redrive does it for plain runs. Those of which a retry waits already are
-- left out, so it may be called again for the rest.
CREATE FUNCTION process_retry_incidents(
    process      text    DEFAULT NULL,
    node         text    DEFAULT NULL,
    code         text    DEFAULT NULL,
    version      integer DEFAULT NULL,
    most         integer DEFAULT 100,
    per_second   float8  DEFAULT NULL,
    dry_run      boolean DEFAULT true,
    on_behalf_of text    DEFAULT NULL
) RETURNS TABLE (incident uuid, instance uuid, process_is text, version_is integer, node_is text, code_is text, message text, opened_at timestamptz, run_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
BEGIN
    PERFORM workflow_behalf(process_retry_incidents.on_behalf_of, 'process_retry_incidents(text, text, text, integer, integer, float8, boolean, text)'::regprocedure);
    IF most IS NULL OR dry_run IS NULL OR most NOT BETWEEN 1 AND 100000 OR per_second <= 0 THEN
        RAISE EXCEPTION 'process_retry_incidents: most is 1 to 100000, per_second above 0'
            USING ERRCODE = 'check_violation', HINT = 'Retry more than 100000 incidents in several calls.';
    END IF;
    RETURN QUERY
    WITH waits AS MATERIALIZED (
        SELECT r.payload->>'incident' AS incident FROM workflow_run r
        WHERE r.type = 'graph.retry.v1' AND r.status IN ('pending', 'leased') AND r.deleted_at IS NULL
    ), chosen AS MATERIALIZED (
        SELECT x.id, x.instance_id, d.name, d.version, x.node, x.code, x.message, x.created_at, i.metadata, row_number() OVER (ORDER BY x.created_at, x.id) - 1 AS before_it
        FROM incident x JOIN process_instance i ON i.id = x.instance_id JOIN process_definition d ON d.id = i.process_definition_id
        WHERE x.resolved_at IS NULL AND i.completed_at IS NULL
          AND (process_retry_incidents.process IS NULL OR d.name = process_retry_incidents.process)
          AND (process_retry_incidents.version IS NULL OR d.version = process_retry_incidents.version)
          AND (process_retry_incidents.node IS NULL OR x.node = process_retry_incidents.node)
          AND (process_retry_incidents.code IS NULL OR x.code = process_retry_incidents.code)
          AND NOT EXISTS (SELECT FROM waits w WHERE w.incident = x.id::text)
        ORDER BY x.created_at, x.id
        LIMIT most
    ), asked AS (
        INSERT INTO workflow_run (type, payload, metadata, run_at, created_by)
        SELECT 'graph.retry.v1', jsonb_build_object('incident', c.id), process_trace(c.metadata), now() + coalesce(c.before_it / per_second, 0) * interval '1 second', workflow_actor()
        FROM chosen c
        WHERE NOT dry_run
        RETURNING payload->>'incident' AS incident, run_at
    )
    SELECT c.id, c.instance_id, c.name, c.version, c.node, c.code, c.message, c.created_at, a.run_at
    FROM chosen c LEFT JOIN asked a ON a.incident = c.id::text
    ORDER BY c.before_it;
END
$fn$;
COMMENT ON FUNCTION process_retry_incidents(text, text, text, integer, integer, float8, boolean, text) IS
    'Has open incidents of a process, node, code or version tried again, the oldest first: nothing but shows them unless dry_run is false; at most so many; spread over time with per_second.';
REVOKE ALL ON FUNCTION process_retry_incidents(text, text, text, integer, integer, float8, boolean, text) FROM PUBLIC;

-- Whoever may correct a fact may call it.
DO $do$
DECLARE
    r regrole;
BEGIN
    FOR r IN
        SELECT DISTINCT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        WHERE o.proname = 'process_correct' AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION process_retry_incidents(text, text, text, integer, integer, float8, boolean, text) TO %s', r);
    END LOOP;
END
$do$;

-- A step of which the result alone was refused is done.
CREATE OR REPLACE VIEW process_unearned AS
    SELECT e.instance_id, e.token_id, e.node, e.completions, r.successes
    FROM (SELECT instance_id, token_id, node, count(*) AS completions
          FROM process_event WHERE event_type = 'node.completed' GROUP BY 1, 2, 3) e
    JOIN process_instance i ON i.id = e.instance_id
    JOIN process_node n ON n.process_definition_id = i.process_definition_id AND n.node = e.node COLLATE "C" AND n.definition ? 'do'
    CROSS JOIN LATERAL (SELECT count(*) AS successes FROM workflow_run r WHERE r.token_id = e.token_id AND r.node = e.node
                        AND (r.status = 'succeeded' OR r.status = 'failed' AND r.error->>'code' = 'result_rejected')) r
    WHERE e.completions > r.successes;
