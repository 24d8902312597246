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
--   _tasks       sees, claims and completes the tasks of its groups, and sees nothing else.
--   _console     for programs that people act through: sees what _viewer sees, and calls the functions that
--                act for a person, on_behalf_of, with that person's rights. Without one it can do nothing.

DO $do$
DECLARE
    named  text := coalesce(nullif(current_setting('workflow.roles', true), ''), 'workflow');
    here   regnamespace := quote_ident(current_schema())::regnamespace;
    own    text := named || '_owner';
    engine text := named || '_engine';
    others text;
    thing  record;
    kind   text;
    -- Only functions that run with the owner's rights call these.
    internal text[] := '{workflow_behalf, workflow_console, workflow_for_others, workflow_earlier, workflow_try, workflow_take_back, workflow_works, workflow_isolate, workflow_put_back, workflow_bound_prefixes, workflow_binding_of, workflow_narrow, workflow_lanes, workflow_due_types, workflow_due, workflow_expired,
        workflow_as_worker, workflow_worker_name, workflow_unrecorded, workflow_remedy, workflow_is_cancel, outbox_setting, workflow_beside, workflow_most, workflow_backoff,
        workflow_handed,
        workflow_leased_ahead, workflow_begun_or_never,
        workflow_dead_letter,
        process_groups_of, process_task_own, process_task_hand,
        workflow_incident, workflow_incident_over, workflow_incident_end, workflow_kept_forget, outbox_mend_lanes,
        workflow_retention_of, workflow_retention_where, workflow_retention_mine,
        process_give, process_give_all, process_waited, process_gives, process_wait_version, process_wait_problem, process_try_give, process_owe, workflow_anywhere, workflow_aside_some, workflow_aside_turn}';
    -- Of migrations, and of the owner who repeats a step of one.
    migrating text[] := '{workflow_mend_v1, workflow_add_bounds_v1, workflow_validate_bounds_v1}';
BEGIN
    PERFORM set_config('search_path', here::text || ', pg_temp', true), set_config('lock_timeout', '5s', true);
    IF to_regproc('workflow_functions') IS NULL THEN
        RAISE EXCEPTION 'schema % has not got the tables of this version', here USING HINT = 'Run workflowctl migrate up first.';
    END IF;
    FOREACH kind IN ARRAY ARRAY['owner', 'enqueue', 'worker', 'engine', 'dispatcher', 'operator', 'viewer', 'console', 'tasks'] LOOP
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', named || '_' || kind);
        EXCEPTION WHEN duplicate_object OR unique_violation THEN -- it is there
        END;
    END LOOP;

    -- Who migrates, and who has owned it so far, goes on to be able to.
    FOR thing IN
        SELECT r.rolname AS name FROM pg_roles r
        WHERE NOT r.rolsuper AND r.rolname <> own
          AND (r.rolname = current_user OR r.oid IN (SELECT c.relowner FROM pg_class c WHERE c.oid IN (SELECT workflow_relations())))
    LOOP
        IF current_setting('server_version_num')::int >= 160000 THEN -- whoever has created a role has not got what it may
            EXECUTE format('GRANT %I TO %I WITH INHERIT TRUE, SET TRUE', own, thing.name);
        ELSIF NOT pg_has_role(thing.name, own, 'USAGE') THEN
            EXECUTE format('GRANT %I TO %I', own, thing.name);
        END IF;
    END LOOP;

    -- Functions that run with the owner's rights look names up here: nobody else may create any.
    EXECUTE format('GRANT CREATE, USAGE ON SCHEMA %s TO %I', here, own);
    IF (SELECT bool_or(a.grantee = 0 AND a.privilege_type = 'CREATE') FROM pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a WHERE n.oid = here) THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %s FROM PUBLIC', here);
    END IF;
    SELECT string_agg(quote_ident(r.rolname), ', ') INTO others FROM pg_roles r
    WHERE has_schema_privilege(r.oid, here, 'CREATE') AND NOT r.rolsuper AND NOT pg_has_role(r.oid, own, 'USAGE') AND r.rolname <> 'pg_database_owner';
    IF others IS NOT NULL THEN
        RAISE EXCEPTION '% may create objects in schema %, and could take over what runs with the owner''s rights', others, here
            USING HINT = format('REVOKE CREATE ON SCHEMA %s FROM %s (who owns a schema, or the database of schema public, may create there); or use a schema of its own: workflowctl migrate up --schema workflow.', here, others);
    END IF;
    EXECUTE (SELECT string_agg(format('GRANT USAGE ON SCHEMA %s TO %I', here, named || '_' || k), '; ')
             FROM unnest('{enqueue,worker,engine,dispatcher,operator,viewer,console,tasks}'::text[]) AS k);

    FOR thing IN
        SELECT c.oid::regclass::text AS name, CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END AS what, c.relowner <> o.oid AS foreign_owned
        FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours JOIN pg_roles o ON o.rolname = own
    LOOP
        IF thing.foreign_owned THEN
            EXECUTE format('ALTER %s %s OWNER TO %I', thing.what, thing.name, own);
        END IF;
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', thing.name);
        EXECUTE format('GRANT SELECT ON %s TO %I, %I', thing.name, named || '_operator', engine);
        IF thing.what = 'TABLE' AND thing.name NOT IN ('workflow_schema', 'workflow_override', 'workflow_set_aside', 'workflow_binding', 'workflow_console_role', 'outbox_aggregate', 'outbox_replayed', 'workflow_fault', 'workflow_kept', 'workflow_policy',
            'workflow_retention', 'workflow_retention_turn',
            'workflow_accepted',
            'workflow_begun',
            'workflow_outage',
            'workflow_policy_history',
            'workflow_member',
            'workflow_minute') THEN
            EXECUTE format('GRANT INSERT, DELETE ON %s TO %I', thing.name, engine);
            IF thing.name NOT IN ('workflow_history', 'process_event', 'process_state_history', 'process_correction') THEN
                EXECUTE format('GRANT UPDATE ON %s TO %I', thing.name, engine); -- what has happened is not changed
            END IF;
        END IF;
    END LOOP;
    FOR thing IN
        SELECT p.oid::regprocedure::text AS name, p.prorettype = 'trigger'::regtype AS on_trigger, p.proname ~ '^workflow_.*_v\d+$' AS for_workers, p.proowner <> o.oid AS foreign_owned,
               p.proname = ANY (internal || migrating) AS internal
        FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours JOIN pg_roles o ON o.rolname = own
    LOOP
        IF thing.foreign_owned THEN
            EXECUTE format('ALTER FUNCTION %s OWNER TO %I', thing.name, own);
        END IF;
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', thing.name);
        IF thing.for_workers AND NOT thing.internal THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I, %I', thing.name, named || '_worker', engine);
        ELSIF NOT thing.on_trigger AND NOT thing.internal THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I, %I', thing.name, named || '_operator', engine);
        END IF;
    END LOOP;

    -- What guards and defaults ask, whoever makes the statement.
    EXECUTE (SELECT string_agg(format('GRANT EXECUTE ON FUNCTION workflow_role(), workflow_actor(), workflow_for_others(text), workflow_console(text), workflow_at_work(), workflow_overrides(text, text, jsonb) TO %I', named || '_' || k), '; ')
             FROM unnest('{enqueue,worker,engine,dispatcher,operator,viewer,console}'::text[]) AS k);

    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_earlier(text, jsonb) TO %I', engine); -- for guards

    -- What the programs look at when they start.
    EXECUTE format('GRANT SELECT ON workflow_schema TO %I, %I, %I, %I', named || '_enqueue', named || '_worker', named || '_dispatcher', named || '_viewer');

    EXECUTE format('GRANT INSERT (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata, tenant_id), SELECT (id) ON workflow_run TO %I', named || '_enqueue');
    EXECUTE format('GRANT INSERT (id, process_definition_id, status, tenant_id, priority, input_payload, metadata, version) ON process_instance TO %I', named || '_enqueue'); -- which starts it
    EXECUTE format('REVOKE INSERT ON outbox_event FROM %I, %I, %I', named || '_enqueue', named || '_worker', engine); -- they have outbox_append_v1
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_uuid() TO %I, %I', named || '_enqueue', named || '_worker');
    EXECUTE (SELECT format('GRANT EXECUTE ON FUNCTION %s TO %I', string_agg(p.oid::regprocedure::text, ', '), named || '_enqueue') -- an insert of a run calls them
             FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proname IN ('workflow_run_is_new', 'workflow_run_refuse_insert', 'workflow_run_refuse_reserved'));
    FOR thing IN SELECT p.oid::regprocedure::text AS name FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours
                 WHERE p.proname IN ('workflow_enqueue', 'workflow_enqueue_once', 'outbox_emit') LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', thing.name, named || '_enqueue');
    END LOOP;
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_complete(uuid, uuid, jsonb, jsonb, text) TO %I, %I', named || '_enqueue', named || '_worker'); -- the token says what of
    FOR thing IN SELECT p.oid::regprocedure::text AS name FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proname = 'outbox_append_v1' LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I, %I', thing.name, named || '_enqueue', named || '_worker'); -- which judges who calls
    END LOOP;
    EXECUTE format('GRANT %I TO %I, %I', named || '_enqueue', engine, named || '_operator');

    -- Workers act by functions, and may update nothing (they might, before); of what they see, tokens are no part: with these they could act for others.
    EXECUTE format('REVOKE ALL ON workflow_run, workflow_history, workflow_worker FROM %I', named || '_worker');
    EXECUTE format('REVOKE SELECT (lease_token, settled_token), UPDATE (status, result, error, last_error, attempt, max_attempts, postponed, suspect, run_at, started_at, deadline_at, finished_at,
                        lease_until, lease_token, lease_no, leased_by, settled_token, settled_by, updated_at) ON workflow_run FROM %I', named || '_worker');
    EXECUTE format('REVOKE INSERT (workflow_id, created_at, started_at, lease_no, attempt, event_type, actor, leased_by, data) ON workflow_history FROM %I', named || '_worker');
    EXECUTE format('GRANT SELECT (%s) ON workflow_run TO %I', (
        SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = 'workflow_run'::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attname NOT IN ('lease_token', 'settled_token')), named || '_worker');
    EXECUTE format('GRANT SELECT ON workflow_worker, workflow_binding TO %I', named || '_worker');
    EXECUTE format('GRANT SELECT ON workflow_pause TO %I', named || '_worker');

    EXECUTE format('GRANT SELECT, UPDATE (published_at, parked_at, delivered_to, parked_by) ON outbox_event TO %I', named || '_dispatcher');
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_sink, outbox_lane, outbox_delivery TO %I', named || '_dispatcher');
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_wants(text[], text), outbox_last_id_v1(), outbox_set_right_v1(text), workflow_fault_v1(text, text, text) TO %I', named || '_dispatcher');

    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_stalled_types(text[]) TO %I, %I', named || '_operator', named || '_viewer'); -- for views
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_out_of_bounds(text, integer) TO %I, %I', named || '_operator', named || '_viewer'); -- it tells no payload
    EXECUTE format('GRANT SELECT ON workflow_stalled, workflow_unleasable, workflow_policy, workflow_bound, workflow_bound_rule, workflow_bound_check TO %I', named || '_viewer');
    EXECUTE format('GRANT SELECT ON workflow_retention, workflow_retention_turn TO %I', named || '_viewer');
    EXECUTE format('GRANT SELECT ON workflow_breaker TO %I', named || '_viewer');
    EXECUTE format('GRANT SELECT (statement, role, sqlstate, since, seen_at) ON workflow_fault TO %I', named || '_viewer'); -- and not the words, which may quote a row
    EXECUTE format('GRANT SELECT ON workflow_minute, workflow_erring, workflow_growing TO %I', named || '_viewer');
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_backlog(text) TO %I', named || '_viewer');
    EXECUTE format('GRANT SELECT ON workflow_policy_history TO %I', named || '_viewer');
    EXECUTE format('GRANT UPDATE (held_at) ON workflow_run TO %I', named || '_operator');
    EXECUTE format('GRANT INSERT ON process_definition TO %I', named || '_operator'); -- workflowctl define

    EXECUTE format('GRANT SELECT ON workflow_overview, process_overview, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
                        workflow_rate, workflow_prefix, workflow_live_worker, workflow_blocker, workflow_bloat, outbox_lag, process_stuck, process_duration, process_rate TO %I', named || '_viewer');
    EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_covers(text, text), workflow_policy_of(text), workflow_follows(integer, integer), workflow_span(interval), workflow_age(timestamptz, timestamptz), workflow_relations(), outbox_wants(text[], text), outbox_behind(text) TO %I', named || '_viewer');

    -- Whoever sees a run may tell something of it.
    EXECUTE format('GRANT INSERT (workflow_id, event_type, data) ON workflow_event TO %I, %I, %I', named || '_worker', engine, named || '_operator');

    -- For the people whose tasks they are. The functions tell each of his own alone.
    EXECUTE format('GRANT SELECT ON workflow_schema TO %I', named || '_tasks');
    FOR thing IN SELECT p.oid::regprocedure::text AS name FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours
                 WHERE p.proname IN ('process_tasks', 'process_task_claim', 'process_task_release', 'process_task_complete') LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', thing.name, named || '_tasks');
    END LOOP;

    -- A console is told for whom it acts by each call: see workflow_behalf.
    EXECUTE format('GRANT %I TO %I', named || '_viewer', named || '_console');
    IF NOT EXISTS (SELECT FROM workflow_console_role c WHERE c.role = to_regrole(quote_ident(named || '_console'))) THEN
        PERFORM set_config('workflow.override', format('workflowctl roles: %s is a console', named || '_console'), true);
        INSERT INTO workflow_console_role SELECT to_regrole(quote_ident(named || '_console')) ON CONFLICT DO NOTHING;
        PERFORM set_config('workflow.override', '', true);
    END IF;
    FOR thing IN SELECT p.oid::regprocedure::text AS name FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours
                 WHERE p.proargnames && '{on_behalf_of}' LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', thing.name, named || '_console');
    END LOOP;

    -- Who sees which runs. The owner, and functions that run with its rights, see all.
    FOR thing IN SELECT c.oid::regclass AS name FROM pg_class c
                 WHERE c.oid IN ('workflow_run'::regclass, 'workflow_history'::regclass) AND NOT c.relrowsecurity LOOP
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', thing.name);
    END LOOP;
    FOR thing IN
        SELECT * FROM (VALUES
            ('workflow_run', 'engine', format('TO %I USING (true)', engine)),
            ('workflow_run', 'operator', format('TO %I USING (true)', named || '_operator')),
            ('workflow_history', 'engine', format('TO %I USING (true)', engine)),
            ('workflow_history', 'operator', format('TO %I USING (true)', named || '_operator')),
            -- What acts on processes is for others: see workflow_enqueue_once.
            ('workflow_run', 'enqueue', format($policy$FOR INSERT TO %I WITH CHECK (NOT type ^@ 'graph.'
                OR type IN ('graph.start.v1', 'graph.message.v1', 'graph.signal.v1', 'graph.complete_task.v1'))$policy$, named || '_enqueue')),
            -- For INSERT … RETURNING id. Who is a worker, too, must not see more by it.
            ('workflow_run', 'enqueued', format('FOR SELECT TO %I USING (created_at = now() AND starts_with(created_by, session_user))', named || '_enqueue'))
        ) AS p (on_table, name, rest)
        WHERE NOT EXISTS (SELECT FROM pg_policy x WHERE x.polrelid = p.on_table::regclass AND x.polname = p.name)
    LOOP
        EXECUTE format('CREATE POLICY %I ON %I %s', thing.name, thing.on_table, thing.rest);
    END LOOP;
END
$do$;
