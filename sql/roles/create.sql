-- simple-workflow: roles. Not a migration: roles belong to the whole cluster, and not everybody
-- wants them. `workflowctl roles` runs this, any number of times; after a migration, run it again.
--
-- The roles cannot log in: grant them to those that can. The setting workflow.roles names them:
-- with workflow (the default) they are workflow_enqueue, workflow_worker, and so on.
--
--   _owner       owns everything here; functions that act run with its rights. Migrations run as it.
--   _enqueue     stores runs and events. Reads nothing.
--   _worker      leases and settles plain runs: of the prefixes that its member was bound to by
--                `workflowctl roles worker`, and none without.
--   _engine      leases all runs, advances processes, cleans up.
--   _dispatcher  publishes events.
--   _operator    sees everything and acts by the functions, which record who did. Enqueues, too,
--                for the commands of processes.
--   _viewer      sees what there is without what it is about: no payload, result, or text of an error.

DO $do$
DECLARE
    named  text := coalesce(nullif(current_setting('workflow.roles', true), ''), 'workflow');
    here   text := current_schema();
    own    text := named || '_owner';
    thing  record;
    kind   text;
BEGIN
    PERFORM set_config('search_path', quote_ident(here) || ', pg_temp', true);
    IF to_regclass('workflow_run') IS NULL THEN
        RAISE EXCEPTION 'schema % has no table workflow_run', quote_literal(here) USING HINT = 'Run workflowctl migrate up first.';
    END IF;
    FOREACH kind IN ARRAY ARRAY['owner', 'enqueue', 'worker', 'engine', 'dispatcher', 'operator', 'viewer'] LOOP
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', named || '_' || kind);
        EXCEPTION WHEN duplicate_object OR unique_violation THEN -- it is there
        END;
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', here, named || '_' || kind);
    END LOOP;
    EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', here, own);
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', here);

    -- Who migrates goes on to be able to.
    IF NOT pg_has_role(session_user, own, 'MEMBER') THEN
        EXECUTE format('GRANT %I TO %I', own, session_user);
    END IF;
    FOR thing IN
        SELECT c.oid::regclass::text AS name, CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END AS what, c.relowner <> o.oid AS foreign_owned
        FROM pg_class c JOIN pg_roles o ON o.rolname = own
        WHERE c.relnamespace = quote_ident(here)::regnamespace AND c.relkind IN ('r', 'p', 'v')
          AND (c.relname ~ '^(workflow|process|outbox|parallel)_' OR c.relname IN ('message', 'message_wait', 'user_task', 'incident', 'compensation_record',
               'join_arrival', 'each_progress', 'activity_instance', 'timer', 'token'))
    LOOP
        IF thing.foreign_owned THEN
            EXECUTE format('ALTER %s %s OWNER TO %I', thing.what, thing.name, own);
        END IF;
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', thing.name);
        EXECUTE format('GRANT SELECT ON %s TO %I', thing.name, named || '_operator');
        EXECUTE format('GRANT SELECT ON %s TO %I', thing.name, named || '_engine');
        IF thing.what = 'TABLE' AND thing.name <> 'workflow_schema' THEN
            EXECUTE format('GRANT INSERT, DELETE ON %s TO %I', thing.name, named || '_engine');
            IF thing.name NOT IN ('workflow_history', 'process_event', 'process_state_history', 'process_correction') THEN
                EXECUTE format('GRANT UPDATE ON %s TO %I', thing.name, named || '_engine'); -- history is not rewritten
            END IF;
        END IF;
    END LOOP;
    FOR thing IN
        SELECT p.oid::regprocedure::text AS name, p.prorettype = 'trigger'::regtype AS on_trigger, p.proowner <> o.oid AS foreign_owned
        FROM pg_proc p JOIN pg_roles o ON o.rolname = own
        WHERE p.pronamespace = quote_ident(here)::regnamespace AND p.proname ~ '^(workflow|process|outbox)_'
    LOOP
        IF thing.foreign_owned THEN
            EXECUTE format('ALTER FUNCTION %s OWNER TO %I', thing.name, own);
        END IF;
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', thing.name);
        IF NOT thing.on_trigger THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I, %I', thing.name, named || '_operator', named || '_engine');
        END IF;
    END LOOP;

    -- What the programs look at when they start.
    EXECUTE format('GRANT SELECT ON workflow_schema TO %I, %I, %I, %I', named || '_enqueue', named || '_worker', named || '_dispatcher', named || '_viewer');

    EXECUTE format('GRANT INSERT (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata), SELECT (id) ON workflow_run TO %I', named || '_enqueue');
    EXECUTE format('GRANT INSERT (event_uuid, aggregate_id, event_type, payload, headers) ON outbox_event TO %I, %I', named || '_enqueue', named || '_worker');
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_uuid() TO %I, %I', named || '_enqueue', named || '_worker');
    FOR thing IN SELECT p.oid::regprocedure::text AS name FROM pg_proc p
                 WHERE p.pronamespace = quote_ident(here)::regnamespace AND p.proname IN ('workflow_enqueue', 'workflow_enqueue_once', 'outbox_emit') LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', thing.name, named || '_enqueue');
    END LOOP;
    EXECUTE format('GRANT %I TO %I, %I', named || '_enqueue', named || '_engine', named || '_operator');

    EXECUTE format('GRANT SELECT, UPDATE (status, result, error, last_error, attempt, max_attempts, postponed, suspect, run_at, started_at, deadline_at, finished_at,
                        lease_until, lease_token, lease_no, leased_by, settled_token, settled_by, updated_at) ON workflow_run TO %I', named || '_worker');
    EXECUTE format('GRANT INSERT (workflow_id, created_at, started_at, lease_no, attempt, event_type, actor, leased_by, data) ON workflow_history TO %I', named || '_worker');
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON workflow_worker TO %I', named || '_worker');
    EXECUTE format('GRANT SELECT ON workflow_pause TO %I', named || '_worker');

    EXECUTE format('GRANT SELECT, UPDATE (published_at, parked_at, delivered_to, parked_by) ON outbox_event TO %I', named || '_dispatcher');
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_sink, outbox_lane, outbox_delivery TO %I', named || '_dispatcher');
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_wants(text[], text) TO %I', named || '_dispatcher');

    EXECUTE format('GRANT UPDATE (held_at) ON workflow_run TO %I', named || '_operator');

    EXECUTE format('GRANT SELECT ON workflow_overview, process_overview, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
                        workflow_rate, workflow_live_worker, workflow_blocker, workflow_bloat, outbox_lag, process_stuck, process_duration TO %I', named || '_viewer');
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_covers(text, text), workflow_span(interval), outbox_wants(text[], text) TO %I', named || '_viewer');

    -- Who sees which runs. The owner, and functions that run with its rights, see all.
    ALTER TABLE workflow_run ENABLE ROW LEVEL SECURITY;
    ALTER TABLE workflow_history ENABLE ROW LEVEL SECURITY;
    DROP POLICY IF EXISTS engine ON workflow_run;
    DROP POLICY IF EXISTS engine ON workflow_history;
    DROP POLICY IF EXISTS operator ON workflow_run;
    DROP POLICY IF EXISTS operator ON workflow_history;
    DROP POLICY IF EXISTS enqueue ON workflow_run;
    DROP POLICY IF EXISTS enqueued ON workflow_run;
    EXECUTE format('CREATE POLICY engine ON workflow_run TO %I USING (true)', named || '_engine');
    EXECUTE format('CREATE POLICY engine ON workflow_history TO %I USING (true)', named || '_engine');
    EXECUTE format('CREATE POLICY operator ON workflow_run TO %I USING (true)', named || '_operator');
    EXECUTE format('CREATE POLICY operator ON workflow_history TO %I USING (true)', named || '_operator');
    EXECUTE format('CREATE POLICY enqueue ON workflow_run FOR INSERT TO %I WITH CHECK (true)', named || '_enqueue');
    -- For INSERT … RETURNING id. Who is a worker, too, must not see more by it.
    EXECUTE format('CREATE POLICY enqueued ON workflow_run FOR SELECT TO %I USING (created_at = now())', named || '_enqueue');
END
$do$;
