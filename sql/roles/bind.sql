-- Binds a role to prefixes: it leases, reads and settles plain runs of these, and sees no others. See
-- create.sql; `workflowctl roles worker` runs this. Settings: workflow.roles, workflow.bind_role,
-- workflow.bind_prefixes (comma-separated).
DO $do$
DECLARE
    named    text := coalesce(nullif(current_setting('workflow.roles', true), ''), 'workflow');
    bound    text := current_setting('workflow.bind_role');
    prefixes text[] := string_to_array(current_setting('workflow.bind_prefixes'), ',');
    policy   text;
    mine     text;
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true), set_config('lock_timeout', '5s', true);
    IF to_regrole(quote_ident(named || '_worker')) IS NULL THEN
        RAISE EXCEPTION 'there is no role %', named || '_worker' USING HINT = 'Run workflowctl roles first.';
    ELSIF EXISTS (SELECT FROM unnest(prefixes) AS p WHERE p !~ '^([a-z0-9_-]+\.)+$') THEN
        RAISE EXCEPTION 'a prefix ends with a dot, as in billing.: %', prefixes;
    END IF;
    BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', bound);
    EXCEPTION WHEN duplicate_object OR unique_violation THEN -- it is there, and may be one that logs in
    END;
    EXECUTE format('GRANT %I TO %I', named || '_worker', bound);
    policy := 'worker_' || to_regrole(quote_ident(bound))::oid; -- roles can be renamed, and their names be long
    SELECT string_agg(format('type ^@ %L', p), ' OR ' ORDER BY p) INTO mine FROM unnest(prefixes) AS p;
    EXECUTE format('DROP POLICY IF EXISTS %I ON workflow_run', policy);
    EXECUTE format('DROP POLICY IF EXISTS %I ON workflow_history', policy);
    -- Constants, so that it costs no look at another table for each row. Steps of processes need the engine.
    EXECUTE format('CREATE POLICY %I ON workflow_run FOR SELECT TO %I USING (token_id IS NULL AND (%s))', policy, bound, mine);
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard
    INSERT INTO workflow_binding (role, prefixes) VALUES (quote_ident(bound)::regrole, prefixes) -- for functions
    ON CONFLICT (role) DO UPDATE SET prefixes = excluded.prefixes;
    PERFORM set_config('workflow.advance', '', true);
END
$do$;
